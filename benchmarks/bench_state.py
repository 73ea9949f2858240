"""`MemoryState` at the paper's 1.4B layer (H = 2, N = 57,600, D = 960, W = R = 64): decode, prefill, fork, rollback.

Decode steps go in turn through TOKENS tokens whose rows are owned already, as in a sequence that has run for a while;
the peers do the same on dense memories [B, H, N, D]. Parity with the op is asserted before anything is timed.
"""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
import torch

import sdm_lite
from benchmarks import state_costs
from benchmarks.peers import row_limit, torch_loop
from benchmarks.shapes import SHAPES, Inputs, distinct_slots

from .conftest import THREADS

LARGE = SHAPES["large"]
TOKENS = 64
MARKED = 8  # tokens that a rollback takes back


@pytest.fixture(scope="module")
def initial() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((LARGE.H, LARGE.N, LARGE.D), dtype=np.float32) * np.float32(0.1)


@pytest.fixture(scope="module", params=[1, 8], ids=["B1", "B8"])
def inputs(request, initial) -> Inputs:
    """Return TOKENS tokens of each sequence; `state` is the shared initial memory."""
    rng, tokens = np.random.default_rng(1), (request.param, TOKENS, LARGE.H)
    weights = rng.standard_normal((*tokens, LARGE.W), dtype=np.float32)
    return Inputs(
        values=rng.standard_normal((*tokens, LARGE.D), dtype=np.float32),
        write_slots=distinct_slots(rng, tokens, LARGE.W, LARGE.N),
        write_weights=weights / np.linalg.norm(weights, axis=-1, keepdims=True),
        log_decay=-rng.exponential(0.05, tokens).astype(np.float32),
        beta=rng.uniform(0.1, 0.9, tokens).astype(np.float32),
        read_slots=distinct_slots(rng, tokens, LARGE.R, LARGE.N),
        read_weights=np.full((*tokens, LARGE.R), 1 / LARGE.R, np.float32),
        state=initial,
        dreadings=np.empty(0, np.float32),
    )


def steps(inputs: Inputs) -> list[list[np.ndarray]]:
    return [[np.ascontiguousarray(x[:, t]) for x in inputs.call] for t in range(TOKENS)]


def dense(inputs: Inputs) -> np.ndarray:
    """Return memories [B, H, N, D], or skip where they do not fit twice over."""
    batch = inputs.values.shape[0]
    needed = 2 * batch * inputs.state.nbytes
    if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
        pytest.skip(f"{needed >> 30} GB of free memory are needed")
    return np.repeat(inputs.state[None], batch, axis=0)


def started(inputs: Inputs) -> sdm_lite.MemoryState:
    """Return a state after the tokens, held to the op on the first sequence."""
    batch = inputs.values.shape[0]
    state = sdm_lite.MemoryState(inputs.state, batch)
    readings = state.extend(*inputs.call)
    want, _ = sdm_lite.sparse_delta_rule(*(x[:1] for x in inputs.call), inputs.state)
    assert np.array_equal(readings[:1], want), "parity: nothing is timed"
    return state


@pytest.fixture
def record(benchmark, inputs):
    def add(tokens: int = 1) -> None:
        batch, median = inputs.values.shape[0], benchmark.stats.stats.median
        moved = 4 * batch * LARGE.H * tokens * LARGE.D * (2 * LARGE.W + LARGE.R)
        benchmark.extra_info["threads"] = THREADS
        benchmark.extra_info["tokens_per_second"] = round(batch * tokens / median)
        benchmark.extra_info["GB_per_second"] = round(moved / median / 1e9, 2)

    return add


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_step(benchmark, inputs, record, kind):
    state, calls = started(inputs), steps(inputs)
    if kind == "torch":
        calls = [[torch.from_numpy(x) for x in call] for call in calls]
    turn = itertools.cycle(calls)
    benchmark(lambda: state.step(*next(turn)))
    record()


def test_step_with_a_mark(benchmark, inputs, record):
    """Each step's rows are copied: the mark is new every time."""
    state, turn = started(inputs), itertools.cycle(steps(inputs))

    def step():
        mark = state.mark()
        state.step(*next(turn))
        state.release(mark)

    benchmark(step)
    record()


def test_step_dense_in_place(benchmark, inputs, record):
    table = dense(inputs)
    turn = itertools.cycle([[x[:, None] for x in call] for call in steps(inputs)])
    for _ in range(TOKENS):
        sdm_lite.sparse_delta_rule_(*next(turn), table)
    benchmark(lambda: sdm_lite.sparse_delta_rule_(*next(turn), table))
    record()


def test_step_limit_of_memory(benchmark, inputs, record):
    table = dense(inputs)
    one_token = [
        Inputs(**{n: np.ascontiguousarray(x[:, t : t + 1]) for n, x in vars(inputs).items() if n not in KEPT}, **rest)
        for t in range(TOKENS)
        for rest in [{n: getattr(inputs, n) for n in KEPT}]
    ]
    movers = [row_limit.row_mover(one, table, THREADS) for one in one_token]
    if movers[0] is None:
        pytest.skip("g++ is not there")
    turn = itertools.cycle(movers)
    for _ in range(TOKENS):
        next(turn)()
    benchmark(lambda: next(turn)())
    record()


KEPT = ("state", "dreadings")


def test_step_torch_index_copy(benchmark, inputs, record):
    loop = torch_loop.from_inputs(Inputs(**{**vars(inputs), "dreadings": inputs.values}), LARGE.N)
    table = torch.from_numpy(dense(inputs)).view(-1, LARGE.D)
    calls = [torch_loop.LoopInputs(**{n: x[t : t + 1] for n, x in vars(loop).items()}) for t in range(TOKENS)]
    turn = itertools.cycle(calls)
    with torch.no_grad():
        for _ in range(TOKENS):
            torch_loop.forward(table, next(turn))
        benchmark(lambda: torch_loop.forward(table, next(turn)))
    record()


def test_prefill(benchmark, inputs, record):
    """From nothing owned: the copies of the first writes are in the time."""
    batch = inputs.values.shape[0]
    started(inputs)
    benchmark(lambda: sdm_lite.MemoryState(inputs.state, batch).extend(*inputs.call))
    record(TOKENS)


def test_prefill_functional_op(benchmark, inputs, record):
    benchmark(lambda: sdm_lite.sparse_delta_rule(*inputs.call, inputs.state))
    record(TOKENS)


def test_fork(benchmark, inputs):
    state, batch = started(inputs), inputs.values.shape[0]
    benchmark(lambda: state.fork(range(batch)))
    benchmark.extra_info["rows"] = state.nbytes().owned // (4 * LARGE.D)


def test_fork_dense_copy(benchmark, inputs):
    table = dense(inputs)
    benchmark(table.copy)


def test_rollback(benchmark, inputs):
    state, calls = started(inputs), steps(inputs)[:MARKED]
    mark = state.mark()

    def speculate():
        for call in calls:
            state.step(*call)

    benchmark.pedantic(lambda: state.rollback(mark), setup=speculate, rounds=20)
    benchmark.extra_info["tokens"] = MARKED


def test_bytes_owned(benchmark):
    marks = (100, 1_000)
    found = benchmark.pedantic(lambda: {s: state_costs.bytes_owned(s, marks) for s in state_costs.SLOTS}, rounds=1)
    benchmark.extra_info["bytes"] = json.dumps(found)
    assert found["skewed"][-1] < found["uniform"][-1] < LARGE.H * LARGE.N * LARGE.D * 4
