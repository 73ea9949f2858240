"""`MemoryState` against the op and a plain model: the same bits after every operation; errors change nothing."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from cases import DELTA_CASES, case_id, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_calls import token
from state_programs import OPERATIONS, Program

import sdm_lite
from sdm_lite import MemoryState, StateFull

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


# ---- torch ------------------------------------------------------------------------------------------------------


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
