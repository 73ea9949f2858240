"""Streams of fast weights: any cutting, any thread count, gradients over chunks, and awkward inputs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fwpkm_cases import make_mask, make_stream
from naive_fwpkm import stream, write
from tolerances import relative_error, tolerance

from sdm_lite import FwPKMState, autograd, fwpkm
from sdm_lite.autograd import Tensor, check_grads

BACKENDS = ["reference", "cpu"]
PAIRS = ["drop", "carry", "wrap"]
SMALL = {"k": 3, "chunk": 4}
DEFAULTS = {"lookahead": 1, "pairs": "drop", "scale": "norm", "value_rate": 1.0, "key_rate": 1.0, "epsilon": 1e-3}


def state_of(x, **options):
    return FwPKMState(x.keys, x.table, **options)


def in_pieces(x, cuts, mask=None, per_sequence=False, **options):
    """Return readings and state of the stream cut at `cuts`."""
    state, readings = state_of(x, per_sequence=per_sequence), []
    for start, stop in itertools.pairwise([0, *cuts, x.gates.shape[1]]):
        part = None if mask is None else mask[:, start:stop]
        readings.append(state.extend(*x.tokens(start, stop), mask=part, **options))
    return np.concatenate(readings, axis=1), state


def same(state, other) -> bool:
    return state.keys.tobytes() == other.keys.tobytes() and state.values.tobytes() == other.values.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_any_cutting_gives_the_same_bits(per_sequence, dtype, pairs, backend):
    x, mask = make_stream(T=18, half=7, D=19, dtype=dtype), make_mask((2, 18))
    options = {**SMALL, "pairs": pairs, "lookahead": 2, "backend": backend, "mask": mask, "per_sequence": per_sequence}
    whole, state = in_pieces(x, [], **options)
    for cuts in ([4, 8, 12, 16], [1, 2, 3, 9, 9, 17], list(range(1, 18)), [11]):
        pieces, other = in_pieces(x, cuts, **options)
        assert pieces.tobytes() == whole.tobytes(), cuts
        assert same(state, other), cuts
        assert state.position == other.position


def test_a_screened_batch_and_single_tokens_give_the_same_bits():
    # 96 tokens at once go through the screen, one token does not
    x = make_stream(B=1, T=96, m=40, half=9, D=8, dtype=np.float32)
    options = {"k": 4, "chunk": 96}
    whole, state = in_pieces(x, [], **options)
    pieces, other = in_pieces(x, list(range(1, 96)), **options)
    assert pieces.tobytes() == whole.tobytes()
    assert same(state, other)


@pytest.mark.usefixtures("threads_at_any_size")
@pytest.mark.parametrize("pairs", PAIRS)
def test_any_thread_count_gives_the_same_bits(pairs, monkeypatch):
    x, results = make_stream(T=70, m=20, half=35, D=70, dtype=np.float32), []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
        tensors = [Tensor(a, requires_grad=True) for a in x]
        readings, state = fwpkm(*tensors[:3], FwPKMState(*tensors[3:]), k=4, chunk=32, pairs=pairs)
        (readings * readings).sum().backward()
        results.append([readings.data, state.keys, state.values, *(t.grad for t in tensors)])
    for other in results[1:]:
        assert [a.tobytes() for a in other] == [a.tobytes() for a in results[0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_and_in_place_agree_and_the_functional_leaves_its_state(backend):
    x = make_stream(T=9)
    before = state_of(x)
    readings, after = fwpkm(*x.call, before, **SMALL, backend=backend)
    assert before.values.tobytes() == x.table.tobytes() and before.keys.tobytes() == x.keys.tobytes()
    assert before.position == 0 and after.position == 9
    assert before.extend(*x.call, **SMALL, backend=backend).tobytes() == readings.tobytes()
    assert same(before, after)


def test_the_state_is_not_aliased():
    x = make_stream(T=9)
    want = fwpkm(*x.call, fwpkm(*x.call, state_of(x), **SMALL)[1], **SMALL)[0]
    keys, table, call = x.keys.copy(), x.table.copy(), [a.copy() for a in x.call]
    state = FwPKMState(keys, table)
    keys[:], table[:] = np.nan, np.nan
    state.extend(*call, **SMALL)
    for a in call:
        a[:] = np.nan  # the open chunk is a copy
    state.values[:] = np.nan
    assert state.extend(*x.call, **SMALL).tobytes() == want.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_no_token_reads_keep_their_bits(backend):
    x = make_stream(B=1, T=4, m=16)
    x.table[::7] = -0.0
    readings, state = fwpkm(*x.call, state_of(x), k=2, chunk=4, backend=backend)
    changed = np.flatnonzero((state.values.view(np.uint64) != x.table.view(np.uint64)).any(1))
    import sdm_lite

    read = np.unique(sdm_lite.idw_product_key_topk(x.queries, x.keys, 2, backend=backend)[1])
    assert len(changed) and set(changed) <= set(read)
    assert len(changed) <= 4 * 2 * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("short", "lookahead"), [(1, 2), (1, 3), (2, 3)])
def test_tokens_carried_from_a_short_chunk_keep_their_targets(short, lookahead, backend):
    x = make_stream(T=short + 8)
    options = {"k": 3, "chunk": 8, "lookahead": lookahead, "pairs": "carry", "backend": backend}
    state = state_of(x)
    state.extend(*x.tokens(0, short), **options)
    state.flush(backend=backend)
    assert state.values.tobytes() == x.table.tobytes(), "no pair of its own"
    state.extend(*x.tokens(short, short + 8), **options)
    q, v, g, keys, table = (torch.tensor(a) for a in x)
    mask = torch.ones(g.shape, dtype=torch.bool)
    carried = q[:, :short], g[:, :short], mask[:, :short]
    plain = {**DEFAULTS, "k": 3, "lookahead": lookahead, "pairs": "carry"}
    want = write(q[:, short:], v[:, short:], g[:, short:], mask[:, short:], carried, keys, table, **plain)
    assert relative_error(state.keys, want[0].detach()) <= 1e-14
    assert relative_error(state.values, want[1].detach()) <= 1e-14


def test_a_target_beyond_a_short_chunk_is_no_pair():
    x = make_stream(B=1, T=3)
    state, options = state_of(x), {"k": 3, "chunk": 8, "lookahead": 2, "pairs": "carry"}
    state.extend(*x.tokens(0, 1), **options)
    state.flush()
    state.extend(*x.tokens(1, 2), **options)
    state.flush()  # the first token's target is the third
    assert state.values.tobytes() == x.table.tobytes()
    state.extend(*x.tokens(2, 3), **options)
    state.flush()
    assert state.values.tobytes() != x.table.tobytes()


def test_a_call_without_tokens_changes_nothing():
    x = make_stream(T=12)
    tensors = [Tensor(a, requires_grad=True) for a in x]
    state = FwPKMState(*tensors[3:])
    state.extend(*x.tokens(0, 0), **SMALL)
    readings = state.extend(*tensors[:3], **SMALL)
    readings.sum().backward()
    assert tensors[4].grad is not None, "the start's gradient is for the first call with tokens"
    other, options = state_of(x), {**SMALL, "pairs": "carry", "lookahead": 2}
    other.extend(*x.tokens(0, 4), **options)
    want = other.fork()
    other.extend(*x.tokens(4, 4), **{**options, "pairs": "drop", "lookahead": 1})
    assert other._options == want._options
    got, expected = (s.extend(*x.tokens(4, 12), **options) for s in (other, want))
    assert got.tobytes() == expected.tobytes() and same(other, want)


# ---- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", ["norm", "paper", "code"])
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("mse_to_keys", [False, True])
def test_slow_gradients_over_three_chunks_are_those_of_torch(mse_to_keys, pairs, scale, backend):
    x, mask = make_stream(T=11), make_mask((2, 11))
    rates = {"value_rate": 0.7, "key_rate": 0.4}
    options = {**DEFAULTS, "pairs": pairs, "scale": scale, **rates, "mse_to_keys": mse_to_keys}
    upstream = np.random.default_rng(1).standard_normal(x.values.shape)
    tensors = [Tensor(a, requires_grad=True) for a in x]
    readings, _ = fwpkm(*tensors[:3], FwPKMState(*tensors[3:]), **SMALL, **options, mask=mask, backend=backend)
    (readings * upstream).sum().backward()
    leaves = [torch.tensor(a, requires_grad=True) for a in x]
    want, _, _ = stream(*leaves[:3], torch.tensor(mask), *leaves[3:], **SMALL, **options)
    (want * torch.tensor(upstream)).sum().backward()
    assert relative_error(readings.data, want.detach()) <= tolerance("fwpkm", "float64")
    for got, leaf in zip(tensors, leaves):
        assert relative_error(got.grad, leaf.grad) <= tolerance("fwpkm", "float64")


@pytest.mark.parametrize("mse_to_keys", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_slow_gradients_agree_with_differences(backend, mse_to_keys):
    # few slots, all of them read: no selection can change within the checker's steps
    x = make_stream(T=9, H=1, m=2, half=2, D=2)

    def f(queries, values, gates, keys, table):
        state = FwPKMState(keys, table)
        options = {"k": 4, "chunk": 3, "key_rate": 0.1, "mse_to_keys": mse_to_keys, "backend": backend}
        return fwpkm(queries, values, gates, state, **options)[0]

    check_grads(f, list(x), tolerance=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_call_in_mid_chunk(backend):
    # the past is a constant; its tokens' reads still depend on the weights at the call's start
    x = make_stream(T=10, H=1, m=2, half=2, D=2)
    options = {"k": 4, "chunk": 4, "pairs": "carry", "backend": backend}
    start = state_of(x)
    start.extend(*x.tokens(0, 6), **options)

    def f(queries, values, gates):
        return fwpkm(queries, values, gates, start, **options)[0]

    check_grads(f, list(x.tokens(6, 10)), tolerance=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_truncation(backend):
    x = make_stream(T=12)
    mask = np.ones((2, 12), bool)
    tensors = [Tensor(a, requires_grad=True) for a in x]
    readings, _ = fwpkm(*tensors[:3], FwPKMState(*tensors[3:]), **SMALL, detach_every=2, backend=backend)
    readings.sum().backward()
    leaves = [torch.tensor(a, requires_grad=True) for a in x]
    want, _, _ = stream(*leaves[:3], torch.tensor(mask), *leaves[3:], **SMALL, **DEFAULTS, detach_every=2)
    want.sum().backward()
    for got, leaf in zip(tensors, leaves):
        assert relative_error(got.grad, leaf.grad) <= tolerance("fwpkm", "float64")


def test_nothing_flows_between_calls():
    x = make_stream(T=8)
    tensors = [Tensor(a, requires_grad=True) for a in x]
    first = [t[:, :4] for t in tensors[:3]]
    _, state = fwpkm(*first, FwPKMState(*tensors[3:]), **SMALL)
    readings, _ = fwpkm(*[t[:, 4:] for t in tensors[:3]], state, **SMALL)
    readings.sum().backward()
    assert tensors[3].grad is None and tensors[4].grad is None
    assert not tensors[0].grad[:, :4].any() and tensors[0].grad[:, 4:].any()


def test_a_second_backward_adds_the_same_numbers():
    x = make_stream(T=9)
    tensors = [Tensor(a, requires_grad=True) for a in x]
    state = FwPKMState(*tensors[3:])
    readings = state.extend(*tensors[:3], **SMALL)
    loss = (readings * readings).sum()
    loss.backward()
    first = [t.grad.copy() for t in tensors]
    state.extend(*x.call, **SMALL)  # writes on, over the rows that the call above read
    loss.backward()
    for before, t in zip(first, tensors):
        np.testing.assert_array_equal(t.grad, 2 * before)


# ---- awkward inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0), (2, 3)])
def test_empty_and_short_calls(B, T, per_sequence, backend):
    x = make_stream(B=B, T=T)
    tensors = [Tensor(a, requires_grad=True) for a in x[:3]]
    readings, state = fwpkm(*tensors, state_of(x, per_sequence=per_sequence), **SMALL, backend=backend)
    assert readings.shape == (B, T, 5)
    if B and not per_sequence:  # shorter than a chunk: nothing is written
        assert state.values.tobytes() == x.table.tobytes() and state.keys.tobytes() == x.keys.tobytes()
    if readings.requires_grad:
        readings.sum().backward()
        assert tensors[0].grad.shape == x.queries.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", PAIRS)
def test_a_stream_without_a_valid_token_writes_nothing(pairs, backend):
    x, mask = make_stream(T=9), np.zeros((2, 9), bool)
    tensors = [Tensor(a, requires_grad=True) for a in x]
    readings, state = fwpkm(*tensors[:3], FwPKMState(*tensors[3:]), **SMALL, mask=mask, pairs=pairs, backend=backend)
    assert state.values.tobytes() == x.table.tobytes() and state.keys.tobytes() == x.keys.tobytes()
    assert np.isfinite(readings.data).all()
    readings.sum().backward()
    assert all(np.isfinite(t.grad).all() for t in (tensors[0], tensors[3], tensors[4]))
    assert tensors[1].grad is None or not tensors[1].grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["queries", "values", "gates"])
def test_a_nan_reaches_what_depends_on_it_and_no_more(where, backend):
    x = make_stream(B=1, T=8, H=1, m=30)
    bad = {name: a.copy() for name, a in x._asdict().items()}
    bad[where][0, 1] = np.nan  # in the first of two chunks
    options = {"k": 2, "chunk": 4, "key_rate": 0.0, "backend": backend}
    clean, good = fwpkm(*x.call, state_of(x), **options)
    readings, state = fwpkm(bad["queries"], bad["values"], bad["gates"], state_of(x), **options)
    hurt = np.isnan(readings).any(-1)[0]
    assert hurt[:4].tolist() == [False, where == "queries", False, False]
    rows = np.isnan(state.values).any(1)
    assert rows.any() and rows.sum() <= 2 * 2
    np.testing.assert_array_equal(readings[0, :4][~hurt[:4]], clean[0, :4][~hurt[:4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_a_masked_token_reaches_nothing(backend):
    x, mask = make_stream(T=8), np.ones((2, 8), bool)
    mask[0, 2] = False
    want, clean = fwpkm(*x.call, state_of(x), **SMALL, mask=mask, backend=backend)
    bad = [a.copy() for a in x.call]
    for a in bad:
        a[0, 2] = np.nan
    readings, state = fwpkm(*bad, state_of(x), **SMALL, mask=mask, backend=backend)
    # the token's own reading apart; the rows of a NaN query are others than before, and none is written for it
    keep = np.ones((2, 8), bool)
    keep[0, 2] = False
    assert readings[keep].tobytes() == want[keep].tobytes()
    assert same(state, clean)


def test_per_sequence_results_do_not_depend_on_batch_mates():
    x, y = make_stream(B=3, T=9), make_stream(B=3, T=9, seed=1)
    alone = fwpkm(*(a[1:2] for a in x.call), state_of(x, per_sequence=True), **SMALL)
    mixed = [b.copy() for b in y.call]
    for a, b in zip(x.call, mixed):
        b[1] = a[1]
    together = fwpkm(*mixed, state_of(x, per_sequence=True), **SMALL)
    assert together[0][1].tobytes() == alone[0][0].tobytes()
    assert together[1].values[1].tobytes() == alone[1].values[0].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_inputs_of_another_dtype_than_the_state(dtype):
    x = make_stream(T=5).astype(np.float32)
    call = [Tensor(a.astype(dtype), requires_grad=True) for a in x.call]
    readings, state = fwpkm(*call, state_of(x), **SMALL)
    assert readings.dtype == dtype and state.values.dtype == np.float32
    want, _ = fwpkm(*(c.data.astype(np.float32) for c in call), state_of(x), **SMALL)
    np.testing.assert_array_equal(readings.data, want.astype(dtype))
    autograd.sum(readings).backward()
    assert [c.grad.dtype for c in call[:1]] == [dtype]


def test_values_may_be_strided_and_read_only():
    x = make_stream(T=9)
    strided = [np.repeat(a, 2, axis=1)[:, ::2] for a in x.call]
    for a in strided:
        a.flags.writeable = False
    assert fwpkm(*strided, state_of(x), **SMALL)[0].tobytes() == fwpkm(*x.call, state_of(x), **SMALL)[0].tobytes()
