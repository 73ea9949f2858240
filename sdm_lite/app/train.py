"""``sdm-lite train``: a language model on bytes of text or code, or several under equal FLOPs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from . import checkpoint, models, plots, tables
from .files import make_folder, read_json
from .mistakes import mistake
from .notices import expectation
from .progress import Board
from .run import build_task, run_one
from .settings import ENDS, MIXERS, TRAIN_PRESETS, Settings, choose, resume_settings
from .side_by_side import INDEX, accounts_of, flops_spread, match_steps, run_side_by_side
from .trainer import METRICS, StopRequest, read_metrics

COMMAND = "train"
LOSS_PICTURE, POSITION_PICTURE = "loss.png", "perplexity_by_position.png"
#: options that are settings, under the same name
OPTIONS = (
    "mixer data steps seconds seed dim length batch slots writes reads learning_rate muon_rate window hidden"
    " memory sub_keys memory_chunk".split()
)


def run(options: argparse.Namespace, console: Console) -> int:
    """Train what the options ask for; return the exit code."""
    given = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    if "memory" in given:
        given["memory"] = tuple(given["memory"])
    if given.get("data") is not None:
        given["data"] = os.path.abspath(given["data"])  # a resumed run may start in another folder
    out, resume = choose_folder(COMMAND, options)
    mixers = parse_mixers(COMMAND, "--compare", options.compare) if options.compare else _compared(out, resume)
    if not mixers:
        return _train_one(options, given, out, resume, console)
    if "mixer" in given:
        raise mistake(COMMAND, "--mixer", "none beside --compare", given["mixer"], "leave one of them out")
    results, code = compare(options, given, mixers, out, resume, console)
    if results is not None:
        tables.show_text(console, results)
        for name, result in results.items():
            say(console, f"{name}, {expectation(result)}")
    return code


def _train_one(options: argparse.Namespace, given: dict[str, Any], out: Path, resume: bool, console: Console) -> int:
    settings = settings_for(COMMAND, TRAIN_PRESETS, options.preset or "small", options.preset, given, out, resume)
    task = build_task(COMMAND, settings)
    account = accounts_of(COMMAND, {settings.mixer: settings})[settings.mixer]
    make_folder(COMMAND, "--out", out)
    models.use_threads(options.threads)
    tables.show_accounts(console, {settings.mixer: account}, {settings.mixer: settings.steps})
    with StopRequest() as stop, Board([settings.mixer], console) as board:
        result = run_one(COMMAND, task, out, board, stop, resume=resume, save_every=options.save_every)
    if result is None:
        say(console, f"stopped and saved; sdm-lite train --resume {out} continues")
        return stop.exit_code
    results = {settings.mixer: result}
    draw(out, results, {settings.mixer: out})
    tables.show_text(console, results)
    say(console, f"pictures: {out / LOSS_PICTURE}, {out / POSITION_PICTURE}")
    say(console, expectation(result))
    say(console, f"next: sdm-lite generate --checkpoint {out} --prompt 'def main('")
    return 0


def compare(
    options: argparse.Namespace,
    given: dict[str, Any],
    mixers: list[str],
    out: Path,
    resume: bool,
    console: Console,
) -> tuple[dict[str, dict[str, Any]] | None, int]:
    """Train `mixers` side by side under equal FLOPs; draw; return the results (None when stopped) and a code."""
    stored = {name: resume and checkpoint.exists(out / name) for name in mixers}
    check_resumable(COMMAND, out, resume, any(stored.values()))
    settings = {}
    for name in mixers:
        preset = options.preset or "small"
        wanted = {**given, "mixer": name}
        folder = out / name
        settings[name] = settings_for(COMMAND, TRAIN_PRESETS, preset, options.preset, wanted, folder, stored[name])
    build_task(COMMAND, next(iter(settings.values())))  # a data mistake shows here, before any process starts
    accounts = accounts_of(COMMAND, settings)
    if "steps" in given or not any(stored.values()):  # a resumed run's own steps are matched already
        settings = match_steps(settings, accounts)
    tables.show_accounts(console, accounts, {name: one.steps for name, one in settings.items()})
    make_folder(COMMAND, "--out", out)
    results, code = run_side_by_side(COMMAND, settings, out, console, resume=resume, save_every=options.save_every)
    if results is None:
        say(console, f"stopped and saved; sdm-lite train --resume {out} continues")
        return None, code
    draw(out, results, {name: out / name for name in results})
    say(console, f"pictures: {out / LOSS_PICTURE}, {out / POSITION_PICTURE}")
    return results, 0


def draw(out: Path, results: dict[str, dict[str, Any]], folders: dict[str, Path]) -> None:
    """Draw the loss and the perplexity by position of `results` into `out`."""
    trained = next(iter(results.values()))["settings"]["length"]
    caption = caption_for(results)
    metrics = {name: read_metrics(folder / METRICS) for name, folder in folders.items()}
    plots.loss_picture(out / LOSS_PICTURE, metrics, "nats per byte", caption)
    rows = {name: result["by_position"] for name, result in results.items()}
    plots.position_picture(out / POSITION_PICTURE, rows, trained, caption + POSITION_NOTE)


#: true whatever was trained: a memoryless model shows the same fall
POSITION_NOTE = " A falling curve is no sign of long memory: files get easier after their first lines."


def caption_for(results: dict[str, dict[str, Any]]) -> str:
    """Return what can be said of `results`: how much was trained, and for several, how far they lie apart."""
    first = next(iter(results.values()))
    settings = first["settings"]
    tokens = first["steps"] * settings["length"] * settings["batch"]
    caption = f"{tokens / 1e3:,.0f}k bytes of training, windows of {settings['length']}, seed {settings['seed']}."
    if len(results) > 1:
        bits = [result["bits_per_byte"] for result in results.values()]
        caption += f" Equal FLOPs (within {100 * flops_spread(results):.1f} %);"
        caption += f" held-out bits per byte lie within {max(bits) - min(bits):.3f}."
    return caption


def choose_folder(command: str, options: argparse.Namespace) -> tuple[Path, bool]:
    """Return the folder of the run and whether it is resumed; refuse to write over a run by accident."""
    resume = options.resume is not None
    if resume:
        folder = Path(options.resume or options.out or f"runs/{command}")
        if options.resume and options.out and Path(options.out) != folder:
            raise mistake(command, "--out", f"none, or {folder}, with --resume", options.out, "leave --out out")
        if not folder.is_dir():
            raise mistake(command, "--resume", "the folder of a run", f"{folder}, which is not there", "check the path")
        return folder, True
    if options.out is None:
        base = Path("runs")
        numbers = (f"{command}-{number}" if number > 1 else command for number in range(1, 1_000_000))
        return next(base / name for name in numbers if not (base / name).exists()), False
    out = Path(options.out)
    if checkpoint.exists(out) or (out / INDEX).exists():
        raise mistake(command, "--out", "a folder without a run", f"{out}", "pass --resume, or name another folder")
    return out, False


def settings_for(
    command: str,
    presets: dict[str, dict[str, Any]],
    preset: str,
    named: str | None,
    given: dict[str, Any],
    folder: Path,
    resume: bool,
) -> Settings:
    """Return the settings of a new run, or those of the checkpoint in `folder` checked against what was given."""
    fresh = choose(command, presets, preset, given)
    if not resume:
        return fresh
    stored = checkpoint.load(command, folder).record.get("settings", {})
    # a preset that was named again must be the same in all that presets decide
    decided = {name for one in presets.values() for name in one if name not in ENDS} if named else set()
    wanted = {**{name: getattr(fresh, name) for name in decided}, **given}
    return resume_settings(command, stored, wanted)


def parse_mixers(command: str, argument: str, text: str) -> list[str]:
    """Return the mixers named in "a,b"; CommandError for an unknown one or one named twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MIXERS:
            raise mistake(command, argument, f"mixers out of {', '.join(MIXERS)}", repr(name), "name some of these")
    if not names or len(set(names)) != len(names):
        raise mistake(command, argument, "different mixers, with commas between", repr(text), "name each once")
    return names


def check_resumable(command: str, out: Path, resume: bool, stored: bool) -> None:
    """Refuse to resume runs side by side from a folder that holds none of them."""
    if resume and not stored and not (out / INDEX).exists():
        got = f"{out}, which has no run of these mixers side by side"
        raise mistake(command, "--resume", "the folder of such a run", got, "check the path, or start anew with --out")


def _compared(out: Path, resume: bool) -> list[str]:
    """Return the mixers that the run in `out` compares, when it is resumed and compares any."""
    if not resume or checkpoint.exists(out) or not (out / INDEX).exists():
        return []
    names = read_json(COMMAND, out / INDEX).get("mixers")
    return parse_mixers(COMMAND, "--resume", ",".join(map(str, names)) if isinstance(names, list) else "")


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
