"""Product-key memories through torch: custom ops, gradients, compile, and the state across calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fwpkm_cases import make_mask, make_stream
from naive_fwpkm import stream
from tolerances import relative_error, tolerance
from torch_memory import same_bits

import sdm_lite
from sdm_lite import FwPKMState, errors, fwpkm
from sdm_lite import torch_product_keys_ops as ops
from sdm_lite.fwpkm_stream import StreamOptions
from sdm_lite.torch_bridge import SecondDerivativeError

BACKENDS = ["reference", "cpu"]
SMALL = {"k": 3, "chunk": 4}


def tensors_of(x, grad=True):
    return [torch.tensor(a, requires_grad=grad) for a in x]


def flat_options(**changes):
    options = StreamOptions(**{"k": 3, "chunk": 4, **changes})
    return [getattr(options, field) for field in ops.OPTION_FIELDS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_gradients_are_those_of_the_definition(per_sequence, backend):
    x, mask = make_stream(T=11), torch.tensor(make_mask((2, 11)))
    leaves, exact = tensors_of(x), tensors_of(x)
    state = FwPKMState(*leaves[3:], per_sequence=per_sequence)
    readings, after = fwpkm(*leaves[:3], state, **SMALL, mask=mask, pairs="carry", backend=backend)
    options = {"lookahead": 1, "pairs": "carry", "scale": "norm", "value_rate": 1.0, "key_rate": 1.0, "epsilon": 1e-3}
    groups = [slice(0, 1), slice(1, 2)] if per_sequence else [slice(None)]
    want = [stream(*(a[g] for a in exact[:3]), mask[g], *exact[3:], **SMALL, **options) for g in groups]
    upstream = torch.randn(readings.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    readings.backward(upstream)
    torch.cat([w[0] for w in want]).backward(upstream)
    for got, leaf in zip(leaves, exact):
        assert relative_error(got.grad, leaf.grad) <= tolerance("fwpkm", "float64")
    tables = torch.stack([w[2] for w in want]) if per_sequence else want[0][2]
    assert relative_error(after.values, tables.detach()) <= tolerance("fwpkm", "float64")


def test_the_same_bits_as_from_numpy():
    x = make_stream(T=11, dtype=np.float32)
    want, state = fwpkm(*x.call, FwPKMState(x.keys, x.table), **SMALL)
    leaves = tensors_of(x)
    got, other = fwpkm(*leaves[:3], FwPKMState(*leaves[3:]), **SMALL)
    assert same_bits([got, other.values, other.keys], [torch.tensor(a) for a in (want, state.values, state.keys)])
    assert isinstance(other.values, torch.Tensor)


def test_gradcheck_of_a_stream_over_three_chunks():
    x = make_stream(T=9, H=1, m=2, half=2, D=2)

    def f(queries, values, gates, keys, table):
        return fwpkm(queries, values, gates, FwPKMState(keys, table), k=4, chunk=3, key_rate=0.1)[0]

    assert torch.autograd.gradcheck(f, tensors_of(x), fast_mode=True)


def test_training_goes_on_in_place_while_an_earlier_graph_waits():
    # the backward keeps the rows it needs: later writes into the same state do not reach it
    x = make_stream(T=8)
    leaves = tensors_of(x)
    state = FwPKMState(*leaves[3:])
    first = state.extend(*leaves[:3], **SMALL)
    for _ in range(3):
        state.extend(*leaves[:3], **SMALL)
    got = torch.autograd.grad(first.square().sum(), leaves)
    alone = FwPKMState(*leaves[3:]).extend(*leaves[:3], **SMALL)
    assert same_bits(got, torch.autograd.grad(alone.square().sum(), leaves))


def test_bf16_inputs_beside_a_float32_state():
    x = make_stream(T=6, dtype=np.float32)
    call = [a.bfloat16().requires_grad_() for a in tensors_of(x.call, grad=False)]
    readings, state = fwpkm(*call, FwPKMState(x.keys, x.table), **SMALL)
    assert readings.dtype == torch.bfloat16 and state.values.dtype == np.float32
    want, _ = fwpkm(*(a.detach().float() for a in call), FwPKMState(x.keys, x.table), **SMALL)
    assert torch.equal(readings, want.bfloat16())
    readings.sum().backward()
    assert all(a.grad.dtype == torch.bfloat16 for a in call[:1])


# ---- the ops' contract ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    x = make_stream(T=9, dtype=np.float32)
    queries, values, gates, keys, table = tensors_of(x)
    torch.library.opcheck(ops.idw_product_key_topk, (queries, keys, 3, 1e-3, backend))
    weights, slots = sdm_lite.idw_product_key_topk(queries.detach(), keys.detach(), 3)
    slots, weights = slots.flatten(2), weights.flatten(2).requires_grad_()
    torch.library.opcheck(ops.embedding_bag, (table, slots, weights, False, backend))
    dreadings = torch.randn(2, 9, 5)
    torch.library.opcheck(ops.embedding_bag_rows, (dreadings, slots, weights.detach(), 16, backend))
    nothing = torch.empty(0, dtype=torch.int32), torch.empty(0, 5)
    call = (queries, values, gates, torch.ones(2, 9, dtype=torch.bool), keys, table, *nothing, 0, 0)
    for save in (False, True):
        given = call if save else tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in call)
        # gradients through an op whose outputs' sizes depend on the data: held to the definition above instead
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(ops.fwpkm, (*given, *flat_options(), backend, save), test_utils=checks)


def test_second_derivatives_raise():
    x = make_stream(T=6, dtype=np.float32)
    queries, values, gates, keys, table = tensors_of(x)
    weights, slots = sdm_lite.idw_product_key_topk(queries, keys, 3)
    readings = sdm_lite.embedding_bag(table, slots.flatten(2), weights.detach().flatten(2))
    streamed, _ = fwpkm(queries, values, gates, FwPKMState(keys, table), **SMALL)
    for output, leaf in ((weights, queries), (readings, table), (streamed, queries)):
        (gradient,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        with pytest.raises(SecondDerivativeError):
            gradient.sum().backward()


def test_compiled_retrieval_and_sum_are_the_eager_ones():
    torch._dynamo.reset()
    x = make_stream(T=9, dtype=np.float32)
    queries, _, _, keys, table = tensors_of(x)

    def f(queries):
        weights, slots = sdm_lite.idw_product_key_topk(queries, keys, 3)
        looked_up, places = sdm_lite.product_key_lookup(queries, keys, 3)
        near = sdm_lite.embedding_bag(table, slots.flatten(2), weights.flatten(2))
        return near + sdm_lite.embedding_bag(table, places.flatten(2), looked_up.flatten(2))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = compiled(queries), f(queries)
    leaves = [queries, keys, table]
    assert same_bits([got], [want])
    assert same_bits(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves))
    torch._dynamo.reset()


def test_tensors_elsewhere_and_mixed_kinds_are_refused():
    x = make_stream(T=6, dtype=np.float32)
    queries, values, gates, keys, table = tensors_of(x, grad=False)
    with pytest.raises(errors.DeviceError, match="meta"):
        fwpkm(queries.to("meta"), values, gates, FwPKMState(keys, table), **SMALL)
    with pytest.raises(errors.DeviceError, match="meta"):
        FwPKMState(keys.to("meta"), table.to("meta"))
    with pytest.raises(errors.DtypeError, match="one kind"):
        fwpkm(x.queries, values, gates, FwPKMState(keys, table), **SMALL)


def test_a_mask_on_another_device_is_refused():
    x = make_stream(T=4, dtype=np.float32)
    state = FwPKMState(*(torch.tensor(a) for a in x[3:]))
    with pytest.raises(errors.DeviceError, match="fwpkm: mask: expected a tensor on cpu"):
        fwpkm(*(torch.tensor(a) for a in x.call), state, mask=torch.ones(2, 4, dtype=torch.bool, device="meta"))
