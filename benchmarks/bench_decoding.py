"""Decoding from a cache: a greedy step with copy-on-write and with dense memories, forks, bytes, drafts, files."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from sdm_lite.nn import SMALL_MODEL_OPTIONS, HybridLM, HybridState

THREADS = int(os.environ.get("SDM_LITE_NUM_THREADS", "2"))
VOCAB, PROMPT, STEPS = 256, 512, 32
SIZES = {
    # the demo's sizes; and four times the width with 16 times the slots
    "small": {"dim": 128, "num_heads": 4, "slots_per_head": 1024, "num_writes": 32, "num_reads": 32, "mlp_hidden": 256},
    "large": {"dim": 512, "num_heads": 8, "slots_per_head": 16384, "num_writes": 64, "num_reads": 64},
}


@functools.lru_cache(maxsize=1)
def model_of(size: str) -> HybridLM:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = HybridLM(
        VOCAB, num_layers=4, layers=["swa", "swa", "sdm", "swa"], options=SMALL_MODEL_OPTIONS, **SIZES[size]
    )
    return model.eval()


@pytest.fixture(params=list(SIZES))
def model(request) -> HybridLM:
    return model_of(request.param)


def prompt(batch: int, tokens: int = PROMPT) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))


def dense_cache(model: HybridLM, ids: torch.Tensor) -> HybridState:
    """A cache whose memories are tables [B, H, N, D], updated in place."""
    with torch.no_grad():
        return model(ids, HybridState())[1]


def sparse_cache(model: HybridLM, ids: torch.Tensor) -> HybridState:
    """A cache whose memories are MemoryStates."""
    cache = HybridState()
    with torch.no_grad():
        model(ids, cache, inplace=True)
    return cache


CACHES = {"copy_on_write": sparse_cache, "dense": dense_cache}


@torch.no_grad()
def steps(model: HybridLM, cache: HybridState, count: int = STEPS) -> torch.Tensor:
    token = torch.zeros(cache.batch, 1, dtype=torch.int64)
    for _ in range(count):
        logits, _ = model(token, cache, inplace=True)
        token = logits[:, -1:].argmax(-1)
    return token


@pytest.mark.parametrize("kind", list(CACHES))
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_steps(benchmark, model, batch, kind):
    ids = prompt(batch, 64)
    assert torch.equal(*(steps(model, make(model, ids), 4) for make in CACHES.values())), "the caches disagree"
    cache = CACHES[kind](model, prompt(batch))
    benchmark(steps, model, cache)
    benchmark.extra_info["tokens_per_second"] = round(batch * STEPS / benchmark.stats.stats.median)
    memory = next(layer.memory for layer in cache.layers if layer.memory is not None)
    owned = memory.nbytes if isinstance(memory, torch.Tensor) else memory.nbytes().owned
    benchmark.extra_info["bytes_of_memory_per_sequence"] = owned // batch


@pytest.mark.parametrize("kind", list(CACHES))
def test_fork(benchmark, model, kind):
    cache = CACHES[kind](model, prompt(1))
    benchmark(cache.fork, [0, 0, 0, 0])


def test_mark_four_tokens_rollback(benchmark, model):
    cache = sparse_cache(model, prompt(1))

    def call():
        mark = cache.mark()
        steps(model, cache, 4)
        cache.rollback(mark)
        cache.release(mark)

    benchmark(call)


@pytest.mark.parametrize("mode", [False, True, "batched"], ids=["greedy", "exact", "batched"])
def test_drafts(benchmark, model, mode):
    """A prompt that repeats itself; how often drafts are right is the model's affair."""
    ids = prompt(1, 64).repeat(1, 4)
    expected = model.generate(ids, STEPS)
    assert mode == "batched" or torch.equal(model.generate(ids, STEPS, speculative=mode), expected)
    benchmark(lambda: model.generate(ids, STEPS, speculative=mode))
    benchmark.extra_info["tokens_per_second"] = round(STEPS / benchmark.stats.stats.median)


def test_save_and_load(benchmark, model, tmp_path):
    cache, path = sparse_cache(model, prompt(1)), tmp_path / "cache"

    def call():
        cache.save(path)
        return HybridState.load(path, model)

    assert benchmark(call).positions == [PROMPT]
    benchmark.extra_info["bytes_of_file"] = path.stat().st_size
