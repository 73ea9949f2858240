"""Fixtures of the suites: seeded inputs per shape, made once, after parity has been asserted at that shape."""

from __future__ import annotations

import functools
import os

import pytest

from benchmarks import ours, parity
from benchmarks.shapes import SHAPES, Inputs, Shape, make_inputs

THREADS = int(os.environ.get("SDM_LITE_NUM_THREADS", "2"))


@functools.lru_cache(maxsize=1)  # one shape at a time: the large state alone is 440 MB
def _prepared(name: str) -> Inputs:
    parity.check_delta(SHAPES[name])
    return make_inputs(SHAPES[name])


@pytest.fixture(autouse=True)
def _threads():
    ours.set_threads(THREADS)


@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request) -> Shape:
    return SHAPES[request.param]


@pytest.fixture
def inputs(shape) -> Inputs:
    return _prepared(shape.name)


@pytest.fixture
def record(benchmark, shape):
    """Return a function that adds tokens/s and, given bytes per call, GB/s to what is saved with the timing."""

    def add(bytes_per_call: int = 0, tokens: int = 0) -> None:
        median = benchmark.stats.stats.median
        benchmark.extra_info["threads"] = THREADS
        benchmark.extra_info["tokens_per_second"] = round((tokens or shape.B * shape.T) / median)
        if bytes_per_call:
            benchmark.extra_info["GB_per_second"] = round(bytes_per_call / median / 1e9, 2)

    return add
