"""What product-key memories touch and allocate: rows read and written, never tokens times slots, never a table."""

from __future__ import annotations

import resource
import tracemalloc

import numpy as np
import pytest
import torch
from fwpkm_cases import make_stream

import sdm_lite
from sdm_lite import FwPKMState, fwpkm
from sdm_lite.autograd import Tensor

BACKENDS = ["reference", "cpu"]


def allocated(run) -> int:
    """Return the most bytes that a call holds beside what was there: NumPy's, and the process's own.

    The latter, where kernels' scratch would show, counts from the greatest size so far: a process in which much ran
    before sees NumPy's alone.
    """
    run()  # compiles
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return max(peak, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
@pytest.mark.parametrize("H", [1, 3])
def test_a_write_changes_at_most_the_rows_of_its_paired_reads(H, pairs, backend):
    k, chunk = 2, 5
    x = make_stream(B=2, T=2 * chunk, H=H, m=32)
    first, chunks = FwPKMState(x.keys, x.table), []
    for start in (0, chunk):
        second = fwpkm(*x.tokens(start, start + chunk), first, k=k, chunk=chunk, pairs=pairs, backend=backend)[1]
        chunks.append(int((first.values != second.values).any(1).sum()))
        first = second
    paired = {"drop": [chunk - 1] * 2, "carry": [chunk - 1, chunk], "wrap": [chunk] * 2}[pairs]
    for changed, count in zip(chunks, paired):
        assert 0 < changed <= 2 * count * H * k


@pytest.mark.parametrize("backend", BACKENDS)
def test_retrieval_and_its_gradient_take_no_tokens_times_slots(backend):
    tokens, m = 512, 256  # tokens x slots x 4 bytes: 134 MB; tokens x sub-keys: half a megabyte
    x = make_stream(B=1, T=tokens, H=1, m=m, half=4, D=1, dtype=np.float32)

    def run():
        queries, keys = Tensor(x.queries, requires_grad=True), Tensor(x.keys, requires_grad=True)
        sdm_lite.idw_product_key_topk(queries, keys, 8, backend=backend)[0].sum().backward()
        weights, _ = sdm_lite.product_key_lookup(queries, keys, 8, backend=backend)
        weights.sum().backward()

    assert allocated(run) < tokens * m * m * 4 / 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_and_its_gradient_take_no_tokens_times_slots_and_no_second_table(backend):
    tokens, m, D = 256, 256, 64  # tokens x slots x 4 bytes: 67 MB; the table: 17 MB
    x = make_stream(B=1, T=tokens, H=1, m=m, half=4, D=D, dtype=np.float32)
    state = FwPKMState(x.keys, x.table)  # owns its start, so it is made outside

    def run():
        tensors = [Tensor(a, requires_grad=True) for a in x.call]
        readings, _ = fwpkm(*tensors, state, k=2, chunk=64, backend=backend)
        readings.sum().backward()

    # the rows read: 256 tokens x 2, kept by chunk; four bytes of place a slot
    assert allocated(run) < x.table.nbytes / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_table_is_the_only_array_of_its_size(backend):
    num_slots, D, k = 2**16, 64, 4  # 17 MB
    rng = np.random.default_rng(0)
    slots, weights = rng.integers(0, num_slots, (64, k)), rng.random((64, k), np.float32)
    upstream, table = np.ones((64, D), np.float32), np.zeros((num_slots, D), np.float32)

    def dense():
        values = torch.from_numpy(table).requires_grad_()
        sdm_lite.embedding_bag(
            values, torch.from_numpy(slots), torch.from_numpy(weights), backend=backend
        ).sum().backward()

    def rows():
        sdm_lite.embedding_bag_gradient(upstream, slots, weights, num_slots, backend=backend)

    assert allocated(dense) < 1.5 * table.nbytes
    assert allocated(rows) < table.nbytes / 8  # four bytes of number a slot
