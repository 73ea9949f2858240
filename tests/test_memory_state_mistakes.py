"""What a MemoryState refuses: in the house form, and nothing is changed."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from cases import make_case
from state_calls import token

import sdm_lite
from sdm_lite import MemoryState, StateBusy, StateFull


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def bad_calls(rng):
    """Yield (name of the mistake, changed call) of one step."""
    good = token(rng)
    for place, what, value in (
        (1, "slot past the end", 64),
        (5, "slot below zero", -2),
        (1, "a lone -1", -1),
    ):
        call = [a.copy() for a in good]
        call[place][0, 1, 0] = value
        yield what, call, IndexError
    call = [a.copy() for a in good]
    call[1], call[5] = (np.full_like(call[place], -(2**40), np.int64) for place in (1, 5))
    yield "below zero everywhere, but no padding", call, IndexError
    call = [a.copy() for a in good]
    call[1][0, 0, 1] = call[1][0, 0, 0]
    yield "slot twice", call, IndexError
    call = [a.copy() for a in good]
    call[1][0, 0], call[5][0, 0] = -1, -1
    yield "padded in one head only", call, IndexError
    call = [a.copy() for a in good]
    call[1][:] = -1
    yield "writes padded, reads not", call, IndexError
    for value in (0.1, np.nan):
        call = [a.copy() for a in good]
        call[3][0, 0] = value
        yield f"log_decay {value}", call, ValueError
    yield "another batch", token(rng, (2, 2)), ValueError
    yield "another width", token(rng, width=8), ValueError
    yield "an axis too many", token(rng, (1, 1, 2)), ValueError
    yield "slots of floats", [a.astype(np.float32) for a in good], TypeError
    yield "lists", [a.tolist() for a in good], TypeError


def test_mistakes_raise_and_change_nothing(rng):
    state = MemoryState((2, 64, 16), 1)
    state.step(*token(rng))
    dense, owned = state.dense(), state.nbytes()
    for what, call, error in bad_calls(rng):
        with pytest.raises(error, match="MemoryState.step: .*Fix: ") as raised:
            state.step(*call)
        assert isinstance(raised.value, sdm_lite.SdmError), what
        assert np.array_equal(state.dense(), dense) and state.nbytes() == owned, what
        assert state.tokens.tolist() == [1], what
    state.step(*token(rng))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: MemoryState(), TypeError),
        (lambda s: MemoryState((1, 2, 3)), TypeError),
        (lambda s: MemoryState(None, 1), TypeError),
        (lambda s: MemoryState.load("file"), TypeError),
        (lambda s: MemoryState.load(), TypeError),
        (lambda s: s.fork(), ValueError),
        (lambda s: s.reorder(), ValueError),
        (lambda s: s.evict(), ValueError),
        (lambda s: s.reset(), TypeError),
        (lambda s: s.fork([1]), ValueError),
        (lambda s: s.fork(0), ValueError),
        (lambda s: s.reorder([0.5]), TypeError),
        (lambda s: s.reorder([-1]), ValueError),
        (lambda s: s.reset(3), ValueError),
        (lambda s: s.append(-1), ValueError),
        (lambda s: s.evict([7]), ValueError),
        (lambda s: s.rollback("mark"), ValueError),
        (lambda s: s.release(MemoryState((1, 2, 3), 1).mark()), ValueError),
        (lambda s: MemoryState(np.zeros((2, 3), np.float32), 1), ValueError),
        (lambda s: MemoryState(np.zeros((2, 3, 4), np.int32), 1), TypeError),
        (lambda s: MemoryState(np.zeros((4, 3, 2), np.float32).T, 1), ValueError),
        (lambda s: MemoryState((1, 2, 3), -1), ValueError),
        (lambda s: MemoryState((1, 2, 3), 1.5), TypeError),
        (lambda s: MemoryState((1, 2, 3), 1, rule="other"), ValueError),
        (lambda s: MemoryState((1, 2, 3), 1, dtype="int8"), TypeError),
        (lambda s: MemoryState((1, 2, 3), 1, dtype="bfloat16"), TypeError),
    ],
)
def test_wrong_arguments_raise_in_the_house_form(change, error):
    state = MemoryState((1, 2, 3), 1)
    with pytest.raises(error, match="MemoryState.*: expected .*got .*Fix: ") as raised:
        change(state)
    assert isinstance(raised.value, sdm_lite.SdmError)
    assert state.batch == 1


def test_one_state_in_two_threads_raises(rng, monkeypatch):
    from sdm_lite.memory_state import call as calls

    state, entered, leave = MemoryState((2, 64, 16), 1), threading.Event(), threading.Event()
    kernel = calls.sparse_delta_paged

    def slow(*arguments):
        entered.set()
        assert leave.wait(30)
        return kernel(*arguments)

    monkeypatch.setattr(calls, "sparse_delta_paged", slow)
    thread = threading.Thread(target=state.step, args=token(rng))
    thread.start()
    assert entered.wait(30)
    for second in (lambda: state.step(*token(rng)), state.dense, state.mark, lambda: state.fork([0]), state.nbytes):
        with pytest.raises(StateBusy, match="one call at a time"):
            second()
    leave.set()
    thread.join()
    assert state.tokens.tolist() == [1]


def test_a_repeated_step_is_checked_where_its_arrays_differ(rng):
    initial = rng.standard_normal((2, 64, 16)).astype(np.float32)
    state, plain = MemoryState(initial, 2), MemoryState(initial, 2)
    calls = [token(rng, (2, 2)) for _ in range(5)]
    state.step(*calls[0]), plain.step(*calls[0])
    strided = [np.repeat(a, 2, axis=-1)[..., ::2] for a in calls[1]]
    assert np.array_equal(state.step(*strided), plain.step(*calls[1]))
    for a in calls[2]:
        a.setflags(write=False)
    assert np.array_equal(state.step(*calls[2]), plain.step(*[a.copy() for a in calls[2]]))
    kept = state.step(*calls[3])
    want = kept.copy()
    state.step(*calls[4])
    assert np.array_equal(kept, want)  # readings are the caller's
    swapped = [a.view(a.dtype.newbyteorder()) for a in calls[4]]
    with pytest.raises(TypeError, match="native byte order"):
        state.step(*swapped)
    with pytest.raises(ValueError, match="values: expected shape"):
        state.extend(*calls[4])  # a step's arrays, in shapes that a step has passed with
    state.evict([0])
    with pytest.raises(sdm_lite.ShapeError, match="a batch of 1"):
        state.step(*calls[4])
    assert state.tokens.tolist() == [5]


def test_a_state_is_not_pickled():
    with pytest.raises(sdm_lite.SdmError, match=r"save\(\)"):
        pickle.dumps(MemoryState((1, 8, 2), 1))


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        (lambda state: MemoryState((1, 8, 2), 10**12), sdm_lite.ValueRangeError),
        (lambda state: MemoryState((1, 8, 2), 2**31 - 1), StateFull),
        (lambda state: state.append(10**13), sdm_lite.ValueRangeError),
        (lambda state: state.append(2**30 - 3), StateFull),
        (lambda state: state.reset([[0], [0, 1]]), sdm_lite.DtypeError),
        (lambda state: state.reset(None), sdm_lite.DtypeError),
    ],
)
def test_absurd_sizes_and_indices_change_nothing(mistake, kind):
    state = MemoryState((2, 8, 2), 2)
    with pytest.raises(kind, match="MemoryState"):
        mistake(state)
    assert state.batch == 2 and state.tokens.tolist() == [0, 0]


def test_another_batch_is_a_mistake_of_the_values():
    args = make_case("plain", shared_state=True).arguments()
    state = MemoryState(args[7], args[0].shape[0] + 3)
    with pytest.raises(sdm_lite.ShapeError, match=f"values: expected a batch of {state.batch}"):
        state.step(*(a[:, 0] for a in args[:7]))


def test_a_step_speaks_of_its_own_shapes(rng):
    """Of [B, H, ...], without the axis of tokens that the op has; a wrong width is the fault of `values`."""
    state, good = MemoryState((2, 64, 16), 1), token(rng)
    for place, given, words in (
        (0, np.zeros((1, 2, 5), np.float32), "values: expected shape [B, H, D] = [any, 2, 16], got [1, 2, 5]"),
        (0, np.zeros((1, 3, 16), np.float32), "values: expected shape [B, H, D] = [any, 2, 16], got [1, 3, 16]"),
        (0, np.zeros((1, 1, 2, 16), np.float32), "call extend with [B, T, H, ...]"),
        (2, np.zeros((1, 2, 5), np.float32), "write_weights: expected shape [B, H, W] = [1, 2, 4], got [1, 2, 5]"),
        (3, np.zeros((1, 2, 5), np.float32), "log_decay: expected shape [B, H, W] = [1, 2, 4], got [1, 2, 5]"),
        (4, np.zeros((1, 3), np.float32), "beta: expected shape [B, H] = [1, 2], got [1, 3]"),
        (6, np.zeros((1, 2, 5), np.float32), "read_weights: expected shape [B, H, R] = [1, 2, 4], got [1, 2, 5]"),
        (1, np.full((1, 2, 4), 64), "write_slots: expected slots in [0, 64), got 64 at [B, H] = [0, 0]"),
        (5, np.zeros((1, 2, 4), np.int32), "read_slots: expected distinct slots per token, got slot 0 twice at [B, H]"),
    ):
        with pytest.raises(sdm_lite.SdmError) as raised:
            state.step(*good[:place], given, *good[place + 1 :])
        assert words in str(raised.value)
    longer = [a[:, None] for a in good]
    longer[0] = longer[0][..., :5]
    with pytest.raises(sdm_lite.ShapeError) as raised:
        state.extend(*longer)
    assert "values: expected shape [B, T, H, D] = [any, any, 2, 16], got [1, 1, 2, 5]" in str(raised.value)


def test_a_file_is_not_read_without_an_initial_memory(tmp_path):
    MemoryState((1, 2, 3), 1).save(tmp_path / "state")
    with pytest.raises(TypeError, match=r"MemoryState.load: initial: .*or the shape \(H, N, D\) of zeros, got None"):
        MemoryState.load(tmp_path / "state")
