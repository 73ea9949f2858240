"""The Numba CUDA kernels: run in Numba's simulator against the CPU room, and compiled to PTX where that is possible."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap

import pytest

#: what every program below starts with; the simulator replaces numba.cuda for a whole process, so each has its own
HEADER = """
import math
import numpy as np
np.seterr(over="ignore", divide="ignore", invalid="ignore")  # 64-bit words wrap; the simulator counts in NumPy scalars
rng = np.random.default_rng(0)
"""
FILES = ("hash_slots", "access_statistics", "snapshot", "log_plan")


def run(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", HEADER + textwrap.dedent(program)]
    there = {"cwd": tempfile.gettempdir(), "env": {**os.environ, **environment}}  # not the root, with its bare folders
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **there)
    assert done.returncode == 0, done.stderr
    return done.stdout


def simulate(program: str) -> None:
    run(program, NUMBA_ENABLE_CUDASIM="1")


def test_importing_the_package_imports_none_of_them():
    run(f"""
        import sys
        import sdm_lite, sdm_lite.cuda_kernels
        sdm_lite.backends()
        assert not [f for f in {FILES} if f"sdm_lite.cuda_kernels.{{f}}_numba" in sys.modules]
        assert "numba.cuda.dispatcher" not in sys.modules
    """)


def test_hash_slots():
    simulate("""
        from sdm_lite.cpu import addressing
        from sdm_lite.cuda_kernels.hash_slots_numba import hash_slots
        ids = np.array([0, 1, -1, 7, 2**63 - 1, -(2**63), 12345], np.int64)
        for num_slots, k, seed in ((100, 4, 0), (5, 5, 3), (1, 1, -7), (2**31 - 1, 6, 2**70), (40, 31, 9)):
            slots = np.full((len(ids), k), -1, np.int32)
            hash_slots(ids, num_slots, seed, slots)
            np.testing.assert_array_equal(slots, addressing.hash_slots_forward(ids, num_slots, k, seed))
    """)


def test_access_counts():
    simulate("""
        from sdm_lite.cuda_kernels.access_statistics_numba import count_accesses
        slots = rng.integers(0, 9, 300).astype(np.int32)
        counts = np.zeros(9, np.int64)
        for _ in range(2):
            count_accesses(slots, counts)
        np.testing.assert_array_equal(counts, 2 * np.bincount(slots, minlength=9))
    """)


def test_snapshot():
    simulate("""
        from sdm_lite.cpu import snapshot as cpu
        from sdm_lite.cuda_kernels import snapshot_numba as cuda
        special = np.array([0.0, -0.0, 1e-30, -1e-3, 448.0, 3.4e38, 1.0, -7.5, 0.015625, 2.5, 3.5])
        rows = [rng.standard_normal(11), special, special[::-1], np.zeros(11), 10.0 ** rng.integers(-30, 30, 11)]
        rows += [np.where(np.arange(11) == 4, x, rng.standard_normal(11)) for x in (np.nan, np.inf, -np.inf)]
        for dtype in (np.float32, np.float64):
            table = np.array(rows, dtype)
            for storage in (cuda.BF16, cuda.FP8, cuda.INT4):
                assert cuda.row_bytes(11, storage) == cpu.row_bytes(11, storage)
                codes = np.zeros((len(table), cuda.row_bytes(11, storage)), np.uint8)
                cuda.encode(table, storage, codes)
                restored = np.full_like(table, 7)
                cuda.decode(codes, storage, restored)
                for row, code, back in zip(table, codes, restored):
                    want, want_back = np.zeros_like(code), np.full_like(row, 7)
                    cpu.encode(row, 0, 11, storage, want)
                    cpu.decode(want, 0, 11, storage, want_back)
                    if not np.isnan(row).any():
                        np.testing.assert_array_equal(code, want)
                    np.testing.assert_array_equal(back, want_back)
        every = np.arange(256).astype(np.uint8)  # each fp8 code, with a scale of 1
        codes = np.concatenate([every, np.array([1.0], np.float32).view(np.uint8)])[None]
        restored = np.zeros((1, 256), np.float32)
        cuda.decode(codes, cuda.FP8, restored)
        np.testing.assert_array_equal(restored[0], cpu._FP8)
    """)


def test_log_plan():
    simulate("""
        from sdm_lite.cpu import plan as cpu
        from sdm_lite.cuda_kernels.log_plan_numba import plan_log
        some = 0
        for cu_seqlens, per_slot, decays, dtype in (
            (None, False, 1, np.float32), (None, True, 3, np.float64), (np.array([0, 2, 2, 7, 9]), True, 1, np.float32)
        ):
            B, T, H, W, N = (2 if cu_seqlens is None else 1), 9, 2, 3, 6
            slots = rng.random((B, T, H, N)).argsort(-1)[..., :W].astype(np.int32)
            weights, beta = rng.random((B, T, H, W)).astype(dtype), rng.random((B, T, H)).astype(dtype)
            decay = -rng.exponential(0.7, (B, T, H, decays)).astype(dtype)
            decay[0, 3, 0], decay[0, 5, 1], decay[0, 6, 0] = -np.inf, 0.0, -100.0
            weights[0, 1, 0, 0] = beta[0, 1, 0] = 1  # per_slot: nothing of the row is left
            lanes = cpu.make_lanes(B, T, H, cu_seqlens, False)
            compact = cpu.compact(slots, slots, lanes, N)
            for tau in (math.log(10), 0.0, math.inf):
                want, rows = cpu.plan_log(
                    compact.write_places, weights, decay, beta, lanes, compact.row_start, per_slot, tau
                )
                how = dict(num_slots=N, per_slot=per_slot, tau=tau)
                got, logged = plan_log(np, slots, weights, decay, beta, cu_seqlens, **how)
                np.testing.assert_array_equal(got, want)
                assert logged == rows
                some += 0 < rows < slots.size
        assert some >= 5  # neither none nor all of the rows
        empty = np.zeros((1, 0, 1, 3))
        got, logged = plan_log(
            np, empty.astype(np.int32), empty, empty, empty[..., 0], None, num_slots=4, per_slot=False, tau=1.0
        )
        assert got.shape == empty.shape and logged == 0
    """)


#: kernel -> the types of its arguments
SIGNATURES = {
    "hash_slots_numba._hash_rows": "void(uint64[::1], int64, uint64, int32[:, ::1])",
    "access_statistics_numba._count": "void(int32[::1], int64[::1])",
    "snapshot_numba._encode": "void(float32[:, ::1], int64, uint8[:, ::1])",
    "snapshot_numba._decode": "void(uint8[:, ::1], int64, float32[:, ::1])",
    "log_plan_numba._make_keys": "void(int32[::1], int64[::1], int64, int64, int64, int64[::1], int64[::1])",
    "log_plan_numba._walk_chains": "void(int64[::1], int64[::1], int64[::1], float32[:, ::1], float32[:, ::1], "
    "float32[::1], boolean, float64, float64, int32[::1])",
    "log_plan_numba._place": "void(int32[::1], int32[::1], int64[::1], int64, int32[::1])",
}


def test_kernels_compile_without_a_gpu():
    """Needs numba-cuda with its NVRTC and NVVM wheels: the `cuda12` and `cuda13` extras."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    out = run(f"""
        import importlib, types
        from numba import cuda
        from numba.core.sigutils import normalize_signature
        from numba.cuda import dispatcher
        # functions called by a kernel are compiled for the device at hand, and there is none
        dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=(9, 0))
        how = dict(cc=(9, 0), device=False, abi="numba", output="ptx")
        for kernel, signature in {SIGNATURES}.items():
            file, name = kernel.split(".")
            function = getattr(importlib.import_module("sdm_lite.cuda_kernels." + file), name).py_func
            try:
                text, _ = cuda.compile(function, normalize_signature(signature)[0], **how)
            except Exception as error:
                if "libnvvm" not in str(error).lower() and "nvrtc" not in str(error).lower():
                    raise
                print("missing:", error)
                break
            assert ".visible .entry" in text and name in text
    """)
    if out.startswith("missing:"):
        pytest.skip(out.strip())
