"""`MemoryState` against the op and a plain model: the same bits after every operation, and errors that change nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cases import DELTA_CASES, case_id, distinct_slots, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_model import StateModel

import sdm_lite
from sdm_lite import MemoryState

#: programs of random operations: SDM_LITE_STATE_PROGRAMS=50000 python -m pytest tests/test_memory_state.py -k programs
PROGRAMS = int(os.environ.get("SDM_LITE_STATE_PROGRAMS", "2000"))
NAMES = ["plain", "narrow_D3", "D17_slot_decay", "D64_W64", "D100", "long", "wipe_slot", "no_tokens", "one_of_each"]


def split_run(state, args, cuts):
    """Run args[:7] in pieces: a piece of one token as a step, the others as extend."""
    readings, tokens = [], args[0].shape[1]
    edges = [0, *cuts, tokens]
    for start, stop in zip(edges, edges[1:]):
        if stop - start == 1:
            readings.append(state.step(*(a[:, start] for a in args[:7]))[:, None])
        else:
            readings.append(state.extend(*(a[:, start:stop] for a in args[:7])))
    return readings


@pytest.mark.parametrize("rule", ["shared", "per_slot"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fields", [f for f in DELTA_CASES if f.lengths is None], ids=case_id)
def test_bits_of_the_op_for_any_split(fields, dtype, rule):
    args = make_case(fields, dtype=dtype, shared_state=True).arguments()
    want, final = sdm_lite.sparse_delta_rule(*args, rule=rule, output_final_state=True)
    tokens = fields.T
    for cuts in ([], range(1, tokens), [c for c in (tokens // 3, tokens // 3 + 1) if 0 < c < tokens]):
        state = MemoryState(args[7], fields.B, rule=rule)
        readings = np.concatenate(split_run(state, args, list(cuts)), axis=1)
        assert np.array_equal(readings, want)
        assert np.array_equal(state.dense(), final)
        assert state.tokens.tolist() == [tokens] * fields.B


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits_of_the_op_in_16_bits(name, dtype):
    torch = pytest.importorskip("torch")
    args = [torch.from_numpy(a) for a in make_case(name, dtype=np.float32, shared_state=True).arguments()]
    args[7] = args[7].to(getattr(torch, dtype))
    want, final = sdm_lite.sparse_delta_rule(*args, output_final_state=True)
    state = MemoryState(args[7], args[0].shape[0])
    readings = torch.cat(split_run(state, args, [1] if args[0].shape[1] > 1 else []), dim=1)
    assert torch.equal(readings, want)
    dense = state.dense()
    assert dense.dtype == args[7].dtype and torch.equal(dense, final)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("name", ["plain", "D100"])
def test_bits_do_not_depend_on_threads(name, threads, monkeypatch, threads_at_any_size):
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
    args = make_case(name, dtype=np.float32, shared_state=True).arguments()
    want, final = sdm_lite.sparse_delta_rule(*args, output_final_state=True)
    state = MemoryState(args[7], args[0].shape[0])
    assert np.array_equal(state.extend(*args[:7]), want) and np.array_equal(state.dense(), final)


def test_bits_do_not_depend_on_the_batch():
    args = make_case("plain", dtype=np.float32, shared_state=True, B=3).arguments()
    together = MemoryState(args[7], 3)
    readings = together.extend(*args[:7])
    for b in range(3):
        alone = MemoryState(args[7], 1)
        assert np.array_equal(alone.extend(*(a[b : b + 1] for a in args[:7])), readings[b : b + 1])
        assert np.array_equal(alone.dense()[0], together.dense()[b])


def test_zeros_need_no_memory():
    args = make_case("plain", dtype=np.float32, shared_state=True).arguments()
    zeros = np.zeros_like(args[7])
    state = MemoryState(zeros.shape, 2)
    want, final = sdm_lite.sparse_delta_rule(*args[:7], zeros, output_final_state=True)
    assert np.array_equal(state.extend(*args[:7]), want) and np.array_equal(state.dense(), final)
    assert state.nbytes().shared == 0


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@settings(max_examples=PROGRAMS, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32 - 1),
    program=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=14),
    batch=st.integers(0, 3),
    dtype=st.sampled_from([np.float32, np.float64]),
    rule=st.sampled_from(["shared", "per_slot"]),
    per_slot_decay=st.booleans(),
)
def test_random_programs(folder, seed, program, batch, dtype, rule, per_slot_decay):
    run = Program(np.random.default_rng(seed), dtype, rule, batch, per_slot_decay, folder)
    for operation in program:
        getattr(run, operation)()
        run.check()
