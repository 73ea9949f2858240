"""The CUDA product-key selection under the emulator: the same bits as the CPU room, under every schedule."""

import math

import numpy as np
import pytest
from emulated_cuda.run import SCHEDULES, Launch, needs, several

from sdm_lite.arrays import narrow_bf16, widen_bf16
from sdm_lite.cpu import addressing

THREADS = 64
FORWARD, BACKWARD = "product_key_topk_forward.cu", "product_key_topk_backward.cu"
C_NAMES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double", np.dtype(np.uint16): "bf16"}

pytestmark = needs("plain")


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def ties(rng, shape, dtype):
    return rng.integers(-2, 3, shape).astype(dtype)


def bf16_rounded(rng, shape, dtype):
    return widen_bf16(narrow_bf16(rng.standard_normal(shape).astype(np.float32))).astype(dtype)


def special(rng, shape, dtype):
    return rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], dtype), shape)


def all_nan(rng, shape, dtype):
    return np.full(shape, np.nan, dtype)


def any_bits(rng, shape, dtype):
    integer = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return rng.integers(0, np.iinfo(integer).max, shape, integer, endpoint=True).view(dtype)


SCORES = (normal, ties, bf16_rounded, special, all_nan, any_bits)
#: widths and k: one factor and several, k of 1 and of all slots, k below and above a width
SHAPES = [((1,), 1), ((300,), 31), ((40,), 40), ((3, 3), 4), ((3, 3), 9), ((1, 9), 5), ((9, 1), 5), ((24, 24), 64)]
SHAPES += [((7, 90), 200), ((2, 3, 4), 24), ((5, 1, 30), 40), ((4, 4, 4, 4), 100), ((240, 240), 256)]


def candidates(widths, k):
    lists = [min(k, math.prod(widths[:f])) for f in range(1, len(widths))]
    return max((sum(min(k // (i + 1), w) for i in range(n)) for n, w in zip(lists, widths[1:], strict=True)), default=0)


def shared_bytes(widths, k, value):
    """The formula of the kernel's header; an entry is its key, and 8 bytes."""
    chosen, pairs = 1 << (k - 1).bit_length(), candidates(widths, k)
    pieces = [3 * [k * value, k * 4], [chosen * (value + 8), pairs * value, pairs * 4, (k + 1) * 4]]
    return sum(-(-size // 16) * 16 for group in pieces for size in group)


def forward_launch(scores, widths, k, name=None):
    """Return the launch and the arrays that it fills."""
    value = np.float64 if scores.dtype == np.float64 else np.float32
    values, slots = np.full((len(scores), k), 7, value), np.full((len(scores), k), -7, np.int32)
    numbers = [np.int32(n) for n in (len(widths), sum(widths), k, candidates(widths, k))]
    args = [scores, np.array(widths, np.int32), *numbers, values, slots]
    kernel = f"product_key_topk_forward<{name or C_NAMES[scores.dtype]}, {THREADS}>"
    return Launch(kernel, len(scores), THREADS, args, shared_bytes(widths, k, np.dtype(value).itemsize)), values, slots


def check_forward(cases, **options):
    """Run (scores, widths, k) cases in one process; each must have the CPU room's bits."""
    launches = [forward_launch(*case) for case in cases]
    several(FORWARD, [launch for launch, _, _ in launches], **options)
    for (scores, widths, k), (_, values, slots) in zip(cases, launches, strict=True):
        want_values, want_slots = addressing.product_key_topk_forward(scores, widths, k)
        np.testing.assert_array_equal(slots, want_slots)
        assert values.tobytes() == want_values.tobytes()  # tells -0 from +0 too


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_selection_has_the_cpu_rooms_bits(dtype, options):
    rng = np.random.default_rng(3)
    check_forward([(of(rng, (2, sum(w)), dtype), w, k) for w, k in SHAPES for of in SCORES], **options)


def test_the_widest_factor():
    rng = np.random.default_rng(4)
    wide = (65535, 3)
    check_forward([(of(rng, (1, sum(wide)), np.float32), wide, 20) for of in (normal, ties, all_nan)])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bit_scores_are_widened(name):
    rng, widths, k = np.random.default_rng(5), (24, 24), 64
    x = rng.standard_normal((3, 48)).astype(np.float32)
    narrow, wide = narrow_bf16(x), widen_bf16(narrow_bf16(x))
    if name == "fp16":
        narrow, wide = x.astype(np.float16), x.astype(np.float16).astype(np.float32)
    launch, values, slots = forward_launch(narrow, widths, k, name)
    both = [f"product_key_topk_forward<{name}, {THREADS}>" for name in ("bf16", "fp16")]  # one compilation
    several(FORWARD, [launch], serve=both)
    want_values, want_slots = addressing.product_key_topk_forward(wide, widths, k)
    assert values.tobytes() == want_values.tobytes() and np.array_equal(slots, want_slots)


def backward_case(rng, widths, k, dtype, rows=3):
    scores = rng.standard_normal((rows, sum(widths))).astype(dtype)
    slots = addressing.product_key_topk_forward(scores, widths, k)[1]
    return rng.choice(np.array([-0.0, 1e-3, 0.7, -1.3, 1e4], dtype), slots.shape), slots, widths


def check_backward(cases, **options):
    launches, outputs = [], []
    for dvalues, slots, widths in cases:
        outputs.append(np.full((len(slots), sum(widths)), np.nan, dvalues.dtype))
        k = slots.shape[1]
        numbers = [np.int32(n) for n in (len(widths), sum(widths), k)]
        args = [dvalues, slots, np.array(widths, np.int32), *numbers, outputs[-1]]
        shared = sum(-(-k * size // 16) * 16 for size in (dvalues.itemsize, 4, 4))
        kernel = f"product_key_topk_backward<{C_NAMES[dvalues.dtype]}, {THREADS}>"
        launches.append(Launch(kernel, len(slots), THREADS, args, shared))
    several(BACKWARD, launches, **options)
    for got, case in zip(outputs, cases, strict=True):
        assert got.tobytes() == addressing.product_key_topk_backward(*case).tobytes()


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_gradient_has_the_cpu_rooms_bits(options):
    rng = np.random.default_rng(6)
    check_backward(
        [backward_case(rng, w, k, dtype) for w, k in SHAPES for dtype in (np.float32, np.float64)], **options
    )


@pytest.mark.parametrize("build", [pytest.param(b, marks=needs(b)) for b in ("asan", "tsan")])
def test_no_sanitizer_finds_a_fault(build):
    rng = np.random.default_rng(7)
    shapes = [((40,), 31), ((3, 3), 9), ((2, 3, 4), 24)]
    check_forward([(of(rng, (1, sum(w)), np.float32), w, k) for w, k in shapes for of in (ties, special)], build=build)
    check_backward([backward_case(rng, w, k, np.float32, 1) for w, k in shapes], build=build)
