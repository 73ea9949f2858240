"""Product-key selection, its backward through torch, hashing, and the torch pipelines that do the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sdm_lite
from benchmarks import ours, parity
from benchmarks.peers import torch_topk

ROWS, COLUMNS, K = 4096, 240, 64  # 57,600 slots


@pytest.fixture(scope="module")
def scores() -> np.ndarray:
    scores = np.random.default_rng(0).standard_normal((ROWS, 2 * COLUMNS), dtype=np.float32)
    parity.check_topk(scores, K)
    return scores


@pytest.fixture(params=[1, 2])
def threads(request, benchmark):
    ours.set_threads(request.param)
    benchmark.extra_info["threads"] = request.param


@pytest.mark.usefixtures("threads")
def test_topk(benchmark, scores):
    benchmark(ours.topk(scores, K))


@pytest.mark.usefixtures("threads")
def test_topk_torch_outer_sum(benchmark, scores):
    benchmark(torch_topk.outer_sum, torch.from_numpy(scores), K)


@pytest.mark.usefixtures("threads")
def test_topk_torch_staircase(benchmark, scores):
    benchmark(torch_topk.staircase, torch.from_numpy(scores), K, torch_topk.staircase_ranks(K))


@pytest.mark.usefixtures("threads")
def test_topk_gradients(benchmark, scores):
    tensor = torch.from_numpy(scores).requires_grad_()

    def run():
        values, _ = sdm_lite.product_key_topk(tensor, K)
        return torch.autograd.grad(values, tensor, torch.ones_like(values))

    benchmark(run)


def test_hash_slots(benchmark):
    benchmark(sdm_lite.hash_slots, np.arange(ROWS), COLUMNS * COLUMNS, K)
