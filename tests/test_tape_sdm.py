"""The sparse-memory operations on the tape, and a whole layer trained without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import make_case, make_scores

import sdm_lite
from sdm_lite import autograd as ag
from sdm_lite import reference
from sdm_lite.autograd import Tensor, check_grads, memory_ops, no_grad
from sdm_lite.rooms import DeltaInputs, DeltaOptions

ROOT = Path(__file__).parents[1]
FLOATS = (0, 2, 3, 4, 6, 7)  # of the op's eight arguments, those that have a gradient


def delta(*arguments, backend="reference", **options):
    return sdm_lite.sparse_delta_rule(*arguments, backend=backend, **options)


def on_tape(case, only=FLOATS):
    """Return the op's arguments with tensors for those numbered in `only`."""
    return [Tensor(a, requires_grad=True) if i in only else a for i, a in enumerate(case.arguments())]


def options_of(case, **options):
    return {"cu_seqlens": case.inputs.cu_seqlens, **options}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("rule", ["shared", "per_slot"])
@pytest.mark.parametrize("name", ["plain", "D17_slot_decay", "shared_state", "packed", "packed_shared"])
def test_gradients_of_readings_and_state_agree_with_differences(name, rule, backend):
    case = make_case(name, N=16, D=3, W=4, R=3, H=1)
    options = options_of(case, rule=rule, output_final_state=True, backend=backend)

    def f(values, k, log_decay, beta, q, state):
        _, write_slots, _, _, _, read_slots, *_ = case.arguments()
        # what is varied is log(-log_decay), so that the checker's steps keep log_decay below 0
        return delta(values, write_slots, k, -ag.exp(log_decay), beta, read_slots, q, state, **options)

    arrays = [case.arguments()[i] for i in FLOATS]
    arrays[2] = np.log(-arrays[2])
    check_grads(f, arrays, tolerance=1e-8)  # both backwards are right to 1e-12 in float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["plain", "D17_slot_decay", "shared_state", "packed"])
@pytest.mark.parametrize(("use_readings", "use_final"), [(True, True), (True, False), (False, True)])
def test_gradients_are_the_rooms_bit_for_bit(name, dtype, use_readings, use_final):
    case = make_case(name, dtype=dtype)
    tensors = on_tape(case)
    readings, final = delta(*tensors, **options_of(case, output_final_state=use_final))
    loss = (readings * case.dreadings).sum() if use_readings else 0.0
    loss = loss + (final * case.dfinal).sum() if use_final else loss
    loss.backward()

    options = DeltaOptions(state_dtype=np.dtype(dtype).name)
    want_readings, want_final, saved = reference.sparse_delta_forward(
        case.inputs, case.state, options, save=True, final=True
    )
    dreadings = case.dreadings if use_readings else np.zeros_like(case.dreadings)
    want = reference.sparse_delta_backward(
        case.inputs, options, saved, dreadings, case.dfinal if use_final else None, case.state.shape
    )
    np.testing.assert_array_equal(readings.data, want_readings)
    if use_final:
        np.testing.assert_array_equal(final.data, want_final)
    else:
        assert final is None
    for i, gradient in zip(FLOATS, want, strict=True):
        got = tensors[i].grad
        assert got.dtype == tensors[i].dtype == dtype and got.shape == tensors[i].shape
        assert got.tobytes() == gradient.tobytes()


@pytest.mark.parametrize("wanted", FLOATS)
def test_any_one_argument_may_be_the_only_tensor(wanted):
    case = make_case("plain")
    tensors, alone = on_tape(case), on_tape(case, only=(wanted,))
    delta(*tensors)[0].sum().backward()
    delta(*alone)[0].sum().backward()
    np.testing.assert_array_equal(alone[wanted].grad, tensors[wanted].grad)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_second_backward_adds_the_same_numbers_and_the_final_state_is_the_callers(backend):
    case = make_case("plain")
    tensors = on_tape(case)
    readings, final = delta(*tensors, output_final_state=True, backend=backend)
    loss = readings.sum() + (final * case.dfinal).sum()
    loss.backward()
    first = [tensors[i].grad.copy() for i in FLOATS]
    kept = final.data.copy()
    final.data[...] = np.nan  # what the caller does with it must not reach the saved rows
    loss.backward()
    for i, gradient in zip(FLOATS, first, strict=True):
        np.testing.assert_array_equal(tensors[i].grad, 2 * gradient)
    again = delta(*case.arguments(), output_final_state=True, backend=backend)[1]
    np.testing.assert_array_equal(again, kept)


def test_a_repeated_upstream_gradient_is_that_of_an_explicit_one():
    case = make_case("plain", dtype=np.float32)

    def run(make):
        tensors = on_tape(case)
        readings, _ = delta(*tensors)
        readings.backward(make(readings.shape))
        return [tensors[i].grad.tobytes() for i in FLOATS]

    explicit = run(lambda shape: np.full(shape, np.float32(1 / 3)))
    assert run(lambda shape: np.broadcast_to(np.float32(1 / 3), shape)) == explicit


def test_each_gradient_has_its_inputs_dtype():
    case = make_case("plain", dtype=np.float32)
    arguments = list(case.arguments())
    arguments[0], arguments[7] = arguments[0].astype(np.float16), arguments[7].astype(np.float16)
    tensors = [Tensor(a, requires_grad=i in FLOATS) if i in FLOATS else a for i, a in enumerate(arguments)]
    readings, final = delta(*tensors, output_final_state=True)
    assert readings.dtype == final.dtype == np.float16
    (readings.sum() + final.sum()).backward()
    for i in FLOATS:
        assert tensors[i].grad.dtype == arguments[i].dtype and tensors[i].grad.shape == arguments[i].shape
    plain, plain_final = delta(*arguments, output_final_state=True)
    np.testing.assert_array_equal(readings.data, plain)
    np.testing.assert_array_equal(final.data, plain_final)


@pytest.mark.parametrize("name", ["no_tokens", "no_batch", "packed_empty"])
def test_nothing_to_do_hands_the_state_and_its_gradient_through(name):
    case = make_case(name)
    tensors = on_tape(case)
    readings, final = delta(*tensors, **options_of(case, output_final_state=True))
    assert readings.data.size == 0
    (final * case.dfinal).sum().backward()
    np.testing.assert_array_equal(final.data, case.state)
    np.testing.assert_array_equal(tensors[7].grad, case.dfinal)


class Spy:
    """The reference room, noting what the forward was asked to keep."""

    def __init__(self):
        self.saves = []

    def sparse_delta_forward(self, *arguments, save=False, final=False):
        self.saves.append(save)
        return reference.sparse_delta_forward(*arguments, save=save, final=final)


def test_nothing_is_saved_where_no_gradient_is_wanted():
    case, spy = make_case("plain"), Spy()
    arrays = [Tensor(a) if a.dtype.kind == "f" else a for a in case.inputs[:7]]
    wanted = Tensor(case.state, requires_grad=True)
    options = DeltaOptions(state_dtype="float64")

    def run(state):
        memory_ops.tape_sparse_delta_rule(DeltaInputs(*arrays), state, options, spy, False)

    run(case.state)
    with no_grad():
        run(wanted)
    run(wanted)
    assert spy.saves == [False, False, True]


# ---- addressing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("widths", "k"), [((5,), 3), ((4, 4), 6), ((3, 2, 4), 5)])
def test_gradients_of_selected_scores_agree_with_differences(widths, k):
    # sums of distinct integers, divided so that no selection changes within the checker's step
    scores = make_scores("distinct", 6, widths, dtype=np.float64).reshape(2, 3, -1) / 4
    check_grads(
        lambda s: sdm_lite.product_key_topk(s, k, factors=widths, backend="reference"), [scores], tolerance=1e-8
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", ["ties", "extreme"])
def test_selection_on_the_tape_is_the_plain_one(kind, dtype):
    scores = make_scores(kind, 12, (6, 5), dtype=dtype).reshape(3, 4, -1)
    tensor = Tensor(scores, requires_grad=True)
    values, slots = sdm_lite.product_key_topk(tensor, 7, factors=(6, 5), backend="reference")
    want_values, want_slots = sdm_lite.product_key_topk(scores, 7, factors=(6, 5), backend="reference")
    np.testing.assert_array_equal(values.data, want_values)
    np.testing.assert_array_equal(slots, want_slots)
    assert (
        isinstance(slots, np.ndarray)
        and slots.dtype == np.int32
        and values.dtype == (np.float64 if dtype == np.float64 else np.float32)
    )
    upstream = np.random.default_rng(3).integers(-4, 5, values.shape).astype(dtype)  # sums of integers are exact
    values.backward(upstream)
    want = np.zeros_like(scores)
    for at in np.ndindex(values.shape):
        first, second = divmod(int(slots[at]), 5)
        want[(*at[:2], first)] += upstream[at]
        want[(*at[:2], 6 + second)] += upstream[at]
    np.testing.assert_array_equal(tensor.grad, want)
    assert tensor.grad.dtype == dtype


# ---- a layer --------------------------------------------------------------------------------------------------


def layer(x, w_write, w_read, w_value, w_decay, w_beta, a_log, dt_bias, memory, gain, w_out):
    """One sparse-memory layer with two heads: gates of section 3, softmax weights, normed readings."""
    batch, tokens, heads, width = *x.shape[:2], a_log.shape[0], gain.shape[0]

    def address(weight):
        scores = (x @ weight).reshape(batch, tokens, heads, -1)
        values, slots = sdm_lite.product_key_topk(scores, 3, backend="reference")
        return slots, ag.softmax(values)

    log_decay = -ag.exp(a_log) * ag.softplus(x @ w_decay + dt_bias)
    values = (x @ w_value).reshape(batch, tokens, heads, width)
    readings, _ = delta(*(values, *address(w_write), log_decay, ag.sigmoid(x @ w_beta), *address(w_read), memory))
    return ag.rms_norm(readings, gain).reshape(batch, tokens, heads * width) @ w_out


def test_a_whole_layer_agrees_with_differences():
    rng = np.random.default_rng(0)
    shapes = [(2, 5, 6), (6, 16), (6, 16), (6, 8), (6, 2), (6, 2), (2,), (2,), (2, 16, 4), (4,), (8, 3)]
    # a small step, so that no selection changes within it
    check_grads(layer, [rng.standard_normal(shape) for shape in shapes], step=1e-4, tolerance=1e-6)


def test_chained_calls_equal_one_call():
    case = make_case("plain", T=9)
    whole = on_tape(case)
    readings, final = delta(*whole, output_final_state=True)
    ((readings * case.dreadings).sum() + (final * case.dfinal).sum()).backward()
    parts, outputs = on_tape(case), []
    state = parts[7]
    for span in (slice(0, 4), slice(4, 5), slice(5, 9)):
        y, state = delta(*(a[:, span] for a in parts[:7]), state, output_final_state=True)
        outputs.append(y)
    joined = ag.concatenate(outputs, axis=1)
    ((joined * case.dreadings).sum() + (state * case.dfinal).sum()).backward()
    np.testing.assert_array_equal(joined.data, readings.data)
    np.testing.assert_array_equal(state.data, final.data)
    for i in FLOATS:  # the tape adds the parts of a gradient in another order than one call does
        np.testing.assert_allclose(parts[i].grad, whole[i].grad, rtol=1e-12, atol=1e-15)


def test_slots_of_the_hash_address_a_tape_call():
    slots = sdm_lite.hash_slots(np.arange(6).reshape(1, 6, 1), 32, 4, backend="reference")
    weights = np.full(slots.shape, 0.25)
    values = Tensor(np.ones((1, 6, 1, 2)), requires_grad=True)
    state = np.zeros((1, 1, 32, 2))
    y, _ = delta(values, slots, weights, np.zeros((1, 6, 1)), np.ones((1, 6, 1)), slots, weights, state)
    y.sum().backward()
    assert (values.grad > 0).all()


def test_the_example_learns_without_torch():
    code = (
        "import runpy, sys; runpy.run_path('examples/train_without_torch.py', run_name='__main__');"
        "print('torch' in sys.modules, 'cupy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[0] == pytest.approx(np.log(16), abs=0.01)  # a guess among 16 values
    assert losses[-1] < 0.2  # 0.002 to 0.02 over three seeds
    assert done.stdout.split()[-2:] == ["False", "False"]
