"""The sparse delta rule and its peers: forward, forward + backward in each restore mode, single tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sdm_lite
from benchmarks import ours
from benchmarks.peers import dense_gdn, row_limit, torch_loop

from .conftest import THREADS

# a peer that touches a whole table, or logs every row, gets a few tokens: its figures are per token
HAND_TOKENS = 128


def test_forward_in_place(benchmark, shape, inputs, record):
    benchmark(ours.update(inputs, inputs.table()))
    record(shape.forward_bytes())


@pytest.mark.parametrize("final", [False, True], ids=["readings", "with_final_state"])
def test_forward_functional(benchmark, shape, inputs, record, final):
    benchmark(ours.functional(inputs, final=final))
    record(shape.forward_bytes())


def test_forward_limit_of_memory(benchmark, shape, inputs, record):
    call = row_limit.row_mover(inputs, inputs.table(), THREADS)
    if call is None:
        pytest.skip("g++ is not there")
    benchmark(call)
    record(shape.forward_bytes())


def test_forward_torch_loop(benchmark, shape, inputs, record):
    loop_inputs = torch_loop.from_inputs(inputs, shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    with torch.no_grad():
        benchmark(torch_loop.forward, table, loop_inputs)
    record(shape.forward_bytes())


def test_forward_dense_gdn_chunked(benchmark, shape, inputs, record):
    loop_inputs = torch_loop.from_inputs(inputs, shape.N)
    state = torch.zeros(shape.lanes, shape.W, shape.D)
    with torch.no_grad():
        benchmark(dense_gdn.chunked, state, loop_inputs)
    record()


@pytest.mark.parametrize("restore", ["hybrid", "snapshot", "invert"])
def test_gradients(benchmark, shape, inputs, record, restore):
    benchmark(ours.gradients(inputs, restore=restore))
    record(shape.forward_bytes() + shape.backward_bytes())


def test_gradients_with_state(benchmark, shape, inputs, record):
    benchmark(ours.gradients(inputs, of_state=True))
    record(shape.forward_bytes() + shape.backward_bytes())


def test_gradients_torch_by_hand(benchmark, shape, inputs, record):
    tokens = min(shape.T, HAND_TOKENS)
    loop_inputs = torch_loop.from_inputs(inputs.first_tokens(tokens), shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    benchmark(torch_loop.hand_gradients, table, torch.zeros_like(table), loop_inputs)
    record(tokens=shape.B * tokens)


def test_gradients_torch_autograd(benchmark, shape, inputs, record):
    tokens = {"small": 64, "medium": 8, "large": 1}[shape.name]
    loop_inputs = torch_loop.from_inputs(inputs.first_tokens(tokens), shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    benchmark.pedantic(torch_loop.autograd_gradients, (table, loop_inputs), rounds=3, warmup_rounds=1)
    record(tokens=shape.B * tokens)


def test_gradients_dense_gdn_chunked(benchmark, shape, inputs, record):
    loop_inputs = torch_loop.from_inputs(inputs, shape.N)
    benchmark(dense_gdn.chunked_gradients, torch.zeros(shape.lanes, shape.W, shape.D), loop_inputs)
    record()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_one_token(benchmark, shape, inputs, record, kind):
    one = inputs.first_tokens(1)
    convert = torch.from_numpy if kind == "torch" else np.asarray
    call, state = [convert(x) for x in one.call], convert(inputs.table())
    benchmark(lambda: sdm_lite.sparse_delta_rule_(*call, state))
    record(shape.forward_bytes() // shape.T, tokens=shape.B)
