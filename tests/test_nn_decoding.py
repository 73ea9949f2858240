"""Beams against a search through everything, drafts against greedy decoding, and both with a cache."""

from __future__ import annotations

import itertools

import pytest
import torch
from caches import same_cache

from sdm_lite.errors import DtypeError, ValueRangeError
from sdm_lite.nn import SMALL_MODEL_OPTIONS, HybridLM, HybridState, stream_tokens
from sdm_lite.nn.speculative import Drafter, check_exactly

SIZES = {"num_heads": 2, "num_kv_heads": 1, "window": 5, "slots_per_head": 16, "num_writes": 4, "num_reads": 4}
LAYERS = {
    "sdm": ["swa", "sdm"],
    "full": ["full", "sdm", "conv"],
    "gdn": ["gdn", "swa"],
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products gain nothing from threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, seed=0, vocab=5, **options):
    torch.manual_seed(seed)
    layers = LAYERS[name]
    options = {"options": SMALL_MODEL_OPTIONS, "embedding_std": 0.5, "ngram_buckets": 7, **options}
    return HybridLM(vocab, 16, len(layers), layers=layers, mlp_hidden=16, **SIZES, **options).eval()


def prompt(batch, count, vocab=5, seed=1):
    return torch.randint(vocab, (batch, count), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", range(6))
def test_speculative_decoding_is_greedy_decoding(name, seed):
    """Tokens and every bit of the cache, in float32: the arithmetic is the same, call by call."""
    batch = 1 + seed % 2
    model, ids = build(name, seed), prompt(batch, 6, seed=seed).repeat(1, 2)
    greedy, speculative = HybridState(), HybridState()
    expected = model.generate(ids, 40, cache=greedy)
    assert torch.equal(model.generate(ids, 40, speculative=True, cache=speculative), expected)
    assert same_cache(speculative, greedy)
    again = prompt(batch, 2, seed=seed + 100)  # a second turn of the conversation
    assert torch.equal(
        model.generate(again, 9, speculative=True, cache=speculative), model.generate(again, 9, cache=greedy)
    )
    assert same_cache(speculative, greedy)


def test_ties_too():
    """Equal logits for all tokens at every step: argmax takes the same one in both."""
    model = build("sdm", tie_embeddings=False, zero_head=True)
    ids = prompt(1, 4)
    assert torch.equal(model.generate(ids, 12, speculative=True), model.generate(ids, 12))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("mode", [True, "batched"])
def test_any_number_of_tokens(count, mode):
    model, ids = build("sdm").double(), prompt(2, 5)
    greedy, other = HybridState(), HybridState()
    expected = model.generate(ids, count, cache=greedy)
    assert torch.equal(model.generate(ids, count, speculative=mode, cache=other), expected)
    assert other.positions == greedy.positions == [5 + count] * 2


@pytest.mark.parametrize("name", LAYERS)
def test_batched_checking_agrees_in_double_precision(name):
    # float64: a rounding of 1e-16 decides neither a token nor a slot of these seeds
    for seed in range(3):
        model, ids = build(name, seed).double(), prompt(2, 6, seed=seed).repeat(1, 2)
        assert torch.equal(model.generate(ids, 30, speculative="batched"), model.generate(ids, 30))


@pytest.mark.parametrize("right", range(4))
def test_a_check_keeps_what_greedy_says_and_takes_back_the_rest(right):
    """A draft whose first `right` tokens are greedy: the cache stands after these, with the bits of steps."""
    model, ids = build("full"), prompt(1, 6)
    cache = HybridState()
    said = model.generate(ids, 5, cache=cache)[:, 6:]
    start = HybridState()
    model.generate(ids, 0, cache=start)
    block = said[:, :4].clone()
    if right < 3:
        block[:, right + 1] = (block[:, right + 1] + 1) % 5
    accepted, logits = check_exactly(model, block, start)
    assert accepted == right and start.positions == [6 + 1 + right]
    assert int(logits.argmax()) == int(said[0, right + 1])
    expected = HybridState()
    assert torch.equal(model.generate(ids, 1 + right, cache=expected), torch.cat([ids, said[:, : 1 + right]], 1))
    assert same_cache(start, expected) and not start._marks


def test_drafts_save_calls():
    """On a text that repeats itself, checked blocks are longer than one token."""
    model, ids, blocks = build("sdm", tie_embeddings=False, zero_head=True), prompt(1, 3), []
    embed = model.embed
    model.embed = lambda ids, *rest: blocks.append(ids.shape[1]) or embed(ids, *rest)
    model.generate(ids, 60, speculative="batched")  # a zero head says token 0 for ever
    assert len(blocks) < 20 and max(blocks) == 9


def test_the_drafter_follows_the_longest_and_latest_match():
    drafter = Drafter([1, 2, 3, 4, 9, 3, 4, 7, 2, 3, 4])
    assert drafter.draft(2) == [9, 3]  # after 2 3 4, not the later 3 4
    drafter.add(5)
    assert drafter.draft(2) == []
    drafter.add(3)
    assert drafter.draft(1) == [4]


def test_a_stream_is_the_generation():
    model, ids = build("sdm"), prompt(2, 8)
    streamed = torch.stack(list(stream_tokens(model, ids, 10, speculative=True)), 1)
    assert torch.equal(streamed, model.generate(ids, 10)[:, 8:])


# ---------------------------------------------------------------- beams


def log_probabilities(model, ids, continuations):
    """The sum of log probabilities of each continuation [n, T] of one prompt [1, P]."""
    whole = torch.cat([ids.expand(len(continuations), -1), continuations], 1)
    with torch.no_grad():
        scores = model(whole).double().log_softmax(-1)[:, ids.shape[1] - 1 : -1]
    return scores.gather(-1, continuations[..., None]).sum((1, 2))


@pytest.mark.parametrize("name", LAYERS)
def test_beams_that_hold_everything_find_the_best(name):
    vocab, count = 3, 4
    model, ids = build(name, vocab=vocab).double(), prompt(2, 5, vocab)
    everything = torch.tensor(list(itertools.product(range(vocab), repeat=count)))
    found = model.generate(ids, count, num_beams=vocab ** (count - 1))
    for row in range(2):
        scores = log_probabilities(model, ids[row : row + 1], everything)
        best, second = scores.topk(2).values
        assert best - second > 1e-9  # else rounding decides
        assert torch.equal(found[row, 5:], everything[scores.argmax()])


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_few_beams_are_a_search_by_hand(beams):
    model, ids, count = build("sdm", vocab=4).double(), prompt(1, 4, 4), 5
    kept = [()]
    for _ in range(count):
        wider = torch.tensor([[*beam, token] for beam in kept for token in range(4)])
        order = log_probabilities(model, ids, wider).argsort(descending=True, stable=True)
        kept = [tuple(wider[i].tolist()) for i in order[:beams]]
    cache = HybridState()
    assert model.generate(ids, count, num_beams=beams, cache=cache)[0, 4:].tolist() == list(kept[0])
    # the cache stands after the best beam
    assert cache.positions == [4 + count]
    more = prompt(1, 2, 4, seed=5)
    whole = torch.cat([ids, torch.tensor([kept[0]]), more], 1)
    assert torch.equal(model.generate(more, 3, cache=cache)[:, 2:], model.generate(whole, 3)[:, -3:])


def test_ties_go_to_the_better_beam_then_to_the_lower_token():
    model = build("sdm", tie_embeddings=False, zero_head=True)  # every token is equally likely
    assert model.generate(prompt(2, 3), 4, num_beams=3)[:, 3:].tolist() == [[0] * 4] * 2


def test_no_tokens_of_a_beam():
    model, ids, cache = build("sdm"), prompt(2, 3), HybridState()
    assert torch.equal(model.generate(ids, 0, num_beams=3, cache=cache), ids) and cache.positions == [3, 3]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "temperature": 1.0}, "draws"),
        ({"num_beams": 2, "speculative": True}, "num_beams"),
        ({"speculative": "fast"}, "'fast'"),
        ({"speculative": True, "temperature": 0.5}, "draws"),
        ({"speculative": True, "top_k": 3}, "draws"),
    ],
)
def test_mistakes(options, word):
    with pytest.raises(ValueRangeError, match=word):
        build("sdm").generate(prompt(1, 2), 3, **options)


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("how", [{}, {"speculative": True}, {"speculative": "batched"}, {"num_beams": 2}])
@pytest.mark.parametrize("cached", [False, True])
def test_no_sequences_are_continued_to_no_sequences(how, cached):
    cache = HybridState() if cached else None
    assert build("sdm").generate(prompt(0, 4), 5, cache=cache, **how).shape == (0, 9)


@pytest.mark.parametrize("beams", [2.5, True, 1.0, "2"])
def test_beams_that_are_no_whole_number_are_refused(beams):
    with pytest.raises(DtypeError, match="num_beams: expected a whole number"):
        build("sdm").generate(prompt(1, 4), 3, num_beams=beams)


def test_more_beams_than_continuations_are_a_whole_search():
    model, ids = build("sdm"), prompt(1, 4)
    assert torch.equal(model.generate(ids, 2, num_beams=10**6), model.generate(ids, 2, num_beams=25))
