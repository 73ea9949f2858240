"""Which row holds a slot: the index of a state's lanes, a hash table each (cpu/overlay.py has its kernels)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..cpu import overlay
from ..errors import StateFull, ValueRangeError, message
from .pool import RowPool

ROW = 1  # column of an index table that names the row


class Index(NamedTuple):
    """Which row holds a slot, per lane; as in cpu/overlay.py."""

    table: np.ndarray  # int32 [L, C, 2]
    filled: np.ndarray  # int64 [L]


def empty_index(op: str, lanes: int) -> Index:
    """Return the index of lanes that own nothing, or raise StateFull."""
    with enough_memory(op):
        return Index(np.full((lanes, overlay.SMALLEST, 2), -1, np.int32), np.zeros(lanes, np.int64))


def entries(index: Index) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (lane, slot, row) of every row owned, by lane and slot."""
    lane, place = np.nonzero(index.table[:, :, ROW] >= 0)
    slot, row = index.table[lane, place].T
    order = np.lexsort((slot, lane))
    return lane[order], slot[order], row[order].astype(np.int64)


def copied(index: Index, sources: np.ndarray, heads: int, pool: RowPool) -> Index:
    """Return the index of the sequences named, -1 for a fresh one, with a reference to each row."""
    lanes = (sources[:, None] * heads + np.arange(heads)).ravel()
    new = Index(index.table[lanes], index.filled[lanes])
    fresh = np.repeat(sources < 0, heads)
    new.table[fresh], new.filled[fresh] = -1, 0
    pool.hold(new.table, ROW)
    return new


def check_lanes(op: str, name: str, batch: int, heads: int) -> None:
    """Raise where int32, which records name lanes by, cannot count the lanes."""
    if batch * heads >= 2**31:
        got = f"{batch} sequences of {heads} heads"
        raise ValueRangeError(message(op, name, "fewer than 2^31 sequences x heads", got, "use fewer sequences"))


@contextlib.contextmanager
def enough_memory(op: str) -> Iterator[None]:
    """Raise StateFull where the machine has no memory for an index."""
    try:
        yield
    except StateFull:
        raise
    except MemoryError as error:
        expected, fix = "memory for the index of all sequences", "use fewer sequences"
        raise StateFull(message(op, "state", expected, str(error) or "none left", fix)) from error
