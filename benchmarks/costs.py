"""What is paid once, or in memory: import, compilation cold and cached, peak bytes; each in a process of its own.

``python -m benchmarks.costs first-calls`` and ``python -m benchmarks.costs memory large hybrid`` are those processes;
:func:`first_calls` and :func:`peak_memory` start them and return what they print.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from .shapes import SHAPES, Inputs, Shape, make_inputs, touched_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: what numbers below this many bytes cannot tell: the interpreter's and the allocator's own comings and goings
MEMORY_NOISE = 12 << 20


def first_calls(*, cached: bool) -> dict[str, float]:
    """Return seconds of import and of each op's first call in a fresh process, with an empty cache or a filled one."""
    with tempfile.TemporaryDirectory() as folder:
        if cached:
            _run(["first-calls"], NUMBA_CACHE_DIR=folder)
        return _run(["first-calls"], NUMBA_CACHE_DIR=folder)


def peak_memory(shape: str, restore: str) -> dict[str, int]:
    """Return the measured peak of forward + backward over what was there before, and the formula's bytes."""
    return _run(["memory", shape, restore])


def gradient_bytes(shape: Shape, inputs: Inputs, logged_rows: int) -> int:
    """Return the bytes that forward + backward may hold at once, in float32.

    3 U D : the touched rows, their working copy in the backward (the saved ones stay as they are, for a
    second backward), their gradients; the log's rows D; 5 D a lane-token: prediction error, readings, gradients in
    and out and one temporary; 10 numbers for each slot of a lane-token: places, the log's plan, weights and
    their gradients; and a whole table, since a backward gives the gradient of the state, asked for or not.
    """
    lane_tokens = shape.lanes * shape.T
    numbers = 3 * touched_rows(inputs, shape.N) * shape.D + logged_rows * shape.D
    numbers += lane_tokens * (5 * shape.D + 10 * (shape.W + shape.R))
    numbers += shape.lanes * shape.N * shape.D
    return 4 * numbers


def _run(arguments: list[str], **environment: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.costs", *arguments]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return json.loads(result.stdout)


def _measure_first_calls() -> dict[str, float]:
    seconds = {}

    def timed(name, call):
        start = time.perf_counter()
        result = call()
        seconds[name] = round(time.perf_counter() - start, 4)
        return result

    sdm_lite = timed("import", lambda: __import__("sdm_lite"))
    tiny = dataclasses.replace(SHAPES["small"], B=1, T=2, N=128)
    inputs = make_inputs(tiny)
    timed("product_key_topk", lambda: sdm_lite.product_key_topk(inputs.values[0, 0], 8))
    timed("sparse_delta_rule_", lambda: sdm_lite.sparse_delta_rule_(*inputs.call, inputs.state.copy()))
    timed("sparse_delta_rule", lambda: sdm_lite.sparse_delta_rule(*inputs.call, inputs.state))
    # the tape, not torch: importing torch would take longer than what is measured
    from sdm_lite.autograd import Tensor

    values = Tensor(inputs.values, requires_grad=True)

    def gradients():
        readings, _ = sdm_lite.sparse_delta_rule(values, *inputs.call[1:], inputs.state)
        readings.sum().backward()

    timed("forward + backward", gradients)
    seconds["total"] = round(sum(seconds.values()), 4)
    return seconds


def _status_bytes(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{field} is not in /proc/self/status")


def _measure_memory(name: str, restore: str) -> dict[str, int]:
    from . import ours

    shape = SHAPES[name]
    ours.set_threads(2)
    # compile, or load from the cache, before anything is counted
    ours.gradients(make_inputs(dataclasses.replace(shape, T=4, N=256)), restore=restore, of_state=True)()
    inputs = make_inputs(shape)
    call = ours.gradients(inputs, restore=restore, of_state=True)
    logged = shape.lanes * shape.T * shape.W if restore == "snapshot" else ours.logged_rows(inputs, restore)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status_bytes("VmRSS")
    gradients = call()
    peak = _status_bytes("VmHWM") - before
    del gradients
    bound = gradient_bytes(shape, inputs, logged)
    return {"peak": peak, "formula": bound, "logged_rows": logged}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    measured = _measure_first_calls() if what == "first-calls" else _measure_memory(*rest)
    print(json.dumps(measured))
