"""``sdm-lite needle``: facts hidden in a haystack, asked for after reading it once to several times.

A haystack is filler with `facts` pairs "key value" at random places. A model reads it, writing its fast weights once
a pass; then it is asked for the keys, in another order, without writing. Beside the fast-weight memory it has only a
convolution over four tokens, so nothing else can bridge the way from a fact to its question.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..nn import HybridLM, HybridState
from . import plots
from .arguments import LARGEST_SEED
from .children import cores
from .files import make_folder, write_json
from .mistakes import mistake
from .models import use_threads
from .notices import compiling_is_said
from .train import say

COMMAND = "needle"
PICTURE, RESULT = "needle.png", "needle.json"
#: what is taken away from the memory, each in a training of its own
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no lookahead": {"lookahead": 0},
    "no gate weighting": {"gated_writes": False},
    "no address loss": {"key_rate": 0.0},
}
#: seed of the haystacks that measure: no training seed shares it
_EVALUATION = 0x5EED


@dataclass(frozen=True)
class NeedleSettings:
    """What a run computes: the task, the model, the training, and how it is measured."""

    haystack: int = 128
    facts: int = 16  # in training
    measured_facts: tuple[int, ...] = (16, 32, 48)
    keys: int = 64
    values: int = 32
    filler: int = 32
    dim: int = 64
    sub_keys: int = 16
    steps: int = 600  # after 300, two of three seeds are still on their way
    batch: int = 8
    learning_rate: float = 1e-2
    warmup: int = 20
    trained_passes: int = 1
    passes: int = 4
    measured: int = 64
    seed: int = 0


#: to see it work: ten seconds of CPU a training
TINY: dict[str, Any] = {
    "haystack": 16,
    "facts": 3,
    "measured_facts": (3, 6),
    "keys": 8,
    "values": 4,
    "filler": 4,
    "dim": 32,
    "sub_keys": 8,
    "steps": 120,
    "measured": 32,
}


PRESETS: dict[str, dict[str, Any]] = {"demo": {}, "tiny": TINY}


def presets() -> dict[str, str]:
    """Return the presets in words."""
    found = {name: NeedleSettings(**values) for name, values in PRESETS.items()}
    return {
        name: f"haystacks of {s.haystack} tokens, {s.facts} facts, {s.sub_keys**2:,} slots, {s.steps} steps"
        for name, s in found.items()
    }


def haystacks(
    settings: NeedleSettings, facts: int, rows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return haystacks [rows, haystack], the questions [rows, facts] and their answers, all token ids.

    Ids are keys, then values, then filler; the keys of a row are distinct, its values need not be.

    >>> hay, asked, answers = haystacks(NeedleSettings(), 16, 1, torch.Generator().manual_seed(0))
    >>> all(answer in hay[0, 1:][hay[0, :-1] == key] for key, answer in zip(asked[0], answers[0]))
    True
    """
    s = settings
    hay = torch.randint(s.keys + s.values, s.keys + s.values + s.filler, (rows, s.haystack), generator=generator)
    places = 2 * torch.rand(rows, s.haystack // 2, generator=generator).argsort(1)[:, :facts]
    keys = torch.rand(rows, s.keys, generator=generator).argsort(1)[:, :facts]
    values = torch.randint(s.keys, s.keys + s.values, (rows, facts), generator=generator)
    hay.scatter_(1, places, keys).scatter_(1, places + 1, values)
    return hay, keys, values  # in an order that says nothing about the places


def build(settings: NeedleSettings, variant: str) -> HybridLM:
    """Return the untrained model of a variant."""
    s = settings
    memory = {
        "sub_keys": s.sub_keys,
        "key_dim": s.dim,
        "value_dim": s.dim,
        "chunk": s.haystack,
        "per_sequence": True,
        **VARIANTS[variant],
    }
    torch.manual_seed(s.seed)
    return HybridLM(
        s.keys + s.values + s.filler,
        s.dim,
        1,
        layers=["conv"],
        memory=["fwpkm@1"],
        options={"fwpkm": memory},
        tie_embeddings=False,
        zero_head=True,
        embedding_std=0.5,
    )


def train(settings: NeedleSettings, variant: str, note: Callable[[int, float], None]) -> HybridLM:
    """Return the trained model: each step reads haystacks once and answers, in one call, through the write."""
    s = settings
    model = build(s, variant).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(s.seed)
    for step in range(s.steps):
        for group in optimizer.param_groups:
            rise, fall = min(1.0, (step + 1) / s.warmup), 0.5 + 0.5 * math.cos(math.pi * step / s.steps)
            group["lr"] = s.learning_rate * rise * fall
        hay, asked, answers = haystacks(s, s.facts, s.batch, generator)
        features, _ = model.features(torch.cat([*[hay] * s.trained_passes, asked], dim=1))
        loss = F.cross_entropy(model.logits(features[:, -s.facts :]).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        note(step + 1, loss.item())
    return model


@torch.no_grad()
def measure(settings: NeedleSettings, model: HybridLM, facts: int) -> list[float]:
    """Return the share of questions answered right after 0, 1, ... `passes` readings of `facts` facts in a haystack."""
    hay, asked, answers = haystacks(settings, facts, settings.measured, torch.Generator().manual_seed(_EVALUATION))
    model.eval()
    state, shares = HybridState(), []
    for reading in range(settings.passes + 1):
        if reading:
            _, state = model(hay, state)
        logits, _ = model(asked, state, update=False)
        shares.append(float((logits.argmax(-1) == answers).double().mean()))
    return shares


def run_variant(settings: NeedleSettings, variant: str) -> dict[str, Any]:
    """Train and measure one variant with one seed, on one thread; return its accuracies and seconds, as JSON."""
    use_threads(1)

    def note(step: int, loss: float) -> None:
        if step % 50 == 0 or step == settings.steps:
            print(f"{variant}, seed {settings.seed}: step {step} of {settings.steps}, loss {loss:.3f}", flush=True)

    started = time.perf_counter()
    with compiling_is_said():
        model = train(settings, variant, note)
    seconds = time.perf_counter() - started
    print(f"{variant}: measuring, {settings.passes} readings of {settings.measured} haystacks", flush=True)
    accuracy = {str(facts): measure(settings, model, facts) for facts in settings.measured_facts}
    return {"accuracy": accuracy, "training_seconds": seconds}


def summary(by_seed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a variant's results as JSON: the mean over the seeds, the least and the most, and each seed's own.

    >>> found = summary({"0": {"accuracy": {"3": [0.0, 0.5]}}, "1": {"accuracy": {"3": [0.5, 1.0]}}})
    >>> found["accuracy"], found["least"], found["most"]
    ({'3': [0.25, 0.75]}, {'3': [0.0, 0.5]}, {'3': [0.5, 1.0]})
    """
    first, *_ = by_seed.values()
    shares = {facts: list(zip(*(one["accuracy"][facts] for one in by_seed.values()))) for facts in first["accuracy"]}
    folds: dict[str, Callable] = {"accuracy": lambda column: sum(column) / len(column), "least": min, "most": max}
    folded = {name: {facts: [fold(c) for c in shares[facts]] for facts in shares} for name, fold in folds.items()}
    return {**folded, "seeds": by_seed}


def run(options: argparse.Namespace, console: Console) -> int:
    """Train and measure the variants asked for, some at a time; draw; return the exit code."""
    settings, variants = _settings(options), _variants(options.variants)
    out = make_folder(COMMAND, "--out", Path(options.out or f"runs/{COMMAND}"))
    seeds = range(settings.seed, settings.seed + options.seeds)
    runs = [(name, seed) for name in variants for seed in seeds]
    jobs = min(options.jobs or cores(), len(runs))
    say(console, f"{len(runs)} trainings, {jobs} at a time, one thread each, in {out}")
    done: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = {(n, seed): pool.submit(run_variant, dataclasses.replace(settings, seed=seed), n) for n, seed in runs}
        for (name, seed), future in found.items():
            done.setdefault(name, {})[str(seed)] = future.result()
            results = {name: summary(by_seed) for name, by_seed in done.items()}
            record = {"settings": dataclasses.asdict(settings), "variants": results, "chance": 1 / settings.values}
            write_json(out / RESULT, record)
    show(console, settings, results)
    most = str(max(settings.measured_facts))
    curves = {name: result["accuracy"][most] for name, result in results.items()}
    ranges = {name: list(zip(one["least"][most], one["most"][most])) for name, one in results.items()}
    caption = f"Haystacks with {most} facts. {caption_for(settings, results)}"
    plots.needle_picture(out / PICTURE, curves, ranges, 1 / settings.values, caption)
    say(console, f"picture: {out / PICTURE}")
    return 0


def show(console: Console, settings: NeedleSettings, results: dict[str, Any]) -> None:
    """Print the accuracy by the number of readings; of several seeds the mean, the least and the most."""
    table = Table(title="Needles found, by readings of the haystack", title_justify="left")
    several = max(len(result["seeds"]) for result in results.values()) > 1
    rows = {"mean": "accuracy", "least": "least", "most": "most"} if several else {"": "accuracy"}
    table.add_column("memory")
    table.add_column("facts", justify="right")
    if several:
        table.add_column("seeds")
    for reading in range(settings.passes + 1):
        table.add_column(str(reading), justify="right")
    for name, result in results.items():
        for facts in result["accuracy"]:
            for label, kind in rows.items():
                head = (name, facts, label) if several else (name, facts)
                table.add_row(*head, *(f"{share:.3f}" for share in result[kind][facts]))
    console.print(table)
    say(console, caption_for(settings, results))


def caption_for(settings: NeedleSettings, results: dict[str, Any]) -> str:
    """Return what was trained and measured."""
    s = settings
    seeds = [int(seed) for seed in next(iter(results.values()))["seeds"]]
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean and range of seeds {seeds[0]} to {seeds[-1]}"
    return (
        f"{s.haystack} tokens, {s.sub_keys**2} slots; trained from scratch on {s.facts} facts for {s.steps} steps with "
        f"{s.trained_passes} reading(s), {drawn}; {s.measured} haystacks. Chance is {1 / s.values:.3f}."
    )


def _settings(options: argparse.Namespace) -> NeedleSettings:
    if options.preset not in PRESETS:
        raise mistake(COMMAND, "--preset", " or ".join(PRESETS), repr(options.preset), "name one of these")
    names = ("steps", "seed", "facts", "haystack", "sub_keys", "trained_passes", "passes", "learning_rate")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = NeedleSettings(**{**PRESETS[options.preset], **given})
    most = min(settings.haystack // 2, settings.keys)
    if settings.facts > most:
        expected = f"at most {most}, half the haystack and the number of keys"
        raise mistake(COMMAND, "--facts", expected, str(settings.facts), "ask for fewer")
    # what was trained, and up to three times as much
    measured = sorted({min(times * settings.facts, most) for times in (1, 2, 3)})
    settings = dataclasses.replace(settings, measured_facts=tuple(measured))
    last = LARGEST_SEED + 1 - options.seeds
    if not 0 <= settings.seed <= last:
        raise mistake(COMMAND, "--seed", f"0 to {last}", str(settings.seed), "pass another number")
    if _EVALUATION - options.seeds < settings.seed <= _EVALUATION:
        expected = f"no training seed of {_EVALUATION}, which measures"
        raise mistake(COMMAND, "--seed", expected, str(settings.seed), "pass another number")
    if not settings.learning_rate > 0:
        raise mistake(COMMAND, "--learning-rate", "more than 0", str(settings.learning_rate), "pass a larger number")
    return settings


def _variants(text: str | None) -> list[str]:
    names = [name.strip() for name in (text or ",".join(VARIANTS)).split(",")]
    for name in names:
        if name not in VARIANTS or names.count(name) > 1:
            raise mistake(COMMAND, "--variants", f"some of {', '.join(VARIANTS)}", repr(name), "name each once")
    return names
