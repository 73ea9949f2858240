"""A MemoryState and torch: tensors, `torch.compile`, the custom op."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from state_calls import token

import sdm_lite
from sdm_lite import MemoryState


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def tensors(call):
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(a) for a in call]


def test_torch_in_torch_out_without_gradients(rng):
    torch = pytest.importorskip("torch")
    initial = torch.from_numpy(rng.standard_normal((2, 64, 16)).astype(np.float32))
    state, mirror = MemoryState(initial, 1), MemoryState(initial.numpy(), 1)
    call = token(rng)
    assert torch.equal(state.step(*tensors(call)), torch.from_numpy(mirror.step(*call)))
    assert torch.equal(state.dense(), torch.from_numpy(mirror.dense()))
    initial_at = state._initial.bits.ctypes.data
    assert initial_at == initial.data_ptr()  # by reference
    wants = tensors(call)
    wants[0].requires_grad_()
    with pytest.raises(ValueError, match="values: expected tensors without gradients"):
        state.step(*wants)
    with torch.no_grad():
        state.step(*wants)
    with pytest.raises(ValueError, match="detach"):
        MemoryState(torch.nn.Parameter(initial), 1)
    with torch.inference_mode():
        made_inside = MemoryState(initial, 1)
        made_inside.step(*tensors(call))
        state.step(*tensors(call))
    made_inside.step(*tensors(call))


def test_a_repeated_step_of_tensors_is_checked_where_they_differ(rng):
    torch = pytest.importorskip("torch")
    state, plain = MemoryState((2, 64, 16), 1, dtype=torch.float32), MemoryState((2, 64, 16), 1)
    calls = [token(rng) for _ in range(3)]
    for call in calls[:2]:
        assert torch.equal(state.step(*tensors(call)), torch.from_numpy(plain.step(*call)))
    wants = tensors(calls[2])
    wants[2].requires_grad_()
    with pytest.raises(ValueError, match="write_weights: expected tensors without gradients"):
        state.step(*wants)
    away = tensors(calls[2])
    away[4] = away[4].to("meta")
    with pytest.raises(sdm_lite.DeviceError, match="beta"):
        state.step(*away)
    with pytest.raises(sdm_lite.DtypeError, match="all of one kind"):
        state.step(*tensors(calls[2])[:6], calls[2][6])
    nested = torch.nested.nested_tensor([torch.ones(2, 16)])
    with pytest.raises(sdm_lite.DtypeError, match="values: expected a dense tensor, got a nested one"):
        state.step(nested, *tensors(calls[2])[1:])
    with torch.no_grad():
        assert torch.equal(state.step(*wants), torch.from_numpy(plain.step(*calls[2])))
    halves = [a if a.dtype == torch.int32 else a.bfloat16() for a in tensors(calls[2])]
    readings = [state.fork([0]).step(*halves), state.step(*halves)]
    assert readings[0].dtype == torch.bfloat16 and torch.equal(*readings)


def test_torch_compile_serves_every_state_with_one_graph(rng):
    torch = pytest.importorskip("torch")
    initial = torch.from_numpy(rng.standard_normal((2, 64, 16)).astype(np.float32))
    eager = MemoryState(initial, 1)
    with torch.inference_mode():
        made_inside = eager.fork([0])
    states = [eager.fork([0]), eager.fork([0]), made_inside]
    calls = [tensors(token(rng)) for _ in range(2)]

    def two_tokens(state, first, second):
        state.step(*first)  # its readings are not used: it must not be dropped
        return state.step(*second) * 2

    want = two_tokens(eager, *calls)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    for backend, fullgraph in ((count, True), ("aot_eager", True)):
        compiled = torch.compile(two_tokens, fullgraph=fullgraph, backend=backend)
        copies = [state.fork([0]) for state in states]
        for state in copies:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*lru_cache.*")
                assert torch.equal(compiled(state, *calls), want)
            assert torch.equal(state.dense(), eager.dense()) and state.tokens.tolist() == [2]
    assert len(graphs) == 1


def test_the_op_keeps_its_promises_to_torch(rng):
    torch = pytest.importorskip("torch")
    from sdm_lite import torch_state

    state = MemoryState((2, 64, 16), 1, dtype=torch.float32)
    call = tensors(token(rng, (1, 3, 2)))
    torch.library.opcheck(
        torch_state.memory_state_advance, (*call, state._handle, "test"), test_utils=("test_schema", "test_faketensor")
    )
