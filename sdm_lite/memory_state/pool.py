"""The rows that a family of forked states owns: pages of memory, and who holds which row."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

import numpy as np

from ..cpu import memory, overlay
from ..cpu.paged import Paged
from ..errors import StateFull, message
from .initial import Initial

PAGE_BYTES = 1 << 18  # a page has a power of two rows, and about this many bytes
MOST_PAGES = 128  # made at once
_FEWEST_ROWS = 16


class StateBytes(NamedTuple):
    """Bytes of the initial memory, and of the rows that the state and its forks own (each row once)."""

    shared: int
    owned: int


class RowPool:
    """Rows like those of an initial memory, in pages that never move. States in several threads share it under `lock`.

    A state gives back what it holds through :meth:`drop`, which takes no lock and so may run in a collection of
    garbage; the next call that has the lock does the work.
    """

    def __init__(self, initial: Initial, max_bytes: int | None):
        heads, slots, width = initial.shape
        self.width, self.storage, self.max_bytes = width, initial.storage, max_bytes
        self.row_bytes = width * self.storage.itemsize
        wanted = min(PAGE_BYTES // max(self.row_bytes, 1), heads * slots)
        self.page_bits = max(_FEWEST_ROWS, wanted).bit_length() - 1
        self.numbers = overlay.Numbers(
            np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(2, np.int64)
        )
        self.pages: list[np.ndarray] = []
        self._page_at = np.empty(16, np.int64)
        self.clock = 0
        self.lock = threading.Lock()
        self._dropped: collections.deque[tuple[np.ndarray, int]] = collections.deque()
        self._origin = memory.origin(width, self.storage)
        self._rows = np.zeros(width, self.storage) if initial.bits is None else initial.bits  # kept alive
        self._initial = (memory.elements_to(self._rows, self._origin), int(initial.bits is not None))

    def used_bytes(self) -> int:
        """Return the bytes of the rows that somebody holds."""
        free, top = self.numbers.counters
        return int(top - free) * self.row_bytes

    def reserve(self, rows: int) -> None:
        """Make room in the bookkeeping for so many more numbers."""
        wanted = int(self.numbers.counters[overlay.TOP]) + rows
        if wanted > len(self.numbers.refs):
            size = max(wanted, 2 * len(self.numbers.refs))
            grown = [np.empty(size, array.dtype) for array in self.numbers[:3]]
            for new, old in zip(grown, self.numbers):
                new[: len(old)] = old
            self.numbers = overlay.Numbers(grown[0], grown[1], grown[2], self.numbers.counters)

    def cover(self, op: str) -> None:
        """Make the pages of all numbers given out, or raise StateFull or MemoryError."""
        if self.max_bytes is not None and self.used_bytes() > self.max_bytes:
            expected, got = f"at most max_bytes = {self.max_bytes}", f"{self.used_bytes()} bytes of rows"
            fix = "evict or reset sequences, release marks, or raise max_bytes"
            raise StateFull(message(op, "state", expected, got, fix))
        while len(self.pages) << self.page_bits < self.numbers.counters[overlay.TOP]:
            # as many as there are, side by side: the system backs a large block with huge pages, as it is touched
            count = min(max(len(self.pages), 1), MOST_PAGES)
            block = memory.empty((count, 1 << self.page_bits, self.width), self.storage)
            while len(self.pages) + count > len(self._page_at):  # a larger copy: a kernel may be reading the old one
                self._page_at = np.concatenate([self._page_at, np.empty_like(self._page_at)])
            for page in block:
                self._page_at[len(self.pages)] = memory.elements_to(page, self._origin)
                self.pages.append(page)

    def paged(self) -> Paged:
        """Return where the kernels find the rows of the pool and of the initial memory."""
        return Paged(self._origin, self._page_at, self.page_bits, *self._initial)

    def hold(self, pairs: np.ndarray, column: int) -> None:
        """Count one more reference to each row in a column."""
        overlay.hold(pairs.reshape(-1, pairs.shape[-1]), column, self.numbers)

    def let_go(self, pairs: np.ndarray, column: int) -> None:
        """Count one reference less to each row in a column."""
        overlay.let_go(pairs.reshape(-1, pairs.shape[-1]), column, self.numbers)

    def drop(self, pairs: np.ndarray, column: int) -> None:
        """Let go later, from any thread."""
        self._dropped.append((pairs, column))

    def settle(self) -> None:
        """Do what was put off."""
        while self._dropped:
            self.let_go(*self._dropped.popleft())

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of rows, [n, D] in the storage dtype."""
        out = np.empty((len(rows), self.width), self.storage)
        for page, there, within in self._by_page(rows):
            out[there] = page[within]
        return out

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Set rows that nobody else holds."""
        for page, there, within in self._by_page(rows):
            page[within] = values[there]

    def _by_page(self, rows: np.ndarray):
        order = np.argsort(rows, kind="stable")
        page_of = rows[order] >> self.page_bits
        cuts = np.flatnonzero(np.diff(page_of)) + 1
        for there in np.split(order, cuts):
            if len(there):
                yield self.pages[rows[there[0]] >> self.page_bits], there, rows[there] & ((1 << self.page_bits) - 1)
