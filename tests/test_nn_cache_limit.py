"""`HybridState(max_bytes=)`: a limit over the whole cache; what would pass it changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import MODELS, build, same_cache, tokens
from state_calls import token

from sdm_lite import MemoryState
from sdm_lite.errors import DtypeError, StateFull, ValueRangeError
from sdm_lite.nn import HybridState


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def taken(cache):
    return cache.nbytes().owned + cache.nbytes().dense


def fed(model, cache, count):
    """Feed so many single tokens, the same ones for every cache."""
    for one in tokens(2, 40).split(1, dim=1)[cache.position : cache.position + count]:
        model(one, cache, inplace=True)
    return cache


@pytest.mark.parametrize("name", MODELS)
def test_the_limit_is_that_of_the_bytes_held_to_the_byte(name):
    """The bytes after n tokens are enough for n tokens, with the bits of no limit; one byte less is refused."""
    model = build(name)
    free = fed(model, HybridState(), 6)
    enough = fed(model, HybridState(max_bytes=taken(free)), 6)
    assert same_cache(enough, free) and taken(enough) == taken(free)
    limited = HybridState(max_bytes=taken(free) - 1)
    with pytest.raises(StateFull, match=r"HybridLM: cache: expected at most max_bytes = \d+, got \d+ bytes. Fix: "):
        fed(model, limited, 6)
    seen = limited.position
    assert seen < 6 and taken(limited) < taken(free)
    if seen:
        assert same_cache(limited, fed(model, HybridState(), seen))
    limited.max_bytes = None
    assert same_cache(fed(model, limited, 6 - seen), free)  # nothing of the refused token was left in any layer


@pytest.mark.parametrize("name", ["sdm", "full"])
def test_a_refused_call_leaves_marks_and_bits(name):
    model = build(name)
    cache = fed(model, HybridState(), 3)
    before, copy = cache.mark(), cache.fork([0, 1])
    held = taken(cache)
    cache.max_bytes = held
    with pytest.raises(StateFull):
        model.generate(tokens(2, 12, seed=5), 1, cache=cache)
    assert same_cache(cache, copy) and taken(cache) == held
    cache.rollback(before)
    assert same_cache(cache, copy)


def test_a_call_that_is_cut_off_is_taken_back():
    model, other = build("sdm"), build("sdm")
    cache = fed(model, HybridState(max_bytes=1 << 24), 3)
    hook = model.blocks[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fed(model, cache, 1)
    hook.remove()
    assert same_cache(fed(model, cache, 2), fed(other, HybridState(), 5))


def test_verbs_that_grow_are_refused_and_those_that_shrink_are_not():
    model = build("full")
    cache = fed(model, HybridState(), 5)
    copy = cache.fork([0, 1])
    cache.max_bytes = taken(cache)
    for grow in (lambda: cache.append(3), lambda: cache.reorder([0, 1, 1, 0]), lambda: cache.fork([0, 1, 0])):
        with pytest.raises(StateFull, match="HybridState"):
            grow()
        assert same_cache(cache, copy)
    assert cache.fork([1, 0]).max_bytes == cache.max_bytes
    cache.reorder([1, 0])
    cache.max_bytes = 0
    cache.reset(0)
    cache.evict([0])
    assert cache.positions == [5]


@pytest.mark.parametrize("name", ["sdm", "full", "gdn"])
def test_drafts_under_a_limit_are_greedy(name):
    model, ids = build(name), tokens(2, 5).repeat(1, 3)
    greedy, drafted = HybridState(), HybridState(max_bytes=1 << 24)
    expected = model.generate(ids, 15, cache=greedy)
    assert torch.equal(model.generate(ids, 15, speculative=True, cache=drafted), expected)
    assert same_cache(greedy, drafted) and taken(greedy) == taken(drafted)


def test_a_file_larger_than_the_limit_is_refused(tmp_path):
    model = build("sdm")
    cache = fed(model, HybridState(), 5)
    cache.save(tmp_path / "cache")
    held = taken(cache)
    assert same_cache(HybridState.load(tmp_path / "cache", model, max_bytes=held), cache)
    with pytest.raises(StateFull, match="HybridState.load: cache: "):
        HybridState.load(tmp_path / "cache", model, max_bytes=held - 1)


def test_a_first_call_that_is_refused_leaves_the_cache_to_any_model():
    cache = HybridState(max_bytes=0)
    with pytest.raises(StateFull):
        build("sdm")(tokens(1, 3), cache, inplace=True)
    assert cache.config is None and not cache.layers
    cache.max_bytes = None
    build("zero")(tokens(1, 3), cache, inplace=True)


@pytest.mark.parametrize(("limit", "error"), [(-1, ValueRangeError), (1.5, DtypeError), ("1", DtypeError)])
def test_what_is_no_limit_is_refused(limit, error):
    with pytest.raises(error, match="HybridState: max_bytes: expected .* Fix: "):
        HybridState(max_bytes=limit)


def test_bytes_of_a_mark_are_those_its_release_frees():
    rng = np.random.default_rng(0)
    state = MemoryState((2, 64, 16), 1)
    state.step(*token(rng))
    marks = []
    for _ in range(4):
        marks.append(state.mark())
        for _ in range(3):
            state.step(*token(rng, slots=16))
    fork = state.fork([0])
    for place in (1, 2, 0, 0):
        mark, owned = marks.pop(place), state.nbytes().owned
        promised = state.mark_bytes(mark)
        state.release(mark)
        assert owned - state.nbytes().owned == promised
    assert np.array_equal(fork.dense(), state.dense())
