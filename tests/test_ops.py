"""The public ops: every kind of array, layout and dtype gives what contiguous NumPy arrays give, on both rooms."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from foreign import BareCapsule, ForeignArray
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

import sdm_lite

torch = pytest.importorskip("torch")

ROOMS = [None, "cpu", "reference"]
KINDS = {"numpy": lambda x: x, "torch": torch.from_numpy, "foreign": ForeignArray}
ARGUMENTS = ("values", "write_slots", "write_weights", "log_decay", "beta", "read_slots", "read_weights", "state")
SMALL = cases.DeltaFields("ops_small", B=2, T=5, H=2, N=20, D=19, W=6, R=5)


def as_numpy(x) -> np.ndarray:
    return x.array if isinstance(x, ForeignArray) else np.asarray(x)


def small_call(**changes) -> list[np.ndarray]:
    return list(cases.make_case(SMALL, dtype=np.float32, **changes).arguments())


# ---- kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_bits_and_its_own_kind(kind, backend):
    call = small_call()
    room = backend or "cpu"
    want, want_final = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=room)
    before = [x.tobytes() for x in call]
    ours = [KINDS[kind](x) for x in call]
    readings, final = sdm_lite.sparse_delta_rule(*ours, output_final_state=True, backend=backend)
    assert type(readings) is type(final) is type(ours[0])
    assert as_numpy(readings).tobytes() == want.tobytes()
    assert as_numpy(final).tobytes() == want_final.tobytes()
    assert [x.tobytes() for x in call] == before
    assert sdm_lite.sparse_delta_rule(*ours, backend=backend)[1] is None

    state = call[7].copy()
    readings = sdm_lite.sparse_delta_rule_(*ours[:7], KINDS[kind](state), backend=backend)
    assert type(readings) is type(ours[0])
    assert as_numpy(readings).tobytes() == want.tobytes()
    assert state.tobytes() == want_final.tobytes()
    assert [x.tobytes() for x in call] == before


@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("kind", KINDS)
def test_addressing_of_every_kind(kind, backend):
    scores = cases.make_scores("ties", 6, (5, 7)).reshape(2, 3, 12)
    want = sdm_lite.product_key_topk(scores, 4, factors=(5, 7), backend="reference")
    ours = KINDS[kind](scores)
    got = sdm_lite.product_key_topk(ours, 4, factors=(5, 7), backend=backend)
    assert [type(x) for x in got] == [type(ours)] * 2
    assert as_numpy(got[0]).shape == (2, 3, 4) and as_numpy(got[1]).dtype == np.int32
    assert [as_numpy(x).tobytes() for x in got] == [x.tobytes() for x in want]

    for dtype in (np.int8, np.uint8, np.int32, np.int64):
        ids = np.array([[5, 7], [5, 0]], dtype)
        slots = sdm_lite.hash_slots(KINDS[kind](ids), 30, 6, seed=3, backend=backend)
        assert type(slots) is type(ours) and as_numpy(slots).dtype == np.int32
        want_slots = sdm_lite.hash_slots(ids.astype(np.int64), 30, 6, seed=3, backend="reference")
        assert np.array_equal(as_numpy(slots), want_slots)


def test_the_barest_dlpack_object_is_enough():
    call = small_call()
    got = sdm_lite.sparse_delta_rule(*map(BareCapsule, call))[0]
    assert isinstance(got, np.ndarray)  # it names no namespace to come back through
    assert got.tobytes() == sdm_lite.sparse_delta_rule(*call)[0].tobytes()
    values, _ = sdm_lite.product_key_topk(BareCapsule(np.zeros((2, 8), np.float32)), 3)
    assert values.shape == (2, 3)


def test_packed_with_cu_seqlens_of_the_callers_kind():
    case = cases.make_case("packed", dtype=np.float32)
    want, want_final = sdm_lite.sparse_delta_rule(
        *case.arguments(), cu_seqlens=case.inputs.cu_seqlens, output_final_state=True
    )
    for make in KINDS.values():
        for dtype in (np.int32, np.int64):
            cu_seqlens = make(case.inputs.cu_seqlens.astype(dtype))
            ours = map(make, case.arguments())
            got = sdm_lite.sparse_delta_rule(*ours, cu_seqlens=cu_seqlens, output_final_state=True)
            assert as_numpy(got[0]).tobytes() == want.tobytes() and as_numpy(got[1]).tobytes() == want_final.tobytes()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_int64_and_int32_slots_are_the_same(backend):
    call = small_call()
    want = sdm_lite.sparse_delta_rule(*call, backend=backend)[0]
    call[1], call[5] = call[1].astype(np.int64), call[5].astype(np.int64)
    assert sdm_lite.sparse_delta_rule(*call, backend=backend)[0].tobytes() == want.tobytes()


# ---- layouts ------------------------------------------------------------------------------------------------------


def spread(x: np.ndarray, axis: int) -> np.ndarray:
    """Every other cell along an axis; what lies between would be seen at once: NaN, or a slot out of range."""
    shape = list(x.shape)
    shape[axis] *= 2
    wide = np.full(shape, np.nan if x.dtype.kind == "f" else -7, x.dtype)
    part = np.moveaxis(np.moveaxis(wide, axis, 0)[::2], 0, axis)
    part[...] = x
    return part


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x: np.ndarray) -> np.ndarray:
    memory = np.empty(x.nbytes + 1, np.uint8)
    part = memory[1:].view(x.dtype).reshape(x.shape)
    part[...] = x
    return part


LAYOUTS = {
    "every_other_of_last": lambda x: spread(x, -1),
    "every_other_token": lambda x: spread(x, 1),
    "fortran": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(np.swapaxes(x, 1, 2)).swapaxes(1, 2),
    "last_reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "tokens_reversed": lambda x: x[:, ::-1].copy()[:, ::-1],
    "unaligned": unaligned,
    "read_only": read_only,
}
#: what torch can express, of a state that may be written on
TORCH_LAYOUTS = ["every_other_of_last", "every_other_token", "fortran", "transposed"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_any_argument(layout, backend):
    call = small_call()
    want, want_final = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    variants = [[*call[:i], LAYOUTS[layout](call[i]), *call[i + 1 :]] for i in range(8)]
    for odd in [*variants, [LAYOUTS[layout](x) for x in call]]:
        readings, final = sdm_lite.sparse_delta_rule(*odd, output_final_state=True, backend=backend)
        assert readings.tobytes() == want.tobytes() and final.tobytes() == want_final.tobytes()
        assert readings.flags.c_contiguous and final.flags.c_contiguous
        readings = sdm_lite.sparse_delta_rule_(*odd[:7], call[7].copy(), backend=backend)
        assert readings.tobytes() == want.tobytes()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read_only"])
def test_a_state_of_any_layout_in_place(layout, backend):
    call = small_call()
    _, want = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    state = LAYOUTS[layout](call[7])
    sdm_lite.sparse_delta_rule_(*call[:7], state, backend=backend)
    assert state.tobytes() == want.tobytes()  # tobytes is in C order whatever the layout
    if layout.startswith("every_other"):
        gaps = state.base if state.base is not None else state
        assert np.isnan(gaps).sum() == gaps.size - state.size  # nothing was written between the cells


@pytest.mark.parametrize("state_dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_layouts_in_place_and_functional(layout, state_dtype):
    call = [torch.from_numpy(x) for x in small_call()]
    dtype = getattr(torch, state_dtype)
    state = call[7].to(dtype)
    want, want_final = sdm_lite.sparse_delta_rule(*call[:7], state, output_final_state=True)
    # the layout of a torch tensor is made on its bits' twin in NumPy, which knows every dtype of that size
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[state.element_size()]
    laid_out = torch.from_numpy(LAYOUTS[layout](state.view(bits).numpy())).view(dtype)
    assert not laid_out.is_contiguous()
    odd = [torch.from_numpy(LAYOUTS[layout](x.numpy())) for x in call[:7]]
    readings, final = sdm_lite.sparse_delta_rule(*odd, laid_out, output_final_state=True)
    assert torch.equal(readings, want) and torch.equal(final, want_final)
    readings = sdm_lite.sparse_delta_rule_(*odd, laid_out)
    assert torch.equal(readings, want) and torch.equal(laid_out, want_final)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_expanded_arguments(kind):
    call = small_call()
    flat = [np.broadcast_to(x[:1, :1], x.shape) for x in call[:7]]  # every token of every sequence the same
    flat.append(np.broadcast_to(call[7][:1], call[7].shape))
    if kind == "torch":
        flat = [torch.from_numpy(x[:1].copy()).expand(x.shape) for x in flat]
        whole = [x.contiguous() for x in flat]
    else:
        whole = [np.ascontiguousarray(x) for x in flat]
    got = sdm_lite.sparse_delta_rule(*flat, output_final_state=True)
    want = sdm_lite.sparse_delta_rule(*whole, output_final_state=True)
    assert [as_numpy(x).tobytes() for x in got] == [as_numpy(x).tobytes() for x in want]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_inputs_that_lie_in_the_state_are_read_before_it_changes(backend):
    state = np.random.default_rng(0).standard_normal((1, 1, 8, 4)).astype(np.float32)
    slots = (np.arange(16, dtype=np.int32) % 8).reshape(1, 8, 1, 2)
    half, gate = np.full((1, 8, 1, 2), 0.5, np.float32), np.zeros((1, 8, 1), np.float32)

    def run(values, table):
        return sdm_lite.sparse_delta_rule_(values, slots, half, gate, gate + 0.5, slots, half, table, backend=backend)

    apart, inside = state.copy(), state.copy()
    want = run(state.reshape(1, 8, 1, 4), apart)
    got = run(inside.reshape(1, 8, 1, 4), inside)
    assert got.tobytes() == want.tobytes() and inside.tobytes() == apart.tobytes()


def test_a_memory_mapped_state(tmp_path):
    call = small_call()
    _, want = sdm_lite.sparse_delta_rule(*call, output_final_state=True)
    np.save(tmp_path / "state.npy", call[7])
    state = np.load(tmp_path / "state.npy", mmap_mode="r+")
    sdm_lite.sparse_delta_rule_(*call[:7], state)
    state.flush()
    assert np.load(tmp_path / "state.npy").tobytes() == want.tobytes()


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["no_tokens", "no_batch", "shared_no_batch", "packed_empty"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_and_no_batch_are_legal(kind, name, backend):
    case = cases.make_case(name, dtype=np.float32)
    call = [KINDS[kind](x) for x in case.arguments()]
    cu_seqlens = None if case.inputs.cu_seqlens is None else KINDS[kind](case.inputs.cu_seqlens)
    readings, final = sdm_lite.sparse_delta_rule(*call, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend)
    assert as_numpy(readings).shape == case.inputs.values.shape
    assert as_numpy(final).shape == case.dfinal.shape
    if not case.fields.shared_state:
        assert as_numpy(final).tobytes() == case.state.tobytes()
        state = KINDS[kind](case.state.copy())
        readings = sdm_lite.sparse_delta_rule_(*call[:7], state, cu_seqlens=cu_seqlens, backend=backend)
        assert as_numpy(readings).shape == case.inputs.values.shape
        assert as_numpy(state).tobytes() == case.state.tobytes()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("empty", ["D", "H"])
def test_no_columns_and_no_heads_are_legal(empty, backend):
    case = cases.make_case(SMALL, dtype=np.float32, **{empty: 0})
    readings, final = sdm_lite.sparse_delta_rule(*case.arguments(), output_final_state=True, backend=backend)
    assert readings.shape == case.inputs.values.shape and final.shape == case.state.shape
    readings = sdm_lite.sparse_delta_rule_(*case.arguments()[:7], case.state.copy(), backend=backend)
    assert readings.shape == case.inputs.values.shape


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_to_select_for(kind, backend):
    values, slots = sdm_lite.product_key_topk(KINDS[kind](np.zeros((0, 3, 8), np.float32)), 5, backend=backend)
    assert as_numpy(values).shape == as_numpy(slots).shape == (0, 3, 5)
    assert as_numpy(sdm_lite.hash_slots(KINDS[kind](np.zeros((0, 2), np.int64)), 9, 4, backend=backend)).size == 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_only_reading_and_only_writing(kind, backend):
    """W = 0 leaves the memory as it is; R = 0 reads zero."""
    call = small_call()
    read_only_call = [*call[:1], call[1][..., :0], call[2][..., :0], *call[3:]]
    rows = call[7][np.arange(2)[:, None, None, None], np.arange(2)[:, None], call[5]]
    want = (call[6].astype(np.float64)[..., None] * rows).sum(-2)
    readings, final = sdm_lite.sparse_delta_rule(
        *map(KINDS[kind], read_only_call), output_final_state=True, backend=backend
    )
    assert_close(as_numpy(readings), want, "delta_forward", "float32", what="readings without writes")
    assert as_numpy(final).tobytes() == call[7].tobytes()

    write_only_call = [*call[:5], call[5][..., :0], call[6][..., :0], call[7]]
    readings, final = sdm_lite.sparse_delta_rule(
        *map(KINDS[kind], write_only_call), output_final_state=True, backend=backend
    )
    assert not as_numpy(readings).any()
    want = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)[1]
    assert as_numpy(final).tobytes() == want.tobytes()


# ---- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("values_dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("state_dtype", ["float64", "float32", "float16"])
def test_numpy_dtypes(state_dtype, values_dtype, backend):
    """Whatever comes in is computed with in the compute dtype: the results are those of inputs cast before."""
    compute = np.float64 if state_dtype == "float64" else np.float32
    call = [x.astype(values_dtype) if x.dtype.kind == "f" else x for x in small_call()]
    call[7] = call[7].astype(state_dtype)
    cast = [x.astype(compute) if x.dtype.kind == "f" else x for x in call[:7]]
    readings, final = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    want, want_final = sdm_lite.sparse_delta_rule(*cast, call[7], output_final_state=True, backend=backend)
    assert readings.dtype == values_dtype and final.dtype == state_dtype
    assert readings.tobytes() == want.astype(values_dtype).tobytes() and final.tobytes() == want_final.tobytes()
    state = call[7].copy()
    readings_ = sdm_lite.sparse_delta_rule_(*call[:7], state, backend=backend)
    assert readings_.dtype == values_dtype and readings_.tobytes() == readings.tobytes()
    assert state.tobytes() == final.tobytes()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_casts_past_the_range_are_infinities_in_silence(backend):
    call = small_call()
    call[3] = np.full(call[3].shape, -1e300)  # float64: a wipe in float32
    wiped = sdm_lite.sparse_delta_rule(*call, backend=backend)[0]
    call[3] = np.full(call[3].shape, -np.inf, np.float32)
    assert wiped.tobytes() == sdm_lite.sparse_delta_rule(*call, backend=backend)[0].tobytes()
    scores = np.full((1, 2), 65504, np.float16)  # the sum is past float16 and comes in float32
    values = sdm_lite.product_key_topk(scores, 1, backend=backend)[0]
    assert values.dtype == np.float32 and values.item() == 2 * 65504


@pytest.mark.parametrize("name", ["D17_slot_decay", "long_uniform", "wipe", "packed_shared"])
@pytest.mark.parametrize("state_dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["shared", "per_slot"])
def test_rooms_agree_for_every_state_dtype(rule, state_dtype, name):
    case = cases.make_case(name, dtype=np.float64 if state_dtype == "float64" else np.float32)
    call = [torch.from_numpy(np.ascontiguousarray(x)) for x in case.arguments()]
    call[7] = call[7].to(getattr(torch, state_dtype))
    cu_seqlens = None if case.inputs.cu_seqlens is None else torch.from_numpy(case.inputs.cu_seqlens)
    options = dict(rule=rule, cu_seqlens=cu_seqlens)
    got, want = (
        sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=room, **options)
        for room in ("cpu", "reference")
    )
    for what, g, w in zip(("readings", "final state"), got, want):
        assert g.dtype == w.dtype
        assert_close(g.double(), w.double(), "delta_forward", state_dtype, what=what)
    state = got[1].clone() if call[7].ndim == 3 else call[7].clone()
    if call[7].ndim == 3:
        state.copy_(call[7].expand(state.shape))
    readings = sdm_lite.sparse_delta_rule_(*call[:7], state, **options)
    assert torch.equal(readings, got[0]) and torch.equal(state, got[1])


# ---- anything at all ----------------------------------------------------------------------------------------------


@st.composite
def any_calls(draw):
    number = st.integers
    slots, sequences = draw(number(1, 12)), draw(number(0, 3))
    packed, shared = draw(st.booleans()), draw(st.booleans())
    lengths = tuple(draw(st.lists(number(0, 4), min_size=1, max_size=3))) if packed else None
    fields = cases.DeltaFields(
        "any",
        B=sequences,
        T=draw(number(0, 5)),
        H=draw(number(1, 3)),
        N=slots,
        D=draw(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 80, 130])),
        W=draw(number(1, slots)),
        R=draw(number(1, slots)),
        alpha=draw(st.sampled_from(["typical", "uniform", "spikes", "zero", "wipe"])),
        decay=draw(st.sampled_from(["head", "slot"])),
        order=draw(st.sampled_from(["ascending", "shuffled"])),
        lengths=lengths,
        shared_state=shared,
    )
    case = cases.make_case(fields, seed=draw(number(0, 2**16)))
    state_dtype = draw(st.sampled_from(["float32", "float64", "float16"]))
    dtypes = [draw(st.sampled_from(["float32", "float64", "float16"])) for _ in range(7)] + [state_dtype]
    layouts = [draw(st.sampled_from([None, *LAYOUTS])) for _ in range(8)]
    call = []
    for x, dtype, layout in zip(case.arguments(), dtypes, layouts):
        x = x.astype(dtype if x.dtype.kind == "f" else draw(st.sampled_from(["int32", "int64"])))
        call.append(x if layout is None else LAYOUTS[layout](x))
    options = dict(rule=draw(st.sampled_from(["shared", "per_slot"])), cu_seqlens=case.inputs.cu_seqlens)
    return call, options, state_dtype


@settings(max_examples=120)
@given(any_calls())
def test_any_call_is_the_references(call_options_dtype):
    call, options, state_dtype = call_options_dtype
    before = [x.tobytes() for x in call]
    got = sdm_lite.sparse_delta_rule(*call, output_final_state=True, **options)
    want = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend="reference", **options)
    assert [x.tobytes() for x in call] == before
    assert got[0].dtype == call[0].dtype and got[1].dtype == state_dtype
    worst = {got[0].dtype.name, state_dtype} & {"float16"} or {got[0].dtype.name, state_dtype} & {"float32"}
    bound = worst.pop() if worst else "float64"
    for what, g, w in zip(("readings", "final state"), got, want):
        assert_close(g, w, "delta_forward", bound, what=what)
    if call[7].ndim == 4 and call[7].flags.writeable:
        readings = sdm_lite.sparse_delta_rule_(*call[:7], call[7], **options)
        assert readings.tobytes() == got[0].tobytes() and call[7].tobytes() == got[1].tobytes()
