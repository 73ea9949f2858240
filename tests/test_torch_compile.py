"""torch.compile through the public functions: one whole graph, the same numbers as eager."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import make_case
from torch.utils.checkpoint import checkpoint
from torch_memory import FLOATS, Memory, gradients, rule, rule_, same_bits, tensors

import sdm_lite
from sdm_lite import errors

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()  # compiled code is kept by code object: no test may lean on another's
    yield
    torch._dynamo.reset()


def compiled(function, backend):
    return torch.compile(function, fullgraph=True, backend=backend)


def batch(tokens=5):
    return torch.randn(2, tokens, 6, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_training_step(backend):
    # nothing but the op in the graph, so that every backend runs the same arithmetic: equal in every bit
    case = make_case("packed")
    named = tensors(case)
    leaves = [named[name] for name in FLOATS]
    upstream = torch.tensor(case.dreadings).float(), torch.tensor(case.dfinal).float()

    def step(named):
        return rule(named, output_final_state=True, backend="reference")

    function = compiled(step, backend)
    got, want = function(named), step(named)
    assert same_bits(got, want)
    assert same_bits(*(gradients(outputs, leaves, grad_outputs=upstream) for outputs in (got, want)))


def test_model_training_step_at_three_lengths():
    model = Memory()

    def step(x):
        readings, state = model(x, final=True)
        return readings.square().sum() + state.square().sum()

    function = compiled(step, "aot_eager")
    for tokens in (5, 3, 8):  # the second length makes torch trace a graph for any
        x = batch(tokens)
        got, want = (gradients(f(x), model.parameters()) for f in (function, step))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # traced graphs may sum in another order
    with torch.no_grad():
        torch.testing.assert_close(function(x), step(x), rtol=1e-6, atol=0)


def test_default_mode_and_autocast():
    # without fullgraph the delta rule may run between two graphs: the numbers are what counts
    model, x = Memory(), batch()

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().sum()

    got, want = (gradients(f(x), model.parameters()) for f in (torch.compile(step, backend="aot_eager"), step))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # bf16 products rounded at other places


def test_checkpoint_inside_a_compiled_step():
    model, x = Memory(), batch()

    def step(x):
        return checkpoint(model, x, use_reentrant=False).square().sum()

    got, want = (gradients(f(x), model.parameters()) for f in (compiled(step, "aot_eager"), step))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # as above


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_steps(backend):
    named = tensors(make_case("plain"), grad=False)
    want = {**named, "state": named["state"].clone()}

    def step(named):
        first = rule_(named, backend="reference")
        return first, rule_(named, backend="reference")

    got = compiled(step, backend)(named)
    assert same_bits(got, step(want))
    assert same_bits([named["state"]], [want["state"]]), "the state holds both steps, in their order"


def test_addressing_and_hash():
    scores, ids = batch()[..., :6].repeat(1, 1, 2).requires_grad_(), torch.arange(10).view(2, 5)

    def step(scores, ids):
        values, slots = sdm_lite.product_key_topk(scores, 4, factors=(7, 5), backend="reference")
        return values, slots, sdm_lite.hash_slots(ids, 100, 3, seed=2**63, backend="reference")

    function = compiled(step, "aot_eager")
    assert same_bits(function(scores, ids), step(scores, ids))
    got, want = (gradients(f(scores, ids)[0].square().sum(), [scores]) for f in (function, step))
    assert same_bits(got, want)


def test_errors_come_through_the_graph():
    named = tensors(make_case("plain"), grad=False)
    function = compiled(lambda named: rule(named, backend="reference")[0], "aot_eager")
    function(named)
    named["write_slots"][0, 0, 0, 0] = 32
    with pytest.raises(errors.SlotError, match="write_slots"):
        function(named)


def test_export_holds_the_ops():
    model = Memory().eval()
    with torch.no_grad():
        program = torch.export.export(model, (batch(),))
        assert "sdm_lite.sparse_delta_rule.default" in str(program.graph)
        assert same_bits([program.module()(batch())], [model(batch())])


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.parametrize("kind", ["layer", "model"])
def test_whole_layers_through_inductor(kind):
    from sdm_lite.nn import SMALL_MODEL_OPTIONS, HybridLM, SparseDeltaMemory

    torch.manual_seed(0)
    sizes = {"slots_per_head": 16, "num_writes": 4, "num_reads": 4}
    if kind == "layer":
        model, x = SparseDeltaMemory(8, num_heads=2, **sizes, **SMALL_MODEL_OPTIONS["sdm"]), torch.randn(2, 5, 8)
    else:
        layers = ["swa", "sdm"]
        model = HybridLM(16, 8, 2, layers=layers, num_heads=2, window=4, **sizes, options=SMALL_MODEL_OPTIONS)
        x = torch.randint(16, (2, 9))

    def step(x):
        y = model(x)
        return (y[0] if kind == "layer" else y).square().mean()

    function = torch.compile(step, fullgraph=True)
    # inductor fuses float32 products and norms, which round at other places
    got, want = (gradients(f(x), model.parameters()) for f in (function, step))
    for (name, _), a, b in zip(model.named_parameters(), got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(function(x), step(x), rtol=1e-5, atol=1e-7)
