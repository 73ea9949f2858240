"""What users of such ops rely on, checked through the public functions: R1, R2, R4, R5, R7, R8, R9."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import cases
import numpy as np
import pytest

import sdm_lite

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("threads_at_any_size")

ROOMS = ["cpu", "reference"]
STATE_DTYPES = ["float32", "float64", "bfloat16", "float16"]
GRADIENTS = (0, 2, 3, 4, 6, 7)  # the arguments that have one


def tensors(case: cases.Case, state_dtype: str = "float32") -> list:
    """Return the op's eight arguments as tensors, the state in the dtype named."""
    call = [torch.from_numpy(np.ascontiguousarray(x)) for x in case.arguments()]
    call[7] = call[7].to(getattr(torch, state_dtype))
    return call


def differentiate(call: list, dreadings, dfinal=None, **options) -> list:
    """Return readings, final state and the six gradients."""
    call = list(call)
    for i in GRADIENTS:
        call[i] = call[i].detach().clone().requires_grad_()
    readings, final = sdm_lite.sparse_delta_rule(*call, output_final_state=True, **options)
    upstream = [dreadings, torch.zeros_like(final) if dfinal is None else dfinal.to(final.dtype)]
    torch.autograd.backward([readings, final], upstream)
    return [readings.detach(), final.detach(), *(call[i].grad for i in GRADIENTS)]


def bits(results) -> list[bytes]:
    return [x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in results]


# ---- R1: any split, any packing, any batch ------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("cuts", [(1,), (0, 64, 65), (33, 100), tuple(range(1, 130))], ids=["1", "64", "33", "each"])
@pytest.mark.parametrize("rule", ["shared", "per_slot"])
def test_r1_any_split_gives_the_same_bits(rule, cuts, state_dtype):
    call = tensors(cases.make_case("long_uniform", dtype=np.float32), state_dtype)
    want, want_final = sdm_lite.sparse_delta_rule(*call, rule=rule, output_final_state=True)
    state, updated, readings, readings_ = call[7], call[7].clone(), [], []
    for start, stop in itertools.pairwise((0, *cuts, 130)):
        part = [x[:, start:stop] for x in call[:7]]
        y, state = sdm_lite.sparse_delta_rule(*part, state, rule=rule, output_final_state=True)
        readings.append(y)
        readings_.append(sdm_lite.sparse_delta_rule_(*part, updated, rule=rule))
    assert bits([torch.cat(readings, 1), state]) == bits([want, want_final])
    assert bits([torch.cat(readings_, 1), updated]) == bits([want, want_final])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("name", ["packed", "packed_shared"])
def test_r1_packed_sequences_are_the_separate_ones(name, backend, state_dtype):
    """Bit for bit, gradients too; an empty sequence hands its state, and the gradient of it, through."""
    case = cases.make_case(name, dtype=np.float32)
    call, options = tensors(case, state_dtype), dict(backend=backend)
    dreadings, dfinal = torch.from_numpy(case.dreadings), torch.from_numpy(case.dfinal).to(call[7].dtype)
    cu_seqlens = torch.from_numpy(case.inputs.cu_seqlens)
    got = differentiate(call, dreadings, dfinal, cu_seqlens=cu_seqlens, **options)
    shared = case.fields.shared_state
    total = torch.zeros_like(call[7])
    for s, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        own = call[7] if shared else call[7][s : s + 1]
        part = [x[:, start:stop] for x in call[:7]]
        want = differentiate([*part, own], dreadings[:, start:stop], dfinal[s : s + 1], **options)
        mine = [got[0][:, start:stop], got[1][s : s + 1], *(x[:, start:stop] for x in got[2:7])]
        assert bits(mine) == bits(want[:7])
        if shared:
            total += want[7]
        else:
            assert bits([got[7][s : s + 1]]) == bits(want[7:])
            if start == stop:
                assert bits(mine[1:2]) == bits([own]) and bits(want[7:]) == bits([dfinal[s : s + 1]])
    if shared and state_dtype in ("float32", "float64"):  # a 16-bit total is rounded once, not at every sequence
        assert bits([total]) == bits(got[7:])


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_r1_a_sequence_does_not_depend_on_its_batch(state_dtype):
    case = cases.make_case("plain", dtype=np.float32, B=3, T=40, D=80)
    call = tensors(case, state_dtype)
    dreadings, dfinal = torch.from_numpy(case.dreadings), torch.from_numpy(case.dfinal)
    together = differentiate(call, dreadings, dfinal)
    for b in range(3):
        alone = differentiate([x[b : b + 1] for x in call], dreadings[b : b + 1], dfinal[b : b + 1])
        assert bits(x[b : b + 1] for x in together) == bits(alone)


# ---- R2: gate extremes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("restore", ["hybrid", "snapshot", "invert"])
@pytest.mark.parametrize("rule", ["shared", "per_slot"])
@pytest.mark.parametrize("decay", ["head", "slot"])
@pytest.mark.parametrize("log_decay", [-88.0, -104.0, -1e4, -math.inf])
def test_r2_gate_extremes(log_decay, decay, rule, restore, backend):
    case = cases.make_case("plain", dtype=np.float32, decay=decay, T=12)
    call = tensors(case)
    steep = torch.zeros(call[3].shape, dtype=torch.bool)
    steep[:, [0, 5, 6]] = True
    call[3] = torch.where(steep, log_decay, call[3])
    results = differentiate(call, torch.from_numpy(case.dreadings), rule=rule, restore=restore, backend=backend)
    assert all(torch.isfinite(x).all() for x in results)
    gradient = results[2 + GRADIENTS.index(3)]
    if log_decay < -103.98:  # exp() of which is 0 in float32
        assert not gradient[steep].any()
    assert gradient[~steep].any()


@pytest.mark.parametrize("backend", ROOMS)
def test_r2_a_gate_of_zero_decays_nothing(backend):
    """One slot half way to 1 at each token, exactly; and -0, or a zero for each slot, are the same zero."""
    one, slot = np.ones((1, 5, 1, 1), np.float32), np.zeros((1, 5, 1, 1), np.int32)
    gate = np.zeros((1, 5, 1), np.float32)
    halves = sdm_lite.sparse_delta_rule(
        one, slot, one, gate, gate + 0.5, slot, one, np.zeros((1, 1, 1, 1), np.float32), backend=backend
    )[0]
    assert halves.ravel().tolist() == [0.5, 0.75, 0.875, 0.9375, 0.96875]

    call = list(cases.make_case("no_decay", dtype=np.float32).arguments())
    want = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    for zeros in (-call[3], np.repeat(call[3][..., None], 6, axis=-1)):
        got = sdm_lite.sparse_delta_rule(*call[:3], zeros, *call[4:], output_final_state=True, backend=backend)
        assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.parametrize("backend", ROOMS)
def test_r2_a_wipe_forgets_everything_before_it(backend):
    """Of finite rows, exactly."""
    call = list(cases.make_case("all_slots", dtype=np.float32).arguments())
    call[3] = call[3].copy()
    call[3][:, 5] = -np.inf
    after = [x[:, 5:] for x in call[:7]]
    readings, final = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    fresh = np.zeros_like(call[7])
    want, want_final = sdm_lite.sparse_delta_rule(*after, fresh, output_final_state=True, backend=backend)
    assert np.array_equal(readings[:, 5:], want) and np.array_equal(final, want_final)


# ---- NaN stays where it belongs -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the last pattern is a signalling NaN
@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("pattern", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_a_nan_value_stays_in_its_column_and_rows(pattern, state_dtype, backend):
    case = cases.make_case("plain", dtype=np.float32, B=1, H=1, T=9, D=70, W=3, N=40)
    call = tensors(case, state_dtype)
    clean, clean_final = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    values = call[0].clone()
    values.view(torch.int32)[0, 4, 0, 65] = np.array(pattern, np.uint32).view(np.int32).item()
    readings, final = sdm_lite.sparse_delta_rule(values, *call[1:], output_final_state=True, backend=backend)
    poisoned = set(call[1][0, 4, 0].tolist())
    for t in range(5, 9):  # a token that writes a poisoned row predicts NaN, and poisons its others
        if poisoned & set(call[1][0, t, 0].tolist()):
            poisoned |= set(call[1][0, t, 0].tolist())
    nan = torch.isnan(final)
    assert set(nan[0, 0, :, 65].nonzero().flatten().tolist()) == poisoned
    assert nan.sum() == len(poisoned) and not torch.isnan(readings[:, :4]).any()
    others = [c for c in range(70) if c != 65]
    assert bits([readings[..., others], final[..., others]]) == bits([clean[..., others], clean_final[..., others]])
    untouched = [n for n in range(40) if n not in poisoned]
    assert bits([final[:, :, untouched]]) == bits([clean_final[:, :, untouched]])


# ---- R3: what was handed out stays as it is -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_r3_results_outlive_later_calls(kind):
    """The cpu room keeps memory between calls: what a caller holds, a slice of it even, is not in it."""
    kept = []
    for seed in range(6):
        case = cases.make_case("plain", seed, np.float32, B=1, T=60, H=2, N=300, D=600, W=4, R=4)  # 288 kB of readings
        if kind == "numpy":
            results = sdm_lite.sparse_delta_rule(*case.arguments(), output_final_state=True)
        else:
            results = differentiate(tensors(case), torch.from_numpy(case.dreadings))
        parts = [x[:, 1:] for x in results]  # the whole arrays die here, their memory must not
        del results
        kept.append((parts, [np.asarray(x).copy() for x in parts]))
    for parts, copies in kept:
        assert all(np.array_equal(part, copy) for part, copy in zip(parts, copies))
    for i, (first, _) in enumerate(kept):
        for second, _ in kept[:i]:
            assert not any(np.shares_memory(np.asarray(a), np.asarray(b)) for a in first for b in second)


# ---- R4: upstream gradients of any layout -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ROOMS)
def test_r4_upstream_gradients_of_any_layout(backend):
    call = tensors(cases.make_case("plain", dtype=np.float32))
    ones = torch.ones(call[0].shape)
    want = bits(differentiate(call, ones, backend=backend)[2:])
    for i in GRADIENTS:
        call[i].requires_grad_()
    sdm_lite.sparse_delta_rule(*call, backend=backend)[0].sum().backward()
    assert bits(call[i].grad for i in GRADIENTS) == want
    for i in GRADIENTS:
        call[i].grad = None
    transposed = torch.ones(call[0].shape[::-1]).permute(3, 2, 1, 0)
    sdm_lite.sparse_delta_rule(*call, backend=backend)[0].backward(transposed)
    assert bits(call[i].grad for i in GRADIENTS) == want


# ---- R5: past 2^31 elements ---------------------------------------------------------------------------------------


def lazy_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros of which only the pages that are touched take memory; skip where even that is refused."""
    try:
        return np.zeros(shape, np.float32)
    except MemoryError:
        pytest.skip("no 8.6 GB of address space")


# one lane whose slot * D passes 2^31 elements, and two of which the second's table begins before and ends after it
@pytest.mark.parametrize("heads, slots", [(1, 2**25 + 64), (2, 2**24 + 64)])
def test_r5_offsets_past_2_to_31_elements(heads, slots):
    width, rows = 64, 8
    state = lazy_zeros((1, heads, slots, width))
    assert state.size > 2**31
    case = cases.make_case("plain", dtype=np.float32, B=1, T=3, H=heads, D=width, N=rows, W=5, R=6)
    call = list(case.arguments())
    # the small table's rows stand among the last of the great one, and among the first
    places = np.array([0, 1, *range(slots - rows + 2, slots)], np.int32)
    call[1], call[5] = places[call[1]], places[call[5]]
    state[0][:, places] = call[7][0]
    want, want_final = sdm_lite.sparse_delta_rule(*case.arguments(), output_final_state=True)

    tracemalloc.start()  # sees NumPy's allocations, touched or not
    readings, final = sdm_lite.sparse_delta_rule(*call[:7], state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert final is None and readings.tobytes() == want.tobytes()
    assert np.array_equal(state[0][:, places], call[7][0])  # the functional form leaves the table alone,
    assert peak < 4 << 20, f"{peak / 2**20:.1f} MB"  # and does not copy its 8.6 GB

    readings = sdm_lite.sparse_delta_rule_(*call[:7], state)
    assert readings.tobytes() == want.tobytes()
    assert np.array_equal(state[0][:, places], want_final[0])
    assert not state[0, :, 2 : 2 + rows].any() and not state[0, :, slots - 2 * rows : slots - rows + 2].any()


# ---- R7: one order of selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ROOMS)
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "torch_bfloat16", "torch_float16", "torch_float32"])
def test_r7_worked_ties(kind, backend):
    def select(numbers, k):
        scores = np.array(numbers, np.float32)
        if kind.startswith("torch"):
            scores = torch.from_numpy(scores).to(getattr(torch, kind[6:]))
        else:
            scores = scores.astype(kind)
        values, slots = sdm_lite.product_key_topk(scores, k, backend=backend)
        assert str(values.dtype).endswith("float64" if kind == "float64" else "float32")
        return slots.tolist(), values.tolist()

    ties = [1, 1, 0, 0, 0, -1]
    assert select(ties, 2) == ([0, 1], [1, 1])
    assert select(ties, 3) == ([0, 1, 3], [1, 1, 1])
    assert select(ties, 4)[0] == [0, 1, 3, 4]
    assert select(ties, 9)[0] == list(range(9))
    with pytest.raises(ValueError):
        select(ties, 10)
    assert select([np.nan, 1, 0, 0, 0, -1], 2)[0] == [3, 4]
    assert select([-0.0, 0, 0, 0, -0.0, 0], 4)[0] == [0, 1, 2, 3]  # the staircase of 4: ranks (0, 0..2) and (1, 0..1)
    slots, values = select([np.nan] * 6, 5)
    assert sorted(set(slots)) == slots and 0 <= slots[0] and slots[-1] < 9
    assert values == [-math.inf] * 5


@pytest.mark.parametrize("widths, k", [((16, 16), 8), ((5, 7), 12), ((4, 3, 5), 9), ((40,), 6)])
def test_r7_the_same_slots_for_every_dtype_that_holds_the_scores(widths, k):
    """Scores of few bits tie often; every dtype here holds them and their sums exactly."""
    scores = cases.make_scores("ties", 200, widths)
    want = sdm_lite.product_key_topk(scores, k, factors=widths, backend="reference")[1]
    same = [scores, scores.astype(np.float64), scores.astype(np.float16), scores[::-1, ::-1].copy()[::-1, ::-1]]
    same += [torch.from_numpy(scores).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)]
    for x in same:
        assert np.array_equal(sdm_lite.product_key_topk(x, k, factors=widths)[1], want)
    assert (np.diff(want, axis=-1) > 0).all()
    rows = [sdm_lite.product_key_topk(row, k, factors=widths)[1] for row in scores[:20]]  # alone, and in the batch
    assert np.array_equal(rows, want[:20])


# ---- R8: any number of threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state_dtype, options",
    [
        ("float32", {}),
        ("float32", dict(restore="snapshot", rule="per_slot")),
        ("float32", dict(restore="invert")),
        ("float32", dict(restore="snapshot", snapshot_dtype="int4")),
        ("bfloat16", {}),
        ("float64", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lanes, width", [(1, 200), (1, 1025), (5, 40)])
def test_r8_any_number_of_threads_gives_the_same_bits(lanes, width, state_dtype, options, monkeypatch):
    case = cases.make_case(
        "plain", dtype=np.float32, B=1, T=40, H=lanes, N=60, D=width, W=16, R=16, alpha="uniform", decay="slot"
    )
    call, results = tensors(case, state_dtype), []
    for threads in ("1", "2", "3", "8"):
        monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
        gradients = differentiate(call, torch.from_numpy(case.dreadings), torch.from_numpy(case.dfinal), **options)
        state = call[7].clone()
        readings = sdm_lite.sparse_delta_rule_(*call[:7], state, rule=options.get("rule", "shared"))
        assert bits([readings, state]) == bits(gradients[:2])
        results.append(bits(gradients))
    assert all(other == results[0] for other in results[1:])


def test_r8_addressing_for_any_number_of_threads(monkeypatch):
    scores, ids = cases.make_scores("extreme", 300, (9, 11)), np.arange(300)
    results = set()
    for threads in ("1", "2", "3", "8"):
        monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
        tensor = torch.from_numpy(scores).requires_grad_()
        values, slots = sdm_lite.product_key_topk(tensor, 7, factors=(9, 11))
        values.nan_to_num(0, 0, 0).cos().sum().backward()
        results.add((*bits([values.detach(), slots, tensor.grad]), sdm_lite.hash_slots(ids, 99, 7).tobytes()))
    assert len(results) == 1


# ---- R9: sums in float32, and which dtype comes back --------------------------------------------------------------


@pytest.mark.parametrize("backend", ROOMS)
def test_r9_a_16_bit_table_is_summed_in_float32(backend):
    """A bf16 row of 256 plus eight of 1 is 264; a sum in bf16, whose next number is 258, would stay at 256."""
    for dtype in (torch.bfloat16, torch.float16):
        state = torch.ones((1, 1, 9, 2), dtype=dtype)
        state[0, 0, 0] = 256
        slots, one = torch.arange(9, dtype=torch.int32).reshape(1, 1, 1, 9), torch.ones((1, 1, 1, 9))
        nothing = torch.zeros((1, 1, 1))
        values = torch.zeros((1, 1, 1, 2), dtype=dtype)
        call = (values, slots[..., :1], one[..., :1], nothing, nothing, slots, one)
        readings, _ = sdm_lite.sparse_delta_rule(*call, state, backend=backend)
        assert readings.dtype == dtype and readings.flatten().tolist() == [264, 264]
        assert sdm_lite.sparse_delta_rule_(*call, state, backend=backend).flatten().tolist() == [264, 264]
        if dtype == torch.float16:
            call = [x.numpy() for x in (*call, state)]
            assert sdm_lite.sparse_delta_rule(*call, backend=backend)[0].ravel().tolist() == [264, 264]


@pytest.mark.parametrize("values_dtype", STATE_DTYPES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_r9_every_pair_of_state_and_values_dtype(state_dtype, values_dtype):
    """Readings in the dtype of values, the state in its own, gradients in that of their input; sums in float32."""
    compute = torch.float64 if state_dtype == "float64" else torch.float32
    case = cases.make_case("D17_slot_decay", dtype=np.float32)
    call = tensors(case, state_dtype)
    odd = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for i, dtype in zip(GRADIENTS[:5], [getattr(torch, values_dtype), *odd]):
        call[i] = call[i].to(dtype)
    dreadings = torch.from_numpy(case.dreadings).to(call[0].dtype)
    dfinal = torch.from_numpy(case.dfinal).to(call[7].dtype)
    got = differentiate(call, dreadings, dfinal)
    assert got[0].dtype == call[0].dtype and got[1].dtype == call[7].dtype
    assert [x.dtype for x in got[2:]] == [call[i].dtype for i in GRADIENTS]
    cast = [x.to(compute) if x.is_floating_point() else x for x in call[:7]]
    want = differentiate([*cast, call[7]], dreadings.to(compute), dfinal)
    assert bits(got) == bits(w.to(g.dtype) for g, w in zip(got, want))
    state = call[7].clone()
    readings = sdm_lite.sparse_delta_rule_(*call[:7], state)
    assert bits([readings, state]) == bits(got[:2])


@pytest.mark.parametrize("backend", ROOMS)
def test_r9_numpy_float16_is_torch_float16(backend):
    call = tensors(cases.make_case("plain", dtype=np.float32), "float16")
    call = [x.to(torch.float16) if x.is_floating_point() else x for x in call]
    want = sdm_lite.sparse_delta_rule(*call, output_final_state=True, backend=backend)
    got = sdm_lite.sparse_delta_rule(*(x.numpy() for x in call), output_final_state=True, backend=backend)
    assert [x.dtype for x in got] == [np.float16, np.float16]
    assert [x.tobytes() for x in got] == bits(want)
