"""``sdm-lite doctor``: what this machine has, and a self-check. Needs NumPy and Numba only."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

#: relative to the largest reading: a sum of 16 float32 products over 48 tokens rounds to about 1e-6
PARITY = 1e-5

_PACKAGES = (
    "sdm-lite",
    "numpy",
    "numba",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba-cuda",
    "rich",
    "matplotlib",
    "safetensors",
)


def run(say: Callable[[str], Any]) -> int:
    """Report and check; return 0, or 1 when something is wrong."""
    from ..cpu.compile import compile_time

    _describe(say)
    say("")
    wrong = 0
    for name, check in CHECKS.items():
        with compile_time() as compiling:
            started = time.perf_counter()
            try:
                good, text = check()
            except Exception as error:  # whatever it is, the doctor reports it and goes on
                good, text = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
            taken = f"{time.perf_counter() - started:.1f} s"
        taken += f", {compiling():.1f} s of them compiling" if compiling() else ""
        say(f"{'ok   ' if good else 'WRONG'} {name}: {text} ({taken})")
        wrong += not good
    say(f"{wrong} of {len(CHECKS)} checks failed" if wrong else "all checks passed")
    return 1 if wrong else 0


def _describe(say: Callable[[str], Any]) -> None:
    from ..rooms import backends

    say(f"python {platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}")
    for package in _PACKAGES:
        say(f"  {package} {_version(package)}")
    threads = os.environ.get("SDM_LITE_NUM_THREADS")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    say(f"CPUs this process may use: {usable}; SDM_LITE_NUM_THREADS: {threads or 'not set'}")
    for room, status in backends().items():
        say(f"room {room}: {' '.join(status.split())}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def check_cache() -> tuple[bool, str]:
    """Whether compiled kernels can be kept: a folder that is not writable costs seconds in every process."""
    from ..cpu import forward

    folders = {
        Path(found.stats.cache_path)
        for found in vars(forward).values()
        if getattr(getattr(found, "stats", None), "cache_path", None)
    }
    if not folders:
        return False, "no folder; every process compiles anew. Set NUMBA_CACHE_DIR to a writable folder"
    folder = sorted(folders)[0]
    there = folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return False, f"{folder} cannot be written to. Set NUMBA_CACHE_DIR to a writable folder"
    return True, str(folder)


def check_addressing() -> tuple[bool, str]:
    """product_key_topk in the cpu room gives what the reference gives, ties included, to the bit."""
    from ..ops import product_key_topk

    generator = np.random.default_rng(0)
    # rounded to quarters, so that ties at the last place are common
    scores = (np.round(4 * generator.standard_normal((64, 48))) / 4).astype(np.float32)
    ours, expected = (product_key_topk(scores, 16, backend=room) for room in ("cpu", "reference"))
    same = all(np.array_equal(a, b) for a, b in zip(ours, expected))
    return same, "cpu equals reference" if same else "cpu and reference select different slots"


def check_delta() -> tuple[bool, str]:
    """sparse_delta_rule in the cpu room gives what the reference gives, for both rules."""
    from ..ops import sparse_delta_rule

    call = _call(np.float32)
    worst = 0.0
    for rule in ("shared", "per_slot"):
        found = [sparse_delta_rule(*call, rule=rule, output_final_state=True, backend=r) for r in ("cpu", "reference")]
        for ours, expected in zip(*found):
            worst = max(worst, float(np.abs(ours - expected).max() / np.abs(expected).max()))
    return worst < PARITY, f"cpu against reference, largest difference {worst:.1e} (allowed {PARITY:.0e})"


def check_gradients() -> tuple[bool, str]:
    """The gradients of sparse_delta_rule agree with differences, in float64."""
    from ..autograd import check_grads
    from ..ops import sparse_delta_rule

    values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, state = _call(np.float64)

    def readings(values: Any, write_weights: Any, log_decay: Any, beta: Any, read_weights: Any, state: Any) -> Any:
        return sparse_delta_rule(values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, state)[
            0
        ]

    check_grads(readings, [values, write_weights, log_decay, beta, read_weights, state])
    return True, "sparse_delta_rule agrees with central differences"


def check_speed() -> tuple[bool, str]:
    """How fast one forward is here: B=1, T=512, H=2, N=4096, D=128, W=R=32."""
    from ..ops import sparse_delta_rule_

    B, T, H, N, D, W = 1, 512, 2, 4096, 128, 32
    values, slots, weights, log_decay, beta, read_slots, read_weights, state = _call(np.float32, B, T, H, N, D, W)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        sparse_delta_rule_(values, slots, weights, log_decay, beta, read_slots, read_weights, state)
        times.append(time.perf_counter() - started)
    best = min(times[1:])  # the first compiles, or loads what was compiled
    return True, f"{B * T / best / 1e3:.0f}k tokens/s, best of {len(times) - 1} (T={T}, H={H}, D={D}, W=R={W})"


def check_torch() -> tuple[bool, str]:
    """The ops through torch, with a gradient, give the same numbers; torch is an extra and may be absent."""
    try:
        import torch
    except ImportError:
        return True, 'torch is not installed; pip install "sdm-lite[cli]" for layers and the other commands'
    from ..ops import sparse_delta_rule

    call = _call(np.float32)
    tensors = [torch.from_numpy(array) for array in call]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    readings, _ = sparse_delta_rule(*tensors)
    same = np.array_equal(readings.detach().numpy(), sparse_delta_rule(*call)[0])
    readings.sum().backward()
    finite = all(t.grad is not None and bool(t.grad.isfinite().all()) for t in tensors if t.requires_grad)
    good = same and finite
    return good, "torch equals NumPy" if good else f"same readings: {same}, finite gradients: {finite}"


def _call(dtype: Any, B: int = 2, T: int = 24, H: int = 2, N: int = 64, D: int = 16, W: int = 16) -> tuple[Any, ...]:
    """Return the eight arrays of a random call."""
    generator = np.random.default_rng(1)

    def slots() -> np.ndarray:
        order = np.argsort(generator.random((B, T, H, N)), axis=-1)[..., :W]
        return np.sort(order, axis=-1).astype(np.int32)

    def weights() -> np.ndarray:
        raw = np.exp(generator.standard_normal((B, T, H, W)))
        return (raw / raw.sum(-1, keepdims=True)).astype(dtype)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(dtype)

    decay = np.log(generator.uniform(0.8, 1.0, (B, T, H))).astype(dtype)
    beta = generator.uniform(0.1, 0.9, (B, T, H)).astype(dtype)
    return normal(B, T, H, D), slots(), weights(), decay, beta, slots(), weights(), normal(B, H, N, D)


CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "kernel cache": check_cache,
    "addressing": check_addressing,
    "delta rule": check_delta,
    "gradients": check_gradients,
    "speed": check_speed,
    "torch": check_torch,
}
