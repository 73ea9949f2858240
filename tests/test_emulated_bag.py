"""Embedding bags in the CUDA room: the kernels have the CPU room's bits under every schedule; the ops reach them."""

from __future__ import annotations

import contextlib
import types

import fake_cupy
import numpy as np
import pytest
from emulated_cuda.run import SCHEDULES, Launch, needs, several

import sdm_lite
from sdm_lite import cpu, cuda_kernels, errors, reference
from sdm_lite.autograd import Tensor
from sdm_lite.cuda_kernels import modules

pytestmark = needs("plain")

FORWARD, BACKWARD = "embedding_bag_forward.cu", "embedding_bag_backward.cu"
#: S, D, n, K: several blocks of columns, odd widths, slots that are read often or twice in a token, one of each
SIZES = ((40, 130, 9, 5), (3, 17, 12, 4), (1, 1, 1, 1), (500, 33, 6, 3), (8, 256, 2, 20))
NO_SIZES = ((4, 3, 0, 2), (4, 3, 2, 0))


def bag(sizes, dtype, seed=0):
    """Return values, slots, weights, dreadings; weights of both signs of zero, and slot 0 in most tokens."""
    rng, (num_slots, width, tokens, count) = np.random.default_rng(seed), sizes
    values, dreadings = (rng.standard_normal((n, width)).astype(dtype) for n in (num_slots, tokens))
    slots = np.where(rng.random((tokens, count)) < 0.3, 0, rng.integers(0, num_slots, (tokens, count)))
    weights = rng.choice(np.array([0.0, -0.0, 1.0, 0.3, -1.7], dtype), slots.shape)
    return values, slots.astype(np.int32), weights, dreadings


def launches_of(case):
    """Return the launches of both files over one case, and the three arrays that they fill."""
    values, slots, weights, dreadings = case
    width, (tokens, count) = values.shape[1], slots.shape
    real = {4: "float", 8: "double"}[values.itemsize]
    readings, dweights = np.full_like(dreadings, np.nan), np.full_like(weights, np.nan)
    dvalues, order = np.zeros_like(values), np.argsort(slots, axis=None, kind="stable")
    sizes, blocks = [np.int32(count), np.int32(width)], -(-width // 128)
    forward = [values, slots, weights, readings, *sizes]
    of_values = [dreadings, slots, weights, order, dvalues, np.int32(slots.size), *sizes]
    of_weights = [dreadings, values, slots, dweights, np.int64(slots.size), *sizes]
    backward = [
        Launch(f"embedding_bag_values_backward<{real}>", (slots.size, blocks), 128, of_values),
        Launch(f"embedding_bag_weights_backward<{real}>", -(-slots.size // 8), 128, of_weights),
    ]
    filled = readings, dvalues, dweights
    return Launch(f"embedding_bag_forward<{real}>", (tokens, blocks), 128, forward), backward, filled


def check(cases, **options):
    made = [launches_of(case) for case in cases]
    serve = modules.INSTANCES if options.get("build", "plain") == "plain" else {FORWARD: (), BACKWARD: ()}
    several(FORWARD, [forward for forward, _, _ in made], serve=serve[FORWARD], **options)
    several(BACKWARD, [launch for _, backward, _ in made for launch in backward], serve=serve[BACKWARD], **options)
    for (values, slots, weights, dreadings), (_, _, filled) in zip(cases, made, strict=True):
        want = (
            cpu.embedding_bag_forward(values, slots, weights),
            cpu.embedding_bag_backward(dreadings, slots, weights, len(values)),
            cpu.embedding_bag_weights_backward(dreadings, values, slots),
        )
        for got, expected in zip(filled, want, strict=True):
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_kernels_have_the_cpu_rooms_bits(options):
    check([bag(sizes, dtype) for sizes in SIZES for dtype in (np.float32, np.float64)], **options)


@pytest.mark.parametrize("build", [pytest.param(b, marks=needs(b)) for b in ("asan", "tsan")])
def test_no_sanitizer_finds_a_fault(build):
    check([bag(sizes, np.float32) for sizes in ((3, 17, 4, 3), (8, 129, 2, 3))], build=build, workers=2)


# ---- the doors and the ops, on CuPy's stand-in ------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    return fake_cupy.install(monkeypatch)


@pytest.mark.parametrize("sizes", [*SIZES[:3], *NO_SIZES], ids=str)
def test_doors(cupy, sizes):
    values, slots, weights, dreadings = bag(sizes, np.float32)
    up = cupy.asarray
    got = (
        cuda_kernels.embedding_bag_forward(up(values), up(slots), up(weights)),
        cuda_kernels.embedding_bag_backward(up(dreadings), up(slots), up(weights), len(values)),
        cuda_kernels.embedding_bag_weights_backward(up(dreadings), up(values), up(slots)),
        *cuda_kernels.number_slots(up(slots), len(values)),
    )
    want = (
        cpu.embedding_bag_forward(values, slots, weights),
        cpu.embedding_bag_backward(dreadings, slots, weights, len(values)),
        cpu.embedding_bag_weights_backward(dreadings, values, slots),
        *reference.number_slots(slots, len(values)),
    )
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, cupy.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        assert a.host.tobytes() == b.tobytes()


def test_ops_on_cupy_arrays(cupy):
    values, slots, weights, dreadings = bag((40, 6, 8, 3), np.float32)
    slots, weights = slots.reshape(2, 4, 3).astype(np.int64), weights.reshape(2, 4, 3)
    up = cupy.asarray
    got = sdm_lite.embedding_bag(up(values), up(slots), up(weights))
    assert isinstance(got, cupy.ndarray) and got.shape == (2, 4, 6)
    assert np.array_equal(got.host, sdm_lite.embedding_bag(values, slots, weights))
    upstream = dreadings.reshape(2, 4, 6)
    coalesced = sdm_lite.embedding_bag_gradient(up(upstream), up(slots), up(weights), 40)
    for a, b in zip(coalesced, sdm_lite.embedding_bag_gradient(upstream, slots, weights, 40), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a.host, b)


def test_the_tape_runs_on_the_device(cupy):
    values, slots, weights, _ = bag((40, 6, 8, 3), np.float32)

    def run(up):
        v, w = Tensor(up(values), requires_grad=True), Tensor(up(weights), requires_grad=True)
        sdm_lite.embedding_bag(v, up(slots), w).sum().backward()  # an upstream gradient of stride 0
        return v.grad, w.grad

    for got, want in zip(run(cupy.asarray), run(np.asarray), strict=True):
        assert isinstance(got, cupy.ndarray) and np.array_equal(got.host, want)


def test_mistakes_say_what_the_host_says(cupy):
    values, slots, weights, _ = bag((40, 6, 8, 3), np.float32)
    slots[3, 1] = 40
    with pytest.raises(errors.SlotError) as on_cpu:
        sdm_lite.embedding_bag(values, slots, weights)
    up = cupy.asarray
    with pytest.raises(errors.SlotError) as on_gpu:
        sdm_lite.embedding_bag(up(values), up(slots), up(weights))
    assert str(on_gpu.value) == str(on_cpu.value) and not cupy.launches
    with pytest.raises(errors.DeviceError, match="arrays on cuda:0"):
        sdm_lite.embedding_bag(up(values), up(slots), up(weights), backend="cpu")
    huge = types.SimpleNamespace(size=2**31, shape=(2**30, 2))
    with pytest.raises(errors.ValueRangeError, match=r"fewer than 2\^31 reads"):
        cuda_kernels.embedding_bag_backward(up(values), huge, None, 40)


@pytest.mark.parametrize("op", ["idw_product_key_topk", "product_key_lookup", "fwpkm"])
def test_what_no_cuda_room_serves_says_so(cupy, op):
    keys, queries = cupy.zeros((1, 2, 4, 3), np.float32), cupy.zeros((1, 2, 1, 6), np.float32)
    with pytest.raises(errors.DeviceError, match=rf"{op}.*no cuda room serves this"):
        if op == "fwpkm":
            state = sdm_lite.FwPKMState(np.zeros((1, 2, 4, 3), np.float32), np.zeros((16, 5), np.float32))
            sdm_lite.fwpkm(queries, cupy.zeros((1, 2, 5), np.float32), cupy.zeros((1, 2), np.float32), state)
        else:
            getattr(sdm_lite, op)(queries, keys, 2)


def test_torch_tensors(cupy, monkeypatch):
    """CPU tensors that pass for a GPU's: the op and its three backwards run in the cuda room, in torch's memory."""
    torch = pytest.importorskip("torch")
    from sdm_lite import torch_bridge_arrays, torch_product_keys

    values, slots, weights, dreadings = bag((40, 6, 8, 3), np.float32)
    want_w = sdm_lite.cpu.embedding_bag_weights_backward(dreadings, values, slots)
    want_v = sdm_lite.cpu.embedding_bag_backward(dreadings, slots, weights, 40)
    monkeypatch.setattr(torch_bridge_arrays, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: fake_cupy.Array(x.numpy(), x))
    monkeypatch.setattr(torch, "from_dlpack", lambda x: torch.from_numpy(x.host))
    for sparse in (False, True):
        v, w = (torch.from_numpy(x.copy()).requires_grad_() for x in (values, weights))
        y = torch_product_keys.embedding_bag(v, torch.from_numpy(slots), w, sparse, "cuda")
        y.backward(torch.from_numpy(dreadings))
        assert np.array_equal(y.detach().numpy(), cpu.embedding_bag_forward(values, slots, weights))
        assert np.array_equal(w.grad.numpy(), want_w)
        assert np.array_equal((v.grad.to_dense() if sparse else v.grad).numpy(), want_v)
    assert {run[0].split("<")[0] for run in cupy.launches} == {
        "embedding_bag_forward", "embedding_bag_values_backward", "embedding_bag_weights_backward",
    }  # fmt: skip
