"""Matched runs of several mixers: equal FLOPs, the same data in the same order, one process each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import checkpoint, models
from .children import Child, cores, run_children
from .files import make_folder, read_json, write_json
from .mistakes import mistake
from .progress import Board
from .run import RESULT
from .settings import Settings
from .tasks import BYTES
from .trainer import StopRequest
from .worker import SETTINGS

#: which mixers a folder compares
INDEX = "compare.json"
#: models whose FLOPs per token are this close train for the same number of steps, on the same data
_SAME = 0.05
_SMALLER = "lower --dim, --hidden or --slots"


def match_steps(settings: dict[str, Settings], accounts: dict[str, dict[str, Any]]) -> dict[str, Settings]:
    """Give every run the training FLOPs of the first: steps in inverse proportion to FLOPs per token.

    Runs within 5 % of the first keep its steps, and runs that end by the clock keep their seconds.
    """
    first = next(iter(settings))
    matched = {}
    for name, one in settings.items():
        ratio = accounts[first]["flops_per_token"] / accounts[name]["flops_per_token"]
        if one.steps is not None and abs(ratio - 1.0) > _SAME:
            one = dataclasses.replace(one, steps=max(1, round(one.steps * ratio)))
        matched[name] = one
    return matched


def run_side_by_side(
    command: str,
    settings: dict[str, Settings],
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    save_every: int = 0,
) -> tuple[dict[str, dict[str, Any]] | None, int]:
    """Run every mixer of `settings` in its own folder of `out`; return the results and an exit code.

    The results are None when the user stopped the runs (they have saved then).
    """
    children = []
    for name, one in settings.items():
        folder = make_folder(command, "--out", out / name)
        write_json(folder / SETTINGS, one.to_json())
        arguments = ["--save-every", str(save_every)]
        if resume and checkpoint.exists(folder):
            arguments.append("--resume")
        children.append(Child(name, folder, arguments))
    write_json(out / INDEX, {"mixers": list(settings), "task": next(iter(settings.values())).task})
    many = min(cores(), len(children))
    console.print(f"{len(children)} runs, {many} at a time, one thread each, in {out}", markup=False, highlight=False)
    with StopRequest() as stop, Board(list(settings), console) as board:
        finished = run_children(children, board, stop)
    if not finished:
        return None, stop.exit_code
    return {name: read_json(command, out / name / RESULT) for name in settings}, 0


def accounts_of(command: str, settings: dict[str, Settings]) -> dict[str, dict[str, Any]]:
    """Return the FLOP, parameter and state accounting of each run, without its storage; refuse what cannot fit."""
    accounts = {}
    for name, one in settings.items():
        vocab_size = one.keys + one.values if one.task == "recall" else BYTES
        try:
            with torch.device("meta"):
                accounts[name] = models.account(models.build(one, vocab_size), one)
        except RuntimeError as error:  # torch cannot count that many
            raise mistake(command, "sizes", "a model that fits the memory", f"{error!s:.200}", _SMALLER) from error
        # parameter, gradient and two moments, float32
        needed = 16 * sum(accounts[name][part] for part in ("parameters", "memory_parameters", "ngram_parameters"))
        if needed > models.physical_memory():
            got = f"{needed / 2**30:,.0f} GiB of parameters and their optimiser for {name}"
            most = f"at most this machine's {models.physical_memory() / 2**30:,.0f} GiB"
            raise mistake(command, "sizes", most, got, _SMALLER)
    return accounts


def flops_spread(results: dict[str, dict[str, Any]]) -> float:
    """Return by how much the training FLOPs per token of data of the runs differ, as a share of the least."""
    totals = [result["steps"] * result["account"]["flops_per_token"] for result in results.values()]
    return max(totals) / min(totals) - 1.0
