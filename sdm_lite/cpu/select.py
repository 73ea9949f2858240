"""Kernels of the product-key selection: the k best columns of each factor, then the k best sums.

Everything is compared through integer keys: the bits of a float, read as sign and magnitude, become
a two's complement integer that orders like the float, with -0 equal to +0 and NaN equal to -inf.
Integer comparisons vectorise, and the selection never meets a float's special cases again.

One selection is: find a threshold (count the keys >= a probe, about five times), collect the places
of the keys above it in one branch-free pass, settle ties in the order of places. A stage is one such
selection; F factors take 2 F - 1 of them: columns of factor 0, columns of 1, sums, columns of 2, sums..
Per row and n columns of a factor this reads 4 n (8 n) bytes, and all else stays in the first cache.

Scratch arrays are padded to whole vectors with the lowest integer, which is no float's key, so that
the counting loops have no tails. Twin: `sdm_lite/reference/addressing.py`.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from .compile import inlined, kernel
from .vector import borrowed

#: scratch of one thread: keys of a stage's entries, the places found, what these are sorted by, and the sort's own
Work = namedtuple("Work", "keys found few order ranks spare bins")

#: scratch lengths are multiples of this: the lanes of a vector times the unrolling of the loops
PAD = 32
#: up to this many entries, counting for each one the greater ones is faster than the radix sort
_COUNTING_LIMIT = 192
#: up to this many entries, that is also faster than a search for a threshold
_RANKED_LIMIT = 64
#: probes that only count; each one after these also moves to the nearest keys, so that ties end the search
_PLAIN_PROBES = 8
#: probes after which the search stops guessing and halves
_GUESSED_PROBES = 16
#: weight of the latest row in what is remembered for the first probes of the next
_NEWS = 0.1


@inlined
def _padded(size):
    return (size + PAD - 1) // PAD * PAD


@inlined
def _pad(keys, count, lowest):
    for i in range(count, _padded(count)):
        keys[i] = lowest


@inlined
def order_keys(bits, start, count, lowest, minus_infinity, keys):
    """Write the keys of the floats with these `bits`.

    A negative float's key is lowest - bits = -magnitude, so that -0 gets the key of +0; a key outside
    [-inf, +inf] was a NaN.
    """
    for i in range(count):
        b = bits[np.uint64(start + i)]  # unsigned: no test for a negative index, which would stop vectorising
        x = keys.dtype.type(lowest - b)
        x = b if b >= 0 else x
        x = x if x <= -minus_infinity else minus_infinity
        keys[i] = x if x >= minus_infinity else minus_infinity
    _pad(keys, count, lowest)


@inlined
def _count_from(keys, count, probe):
    """How many keys are >= probe; the sum has the keys' own width, so that it fills vectors."""
    total = keys.dtype.type(0)
    for i in range(_padded(count)):
        total = keys.dtype.type(total + keys.dtype.type(keys[i] >= probe))
    return np.int64(total)


@inlined
def _neighbours(keys, count, probe, lowest):
    """Smallest key >= probe (or the highest integer) and largest key < probe (or the lowest)."""
    above, below = -1 - np.int64(lowest), np.int64(lowest)
    for i in range(count):
        x = np.int64(keys[i])
        if x >= probe:
            above = x if x < above else above
        else:
            below = x if x > below else below
    return above, below


@inlined
def _guess(low, high, above_low, above_high, k, count, gap):
    """Where the k-th key may lie: interpolated, or so many gaps beyond the one end that was probed."""
    if 0 < above_high and above_low < count:
        return low + (np.float64(high) - low) * ((above_low - k + 0.5) / (above_low - above_high))
    if above_low < count:
        return low + gap * (above_low - k + 1.5)
    return high - gap * (k - above_high + 0.5)


@inlined
def threshold_of(keys, count, k, lowest, hint):
    """Return (x, c) with c keys >= x: either c == k, or c > k and x is the k-th largest key itself.

    `hint` holds what earlier rows suggest: a first probe, and the distance from one key to the next.
    It changes how long the search takes, never which keys it finds.
    """
    low, above_low = np.int64(lowest) + 1, np.int64(count)
    high, above_high = -low, np.int64(0)
    guess, first, probes = hint[0], np.int64(0), 0
    while above_low != k and high - 1 != low:
        probe = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        if probes < _GUESSED_PROBES and low < guess < high:
            probe = np.int64(guess)
            probe += np.int64(probe <= low)  # a double is coarser than a 64-bit key
            probe -= np.int64(probe >= high)
        found = _count_from(keys, count, keys.dtype.type(probe))
        if probes == 0:
            first = found
        if found >= k:
            low, above_low = probe, found
        else:
            high, above_high = probe, found
        if probes >= _PLAIN_PROBES:
            above, below = _neighbours(keys, count, probe, lowest)
            if found >= k:
                low = above
            else:
                high = below + 1
        guess = _guess(low, high, above_low, above_high, k, count, hint[1])
        probes += 1
    if hint[1] == 0.0 and 0 < above_high and above_low < count:
        hint[0], hint[1] = low, (np.float64(high) - low) / (above_low - above_high)
    elif probes > 0:
        distance = abs(first - k)
        if distance > 3:
            hint[1] += _NEWS * (abs(low - hint[0]) / distance - hint[1])
        hint[0] += _NEWS * (low - hint[0])
    return low, above_low


@inlined
def _collect(keys, count, threshold, found):
    """Write the places of the keys >= threshold, ascending, and return their number."""
    m = np.uint64(0)
    for i in range(count):
        found[m] = i  # overwritten unless it counts: hence one entry of room beyond the last
        m += np.uint64(keys[i] >= threshold)
    return np.int64(m)


@inlined
def _collect_ranked(keys, count, k, ranks, found):
    """As `threshold_of` and `_collect`, for few keys: find the k greatest, and all that equal the last of them."""
    _count_greater(keys, count, ranks)
    m, threshold = np.uint64(0), np.int64(2**63 - 1)
    for i in range(count):
        chosen = ranks[i] < k
        threshold = min(threshold, np.int64(keys[i])) if chosen else threshold
        found[m] = i
        m += np.uint64(chosen)
    return threshold, np.int64(m)


@inlined
def _drop_ties(keys, threshold, k, found, m):
    """Of m found places keep k: all above the threshold, and the first ones at it."""
    if m == k:
        return
    spare = k
    for i in range(m):
        spare -= np.int64(keys[found[i]] > threshold)
    kept = np.uint64(0)
    for i in range(m):
        place = found[i]
        above = np.int64(keys[place] > threshold)
        found[kept] = place
        kept += np.uint64((above > 0) | (spare > 0))
        spare -= 1 - above


@inlined
def _count_greater(keys, count, ranks):
    """ranks[i] = how many keys are greater than keys[i]."""
    for i in range(_padded(count)):
        ranks[i] = 0
    for j in range(0, (count + 3) // 4 * 4, 4):
        a, b, c, d = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
        for i in range(_padded(count)):
            x = keys[i]
            greater = keys.dtype.type(a > x) + keys.dtype.type(b > x) + keys.dtype.type(c > x) + keys.dtype.type(d > x)
            ranks[i] += greater


@inlined
def _radix_sort(keys, count, order, spare, bins):
    """As `_sort`, 8 bits of the keys at a time: for many entries."""
    last = keys.itemsize * 8 - 8
    for i in range(count):
        order[i] = i
    for shift in range(0, last + 8, 8):
        flip = 127 if shift == last else 255  # descending, and the last digit carries the sign
        for i in range(257):
            bins[i] = 0
        for i in range(count):
            bins[(((np.int64(keys[i]) >> shift) & 255) ^ flip) + 1] += 1
        for i in range(256):
            bins[i + 1] += bins[i]
        for i in range(count):
            place = order[i]
            digit = ((np.int64(keys[place]) >> shift) & 255) ^ flip
            spare[bins[digit]] = place
            bins[digit] += 1
        for i in range(count):
            order[i] = spare[i]


@inlined
def _sort(keys, count, lowest, work):
    """work.order = the places by key descending, equal keys by place ascending."""
    if count > _COUNTING_LIMIT:
        _radix_sort(keys, count, work.order, work.spare, work.bins)
        return
    _pad(keys, count, lowest)
    _count_greater(keys, count, work.ranks)
    order, ranks, taken = work.order, work.ranks, work.spare
    for i in range(count):
        taken[i] = 0
    for i in range(count):  # equal keys share a rank: the first takes it, the second the next one
        rank = np.uint32(ranks[i])
        order[rank + taken[rank]] = i
        taken[rank] += 1


@inlined
def add_pairs(list_values, pairs, start, count, sums):
    """Write the sums of the rank pairs start .. start + count."""
    for p in range(count):
        q = np.uint64(start + p)
        sums[p] = list_values[0, pairs[0, q]] + list_values[1, pairs[1, q]]


@inlined
def _sort_by_slot(pairs, start, width, list_slots, m, lowest, work):
    """Bring the m found pairs into ascending order of slot."""
    found, spare, few = work.found, work.spare, work.few
    for i in range(m):
        q = np.uint64(start + found[i])
        few[i] = -(list_slots[0, pairs[0, q]] * width + list_slots[1, pairs[1, q]])
    _sort(few, m, lowest, work)
    for i in range(m):
        spare[i] = found[work.order[i]]
    for i in range(m):
        found[i] = spare[i]


@inlined
def choose(count, k, slot_order, pairs, start, width, list_slots, lowest, hint, work):
    """work.found[:k] = the places of the k greatest of `count` keys, by column or slot ascending."""
    if count <= _RANKED_LIMIT:
        threshold, m = _collect_ranked(work.keys, count, k, work.ranks, work.found)
    else:
        threshold, m = threshold_of(work.keys, count, k, lowest, hint)
        _collect(work.keys, count, threshold, work.found)
    if slot_order:
        _sort_by_slot(pairs, start, width, list_slots, m, lowest, work)
    _drop_ties(work.keys, threshold, k, work.found, m)


@inlined
def to_rank_list(values, slots, length, lowest, work, list_values, list_slots):
    """Write the chosen values and their slots, best first."""
    for i in range(length):
        work.few[i] = work.keys[work.found[i]]
    _sort(work.few, length, lowest, work)
    for i in range(length):
        place = work.order[i]
        list_values[i] = values[place]
        list_slots[i] = slots[place]


def scratch(dtype, widths, starts, k):
    """Return the arrays in which one thread works; `topk_rows` names their rows."""
    longest = max(*widths.tolist(), *np.diff(starts).tolist(), k, 256)  # 256: the bins of the radix sort
    room = -(-(longest + 1) // PAD) * PAD
    floats = np.empty((7, room), dtype)
    bits = floats.view(f"i{floats.itemsize}")
    return floats, bits, np.empty((3, room), np.uint32), np.empty((4, room), np.int64), np.zeros((2 * widths.size, 2))


@inlined
def borrow_scratch(work_arrays):
    """Return the arrays of `scratch` without their reference counts, and the selection's own among them."""
    floats, integers, places, longs, hints = work_arrays
    floats, integers, places = borrowed(floats), borrowed(integers), borrowed(places)
    longs, hints = borrowed(longs), borrowed(hints)
    work = Work(
        borrowed(integers[0]),
        borrowed(places[0]),
        borrowed(integers[1]),
        borrowed(places[1]),
        borrowed(integers[2]),
        borrowed(places[2]),
        borrowed(longs[0]),
    )
    return floats, integers, longs, hints, work


@kernel
def topk_rows(
    scores, bits, widths, pairs, starts, lowest, minus_infinity, first, last, work_arrays, values_out, slots_out
):
    """Select rows [first, last) into values_out and slots_out [n, k], slots ascending.

    scores, bits [n * sum(widths)] are the same memory as floats and as integers of their size; pairs
    [2, P] uint32 are the ranks to add, for factor f those in [starts[f - 1], starts[f]); lowest and
    minus_infinity are the lowest integer and the key of -inf; work_arrays come from `scratch`.
    """
    scores, bits, pairs = borrowed(scores), borrowed(bits), borrowed(pairs)
    floats, integers, longs, hints, work = borrow_scratch(work_arrays)
    keys, found = work.keys, work.found
    sums, sum_bits = borrowed(floats[3]), borrowed(integers[3])
    # the chosen by slot; and two rank lists, best first: all that is combined so far, and the factor to add
    values, slots = borrowed(floats[4]), borrowed(longs[1])
    list_values, list_slots = borrowed(floats[5:]), borrowed(longs[2:])
    stages = 2 * widths.size - 1
    k, columns, worst = slots_out.shape[1], scores.size // slots_out.shape[0], scores.dtype.type(-np.inf)
    for row in range(first, last):
        base, length = row * columns, np.int64(1)
        for stage in range(stages):
            f = (stage + 1) // 2
            adding = stage > 0 and stage % 2 == 0
            start = starts[f - 1] if adding else np.int64(0)
            count = starts[f] - start if adding else widths[f]
            kept = min(k, length * widths[f] if adding else count)
            if adding:
                add_pairs(list_values, pairs, start, count, sums)
                order_keys(sum_bits, 0, count, lowest, minus_infinity, keys)
            else:
                order_keys(bits, base, count, lowest, minus_infinity, keys)
            choose(count, kept, adding, pairs, start, widths[f], list_slots, lowest, hints[stage], work)
            for i in range(kept):
                place = found[i]
                if adding:
                    q = np.uint64(start + place)
                    x = sums[place]
                    slots[i] = list_slots[0, pairs[0, q]] * widths[f] + list_slots[1, pairs[1, q]]
                else:
                    x = scores[np.uint64(base + place)]
                    slots[i] = place
                values[i] = x if x == x else worst
            if stage == stages - 1:
                for i in range(k):
                    values_out[row, i] = values[i]
                    slots_out[row, i] = slots[i]
            else:
                side = stage % 2
                to_rank_list(values, slots, kept, lowest, work, list_values[side], list_slots[side])
            if adding or stage == 0:
                length = kept
            if not adding:
                base += count
