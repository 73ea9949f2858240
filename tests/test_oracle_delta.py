"""The reference room's delta rule: worked numbers, other formulations, gradients, and its contracts."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm_lite import reference
from sdm_lite.reference.delta import decode_rows, encode_rows
from sdm_lite.rooms import SAVED_ARRAYS, DeltaInputs, DeltaOptions

RULES = ["shared", "per_slot"]


def token(values, slots, weights, log_decay, beta, read_slots, read_weights, dtype=np.float64):
    """One token of one lane as DeltaInputs."""
    floats = [np.reshape(np.asarray(a, dtype), (1, 1, 1, -1)) for a in (values, weights, log_decay, read_weights)]
    places = [np.reshape(np.asarray(a, np.int32), (1, 1, 1, -1)) for a in (slots, read_slots)]
    beta = np.full((1, 1, 1), beta, dtype)
    return DeltaInputs(floats[0], places[0], floats[1], floats[2], beta, places[1], floats[3])


def forward(case, rule="shared", state=None, state_dtype=None, **kwargs):
    state = case.state if state is None else state
    options = DeltaOptions(rule=rule, state_dtype=state_dtype or str(case.state.dtype))
    return reference.sparse_delta_forward(case.inputs, state, options, **kwargs)


def backward(case, rule="shared", state=None, state_dtype=None):
    options = DeltaOptions(rule=rule, state_dtype=state_dtype or str(case.state.dtype))
    _, _, saved = forward(case, rule, state, state_dtype, save=True)
    return reference.sparse_delta_backward(case.inputs, options, saved, case.dreadings, case.dfinal, case.state.shape)


# ---- worked by hand -------------------------------------------------------------------------------------------


def test_the_row_decays_once_before_it_predicts():
    memory = np.array([[9, 9], [2, 4], [9, 9]], float)[None, None]
    inputs = token([1, 1], [1], [1], np.log(0.5), 0.5, [1], [1])
    reading = reference.sparse_delta_update(inputs, memory, DeltaOptions(state_dtype="float64"))
    np.testing.assert_array_equal(reading.ravel(), [1, 1.5])
    np.testing.assert_array_equal(memory[0, 0], [[9, 9], [1, 1.5], [9, 9]])


def test_two_rows_share_one_residual():
    memory = np.array([2, 7, 7, 4], float).reshape(1, 1, 4, 1)
    inputs = token([9], [0, 3], [0.5, 0.5], np.log(0.5), 0.5, [0, 3], [1, -1])
    reading = reference.sparse_delta_update(inputs, memory, DeltaOptions(state_dtype="float64"))
    np.testing.assert_array_equal(memory.ravel(), [2.875, 7, 7, 3.875])
    assert reading.item() == -1


@pytest.mark.parametrize("rule, want", [("shared", [3.75, 5.75]), ("per_slot", [4, 5.5])])
def test_the_two_rules_differ(rule, want):
    memory = np.array([2.5, 5]).reshape(1, 1, 2, 1)
    inputs = token([10], [0, 1], [0.5, 0.5], np.log(0.8), 0.5, [0], [1])
    reference.sparse_delta_update(inputs, memory, DeltaOptions(rule=rule, state_dtype="float64"))
    np.testing.assert_allclose(memory.ravel(), want, rtol=1e-15)  # exp(log(0.8)) is 0.8 to one rounding


@pytest.mark.parametrize("rule", RULES)
def test_gate_zero_halves_the_way_exactly(rule):
    memory, inputs = np.zeros((1, 1, 1, 1), np.float32), token([1], [0], [1], 0, 0.5, [0], [1], np.float32)
    options = DeltaOptions(rule=rule)
    seen = [reference.sparse_delta_update(inputs, memory, options).item() for _ in range(5)]
    assert seen == [0.5, 0.75, 0.875, 0.9375, 0.96875]


# ---- against other formulations -------------------------------------------------------------------------------


def test_gate_zero_equals_the_ungated_rule_bit_for_bit():
    case = cases.make_case("no_decay", dtype=np.float32)
    memory, x = case.state[0, 0].copy(), DeltaInputs(*(a[0, :, 0] for a in case.inputs[:7]))
    want = []
    for t in range(130):
        k, rows = x.write_weights[t][:, None], memory[x.write_slots[t]]
        memory[x.write_slots[t]] = rows + k * (x.beta[t] * (x.values[t] - (k * rows).sum(0)))
        want.append((x.read_weights[t][:, None] * memory[x.read_slots[t]]).sum(0))
    readings, final, _ = forward(case, final=True)
    np.testing.assert_array_equal(readings[0, :, 0], want)
    np.testing.assert_array_equal(final[0, 0], memory)


def test_dense_limit_is_the_gated_delta_rule():
    case = cases.make_case("all_slots", T=40, N=8, W=8, R=8, order="ascending")
    readings, final, _ = forward(case, state=np.zeros_like(case.state), final=True)
    for b, h in np.ndindex(2, 2):
        x = DeltaInputs(*(a[b, :, h] for a in case.inputs[:7]))
        memory = np.zeros((8, 5))
        for t in range(40):
            k, alpha = x.write_weights[t], np.exp(x.log_decay[t, 0])
            memory = alpha * memory + x.beta[t] * np.outer(k, x.values[t] - alpha * memory.T @ k)
            tolerances.assert_close(readings[b, t, h], memory.T @ x.read_weights[t], "delta_forward", "float64")
        tolerances.assert_close(final[b, h], memory, "delta_forward", "float64")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fields", cases.DELTA_CASES, ids=cases.case_id)
def test_float32_is_close_to_float64(fields, rule):
    case = cases.make_case(fields, dtype=np.float32)
    exact = case.astype(np.float64)
    want = forward(exact, rule, final=True)
    got = forward(case, rule, final=True)
    for name, a, b in zip(("readings", "final"), got[:2], want[:2], strict=True):
        assert a.dtype == np.float32
        tolerances.assert_close(a, b, "delta_forward", "float32", what=name)
    grads, exact_grads = backward(case, rule), backward(exact, rule)
    for name, a, b in zip(grads._fields, grads, exact_grads, strict=True):
        assert a.dtype == np.float32
        tolerances.assert_close(a, b, "delta_backward", "float32", "snapshot", what=name)


# ---- gradients ------------------------------------------------------------------------------------------------


def torch_gradients(case, rule, state, state_dtype):
    """Readings, final state and gradients by torch's autograd through a loop in float64.

    Rounding of stored rows has gradient 1 (straight through).
    """
    torch = pytest.importorskip("torch")
    names = ("values", "write_weights", "log_decay", "beta", "read_weights")
    x = {n: torch.tensor(getattr(case.inputs, n), requires_grad=True) for n in names}
    start = torch.tensor(decode_rows(state, state_dtype, np.dtype(np.float64)), requires_grad=True)
    stored = getattr(torch, state_dtype)
    write_slots, read_slots = (torch.tensor(case.inputs[i]).long() for i in (1, 5))
    edges = case.inputs.cu_seqlens
    spans = [(b, 0, case.fields.T) for b in range(case.fields.B)]
    if edges is not None:
        spans = [(0, int(a), int(b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    loss = 0 * sum(a.sum() for n, a in x.items() if n != "log_decay") + 0 * start.sum()
    readings, final = np.zeros(case.inputs.values.shape), np.zeros(case.dfinal.shape)
    for s, (b, first, last) in enumerate(spans):
        for h in range(case.fields.H):
            memory = (start if start.dim() == 3 else start[s])[h]
            for t in range(first, last):
                at, k = (b, t, h), x["write_weights"][b, t, h][:, None]
                decayed = torch.exp(x["log_decay"][at])[:, None] * memory[write_slots[at]]
                error = x["values"][at] - ((k * decayed).sum(0) if rule == "shared" else decayed)
                rows = decayed + k * x["beta"][at] * error
                rows = rows + (rows.detach().to(stored).double() - rows.detach())
                memory = memory.index_copy(0, write_slots[at], rows)
                y = (x["read_weights"][at][:, None] * memory[read_slots[at]]).sum(0)
                readings[at] = y.detach()
                loss = loss + (y * torch.tensor(case.dreadings[at])).sum()
            final[s, h] = memory.detach()
            loss = loss + (memory * torch.tensor(case.dfinal[s, h])).sum()
    loss.backward()
    grads = {n: np.zeros(a.shape) if a.grad is None else a.grad.numpy() for n, a in x.items()}
    return readings, final, {**grads, "initial_state": start.grad.numpy()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fields", [f for f in cases.DELTA_CASES if f.T < 130], ids=cases.case_id)
def test_gradients_equal_autograd(fields, rule):
    case = cases.make_case(fields, seed=2)
    readings, final, want = torch_gradients(case, rule, case.state, "float64")
    got = forward(case, rule, final=True)
    tolerances.assert_close(got[0], readings, "delta_forward", "float64", what="readings")
    tolerances.assert_close(got[1], final, "delta_forward", "float64", what="final")
    grads = backward(case, rule)
    for name, gradient in grads._asdict().items():
        tolerances.assert_close(gradient, want[name], "delta_backward", "float64", "snapshot", what=name)
    wiped = np.isneginf(case.inputs.log_decay)
    assert (grads.log_decay[wiped] == 0).all()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["plain", "packed_shared", "wipe_slot"])
def test_gradients_of_rounded_states_equal_autograd(name, state_dtype):
    case = cases.make_case(name, seed=3)
    state = case.state_bits(state_dtype)
    readings, final, want = torch_gradients(case, "shared", state, state_dtype)
    got = forward(case, state=state, state_dtype=state_dtype, final=True)
    assert got[1].dtype == state.dtype
    tolerances.assert_close(got[0], readings, "delta_forward", "float64", what="readings")
    stored = decode_rows(got[1], state_dtype, np.dtype(np.float64))
    tolerances.assert_close(stored, final, "delta_forward", "float64", what="final")
    for field, gradient in backward(case, state=state, state_dtype=state_dtype)._asdict().items():
        tolerances.assert_close(gradient, want[field], "delta_backward", "float64", "snapshot", what=field)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["D17_slot_decay", "long_uniform", "all_but_one", "wipe", "packed_shared"])
def test_gradients_equal_central_differences(name, rule):
    case = cases.make_case(name, seed=4)
    rng = np.random.default_rng(5)
    fields = ("values", "write_weights", "log_decay", "beta", "read_weights")
    direction = {n: rng.standard_normal(getattr(case.inputs, n).shape) for n in fields}
    direction["log_decay"][np.isneginf(case.inputs.log_decay)] = 0
    direction["initial_state"] = rng.standard_normal(case.state.shape)

    def loss(step):
        moved = {n: getattr(case.inputs, n) + step * direction[n] for n in fields}
        options = DeltaOptions(rule=rule, state_dtype="float64")
        inputs, state = case.inputs._replace(**moved), case.state + step * direction["initial_state"]
        readings, final, _ = reference.sparse_delta_forward(inputs, state, options, final=True)
        return (readings * case.dreadings).sum() + (final * case.dfinal).sum()

    grads = backward(case, rule)._asdict()
    slope = sum((grads[n] * direction[n]).sum() for n in direction)
    size = np.sqrt(sum((grads[n] ** 2).sum() * (direction[n] ** 2).sum() for n in direction))
    step = 1e-5
    # truncation step^2 = 1e-10 and cancellation 1e-16 / step = 1e-11, times factors of the third derivative
    assert abs((loss(step) - loss(-step)) / (2 * step) - slope) < 1e-6 * max(abs(slope), 0.01 * size)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("log_decay, exact_zero", [(-88, False), (-104, True), (-1e4, True), (-np.inf, True)])
def test_gate_extremes_stay_finite(log_decay, exact_zero, rule):
    case = cases.make_case("plain", dtype=np.float32)
    gate = case.inputs.log_decay.copy()
    gate[:, ::2] = log_decay
    case = cases.Case(case.fields, case.inputs._replace(log_decay=gate), case.state, case.dreadings, case.dfinal)
    readings, final, _ = forward(case, rule, final=True)
    grads = backward(case, rule)
    assert all(np.isfinite(a).all() for a in (readings, final, *grads))
    hit = grads.log_decay[:, ::2]
    # exp(-88) is 6e-39; exp(-104) is below the least float32
    assert (hit == 0).all() if exact_zero else (np.abs(hit) < 1e-36).all()
    assert (grads.log_decay[:, 1::2] != 0).all()


def test_a_wipe_forgets_exactly():
    memory = np.full((1, 1, 2, 3), 1e30, np.float32)
    inputs = token([5, 5, 5], [1], [1], -np.inf, 0, [1], [1], np.float32)
    reading = reference.sparse_delta_update(inputs, memory, DeltaOptions())
    assert (reading == 0).all() and (memory[0, 0, 1] == 0).all() and (memory[0, 0, 0] == np.float32(1e30)).all()


# ---- contracts ------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_any_split_gives_the_same_bits(cuts, state_dtype):
    case = cases.make_case("wipe", dtype=np.float32)
    whole, final, _ = forward(case, state=case.state_bits(state_dtype), state_dtype=state_dtype, final=True)
    state, edges = case.state_bits(state_dtype), sorted([0, *cuts, 40])
    options = DeltaOptions(state_dtype=state_dtype)
    parts = [
        reference.sparse_delta_update(case.token_range(start, stop), state, options)
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    np.testing.assert_array_equal(state, final)


@pytest.mark.parametrize("name", ["packed", "packed_shared"])
def test_packed_equals_separate_sequences(name):
    case = cases.make_case(name, dtype=np.float32)
    readings, final, _ = forward(case, final=True)
    grads = backward(case)
    shared_sum = np.zeros(case.state.shape[-3:], np.float32)
    edges = case.inputs.cu_seqlens
    for s, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        inputs = DeltaInputs(*(a[:, start:stop] for a in case.inputs[:7]))
        state = case.state[None] if case.fields.shared_state else case.state[s : s + 1]
        alone = cases.Case(case.fields, inputs, state, case.dreadings[:, start:stop], case.dfinal[s : s + 1])
        alone_readings, alone_final, _ = forward(alone, final=True)
        np.testing.assert_array_equal(alone_readings, readings[:, start:stop])
        np.testing.assert_array_equal(alone_final[0], final[s])
        alone_grads = backward(alone)
        for together, separate in zip(grads[:5], alone_grads[:5], strict=True):
            np.testing.assert_array_equal(together[:, start:stop], separate)
        if start == stop:
            np.testing.assert_array_equal(alone_grads.initial_state, alone.dfinal)
        if case.fields.shared_state:
            shared_sum += alone_grads.initial_state[0]
        else:
            np.testing.assert_array_equal(alone_grads.initial_state[0], grads.initial_state[s])
    if case.fields.shared_state:
        np.testing.assert_array_equal(shared_sum, grads.initial_state)


@pytest.mark.parametrize("fields", cases.DELTA_CASES, ids=cases.case_id)
def test_untouched_rows_and_inputs_keep_their_bits(fields):
    case = cases.make_case(fields, dtype=np.float32)
    again = cases.make_case(fields, dtype=np.float32)
    _, final, saved = forward(case, final=True, save=True)
    for mine, theirs in zip((*case.inputs, case.state), (*again.inputs, again.state), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    start = np.broadcast_to(case.state, final.shape)
    written = np.zeros(final.shape[:3], bool)
    edges = case.inputs.cu_seqlens
    for s in range(len(final)):
        slots = case.inputs.write_slots[s] if edges is None else case.inputs.write_slots[0, edges[s] : edges[s + 1]]
        for h in range(final.shape[1]):
            written[s, h, slots[:, h].ravel()] = True
    np.testing.assert_array_equal(final[~written], start[~written])
    assert len(saved) == SAVED_ARRAYS
    tokens = case.inputs.beta.size
    assert sum(a.nbytes for a in saved) == final.nbytes + 4 * tokens * case.fields.W * case.fields.D


def test_a_second_backward_gives_the_same_bits_and_the_final_state_is_the_callers():
    case = cases.make_case("spikes", dtype=np.float32)
    options = DeltaOptions()
    _, final, saved = forward(case, save=True, final=True)
    final[:] = np.nan
    args = (case.inputs, options, saved, case.dreadings, case.dfinal, case.state.shape)
    first = reference.sparse_delta_backward(*args)
    for one, two in zip(first, reference.sparse_delta_backward(*args), strict=True):
        np.testing.assert_array_equal(one, two)
    assert all(np.isfinite(gradient).all() for gradient in first)
    no_final = reference.sparse_delta_backward(case.inputs, options, saved, case.dreadings, None, case.state.shape)
    zeros = reference.sparse_delta_backward(
        case.inputs, options, saved, case.dreadings, np.zeros_like(case.dfinal), case.state.shape
    )
    for one, two in zip(no_final, zeros, strict=True):
        np.testing.assert_array_equal(one, two)


def test_expanded_gradient_equals_an_explicit_one():
    case = cases.make_case("plain", dtype=np.float32)
    ones = np.ones_like(case.dreadings)
    stride_zero = np.broadcast_to(np.float32(1), ones.shape)
    a, b = (backward(cases.Case(case.fields, case.inputs, case.state, dy, case.dfinal)) for dy in (ones, stride_zero))
    for one, two in zip(a, b, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_nan_value_stays_in_its_column_and_rows():
    case = cases.make_case("plain", dtype=np.float32)
    values = case.inputs.values.copy()
    values[0, 3, 1, 5] = np.nan
    _, clean, _ = forward(case, final=True)
    spoilt = cases.Case(case.fields, case.inputs._replace(values=values), case.state, case.dreadings, case.dfinal)
    readings, final, _ = forward(spoilt, final=True)
    assert np.isnan(final[0, 1, case.inputs.write_slots[0, 3, 1], 5]).all()
    final[0, 1, :, 5] = clean[0, 1, :, 5]
    np.testing.assert_array_equal(final, clean)
    readings[0, 3:, 1, 5] = 0
    assert np.isfinite(readings).all()


# ---- 16-bit rows ----------------------------------------------------------------------------------------------


def test_bfloat16_rounding_equals_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [
            rng.integers(0, 2**32, 200_000, dtype=np.uint32),
            np.arange(0, 2**32, 2**15, dtype=np.uint32),  # every bfloat16, and every tie between two
            np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF, 0x00000001, 0x80007FFF], np.uint32),
        ]
    )
    values = bits.view(np.float32)
    got = encode_rows(values, "bfloat16")
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(decode_rows(got[nan], "bfloat16", np.dtype(np.float32))).all()
    every = np.arange(2**16).astype(np.uint16)
    finite = ~np.isnan(decode_rows(every, "bfloat16", np.dtype(np.float32)))
    back = encode_rows(decode_rows(every, "bfloat16", np.dtype(np.float32)), "bfloat16")
    np.testing.assert_array_equal(back[finite], every[finite])


def test_bfloat16_sums_are_float32():
    # 256 plus eight rows of 1: bfloat16 sums stop at 256, whose neighbour is 258
    rows = np.array([256] + [1] * 8, np.float32)[:, None]
    state = encode_rows(rows, "bfloat16")[None, None]
    inputs = token([0], [0], [0], 0, 0, range(9), np.ones(9), np.float32)
    reading, final, _ = reference.sparse_delta_forward(inputs, state, DeltaOptions(state_dtype="bfloat16"), final=True)
    assert reading.item() == 264
    np.testing.assert_array_equal(final, state)


def test_float16_overflow_is_infinity():
    np.testing.assert_array_equal(
        decode_rows(encode_rows(np.array([1e5, -1e5, 65504], np.float32), "float16"), "float16", np.dtype(np.float32)),
        [np.inf, -np.inf, 65504],
    )
