"""Prompts of different lengths in one call: each sequence gives what it gives alone, for every mixer and memory."""

from __future__ import annotations

import pytest
import torch
from caches import same_cache

from sdm_lite import MemoryState
from sdm_lite.errors import DtypeError, ShapeError, ValueRangeError
from sdm_lite.nn import SMALL_MODEL_OPTIONS, HybridLM, HybridState, SlotUsage

VOCAB = 19
SIZES = {"num_heads": 2, "num_kv_heads": 1, "window": 4, "slots_per_head": 16, "num_writes": 4, "num_reads": 4}
TABLES = {"fwpkm": {"sub_keys": 4, "num_heads": 1, "k": 2, "key_dim": 4, "chunk": 3}, "pkm": {"sub_keys": 4, "k": 2}}
MODELS = {
    "sdm": {"layers": ["swa", "sdm"], "options": SMALL_MODEL_OPTIONS, "mixer_heads": 2, "ngram_buckets": 11},
    "per_slot": {"layers": ["sdm"], "options": {"sdm": {"learn_memory": False, "rule": "per_slot"}}},
    "read_only": {"layers": ["sdm", "swa"], "options": {"sdm": {"write": False, "conv": 4}}},
    "position": {"layers": ["sdm"], "options": {"sdm": {"addressing": "hash"}}},
    "previous": {"layers": ["sdm"], "options": {"sdm": {"addressing": "hash"}}, "hash_ids": "previous"},
    "full": {"layers": ["full", "sdm"]},
    "gdn": {"layers": ["swa", "gdn"], "options": SMALL_MODEL_OPTIONS},
    "conv": {"layers": ["conv", "full"]},
    "fwpkm": {"layers": ["swa", "swa"], "memory": ["fwpkm@1"], "options": {"fwpkm": TABLES["fwpkm"]}},
    "pkm": {"layers": ["swa"], "memory": ["pkm@1"], "options": {"pkm": TABLES["pkm"]}},
}
DECODING = [name for name in MODELS if name != "fwpkm"]
LENGTHS = (5, 9, 1, 0)
PLACES = {"right": lambda n: range(n), "left": lambda n: range(11 - n, 11), "holes": lambda n: range(0, 11)[1::2][:n]}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products gain nothing from threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name):
    """A model in float64: products of other sizes then differ far below what could select another slot."""
    torch.manual_seed(0)
    config = {**SIZES, **MODELS[name]}
    model = HybridLM(VOCAB, 16, len(config["layers"]), embedding_std=0.5, mlp_hidden=8, **config).eval().double()
    with torch.no_grad():
        for block in model.blocks:
            if block.kind == "sdm" and "memory" in block.mixer._parameters:
                block.mixer.memory.normal_()  # a zero memory would hide a wrong one
    return model


def prompts(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def padded(rows, place="holes", columns=11, fill=-100):
    """Return ids [B, columns] and the mask of rows; what stands at the padding is no id at all."""
    ids, mask = torch.full((len(rows), columns), fill), torch.zeros(len(rows), columns, dtype=torch.bool)
    for b, row in enumerate(rows):
        where = list(PLACES[place](len(row)))[: len(row)] if place != "holes" or len(row) <= 5 else range(len(row))
        mask[b, list(where)] = True
    ids[mask] = torch.cat(list(rows))
    return ids, mask


def close(one, two):
    return torch.allclose(one, two, rtol=0, atol=1e-11)  # float64 products in another order


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_each_sequence_alone(name, place):
    model, rows = build(name), prompts()
    ids, mask = padded(rows, place)
    with torch.no_grad():
        logits = model(ids, mask=mask)
        for row, there, mine in zip(rows, mask, logits):
            assert close(mine[there], model(row[None])[0])
            assert not mine[~there].any()


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("inplace", [True, False])
def test_a_state_goes_on_as_each_sequence_alone(name, inplace):
    """Two calls with padding and one without, in place and with dense tables; the sequence without tokens too."""
    model, turns = build(name), [prompts((5, 9, 1, 0)), prompts((2, 0, 6, 0), 2), prompts((3, 3, 3, 3), 3)]
    state, alone = HybridState(), [HybridState() for _ in range(4)]
    with torch.no_grad():
        for turn, rows in enumerate(turns):
            ids, mask = padded(rows) if turn < 2 else (torch.stack(rows), None)
            logits, state = model(ids, state, inplace=inplace, mask=mask)
            for b, row in enumerate(rows):
                expected, alone[b] = model(row[None], alone[b], inplace=inplace)
                assert close(logits[b] if mask is None else logits[b][mask[b]], expected[0])
            assert state.positions == [one.position for one in alone]
    for b in range(4):
        for mine, other in zip(state.layers, alone[b].layers):
            for name, tap in mine.taps.items():
                assert close(tap[b], other.taps[name][0])
            if mine.keys is not None:
                seen = other.keys.shape[2]
                assert close(mine.keys[b, :, mine.keys.shape[2] - seen :], other.keys[0])
            if isinstance(mine.memory, MemoryState):
                assert close(mine.memory.dense()[b], other.memory.dense()[0])
                assert mine.memory.tokens[b] == other.position
            elif mine.memory is not None:
                assert close(mine.memory[b], other.memory[0])
        assert torch.equal(state.recent[b], alone[b].recent[0])


@pytest.mark.parametrize("name", DECODING)
def test_generating_from_a_list_is_generating_from_each(name):
    model, rows = build(name), prompts((5, 9, 1))
    expected = [model.generate(row[None], 6)[0] for row in rows]
    found = model.generate([rows[0].tolist(), *rows[1:]], 6)
    assert all(map(torch.equal, found, expected))
    ids, mask = padded(rows, fill=0)
    new = torch.stack([one[-6:] for one in expected])
    assert torch.equal(model.generate(ids, 6, mask=mask), torch.cat([ids, new], dim=1))
    beams = [model.generate(row[None], 4, num_beams=3)[0] for row in rows]
    assert all(map(torch.equal, model.generate(rows, 4, num_beams=3), beams))


@pytest.mark.parametrize("name", ["sdm", "full", "gdn"])
def test_drafts_after_padded_prompts_are_greedy(name):
    model = build(name)
    rows = [row.repeat(3) for row in prompts((3, 4))]
    greedy, speculative = HybridState(), HybridState()
    expected = model.generate(rows, 12, cache=greedy)
    assert all(map(torch.equal, model.generate(rows, 12, speculative=True, cache=speculative), expected))
    assert same_cache(speculative, greedy)


@pytest.mark.parametrize("name", DECODING)
def test_fork_rollback_and_files_after_padded_prompts(name, tmp_path):
    """The bits of the cache itself, by the same calls."""
    model, rows = build(name), prompts((5, 9, 1))
    cache, again = HybridState(), HybridState()
    for one in (cache, again):
        model.generate(rows, 2, cache=one)
    before = cache.mark()
    fork = cache.fork([2, 0, 1])
    cache.save(tmp_path / "cache")
    model.generate(prompts((2, 1, 7), 5), 3, cache=cache)
    assert cache.positions == [12, 15, 13] and fork.positions == [3, 7, 11]
    cache.rollback(before)
    fork.reorder([1, 2, 0])
    for one in (cache, fork, HybridState.load(tmp_path / "cache", model)):
        assert same_cache(one, again)
        model.generate(prompts((2, 1, 7), 5), 3, cache=one)
    model.generate(prompts((2, 1, 7), 5), 3, cache=again)
    assert same_cache(cache, again) and same_cache(fork, again)


@pytest.mark.parametrize("name", MODELS)
def test_padding_has_no_gradient_and_the_tokens_have_theirs(name):
    """The gradients of a loss over the tokens are the sums of those of the sequences alone."""
    model, rows = build(name), prompts((5, 2, 7))
    ids, mask = padded(rows, fill=3)
    weights = torch.randn(VOCAB, dtype=torch.float64)
    (model(ids, mask=mask)[mask] @ weights).sin().sum().backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    for row in rows:
        (model(row[None])[0] @ weights).sin().sum().backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for key in found:
        assert torch.allclose(found[key], expected[key], rtol=1e-9, atol=1e-9), key
    seen: list[torch.Tensor] = []
    hook = model.embedding.register_forward_hook(lambda _, __, out: (out.retain_grad(), seen.append(out))[0])
    model(ids, mask=mask)[mask].sin().sum().backward()
    hook.remove()
    lengths = mask.sum(1)
    for gradient, length in zip(seen[0].grad, lengths):
        assert gradient[:length].any() and not gradient[length:].any()


def test_what_stands_at_the_padding_changes_no_bit():
    model, (ids, mask) = build("sdm").float(), padded(prompts())
    other = ids.masked_fill(~mask, 7)
    with torch.no_grad():
        assert torch.equal(model(ids, mask=mask), model(other, mask=mask))
        whole = torch.ones_like(mask)
        assert torch.equal(model(other, mask=whole), model(other))


def test_a_call_of_padding_alone_changes_nothing():
    model, rows = build("sdm"), prompts((5, 9, 1))
    cache, again = HybridState(), HybridState()
    with torch.no_grad():
        for one in (cache, again):
            model.generate(rows, 2, cache=one)
        nothing = torch.zeros(3, 4, dtype=torch.bool)
        logits, _ = model(torch.full((3, 4), -1), cache, inplace=True, mask=nothing)
        assert tuple(logits.shape) == (3, 4, VOCAB) and not logits.any()
        assert same_cache(cache, again)
        assert not model(torch.zeros(3, 4, dtype=torch.long), mask=nothing).any()


def test_padding_is_not_counted_as_use_of_a_table():
    model, rows = build("pkm"), prompts((5, 2))
    layer = model.blocks[0].mlp
    layer.usage = SlotUsage(layer.num_slots)
    ids, mask = padded(rows)
    with torch.no_grad():
        model(ids, mask=mask)
    assert layer.usage.report().reads == 7 * layer.num_heads * layer.k


def test_fast_weights_are_read_with_padding_and_refuse_to_write_chunks_of_unequal_lengths():
    model, rows = build("fwpkm"), prompts((5, 2))
    ids, mask = padded(rows)
    for options in ({}, {"inplace": True, "return_state": False}):
        with pytest.raises(ValueRangeError, match="HybridLM: mask: .* update=False"), torch.no_grad():
            model(ids, HybridState(), mask=mask, **options)
    found = model.generate(rows, 4, update=False)
    assert all(torch.equal(one, model.generate(row[None], 4, update=False)[0]) for one, row in zip(found, rows))


@pytest.mark.parametrize(
    "mask, error",
    [
        (torch.ones(2, 3), DtypeError),
        (torch.ones(2, 4, dtype=torch.bool), ShapeError),
        ([[True] * 3] * 2, DtypeError),
    ],
)
def test_a_wrong_mask_is_refused(mask, error):
    with pytest.raises(error, match="HybridLM: mask: expected .* Fix: "):
        build("full")(torch.ones(2, 3, dtype=torch.long), mask=mask)


@pytest.mark.parametrize("ids", [[], [[1, 2], []], [[1.5]], [[[1]]], ["ab"], [[VOCAB]], 3])
def test_wrong_prompts_are_refused(ids):
    with pytest.raises((DtypeError, ShapeError, ValueRangeError), match="generate: .*expected .* Fix: "):
        build("full").generate(ids, 1)
