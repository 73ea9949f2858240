"""The cache of a HybridLM: its verbs against recomputation with the same calls, marks, positions and files."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import MODELS, SIZES, VOCAB, build, recomputed, rows, run, same_cache, started, tokens

from sdm_lite import MemoryState
from sdm_lite.errors import SdmError, ShapeError, StateFull, ValueRangeError
from sdm_lite.nn import SMALL_MODEL_OPTIONS, HybridLM, HybridState, MixerState, SparseDeltaMemory


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products gain nothing from threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- the layer


SDM_OPTIONS = {
    "plain": {},
    "per_slot": {"rule": "per_slot", "num_heads": 2},
    "key_weighted_decay": {"key_weighted_decay": True},
    "recipe": SMALL_MODEL_OPTIONS["sdm"],
    "zero": {"learn_memory": False},
    "hash": {"addressing": "hash"},
}


@pytest.mark.parametrize("name", SDM_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_reads_from_a_memory_state_what_it_reads_from_a_table(name, dtype):
    torch.manual_seed(0)
    sizes = {"slots_per_head": 16, "num_writes": 4, "num_reads": 5}
    layer = SparseDeltaMemory(8, **sizes, **SDM_OPTIONS[name]).eval().to(dtype)
    if "memory" in layer._parameters:
        layer.memory.normal_()
    x = torch.randn(3, 11, 8, dtype=dtype)
    dense, sparse = MixerState(), MixerState(memory=layer.new_memory(3))
    for piece in x.split([4, 1, 1, 5], dim=1):
        expected, dense = layer(piece, dense)
        y, sparse = layer(piece, sparse)
        assert torch.equal(y, expected)
    assert torch.equal(sparse.memory.dense(), dense.memory) and sparse.position == 11
    assert isinstance(sparse.memory, MemoryState) and sparse.memory.tokens.tolist() == [11] * 3


def test_a_memory_state_alone_is_a_state():
    layer = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4).eval()
    memory, x = layer.new_memory(2), torch.randn(2, 6, 8)
    first, state = layer(x[:, :4], memory)
    second, again = layer(x[:, 4:], memory)  # the memory knows its position
    assert state.memory is memory is again.memory and again.position == 6
    assert torch.equal(
        torch.cat([first, second], 1), torch.cat([layer(x[:, :4])[0], layer(x[:, 4:], layer(x[:, :4])[1])[0]], 1)
    )
    with pytest.raises(ValueRangeError, match="convolutions"):
        conv = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4, conv=4)
        conv(x, memory)
    with pytest.raises(ShapeError, match="state"):
        layer(x[:1], memory)


def test_no_gradients_through_a_memory_state():
    layer = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4)
    memory, x = layer.new_memory(1), torch.randn(1, 3, 8)
    with torch.enable_grad(), pytest.raises(ValueRangeError, match="no_grad"):
        layer(x, memory)
    assert memory.tokens.tolist() == [0] and memory.nbytes().owned == 0
    model = build("full")
    with torch.enable_grad(), pytest.raises(ValueRangeError, match="no_grad"):
        model(tokens(1, 3), HybridState(), inplace=True)


def test_reading_only_leaves_the_memory_state():
    layer = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4).eval()
    x = torch.randn(2, 5, 8)
    _, dense = layer(x)
    _, sparse = layer(x, layer.new_memory(2))
    layer.write = False
    before = sparse.memory.dense()
    expected, _ = layer(x, dense)
    y, after = layer(x, sparse)
    assert torch.equal(y, expected) and torch.equal(after.memory.dense(), before)


# ---------------------------------------------------------------- verbs


@pytest.mark.parametrize("name", MODELS)
def test_verbs_are_those_of_dense_states(name):
    """fork, reorder and evict, tokens in between: the bits of dense tables, indexed, under the same calls."""
    model = build(name)
    cache, dense = started(model, tokens(3, 7)), recomputed(model, HybridState(), tokens(3, 7))[1]

    def both(cache, dense, ids):
        expected, dense = recomputed(model, dense, ids)
        assert torch.equal(run(model, cache, ids), expected)
        return dense

    fork, other = cache.fork([2, 0, 2]), rows(dense, [2, 0, 2])
    other = both(fork, other, tokens(3, 2, seed=2))
    fork.reorder([1, 2, 2, 0])
    other = both(fork, rows(other, [1, 2, 2, 0]), tokens(4, 3, seed=3))
    fork.evict([0, 2])
    both(fork, rows(other, [1, 3]), tokens(2, 2, seed=4))
    assert fork.positions == [14, 14] and cache.positions == [7] * 3
    both(cache, dense, tokens(3, 2, seed=5))  # the original went on by itself


@pytest.mark.parametrize("name", MODELS)
def test_sequences_may_stand_at_different_positions(name):
    """Appended and reset sequences beside older ones: as if each had been alone (up to the products' rounding)."""
    model = build(name).double()
    old, new = tokens(2, 6), tokens(2, 9, seed=2)
    cache = started(model, old)
    cache.append(1)
    cache.reset(0)
    assert cache.positions == [0, 6, 0]
    feed = torch.cat([new[:1], tokens(1, 9, seed=3), new[1:]])
    got = torch.cat([run(model, cache, feed[:, :5]), model(feed[:, 5:], cache, inplace=True)[0]], 1)
    assert cache.positions == [9, 15, 9] and cache.position == 15
    # float32 rotary angles, in vectors of other lengths; everything else is float64
    close = {"rtol": 1e-4, "atol": 1e-6}
    for row, whole in ((0, feed[:1]), (1, torch.cat([old[1:], feed[1:2]], 1)), (2, feed[2:])):
        torch.testing.assert_close(got[row], model(whole)[0, -9:], **close)
    cache.evict([1])
    assert cache.positions == [9, 9] and cache.layers[0].position == 9
    longest = max(layer.keys.shape[2] for layer in cache.layers if layer.keys is not None) if name == "full" else 9
    assert longest == 9  # columns of the evicted sequence alone are gone


@pytest.mark.parametrize("name", MODELS)
def test_rollback_is_as_if_the_tokens_had_never_been(name):
    model, ids, more = build(name), tokens(2, 6), tokens(2, 4, seed=2)
    cache = started(model, ids)
    outer = cache.mark()
    run(model, cache, tokens(2, 3, seed=3))
    inner = cache.mark()
    run(model, cache, tokens(2, 60, seed=4))  # buffers of attention grow
    cache.reorder([1, 1, 0])
    cache.rollback(inner)
    run(model, cache, tokens(2, 1, seed=5))
    cache.rollback(outer)
    assert cache.positions == [6, 6]
    with pytest.raises(ValueRangeError, match="stale"):
        cache.rollback(inner)
    expected = run(model, started(model, ids), more)
    assert torch.equal(run(model, cache, more), expected)
    cache.rollback(outer)  # it lives on
    assert torch.equal(run(model, cache, more), expected)
    cache.release(outer)
    for verb in (cache.rollback, cache.release):
        with pytest.raises(ValueRangeError, match="stale"):
            verb(outer)


def test_releasing_an_inner_mark_keeps_the_outer():
    model, ids = build("sdm"), tokens(1, 5)
    cache = started(model, ids)
    outer = cache.mark()
    run(model, cache, tokens(1, 2, seed=2))
    inner = cache.mark()
    run(model, cache, tokens(1, 2, seed=3))
    cache.release(inner)
    cache.rollback(outer)
    assert torch.equal(run(model, cache, ids), run(model, started(model, ids), ids))


def test_a_mark_before_the_first_token():
    model, cache = build("sdm"), HybridState()
    mark = cache.mark()
    run(model, cache, tokens(2, 3))
    cache.rollback(mark)
    assert cache.positions == [] and torch.equal(
        run(model, cache, tokens(1, 3)), run(model, HybridState(), tokens(1, 3))
    )


def test_a_dense_state_marks_and_forks_too():
    model, ids, more = build("sdm"), tokens(2, 5), tokens(2, 3, seed=2)
    cache = model(ids, HybridState())[1]
    assert isinstance(cache.layers[1].memory, torch.Tensor)
    mark, twin = cache.mark(), cache.fork([0, 1])
    first = run(model, cache, more)
    cache.rollback(mark)
    assert torch.equal(run(model, cache, more), first) and torch.equal(run(model, twin, more), first)
    for verb in (cache.append, lambda: cache.reset(0)):
        with pytest.raises(ValueRangeError, match="dense"):
            verb()


def test_window_and_full_caches_are_bounded():
    model = build("full")
    cache = started(model, tokens(1, 130))
    keys, room = cache.layers[0].keys, cache.layers[0].room[0]
    assert keys.shape[2] == 130 and room.shape[2] == 256  # 64, 128, 256: a token is copied once on the average
    assert keys.data_ptr() == room.data_ptr()
    window = started(build("sdm"), tokens(1, 130)).layers[0]
    assert window.keys.shape[2] == 3 and window.keys.untyped_storage().nbytes() == window.keys.nbytes


def test_a_fork_shares_rows_until_they_are_written():
    model = build("sdm")
    cache = started(model, tokens(1, 20))
    owned = cache.nbytes().owned
    many = cache.fork([0] * 8)
    assert many.nbytes().owned == owned > 0
    run(model, many, tokens(8, 1))
    assert owned < many.nbytes().owned < 8 * owned


# ---------------------------------------------------------------- mistakes


def test_mistakes_change_nothing():
    model, cache = build("sdm"), started(build("sdm"), tokens(2, 4))
    wrong = {
        "indices in": lambda: cache.fork([2]),
        r"got -1": lambda: cache.reorder([-1, 0]),
        "a sequence of indices": lambda: cache.evict(1),
        "whole number": lambda: cache.reset(0.5),
        "at least 0": lambda: cache.append(-1),
        "a state of 3 sequences": lambda: model(tokens(3, 1), cache, inplace=True),
        "vocab_size = 19": lambda: HybridLM(VOCAB + 1, 16, 2, **{**SIZES, **MODELS["sdm"]})(tokens(2, 1), cache),
        "stale": lambda: cache.rollback(HybridState().mark()),
    }
    for text, call in wrong.items():
        with pytest.raises(SdmError, match=text):
            call()
    for verb in ("fork", "reorder", "evict", "reset"):
        with pytest.raises(ValueRangeError, match="none yet"):
            getattr(HybridState(), verb)([0])
    expected = run(model, started(model, tokens(2, 4)), tokens(2, 2))
    assert torch.equal(run(model, cache, tokens(2, 2)), expected)


def test_a_call_that_was_cut_off_is_noticed_and_rolled_back():
    model, ids = build("sdm"), tokens(2, 4)
    cache = started(model, ids)
    mark = cache.mark()
    hook = model.blocks[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(tokens(2, 1), cache, inplace=True)
    hook.remove()
    for use in (lambda: model(tokens(2, 1), cache), lambda: cache.fork([0]), cache.mark, lambda: cache.save("x")):
        with pytest.raises(ValueRangeError, match="cut off"):
            use()
    cache.rollback(mark)
    assert torch.equal(run(model, cache, ids), run(model, started(model, ids), ids))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_cache_is_a_fork(duplicate):
    model = build("sdm")
    cache = started(model, tokens(2, 5))
    fork, twin = cache.fork([0, 1]), duplicate(cache)
    assert same_cache(twin, cache)
    run(model, twin, tokens(2, 3, seed=4))
    assert same_cache(cache, fork) and twin.positions == [8, 8]
    assert duplicate(HybridState()).layers == []


def test_a_deep_copy_of_a_layers_state_has_its_own_memory():
    model = build("sdm")
    cache = started(model, tokens(2, 5))
    layer = cache.layers[1]
    twin = copy.deepcopy(layer)
    twin.memory.reset([0, 1])
    assert layer.memory.tokens.tolist() == [5, 5] and twin.memory.tokens.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["sdm", "full", "gdn"])
def test_absurdly_many_new_sequences_change_nothing(name):
    model = build(name)
    cache = started(model, tokens(2, 5))
    before = cache.fork([0, 1])
    with pytest.raises(ValueRangeError, match="HybridState.append: n"):
        cache.append(10**14)
    assert same_cache(cache, before)


def test_a_memory_that_refuses_new_sequences_leaves_the_others_as_they_were(monkeypatch):
    torch.manual_seed(0)
    model = HybridLM(VOCAB, 16, 2, layers=["sdm", "sdm"], **SIZES).eval()
    cache = started(model, tokens(2, 5))
    before, append = cache.fork([0, 1]), MemoryState.append

    def refuse(memory, n):
        if memory is cache.layers[1].memory:
            raise StateFull("no room")
        append(memory, n)

    monkeypatch.setattr(MemoryState, "append", refuse)
    with pytest.raises(StateFull):
        cache.append(2)
    assert same_cache(cache, before)
