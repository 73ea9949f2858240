"""A search for wrong gradients: whole layers in float64, random options and inputs, one random direction a draw."""

from __future__ import annotations

import pytest
import torch

from sdm_lite.nn import SMALL_MODEL_OPTIONS, GatedDeltaNet, HybridLM, MixerState, SparseDeltaMemory
from sdm_lite.nn import sparse_delta_memory as layer_module

DRAWS = 12
# a central difference with h = 1e-6 is off by h^2 times a third derivative, about 1e-12, and by rounding of the loss
# over h, about 1e-10; a gradient wrong in one of the parts by a thousandth is off by 1e-6 and more
TOLERANCE = 1e-6


@pytest.fixture
def selections(monkeypatch):
    """The slots that the layers select: a difference across a change of selection measures nothing."""
    seen = []
    real = layer_module.product_key_topk

    def spy(*arguments, **options):
        values, slots = real(*arguments, **options)
        seen.append(slots)
        return values, slots

    monkeypatch.setattr(layer_module, "product_key_topk", spy)
    return seen


def pick(generator, *choices):
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


def draw(seed):
    """A layer with random options, a state or none, and inputs; memories are not zero, so that all rows matter."""
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    heads = pick(g, 1, 2)
    options = {
        "rule": pick(g, "shared", "per_slot"),
        "readings_norm": pick(g, "rms", "layer", None),
        "output_gate": pick(g, False, True, "silu"),
        "key_weighted_decay": pick(g, False, True),
        "memory_init_std": 0.5,
        "conv": pick(g, None, 3),
        "score_norm": pick(g, None, "rms"),
        "score_scale": pick(g, None, 1.0),
        "decay_init": pick(g, "fla", "slow", "stratified"),
        "restore": pick(g, "hybrid", "snapshot"),
    }
    sizes = {"num_heads": heads, "slots_per_head": 16, "num_writes": pick(g, 1, 4), "num_reads": pick(g, 3, 16)}
    layer = SparseDeltaMemory(8, **sizes, **options).double()
    x = torch.randn(2, pick(g, 1, 5, 9), 8, dtype=torch.float64, generator=g)
    memory = torch.randn(2, heads, 16, 8 // heads, dtype=torch.float64, generator=g)
    state = pick(g, None, MixerState(memory=memory))
    return layer, x, state, g


def difference_and_claim(loss, leaves, g, h=1e-6):
    """The derivative of `loss` along a random direction of all leaves, measured and claimed."""
    directions = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=g) for leaf in leaves]
    gradients = torch.autograd.grad(loss(), leaves, allow_unused=True)
    claimed = sum(float((d * u).sum()) for d, u in zip(gradients, directions) if d is not None)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for leaf, u in zip(leaves, directions):
                leaf += sign * h * u
            ends.append(loss().item())
            for leaf, u in zip(leaves, directions):
                leaf -= sign * h * u
    return (ends[0] - ends[1]) / (2 * h), claimed


def held_to_differences(selections, loss, leaves, g):
    """Hold one draw to its difference; return whether its selections stood still, so that it counts."""
    selections.clear()
    measured, claimed = difference_and_claim(loss, leaves, g)
    calls = [selections[i :: len(selections) // 3] for i in range(len(selections) // 3)]
    if not all(torch.equal(one, first) for first, *others in calls for one in others):
        return False
    assert abs(measured - claimed) <= TOLERANCE * max(1.0, abs(measured)), (measured, claimed)
    return True


def test_random_layers(selections):
    counted = 0
    for seed in range(DRAWS):
        layer, x, state, g = draw(seed)
        leaves = [x.requires_grad_(), *layer.parameters()]
        if state is not None:
            leaves.append(state.memory.requires_grad_())
        weights = torch.randn(x.shape, dtype=torch.float64, generator=g)

        def loss(layer=layer, x=x, state=state, weights=weights):
            y, after = layer(x, state, return_state=True)
            return (y * weights).sum() + after.memory.square().sum()

        counted += held_to_differences(selections, loss, leaves, g)
    assert counted >= DRAWS * 3 // 4


@pytest.mark.parametrize("mixer", ["sdm", "gdn"])
def test_a_small_model(mixer, selections):
    g = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    sizes = {"num_heads": 2, "slots_per_head": 16, "num_writes": 4, "num_reads": 4, "window": 3}
    layers = ["swa", mixer, "conv"]
    model = HybridLM(11, 8, 3, layers=layers, **sizes, options=SMALL_MODEL_OPTIONS, ngram_buckets=5).double()
    ids, weights = torch.randint(11, (2, 7), generator=g), torch.randn(2, 7, 11, dtype=torch.float64, generator=g)
    leaves = list(model.parameters())
    counted = [held_to_differences(selections, lambda: (model(ids) * weights).sum(), leaves, g) for _ in range(4)]
    assert sum(counted) >= 3


def test_the_search_catches_a_thousandth(selections, monkeypatch):
    torch.manual_seed(0)
    layer, g = GatedDeltaNet(8, head_k_dim=4, head_v_dim=4).double(), torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 8, dtype=torch.float64, generator=g)
    layer.v_proj.weight.register_hook(lambda gradient: gradient * 1.001)
    with pytest.raises(AssertionError):
        held_to_differences(selections, lambda: layer(x)[0].square().sum(), list(layer.parameters()), g)
