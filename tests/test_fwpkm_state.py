"""FwPKMState: forks, order, marks, flush, files; and what each mistake is answered with."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading

import numpy as np
import pytest
from fwpkm_cases import make_stream
from fwpkm_states import SMALL, begun, goes_on

from sdm_lite import FwPKMState, errors, fwpkm
from sdm_lite.fwpkm_stream import StreamOptions
from sdm_lite.row_table import RowTable


@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_fork_goes_on_by_itself(per_sequence):
    x, state = begun(per_sequence)
    want, fork = goes_on(state, x), state.fork()
    fork.extend(*x.tokens(3, 12), **SMALL)
    assert goes_on(state, x) == want
    other = state.fork()
    state.extend(*x.tokens(3, 12), **SMALL)
    assert goes_on(other, x) == want


def test_forks_share_the_rows_that_nobody_wrote():
    x = make_stream(B=1, T=4, m=64, D=32, dtype=np.float32)
    state = FwPKMState(x.keys, x.table, per_sequence=True)
    state.extend(*x.call, k=2, chunk=4)
    shared, owned = state.nbytes()
    assert shared == x.keys.nbytes + x.table.nbytes
    place, rows = 4 * 64 * 64, 4 * 2 * 2 * (32 + 1) * 4
    assert place < owned <= place + 2 * rows + x.keys.nbytes
    assert owned < x.table.nbytes / 2


def test_reorder_and_fork_by_indices_take_sequences_along():
    x, state = begun()
    order = [2, 0, 2]
    picked = state.fork(order)
    assert (
        goes_on(picked, x, order)[1]
        == np.stack([fwpkm(*x.tokens(6, 12), state, **SMALL)[1].values[i] for i in order]).tobytes()
    )
    state.reorder(order)
    assert goes_on(state, x, order) == goes_on(picked, x, order)
    assert state.position == (6, 6, 6)


def test_reorder_of_a_shared_state_takes_the_open_chunk_along():
    x, state = begun(per_sequence=False)
    turned = [a[[2, 0, 1]] for a in x.call]
    other = FwPKMState(x.keys, x.table)
    other.extend(*(a[:, :6] for a in turned), **SMALL)
    state.reorder([2, 0, 1])
    # the first chunk was written in another order of sums: rows agree to rounding, the open chunk in every bit
    np.testing.assert_allclose(state.values, other.values, rtol=1e-5, atol=1e-6)
    for mine, want in zip(state._lanes[0].pieces, other._lanes[0].pieces):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(mine[:4], want[:4]))


def test_reset_append_evict():
    x, state = begun()
    fresh = FwPKMState(x.keys, x.table, per_sequence=True)
    state.reset(1)
    assert state.position == (6, 0, 6)
    state.append(2)
    state.evict([0, 2, 4])
    assert state.position == (0, 0)
    assert goes_on(state, x, slice(0, 2)) == goes_on(fresh, x, slice(0, 2))
    state.reset()
    assert goes_on(state, x) == goes_on(fresh, x)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_marks(per_sequence):
    x, state = begun(per_sequence)
    want, mark = goes_on(state, x), state.mark()
    state.extend(*x.tokens(6, 9), **SMALL)
    later = state.mark()
    state.extend(*x.tokens(9, 12), **SMALL)
    state.rollback(later)
    assert np.ravel(state.position)[0] == 9
    for _ in range(2):
        state.rollback(mark)
        assert goes_on(state, x) == want
        state.extend(*x.tokens(6, 12), **SMALL)
    with pytest.raises(errors.ValueRangeError, match="mark"):
        state.rollback(later)
    state.release(mark)
    with pytest.raises(ValueError, match="mark"):
        state.rollback(mark)


@pytest.mark.parametrize("wrong", [0, True, 0.0, [0], None])
def test_a_mark_is_of_its_state_alone(wrong):
    x, state = begun()
    _, other = begun()
    mark, foreign = state.mark(), other.mark()
    want = goes_on(state, x)
    for bad in (wrong, foreign, state.fork().mark()):
        for verb in (state.rollback, state.release):
            with pytest.raises(errors.ValueRangeError, match="mark: expected one of mark"):
                verb(bad)
    state.rollback(mark)
    assert goes_on(state, x) == want


def test_copies_are_forks_and_pickles_are_refused():
    x, state = begun()
    want = goes_on(state, x)
    for made in (copy.copy(state), copy.deepcopy(state)):
        made.extend(*x.tokens(6, 12), **SMALL)
        assert goes_on(state, x) == want
    with pytest.raises(errors.DtypeError, match=r"save\(path\)"):
        pickle.dumps(state)


def test_a_second_thread_is_refused(monkeypatch):
    x, state = begun()
    inside, go_on, found = threading.Event(), threading.Event(), []
    plain = FwPKMState.lanes_for

    def slow(self, *arguments):
        inside.set()
        assert go_on.wait(30)
        return plain(self, *arguments)

    monkeypatch.setattr(FwPKMState, "lanes_for", slow)
    first = threading.Thread(target=lambda: found.append(state.extend(*x.tokens(6, 12), **SMALL)))
    first.start()
    assert inside.wait(30)
    try:
        for verb in (state.fork, state.mark, state.reset, state.flush, lambda: state.extend(*x.tokens(6, 12), **SMALL)):
            with pytest.raises(errors.StateBusy, match="one call at a time"):
                verb()
    finally:
        go_on.set()
        first.join()
    assert found and state.position == (12, 12, 12)
    state.fork()  # and free again


def test_before_the_first_call_there_are_no_sequences():
    x = make_stream(B=3, T=12, m=6, dtype=np.float32)
    state = FwPKMState(x.keys, x.table, per_sequence=True)
    for wrong in (
        lambda: state.evict([0]),
        lambda: state.reset(0),
        lambda: state.reorder([0, 1]),
        lambda: state.fork([5]),
        lambda: state.append(-1),
        lambda: state.append(1.0),
        lambda: state.append(True),
        lambda: state.evict(0),
        lambda: state.reorder(None),
    ):
        with pytest.raises(errors.SdmError, match=r"FwPKMState\.\w+: \w+: expected .* Fix: "):
            wrong()
        assert state.batch is None
    assert state.keys.shape == (0, *x.keys.shape) and state.values.shape == (0, *x.table.shape)
    state.extend(*x.call, **SMALL)
    assert state.batch == 3


def test_steps_are_a_stream():
    x = make_stream(B=2, T=9, dtype=np.float32)
    state, other = FwPKMState(x.keys, x.table), FwPKMState(x.keys, x.table)
    want = state.extend(*x.call, **SMALL)
    got = np.stack([other.step(*(a[:, t] for a in x.call), **SMALL) for t in range(9)], axis=1)
    assert got.tobytes() == want.tobytes()
    assert other.values.tobytes() == state.values.tobytes()


def test_options_left_out_are_those_of_the_last_call(tmp_path):
    x = begun()[0]
    again = [begun()[1], begun()[1].fork()]
    again[0].save(tmp_path / "state.npz")
    again.append(FwPKMState.load(tmp_path / "state.npz"))
    for one in again:
        one.extend(*x.tokens(6, 9), k=1, chunk=2, pairs="wrap", update=False)  # did not enter the stream
        with pytest.raises(errors.DtypeError, match="extend: chunks: expected an option: k, chunk, .* Fix: "):
            one.extend(*x.tokens(6, 9), chunks=2)
    alike = begun()[1].extend(*x.tokens(6, 12), **SMALL)
    assert all(one.extend(*x.tokens(6, 12)).tobytes() == alike.tobytes() for one in again[:2])
    steps = [again[2].step(*(a[:, t] for a in x.tokens(6, 12))) for t in range(6)]
    assert np.stack(steps, axis=1).tobytes() == alike.tobytes()


def test_options_before_the_first_call_are_those_of_fwpkm():
    given = {name: one.default for name, one in inspect.signature(fwpkm).parameters.items()}
    assert all(given[name] == default for name, default in vars(StreamOptions()).items())


def test_reading_only_leaves_the_state_as_it_is():
    x, state = begun()
    want = goes_on(state, x)
    state.extend(*x.tokens(6, 12), **SMALL, update=False)
    assert state.position == (6, 6, 6)
    assert goes_on(state, x) == want


@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
def test_flush_writes_the_open_chunk_as_a_chunk_of_its_length(pairs):
    x = make_stream(B=2, T=7, dtype=np.float32)
    state, short = FwPKMState(x.keys, x.table), FwPKMState(x.keys, x.table)
    options = {"k": 3, "pairs": pairs}
    state.extend(*x.tokens(0, 3), chunk=8, **options)
    state.flush()
    short.extend(*x.tokens(0, 3), chunk=3, **options)
    assert state.values.tobytes() == short.values.tobytes() and state.keys.tobytes() == short.keys.tobytes()
    assert state.values.tobytes() != x.table.tobytes()
    # the next token begins a chunk: a call may now use another grid
    got, want = (s.extend(*x.tokens(3, 7), chunk=4, **options) for s in (state, short))
    assert got.tobytes() == want.tobytes() and state.values.tobytes() == short.values.tobytes()


def test_a_flush_without_a_pair_writes_nothing():
    x = make_stream(B=1, T=1, dtype=np.float32)
    state = FwPKMState(x.keys, x.table)
    state.flush()
    state.extend(*x.call, k=3, chunk=4)
    state.flush()
    assert state.values.tobytes() == x.table.tobytes() and state.keys.tobytes() == x.keys.tobytes()


def test_a_row_table_is_a_table_with_writes_beside_it():
    rng = np.random.default_rng(0)
    base = rng.standard_normal((10, 3))
    want, table = base.copy(), RowTable(RowTable(base))
    for _ in range(5):
        slots, rows = rng.permutation(10)[:3], rng.standard_normal((3, 3))
        want[slots] = rows
        table.put(slots, rows)
        some = rng.integers(0, 10, 6)
        np.testing.assert_array_equal(table.gather(some), want[some])
        np.testing.assert_array_equal(table.fork().dense(), want)
    settled = table.settle()
    assert settled is not table and settled.exclusive
    np.testing.assert_array_equal(settled.dense(), want)


# ---- mistakes ---------------------------------------------------------------------------------------------------

X = make_stream(T=6, dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"queries": X.queries[:, :, :1]}, errors.ShapeError, "queries"),
        ({"queries": X.queries[:, :5]}, errors.ShapeError, "queries"),
        ({"values": X.values[..., :4]}, errors.ShapeError, "values"),
        ({"gates": X.gates[..., None]}, errors.ShapeError, "gates"),
        ({"gates": X.gates.astype(int)}, errors.DtypeError, "gates"),
        ({"state": (X.keys, X.table)}, errors.DtypeError, "FwPKMState"),
        ({"k": 17}, errors.ValueRangeError, "k"),
        ({"k": 1.5}, errors.DtypeError, "k"),
        ({"chunk": 0}, errors.ValueRangeError, "chunk"),
        ({"lookahead": 4}, errors.ValueRangeError, "lookahead"),
        ({"pairs": "keep"}, errors.ValueRangeError, "pairs"),
        ({"scale": 2}, errors.ValueRangeError, "scale"),
        ({"value_rate": float("nan")}, errors.ValueRangeError, "value_rate"),
        ({"key_rate": "1"}, errors.DtypeError, "key_rate"),
        ({"epsilon": 0.0}, errors.ValueRangeError, "epsilon"),
        ({"detach_every": 0}, errors.ValueRangeError, "detach_every"),
        ({"mask": np.ones((2, 5), bool)}, errors.ShapeError, "mask"),
        ({"mask": np.ones((2, 6), int)}, errors.DtypeError, "mask"),
        ({"mask": [[True] * 6] * 2}, errors.DtypeError, "mask"),
        ({"update": "no"}, errors.DtypeError, "update"),
        ({"chunk": 2**70}, errors.ValueRangeError, "chunk"),
        ({"chunk": 10**5000}, errors.ValueRangeError, "chunk"),
        ({"detach_every": 2**70}, errors.ValueRangeError, "detach_every"),
        ({"value_rate": 10**400}, errors.ValueRangeError, "value_rate"),
        ({"value_rate": 1e300}, errors.ValueRangeError, "value_rate"),
        ({"key_rate": 1e-60}, errors.ValueRangeError, "key_rate"),
        ({"epsilon": 1e-60}, errors.ValueRangeError, "epsilon"),
        ({"epsilon": 1e60}, errors.ValueRangeError, "epsilon"),
        ({"epsilon": 10**400}, errors.ValueRangeError, "epsilon"),
        ({"backend": "cuda"}, errors.BackendError, "cuda"),
    ],
)
def test_mistakes_name_the_argument_and_change_nothing(change, error, words):
    state = FwPKMState(X.keys, X.table)
    state.extend(*X.tokens(0, 2), k=3, chunk=4)
    before = state.values.tobytes(), state.keys.tobytes(), state.position
    call = {"queries": X.queries, "values": X.values, "gates": X.gates, "state": state, "k": 3, "chunk": 4, **change}
    with pytest.raises(error, match=rf"fwpkm: .*{words}.* Fix: "):
        fwpkm(**call)
    if "state" not in change:
        del call["state"]
        with pytest.raises(error, match="extend: "):
            state.extend(**call)
    assert (state.values.tobytes(), state.keys.tobytes(), state.position) == before


def test_a_call_that_does_not_go_on_the_stream_is_refused():
    x, state = begun(per_sequence=False)
    with pytest.raises(errors.ShapeError, match="B = 3"):
        state.extend(*(a[:2] for a in x.tokens(6, 12)), **SMALL)
    for other in ({"chunk": 5}, {"pairs": "drop"}, {"lookahead": 2}):
        with pytest.raises(errors.ValueRangeError, match="until the open chunk is written"):
            state.extend(*x.tokens(6, 12), **{**SMALL, **other})
    for verb, argument in (("reset", 0), ("append", 1), ("evict", [0])):
        with pytest.raises(errors.ValueRangeError, match="per_sequence=True"):
            getattr(state, verb)(argument)
    with pytest.raises(errors.ValueRangeError, match=r"indices in \[0, 3\)"):
        state.reorder([3])


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        (X.keys[0], X.table, errors.ShapeError),
        (X.keys, X.table[:-1], errors.ShapeError),
        (X.keys, X.table.astype(np.float64), errors.DtypeError),
        (X.keys.astype(np.float16), X.table.astype(np.float16), errors.DtypeError),
        (X.keys.tolist(), X.table, errors.DtypeError),
        (X.keys[:0], X.table, errors.ShapeError),
        (X.keys[..., :0], X.table, errors.ShapeError),
    ],
)
def test_a_start_that_does_not_fit_is_refused(keys, values, error):
    with pytest.raises(error, match="FwPKMState: "):
        FwPKMState(keys, values)


def test_wrong_kinds_of_states_flags_and_steps_are_refused():
    import sdm_lite

    with pytest.raises(errors.DtypeError, match="per_sequence: expected True or False"):
        FwPKMState(X.keys, X.table, per_sequence="no")
    other = sdm_lite.MemoryState(np.zeros((1, 4, 2), np.float32), batch=1)
    for state in (other, {}, "state"):
        with pytest.raises(errors.DtypeError, match="fwpkm: state: expected an FwPKMState"):
            fwpkm(*X.call, state)
    state, token = FwPKMState(X.keys, X.table), [a[:, 0] for a in X.call]
    with pytest.raises(errors.DtypeError, match="step: queries"):
        state.step(token[0].tolist(), *token[1:])
    with pytest.raises(errors.DtypeError, match="step: mask"):
        state.step(*token, mask=[True, True])
    with pytest.raises(errors.ShapeError, match="step: mask"):
        state.step(*token, mask=np.ones((2, 1), bool))
