"""Fast-weight product keys and weighted sums of rows, each beside the torch form that does the same."""

from __future__ import annotations

import pytest

from benchmarks import fwpkm_cases

SIZES = fwpkm_cases.Sizes()
COMPARISONS = {
    "retrieval": lambda x: fwpkm_cases.retrieval(x, SIZES.k),
    "chunk": lambda x: fwpkm_cases.chunk(x, SIZES),
    "bag": lambda x: fwpkm_cases.bag(x),
    "bag_dense_gradient": lambda x: fwpkm_cases.bag(x, gradient="dense"),
    "bag_coalesced_gradient": lambda x: fwpkm_cases.bag(x, gradient="coalesced"),
}


@pytest.fixture(scope="module")
def inputs():
    fwpkm_cases.check_all(fwpkm_cases.Sizes(m=64, half=32, D=64, C=128))
    return fwpkm_cases.make_inputs(SIZES)


@pytest.mark.parametrize("candidate", ["ours", "torch"])
@pytest.mark.parametrize("name", list(COMPARISONS))
def test_fwpkm(benchmark, inputs, name, candidate):
    benchmark(COMPARISONS[name](inputs)[candidate])
