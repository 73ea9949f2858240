"""The sparse delta kernels, run on the CPU: against the reference, and the bits that no way of launching may change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import DeltaFields, case_id, make_case
from emulated_cuda.build import program
from emulated_cuda.run import SCHEDULES, needs
from emulated_delta import SERVED, Emulated, Setting, forward_backward, log_places, make_log
from tolerances import assert_close, relative_error

from sdm_lite import cpu, reference
from sdm_lite.arrays import widen_state
from sdm_lite.cpu import snapshot
from sdm_lite.cuda_kernels import shared_memory
from sdm_lite.rooms import DeltaGradients, DeltaOptions

pytestmark = needs("plain")

#: odd sizes, collisions, gates at their ends, packing; without lanes, tokens or columns nothing is launched
FIELDS = [
    DeltaFields("one_of_each", B=1, T=7, H=1, N=1, D=1, W=1, R=1),
    DeltaFields("one_token", T=1, D=7, N=8, W=3, R=2, order="shuffled"),
    DeltaFields("collisions", B=1, T=41, H=2, N=8, D=32, W=8, R=3, order="shuffled"),
    DeltaFields("D64_W64", B=1, T=6, H=1, N=256, D=64, W=64, R=64),
    DeltaFields("D100_slot_decay", B=2, T=9, H=2, D=100, N=40, W=9, R=11, order="shuffled", decay="slot"),
    DeltaFields("runs_of_several_batches", B=1, T=4, H=1, N=150, D=33, W=70, R=130, alpha="uniform"),
    DeltaFields("no_decay", B=1, T=20, H=1, N=24, D=16, W=6, alpha="zero"),
    DeltaFields("wipe_slot", B=1, T=30, H=1, N=24, D=3, alpha="wipe", decay="slot"),
    DeltaFields("no_writes", B=1, T=5, H=1, N=8, D=9, W=0, R=3),
    DeltaFields("no_reads", B=1, T=5, H=1, N=8, D=9, W=3, R=0),
    DeltaFields("packed", H=2, lengths=(3, 0, 1, 7, 0), N=24, D=17),
]
BY_NAME = {fields.name: fields for fields in FIELDS}
CASES = pytest.mark.parametrize("fields", FIELDS, ids=case_id)
RULES = pytest.mark.parametrize("rule", ["shared", "per_slot"])


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Compile what the tests share, two files at a time."""
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(program, file, kernels) for file, kernels in SERVED.items()]:
            job.result()


def options(state_dtype="float32", **changes):
    return DeltaOptions(state_dtype=state_dtype, **changes)


def in_room(room, case, opts, *, bits=None):
    state = case.state if bits is None else bits
    readings, final, saved = room.sparse_delta_forward(case.inputs, state, opts, save=True, final=True)
    gradients = room.sparse_delta_backward(case.inputs, opts, saved, case.dreadings, case.dfinal, case.state.shape)
    return readings, final, gradients


def same_bits(got, want):
    """Tell whether (readings, final state, gradients) are the same bits throughout."""
    return all(np.array_equal(a, b) for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True))


def assert_gradients(got, want, dtype, restore):
    for name in DeltaGradients._fields:
        assert_close(getattr(got, name), getattr(want, name), "delta_backward", dtype, restore, what=name)


@CASES
@RULES
def test_float32_agrees_with_the_float64_reference(fields, rule):
    case = make_case(fields, seed=1, dtype=np.float32)
    readings, final, gradients = forward_backward(case, rule=rule)
    want = in_room(reference, case.astype(np.float64), options("float64", rule=rule))
    assert_close(readings, want[0], "delta_forward", "float32", what="readings")
    assert_close(final, want[1], "delta_forward", "float32", what="final state")
    assert_gradients(gradients, want[2], "float32", "hybrid")


@pytest.mark.parametrize("name", ["collisions", "D100_slot_decay"])
def test_float64_agrees_with_the_reference(name):
    case = make_case(BY_NAME[name], seed=2)
    readings, final, gradients = forward_backward(case, "float64")
    want = in_room(reference, case, options("float64"))
    assert_close(readings, want[0], "delta_forward", "float64", what="readings")
    assert_close(final, want[1], "delta_forward", "float64", what="final state")
    assert_gradients(gradients, want[2], "float64", "hybrid")


@pytest.mark.parametrize(
    "state_dtype, rule, restore",
    [("bfloat16", "shared", "hybrid"), ("bfloat16", "shared", "invert"), ("float16", "per_slot", "invert")],
)
@pytest.mark.parametrize("name", ["one_token", "no_decay", "packed"])  # rows of odd addresses, of whole 16 bytes
def test_16_bit_states_agree_with_the_cpu_room(name, state_dtype, rule, restore):
    """Against the CPU room: what differs is the order of sums, and a rounding of the state that falls the other way."""
    case = make_case(BY_NAME[name], seed=3, dtype=np.float32)
    readings, final, gradients = forward_backward(case, state_dtype, rule, restore)
    bits = case.state_bits(state_dtype)
    want = in_room(cpu, case, options(state_dtype, rule=rule, restore=restore), bits=bits)
    assert_close(readings, want[0], "delta_forward", state_dtype, what="readings")
    rows = [widen_state(x, state_dtype) for x in (final, want[1])]
    assert_close(*rows, "delta_forward", state_dtype, what="final state")
    assert_gradients(gradients, want[2], state_dtype, "snapshot")


@RULES
def test_one_row_and_up_to_eight_leave_no_order_to_differ_in(rule):
    """With one write and one read per token every operation is the CPU room's, so every bit is."""
    case = make_case(
        DeltaFields("single", B=1, T=12, H=2, N=6, D=40, W=1, R=1, alpha="uniform"), seed=4, dtype=np.float32
    )
    readings, final, gradients = forward_backward(case, rule=rule)
    want = in_room(cpu, case, options(rule=rule))
    assert np.array_equal(readings, want[0]) and np.array_equal(final, want[1])
    assert np.array_equal(gradients.values, want[2].values)
    assert np.array_equal(gradients.initial_state, want[2].initial_state)


@pytest.mark.parametrize("restore", ["snapshot", "hybrid", "invert"])
@RULES
def test_every_restore_mode(restore, rule):
    fields = DeltaFields("undo", B=1, T=12, H=2, N=20, D=70, W=9, R=10, order="shuffled", decay="slot")
    case = make_case(fields, seed=5, dtype=np.float32)
    gradients = forward_backward(case, rule=rule, restore=restore)[2]
    want = in_room(reference, case.astype(np.float64), options("float64", rule=rule))[2]
    assert_gradients(gradients, want, "float32", restore)


@pytest.mark.parametrize("storage, bound", [("bf16", 6e-3), ("fp8", 8e-2), ("int4", 0.3)])
@RULES
def test_stored_logs_are_approximate_where_the_spec_says_and_exact_elsewhere(storage, bound, rule):
    """The CPU room's bounds: a scale for 32 columns is never larger than one for the row."""
    fields = DeltaFields("stored", B=1, T=30, H=1, N=48, D=101, W=8, R=8, alpha="uniform")
    case = make_case(fields, seed=7, dtype=np.float32)
    exact = forward_backward(case, rule=rule, restore="snapshot")[2]
    got = forward_backward(case, rule=rule, restore="snapshot", storage=storage)[2]
    for name in ("values", "initial_state", "beta")[: 3 if rule == "shared" else 2]:
        assert np.array_equal(getattr(got, name), getattr(exact, name)), name
    for name in ("write_weights", "read_weights", "log_decay"):
        error = relative_error(getattr(got, name), getattr(exact, name))
        assert 0 < error < bound, f"{name}: {error}"


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int4"])
def test_log_codes_are_the_cpu_rooms_for_each_block_of_columns(storage):
    fields = DeltaFields("codes", B=1, T=1, H=1, N=12, D=75, W=12, R=1)
    case = make_case(fields, seed=8, dtype=np.float32)
    state = case.state * np.exp(np.random.default_rng(9).uniform(-8, 6, case.state.shape)).astype(np.float32)
    state[0, 0, case.inputs.write_slots[0, 0, 0, :3], 5] = 0, np.inf, np.nan
    call = Emulated(case.inputs, "float32", "shared", Setting())
    log = make_log(*log_places(call, 12, "snapshot"), 75, storage, 4)
    call.forward(state.copy(), log=log)
    number, block = snapshot.STORAGE[storage], shared_memory.SCALED_COLUMNS
    for w, slot in enumerate(case.inputs.write_slots.ravel()):
        for b in range(shared_memory.log_scales(75)):
            row = state[0, 0, slot, b * block : (b + 1) * block]
            code = np.zeros(snapshot.row_bytes(len(row), number), np.uint8)
            with np.errstate(invalid="ignore"):
                snapshot.encode(row, 0, len(row), number, code)
            size = len(row) * log.bits // 8
            start = b * block * log.bits // 8
            assert np.array_equal(log.codes[w, start : start + size], code[:size]), (w, b)
            if storage != "bf16":
                assert np.array_equal(log.scales[w, b], code[-4:].view(np.float32)[0], equal_nan=True), (w, b)


@pytest.mark.parametrize("log_decay", [-104.0, -np.inf])
@RULES
def test_decays_to_nothing_are_finite(log_decay, rule):
    case = make_case(DeltaFields("deep", B=1, T=8, H=1, N=12, D=16, W=4, R=4), seed=10, dtype=np.float32)
    decays = case.inputs.log_decay.copy()
    decays[:, 3] = log_decay
    case = type(case)(case.fields, case.inputs._replace(log_decay=decays), case.state, case.dreadings, case.dfinal)
    for restore in ("hybrid", "snapshot", "invert"):
        readings, final, gradients = forward_backward(case, rule=rule, restore=restore)
        assert np.isfinite(readings).all() and np.isfinite(final).all()
        assert all(np.isfinite(g).all() for g in gradients)
        assert (gradients.log_decay[:, 3] == 0).all()


#: of 30 slots and 15 uses a token: a token a chunk, two or so (rows handed over), or all tokens in one
SETTINGS = [
    Setting(tile=64),
    Setting(row_budget=100, token_budget=1),
    Setting(tile=64, row_budget=24, token_budget=7),
    *(Setting(row_budget=20, schedule=tuple(how.items())) for how in SCHEDULES),
]


@pytest.mark.parametrize("restore, storage", [("hybrid", None), ("snapshot", "int4")])
def test_no_way_of_launching_changes_a_bit(restore, storage):
    fields = DeltaFields("launches", B=2, T=11, H=2, N=30, D=70, W=6, R=9, decay="slot", alpha="spikes")
    case = make_case(fields, seed=11, dtype=np.float32)
    want = forward_backward(case, restore=restore, storage=storage)
    for setting in SETTINGS:
        assert same_bits(forward_backward(case, "float32", "shared", restore, storage, setting), want), setting


@pytest.mark.parametrize("state_dtype, rule", [("float32", "per_slot"), ("bfloat16", "shared")])
def test_no_schedule_changes_a_bit(state_dtype, rule):
    case = make_case(DeltaFields("schedules", B=1, T=9, H=2, N=30, D=40, W=5, R=6), seed=12, dtype=np.float32)
    want = forward_backward(case, state_dtype, rule)
    for setting in (*SETTINGS[3:], Setting(row_budget=200, token_budget=2)):
        assert same_bits(forward_backward(case, state_dtype, rule, setting=setting), want), setting


def test_lanes_do_not_know_of_each_other():
    """A packed call is its sequences, each by itself: readings, states and gradients, bit by bit."""
    case = make_case(BY_NAME["packed"], seed=13, dtype=np.float32)
    readings, final, gradients = forward_backward(case, restore="snapshot")
    edges = case.inputs.cu_seqlens
    for s, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        if begin == end:
            assert np.array_equal(final[s], case.state[s]) and np.array_equal(
                gradients.initial_state[s], case.dfinal[s]
            )
            continue
        arrays = [np.ascontiguousarray(a[:, begin:end]) for a in case.inputs[:7]]
        parts = (case.state[s : s + 1], np.ascontiguousarray(case.dreadings[:, begin:end]), case.dfinal[s : s + 1])
        alone = type(case)(case.fields, type(case.inputs)(*arrays), *parts)
        got = forward_backward(alone, restore="snapshot")
        want = DeltaGradients(*(g[:, begin:end] for g in gradients[:5]), gradients.initial_state[s : s + 1])
        assert same_bits(got, (readings[:, begin:end], final[s : s + 1], want))


@pytest.mark.parametrize("state_dtype, rule", [("float32", "per_slot"), ("bfloat16", "shared")])
@pytest.mark.parametrize("name", ["collisions", "packed", "runs_of_several_batches"])
def test_decode_gives_the_staged_kernels_bits_token_by_token(name, state_dtype, rule):
    case = make_case(BY_NAME[name], seed=14, dtype=np.float32)
    staged, direct = case.state_bits(state_dtype), case.state_bits(state_dtype)
    want = Emulated(case.inputs, state_dtype, rule, Setting()).forward(staged)
    if case.inputs.cu_seqlens is None:
        got = [
            Emulated(case.token_range(t, t + 1), state_dtype, rule, Setting()).decode(direct)
            for t in range(min(case.fields.T, 5))
        ]
        rest = case.token_range(len(got), case.fields.T)
        if rest.values.size:
            got.append(Emulated(rest, state_dtype, rule, Setting()).decode(direct))
        got = np.concatenate(got, axis=1)
    else:
        got = Emulated(case.inputs, state_dtype, rule, Setting()).decode(direct)
    assert np.array_equal(got, want) and np.array_equal(direct, staged)


@pytest.mark.parametrize(
    "build", [pytest.param("asan", marks=needs("asan")), pytest.param("tsan", marks=needs("tsan"))]
)
def test_sanitizers_find_nothing(build):
    """Odd columns, rows of odd addresses, several steps a chunk, hand-over, logged and inverted rows."""
    fields = DeltaFields("sanitized", B=1, T=5, H=2, N=7, D=35, W=3, R=2, alpha="uniform", decay="slot")
    case = make_case(fields, seed=15, dtype=np.float32)
    setting = Setting(row_budget=6, token_budget=1, build=build)
    for storage in (None, "int4"):
        got = forward_backward(case, "bfloat16", "shared", "hybrid", storage, setting)
        assert same_bits(got, forward_backward(case, "bfloat16", "shared", "hybrid", storage))
