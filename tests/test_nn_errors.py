"""What the torch layers say to mistakes: the library's own errors, with the argument, what came, and the fix."""

import pytest
import torch
from mixers import MIXERS, SIZES

from sdm_lite.errors import DeviceError, DtypeError, SdmError, ShapeError, ValueRangeError
from sdm_lite.nn import (
    FullAttention,
    GatedDeltaNet,
    GatedShortConv,
    HybridLM,
    HybridState,
    MixerState,
    ShortConv,
    SlidingWindowAttention,
    SparseDeltaMemory,
    gated_delta_rule,
)

KINDS = ["sdm_recipe", "sdm_hash", "gdn_recipe", "conv", "swa", "full"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


MISTAKES = {
    "num_heads": lambda: SparseDeltaMemory(8, num_heads=3, **SIZES),
    "slots_per_head.*pass 9 or 16, or factors": lambda: SparseDeltaMemory(
        8, slots_per_head=12, num_writes=2, num_reads=2
    ),
    "factors": lambda: SparseDeltaMemory(8, **SIZES, factors=(3, 5)),
    "num_reads: expected 1 to 16 slots, got 64": lambda: SparseDeltaMemory(8, slots_per_head=16, num_writes=4),
    "rule": lambda: SparseDeltaMemory(8, **SIZES, rule="Shared"),
    "output_gate": lambda: SparseDeltaMemory(8, **SIZES, output_gate=1),
    "conv:": lambda: SparseDeltaMemory(8, **SIZES, conv=1),
    "conv_init": lambda: GatedShortConv(8, conv_init="mixed"),
    "key_init": lambda: GatedDeltaNet(8, key_init="equal"),
    "memory_init_std": lambda: SparseDeltaMemory(8, **SIZES, learn_memory=False, memory_init_std=0.02),
    "head_k_dim": lambda: GatedDeltaNet(8, head_k_dim=0),
    "num_kv_heads": lambda: FullAttention(8, 4, 3),
    "even number": lambda: SlidingWindowAttention(9, 3),
    "window": lambda: SlidingWindowAttention(8, 2, window=0),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_say_what_and_how_to_fix(text):
    with pytest.raises(ValueRangeError, match=text) as caught:
        MISTAKES[text]()
    assert "expected" in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize("name", ["sdm_plain", "gdn_plain", "swa"])
def test_wrong_width_is_named(name):
    with pytest.raises(SdmError, match=r"x: expected \[B, T, 8\]"):
        MIXERS[name]()(torch.randn(2, 3, 7))


def test_a_state_of_another_layer_or_batch_is_refused():
    big = SparseDeltaMemory(8, slots_per_head=1024, num_writes=4, num_reads=4).eval()
    small = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4).eval()
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = small(x)
        for inplace in (False, True):
            with pytest.raises(ShapeError, match="state"):
                big(x, state, inplace=inplace)
        with pytest.raises(ShapeError, match="sequences"):
            small(torch.cat([x, x]), state)
        with pytest.raises(DtypeError, match="MixerState"):
            small(x, state.memory)
        dense = GatedDeltaNet(8, num_heads=1, head_k_dim=4, head_v_dim=8, conv=None).eval()
        _, state = dense(x)
        with pytest.raises(ShapeError, match="sequences"):
            dense(torch.cat([x, x]), state)


def refused(error, words, call, *arguments, **options):
    """The call raises `error`, in the library's form, with all `words`."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert isinstance(caught.value, SdmError) and "expected" in text and "Fix:" in text, text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name", KINDS)
def test_wrong_inputs_are_named(name):
    layer = MIXERS[name]()
    op = type(layer).__name__
    good = torch.randn(2, 3, 8)
    refused(ShapeError, [op, "x", "[B, T, 8]", "[2, 3, 7]"], layer, good[..., :7])
    refused(ShapeError, [op, "x", "[3, 8]"], layer, good[0])
    refused(ShapeError, [op, "x", "[1, 2, 3, 8]"], layer, good[None])
    refused(DtypeError, [op, "x", "torch.float32", "torch.float64"], layer, good.double())
    refused(DtypeError, [op, "x", "torch.bfloat16"], layer, good.bfloat16())
    refused(DtypeError, [op, "x", "torch.int64"], layer, good.long())
    refused(DtypeError, [op, "x", "ndarray"], layer, good.numpy())
    refused(DtypeError, [op, "x", "list"], layer, good.tolist())
    refused(DeviceError, [op, "x", "cpu", "meta"], layer, good.to("meta"))
    refused(ValueRangeError, [op, "inplace", "state=None"], layer, good, inplace=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(good)[0].shape == layer(good.bfloat16())[0].shape == good.shape
        refused(DtypeError, [op, "x", "torch.float64"], layer, good.double())


@pytest.mark.parametrize("name", KINDS)
def test_states_of_something_else_are_named(name):
    layer = MIXERS[name]().eval()
    op, x = type(layer).__name__, torch.randn(2, 3, 8)
    _, state = layer(x)
    refused(ShapeError, [op, "state", "2 sequences", "one of 1"], layer, x, state.map(lambda part: part[:1]))
    refused(ShapeError, [op, "state"], layer, x, state.map(lambda part: torch.cat([part, part], dim=-1)))
    refused(DeviceError, [op, "state", "meta"], layer, x, state.map(lambda part: part.to("meta")))
    refused(DtypeError, [op, "state", "MixerState", "dict"], layer, x, vars(state))
    other = {"keys": torch.ones(2, 1, 3, 4)} if name not in ("swa", "full") else {"memory": torch.ones(2, 1, 4, 4)}
    refused(ShapeError, [op, "state", *other], layer, x, MixerState(3, **other))
    layer(x, state)  # the right one is taken


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.float32, torch.bool])
def test_ids_of_other_dtypes_are_named(dtype):
    model = HybridLM(16, 8, 1, layers=["conv"])
    refused(DtypeError, ["HybridLM", "ids", "int32 or int64", str(dtype)], model, torch.ones(1, 3).to(dtype))
    refused(DtypeError, ["generate", "ids", "int32 or int64"], model.generate, torch.ones(1, 3).to(dtype), 2)


def test_mistakes_of_a_model_are_named():
    model = HybridLM(16, 8, 2, layers=["conv", "swa"], num_heads=2, ngram_buckets=8)
    ids = torch.tensor([[1, 2, 15]])
    for wrong, got in ((16, "16"), (-1, "-1"), (2**31 - 1, str(2**31 - 1))):
        for dtype in (torch.int32, torch.int64):
            bad = torch.tensor([[1, wrong]], dtype=dtype)
            refused(ValueRangeError, ["HybridLM", "ids", "[0, 16)", f"got {got}"], model, bad)
            refused(ValueRangeError, ["generate", "ids", "[0, 16)"], model.generate, bad, 1)
    refused(DtypeError, ["ids", "list"], model, [[1, 2]])
    refused(ShapeError, ["ids", "[3]"], model, ids[0])
    refused(DeviceError, ["ids", "meta"], model, ids.to("meta"))
    refused(ValueRangeError, ["inplace", "state=None"], model, ids, inplace=True)
    refused(DtypeError, ["state", "HybridState", "MixerState"], model, ids, MixerState())
    _, state = model(ids, HybridState())
    refused(ShapeError, ["state", "2 sequences", "recent"], model, torch.cat([ids, ids]), state)
    refused(ShapeError, ["state", "2 layers"], model, ids, HybridState(state.layers[:1], state.recent))
    refused(ShapeError, ["features", "[..., 8]"], model.logits, torch.ones(3, 7))
    refused(DtypeError, ["features", "torch.float64"], model.logits, torch.ones(3, 8).double())
    refused(ValueRangeError, ["seed", "2^64"], model.generate, ids, 1, seed=2**64)
    refused(ValueRangeError, ["seed", "-1"], model.generate, ids, 1, seed=-1)
    refused(DtypeError, ["max_new_tokens", "1.5"], model.generate, ids, 1.5)
    refused(DtypeError, ["temperature", "'hot'"], model.generate, ids, 1, temperature="hot")
    assert model(torch.ones(2, 0, dtype=torch.int64)).shape == (2, 0, 16)


def test_hash_ids_are_looked_at():
    layer, x = MIXERS["sdm_hash"](), torch.randn(2, 3, 8)
    ids = torch.ones(2, 3, dtype=torch.int64)
    refused(ShapeError, ["ids", "[2, 3]", "[3]"], layer, x, ids=ids[0])
    refused(ShapeError, ["ids", "a tuple of 3"], layer, x, ids=(ids, ids, ids))
    refused(DtypeError, ["ids", "list"], layer, x, ids=(ids, ids.tolist()))
    refused(DtypeError, ["ids", "float32"], layer, x, ids=ids.float())


def test_the_dense_rule_and_the_convolution_look_at_their_arguments():
    B, T, H, K, V = 2, 3, 2, 4, 5
    call = {
        "q": torch.ones(B, T, H, K),
        "k": torch.ones(B, T, H, K),
        "values": torch.ones(B, T, H, V),
        "log_decay": torch.zeros(B, T, H),
        "beta": torch.ones(B, T, H),
        "initial_state": torch.zeros(B, H, K, V),
    }
    gated_delta_rule(**call)
    for name, x in call.items():
        named = "k" if name == "values" else name  # sizes follow those of values
        refused(ShapeError, ["gated_delta_rule", named], gated_delta_rule, **{**call, name: x[:, :1]})
        refused(DtypeError, ["gated_delta_rule", "float64"], gated_delta_rule, **{**call, name: x.double()})
        refused(DtypeError, ["gated_delta_rule", name, "ndarray"], gated_delta_rule, **{**call, name: x.numpy()})
    refused(ValueRangeError, ["chunk", "0"], gated_delta_rule, **call, chunk=0)
    conv, x = ShortConv(8, 4), torch.ones(2, 3, 8)
    refused(ShapeError, ["ShortConv", "x", "[2, 3, 7]"], conv, x[..., :7])
    refused(DtypeError, ["ShortConv", "x", "float64"], conv, x.double())
    refused(ShapeError, ["ShortConv", "taps", "[2, 2, 8]"], conv, x, torch.zeros(2, 2, 8))


def test_an_empty_state_in_place_begins_a_sequence():
    layer, x = MIXERS["sdm_recipe"]().eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        begun, state = layer(x, MixerState(), inplace=True)
        assert torch.equal(begun, layer(x)[0]) and layer.initial_memory().eq(0).all()
        memory = state.memory
        after = layer(x, state, inplace=True)[1]
    assert after.memory is memory


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_state_loads_with_weights_only(name, tmp_path):
    layer, x = MIXERS[name]().eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        _, state = layer(x)
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert isinstance(loaded, MixerState) and loaded.position == 3
        assert torch.equal(layer(x, loaded)[0], layer(x, state)[0])


def test_a_saved_state_of_a_model_loads_with_weights_only(tmp_path):
    model = HybridLM(16, 8, 2, layers=["swa", "sdm"], num_heads=2, slots_per_head=16, num_writes=4, num_reads=4)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        _, state = model(ids, HybridState())
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert torch.equal(model(ids, loaded)[0], model(ids, state)[0])


def test_a_model_on_the_meta_device_is_refused_or_runs():
    ids = torch.tensor([[1, 2, 3]], device="meta")
    with torch.no_grad():
        model = HybridLM(16, 8, 1, layers=["swa"], num_heads=2).to("meta")
        assert model(ids).shape == (1, 3, 16)
        model = HybridLM(16, 8, 1, layers=["sdm"], num_heads=2, slots_per_head=16, num_writes=4, num_reads=4)
        with pytest.raises(DeviceError):
            model.to("meta")(ids)
        with pytest.raises(DtypeError):
            SlidingWindowAttention(8, 2).to("meta")(torch.zeros(1, 3, 8, device="meta", dtype=torch.bfloat16))
