"""The CPU room's sparse delta rule against the float64 reference, and the bits it promises."""

from __future__ import annotations

import numpy as np
import pytest
from cases import DELTA_CASES, DeltaFields, case_id, make_case
from tolerances import assert_close, relative_error

from sdm_lite import cpu, reference
from sdm_lite.arrays import widen_state
from sdm_lite.cpu import forward, plan, snapshot
from sdm_lite.rooms import DeltaGradients, DeltaOptions

CASES = pytest.mark.parametrize("fields", DELTA_CASES, ids=case_id)
RULES = pytest.mark.parametrize("rule", ["shared", "per_slot"])


def options(dtype="float32", **changes):
    return DeltaOptions(state_dtype=np.dtype(dtype).name, **changes)


def forward_backward(room, case, opts, dfinal=True):
    readings, final, saved = room.sparse_delta_forward(case.inputs, case.state, opts, save=True, final=True)
    upstream = case.dfinal if dfinal else None
    gradients = room.sparse_delta_backward(case.inputs, opts, saved, case.dreadings, upstream, case.state.shape)
    return readings, final, gradients


@CASES
@RULES
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_agrees_with_float64_reference(fields, rule, dtype):
    case = make_case(fields, seed=1, dtype=dtype)
    oracle = case.astype(np.float64)
    want, want_final, _ = reference.sparse_delta_forward(
        oracle.inputs, oracle.state, options("float64", rule=rule), final=True
    )
    before = case.state.copy()
    got, final, saved = cpu.sparse_delta_forward(case.inputs, case.state, options(dtype, rule=rule), final=True)
    assert saved is None and np.array_equal(case.state, before)
    assert_close(got, want, "delta_forward", dtype, what="readings")
    assert_close(final, want_final, "delta_forward", dtype, what="final state")


@CASES
@RULES
@pytest.mark.parametrize("restore", ["hybrid", "snapshot"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_agree_with_float64_reference(fields, rule, restore, dtype):
    case = make_case(fields, seed=2, dtype=dtype)
    oracle = case.astype(np.float64)
    want = forward_backward(reference, oracle, options("float64", rule=rule))[2]
    got = forward_backward(cpu, case, options(dtype, rule=rule, restore=restore))[2]
    for name in DeltaGradients._fields:
        assert_close(getattr(got, name), getattr(want, name), "delta_backward", dtype, restore, what=name)


@RULES
def test_gradients_by_inversion_alone_where_decays_are_mild(rule):
    case = make_case("plain", seed=3, dtype=np.float32)
    want = forward_backward(reference, case.astype(np.float64), options("float64", rule=rule))[2]
    opts = options(rule=rule, restore="invert")
    saved = cpu.sparse_delta_forward(case.inputs, case.state, opts, save=True)[2]
    assert saved[6].shape[0] == 0, "nothing is logged"
    got = cpu.sparse_delta_backward(case.inputs, opts, saved, case.dreadings, case.dfinal, case.state.shape)
    for name in DeltaGradients._fields:
        assert_close(getattr(got, name), getattr(want, name), "delta_backward", "float32", "invert", what=name)


@pytest.mark.parametrize("restore", ["hybrid", "snapshot", "invert"])
@RULES
def test_wipe_gives_finite_gradients_and_none_for_its_own_decay(restore, rule):
    case = make_case("wipe", seed=4, dtype=np.float32)
    gradients = forward_backward(cpu, case, options(rule=rule, restore=restore))[2]
    assert all(np.isfinite(g).all() for g in gradients)
    wiped = np.isneginf(case.inputs.log_decay)
    assert wiped.any() and (gradients.log_decay[wiped] == 0).all()


@pytest.mark.parametrize("log_decay", [-88.0, -104.0, -1e4])
def test_very_negative_decays_are_finite(log_decay):
    case = make_case("plain", seed=5, dtype=np.float32)
    decays = case.inputs.log_decay.copy()
    decays[:, 3] = log_decay
    inputs = case.inputs._replace(log_decay=decays)
    for restore in ("hybrid", "snapshot", "invert"):
        opts = options(restore=restore)
        readings, _, saved = cpu.sparse_delta_forward(inputs, case.state, opts, save=True)
        gradients = cpu.sparse_delta_backward(inputs, opts, saved, case.dreadings, None, case.state.shape)
        assert np.isfinite(readings).all() and all(np.isfinite(g).all() for g in gradients)


def test_per_slot_write_that_erases_the_old_row_is_logged():
    """1 - beta k = 0 leaves nothing to invert."""
    case = make_case("plain", seed=6, dtype=np.float32, W=1)
    inputs = case.inputs._replace(
        beta=np.ones_like(case.inputs.beta), write_weights=np.ones_like(case.inputs.write_weights)
    )
    for restore in ("hybrid", "invert"):
        opts = options(rule="per_slot", restore=restore)
        _, _, saved = cpu.sparse_delta_forward(inputs, case.state, opts, save=True)
        assert saved[6].shape[0] == inputs.beta.size
        got = cpu.sparse_delta_backward(inputs, opts, saved, case.dreadings, None, case.state.shape)
        assert all(np.isfinite(g).all() for g in got)


@pytest.mark.parametrize("storage, bound", [("bf16", 6e-3), ("fp8", 8e-2), ("int4", 0.3)])
@RULES
def test_stored_snapshots_are_approximate_where_the_spec_says_and_exact_elsewhere(storage, bound, rule):
    """Half a step of the format relative to a row's largest: 2^-9, 2^-4, 1/14; twice that over many rows' sums."""
    case = make_case("long_uniform", seed=7, dtype=np.float32, D=100)
    exact = forward_backward(cpu, case, options(rule=rule, restore="snapshot"))[2]
    got = forward_backward(cpu, case, options(rule=rule, restore="snapshot", snapshot_dtype=storage))[2]
    untouched = ("values", "initial_state", "beta") if rule == "shared" else ("values", "initial_state")
    for name in untouched:
        assert np.array_equal(getattr(got, name), getattr(exact, name)), name
    for name in ("write_weights", "read_weights", "log_decay"):
        error = relative_error(getattr(got, name), getattr(exact, name))
        assert 0 < error < bound, f"{name}: {error}"


def test_storage_formats_round_to_nearest():
    """Against the formats' own lists of values: no value of the format lies nearer than the one chosen."""
    rng = np.random.default_rng(8)
    row = (rng.standard_normal(101) * np.exp(rng.uniform(-8, 2, 101))).astype(np.float32)
    for name, values in (("fp8", np.array(snapshot._FP8)), ("int4", np.arange(-7, 8, dtype=np.float32))):
        storage = snapshot.STORAGE[name]
        code = np.zeros(snapshot.row_bytes(101, storage), np.uint8)
        back = np.empty_like(row)
        snapshot.encode(row, 0, 101, storage, code)
        snapshot.decode(code, 0, 101, storage, back)
        scale = np.abs(row).max() / np.nanmax(values)
        nearest = np.nanmin(np.abs(row[:, None] / scale - values[None]), axis=1)
        # dividing by the scale and multiplying back round once each: 448 * 2^-23 a time
        assert np.allclose(np.abs(row - back) / scale, nearest, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ["bf16", "fp8", "int4"])
def test_storage_of_rows_of_zero_nan_and_infinity_does_not_raise(name, value):
    storage = snapshot.STORAGE[name]
    row = np.full(5, value, np.float32)
    code, back = np.zeros(snapshot.row_bytes(5, storage), np.uint8), np.empty(5, np.float32)
    snapshot.encode(row, 0, 5, storage, code)
    snapshot.decode(code, 0, 5, storage, back)
    assert (back == 0).all() if value == 0 else not np.isfinite(back).all()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "long_slot_decay", "D100", "packed", "shared_state"])
@RULES
def test_sixteen_bit_states_round_every_written_row(state_dtype, name, rule):
    case = make_case(name, seed=9, dtype=np.float32)
    state, opts = case.state_bits(state_dtype), DeltaOptions(rule=rule, state_dtype=state_dtype)
    want, want_final, want_saved = reference.sparse_delta_forward(case.inputs, state, opts, save=True, final=True)
    got, final, saved = cpu.sparse_delta_forward(case.inputs, state, opts, save=True, final=True)
    assert final.dtype == np.uint16
    assert_close(got, want, "delta_forward", state_dtype, what="readings")
    wide, want_wide = widen_state(final, state_dtype), widen_state(want_final, state_dtype)
    assert_close(wide, want_wide, "delta_forward", state_dtype, what="final state")
    back = (case.dreadings, case.dfinal, state.shape)
    got = cpu.sparse_delta_backward(case.inputs, opts, saved, *back)
    want = reference.sparse_delta_backward(case.inputs, opts, want_saved, *back)
    for field in DeltaGradients._fields:
        assert_close(getattr(got, field), getattr(want, field), "delta_backward", state_dtype, "snapshot", what=field)


@pytest.mark.parametrize("state_dtype", ["float32", "float64", "bfloat16", "float16"])
@RULES
def test_in_place_equals_functional_bit_for_bit(state_dtype, rule):
    compute = np.float64 if state_dtype == "float64" else np.float32
    for name in ("plain", "packed", "D100", "no_tokens"):
        case = make_case(name, seed=10, dtype=compute)
        state = case.state_bits(state_dtype) if state_dtype.endswith("16") else case.state
        opts = DeltaOptions(rule=rule, state_dtype=state_dtype)
        want, want_final, _ = cpu.sparse_delta_forward(case.inputs, state, opts, final=True)
        strided = np.zeros((*state.shape, 2), state.dtype)[..., 0]
        strided[...] = state
        for table in (state.copy(), strided):
            got = cpu.sparse_delta_update(case.inputs, table, opts)
            assert np.array_equal(got, want) and np.array_equal(table, want_final)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@RULES
@pytest.mark.parametrize("cuts", [(1, 2, 7), (64,), (129,)])
def test_any_split_of_a_sequence_gives_the_same_bits(state_dtype, rule, cuts):
    case = make_case("long_slot_decay", seed=11, dtype=np.float32, B=2, D=70)
    opts = DeltaOptions(rule=rule, state_dtype=state_dtype)
    state = case.state_bits(state_dtype)
    want, want_final, _ = cpu.sparse_delta_forward(case.inputs, state, opts, final=True)
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, 130)):
        readings, state, _ = cpu.sparse_delta_forward(case.token_range(start, stop), state, opts, final=True)
        parts.append(readings)
    assert np.array_equal(np.concatenate(parts, axis=1), want) and np.array_equal(state, want_final)


@pytest.mark.parametrize("width", [16, 100, 130, 960])
@pytest.mark.parametrize("storage", [None, "bf16", "fp8"])
def test_bits_do_not_depend_on_threads_or_batch(monkeypatch, width, storage):
    """One lane or several, one tile of columns or several: the same additions."""
    fields = DeltaFields("threads", B=3, T=24, H=1, N=40, D=width, W=9, R=11, alpha="uniform")
    case = make_case(fields, seed=12, dtype=np.float32)
    opts = options(snapshot_dtype=storage)
    monkeypatch.setattr(cpu.pool, "SMALL", 0)
    results = []
    for threads in ("1", "2", "3", "5"):
        monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
        readings, final, gradients = forward_backward(cpu, case, opts)
        results.append((readings, final, *gradients))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))
    alone = make_case(fields, seed=12, dtype=np.float32)
    one = alone.inputs._replace(**{n: a[1:2] for n, a in alone.inputs._asdict().items() if a is not None})
    readings, final, saved = cpu.sparse_delta_forward(one, case.state[1:2], opts, save=True, final=True)
    gradients = cpu.sparse_delta_backward(
        one, opts, saved, case.dreadings[1:2], case.dfinal[1:2], case.state[1:2].shape
    )
    for got, want in zip((readings, final, *gradients), results[0]):
        assert np.array_equal(got, want[1:2])


@RULES
def test_packed_equals_separate_bit_for_bit(rule):
    case = make_case("packed", seed=13, dtype=np.float32)
    opts = options(rule=rule)
    readings, final, gradients = forward_backward(cpu, case, opts)
    bounds = case.inputs.cu_seqlens
    for s, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        part = case.inputs._replace(cu_seqlens=None, **{
            n: np.ascontiguousarray(a[:, start:stop]) for n, a in case.inputs._asdict().items() if n != "cu_seqlens"
        })  # fmt: skip
        got, got_final, saved = cpu.sparse_delta_forward(part, case.state[s : s + 1], opts, save=True, final=True)
        assert np.array_equal(got, readings[:, start:stop]) and np.array_equal(got_final[0], final[s])
        back = cpu.sparse_delta_backward(
            part, opts, saved, case.dreadings[:, start:stop], case.dfinal[s : s + 1], (1, *case.state.shape[1:])
        )
        assert np.array_equal(back.initial_state[0], gradients.initial_state[s])
        assert np.array_equal(back.values, gradients.values[:, start:stop])


def test_second_backward_gives_the_same_numbers_and_keeps_what_was_saved():
    case = make_case("long_uniform", seed=14, dtype=np.float32)
    opts = options()
    _, final, saved = cpu.sparse_delta_forward(case.inputs, case.state, opts, save=True, final=True)
    kept, final_before = [x.copy() for x in saved], final.copy()
    args = (case.inputs, opts, saved, case.dreadings, case.dfinal, case.state.shape)
    first, second = cpu.sparse_delta_backward(*args), cpu.sparse_delta_backward(*args)
    assert all(np.array_equal(a, b) for a, b in zip(first, second))
    assert all(np.array_equal(a, b) for a, b in zip(kept, saved)) and np.array_equal(final, final_before)


def test_rows_that_no_token_touches_stay_bit_identical():
    case = make_case("plain", seed=15, dtype=np.float32, N=200)
    touched = np.zeros((2, 2, 200), bool)
    for b, h in np.ndindex(2, 2):
        touched[b, h, case.inputs.write_slots[b, :, h]] = True
    _, final, _ = cpu.sparse_delta_forward(case.inputs, case.state, options(), final=True)
    assert np.array_equal(final[~touched], case.state[~touched]) and not np.array_equal(final, case.state)


def test_values_that_are_nan_stay_in_their_columns_and_rows():
    case = make_case("plain", seed=16, dtype=np.float32, D=70)
    values = case.inputs.values.copy()
    values[0, 2, 1, 5] = np.nan
    for rule in ("shared", "per_slot"):
        clean = cpu.sparse_delta_forward(case.inputs, case.state, options(rule=rule), final=True)
        got = cpu.sparse_delta_forward(case.inputs._replace(values=values), case.state, options(rule=rule), final=True)
        for a, b in zip(got[:2], clean[:2]):
            spread = np.isnan(a)
            assert spread.any() and np.array_equal(a[~spread], b[~spread])
            columns = set(np.argwhere(spread)[:, -1])
            assert columns == {5}
        rows = np.isnan(got[1]).any(axis=-1)
        assert not rows[1].any() and not rows[0, 0].any() and rows[0, 1].sum() < 32


def test_zero_decay_equals_the_ungated_rule_bit_for_bit():
    """With alpha exactly 1 the kernel multiplies by 1: the rule without a gate, column by column in float32."""
    case = make_case("no_decay", seed=17, dtype=np.float32)
    got, final, _ = cpu.sparse_delta_forward(case.inputs, case.state, options(), final=True)
    ones = cpu.sparse_delta_forward(
        case.inputs._replace(log_decay=np.full_like(case.inputs.log_decay, -1e-12)), case.state, options(), final=True
    )  # exp(-1e-12) rounds to 1
    assert np.array_equal(got, ones[0]) and np.array_equal(final, ones[1])
    slot, one = np.zeros((1, 4, 1, 1), np.int32), np.ones((1, 4, 1, 1), np.float32)
    inputs = case.inputs._replace(
        values=one, write_slots=slot, write_weights=one, log_decay=0 * one, beta=one[..., 0] / 2,
        read_slots=slot, read_weights=one,
    )  # fmt: skip
    readings = cpu.sparse_delta_forward(inputs, np.zeros((1, 1, 1, 1), np.float32), options())[0]
    assert readings.ravel().tolist() == [0.5, 0.75, 0.875, 0.9375]


def test_compact_table_holds_each_touched_row_once():
    case = make_case("plain", seed=18, dtype=np.float32, N=5000)
    for slots in (5000, 2**31 - 1):  # direct and hashed numbering
        lanes = plan.make_lanes(2, 7, 2, None, False)
        compact = plan.compact(case.inputs.write_slots, case.inputs.read_slots, lanes, slots)
        for lane, (b, h) in enumerate(np.ndindex(2, 2)):
            rows = compact.row_slots[compact.row_start[lane] : compact.row_start[lane + 1]]
            used = np.concatenate([case.inputs.write_slots[b, :, h].ravel(), case.inputs.read_slots[b, :, h].ravel()])
            assert sorted(rows) == sorted(set(used))
            assert np.array_equal(rows[compact.write_places[b, :, h]], case.inputs.write_slots[b, :, h])
            assert np.array_equal(rows[compact.read_places[b, :, h]], case.inputs.read_slots[b, :, h])


def test_hybrid_log_is_planned_exactly_and_follows_tau():
    case = make_case("long_uniform", seed=19, dtype=np.float32)
    sizes = []
    for tau in (0.0, 1.0, np.log(10), 10.0):
        saved = cpu.sparse_delta_forward(case.inputs, case.state, options(restore_tau=tau), save=True)[2]
        log, place = saved[6], saved[7]
        assert sorted(place[place >= 0]) == list(range(len(log)))
        sizes.append(len(log))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == place.size and sizes[-1] < sizes[1]
    since = np.zeros(case.fields.N)  # the plan by the spec's words
    expected = 0
    for t in range(case.fields.T):
        for slot in case.inputs.write_slots[0, t, 0]:
            since[slot] += float(case.inputs.log_decay[0, t, 0, 0])
            if since[slot] < -np.log(10):
                since[slot], expected = 0.0, expected + 1
    assert sizes[2] == expected


def test_group_width_depends_on_the_row_width_alone_and_bounds_the_partial_sums():
    for width in (1, 16, 64, 65, 512, 960, 1920, 4096):
        columns = forward.group_width(width)
        assert columns % forward.BLOCK == 0 and -(-width // columns) <= forward.MOST_GROUPS


@pytest.mark.parametrize("room", [cpu, reference], ids=["cpu", "reference"])
def test_state_gradient_is_left_out_where_it_is_not_wanted(room):
    case = make_case("shared_state", seed=20, dtype=np.float32)
    _, _, saved = room.sparse_delta_forward(case.inputs, case.state, options(), save=True)
    args = (case.inputs, options(), saved, case.dreadings, case.dfinal)
    with_state = room.sparse_delta_backward(*args, case.state.shape)
    without = room.sparse_delta_backward(*args, None)
    assert without.initial_state is None and with_state.initial_state.shape == case.state.shape
    assert all(np.array_equal(a, b) for a, b in zip(with_state[:5], without[:5]))
