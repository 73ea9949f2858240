"""The plan kernels under the emulator against a plan made in NumPy, lane by lane and token by token."""

import numpy as np
import pytest
from emulated_cuda.run import SCHEDULES, Launch, needs, several

THREADS = 64
ENTRY = np.dtype([("slot", "u4"), ("from_", "u2"), ("to", "u2")])  # the top bit of slot: written
NO_PLACE, WRITTEN = 0xFFFF, 1 << 31
CHUNKS = ("slots", "written", "start", "place_w", "place_r", "from_", "to")

pytestmark = needs("plain")


def plan_lane(write_slots, read_slots, row_budget, window):
    """Return a lane's chunks as dicts; write_slots [T, W], read_slots [T, R]."""
    chunks, tokens = [], len(write_slots)
    used = [set(w) | set(r) for w, r in zip(write_slots.tolist(), read_slots.tolist(), strict=True)]
    starts, rows = [], set()
    for t in range(tokens):
        if t % window == 0 or len(rows | used[t]) > row_budget:
            starts.append(t)
            rows = set()
        rows |= used[t]
    edges = [*starts, tokens]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        w, r = write_slots[start:stop], read_slots[start:stop]
        slots = np.unique(np.concatenate([w.ravel(), r.ravel()]))
        places = np.searchsorted(slots, w), np.searchsorted(slots, r)
        chunks.append(dict(zip(CHUNKS, (slots, np.isin(slots, w), start, *places))))
    for c, chunk in enumerate(chunks):
        chunk["from_"] = link(chunk["slots"], chunks[c - 1]["slots"] if c > 0 else [])
        chunk["to"] = link(chunk["slots"], chunks[c + 1]["slots"] if c + 1 < len(chunks) else [])
    return chunks


def link(slots, other):
    place = {slot: i for i, slot in enumerate(other)}
    return np.array([place.get(slot, NO_PLACE) for slot in slots])


def make_case(seed, batch, tokens, heads, writes, reads, num_slots, lengths=None):
    rng = np.random.default_rng(seed)

    def distinct(k):
        return rng.random((batch, tokens, heads, num_slots)).argsort(-1)[..., :k].astype(np.int32)

    cu_seqlens = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.ascontiguousarray(distinct(writes)), np.ascontiguousarray(distinct(reads)), cu_seqlens


def device_plan(write_slots, read_slots, cu_seqlens, row_budget, window, **options):
    """Run the three kernels; return the output arrays of plan.cuh."""
    batch, tokens, heads, writes = write_slots.shape
    reads, total = read_slots.shape[-1], batch * tokens * heads
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    longest = tokens if cu_seqlens is None else int(np.diff(cu_seqlens).max())
    lanes, windows, stride = sequences * heads, -(-longest // window), -(-(writes + reads) // 2) * 2
    rows, rows_from = np.full((total, stride), -1, np.int64).view(ENTRY), np.full(total, -1, np.int32)
    row_count, chunk_start = np.full(total, -1, np.int32), np.full(total + lanes, -1, np.int32)
    chunks = np.full(lanes, -1, np.int32)
    place_w, place_r = np.full((total, writes), 7, np.uint16), np.full((total, reads), 7, np.uint16)

    def numbers(*values):
        return [np.int32(value) for value in values]

    uses = 1 << (window * (writes + reads) - 1).bit_length()
    shared = 8 * uses + -(-4 * uses // 16) * 16 + 3 * (-(-4 * window // 16) * 16)
    slots = [write_slots, read_slots, cu_seqlens, *numbers(tokens, heads, writes, reads, window, windows)]
    outputs = [*numbers(row_budget, stride), rows, rows_from, place_w, place_r]
    lane_args = [rows_from, cu_seqlens, *numbers(tokens, heads), row_count, chunk_start, chunks]
    links = [rows, row_count, chunk_start, chunks, cu_seqlens, *numbers(tokens, heads, window, windows, stride)]
    launches = [
        Launch(f"plan_rows<{THREADS}>", lanes * windows, THREADS, slots + outputs, shared),
        Launch(f"plan_chunks<{THREADS}>", lanes, THREADS, lane_args),
        Launch(f"plan_links<{THREADS}>", lanes * windows, THREADS, links),
    ]
    several("plan.cu", launches, **options)
    return rows.reshape(-1), row_count, chunk_start, chunks, place_w, place_r, stride


def check(case, row_budget, window, **options):
    """Compare the device's plan with the definition; return the chunks of all lanes."""
    write_slots, read_slots, cu_seqlens = case
    batch, tokens, heads, writes = write_slots.shape
    got = device_plan(*case, row_budget, window, **options)
    rows, row_count, chunk_start, chunks, place_w, place_r, stride = got
    flat_w, flat_r = write_slots.reshape(batch * tokens, heads, writes), read_slots.reshape(batch * tokens, heads, -1)
    edges = np.arange(batch + 1) * tokens if cu_seqlens is None else cu_seqlens
    base, every = 0, []
    for lane in range((len(edges) - 1) * heads):
        sequence, head = divmod(lane, heads)
        span = slice(edges[sequence], edges[sequence + 1])
        count = span.stop - span.start
        want = plan_lane(flat_w[span, head], flat_r[span, head], row_budget, window)
        assert chunks[lane] == len(want)
        starts = chunk_start[base + lane : base + lane + len(want) + 1]
        assert starts.tolist() == [*(chunk["start"] for chunk in want), count]
        for c, chunk in enumerate(want):
            n, token = len(chunk["slots"]), base + chunk["start"]
            assert row_count[base + c] == n
            entries = rows[token * stride : token * stride + n]
            assert np.array_equal(entries["slot"] & ~np.uint32(WRITTEN), chunk["slots"])
            assert np.array_equal(entries["slot"] >= WRITTEN, chunk["written"])
            assert np.array_equal(entries["from_"], chunk["from_"]) and np.array_equal(entries["to"], chunk["to"])
            assert np.array_equal(place_w[token : token + len(chunk["place_w"])], chunk["place_w"])
            assert np.array_equal(place_r[token : token + len(chunk["place_r"])], chunk["place_r"])
        base += count
        every += want
    return every


#: batch, tokens, heads, writes, reads, slots, lengths of packed sequences; row budget, window
CASES = {
    "one lane": ((1, 19, 1, 4, 4, 40, None), 16, 8),
    "lanes": ((2, 13, 3, 3, 2, 12, None), 9, 5),
    "budget of one token": ((1, 9, 2, 4, 3, 64, None), 7, 4),
    "all rows fit": ((1, 33, 1, 2, 6, 8, None), 8, 16),
    "one window": ((1, 17, 1, 4, 4, 16, None), 12, 32),
    "many uses": ((1, 6, 1, 40, 41, 200, None), 130, 3),
    "packed": ((1, 23, 2, 3, 4, 20, (5, 0, 11, 1, 6)), 11, 4),
    "only reads": ((1, 9, 2, 0, 3, 8, None), 4, 4),
    "only writes": ((1, 9, 2, 3, 0, 8, None), 4, 4),
    "one token": ((3, 1, 1, 2, 2, 4, None), 4, 1),
}


@pytest.mark.parametrize("options", SCHEDULES[:3], ids=str)
def test_the_plan_is_that_of_the_definition(options):
    for seed, (shape, row_budget, window) in enumerate(CASES.values()):
        check(make_case(seed, *shape), row_budget, window, **options)


def test_what_the_cases_cover():
    """Chunks that end early, rows handed over, rows only read: else the comparison above would prove less."""
    shape, row_budget, window = CASES["lanes"]
    every = check(make_case(1, *shape), row_budget, window)
    assert any(0 < chunk["start"] % window for chunk in every)
    assert any((chunk["from_"] != NO_PLACE).any() and (chunk["from_"] == NO_PLACE).any() for chunk in every)
    assert any(not chunk["written"].all() for chunk in every)
    assert max(len(chunk["slots"]) for chunk in every) <= row_budget


def test_great_slots():
    write_slots = np.array([[[[2**31 - 1, 0]], [[5, 2**31 - 2]]]], np.int32)
    check((write_slots, write_slots[..., ::-1].copy(), None), 4, 2)


@pytest.mark.parametrize("build", [pytest.param(b, marks=needs(b)) for b in ("asan", "tsan")])
def test_no_sanitizer_finds_a_fault(build):
    for seed, name in enumerate(("lanes", "packed")):
        shape, row_budget, window = CASES[name]
        check(make_case(seed, *shape), row_budget, window, build=build, workers=2)
