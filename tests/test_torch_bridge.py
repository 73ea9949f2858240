"""The torch bridge, eager: rooms' numbers come through bit for bit, and torch's habits work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import DELTA_CASES, case_id, make_case, make_scores
from torch_memory import FLOATS, Memory, gradients, leaves_of, rule, rule_, same_bits, tensors, upstream

import sdm_lite
from sdm_lite import errors, rooms, torch_bridge, torch_bridge_arrays
from sdm_lite.rooms import DeltaOptions

ROOMS = [name for name, state in rooms.backends().items() if state == "ready"]
SMALL = make_case("plain")
NP = {torch.float32: np.float32, torch.float64: np.float64}


class Spy:
    """A room that counts what goes through its doors."""

    def __init__(self, room):
        self.room, self.calls = room, []

    def __getattr__(self, name):
        door = getattr(self.room, name)

        def through(*args, **options):
            result = door(*args, **options)
            self.calls.append((name, args, options, result))
            return result

        return through


@pytest.fixture
def spy(monkeypatch):
    spy = Spy(rooms.room("reference", "test"))
    monkeypatch.setattr(rooms, "room", lambda name, op: spy)
    return spy


# ---- numbers: the bridge adds nothing to a room's ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("fields", DELTA_CASES, ids=case_id)
def test_delta_is_the_room_bit_for_bit(fields, backend, dtype):
    case = make_case(fields, dtype=NP[dtype])
    named = tensors(case, dtype=dtype)
    readings, final = rule(named, output_final_state=True, backend=backend)
    got = [readings, final, *gradients((readings, final), leaves_of(named), grad_outputs=upstream(case, dtype))]

    room, options = rooms.room(backend, "test"), DeltaOptions(state_dtype=np.dtype(NP[dtype]).name)
    *outputs, saved = room.sparse_delta_forward(case.inputs, case.state, options, save=True, final=True)
    want = room.sparse_delta_backward(case.inputs, options, saved, case.dreadings, case.dfinal, case.state.shape)
    assert same_bits(got, [torch.from_numpy(x) for x in (*outputs, *want)])


@pytest.mark.parametrize("rule_name", ["shared", "per_slot"])
@pytest.mark.parametrize("backend", ROOMS)
def test_options_reach_the_room(rule_name, backend):
    named = tensors(SMALL)
    options = DeltaOptions(rule_name, restore="snapshot", restore_tau=0.5, snapshot_dtype="bf16")
    room, case = rooms.room(backend, "test"), SMALL.astype(np.float32)
    readings, _ = rule(
        named, rule=rule_name, restore="snapshot", restore_tau=0.5, snapshot_dtype="bf16", backend=backend
    )
    got = gradients(readings, leaves_of(named), grad_outputs=upstream(SMALL)[0])
    _, _, saved = room.sparse_delta_forward(case.inputs, case.state, options, save=True)
    want = room.sparse_delta_backward(case.inputs, options, saved, case.dreadings, None, case.state.shape)
    assert same_bits(got, [torch.from_numpy(x) for x in want])


@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("kind", ["distinct", "ties", "extreme"])
def test_topk_and_hash_are_the_room_bit_for_bit(kind, backend):
    widths, k, room = (5, 4), 6, rooms.room(backend, "test")
    array = make_scores(kind, 14, widths)
    scores = torch.from_numpy(array).view(2, 7, 9).requires_grad_()
    values, slots = sdm_lite.product_key_topk(scores, k, factors=widths, backend=backend)
    want_values, want_slots = room.product_key_topk_forward(array, widths, k)
    dvalues = np.random.default_rng(0).standard_normal((14, k)).astype(np.float32)
    (dscores,) = gradients(values, [scores], grad_outputs=torch.from_numpy(dvalues).view(2, 7, k))
    want = (want_values, want_slots, room.product_key_topk_backward(dvalues, want_slots, widths))
    assert same_bits([x.reshape(14, -1) for x in (values, slots, dscores)], [torch.from_numpy(x) for x in want])
    ids, seed = torch.tensor([[3, -1], [2**40, 3]]), 2**63 + 5
    got = sdm_lite.hash_slots(ids, 50, 4, seed=seed, backend=backend)
    assert same_bits([got.view(4, 4)], [torch.from_numpy(room.hash_slots_forward(ids.numpy().ravel(), 50, 4, seed))])


def test_gradients_against_finite_differences():
    # torch's own checker, in float64; one direction of small steps per input
    case = make_case("D17_slot_decay", T=4, D=3)
    named = tensors(case, dtype=torch.float64)
    names = list(FLOATS)

    def f(*leaves):
        return rule({**named, **dict(zip(names, leaves))}, output_final_state=True, backend="reference")

    assert torch.autograd.gradcheck(f, leaves_of(named), fast_mode=True)
    scores = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: sdm_lite.product_key_topk(s, 5, backend="reference")[0], scores)


# ---- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ROOMS)
def test_any_dtypes_compute_as_their_float32_values(dtype, state_dtype, backend):
    named = tensors(SMALL, dtype=dtype, state_dtype=state_dtype)
    readings, final = rule(named, output_final_state=True, backend=backend)
    assert readings.dtype == dtype and final.dtype == state_dtype
    dy, dfinal = upstream(SMALL, dtype, state_dtype)
    got = gradients((readings, final), leaves_of(named), grad_outputs=(dy, dfinal))
    assert [g.dtype for g in got] == [x.dtype for x in leaves_of(named)]

    # the same call on operands widened by hand; only the state keeps its dtype, which rounds its rows
    compute = torch.float64 if state_dtype == torch.float64 else torch.float32
    wide = {name: x.detach().to(compute) if name in FLOATS[:-1] else x.detach() for name, x in named.items()}
    for name in FLOATS:
        wide[name].requires_grad_()
    outputs = rule(wide, output_final_state=True, backend=backend)
    want = gradients(outputs, leaves_of(wide), grad_outputs=(dy.to(compute), dfinal))
    assert same_bits([readings, final, *got], [outputs[0].to(dtype), outputs[1]] + [
        g.to(x.dtype) for g, x in zip(want, leaves_of(named))
    ])  # fmt: skip


def test_a_bf16_row_sums_in_float32():
    # slots 0..8 hold 256 and eight times 1; in bf16 sums 256 + 1 would stay 256
    state = torch.tensor([256.0] + [1.0] * 8, dtype=torch.bfloat16).view(1, 1, 9, 1)
    one = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    slots = torch.arange(9, dtype=torch.int32).view(1, 1, 1, 9)
    for backend in ROOMS:
        zero = one[..., 0]
        readings, _ = sdm_lite.sparse_delta_rule(
            one, slots[..., :1], one, zero, zero, slots, torch.ones(1, 1, 1, 9), state, backend=backend
        )
        assert readings.dtype == torch.bfloat16 and readings.item() == 264


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_scores_are_summed_in_float32(dtype):
    scores = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    values, slots = sdm_lite.product_key_topk(scores, 5, backend="reference")
    wide_values, wide_slots = sdm_lite.product_key_topk(scores.detach().float(), 5, backend="reference")
    assert values.dtype == torch.float32 and torch.equal(slots, wide_slots) and torch.equal(values, wide_values)
    assert gradients(values.float().square().sum(), [scores])[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_parameters_under_autocast(dtype):
    model, x = Memory(), torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=dtype):
        readings, state = model(x, final=True)
    assert readings.dtype == dtype, "values come from a Linear, so in autocast's dtype"
    assert state.dtype == torch.float32, "the state keeps its dtype"
    (readings.float().square().sum() + state.square().sum()).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_grad_scaler_training_step():
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    found = []
    for scale in (1.0, 2.0**10):
        model = Memory()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append([p.grad.clone() for p in model.parameters()])
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters()))
    for one, scaled in zip(*found):
        # powers of two scale exactly, except where an fp16 gradient of the unscaled run was subnormal: 6e-8 each
        torch.testing.assert_close(one, scaled, rtol=1e-3, atol=1e-5)


# ---- layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ROOMS)
def test_strided_operands(backend):
    named = tensors(SMALL, grad=False)
    want = rule(named, output_final_state=True, backend=backend)
    apart = {}
    for name, x in named.items():  # every element two cells from the next, axes stored in reverse
        wide = torch.zeros(*reversed(x.shape), 2, dtype=x.dtype)[..., 0].permute(*reversed(range(x.ndim)))
        apart[name] = wide.copy_(x)
    assert same_bits(rule(apart, output_final_state=True, backend=backend), want)
    state = apart["state"]
    readings = rule_(apart, backend=backend)
    assert same_bits([readings, state], want), "a strided state is written where it lies"


@pytest.mark.parametrize("backend", ROOMS)
def test_expanded_state_and_stride_0_upstream_gradients(backend):
    named = tensors(make_case("plain", B=3))
    named["state"] = named["state"][:1].expand(3, -1, -1, -1)
    alone = {**named, "state": named["state"].detach().contiguous().requires_grad_()}
    outputs, copies = (rule(n, output_final_state=True, backend=backend) for n in (named, alone))
    assert same_bits(outputs, copies)
    ones = torch.ones_like(outputs[0]), torch.ones_like(outputs[1])
    by_sum = gradients(outputs[0].sum() + outputs[1].sum(), leaves_of(named), retain_graph=True)
    assert same_bits(by_sum, gradients(outputs, leaves_of(named), grad_outputs=ones))


def test_int64_slots_are_not_cut_to_32_bits():
    named = tensors(SMALL, grad=False)
    wide = {name: x.long() if name.endswith("slots") else x for name, x in named.items()}
    assert same_bits(rule(wide, backend="reference")[:1], rule(named, backend="reference")[:1])
    wide["write_slots"][0, 3, 1, 2] += 2**32  # the low 32 bits are a slot of the table
    with pytest.raises(errors.SlotError, match=r"write_slots.*\[0, 3, 1\]"):
        rule(wide, backend="reference")


# ---- what is saved, and for whom ---------------------------------------------------------------------------------


def test_nothing_is_saved_where_no_gradient_is_needed(spy):
    named = tensors(SMALL)
    with torch.no_grad():
        rule(named)
    rule(tensors(SMALL, grad=False))
    forwards = [call for call in spy.calls if call[0] == "sparse_delta_forward"]
    assert [options["save"] for _, _, options, _ in forwards] == [False, False]
    rule(named)
    assert spy.calls[-1][2] == {"save": True, "final": False}


def test_an_unused_final_state_has_no_gradient(spy):
    named = tensors(SMALL)
    readings, final = rule(named, output_final_state=True)
    readings.sum().backward(retain_graph=True)
    assert spy.calls[-1][0] == "sparse_delta_backward" and spy.calls[-1][1][4] is None
    by_none = [x.grad.clone() for x in leaves_of(named)]
    got = gradients((readings, final), leaves_of(named), grad_outputs=(torch.ones_like(readings), 0 * final))
    assert all(torch.equal(a, b) for a, b in zip(by_none, got)), "absent or zero: the same numbers"
    alone = gradients(rule(named, output_final_state=True)[1].sum(), leaves_of(named), allow_unused=True)
    assert not alone[4].any() and alone[5].any(), "readings unused: no gradient of the read weights"


@pytest.mark.parametrize("only", FLOATS)
def test_gradients_for_those_that_need_them(only):
    named = tensors(SMALL)
    readings, _ = rule(named, backend="reference")
    want = gradients(readings.sum(), [named[only]])
    alone = {name: x.detach().requires_grad_(name == only) for name, x in tensors(SMALL, grad=False).items()}
    rule(alone, backend="reference")[0].sum().backward()
    assert same_bits([alone[only].grad], want)
    assert all(x.grad is None for name, x in alone.items() if name != only)


@pytest.mark.parametrize("backend", ROOMS)
def test_backward_again_and_results_stay(backend):
    named = tensors(SMALL)
    outputs = rule(named, output_final_state=True, backend=backend)
    kept = [x.detach().clone() for x in outputs]
    operands = [x.detach().clone() for x in named.values()]
    once, again = (
        gradients(outputs, leaves_of(named), grad_outputs=upstream(SMALL), retain_graph=True) for _ in range(2)
    )
    assert same_bits(once, again)
    assert same_bits(outputs, kept) and same_bits(named.values(), operands)
    outputs[1].detach().zero_()  # the caller owns the state: the graph has rows of its own
    assert same_bits(once, gradients(outputs, leaves_of(named), grad_outputs=upstream(SMALL), retain_graph=True))


@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("name", ["plain", "no_tokens", "packed_shared", "all_slots"])
def test_saved_shares_no_memory(name, backend):
    # torch sees to it that a saved operand was not written on; arrays that alias one would slip through
    case = make_case(name, dtype=np.float32)
    room, options = rooms.room(backend, "test"), DeltaOptions()
    readings, final, saved = room.sparse_delta_forward(case.inputs, case.state, options, save=True, final=True)
    foreign = [x for x in (*case.inputs, case.state, readings, final) if x is not None]
    assert not any(np.shares_memory(a, b) for a in saved for b in foreign)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(saved) for b in saved[:i])
    assert not any(np.shares_memory(a, case.state) for a in (readings, final))


def test_saved_survives_packing_without_a_copy():
    kinds = ("float32", "float64", "uint16", "uint8", "int8", "int32", "int64", "bool")
    saved = tuple(np.arange(6).astype(kind).reshape(shape) for kind, shape in zip(kinds, [(2, 3), (6,), (1, 6, 1)] * 3))
    got = torch_bridge_arrays.unpack_saved(torch_bridge_arrays.pack_saved(saved))
    for a, b in zip(got, saved, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b) and np.shares_memory(a, b)
    empty = (np.empty((0, 3), np.float32), np.array(7, np.int64)) + saved[2:]
    assert [x.shape for x in torch_bridge_arrays.unpack_saved(torch_bridge_arrays.pack_saved(empty))[:2]] == [
        (0, 3),
        (),
    ]


def test_saved_tensors_may_be_moved_by_hooks():
    # offloading keeps copies: nothing may hang on the address of what was saved
    named = tensors(SMALL)
    want = gradients(rule(named, backend="reference")[0].sum(), leaves_of(named))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        readings, _ = rule(named, backend="reference")
    assert same_bits(gradients(readings.sum(), leaves_of(named)), want)


def test_an_operand_written_on_before_the_backward_is_an_error():
    named = tensors(SMALL)
    named["beta"] = named["beta"] * 1
    readings, _ = rule(named, backend="reference")
    named["beta"].detach().mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()


def test_second_derivatives_raise():
    named = tensors(SMALL)
    (dbeta,) = gradients(rule(named, backend="reference")[0].square().sum(), [named["beta"]], create_graph=True)
    with pytest.raises(torch_bridge.SecondDerivativeError, match="sparse_delta_rule: gradient"):
        dbeta.sum().backward()
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    values, _ = sdm_lite.product_key_topk(scores, 5, backend="reference")
    (dscores,) = gradients(values.square().sum(), [scores], create_graph=True)
    with pytest.raises(RuntimeError, match="product_key_topk: gradient"):
        dscores.sum().backward()


# ---- in place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "packed", "no_tokens"])
@pytest.mark.parametrize("backend", ROOMS)
def test_in_place_is_the_functional_form(name, state_dtype, backend):
    named = tensors(make_case(name), state_dtype=state_dtype, grad=False)
    want = rule(named, output_final_state=True, backend=backend)
    state, address = named["state"], named["state"].data_ptr()
    version = state._version
    readings = rule_(named, backend=backend)
    assert same_bits([readings, state], want) and state.data_ptr() == address
    assert state._version > version, "torch has to know that the tensor changed"


def test_in_place_refusals_leave_the_state_alone():
    named = tensors(SMALL, grad=False)
    before = named["state"].clone()
    shared = named["state"][:1].expand(2, -1, -1, -1)
    with pytest.raises(errors.ValueRangeError, match="state.*overlap"):
        rule_({**named, "state": shared}, backend="reference")
    for name in ("state", "values"):
        asking = {**named, name: named[name].clone().requires_grad_()}
        with pytest.raises(errors.ValueRangeError, match=f"{name}.*gradient"):
            rule_(asking, backend="reference")
    wrong = named["write_slots"].clone()
    wrong[1, -1, 0, 0] = 32
    with pytest.raises(errors.SlotError):
        rule_({**named, "write_slots": wrong}, backend="reference")
    assert same_bits([named["state"]], [before])
    with torch.no_grad():  # operands that come from parameters are fine where no gradient is recorded
        rule_({**named, "values": named["values"].clone().requires_grad_()}, backend="reference")


def test_other_devices_are_refused():
    named = {name: x.to("meta") for name, x in tensors(SMALL, grad=False).items()}
    for op in (rule, rule_):
        with pytest.raises(errors.DeviceError, match="this tensor is on meta.*no room serves meta"):
            op(named)
    mixed = {**tensors(SMALL, grad=False), "beta": named["beta"]}
    with pytest.raises(errors.DeviceError, match=r"sparse_delta_rule: beta.*meta"):
        rule(mixed)
    with pytest.raises(errors.DeviceError, match="scores"):
        sdm_lite.product_key_topk(torch.empty(3, 8, device="meta"), 2)
    with pytest.raises(errors.DeviceError, match="ids"):
        sdm_lite.hash_slots(torch.empty(3, dtype=torch.int64, device="meta"), 8, 2)


# ---- tensors that are not what their strides say ---------------------------------------------------------------


ODD = {
    "negative": lambda: torch.randn(4, 6, 2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.randn(4, 6, 2).to_sparse(),
    "meta": lambda: torch.randn(4, 6, 2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(6, 2), torch.zeros(4, 2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(6, 2), torch.zeros(4, 2)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ODD)
def test_a_tensor_without_plain_memory_is_refused(name):
    odd = ODD[name]()
    for use in (
        lambda: sdm_lite.product_key_topk(odd, 1),
        lambda: sdm_lite.hash_slots(odd.long() if name in ("sparse", "meta") else odd, 8, 2),
        lambda: sdm_lite.MemoryState(odd, 1),
    ):
        with pytest.raises((errors.DtypeError, errors.DeviceError)):
            use()


@pytest.mark.parametrize("name", ["values", "write_weights", "state"])
def test_the_delta_rule_refuses_the_negative_bit(name):
    named = tensors(SMALL, grad=False)
    odd = torch.complex(named[name], -named[name]).conj().imag
    assert odd.is_neg() and torch.equal(odd, named[name])
    for use in (rule, rule_):
        with pytest.raises(errors.DtypeError, match=r"resolve_neg"):
            use({**named, name: odd}, backend="reference")


def test_forward_mode_is_refused_and_not_zero():
    scores = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(errors.SdmError, match="forward mode"):
        torch.func.jvp(lambda x: sdm_lite.product_key_topk(x, 2)[0], (scores,), (torch.ones_like(scores),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scores, torch.ones_like(scores))
        with pytest.raises(errors.SdmError, match="forward mode"):
            sdm_lite.product_key_topk(dual, 2)
        sdm_lite.product_key_topk(scores, 2)
