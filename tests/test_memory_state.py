"""`MemoryState` against the op and a plain model: the same bits after every operation; errors change nothing."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from cases import DELTA_CASES, case_id, distinct_slots, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_programs import OPERATIONS, Program

import sdm_lite
from sdm_lite import MemoryState, StateBusy, StateFull

#: programs of random operations; very many of them: python tests/support/state_programs.py 50000
PROGRAMS = int(os.environ.get("SDM_LITE_STATE_PROGRAMS", "2000"))
NAMES = ["plain", "narrow_D3", "D17_slot_decay", "D64_W64", "D100", "long", "wipe_slot", "no_tokens", "one_of_each"]


def split_run(state, args, cuts):
    """Run args[:7] in pieces: a piece of one token as a step, the others as extend."""
    readings, tokens = [], args[0].shape[1]
    edges = [0, *cuts, tokens]
    for start, stop in zip(edges, edges[1:]):
        if stop - start == 1:
            readings.append(state.step(*(a[:, start] for a in args[:7]))[:, None])
        else:
            readings.append(state.extend(*(a[:, start:stop] for a in args[:7])))
    return readings


@pytest.mark.parametrize("rule", ["shared", "per_slot"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fields", [f for f in DELTA_CASES if f.lengths is None], ids=case_id)
def test_bits_of_the_op_for_any_split(fields, dtype, rule):
    args = make_case(fields, dtype=dtype, shared_state=True).arguments()
    want, final = sdm_lite.sparse_delta_rule(*args, rule=rule, output_final_state=True)
    tokens = fields.T
    for cuts in ([], range(1, tokens), [c for c in (tokens // 3, tokens // 3 + 1) if 0 < c < tokens]):
        state = MemoryState(args[7], fields.B, rule=rule)
        readings = np.concatenate(split_run(state, args, list(cuts)), axis=1)
        assert np.array_equal(readings, want)
        assert np.array_equal(state.dense(), final)
        assert state.tokens.tolist() == [tokens] * fields.B


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits_of_the_op_in_16_bits(name, dtype):
    torch = pytest.importorskip("torch")
    args = [torch.from_numpy(a) for a in make_case(name, dtype=np.float32, shared_state=True).arguments()]
    args[7] = args[7].to(getattr(torch, dtype))
    want, final = sdm_lite.sparse_delta_rule(*args, output_final_state=True)
    state = MemoryState(args[7], args[0].shape[0])
    readings = torch.cat(split_run(state, args, [1] if args[0].shape[1] > 1 else []), dim=1)
    assert torch.equal(readings, want)
    dense = state.dense()
    assert dense.dtype == args[7].dtype and torch.equal(dense, final)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("name", ["plain", "D100"])
def test_bits_do_not_depend_on_threads(name, threads, monkeypatch, threads_at_any_size):
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
    args = make_case(name, dtype=np.float32, shared_state=True).arguments()
    want, final = sdm_lite.sparse_delta_rule(*args, output_final_state=True)
    state = MemoryState(args[7], args[0].shape[0])
    assert np.array_equal(state.extend(*args[:7]), want) and np.array_equal(state.dense(), final)


def test_bits_do_not_depend_on_the_batch():
    args = make_case("plain", dtype=np.float32, shared_state=True, B=3).arguments()
    together = MemoryState(args[7], 3)
    readings = together.extend(*args[:7])
    for b in range(3):
        alone = MemoryState(args[7], 1)
        assert np.array_equal(alone.extend(*(a[b : b + 1] for a in args[:7])), readings[b : b + 1])
        assert np.array_equal(alone.dense()[0], together.dense()[b])


def test_zeros_need_no_memory():
    args = make_case("plain", dtype=np.float32, shared_state=True).arguments()
    zeros = np.zeros_like(args[7])
    state = MemoryState(zeros.shape, 2)
    want, final = sdm_lite.sparse_delta_rule(*args[:7], zeros, output_final_state=True)
    assert np.array_equal(state.extend(*args[:7]), want) and np.array_equal(state.dense(), final)
    assert state.nbytes().shared == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for thousands of small files, which nobody needs to survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield tmp_path_factory.mktemp("states")


@settings(max_examples=PROGRAMS, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32 - 1),
    program=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=14),
    batch=st.integers(0, 3),
    dtype=st.sampled_from([np.float32, np.float64]),
    rule=st.sampled_from(["shared", "per_slot"]),
    per_slot_decay=st.booleans(),
)
def test_random_programs(folder, seed, program, batch, dtype, rule, per_slot_decay):
    run = Program(np.random.default_rng(seed), dtype, rule, batch, per_slot_decay, folder)
    for operation in program:
        getattr(run, operation)()
        run.check()


# ---- what the programs above do not reach -----------------------------------------------------------------------


def token(rng, shape=(1, 2), slots=64, width=16, writes=4, reads=4, dtype=np.float32):
    """Return the seven arrays of one step (or of extend, with a longer shape)."""
    return [
        rng.standard_normal((*shape, width)).astype(dtype),
        distinct_slots(rng, shape, writes, slots),
        rng.standard_normal((*shape, writes)).astype(dtype),
        -rng.exponential(0.1, shape).astype(dtype),
        rng.uniform(0, 1, shape).astype(dtype),
        distinct_slots(rng, shape, reads, slots),
        rng.standard_normal((*shape, reads)).astype(dtype),
    ]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_sequence_owns_the_rows_it_has_written(rng):
    initial = rng.standard_normal((2, 64, 16)).astype(np.float32)
    state, before = MemoryState(initial, 3), initial.copy()
    assert state.nbytes() == (initial.nbytes, 0)
    call = token(rng, (3, 2))
    state.step(*call)
    state.step(*call)  # the same slots again
    assert state.nbytes() == (initial.nbytes, 3 * 2 * 4 * 16 * 4)
    assert np.array_equal(initial, before)
    state.evict([0, 2])
    assert state.nbytes().owned == 2 * 4 * 16 * 4
    state.reset(0)
    assert state.nbytes().owned == 0 and np.array_equal(state.dense()[0], initial)


def test_forks_share_until_one_writes_and_give_back_when_gone(rng):
    state = MemoryState((2, 64, 16), 1)
    for _ in range(5):
        state.step(*token(rng))
    owned = state.nbytes().owned
    forks = [state.fork([0, 0]) for _ in range(3)]
    assert state.nbytes().owned == owned
    forks[0].step(*token(rng, (2, 2)))
    assert state.nbytes().owned == owned + 2 * 2 * 4 * 16 * 4
    del forks
    gc.collect()
    assert state.nbytes().owned == owned


def test_a_fork_copies_an_index_of_the_rows_owned_whatever_the_slots(rng):
    copied = []
    for slots in (64, 1 << 20):
        state = MemoryState((2, slots, 16), 1)
        for call in [token(rng) for _ in range(5)]:  # the same slots, below 64
            state.step(*call)
        copied.append(state.fork([0])._index.table.nbytes)
        assert copied[-1] <= 32 * 2 * 5 * 4
    assert len(set(copied)) == 1


def test_rollback_copies_no_rows_and_release_frees_them(rng):
    state = MemoryState((2, 64, 16), 1)
    for _ in range(3):
        state.step(*token(rng))
    owned, dense = state.nbytes().owned, state.dense()
    mark = state.mark()
    for _ in range(20):  # more than once over every slot: a mark keeps one old row each, not one for each write
        state.step(*token(rng, writes=16))
    assert state.nbytes().owned <= owned + 2 * 64 * 16 * 4
    state.rollback(mark)
    assert state.nbytes().owned == owned and np.array_equal(state.dense(), dense)
    state.step(*token(rng))
    state.release(mark)
    held = int((state._index.table[:, :, 1] >= 0).sum())
    assert state.nbytes().owned == held * 16 * 4


def test_rollback_of_k_tokens_takes_back_k_tokens_of_rows(rng):
    state = MemoryState((1, 5000, 4), 1)
    for _ in range(50):
        state.step(*token(rng, (1, 1), slots=5000, width=4, writes=32))
    mark = state.mark()
    for _ in range(3):
        state.step(*token(rng, (1, 1), slots=5000, width=4, writes=32))
    assert sum(len(record) for record in state._log.records) <= 3 * 32  # rows named, out of about 1,400 owned
    state.rollback(mark)
    assert not state._log.records


def test_state_full_changes_nothing(rng):
    state = MemoryState((2, 64, 16), 1, max_bytes=2 * 6 * 16 * 4)
    state.step(*token(rng))
    dense, owned = state.dense(), state.nbytes()
    more = token(rng, (1, 5, 2))
    for _ in range(2):
        with pytest.raises(StateFull, match="max_bytes"):
            state.extend(*more)
        assert np.array_equal(state.dense(), dense) and state.nbytes() == owned and state.tokens.tolist() == [1]
    with pytest.raises(MemoryError):
        state.extend(*more)
    state.reset(0)
    state.step(*[a[:, 0] for a in more])


def test_pages_that_cannot_be_had_change_nothing(rng, monkeypatch):
    state = MemoryState((2, 64, 16), 1)
    state.step(*token(rng))
    dense, owned = state.dense(), state.nbytes()
    state._pool.pages.clear()  # as if the next page were needed
    kept = state._pool.pages

    def refuse(shape, dtype):
        raise MemoryError("no pages")

    from sdm_lite.memory_state import pool

    monkeypatch.setattr(pool.memory, "empty", refuse)
    with pytest.raises(MemoryError, match="no pages"):
        state.step(*token(rng))
    assert state.nbytes() == owned and state.tokens.tolist() == [1] and kept == []
    del dense


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


def test_two_states_in_two_threads(rng, threads_at_any_size):
    initial = rng.standard_normal((2, 64, 16)).astype(np.float32)
    parent = MemoryState(initial, 2)
    parent.extend(*token(rng, (2, 9, 2)))
    calls = [[token(rng, (2, 2)) for _ in range(60)] for _ in range(2)]
    alone = [parent.fork([0, 1]) for _ in range(2)]
    want = [[state.step(*call) for call in some] for state, some in zip(alone, calls)]
    forks, got = [parent.fork([0, 1]), parent], [[], []]
    threads = [
        threading.Thread(target=lambda i=i: got[i].extend(forks[i].step(*call) for call in calls[i])) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(np.array_equal(a, b) for a, b in zip(got[i], want[i])) and len(got[i]) == 60
        assert np.array_equal(forks[i].dense(), alone[i].dense())


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


def test_inputs_of_any_layout_and_integer(rng):
    call, state, other = token(rng), MemoryState((2, 64, 16), 1), MemoryState((2, 64, 16), 1)
    odd = [np.asfortranarray(a.astype(np.int64) if a.dtype == np.int32 else a.astype(np.float64)) for a in call]
    for a in odd:
        a.setflags(write=False)
    readings = other.step(*odd)
    assert readings.dtype == np.float64
    assert np.array_equal(readings.astype(np.float32), state.step(*call)) and np.array_equal(
        state.dense(), other.dense()
    )


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


# ---- torch ------------------------------------------------------------------------------------------------------


def tensors(call):
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(a) for a in call]


def test_torch_in_torch_out_without_gradients(rng):
    torch = pytest.importorskip("torch")
    initial = torch.from_numpy(rng.standard_normal((2, 64, 16)).astype(np.float32))
    state, mirror = MemoryState(initial, 1), MemoryState(initial.numpy(), 1)
    call = token(rng)
    assert torch.equal(state.step(*tensors(call)), torch.from_numpy(mirror.step(*call)))
    assert torch.equal(state.dense(), torch.from_numpy(mirror.dense()))
    initial_at = state._initial.bits.ctypes.data
    assert initial_at == initial.data_ptr()  # by reference
    wants = tensors(call)
    wants[0].requires_grad_()
    with pytest.raises(ValueError, match="values: expected tensors without gradients"):
        state.step(*wants)
    with torch.no_grad():
        state.step(*wants)
    with pytest.raises(ValueError, match="detach"):
        MemoryState(torch.nn.Parameter(initial), 1)
    with torch.inference_mode():
        made_inside = MemoryState(initial, 1)
        made_inside.step(*tensors(call))
        state.step(*tensors(call))
    made_inside.step(*tensors(call))


def test_a_repeated_step_of_tensors_is_checked_where_they_differ(rng):
    torch = pytest.importorskip("torch")
    state, plain = MemoryState((2, 64, 16), 1, dtype=torch.float32), MemoryState((2, 64, 16), 1)
    calls = [token(rng) for _ in range(3)]
    for call in calls[:2]:
        assert torch.equal(state.step(*tensors(call)), torch.from_numpy(plain.step(*call)))
    wants = tensors(calls[2])
    wants[2].requires_grad_()
    with pytest.raises(ValueError, match="write_weights: expected tensors without gradients"):
        state.step(*wants)
    away = tensors(calls[2])
    away[4] = away[4].to("meta")
    with pytest.raises(sdm_lite.DeviceError, match="beta"):
        state.step(*away)
    with pytest.raises(sdm_lite.DtypeError, match="all of one kind"):
        state.step(*tensors(calls[2])[:6], calls[2][6])
    with torch.no_grad():
        assert torch.equal(state.step(*wants), torch.from_numpy(plain.step(*calls[2])))
    halves = [a if a.dtype == torch.int32 else a.bfloat16() for a in tensors(calls[2])]
    readings = [state.fork([0]).step(*halves), state.step(*halves)]
    assert readings[0].dtype == torch.bfloat16 and torch.equal(*readings)


def test_torch_compile_serves_every_state_with_one_graph(rng):
    torch = pytest.importorskip("torch")
    initial = torch.from_numpy(rng.standard_normal((2, 64, 16)).astype(np.float32))
    eager = MemoryState(initial, 1)
    with torch.inference_mode():
        made_inside = eager.fork([0])
    states = [eager.fork([0]), eager.fork([0]), made_inside]
    calls = [tensors(token(rng)) for _ in range(2)]

    def two_tokens(state, first, second):
        state.step(*first)  # its readings are not used: it must not be dropped
        return state.step(*second) * 2

    want = two_tokens(eager, *calls)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    for backend, fullgraph in ((count, True), ("aot_eager", True)):
        compiled = torch.compile(two_tokens, fullgraph=fullgraph, backend=backend)
        copies = [state.fork([0]) for state in states]
        for state in copies:
            assert torch.equal(compiled(state, *calls), want)
            assert torch.equal(state.dense(), eager.dense()) and state.tokens.tolist() == [2]
    assert len(graphs) == 1


def test_the_op_keeps_its_promises_to_torch(rng):
    torch = pytest.importorskip("torch")
    from sdm_lite import torch_state

    state = MemoryState((2, 64, 16), 1, dtype=torch.float32)
    call = tensors(token(rng, (1, 3, 2)))
    torch.library.opcheck(
        torch_state.memory_state_advance, (*call, state._handle, "test"), test_utils=("test_schema", "test_faketensor")
    )


# ---- the page ---------------------------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_page_shows_what_the_example_prints(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "fork_and_rollback.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"```text\n{result.stdout}```" in (ROOT / "docs" / "state.md").read_text()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_fork(duplicate):
    args = make_case("plain", shared_state=True).arguments()
    state = MemoryState(args[7], args[0].shape[0])
    state.extend(*args[:7])
    want = state.dense()
    twin = duplicate(state)
    assert np.array_equal(twin.dense(), want) and twin.tokens.tolist() == state.tokens.tolist()
    twin.extend(*args[:7])
    assert np.array_equal(state.dense(), want) and not np.array_equal(twin.dense(), want)
    del twin
    gc.collect()
    other = state.fork([0])
    other.reset(0)  # settles what the copy gave back; rows it gave out again would now be written
    other.extend(*(a[:1] for a in args[:7]))
    assert np.array_equal(state.dense(), want)


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
