"""``sdm-lite recall``: how many key-value pairs each mixer learns to remember, from scratch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from . import checkpoint, plots, tables
from .files import make_folder
from .settings import RECALL_PRESETS, Settings
from .side_by_side import accounts_of, flops_spread, match_steps, run_side_by_side
from .train import check_resumable, choose_folder, parse_mixers, say, settings_for

COMMAND = "recall"
PICTURE = "recall.png"
OPTIONS = "steps seconds seed slots writes reads key_dim learning_rate pairs".split()


def run(options: argparse.Namespace, console: Console) -> int:
    """Train the mixers that the options ask for side by side; return the exit code."""
    out, _ = choose_folder(COMMAND, options)
    results, code = measure(options, out, console)
    if results is not None:
        tables.show_recall(console, results)
        say(console, f"picture: {out / PICTURE}")
        say(console, caption_for(results))
    return code


def measure(options: argparse.Namespace, out: Path, console: Console) -> tuple[dict[str, dict[str, Any]] | None, int]:
    """Train, draw; return the results by mixer (None when the user stopped it) and an exit code."""
    given = {name: getattr(options, name) for name in OPTIONS if getattr(options, name, None) is not None}
    if "pairs" in given:
        # one number more than was trained on, as far as there are keys
        given["eval_pairs"] = tuple(sorted({*given["pairs"], min(2 * max(given["pairs"]), Settings.keys)}))
    resume = getattr(options, "resume", None) is not None
    preset = options.preset or "demo"
    settings = {}
    stored = False
    for name in parse_mixers(COMMAND, "--mixers", options.mixers):
        there = resume and checkpoint.exists(out / name)
        stored = stored or there
        wanted = {**given, "mixer": name}
        settings[name] = settings_for(COMMAND, RECALL_PRESETS, preset, options.preset, wanted, out / name, there)
    check_resumable(COMMAND, out, resume, stored)
    accounts = accounts_of(COMMAND, settings)
    if "steps" in given or not stored:  # a resumed run's own steps are matched already
        settings = match_steps(settings, accounts)
    make_folder(COMMAND, "--out", out)
    tables.show_accounts(console, accounts, {name: one.steps for name, one in settings.items()})
    results, code = run_side_by_side(COMMAND, settings, out, console, resume=resume)
    if results is None:
        say(console, f"stopped and saved; sdm-lite recall --resume {out} continues")
        return None, code
    draw(out, results)
    return results, 0


def draw(out: Path, results: dict[str, dict[str, Any]]) -> None:
    """Draw the accuracies of `results` into `out`."""
    first = next(iter(results.values()))
    curves = {
        f"{name} (state {result['account']['state_elements']:,})": result["accuracy"]
        for name, result in results.items()
    }
    trained = max(first["settings"]["pairs"])
    plots.recall_picture(out / PICTURE, curves, trained, first["chance"], caption_for(results))


def caption_for(results: dict[str, dict[str, Any]]) -> str:
    """Return what was compared: FLOPs, steps, state sizes; nothing about who wins, which the numbers say."""
    first = next(iter(results.values()))
    caption = f"Trained from scratch for {first['steps']} steps, seed {first['settings']['seed']}."
    if len(results) > 1:
        states = {name: result["account"]["state_elements"] for name, result in results.items()}
        most, least = max(states, key=states.__getitem__), min(states, key=states.__getitem__)
        caption += f" Equal FLOPs (within {100 * flops_spread(results):.1f} %), unequal state: "
        if states[least]:
            caption += f"{most} keeps {states[most] / states[least]:.3g} times what {least} keeps."
        else:
            caption += f"{most} keeps {states[most]:,} elements, {least} none."
    return caption
