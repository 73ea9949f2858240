"""The language model: its pattern, states, sampling, checkpoints, accounting, and that it learns."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

from sdm_lite.errors import DtypeError, ShapeError, ValueRangeError
from sdm_lite.nn import (
    SMALL_MODEL_OPTIONS,
    HybridLM,
    HybridState,
    flops_per_token,
    hidden_matrices,
    parameter_counts,
    parameter_groups,
    state_elements,
    stream_tokens,
)

VOCAB = 23
SIZES = {"num_heads": 2, "window": 4, "slots_per_head": 16, "num_writes": 4, "num_reads": 4}
MODELS = {
    "sdm": {"num_layers": 4},
    "recipe": {"num_layers": 4, "options": SMALL_MODEL_OPTIONS, "mixer_heads": 2, "ngram_buckets": 11},
    "gdn": {"num_layers": 4, "mixer": "gdn", "options": SMALL_MODEL_OPTIONS},
    "conv": {"num_layers": 2, "mixer": "conv", "mixer_every": 2, "mlp_hidden": 0},
    "full": {"num_layers": 2, "mixer": "full", "mixer_every": 2, "num_kv_heads": 1, "tie_embeddings": False},
    "swa": {"num_layers": 2, "mixer": "swa", "mixer_every": 1, "ngram_buckets": 7},
    "front": {"num_layers": 2, "layers": ("conv", "sdm"), "mlp_hidden": 0, "embedding_std": 0.5},
    "hash": {
        "num_layers": 1,
        "layers": ["sdm"],
        "options": {"sdm": {"addressing": "hash"}},
        "hash_ids": "previous",
    },
}


def build(name):
    torch.manual_seed(0)
    # float64: in float32 the rounding of other product sizes could, rarely, select another slot
    return HybridLM(VOCAB, 16, **{**SIZES, **MODELS[name]}).eval().double()


def prompt(batch, tokens, seed=1):
    return torch.randint(VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


# rotary angles are float32 (1e-7), in vectors of other lengths
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def test_the_mixer_is_every_fourth_layer():
    kinds = lambda **o: [b.kind for b in HybridLM(VOCAB, 16, 8, **SIZES, **o).blocks]  # noqa: E731
    assert kinds() == ["swa", "swa", "swa", "sdm"] * 2
    assert kinds(mixer="full", mixer_every=2) == ["swa", "full"] * 4
    assert kinds(layers=["conv"] * 7 + ["gdn"]) == ["conv"] * 7 + ["gdn"]


@pytest.mark.parametrize("name", MODELS)
def test_config_rebuilds_the_model_through_json(name):
    model = build(name)
    twin = HybridLM(**json.loads(json.dumps(model.config)))
    twin.eval().double().load_state_dict(model.state_dict(), strict=True)
    ids = prompt(2, 9)
    assert torch.equal(twin(ids), model(ids)) and twin.config == model.config
    assert torch.equal(copy.deepcopy(model)(ids), model(ids))


@pytest.mark.parametrize("name", MODELS)
def test_no_token_sees_the_future(name):
    model, ids = build(name), prompt(2, 12)
    logits = model(ids)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    torch.testing.assert_close(model(changed)[:, :7], logits[:, :7], rtol=0, atol=0)
    assert not torch.allclose(model(changed)[:, 7:], logits[:, 7:])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inplace", [False, True])
def test_decoding_gives_the_logits_of_the_whole(name, inplace):
    model, ids = build(name), prompt(3, 14)
    with torch.no_grad():
        whole = model(ids)
        first, state = model(ids[:, :5], HybridState(), inplace=inplace)
        steps = [first]
        for t in range(5, 14):
            logits, state = model(ids[:, t : t + 1], state, inplace=inplace)
            steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, **CLOSE)
    assert state.position == 14


@pytest.mark.parametrize("name", ["recipe", "gdn", "full"])
def test_greedy_generation_is_the_argmax_of_the_full_forward(name):
    model, ids = build(name), prompt(2, 6)
    out = model.generate(ids, 8)
    assert out.shape == (2, 14) and torch.equal(out[:, :6], ids)
    logits = model(out[:, :-1])[:, 5:]
    chosen = logits.gather(-1, out[:, 6:, None])[..., 0]
    # the chosen token's logit is the largest, up to the rounding between the two ways
    assert bool((chosen >= logits.max(-1).values - 1e-4).all())


def test_sampling_repeats_by_seed_and_keeps_to_top_k():
    model, ids = build("sdm"), prompt(2, 4)
    draw = lambda **o: model.generate(ids, 20, temperature=1.5, **o)  # noqa: E731
    assert torch.equal(draw(seed=3), draw(seed=3)) and not torch.equal(draw(seed=3), draw(seed=4))
    torch.testing.assert_close(draw(seed=1, top_k=1), model.generate(ids, 20))
    out = draw(seed=5, top_k=3)
    allowed = model(out[:, :-1])[:, 3:].topk(3).indices
    assert bool((allowed == out[:, 4:, None]).any(-1).all())
    streamed = torch.stack(list(stream_tokens(model, ids, 20, temperature=1.5, seed=3)), 1)
    assert torch.equal(streamed, draw(seed=3)[:, 4:])
    assert torch.equal(model.generate(ids, 0), ids)


def test_a_cache_continues_the_conversation():
    model, ids, more = build("recipe"), prompt(1, 5), prompt(1, 3, seed=2)
    cache = HybridState()
    first = model.generate(ids, 4, cache=cache)
    assert cache.position == 9
    second = model.generate(more, 4, cache=cache)
    assert cache.position == 16
    whole = model.generate(torch.cat([first, more], 1), 4)
    assert torch.equal(torch.cat([first, second], 1), whole)


def test_generation_does_not_touch_the_learned_memory():
    model = build("sdm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.generate(prompt(1, 5), 5)
    model.generate(prompt(1, 1), 5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hash_of_the_previous_token_is_carried_over_cuts():
    model, ids = build("hash"), prompt(2, 6)
    writes, reads = model._hash_ids(ids, ids.new_full((2, 3), -1))
    assert torch.equal(reads, ids) and torch.equal(writes[:, 1:], ids[:, :-1]) and bool((writes[:, 0] == -1).all())


@pytest.mark.parametrize("name", ["recipe", "gdn", "conv"])
def test_a_small_model_learns_a_repeating_text(name):
    torch.manual_seed(0)
    model = HybridLM(VOCAB, 16, **{**SIZES, **MODELS[name]})
    text = prompt(1, 8).repeat(4, 4)
    matrices, rest = hidden_matrices(model)
    assert len(matrices) + len(rest) == sum(1 for _ in model.parameters())
    optimisers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        losses.append(loss.item())
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
    # from about ln 23 = 3.1 nats; the continuation is certain after eight tokens
    assert losses[0] > 2.5 and losses[-1] < 1.0


def test_zero_head_starts_uniform():
    model = HybridLM(VOCAB, 16, 1, layers=["swa"], num_heads=2, tie_embeddings=False, zero_head=True)
    assert bool((model(prompt(1, 3)) == 0).all())


def test_head_gain_sets_the_first_logits():
    # a row of the embedding has length 0.5 * sqrt(64) = 4, the normed vector 8: std 0.5 * 8 = 4 at gain 1
    torch.manual_seed(0)
    model = HybridLM(500, 64, 1, layers=["swa"], embedding_std=0.5, head_gain=0.1)
    assert 0.3 < model(prompt(2, 9)).std() < 0.6


# ---------------------------------------------------------------- accounting


def test_accounting_of_the_iso_flop_pair():
    """d = 128: d_qk 64 against N = 1024, W = R = 32 have equal projections and access, and 16 times the state."""
    common = {"vocab_size": 64, "dim": 128, "num_layers": 2, "mlp_hidden": 0}
    sdm = {**common, "layers": ["conv", "sdm"], "num_writes": 32, "num_reads": 32}
    sdm["options"] = {"sdm": {"output_gate": True, "learn_memory": False}}
    gdn = {**common, "layers": ["conv", "gdn"]}
    assert flops_per_token(sdm)["projections"] == flops_per_token(gdn)["projections"]
    one, two = state_elements(sdm), state_elements(gdn)
    assert one == {"recurrent": 1024 * 128, "cache": 0, "access": 64 * 128}
    assert two == {"recurrent": 64 * 128, "cache": 0, "access": 64 * 128}
    assert parameter_counts(sdm)["total"] == parameter_counts(gdn)["total"]
    # 32 rows retrieved, updated and read against three passes over 64 rows
    assert flops_per_token(sdm)["state"] == 2 * 3 * 32 * 128 == flops_per_token(gdn)["state"] // 2


@pytest.mark.parametrize("name", MODELS)
def test_accounting_of_a_config_is_that_of_its_model(name):
    model = build(name)
    assert flops_per_token(model) == flops_per_token(model.config)
    assert state_elements(model) == state_elements(model.config)
    counts = parameter_counts(model.config)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model)
    assert flops["total"] == sum(count for part, count in flops.items() if part != "total")


def test_memory_and_ngrams_are_counted_apart():
    counts = parameter_counts(build("recipe"))
    assert counts["ngrams"] == 3 * 11 * 16 and counts["memory"] == 16 * 16 and counts["embedding"] == VOCAB * 16


def test_attention_flops_are_the_average_over_the_context():
    full = HybridLM(VOCAB, 16, 1, layers=["full"], num_heads=2)
    swa = HybridLM(VOCAB, 16, 1, layers=["swa"], num_heads=2, window=4)
    # of 7 tokens, token t sees t keys (28 in all), with a window of 4 at most 4 (22 in all)
    assert flops_per_token(full, context=7)["state"] == 4 * 16 * 4
    assert flops_per_token(swa, context=4)["state"] == 4 * 16 * 3  # 10 / 4 = 2.5, rounded up
    assert state_elements(swa, context=100)["cache"] == 2 * 3 * 16


def test_the_published_size_comes_out():
    """Spec section 8: d = 1920, H = 2 gives N = 57,600 and 110,592,000 elements a layer."""
    config = {"vocab_size": 8, "dim": 1920, "num_layers": 1, "layers": ["sdm"], "mixer_heads": 2}
    assert state_elements({**config, "slots_per_head": 57_600})["recurrent"] == 110_592_000


def test_groups_of_a_model():
    model = build("recipe")
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0
    memory = model.blocks[3].mixer.memory
    assert any(p is memory for p in kept["params"]) and not any(p is memory for p in decayed["params"])
    matrices, rest = hidden_matrices(model)
    assert all(p.ndim == 2 for p in matrices) and any(p is model.embedding.weight for p in rest)


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "mixer:": lambda: HybridLM(VOCAB, 16, 4, mixer="mamba"),
    "mixer_every": lambda: HybridLM(VOCAB, 16, 3),
    "layers: expected num_layers = 4 names": lambda: HybridLM(VOCAB, 16, 4, layers=["swa"]),
    "layers: expected one of": lambda: HybridLM(VOCAB, 16, 1, layers=["rnn"]),
    "options": lambda: HybridLM(VOCAB, 16, 4, options={"lstm": {}}),
    "memory": lambda: HybridLM(VOCAB, 16, 4, memory=["fwpkm@5"]),
    "zero_head": lambda: HybridLM(VOCAB, 16, 4, zero_head=True),
    "hash_ids": lambda: HybridLM(VOCAB, 16, 4, hash_ids="next"),
    "vocab_size": lambda: HybridLM(0, 16, 4),
    "num_beams": lambda: build("swa").generate(prompt(1, 2), 1, num_beams=0),
    "speculative": lambda: build("swa").generate(prompt(1, 2), 1, speculative="fast"),
    "temperature": lambda: build("swa").generate(prompt(1, 2), 1, temperature=-1.0),
    "top_k": lambda: build("swa").generate(prompt(1, 2), 1, temperature=1.0, top_k=0),
    "max_new_tokens": lambda: build("swa").generate(prompt(1, 2), -1),
    r"ids: expected tokens in \[0, 23\)": lambda: build("swa").generate(torch.tensor([[23]]), 1),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_say_what_and_how_to_fix(text):
    with pytest.raises(ValueRangeError, match=text) as caught:
        MISTAKES[text]()
    assert "expected" in str(caught.value) and "Fix:" in str(caught.value)


def test_wrong_ids_are_named():
    model = build("swa")
    with pytest.raises(DtypeError, match="ids"):
        model(torch.zeros(1, 2))
    with pytest.raises(ShapeError, match="ids"):
        model(torch.zeros(2, dtype=torch.long))
    with pytest.raises(ShapeError, match="at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 2)
