"""Random programs of a `MemoryState`'s operations, each run by the state and by the plain model.

The tests draw a few thousand with hypothesis, which shrinks a failure. Very many, by seed, without its overhead::

    python tests/support/state_programs.py 50000
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile

import numpy as np
import pytest
from cases import distinct_slots
from state_model import StateModel

from sdm_lite import MemoryState


class Program:
    """One random program, run by a state and by the model; after every operation they must agree bit for bit."""

    H, N, D, W, R = 2, 6, 3, 2, 3

    def __init__(self, rng, dtype, rule, batch, per_slot_decay, folder):
        self.rng, self.dtype, self.per_slot_decay, self.folder = rng, dtype, per_slot_decay, folder
        self.initial = rng.standard_normal((self.H, self.N, self.D)).astype(dtype)
        self.state, self.model = MemoryState(self.initial, batch, rule=rule), StateModel(self.initial, batch, rule)
        self.marks: list = []
        self.others: list = []  # forks: they must not change by what happens to the state
        self.saved = None

    def call(self, tokens):
        rng, shape = self.rng, (self.state.batch, tokens, self.H)
        decay = (*shape, self.W) if self.per_slot_decay else shape
        call = [
            rng.standard_normal((*shape, self.D)).astype(self.dtype),
            distinct_slots(rng, shape, self.W, self.N, "shuffled" if rng.random() < 0.2 else "ascending"),
            rng.standard_normal((*shape, self.W)).astype(self.dtype),
            -rng.exponential(0.3, decay).astype(self.dtype),
            rng.uniform(0, 1, shape).astype(self.dtype),
            distinct_slots(rng, shape, self.R, self.N),
            rng.standard_normal((*shape, self.R)).astype(self.dtype),
        ]
        if rng.random() < 0.3:
            padded = rng.random(shape[:2]) < 0.4
            call[1][padded] = -1
            call[5][padded] = -1
            call[3][padded] = np.nan
        return call

    def some(self, at_least=0):
        count = self.rng.integers(at_least, self.state.batch + 2)
        return self.rng.integers(0, self.state.batch, count).tolist() if self.state.batch else []

    def extend(self):
        call = self.call(int(self.rng.integers(0, 4)))
        assert np.array_equal(self.state.extend(*call), self.model.extend(*call))

    def step(self):
        call = self.call(1)
        assert np.array_equal(self.state.step(*(a[:, 0] for a in call)), self.model.extend(*call)[:, 0])

    def fork(self):
        indices = self.some()
        mine = (self.state.fork(indices), self.model.fork(indices))
        if self.rng.random() < 0.5:  # go on with the fork: its parent must not change
            self.others.append((self.state, self.state.dense()))
            self.state, self.model = mine
            self.marks = []
        else:
            self.others.append((mine[0], mine[1].dense()))

    def reorder(self):
        indices = self.some()
        self.state.reorder(indices)
        self.model.reorder(indices)

    def reset(self):
        if self.state.batch:
            i = int(self.rng.integers(self.state.batch))
            self.state.reset(i)
            self.model.reset(i)

    def append(self):
        if self.state.batch < 5:
            n = int(self.rng.integers(0, 3))
            self.state.append(n)
            self.model.append(n)

    def evict(self):
        indices = self.some()[:2]
        self.state.evict(indices)
        self.model.evict(indices)

    def mark(self):
        self.marks.append(self.state.mark())
        self.model.mark(self.marks[-1])

    def rollback(self):
        if self.marks:
            place = int(self.rng.integers(len(self.marks)))
            self.state.rollback(self.marks[place])
            self.model.rollback(place)
            stale = self.marks[place + 1 :]
            del self.marks[place + 1 :]
            for mark in stale:
                with pytest.raises(ValueError, match="stale"):
                    self.state.rollback(mark)

    def release(self):
        if self.marks:
            place = int(self.rng.integers(len(self.marks)))
            self.state.release(self.marks[place])
            self.model.release(place)
            with pytest.raises(ValueError, match="stale"):
                self.state.release(self.marks.pop(place))

    def drop_fork(self):
        if self.others:
            self.others.pop(int(self.rng.integers(len(self.others))))

    def save(self):
        number = 0 if self.saved is None else self.saved[0] + 1
        path = self.folder / f"{number % 4}.state"
        base = self.saved[1] if self.saved and number % 4 and self.rng.random() < 0.5 else None
        self.state.save(path, base=base)
        self.saved = (number, path, self.model.dense(), self.model.tokens())

    def load(self):
        if self.saved is not None:
            loaded = MemoryState.load(self.saved[1], initial=self.initial)
            assert np.array_equal(loaded.dense(), self.saved[2]) and loaded.tokens.tolist() == self.saved[3]

    def check(self):
        assert np.array_equal(self.state.dense(), self.model.dense())
        assert self.state.tokens.tolist() == self.model.tokens()
        for other, dense in self.others:
            assert np.array_equal(other.dense(), dense)
        assert self.state.nbytes().owned == owned_bytes([self.state, *(other for other, _ in self.others)])


OPERATIONS = ["step", "step", "step", "extend", "fork", "reorder", "reset", "append", "evict", "mark", "mark"]
OPERATIONS += ["rollback", "release", "drop_fork", "save", "load"]


def owned_bytes(family) -> int:
    """Count the rows that a family of forks refers to, each once: what reference counts must come to."""
    rows, pool = set(), family[0]._pool
    for state in family:
        assert state._pool is pool
        tables = [state._index.table, *(record.table for record in state._log.records if hasattr(record, "table"))]
        for table in tables:
            rows.update(table[:, :, 1].ravel().tolist())
        for record in state._log.records:
            if not hasattr(record, "table"):
                rows.update(record[:, 2].tolist())
    return len(rows - {-1}) * pool.row_bytes


def main(count: int, first: int = 0) -> None:
    """Run the programs of `count` seeds from `first`; the first difference ends it."""
    os.fsync = lambda descriptor: None  # small files that nobody needs after a power cut
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            rng = np.random.default_rng(seed)
            dtype, rule, by_slot = (
                (np.float32, np.float64)[seed % 2],
                ("shared", "per_slot")[seed // 2 % 2],
                seed // 4 % 2,
            )
            program = Program(rng, dtype, rule, int(rng.integers(0, 4)), bool(by_slot), pathlib.Path(folder))
            for operation in rng.choice(OPERATIONS, int(rng.integers(4, 15))):
                try:
                    getattr(program, operation)()
                    program.check()
                except BaseException:
                    print(f"seed {seed}, in {operation}", flush=True)
                    raise
            if (seed - first + 1) % 1000 == 0:
                print(f"{seed - first + 1} programs from seed {first}, no difference", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
