"""The emulator that proves the CUDA kernels is itself proven: planted faults are caught, right kernels are not."""

import re

import numpy as np
import pytest
from emulated_cuda.build import HERE, missing
from emulated_cuda.run import SCHEDULES, EmulationError, emulate, needs

FILE = HERE / "faults.cu"
THREADS = 128
X = ((np.arange(3 * 4 * THREADS - 4 * 37) * 7919) % 13 - 5).astype(np.float32)  # small integers: sums are exact

#: fault -> what each build must say of it; "wrong" is no report but other numbers under at least one schedule
BLOCK_FAULTS = {
    "no_barrier": {"plain": "wrong", "tsan": "data race"},
    "past_global": {"asan": "heap-buffer-overflow"},
    "past_dynamic": {"plain": "wrong", "asan": "use-after-poison", "tsan": "data race"},
    "past_static": {"asan": "out of bounds"},
    "past_launch": {"plain": "16 bytes more than the launch gives"},
    "copy_not_awaited": {"plain": "never waited for"},
    "copy_awaited_late": {"plain": "wrong"},
    "divergent_barrier": {"plain": "divergent __syncthreads"},
    "return_before_barrier": {"plain": "returned"},
    "shared_cell": {"plain": "wrong", "tsan": "data race"},
}
WARP_FAULTS = {
    "no_warp_barrier": {"plain": "wrong", "tsan": "data race"},
    "returned_lane": {"plain": "a lane that has returned"},
    "mixed_operations": {"plain": "different warp operations"},
    "misaligned": {"asan": "misaligned address"},
}
#: served by one program per build, so that each build compiles once
KERNELS = ["diverged_halves", "histogram", "round_trip<bf16>", "round_trip<fp16>"]
KERNELS += [f"block_sum<{THREADS}, {fault}>" for fault in ("none", *BLOCK_FAULTS)]
KERNELS += [f"warp_sum<{fault}>" for fault in ("none", *WARP_FAULTS)]
CASES = [
    (kind, fault, build, report)
    for kind, faults in (("block", BLOCK_FAULTS), ("warp", WARP_FAULTS))
    for fault, reports in faults.items()
    for build, report in reports.items()
]


def _run(kind, fault, build, **options):
    """Return (numbers computed, numbers wanted)."""
    workers = 2 if fault == "shared_cell" else 1
    if kind == "warp":
        out, want = np.zeros(2, np.float32), np.full(2, X[:32].sum(), np.float32)
        launch = {"grid": 1, "block": 32, "args": [X[:32].copy(), out]}
    else:
        blocks = np.pad(X, (0, 4 * 37)).reshape(3, -1)
        out, want = np.zeros(3, np.float32), blocks.sum(1)
        launch = {"grid": 3, "block": THREADS, "args": [X, out, np.int32(X.size)], "shared_bytes": 20 * THREADS}
    kernel = f"warp_sum<{fault}>" if kind == "warp" else f"block_sum<{THREADS}, {fault}>"
    emulate(FILE, kernel, **launch, build=build, workers=workers, serve=KERNELS, **options)
    return out, want


@needs("plain")
@pytest.mark.parametrize("kind, fault, build, report", CASES, ids=lambda value: value.replace(" ", "_"))
def test_a_planted_fault_is_caught(kind, fault, build, report):
    if missing(build):
        pytest.skip(missing(build))
    if report != "wrong":
        with pytest.raises(EmulationError, match=re.escape(report)):
            # on a busy machine one worker may run all blocks before the other wakes: then nobody raced
            for _ in range(20 if fault == "shared_cell" else 1):
                _run(kind, fault, build)
        return
    outcomes = [_run(kind, fault, build, **options) for options in SCHEDULES]
    assert any(not np.array_equal(out, want) for out, want in outcomes)


@pytest.mark.parametrize("build", ["plain", "asan", "tsan"])
@pytest.mark.parametrize("kind", ["block", "warp"])
def test_a_right_kernel_gives_no_alarm(kind, build):
    if missing(build):
        pytest.skip(missing(build))
    for options in SCHEDULES:
        out, want = _run(kind, "none", build, **options)
        assert np.array_equal(out, want)


@needs("plain")
def test_diverged_halves_and_atomics():
    for options in SCHEDULES:
        sums = np.zeros(32, np.int32)
        emulate(FILE, "diverged_halves", grid=1, block=32, args=[sums], serve=KERNELS, **options)
        assert sums.tolist() == [120] * 16 + [31] * 16
        x, bins, total = np.arange(1000, dtype=np.uint32) * 7, np.zeros(16, np.uint32), np.zeros(1, np.uint32)
        args = [x, np.int32(1000), bins, total]
        emulate(FILE, "histogram", grid=8, block=(16, 8), args=args, serve=KERNELS, workers=2, **options)
        assert np.array_equal(bins, np.bincount(x % 16, minlength=16)) and total[0] == (x % 16).sum()


@needs("plain")
def test_the_portable_switch_of_stacks():
    sums, kernel = np.zeros(32, np.int32), "diverged_halves"
    emulate(FILE, kernel, grid=1, block=32, args=[sums], schedule="random", defines=["SIMT_UCONTEXT"])
    assert sums.tolist() == [120] * 16 + [31] * 16


@needs("plain")
def test_16_bit_floats_round_as_torch_does():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)  # each bf16 number
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate([every, halves, rng.integers(0, 1 << 32, 1 << 17, np.uint32).view(np.float32)])
    finite = ~np.isnan(x)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        wide, narrow = np.zeros_like(x), np.zeros(x.size, np.uint16)
        args = [x, wide, narrow, np.int32(x.size)]
        emulate(FILE, f"round_trip<{name}>", grid=x.size // 512, block=256, args=args, serve=KERNELS)
        want = torch.from_numpy(x).to(dtype)
        assert np.array_equal(narrow[finite], want.view(torch.int16).numpy().view(np.uint16)[finite])
        assert np.array_equal(wide[finite].view(np.uint32), want.float().numpy().view(np.uint32)[finite])
        assert np.all(narrow[~finite] == 0x7FFF) and np.all(np.isnan(wide[~finite]))


@needs("plain")
def test_a_call_that_does_not_fit_the_kernel_is_refused():
    x = np.zeros(32, np.float32)
    with pytest.raises(EmulationError, match="takes 2 arguments, got 1"):
        emulate(FILE, "warp_sum<none>", grid=1, block=32, args=[x], serve=KERNELS)
    with pytest.raises(EmulationError, match="argument 1 is a scalar"):
        emulate(FILE, "warp_sum<none>", grid=1, block=32, args=[x, np.float32(1)], serve=KERNELS)
    with pytest.raises(EmulationError, match="a block of 2048 threads"):
        emulate(FILE, "warp_sum<none>", grid=1, block=2048, args=[x, x], serve=KERNELS)
    with pytest.raises(TypeError, match="not C-contiguous"):
        emulate(FILE, "warp_sum<none>", grid=1, block=32, args=[x[::2], x], serve=KERNELS)
    with pytest.raises(EmulationError, match="g\\+\\+ refused"):
        emulate(FILE, "no_such_kernel", grid=1, block=32, args=[])
