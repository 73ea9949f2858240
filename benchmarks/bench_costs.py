"""Import, compilation and peak memory: asserted here, reported in docs/benchmarks.md."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import costs


def test_first_calls_cold(benchmark):
    seconds = benchmark.pedantic(costs.first_calls, kwargs={"cached": False}, rounds=1)
    benchmark.extra_info.update(seconds)


def test_first_calls_cached(benchmark):
    seconds = benchmark.pedantic(costs.first_calls, kwargs={"cached": True}, rounds=1)
    benchmark.extra_info.update(seconds)
    assert seconds["import"] < 0.5
    assert seconds["import"] + seconds["sparse_delta_rule_"] < 2


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("restore", ["hybrid", "snapshot"])
@pytest.mark.parametrize("name", ["medium", "large"])
def test_peak_memory(benchmark, name, restore):
    measured = benchmark.pedantic(costs.peak_memory, (name, restore), rounds=1)
    benchmark.extra_info.update(measured)
    assert measured["peak"] <= measured["formula"] + costs.MEMORY_NOISE
