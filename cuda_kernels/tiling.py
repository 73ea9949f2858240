"""How a staged kernel is cut for a device: columns of a block, rows and tokens that it holds in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .devices import Limits

TILES = (64, 32)
#: tokens whose inputs a block holds at a time; more would take room from the rows and save nothing
TOKENS = (8, 4, 2, 1)
#: what the device keeps for itself of a multiprocessor's shared memory, per resident block
RESERVED = 1 << 10
#: with more rows the walk's first chunk, which nothing hides, grows and the traffic hardly falls
MOST_ROWS = 2048
#: threads that share a multiprocessor: a kernel takes up to 256 registers a thread, of 65,536
_RESIDENT_THREADS = 256


class Tiling(NamedTuple):
    """The choice: a block's columns, its budgets of rows and tokens, and the shared memory that they take."""

    tile: int
    row_budget: int
    token_budget: int
    shared_bytes: int


def choose(
    limits: Limits,
    lanes: int,
    width: int,
    rows_per_token: int,
    shared_bytes: Callable[[int, int, int], int],
    tiles: Sequence[int] = TILES,
    most_rows: int = MOST_ROWS,
) -> Tiling | None:
    """Return how to cut a launch, or None where not even one token's rows fit.

    The widest tile that still gives every multiprocessor a block (wide tiles move rows in longer pieces and read the
    tokens' inputs less often), and then as many rows as fit: what is in flight hides the memory's latency.

    Parameters
    ----------
    limits : Limits
        The device's.
    lanes, width : int
        Sequences times heads, and D.
    rows_per_token : int
        W + R, the least budget of rows.
    shared_bytes : callable (tile, row_budget, token_budget) -> int
        What a block takes: one of :mod:`.shared_memory`'s formulas.
    tiles : sequence of int
        Widths to choose from, widest first; the last is taken whatever the number of blocks.
    most_rows : int
        An upper bound of the budget of rows.

    >>> from .devices import KNOWN
    >>> choose(KNOWN["H200"], 2, 2048, 128, lambda tile, rows, tokens: 2 * 2 * rows * tile + tokens * 4096)
    Tiling(tile=32, row_budget=1560, token_budget=8, shared_bytes=232448)
    """
    for tile in tiles:
        blocks = lanes * -(-width // tile)
        if tile > tiles[-1] and (blocks < limits.multiprocessors or 2 * width <= tile):
            continue
        most = resident(tile) if blocks > limits.multiprocessors else 1
        for sharing in range(most, 0, -1):
            room = min(limits.shared_per_block, limits.shared_per_multiprocessor // sharing - RESERVED)
            for tokens in TOKENS:
                # a budget of several tokens is of use only with rows for as many; the last resort is one token
                least = rows_per_token * min(tokens, 4)
                rows = _most_rows(room, max(most_rows, least), lambda n: shared_bytes(tile, n, tokens))  # noqa: B023
                if rows >= least:
                    return Tiling(tile, rows, tokens, shared_bytes(tile, rows, tokens))
    return None


def resident(tile: int) -> int:
    """Return how many blocks share a multiprocessor where there are enough: one computes while another waits."""
    return max(1, _RESIDENT_THREADS // (4 * tile))


def _most_rows(room: int, most: int, size: Callable[[int], int]) -> int:
    """Return the largest even number of rows up to `most` whose `size` fits, 0 if none does."""
    low, high = 0, most // 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(2 * middle) <= room else (low, middle - 1)
    return 2 * low
