"""Fast-weight memories in a decoding cache: forks, marks, new sequences and files keep them in step with the rest."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from sdm_lite import DtypeError, FileFormatError, ValueRangeError  # noqa: E402
from sdm_lite.nn import HybridLM, HybridState  # noqa: E402

MEMORY = {"fwpkm": dict(sub_keys=4, k=2, key_dim=4, value_dim=8, chunk=4), "pkm": dict(sub_keys=4, k=2, key_dim=4)}


def model(chunk=4, seed=0):
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    options = {**MEMORY, "fwpkm": {**MEMORY["fwpkm"], "chunk": chunk}}
    sizes = dict(num_heads=2, slots_per_head=16, num_writes=4, num_reads=4)
    lm = HybridLM(64, 16, 2, layers=["swa", "sdm"], memory=("fwpkm@1", "pkm@2"), options=options, **sizes)
    with torch.no_grad():  # else the fast weights change no token
        lm.blocks[0].fwpkm.Wo.weight.mul_(50)
    return lm.eval()


@pytest.fixture
def begun():
    lm, cache = model(), HybridState()
    said = lm.generate(torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1)), 5, cache=cache)
    return lm, cache, said


def going_on(lm, cache, ids, tokens=9):
    return lm.generate(ids[:, -1:], tokens, cache=cache)


def test_the_writes_reach_the_tokens(begun):
    lm, cache, said = begun
    without = HybridState(list(cache.layers), cache.recent, cache.config).fork([0, 1])
    without.layers[0].fast = lm.blocks[0].fwpkm.new_state()
    assert not torch.equal(going_on(lm, cache, said), going_on(lm, without, said))


def test_a_fork_goes_on_by_itself(begun):
    lm, cache, said = begun
    fork, alone = cache.fork([1, 0, 1]), cache.fork([1])
    want = going_on(lm, alone, said[[1]])
    got = going_on(lm, fork, said[[1, 0, 1]])
    assert torch.equal(got[[0]], want) and torch.equal(got[[2]], want)
    assert torch.equal(going_on(lm, cache, said), got[[1, 0]])


def test_rollback(begun):
    lm, cache, said = begun
    mark = cache.mark()
    first = going_on(lm, cache, said)
    cache.rollback(mark)
    assert torch.equal(going_on(lm, cache, said), first)


def test_new_sequences_begin_anew(begun):
    lm, cache, said = begun
    cache.reset(0)
    cache.append(1)
    cache.reorder([2, 1, 0])
    ids = torch.tensor([[3], [int(said[1, -1])], [3]])
    got = going_on(lm, cache, ids)
    fresh = HybridState()
    assert torch.equal(got[[0]], going_on(lm, fresh, ids[[0]])) and torch.equal(got[[2]], got[[0]])
    assert cache.positions == [10, 22, 10]


def test_a_file_holds_them(begun, tmp_path):
    pytest.importorskip("safetensors")
    lm, cache, said = begun
    cache.save(tmp_path / "cache")
    loaded = HybridState.load(tmp_path / "cache", lm)
    assert torch.equal(going_on(lm, loaded, said), going_on(lm, cache, said))
    with pytest.raises(FileFormatError, match="options"):
        HybridState.load(tmp_path / "cache", model(chunk=5))


def test_speculation_is_greedy(begun):
    lm, _, said = begun
    assert torch.equal(lm.generate(said, 24, speculative=True), lm.generate(said, 24))


def test_fast_weights_of_a_batch_cannot_be_taken_apart(begun):
    lm, cache, said = begun
    lm.blocks[0].fwpkm.per_sequence = False
    shared = HybridState()
    going_on(lm, shared, said)
    for verb in (lambda: shared.fork([0]), lambda: shared.reset(0), lambda: shared.append()):
        with pytest.raises(ValueRangeError, match="one set for the batch"):
            verb()
    assert shared.positions == [10, 10]


HOW = [{}, {"temperature": 1.0, "seed": 3}, {"num_beams": 3}, {"speculative": True}, {"speculative": "batched"}]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_an_answer_without_writing(begun, how):
    lm, cache, said = begun
    going_on(lm, cache, said, 0)  # three chunks are written; a token waits in the fourth
    before = cache.layers[0].fast
    want = before.keys, before.values
    assert not torch.equal(before.keys[0], lm.blocks[0].fwpkm.keys)
    lm.generate(said[:, -1:], 9, cache=cache, update=False, **how)
    after = cache.layers[0].fast
    assert cache.positions == [23, 23] and after.position == (13, 13)
    assert torch.equal(after.keys, want[0]) and torch.equal(after.values, want[1])
    going_on(lm, cache, said)  # and the chunk that was open goes on
    assert cache.layers[0].fast.position == (23, 23) and not torch.equal(cache.layers[0].fast.values, want[1])


def test_an_answer_without_writing_is_read_from_the_memory(begun):
    lm, cache, said = begun
    fork = cache.fork([0, 1])
    token, read = said[:, -1:], []
    with torch.no_grad():
        for _ in range(9):
            logits, fork = lm(token, fork, inplace=True, update=False)
            token = logits[:, -1].argmax(-1, keepdim=True)
            read.append(token)
    got = lm.generate(said[:, -1:], 9, cache=cache.fork([0, 1]), update=False)
    assert torch.equal(got[:, 1:], torch.cat(read, dim=1))
    assert not torch.equal(got, going_on(lm, cache, said))  # with writes it is another answer


@pytest.mark.parametrize("how", HOW[2:], ids=str)
def test_reading_alone_starts_no_fast_weights(how):
    lm, cache = model(), HybridState()
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    said = lm.generate(ids, 9, cache=cache, update=False, **how)
    fast = cache.layers[0].fast
    assert fast.batch is None and torch.equal(fast.start_keys, lm.blocks[0].fwpkm.keys)
    cache.reorder([1, 0, 1])
    cache.append(1)
    last = torch.cat([said[[1, 0, 1], -1:], torch.tensor([[5]])])
    going_on(lm, cache, last)
    assert cache.positions == [26, 26, 26, 10] and cache.layers[0].fast.position == (10,) * 4


def test_update_is_refused_where_nothing_could_be_left_alone():
    lm, ids = model(), torch.tensor([[1, 2]])
    with pytest.raises(DtypeError, match="generate: update: expected True or False"):
        lm.generate(ids, 2, update=None)
    plain, cache = HybridLM(64, 16, 1, layers=["swa"], num_heads=2).eval(), HybridState()
    for how in HOW:
        with pytest.raises(ValueRangeError, match="generate: update: expected True .* without fast-weight memories"):
            plain.generate(ids, 2, cache=cache, update=False, **how)
    assert not cache.layers
