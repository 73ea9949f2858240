"""Bad input to the public ops: an error that names op, argument, expected, got and fix, and nothing changed."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from foreign import ForeignArray
from refusals import ARGUMENTS, FLOAT_ARGUMENTS, KINDS, OPS, call_of, put, refuse, refuse_delta

import sdm_lite
from sdm_lite import BackendError, DeviceError, DtypeError, ShapeError, SlotError, ValueRangeError, rooms
from sdm_lite.rooms import DeltaInputs

torch = pytest.importorskip("torch")

# ---- ranks and sizes ----------------------------------------------------------------------------------------------

SHAPES = {
    "values_rank_3": ("values", lambda x: x[0]),
    "values_rank_5": ("values", lambda x: x[None]),
    "write_slots_tokens": ("write_slots", lambda x: x[:, :3]),
    "write_slots_heads": ("write_slots", lambda x: x[:, :, :2]),
    "write_slots_rank": ("write_slots", lambda x: x[..., 0]),
    "write_weights_writes": ("write_weights", lambda x: x[..., :5]),
    "write_weights_batch": ("write_weights", lambda x: x[:1]),
    "log_decay_heads": ("log_decay", lambda x: x[:, :, :1]),
    "log_decay_per_slot": ("log_decay", lambda x: np.repeat(x[..., None], 5, axis=-1)),
    "log_decay_one_per_slot": ("log_decay", lambda x: x[..., None]),
    "log_decay_rank_2": ("log_decay", lambda x: x[..., 0]),
    "log_decay_rank_0": ("log_decay", lambda x: np.array(x[0, 0, 0])),
    "beta_rank": ("beta", lambda x: x[..., None]),
    "beta_transposed": ("beta", lambda x: np.ascontiguousarray(x.transpose(0, 2, 1))),
    "read_slots_tokens": ("read_slots", lambda x: np.concatenate([x, x], axis=1)),
    "read_weights_reads": ("read_weights", lambda x: x[..., :4]),
    "state_batch": ("state", lambda x: x[:1]),
    "state_heads": ("state", lambda x: x[:, :1]),
    "state_width": ("state", lambda x: x[..., :6]),
    "state_rank_2": ("state", lambda x: x[0, 0]),
    "state_rank_5": ("state", lambda x: x[None]),
}


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes(name, kind, form):
    argument, change = SHAPES[name]
    named = call_of(**{argument: change})
    size = str(list(named[argument].shape))
    named = {key: KINDS[kind](np.ascontiguousarray(x) if x.ndim else x) for key, x in named.items()}
    refuse_delta(form, named, argument, ShapeError, size)


def test_the_in_place_form_takes_no_shared_state():
    named = call_of(state=lambda x: x[0])
    refuse_delta("in_place", named, "state", ShapeError, "[B, H, N, D] = [2, 3, any, 7]", "[3, 17, 7]")
    sdm_lite.sparse_delta_rule(*named.values())  # the functional form does


# ---- values -------------------------------------------------------------------------------------------------------

LAST = (1, 3, 2, 4)  # the last token and head: everything before it would have been written by then


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "slot", [17, -1, 2**31 - 1, -(2**31), 2**31, 2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)]
)
@pytest.mark.parametrize("argument", ["write_slots", "read_slots"])
def test_slots_out_of_range(argument, slot, kind, backend, form):
    named = {key: KINDS[kind](x) for key, x in call_of(**{argument: put(LAST, slot)}).items()}
    refuse_delta(form, named, argument, SlotError, "slots in [0, 17)", "[1, 3, 2]", backend=backend)
    assert issubclass(SlotError, IndexError) and issubclass(SlotError, ValueError)


@pytest.mark.parametrize("slot", [17, -1, 2**31 - 1])
def test_int32_slots_out_of_range_say_which(slot):
    named = call_of(read_slots=lambda x: put(LAST, slot)(x.astype(np.int32)))
    refuse_delta("in_place", named, "read_slots", SlotError, f"got {slot} at [B, T, H] = [1, 3, 2]")


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("argument", ["write_slots", "read_slots"])
def test_repeated_slots(argument, order, kind, form):
    def repeat(x):
        x[1, 3, 2] = np.sort(x[1, 3, 2]) if order == "ascending" else np.roll(np.sort(x[1, 3, 2]), 2)
        x[1, 3, 2, 0] = x[1, 3, 2, 4 if order == "shuffled" else 1]
        return x

    named = call_of(**{argument: repeat})
    twice = named[argument][1, 3, 2, 0]
    named = {key: KINDS[kind](x) for key, x in named.items()}
    refuse_delta(form, named, argument, SlotError, f"slot {twice} twice", "[1, 3, 2]")


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("number", [0.5, 1e-30, math.inf, math.nan])
def test_log_decay_above_zero_or_nan(number, per_slot, kind, backend, form):
    def change(x):
        x = np.repeat(x[..., None], 6, axis=-1) if per_slot else x
        x[1, 3, 2] = number
        return x

    named = {key: KINDS[kind](x) for key, x in call_of(log_decay=change).items()}
    refuse_delta(form, named, "log_decay", ValueRangeError, "<= 0", str(np.float32(number)), backend=backend)


@pytest.mark.parametrize("form", OPS)
def test_check_false_skips_the_check_of_decays(form):
    named = call_of(log_decay=put((0, 0, 0), 0.5))
    refuse_delta(form, named, "log_decay", ValueRangeError)
    getattr(sdm_lite, OPS[form])(*named.values(), check=False)


CU_SEQLENS = {
    "decreasing": ([0, 3, 2, 4], ValueRangeError, "non-decreasing"),
    "starts_late": ([1, 4], ValueRangeError, "[1, 4]"),
    "ends_early": ([0, 3], ValueRangeError, "[0, 3]"),
    "ends_late": ([0, 5], ValueRangeError, "[0, 5]"),
    "negative": ([0, -1, 4], ValueRangeError, "[0, -1, 4]"),
    "wraps_in_int32": ([0, 2**32 + 4], ValueRangeError, "4294967300"),
    "one_entry": ([4], ShapeError, "at least two entries"),
    "empty": ([], ShapeError, "at least two entries"),
    "rank_2": ([[0, 4]], ShapeError, "[S + 1]"),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CU_SEQLENS)
def test_wrong_cu_seqlens(name, kind, form, check):
    """Always checked: a wrong one would send a room out of bounds."""
    entries, error, words = CU_SEQLENS[name]
    cu_seqlens = np.array(entries, np.int64)
    sequences = max(cu_seqlens.size - 1, 1)
    named = {key: x[:1] for key, x in call_of().items()} | {"state": np.zeros((sequences, 3, 17, 7), np.float32)}
    named = {key: KINDS[kind](x) for key, x in named.items()}
    refuse_delta(form, named, "cu_seqlens", error, words, cu_seqlens=KINDS[kind](cu_seqlens), check=check)


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entries", [[0, 3, 2, 4], [0, 2, 3], [1, 2, 4]])
def test_wrong_cu_seqlens_come_before_the_state_whose_size_they_give(entries, kind, form):
    named = {key: KINDS[kind](x[:1]) for key, x in call_of().items()}  # a state of one sequence
    refuse_delta(form, named, "cu_seqlens", ValueRangeError, str(entries), cu_seqlens=KINDS[kind](np.array(entries)))


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_state_says_what_to_pass(kind, form):
    named = {key: KINDS[kind](x) for key, x in call_of().items()} | {"state": None}
    refuse_delta(form, named, "state", DtypeError, "None", "zeros of shape [B, H, N, D]")
    packed = {"cu_seqlens": np.array([0, 4])}
    refuse_delta(form, named, "state", DtypeError, "zeros of shape [S, H, N, D]", **packed)


@pytest.mark.parametrize("form", OPS)
def test_cu_seqlens_that_do_not_fit_the_call(form):
    refuse_delta(form, call_of(), "cu_seqlens", ShapeError, "B = 1", "B = 2", cu_seqlens=np.array([0, 2, 4]))
    one = {key: x[:1] for key, x in call_of().items()}
    refuse_delta(form, one, "state", ShapeError, "[2, 3, any, 7]", cu_seqlens=np.array([0, 2, 4]))
    refuse_delta(form, one, "cu_seqlens", DtypeError, "float64", cu_seqlens=np.array([0.0, 4.0]))
    refuse_delta(form, one, "cu_seqlens", DtypeError, "list", cu_seqlens=[0, 4])
    refuse_delta(form, one, "arrays", DtypeError, "cu_seqlens torch", cu_seqlens=torch.tensor([0, 4]))


# ---- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "object", ">f4", "longdouble", "U4", "uint16"])
@pytest.mark.parametrize("argument", FLOAT_ARGUMENTS)
def test_float_arguments_of_other_numpy_dtypes(argument, dtype, form):
    named = call_of(**{argument: lambda x: np.abs(x).astype(dtype)})
    word = dtype if dtype == ">f4" else np.dtype(dtype).name
    refuse_delta(form, named, argument, DtypeError, word)


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bool", "uint8", "int16", "uint32", "uint64", "object", ">i4", ">i8"])
@pytest.mark.parametrize("argument", ["write_slots", "read_slots"])
def test_slots_of_other_numpy_dtypes(argument, dtype, form):
    named = call_of(**{argument: lambda x: x.astype(dtype)})
    refuse_delta(form, named, argument, DtypeError, dtype if dtype[0] == ">" else np.dtype(dtype).name)


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_torch_dtypes(argument, form):
    dtypes = [torch.complex64, torch.bool, torch.float8_e4m3fn, torch.uint8, torch.int16]
    for dtype in dtypes + ([torch.float32] if argument.endswith("slots") else [torch.int64]):
        named = {key: torch.from_numpy(x) for key, x in call_of().items()}
        named[argument] = named[argument].to(dtype)
        refuse_delta(form, named, argument, DtypeError, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_foreign_arrays_numpy_cannot_view(argument):
    named = call_of(**{argument: lambda x: x.astype(x.dtype.newbyteorder(">"))})
    named = {key: ForeignArray(x) for key, x in named.items()}
    refuse_delta("functional", named, argument, DtypeError)


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_what_is_no_array(argument, form):
    call = call_of()
    for thing, word in (
        (call[argument].tolist(), "list"),
        (1.0, "float"),
        (np.float32(1), "float32"),
        ("text", "str"),
        (np.ma.masked_array(call[argument], False), "mask"),
    ):
        refuse_delta(form, call | {argument: thing}, argument, DtypeError, word)
    named = call | {argument: None}
    refuse_delta(form, named, argument, DtypeError, "None")


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_mixed_kinds(argument, form):
    for make, word in ((torch.from_numpy, "torch"), (ForeignArray, "dlpack")):
        named = call_of()
        named[argument] = make(named[argument])
        shown = "initial_state" if (argument, form) == ("state", "functional") else argument
        refuse_delta(form, named, "arrays", DtypeError, f"{shown} {word}", "numpy")


# ---- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_array_on_a_gpu_is_never_copied_in_silence(argument, form):
    named = {key: ForeignArray(x) for key, x in call_of().items()}
    named[argument].device = (2, 0)
    state = named["state"].array.tobytes()
    text = refuse_delta(form, named, argument, DeviceError, "got this array is on cuda:0", "the cuda room")
    assert sdm_lite.backends()["cuda"] in text
    assert named["state"].array.tobytes() == state
    named[argument].device = (2, 1)
    refuse_delta(form, named, argument, DeviceError, "cuda:1")
    named[argument].device = (8, 0)  # Metal
    refuse_delta(form, named, argument, DeviceError, "device 8:0")


def test_addressing_of_arrays_on_other_devices():
    scores, ids = ForeignArray(np.zeros((2, 8), np.float32), (2, 0)), ForeignArray(np.zeros(3, np.int64), (13, 2))
    for op, argument, call in (
        ("product_key_topk", "scores", lambda: sdm_lite.product_key_topk(scores, 2)),
        ("hash_slots", "ids", lambda: sdm_lite.hash_slots(ids, 8, 2)),
    ):
        refuse(call, op, argument, DeviceError, "this array is on cuda:", "the cuda room")
    meta = torch.zeros(2, 8, device="meta")
    refuse(lambda: sdm_lite.product_key_topk(meta, 2), "product_key_topk", "scores", DeviceError, "meta")
    refuse(lambda: sdm_lite.hash_slots(meta.long(), 8, 2), "hash_slots", "ids", DeviceError, "meta")


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_meta_tensor_among_cpu_tensors(argument, form):
    named = {key: torch.from_numpy(x) for key, x in call_of().items()}
    named[argument] = named[argument].to("meta")
    refuse_delta(form, named, argument, DeviceError, "meta")


# ---- options ------------------------------------------------------------------------------------------------------

OPTIONS = [
    ("rule", "delta", ValueRangeError),
    ("rule", None, ValueRangeError),
    ("rule", ["shared"], ValueRangeError),
    ("restore", "copy", ValueRangeError),
    ("restore", None, ValueRangeError),
    ("snapshot_dtype", "fp16", ValueRangeError),
    ("snapshot_dtype", np.float32, ValueRangeError),
    ("restore_tau", -1.0, ValueRangeError),
    ("restore_tau", math.nan, ValueRangeError),
    ("restore_tau", math.inf, ValueRangeError),
    ("restore_tau", "3", DtypeError),
    ("restore_tau", None, DtypeError),
    ("restore_tau", np.ones(1), DtypeError),
    ("backend", "gpu", BackendError),
    ("backend", "cuda", BackendError),
    ("backend", 3, BackendError),
    ("backend", ["cpu"], BackendError),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option, value, error", OPTIONS, ids=str)
def test_unknown_options(option, value, error, kind):
    named = {key: KINDS[kind](x) for key, x in call_of().items()}
    refuse_delta("functional", named, option, error, **{option: value})
    if option in ("rule", "backend"):
        refuse_delta("in_place", named, option, error, **{option: value})


@pytest.mark.parametrize("backend", ["gpu", 1, "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_unknown_backends_of_the_addressing(kind, backend):
    scores, ids = KINDS[kind](np.zeros((1, 4), np.float32)), KINDS[kind](np.zeros(2, np.int64))
    topk, hashed = (functools.partial(f, backend=backend) for f in (sdm_lite.product_key_topk, sdm_lite.hash_slots))
    refuse(lambda: topk(scores, 2), "product_key_topk", "backend", BackendError)
    refuse(lambda: hashed(ids, 4, 2), "hash_slots", "backend", BackendError)


@pytest.mark.parametrize("kind", KINDS)
def test_what_passed_once_lets_nothing_else_pass(kind):
    """Checks of metadata that passed are not made again; equal to Python is not the same to an op."""
    named = {key: KINDS[kind](x) for key, x in call_of().items()}
    sdm_lite.sparse_delta_rule(*named.values(), restore_tau=1.0)
    refuse_delta("functional", named, "restore_tau", DtypeError, restore_tau=True)
    other = dict(named, beta=KINDS[kind](call_of(beta=lambda x: x.astype(np.float64))["beta"][:, :, :2]))
    refuse_delta("functional", other, "beta", ShapeError)


@pytest.mark.parametrize("decays", [1, 4])
def test_rooms_agree_on_which_values_are_certainly_fine(decays):
    rng = np.random.default_rng(0)
    slots = np.sort(rng.permuted(np.tile(np.arange(9, dtype=np.int32), (2, 5, 3, 1)), axis=-1)[..., :4], axis=-1)
    good = DeltaInputs(*np.zeros((7, 2, 5, 3, 1), np.float32))._replace(
        write_slots=slots, read_slots=slots[..., :1], log_decay=-rng.random((2, 5, 3, decays), dtype=np.float32)
    )
    rooms_of = [rooms.room(name, "test") for name in ("reference", "cpu")]
    assert [room.values_are_fine(good, 9) for room in rooms_of] == [True, True]
    assert [room.values_are_fine(good._replace(write_slots=slots[..., :0]), 9) for room in rooms_of] == [True, True]
    for name, number in [("write_slots", -1), ("write_slots", 9), ("read_slots", 9), ("log_decay", math.nan)] + [
        ("read_slots", -(2**31)), ("log_decay", 1e-30), ("write_slots", 2**31 - 1)]:  # fmt: skip
        for where in ((0, 0, 0, 0), (1, 4, 2, -1), (1, 2, 1, 0)):
            bad = getattr(good, name).copy()
            bad[where] = number
            found = [room.values_are_fine(good._replace(**{name: bad}), 9) for room in rooms_of]
            assert found == [False, False], (name, number, where)
    twice = slots.copy()
    twice[1, 0, 2, 2] = twice[1, 0, 2, 3]
    assert [room.values_are_fine(good._replace(write_slots=twice), 9) for room in rooms_of] == [False, False]
