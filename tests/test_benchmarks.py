"""The benchmarks import, their peers agree with the ops, and a wrong result is noticed before anything is timed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `benchmarks` is importable: at the root, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_peers_agree_with_the_ops():
    pytest.importorskip("torch")
    code = """
import numpy as np
from benchmarks import fwpkm_cases, ours, parity, timing
from benchmarks.peers import row_limit
from benchmarks.shapes import Shape, make_inputs, touched_rows

tiny = Shape("tiny", B=2, T=6, H=2, N=32, D=16, W=8, R=8)
ours.set_threads(1)
parity.check_delta(tiny, tokens=6)
parity.check_gdn(tiny)
fwpkm_cases.check_all(fwpkm_cases.Sizes(m=16, half=8, D=16, C=64, k=4))
parity.check_topk(np.random.default_rng(0).standard_normal((64, 32), dtype=np.float32), 8)

# the limit moves rows and changes none
inputs = make_inputs(tiny)
table = inputs.state.copy()
mover = row_limit.row_mover(inputs, table, 1)
if mover is not None:
    mover()
    assert (table == inputs.state).all()
assert 0 < touched_rows(inputs, 32) <= 2 * 2 * 32

# a result that is off by 0.1 % is not timed
try:
    parity.check("wrong on purpose", table * 1.001, table, parity.FORWARD)
except AssertionError:
    print("noticed")

timings = timing.interleave({"slow": lambda: sum(range(200_000)), "fast": lambda: None}, rounds=3, limit_s=1)
assert timings.ratio("slow", "fast") > 1
"""
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["noticed"]


def test_suites_are_collected():
    pytest.importorskip("pytest_benchmark")
    result = run("-m", "pytest", "benchmarks", "--collect-only", "--quiet")
    assert result.returncode == 0, result.stdout + result.stderr
    for suite in ("bench_addressing", "bench_delta", "bench_layer", "bench_costs", "bench_fwpkm"):
        assert f"benchmarks/{suite}.py::" in result.stdout
