"""``sdm-lite state show``: what a saved state holds, without the model that it is of."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..arrays import widen_bf16
from ..fwpkm_state import FwPKMState
from ..memory_state import files as memory_files
from ..nn import cache_files
from .mistakes import mistake

COMMAND = "state show"
_SHOWN = 5  # slots listed per layer


class SlotUse(NamedTuple):
    """A memory in a file: its layer, configuration and tokens, and per row owned the lane, the slot and its length."""

    layer: int
    config: dict[str, Any]
    tokens: np.ndarray
    lane: np.ndarray
    slots: np.ndarray
    length: np.ndarray

    def most_used(self) -> list[tuple[int, int, int, float]]:
        """Return (head, slot, sequences that own it, longest row): those with most owners first, then the longest.

        A state keeps rows, not how often they were written: a row grows with what was written to it.
        """
        slots = self.config["slots"]
        key = self.lane % self.config["heads"] * slots + self.slots
        unique, place, owners = np.unique(key, return_inverse=True, return_counts=True)
        longest = np.zeros(len(unique))
        np.maximum.at(longest, place.reshape(-1), self.length)
        order = np.lexsort((unique, -longest, -owners))[:_SHOWN]
        return [(*divmod(int(unique[i]), slots), int(owners[i]), float(longest[i])) for i in order]

    def row_bytes(self) -> int:
        """Return the bytes of one row in memory."""
        return self.config["width"] * {"float64": 8, "float32": 4}.get(self.config["dtype"], 2)


def run(options: argparse.Namespace, console: Console) -> int:
    """Print sequences, tokens, rows, slots and fast weights of a file, draw the use of slots; return the exit code."""
    path = Path(options.file)
    tokens, memories, fast = read(path)
    table = Table(title=Text(str(path)), title_justify="left")
    for name in ("sequence", "tokens", *(f"rows owned, layer {one.layer}" for one in memories), "bytes owned"):
        table.add_column(name, justify="right")
    for index, count in enumerate(tokens):
        rows = [int((one.lane // one.config["heads"] == index).sum()) for one in memories]
        owned = sum(n * one.row_bytes() for n, one in zip(rows, memories))
        table.add_row(str(index), f"{count:,}", *(f"{n:,}" for n in rows), f"{owned:,}")
    console.print(table)
    for one in memories:
        config = one.config
        console.print(
            f"layer {one.layer}: {counted(config['heads'], 'head')} of {config['slots']:,} slots of {config['width']}"
            f" {config['dtype']}; rule {config['rule']}",
            highlight=False,
        )
        for head, slot, owners, length in one.most_used():
            line = f"  head {head} slot {slot}: written by {owners} of {len(tokens)}, row of length {length:.4g}"
            console.print(line, highlight=False)
    for layer, state in fast:
        console.print(_fast_line(layer, state), highlight=False)
    if options.plot is not None:
        _plot(Path(options.plot), path, memories)
        console.print(f"wrote {options.plot}", highlight=False, markup=False)
    return 0


def read(path: Path) -> tuple[list[int], list[SlotUse], list[tuple[int, FwPKMState]]]:
    """Return what a file of `HybridState.save` or `MemoryState.save` holds, layers counted from 1.

    That is the tokens of each sequence, the sparse memories, and (layer, state) of the fast-weight memories.
    """
    found = cache_files.format_of(COMMAND, path)
    if found == memory_files.FORMAT:
        contents = memory_files.read(COMMAND, path)
        return contents.tokens.tolist(), [_use(1, contents)], []
    if found != cache_files.FORMAT:
        got = "none" if found is None else repr(found)
        expected, fix = "a saved HybridState or MemoryState", "name a session, or what save() wrote"
        raise mistake(COMMAND, str(path), expected, f"a file of format {got}", fix)
    positions, memories, fast = cache_files.parts_of(COMMAND, path)
    uses = [_use(layer + 1, contents) for layer, contents in memories]
    return positions, uses, [(layer + 1, state) for layer, state in fast]


def counted(count: int, word: str) -> str:
    """Return a number and a word, in the plural where it is not 1."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _fast_line(layer: int, state: FwPKMState) -> str:
    """Return what a line says of a layer's fast weights."""
    (heads, *_), (slots, width) = state.lane_shapes()
    size = state.nbytes()
    position = state.position
    seen = ", ".join(f"{int(count):,}" for count in np.atleast_1d(np.asarray(position)))
    return (
        f"layer {layer}: fast weights, {counted(heads, 'head')}, {slots:,} slots of {width}; tokens {seen};"
        f" {size.owned:,} bytes owned, {size.shared:,} of the start"
    )


def _use(layer: int, contents: memory_files.Contents) -> SlotUse:
    rows = contents.rows
    if rows.dtype == np.uint16:
        rows = widen_bf16(rows)
    lengths = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    lane, slots = contents.lane, contents.slots
    return SlotUse(layer, contents.configuration, contents.tokens, lane, slots, lengths[contents.row])


def _plot(target: Path, source: Path, memories: list[SlotUse]) -> None:
    from . import plots

    if not memories:
        raise mistake(COMMAND, "--plot", "a state with sparse memories", f"none in {source}", "leave it out")
    if not target.parent.is_dir():
        raise mistake(COMMAND, "--plot", "a folder to write to", str(target.parent), "name another place")
    caption = "Each point is a row that a sequence owns; its height is the length of the row."
    plots.slots_picture(target, {f"layer {one.layer}": (one.slots, one.length) for one in memories}, caption)
