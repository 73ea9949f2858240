"""Storage of logged rows below float32: bf16, fp8 (e4m3) and int4, the last two with one scale per row.

A stored row is `row_bytes(D, storage)` bytes: the codes of the D columns and then, for fp8 and int4, the scale as a
float32. NATIVE rows are kept in the compute dtype in an array of their own and do not come here.
"""

from __future__ import annotations

import numpy as np

from .compile import kernel

NATIVE, BF16, FP8, INT4 = range(4)
STORAGE = {None: NATIVE, "bf16": BF16, "fp8": FP8, "int4": INT4}
_FP8_MAX, _INT4_MAX = 448.0, 7.0


def row_bytes(width: int, storage: int) -> int:
    """Return the bytes of one stored row of `width` columns."""
    return {NATIVE: 0, BF16: 2 * width, FP8: width + 4, INT4: (width + 1) // 2 + 4}[storage]


def _fp8_values() -> np.ndarray:
    """Return the 256 values of e4m3 (no infinities; 0x7f and 0xff are NaN)."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


_FP8 = _fp8_values()


@kernel
def encode(row, begin, end, storage, code):
    """Store row[begin:end] in `code` (uint8); fp8 and int4 are given whole rows, for their scale."""
    if storage == BF16:
        wide = code[2 * begin : 2 * end].view(np.uint16)
        for c in range(begin, end):
            bits = np.float32(row[c]).view(np.uint32)
            if row[c] != row[c]:
                wide[c - begin] = np.uint16(0x7FFF)
            else:
                wide[c - begin] = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)
        return
    largest = np.float32(0.0)
    for c in range(begin, end):
        size = abs(np.float32(row[c]))
        if size > largest or size != size:  # nothing is greater than a NaN: it stays
            largest = size
    limit = np.float32(_FP8_MAX if storage == FP8 else _INT4_MAX)
    scale = largest / limit
    code[-4:].view(np.float32)[0] = scale
    inverse = np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)
    if storage == FP8:
        for c in range(begin, end):
            code[c] = _fp8_code(np.float32(row[c]) * inverse)
    else:
        for c in range(begin, end, 2):
            low = _int4_code(np.float32(row[c]) * inverse)
            high = _int4_code(np.float32(row[c + 1]) * inverse) if c + 1 < end else np.uint8(0)
            code[c // 2] = low | (high << np.uint8(4))


@kernel
def decode(code, begin, end, storage, row):
    """Restore row[begin:end] from `code`."""
    if storage == BF16:
        wide = code[2 * begin : 2 * end].view(np.uint16)
        for c in range(begin, end):
            row[c] = np.uint32(np.uint32(wide[c - begin]) << np.uint32(16)).view(np.float32)
        return
    scale = code[-4:].view(np.float32)[0]
    if storage == FP8:
        for c in range(begin, end):
            row[c] = _FP8[code[c]] * scale
    else:
        for c in range(begin, end):
            nibble = (code[c // 2] >> np.uint8(4 * (c % 2))) & np.uint8(15)
            row[c] = np.float32(np.int32(nibble) - 8) * scale


@kernel
def _fp8_code(x):
    """Return the e4m3 code nearest to x (ties to even), |x| <= 448."""
    sign = np.uint8(128) if x < np.float32(0.0) else np.uint8(0)
    size = abs(x)
    if size != size:
        return np.uint8(127)
    if size < np.float32(0.015625):  # below 2^-6: multiples of 2^-9
        return sign | np.uint8(np.rint(size * np.float32(512.0)))
    bits = np.float32(min(size, np.float32(_FP8_MAX))).view(np.uint32)
    bits += np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    return sign | np.uint8((bits >> np.uint32(20)) - np.uint32(120 << 3))


@kernel
def _int4_code(x):
    """Return 8 + the whole number nearest to x in [-7, 7]; a NaN becomes 8 (its row's scale is NaN)."""
    if x != x:
        return np.uint8(8)
    return np.uint8(np.int32(np.rint(min(max(x, np.float32(-_INT4_MAX)), np.float32(_INT4_MAX)))) + 8)
