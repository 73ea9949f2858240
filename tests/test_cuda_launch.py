"""The CUDA room from the public ops to the results: CuPy's stand-in runs every launch in the emulator.

Kernels' own tests (schedules, sanitizers, odd shapes) are in test_emulated_*.py; here it is what launches hand them.
"""

from __future__ import annotations

import contextlib
import types

import fake_cupy
import numpy as np
import pytest
from cases import DeltaFields, make_case
from emulated_cuda.run import needs
from foreign import ForeignArray
from tolerances import assert_close

import sdm_lite
from sdm_lite import cpu, cuda_kernels, errors, reference
from sdm_lite.arrays import widen_state
from sdm_lite.autograd import Tensor
from sdm_lite.rooms import DeltaGradients, DeltaInputs, DeltaOptions

pytestmark = needs("plain")

FIELDS = {
    fields.name: fields
    for fields in (
        DeltaFields("cuda_plain", B=2, T=6, H=2, N=24, D=40, W=4, R=3, order="shuffled"),
        DeltaFields("cuda_slot_decay", B=1, T=40, H=1, N=12, D=5, W=4, R=4, decay="slot", alpha="uniform"),
        DeltaFields("cuda_packed", H=2, lengths=(3, 0, 7), N=16, D=8, W=3, R=2),
        DeltaFields("cuda_shared", B=2, T=5, H=2, N=12, D=8, W=2, R=2, shared_state=True),
    )
}
ONE_SIDED = [
    DeltaFields("cuda_reads_only", B=1, T=6, H=2, N=12, D=8, W=0, R=3),
    DeltaFields("cuda_writes_only", B=1, T=6, H=2, N=12, D=8, W=3, R=0),
]
RESTORES = ("snapshot", "hybrid", "invert")


@pytest.fixture
def cupy(monkeypatch):
    return fake_cupy.install(monkeypatch)


def uploaded(cupy, x):
    return None if x is None else cupy.asarray(x)


def in_cuda(cupy, case, options, state, dfinal=True):
    inputs = DeltaInputs(*(uploaded(cupy, x) for x in case.inputs))
    table = cupy.asarray(state.copy())
    readings, final, saved = cuda_kernels.sparse_delta_forward(inputs, table, options, save=True, final=True)
    assert np.array_equal(table.host, state), "the functional form changed its state"
    upstream = (cupy.asarray(case.dreadings), cupy.asarray(case.dfinal) if dfinal else None, state.shape)
    gradients = cuda_kernels.sparse_delta_backward(inputs, options, saved, *upstream)
    again = cuda_kernels.sparse_delta_backward(inputs, options, saved, *upstream)
    assert all(np.array_equal(a.host, b.host) for a, b in zip(gradients, again)), "a second backward differs"
    return readings.host, final.host, DeltaGradients(*(x.host for x in gradients))


def in_reference(case, options, dfinal=True):
    """In float64 on the same numbers; every row logged, so that nothing is restored approximately."""
    case = case.astype(np.float64)
    options = DeltaOptions(rule=options.rule, restore="snapshot", state_dtype="float64")
    readings, final, saved = reference.sparse_delta_forward(case.inputs, case.state, options, save=True, final=True)
    upstream = (case.dreadings, case.dfinal if dfinal else None, case.state.shape)
    return readings, final, reference.sparse_delta_backward(case.inputs, options, saved, *upstream)


CALLS = [(name, "shared", restore) for name in FIELDS for restore in RESTORES]
CALLS += [("cuda_slot_decay", "per_slot", restore) for restore in RESTORES]


# the decays of cuda_slot_decay multiply to less than 1e-3, where no bound is promised for invert
@pytest.mark.parametrize(("name", "rule", "restore"), [c for c in CALLS if c[::2] != ("cuda_slot_decay", "invert")])
def test_doors_against_the_reference(cupy, name, rule, restore):
    case = make_case(FIELDS[name], dtype=np.float32)
    options = DeltaOptions(rule=rule, restore=restore)
    got, want = in_cuda(cupy, case, options, case.state), in_reference(case, options)
    for part, a, b in zip(("readings", "final"), got, want):
        assert_close(a, b, "delta_forward", "float32", what=part)
    for part, a, b in zip(DeltaGradients._fields, got[2], want[2]):
        assert_close(a, b, "delta_backward", "float32", restore, what=part)
    if name == "cuda_slot_decay" and restore == "hybrid":  # where a part of the rows is logged: the cpu room's part
        inputs = DeltaInputs(*(uploaded(cupy, x) for x in case.inputs))
        call = cuda_kernels.call.open_call(inputs, options, case.state.shape[-2])
        log = cuda_kernels.log.open_log(call, options, "-")
        logged = (log.place.host >= 0).sum()
        assert 0 < logged < log.place.size
        _, rows = cpu.plan.plan_log(
            case.inputs.write_slots, case.inputs.write_weights, case.inputs.log_decay, case.inputs.beta,
            cpu.plan.make_lanes(*case.inputs.values.shape[:3], None, False), np.array([0, 12]), call.per_slot,
            options.restore_tau,
        )  # fmt: skip
        assert logged == rows


@pytest.mark.parametrize(
    ("restore", "storage"), [("hybrid", None), ("invert", None), ("snapshot", "fp8"), ("snapshot", "int4")]
)
def test_16_bit_states_and_short_logs(cupy, restore, storage):
    case = make_case(FIELDS["cuda_plain"], dtype=np.float32)
    bits = case.state_bits("bfloat16")
    options = DeltaOptions(restore=restore, snapshot_dtype=storage, state_dtype="bfloat16")
    readings, final, gradients = in_cuda(cupy, case, options, bits)
    exact = cpu.sparse_delta_forward(case.inputs, bits, options, save=True, final=True)
    assert final.dtype == np.uint16
    assert_close(readings, exact[0], "delta_forward", "bfloat16")
    assert_close(widen_state(final, "bfloat16"), widen_state(exact[1], "bfloat16"), "delta_forward", "bfloat16")
    snapshot = DeltaOptions(restore="snapshot", state_dtype="bfloat16")
    saved = cpu.sparse_delta_forward(case.inputs, bits, snapshot, save=True)[2]
    want = cpu.sparse_delta_backward(case.inputs, snapshot, saved, case.dreadings, case.dfinal, case.state.shape)
    # a stored row is off by half a step of its largest entry: 1/14 for int4, 2^-4 for fp8 of each entry; the inverse
    # of a bf16 row by 2^-8 over the smallest product of decays, here about 0.7
    bound = {None: 2e-2, "fp8": 6e-2, "int4": 8e-2}[storage]
    for part, a, b in zip(DeltaGradients._fields, gradients, want):
        assert np.abs(a - b).max() <= bound * np.abs(b).max(), part
    for exact_part in ("values", "initial_state"):  # they do not depend on the rows that are restored
        assert_close(
            getattr(gradients, exact_part), getattr(want, exact_part), "delta_backward", "bfloat16", "snapshot"
        )


def test_gradients_without_a_final_state_or_one_of_the_state(cupy):
    case = make_case(FIELDS["cuda_plain"], dtype=np.float32)
    options = DeltaOptions(restore="snapshot")
    got, want = in_cuda(cupy, case, options, case.state, dfinal=False), in_reference(case, options, dfinal=False)
    for part, a, b in zip(DeltaGradients._fields, got[2], want[2]):
        assert_close(a, b, "delta_backward", "float32", "snapshot", what=part)
    inputs = DeltaInputs(*(uploaded(cupy, x) for x in case.inputs))
    saved = cuda_kernels.sparse_delta_forward(inputs, cupy.asarray(case.state), options, save=True)[2]
    found = cuda_kernels.sparse_delta_backward(inputs, options, saved, cupy.asarray(case.dreadings), None, None)
    assert found.initial_state is None and np.array_equal(found.values.host, got[2].values)


def test_token_by_token_is_the_whole_sequence(cupy):
    """Few tokens take another kernel than sequences: the same bits, in place, in any layout of the state."""
    case = make_case(FIELDS["cuda_plain"], dtype=np.float32)
    whole = cupy.asarray(case.state.copy())
    inputs = DeltaInputs(*(uploaded(cupy, x) for x in case.inputs))
    readings = cuda_kernels.sparse_delta_update(inputs, whole, DeltaOptions())
    assert any("sparse_delta_forward" in run[0] for run in cupy.launches)
    cupy.launches.clear()
    columns_first = cupy.asarray(np.asfortranarray(case.state))
    for t in range(case.fields.T):
        one = DeltaInputs(*(uploaded(cupy, x) for x in case.token_range(t, t + 1)))
        step = cuda_kernels.sparse_delta_update(one, columns_first, DeltaOptions())
        assert np.array_equal(step.host[:, 0], readings.host[:, t])
    assert {run[0].split("<")[0] for run in cupy.launches} == {"decode_step"}
    assert np.array_equal(columns_first.host, whole.host)


@pytest.mark.parametrize("name", ["no_tokens", "no_batch", "shared_no_batch", "packed_empty"])
def test_empty_axes(cupy, name):
    """T = 0 gives no readings and hands the state, and its gradient, through."""
    case = make_case(name, dtype=np.float32)
    for restore in RESTORES:
        options = DeltaOptions(restore=restore)
        readings, final, gradients = in_cuda(cupy, case, options, case.state)
        want = cpu.sparse_delta_forward(case.inputs, case.state, options, save=True, final=True)
        upstream = (case.dreadings, case.dfinal, case.state.shape)
        want_gradients = cpu.sparse_delta_backward(case.inputs, options, want[2], *upstream)
        for a, b in zip((readings, final, *gradients), (*want[:2], *want_gradients), strict=True):
            assert a.shape == b.shape and np.array_equal(a, b)


@pytest.mark.parametrize("fields", ONE_SIDED, ids=lambda fields: fields.name)
def test_only_reads_and_only_writes(cupy, fields):
    case, options = make_case(fields, dtype=np.float32), DeltaOptions(restore="snapshot")
    got, want = in_cuda(cupy, case, options, case.state), in_reference(case, options)
    for part, a, b in zip(("readings", "final"), got, want):
        assert_close(a, b, "delta_forward", "float32", what=part)
    for part, a, b in zip(DeltaGradients._fields, got[2], want[2]):
        assert_close(a, b, "delta_backward", "float32", "snapshot", what=part)


# ---- the public ops -----------------------------------------------------------------------------------------------


def test_ops_on_cupy_arrays(cupy):
    case = make_case(FIELDS["cuda_plain"], dtype=np.float32)
    call = [cupy.asarray(x) for x in case.arguments()]
    call[1] = call[1].astype(np.int64)
    readings, final = sdm_lite.sparse_delta_rule(*call, output_final_state=True)
    want, want_final = sdm_lite.sparse_delta_rule(*case.arguments(), output_final_state=True)
    assert isinstance(readings, cupy.ndarray) and isinstance(final, cupy.ndarray)
    assert_close(readings.host, want, "delta_forward", "float32")
    assert_close(final.host, want_final, "delta_forward", "float32")
    in_place = sdm_lite.sparse_delta_rule_(*call)
    assert np.array_equal(in_place.host, readings.host) and np.array_equal(call[7].host, final.host)


def test_slots_and_decays_are_checked_on_the_device(cupy):
    case = make_case(FIELDS["cuda_plain"], dtype=np.float32)
    for name, value in (("write_slots", 24), ("read_slots", -1), ("write_slots", "twice"), ("log_decay", 0.5)):
        arguments = dict(zip(DeltaInputs._fields, (x.copy() for x in case.arguments()[:7])))
        if value == "twice":
            arguments[name][1, 2, 0, 3] = arguments[name][1, 2, 0, 1]
        else:
            arguments[name].reshape(-1)[17] = value
        host = [*arguments.values(), case.state]
        with pytest.raises(errors.SdmError) as on_cpu:
            sdm_lite.sparse_delta_rule(*host)
        cupy.launches.clear()
        with pytest.raises(type(on_cpu.value)) as on_gpu:
            sdm_lite.sparse_delta_rule(*(cupy.asarray(x) for x in host))
        assert str(on_gpu.value) == str(on_cpu.value)
        assert {run[0].split("<")[0] for run in cupy.launches} <= {"check_slots", "check_decays"}


@needs("asan")
def test_a_check_of_bad_values_stays_in_its_arrays(monkeypatch):
    cupy = fake_cupy.install(monkeypatch, schedule={"build": "asan"})
    case = make_case(FIELDS["cuda_packed"], dtype=np.float32)
    for slot in (-(2**31), 2**31 - 1, 16):
        inputs = DeltaInputs(*(uploaded(cupy, x.copy()) for x in case.inputs))
        assert cuda_kernels.values_are_fine(inputs, 16)
        inputs.read_slots.host.reshape(-1)[-1] = slot
        assert not cuda_kernels.values_are_fine(inputs, 16)


def test_offsets_are_checked_and_made_safe(cupy):
    case = make_case(FIELDS["cuda_packed"], dtype=np.float32)
    call = [cupy.asarray(x) for x in case.arguments()]
    bad = cupy.asarray(np.array([0, 12, 3, 10], np.int64))
    with pytest.raises(errors.ValueRangeError, match="cu_seqlens"):
        sdm_lite.sparse_delta_rule(*call, cu_seqlens=bad)
    safe = cuda_kernels.call._offsets(bad, 10).host
    assert safe.tolist() == [0, 10, 10, 10]
    right = cupy.asarray(case.inputs.cu_seqlens)
    assert np.array_equal(cuda_kernels.call._offsets(right, 10).host, case.inputs.cu_seqlens)
    readings, _ = sdm_lite.sparse_delta_rule(*call, cu_seqlens=right)
    want, _ = sdm_lite.sparse_delta_rule(*case.arguments(), cu_seqlens=case.inputs.cu_seqlens)
    assert_close(readings.host, want, "delta_forward", "float32")


def test_addressing_has_the_bits_of_the_cpu_room(cupy):
    rng = np.random.default_rng(3)
    scores = rng.integers(-2, 3, (2, 5, 24)).astype(np.float32)
    scores[0, 0, 3] = np.nan
    for factors, k in ((2, 9), ((5, 9, 10), 33), (1, 24)):
        got = sdm_lite.product_key_topk(cupy.asarray(scores), k, factors=factors)
        for a, b in zip(got, sdm_lite.product_key_topk(scores, k, factors=factors)):
            assert a.dtype == b.dtype and np.array_equal(a.host, b)
    ids = np.array([[3, -4, 2**40]])
    assert np.array_equal(sdm_lite.hash_slots(cupy.asarray(ids), 50, 6).host, sdm_lite.hash_slots(ids, 50, 6))


def test_the_tape_runs_on_the_device(cupy):
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((1, 3, 1, 16)).astype(np.float32)
    case = make_case(FIELDS["cuda_plain"], dtype=np.float32, B=1, T=3, H=1, N=64, W=4, R=4)

    def run(up):
        s = Tensor(up(scores), requires_grad=True)
        top, slots = sdm_lite.product_key_topk(s, 4)
        values, beta = Tensor(up(case.inputs.values), requires_grad=True), up(case.inputs.beta)
        state = Tensor(up(case.state), requires_grad=True)
        decay = up(case.inputs.log_decay[..., 0])
        y, _ = sdm_lite.sparse_delta_rule(values, slots, top, decay, beta, slots, top, state)
        (y * y).sum().backward()
        return [s.grad, values.grad, state.grad]

    for got, want in zip(run(cupy.asarray), run(np.asarray)):
        assert isinstance(got, cupy.ndarray)
        assert_close(got.host, want, "delta_backward", "float32", "hybrid")


class NumbaArray:
    """What Numba's device arrays show: no DLPack, only the CUDA array interface."""

    def __init__(self, host):
        self.host, self.shape, self.dtype = host, host.shape, host.dtype

    @property
    def __cuda_array_interface__(self):
        return self.host.__array_interface__

    def host_view(self):
        return self.host


def test_arrays_with_the_cuda_array_interface(cupy, monkeypatch):
    import sys

    scores = np.random.default_rng(5).standard_normal((4, 16)).astype(np.float32)
    want = sdm_lite.product_key_topk(scores, 3)
    got = sdm_lite.product_key_topk(NumbaArray(scores), 3)
    assert all(isinstance(a, cupy.ndarray) and np.array_equal(a.host, b) for a, b in zip(got, want))
    numba_cuda = types.SimpleNamespace(as_cuda_array=lambda x: NumbaArray(x.host))
    monkeypatch.setitem(sys.modules, "numba.cuda", numba_cuda)
    monkeypatch.setattr(NumbaArray, "__cuda_ndarray__", True, raising=False)
    got = sdm_lite.product_key_topk(NumbaArray(scores), 3)
    assert all(isinstance(a, NumbaArray) and np.array_equal(a.host, b) for a, b in zip(got, want))


class OnGpu(ForeignArray):
    """A stranger's array on a GPU; its memory can be had by DLPack, since the stand-in's is the host's."""

    def __init__(self, array):
        super().__init__(array, (2, 0))

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda x: OnGpu(x.host))


def test_arrays_with_dlpack(cupy, monkeypatch):
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: fake_cupy.Array(x.array))
    scores = np.random.default_rng(6).standard_normal((4, 16)).astype(np.float32)
    got = sdm_lite.product_key_topk(OnGpu(scores), 3)
    assert all(isinstance(a, OnGpu) for a in got)
    assert all(np.array_equal(a.array, b) for a, b in zip(got, sdm_lite.product_key_topk(scores, 3)))


# ---- torch: CPU tensors that pass for a GPU's -----------------------------------------------------------------------


@pytest.fixture
def torch(cupy, monkeypatch):
    torch = pytest.importorskip("torch")
    from sdm_lite import torch_bridge_arrays

    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch_bridge_arrays, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: fake_cupy.Array(x.numpy(), x))
    monkeypatch.setattr(torch, "from_dlpack", lambda x: torch.from_numpy(x.host))
    return torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_bring_their_stream_and_memory(torch, cupy, dtype, monkeypatch):
    from sdm_lite import torch_bridge

    case = make_case(FIELDS["cuda_plain"], dtype=np.float32)
    tensors = [torch.from_numpy(x.copy()) for x in case.arguments()]
    tensors[0], tensors[7] = tensors[0].to(getattr(torch, dtype)), tensors[7].to(getattr(torch, dtype))
    leaves = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    allocated = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(empty(*a, **k)) or allocated[-1])
    call = [*tensors[:3], tensors[3][..., None], *tensors[4:7]]
    options = DeltaOptions(state_dtype=dtype)
    readings, final = torch_bridge.sparse_delta_rule(*call, tensors[7], None, options, True, True, "cuda")
    assert cupy.streams and all(s.__cuda_stream__() == (0, 7) for s in cupy.streams)
    assert any(x.data_ptr() == final.data_ptr() for x in allocated), "the final state is not in torch's memory"
    assert readings.dtype == final.dtype == getattr(torch, dtype)
    (readings.float().sum() + final.float().sum()).backward()
    got = [readings.detach(), final.detach(), *(x.grad for x in leaves)]

    for x in leaves:
        x.grad = None
    monkeypatch.undo()
    want = sdm_lite.sparse_delta_rule(*tensors, output_final_state=True)
    (want[0].float().sum() + want[1].float().sum()).backward()
    for a, b in zip(got, [*(x.detach() for x in want), *(x.grad for x in leaves)], strict=True):
        assert a.dtype == b.dtype
        assert_close(
            a.double().numpy(),
            b.double().numpy(),
            "delta_backward",
            dtype,
            "snapshot" if dtype == "bfloat16" else "hybrid",
        )


def test_slot_usage_is_counted_where_the_slots_are(torch, cupy):
    from sdm_lite.errors import SlotError
    from sdm_lite.nn import SlotUsage

    slots = torch.from_numpy(np.random.default_rng(7).integers(0, 9, (3, 5, 4)))
    usage = SlotUsage(10)
    for _ in range(2):
        usage.add(slots)
    assert cupy.streams, "not counted in the cuda room"
    assert torch.equal(usage.counts, 2 * torch.bincount(slots.reshape(-1), minlength=10))
    with pytest.raises(SlotError, match="0 to 10"):
        usage.add(torch.tensor([0, 10]))
    assert int(usage.counts.sum()) == 2 * slots.numel() and usage.report().dead.tolist() == [9]
