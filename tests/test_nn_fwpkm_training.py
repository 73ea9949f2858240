"""The fast-weight memory layer in training: adopting, checkpointing, compiling, calls that make no state."""

import pickle
import tracemalloc

import pytest
import torch
from fwpkm_layers import EXACT, SIZES, build, inputs
from torch.utils.checkpoint import checkpoint

from sdm_lite import FwPKMState
from sdm_lite.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from sdm_lite.nn import HybridLM, carry_fast_weights


def test_fast_weights_are_carried_on_only_when_asked():
    layer, x = build().train(), inputs(2, 12)
    before = layer.keys.clone(), layer.values.clone()
    y, state = layer(x)
    assert torch.equal(layer(x)[0], y), "a call writes nothing that outlives it"
    assert torch.equal(layer.values, before[1])
    carry_fast_weights(layer)
    assert torch.equal(layer.values, state.values) and torch.equal(layer.keys, state.keys)
    carry_fast_weights(layer)  # once only
    assert torch.equal(layer.values, state.values)
    layer.eval()(x)
    carry_fast_weights(layer)  # eval mode leaves nothing to carry
    assert torch.equal(layer.values, state.values)
    with pytest.raises(ValueRangeError, match="one per sequence"):
        layer.adopt(layer(x)[1])


def test_adopting_before_the_backward_does_not_change_gradients():
    gradients = []
    for early in (False, True):
        layer, x = build().train(), inputs(2, 12).requires_grad_()
        y, _ = layer(x)
        if early:
            carry_fast_weights(layer)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_checkpointing_writes_once(reentrant, with_state):
    results = []
    for wrapped in (False, True):
        layer, x = build().train(), inputs(2, 12).requires_grad_()
        given = (x, layer.new_state()) if with_state else (x,)
        y, state = checkpoint(layer, *given, use_reentrant=reentrant) if wrapped else layer(*given)
        y.square().sum().backward()
        if with_state:
            layer.adopt(state)
            results.append((x.grad, layer.keys, layer.values, given[1].values))
        else:
            carry_fast_weights(layer)
            results.append((x.grad, layer.keys, layer.values))
    for plain, again in zip(*results):
        assert torch.equal(plain, again)
    assert not torch.equal(results[0][2], build().values), "something was written"


def test_compiled_equals_eager():
    layer, x = build(), inputs(2, 12).requires_grad_()
    y, state = layer(x)
    torch._dynamo.reset()
    compiled, compiled_state = torch.compile(layer, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, y, **EXACT)
    torch.testing.assert_close(compiled_state.values, state.values, **EXACT)
    ours, theirs = (torch.autograd.grad(one.square().sum(), x)[0] for one in (compiled, y))
    torch.testing.assert_close(ours, theirs, **EXACT)


def test_a_loaded_state_can_be_adopted(tmp_path):
    layer, x = build(per_sequence=False), inputs(2, 7)
    _, state = layer(x)
    state.save(tmp_path / "state")
    for kind in ("numpy", "torch"):
        loaded, other = FwPKMState.load(tmp_path / "state", kind=kind), build(per_sequence=False)
        assert isinstance(loaded.keys, torch.Tensor) == (kind == "torch")
        assert torch.equal(other.addresses(x, loaded)[0], layer.addresses(x, state)[0])
        other.adopt(loaded)
        assert torch.equal(other.keys, state.keys) and torch.equal(other.values, state.values)
    with pytest.raises(ValueRangeError, match="load: kind"):
        FwPKMState.load(tmp_path / "state", kind="tape")
    with pytest.raises(DtypeError, match="state: expected an FwPKMState"):
        layer.adopt({"keys": layer.keys})
    other = FwPKMState(torch.zeros(1, 2, 4, 5).double(), torch.zeros(16, 7).double())
    with pytest.raises(ShapeError, match="state: expected keys and values"):
        layer.adopt(other)


def test_a_trained_layer_can_be_pickled():
    layer, x = build().train(), inputs(2, 7)
    layer(x)[0].sum().backward()
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x)[0], layer(x)[0])


# ---------------------------------------------------------------- without a state


@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_call_that_returns_no_state_is_the_call_that_does(apart, pairs):
    results, mask = [], torch.ones(2, 13, dtype=torch.bool)
    mask[0, 1:3] = False
    for keeps in (True, False):
        layer, x = build(per_sequence=apart, pairs=pairs).train(), inputs(2, 13).requires_grad_()
        y, state = layer(x, mask=mask, return_state=keeps)
        assert (state is None) != keeps
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        carry_fast_weights(layer)
        results.append([y, *gradients, layer.keys, layer.values])
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert torch.equal(results[0][-1], build().values) == apart, "one memory for the batch is carried on"
    layer, x = build().train(), inputs(2, 13)
    assert torch.equal(layer(x, update=False, return_state=False)[0], layer(x, update=False)[0])
    carry_fast_weights(layer)
    assert torch.equal(layer.values, build().values), "nothing was written"


def test_a_call_that_returns_no_state_copies_no_table():
    layer, x = build(sub_keys=64, value_dim=16).train(), inputs(1, 10)
    most = {}
    for keeps in (True, False):
        with torch.profiler.profile(profile_memory=True) as profile:  # sees torch's allocations
            layer(x, return_state=keeps)
        most[keeps] = max(event.self_cpu_memory_usage for event in profile.events())
    assert most[True] >= layer.values.nbytes, "a state owns its start"
    assert most[False] < layer.values.nbytes / 4
    tracemalloc.start()  # and NumPy's
    layer(x, return_state=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < layer.values.nbytes / 4, "30 rows of 4,096 are read"


def test_masks_of_calls_without_a_state_are_checked():
    layer, x = build(), inputs(2, 3)
    with pytest.raises(ShapeError, match="FwPKM: mask"):
        layer(x, mask=torch.ones(2, 4, dtype=torch.bool), return_state=False)
    with pytest.raises(DtypeError, match="FwPKM: mask"):
        layer(x, mask=torch.ones(2, 3), return_state=False)
    with pytest.raises(DeviceError, match="FwPKM: mask"):
        layer(x, mask=torch.ones(2, 3, dtype=torch.bool, device="meta"), return_state=False)


@pytest.mark.parametrize("apart", [False, True])
def test_a_training_step_is_one_graph(apart):
    torch._dynamo.reset()
    x, results = inputs(2, 12).requires_grad_(), []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        layer = build(per_sequence=apart).train()
        y = wrap(lambda x, layer=layer: layer(x, return_state=False)[0])(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        carry_fast_weights(layer)
        results.append([y, *gradients, layer.keys, layer.values])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, **EXACT)
    assert torch.equal(results[1][-1], build().values) == apart
    torch._dynamo.reset()


def test_a_model_with_memories_trains_in_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"fwpkm": SIZES, "pkm": {"sub_keys": 4, "k": 2, "key_dim": 4}}
    lm = HybridLM(11, 8, 1, layers=["conv"], memory=["fwpkm@1", "pkm@1"], options=options).double()
    compiled = torch.compile(lambda ids: lm(ids).square().mean(), fullgraph=True, backend="aot_eager")
    ids = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(1))
    ours, theirs = (
        torch.autograd.grad(f(ids), lm.parameters()) for f in (compiled, lambda ids: lm(ids).square().mean())
    )
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, **EXACT)
    torch._dynamo.reset()
