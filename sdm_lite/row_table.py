"""A table of rows that is shared until it is written: the written rows lie beside it.

A `RowTable` reads from a base, an array [S, D] or another table, except for the rows it owns. So a copy costs
the rows that were written and four bytes per slot, whatever the base holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class RowTable:
    """Rows [S, D] over a base that others may share.

    Parameters
    ----------
    base : array [S, D] or RowTable
        Never written unless `exclusive`.
    exclusive : bool
        Whether this table alone reads `base`, an array: writes then go there.

    Examples
    --------
    >>> base = np.zeros((3, 1))
    >>> table = RowTable(base)
    >>> table.put(np.array([1]), np.array([[5.0]]))
    >>> table.gather(np.array([0, 1])).ravel().tolist(), base.ravel().tolist()
    ([0.0, 5.0], [0.0, 0.0, 0.0])
    """

    def __init__(self, base: np.ndarray | RowTable, *, exclusive: bool = False):
        self.base: Any = base
        self.exclusive = exclusive
        self.shape: tuple[int, int] = base.shape
        self.dtype: np.dtype = base.dtype
        self._place: np.ndarray | None = None  # int32 [S]: the owned row of a slot, or -1
        self._owned = np.empty((0, self.shape[1]), self.dtype)
        self._slots = np.empty(0, np.int32)  # of the owned rows

    def owned(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the owned rows' slots [U] and the rows [U, D]; to be read only."""
        return self._slots, self._owned[: len(self._slots)]

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return base [S, D], place int32 [S] (empty where nothing is owned) and owned rows, for `from_parts`."""
        place = np.empty(0, np.int32) if self._place is None else self._place
        return self.base, place, self._owned

    @classmethod
    def from_parts(cls, base: np.ndarray, place: np.ndarray, owned: np.ndarray) -> RowTable:
        """Return a table for reading alone, from another's parts."""
        table = cls(base)
        if len(place):
            table._place, table._owned = place, owned
        return table

    def gather(self, slots: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the rows of `slots` [U]."""
        rows = np.empty((len(slots), self.shape[1]), self.dtype) if out is None else out
        if isinstance(self.base, np.ndarray):
            np.take(self.base, slots, axis=0, out=rows, mode="clip")
        else:
            self.base.gather(slots, rows)
        if self._place is not None:
            place = self._place[slots]
            mine = np.flatnonzero(place >= 0)
            rows[mine] = self._owned[place[mine]]
        return rows

    def put(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Set the rows of the distinct `slots` [U]."""
        if self.exclusive and isinstance(self.base, np.ndarray):
            self.base[slots] = rows
            return
        if self._place is None:
            self._place = np.full(self.shape[0], -1, np.int32)
        fresh = slots[self._place[slots] < 0]
        count = len(self._slots)
        if count + len(fresh) > len(self._owned):
            grown = np.empty((max(2 * len(self._owned), count + len(fresh)), self.shape[1]), self.dtype)
            grown[:count] = self._owned[:count]
            self._owned = grown
        self._place[fresh] = np.arange(count, count + len(fresh), dtype=np.int32)
        self._slots = np.concatenate([self._slots, fresh.astype(np.int32)])
        self._owned[self._place[slots]] = rows

    def settle(self) -> RowTable:
        """Return this table, or an exclusive one of the same rows where it owns most of them anyway."""
        return self if 2 * len(self._slots) <= self.shape[0] else RowTable(self.dense(), exclusive=True)

    def fork(self) -> RowTable:
        """Return a table with the same rows; from now on neither writes the base."""
        self.exclusive = False
        other = RowTable(self.base)
        other._place = None if self._place is None else self._place.copy()
        slots, rows = self.owned()
        other._slots, other._owned = slots.copy(), rows.copy()
        return other

    def dense(self) -> np.ndarray:
        """Return a copy of all rows, [S, D]."""
        rows = self.base.copy() if isinstance(self.base, np.ndarray) else self.base.dense()
        slots, owned = self.owned()
        rows[slots] = owned
        return rows

    def nbytes(self) -> int:
        """Return the bytes that are this table's alone."""
        place = 0 if self._place is None else self._place.nbytes
        own_base = self.base.nbytes if self.exclusive and isinstance(self.base, np.ndarray) else 0
        return self._owned.nbytes + self._slots.nbytes + place + own_base
