"""Shared memory of the sparse delta kernels, in bytes: how much of a block's a choice of tile and budgets takes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LOG_STORAGE", "DeltaShape", "backward_bytes", "decode_bytes", "forward_bytes", "log_pitch", "log_scales"]

#: numbers of the storages in delta_log.cuh, and their bits per column (None: the state's own)
LOG_STORAGE = {None: (0, None), "bf16": (1, 16), "fp8": (2, 8), "int4": (3, 4), "fp16": (4, 16)}
SCALED_COLUMNS = 32
ENTRY_BYTES = 8


class DeltaShape(NamedTuple):
    """What the shared memory of a sparse delta launch depends on.

    `decays` is A: 1 or W. `log_bits` is the bits per column of logged rows, None where nothing is logged.
    """

    tile: int
    state_bytes: int
    real_bytes: int
    writes: int
    reads: int
    decays: int
    row_budget: int
    token_budget: int
    log_bits: int | None = None

    def array(self, size: int) -> int:
        """Return the bytes that one array of `size` bytes takes."""
        return _round(size)

    def parts(self) -> int:
        """Return the bytes of one array of sums by groups."""
        return self.array((4 if self.tile == 32 else 8) * self.tile * self.real_bytes)

    def tokens(self, *sizes: int) -> int:
        """Return the bytes of the double-buffered inputs that take so many bytes per token each."""
        return 2 * sum(self.array(self.token_budget * _round(size)) for size in sizes)

    def common(self) -> tuple[int, ...]:
        """Return the bytes per token of the inputs that both directions stage."""
        real = self.real_bytes
        places = (2 * self.writes, 2 * self.reads)
        return (*places, real * self.writes, real * self.reads, real * self.decays, real, real * self.tile)


def forward_bytes(shape: DeltaShape) -> int:
    """Return the shared bytes of a block of sparse_delta_forward.

    >>> forward_bytes(DeltaShape(32, 2, 4, 64, 64, 1, row_budget=512, token_budget=4))
    86272
    """
    rows = 2 * shape.array(shape.row_budget * shape.tile * shape.state_bytes)
    lists = 3 * shape.array(-(-shape.row_budget // 2) * 2 * ENTRY_BYTES)
    log = 0 if shape.log_bits is None else 4 * shape.writes
    return rows + lists + shape.tokens(*shape.common(), log) + 2 * shape.parts()


def backward_bytes(shape: DeltaShape, *, per_slot: bool) -> int:
    """Return the shared bytes of a block of sparse_delta_backward."""
    real = shape.real_bytes
    rows = 2 * (
        shape.array(shape.row_budget * shape.tile * shape.state_bytes)
        + shape.array(shape.row_budget * shape.tile * real)
    )
    lists = 3 * shape.array(-(-shape.row_budget // 2) * 2 * ENTRY_BYTES)
    inverse = real * (shape.writes if per_slot else shape.decays)
    log = (0, 0, 0)
    if shape.log_bits is not None:
        codes = shape.writes * shape.tile * shape.log_bits // 8
        log = (4 * shape.writes, codes, 4 * shape.writes * shape.tile // SCALED_COLUMNS)
    return rows + lists + shape.tokens(*shape.common(), inverse, real * shape.tile, *log) + shape.parts()


def decode_bytes(shape: DeltaShape) -> int:
    """Return the shared bytes of a block of decode_step."""
    return shape.array(shape.real_bytes * shape.decays) + 2 * shape.parts()


def log_pitch(width: int, bits: int) -> int:
    """Return the bytes of one logged row of `width` columns."""
    return _round(-(-width * bits // 8))


def log_scales(width: int) -> int:
    """Return how many scales a logged row has, where its storage has any."""
    return -(-width // SCALED_COLUMNS)


def _round(size: int) -> int:
    return -(-size // 16) * 16
