"""The compact form of a functional call on CuPy's stand-in: the bits of the whole form, in the memory it promises."""

from __future__ import annotations

import fake_cupy
import numpy as np
import pytest
from cases import DeltaFields, make_case
from emulated_cuda.run import SCHEDULES, needs

from sdm_lite import cuda_kernels, errors
from sdm_lite.cuda_kernels import compact
from sdm_lite.rooms import DeltaInputs, DeltaOptions

pytestmark = needs("plain")

#: far more slots than uses, so that the compact form is taken; with neighbouring slots, lanes without tokens, sharing
FIELDS = {
    fields.name: fields
    for fields in (
        DeltaFields("compact", B=2, T=6, H=2, N=400, D=40, W=4, R=3, order="shuffled"),
        DeltaFields("compact_packed", H=2, lengths=(3, 0, 7, 0), N=300, D=24, W=3, R=2),
        DeltaFields("compact_shared", B=3, T=5, H=2, N=200, D=20, W=2, R=2, shared_state=True),
        DeltaFields("compact_slot_decay", B=1, T=8, H=1, N=500, D=33, W=4, R=4, decay="slot", alpha="uniform"),
    )
}


def upload(cupy, case):
    return DeltaInputs(*(None if x is None else cupy.asarray(x) for x in case.inputs))


def results(cupy, case, options, state, *, with_state=True):
    """Return readings and gradients, and the rows of the table that the forward worked on."""
    inputs, table = upload(cupy, case), cupy.asarray(state.copy())
    cupy.launches.clear()
    readings, final, saved = cuda_kernels.sparse_delta_forward(inputs, table, options, save=True)
    assert final is None and np.array_equal(table.host, state)
    shape = state.shape if with_state else None
    dreadings = cupy.asarray(case.dreadings)
    gradients = cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, shape)
    again = cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, shape)
    found = [x if x is None else x.host for x in gradients]
    assert all(a is None or np.array_equal(a, b.host) for a, b in zip(found, again))
    rows = {run[4][0].size // case.fields.D for run in cupy.launches if "ward<" in run[0] and "delta" in run[0]}
    assert len(rows) == 1, "forward and backward worked on different tables"
    return readings.host, found, rows.pop()


def both_forms(monkeypatch, case, options, state=None, **setting):
    """Return the results of the compact form, held to the whole one's bits, and both numbers of rows."""
    state = case.state if state is None else state
    cupy = fake_cupy.install(monkeypatch, **setting)
    got, gradients, rows = results(cupy, case, options, state)
    with monkeypatch.context() as patch:
        patch.setattr(compact, "is_smaller", lambda *_: False)
        cupy.schedule = {}
        want, want_gradients, all_rows = results(cupy, case, options, state)
    assert np.array_equal(got, want)
    for a, b in zip(gradients, want_gradients, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)
    return rows, all_rows


def touched(case):
    """Return how many distinct rows a case's slots name, lane by lane."""
    x, count = case.inputs, 0
    edges = range(case.fields.T + 1)[:: case.fields.T] if x.cu_seqlens is None else x.cu_seqlens
    for batch in range(x.values.shape[0]):
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            for head in range(x.values.shape[2]):
                lane = (batch, slice(begin, end), head)
                count += len(np.unique(np.concatenate([x.write_slots[lane].ravel(), x.read_slots[lane].ravel()])))
    return count


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("restore", ["snapshot", "hybrid"])
def test_the_bits_are_the_whole_forms(monkeypatch, name, restore):
    case = make_case(FIELDS[name], dtype=np.float32)
    rows, all_rows = both_forms(monkeypatch, case, DeltaOptions(restore=restore))
    lanes = case.state.shape[0] * case.fields.H if name != "compact_shared" else 6
    assert rows == touched(case) < all_rows == lanes * case.fields.N


@pytest.mark.parametrize("restore, rule", [("hybrid", "shared"), ("invert", "shared"), ("hybrid", "per_slot")])
def test_16_bit_states_and_the_other_rule(monkeypatch, restore, rule):
    case = make_case(FIELDS["compact"], dtype=np.float32)
    dtype = "bfloat16" if rule == "shared" else "float32"
    both_forms(monkeypatch, case, DeltaOptions(restore=restore, rule=rule, state_dtype=dtype), case.state_bits(dtype))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_schedule_changes_a_bit(monkeypatch, schedule):
    case = make_case(FIELDS["compact_packed"], dtype=np.float32)
    both_forms(monkeypatch, case, DeltaOptions(), schedule=schedule)


@pytest.mark.parametrize("build", [pytest.param(b, marks=needs(b)) for b in ("asan", "tsan")])
def test_no_sanitizer_finds_a_fault(monkeypatch, build):
    fields = DeltaFields("sanitized", B=1, T=5, H=2, N=90, D=9, W=2, R=1, order="shuffled")
    case = make_case(fields, dtype=np.float32)
    both_forms(monkeypatch, case, DeltaOptions(restore="snapshot"), schedule={"build": build})


def test_without_gradients_and_token_by_token(monkeypatch):
    """One token goes to another kernel, on compact rows too; without a gradient of the state none is made."""
    cupy = fake_cupy.install(monkeypatch)
    case = make_case(FIELDS["compact"], dtype=np.float32)
    want = cuda_kernels.sparse_delta_forward(upload(cupy, case), cupy.asarray(case.state), DeltaOptions(), final=True)
    got = cuda_kernels.sparse_delta_forward(upload(cupy, case), cupy.asarray(case.state), DeltaOptions())
    assert got[1] is None and np.array_equal(got[0].host, want[0].host)
    first = DeltaInputs(*(None if x is None else cupy.asarray(x) for x in case.token_range(0, 1)))
    cupy.launches.clear()
    one = cuda_kernels.sparse_delta_forward(first, cupy.asarray(case.state), DeltaOptions())[0]
    assert np.array_equal(one.host[:, 0], want[0].host[:, 0])
    assert cupy.launches[-1][0].startswith("decode") and cupy.launches[-1][4][0].size < case.state.size
    whole = results(cupy, case, DeltaOptions(), case.state)[1]
    part = results(cupy, case, DeltaOptions(), case.state, with_state=False)[1]
    assert part[5] is None and all(np.array_equal(a, b) for a, b in zip(part[:5], whole[:5]))


def test_the_final_state_and_a_capture_take_the_whole_table(monkeypatch):
    cupy = fake_cupy.install(monkeypatch)
    cupy.run = False
    case = make_case(FIELDS["compact"], dtype=np.float32)
    inputs, state = upload(cupy, case), cupy.asarray(case.state)
    for capturing, final in ((True, False), (False, True)):
        cupy.launches.clear()
        cupy.capturing, cupy.syncs = capturing, 0
        options = DeltaOptions(restore="snapshot")
        cuda_kernels.sparse_delta_forward(inputs, state, options, save=True, final=final)
        assert cupy.launches[-1][4][0].size == case.state.size and cupy.syncs == 0


def test_which_form_is_smaller_by_hand():
    # 8 rows of 4 columns of 2 bytes are 64 bytes; a use costs its row, 8 bytes, and 48 of numbering
    assert compact.is_smaller(1, 8, 1, 4, 2) and not compact.is_smaller(1, 8, 2, 4, 2)
    assert not compact.is_smaller(1, 8, 0, 4, 2)  # no tokens: nothing to number
    assert compact.table_bytes(2, 4, 2, uses=2) == 2 * 56


def test_the_peak_is_the_formulas(monkeypatch):
    """Forward and backward hold what `peak_bytes` says, and far less than copies of the whole table would be."""
    cupy = fake_cupy.install(monkeypatch)
    cupy.run = False
    fields = DeltaFields("peak", B=2, T=24, H=2, N=4096, D=96, W=8, R=8)
    case = make_case(fields, dtype=np.float32)
    inputs, state, dreadings = upload(cupy, case), cupy.asarray(case.state), cupy.asarray(case.dreadings)
    options = DeltaOptions(restore="snapshot")
    tokens, rows = 2 * 24 * 2, touched(case)
    cupy.held = cupy.peak = 0
    saved = cuda_kernels.sparse_delta_forward(inputs, state, options, save=True)[2]
    cupy.launches.clear()  # which keeps the forward's arguments
    cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, None)
    size = {"width": 96, "writes": 8, "reads": 8, "state_bytes": 4}
    want = compact.peak_bytes(rows, tokens, **size, log_bytes=tokens * 8 * 96 * 4, grad_rows=0)
    results_held = 4 * tokens * (96 + 8 + 8 + 1 + 1)  # the gradients themselves
    assert 0.95 * want <= cupy.peak - results_held <= 1.05 * want
    assert cupy.peak < case.state.nbytes


def test_out_of_memory_names_the_rows(monkeypatch):
    cupy = fake_cupy.install(monkeypatch)
    case = make_case(FIELDS["compact"], dtype=np.float32)
    inputs, state = upload(cupy, case), cupy.asarray(case.state)
    cupy.free = 100
    size = f"{touched(case) * 40 * 4:,} bytes"
    with pytest.raises(errors.DeviceMemoryError, match=f"touched rows.*{size}.*sparse_delta_rule_"):
        cuda_kernels.sparse_delta_forward(inputs, state, DeltaOptions())
