"""The chunked (WY) form against the token loop: two algorithms, one answer."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import tolerances

from sdm_lite.reference import sparse_delta_forward
from sdm_lite.reference.chunked import sparse_delta_chunked
from sdm_lite.rooms import DeltaOptions


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fields", cases.DELTA_CASES, ids=cases.case_id)
def test_chunked_equals_sequential(fields, dtype):
    case = cases.make_case(fields, seed=1, dtype=dtype)
    exact = case.astype(np.float64)
    want = sparse_delta_forward(exact.inputs, exact.state, DeltaOptions(state_dtype="float64"), final=True)
    before = case.state.copy()
    for chunk in (1, 5, 64):
        readings, final = sparse_delta_chunked(case.inputs, case.state, chunk)
        assert readings.dtype == final.dtype == dtype
        tolerances.assert_close(readings, want[0], "delta_chunked", dtype, what=f"readings, chunk {chunk}")
        tolerances.assert_close(final, want[1], "delta_chunked", dtype, what=f"final state, chunk {chunk}")
    np.testing.assert_array_equal(case.state, before)


def test_heavy_collisions_with_strong_writes():
    # every token writes the same slots at full strength: the triangular system is as far from the identity as it gets
    case = cases.make_case("plain", T=60, N=8, W=8, alpha="zero")
    inputs = case.inputs._replace(beta=np.ones_like(case.inputs.beta))
    want = sparse_delta_forward(inputs, case.state, DeltaOptions(state_dtype="float64"), final=True)
    readings, final = sparse_delta_chunked(inputs, case.state, 60)
    tolerances.assert_close(readings, want[0], "delta_chunked", "float64")
    tolerances.assert_close(final, want[1], "delta_chunked", "float64")
