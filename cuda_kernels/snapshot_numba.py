"""Rows in bf16, fp8 (e4m3) and int4 on a GPU, the last two with a scale per row: bytes as in sdm_lite/cpu/snapshot.py.

A stored row is the codes of its D columns and then, for fp8 and int4, the scale as a little-endian float32. A block
owns a row, read twice (once for bf16). A scale that is NaN may have other bits than the CPU's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32, uint32

BF16, FP8, INT4 = 1, 2, 3
STORAGE = {"bf16": BF16, "fp8": FP8, "int4": INT4}
_THREADS = 64
_FP8_MAX, _INT4_MAX = 448.0, 7.0


def row_bytes(width: int, storage: int) -> int:
    """Return the bytes of one stored row of `width` columns."""
    return {BF16: 2 * width, FP8: width + 4, INT4: (width + 1) // 2 + 4}[storage]


def encode(rows: Any, storage: int, codes: Any, stream: Any = 0) -> None:
    """Store rows [n, D], float32 or float64, as codes [n, row_bytes(D, storage)], uint8."""
    if rows.size:
        _encode[rows.shape[0], _THREADS, stream](rows, storage, codes)


def decode(codes: Any, storage: int, rows: Any, stream: Any = 0) -> None:
    """Restore rows [n, D] from codes [n, row_bytes(D, storage)]."""
    if rows.size:
        _decode[rows.shape[0], _THREADS, stream](codes, storage, rows)


@cuda.jit(device=True)
def _bf16_bits(x):
    if x != x:
        return uint32(0x7FFF)
    bits = float32(x).view(np.uint32)
    return (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)


@cuda.jit(device=True)
def _fp8_code(x):
    """Return the e4m3 code nearest to x, ties to even, |x| <= 448."""
    sign = uint32(128) if x < float32(0.0) else uint32(0)
    size = abs(x)
    if size != size:
        return uint32(127)
    if size < float32(0.015625):  # below 2^-6: multiples of 2^-9
        return sign | uint32(round(size * float32(512.0)))
    bits = float32(min(size, float32(_FP8_MAX))).view(np.uint32)
    bits += uint32(0x7FFFF) + ((bits >> uint32(20)) & uint32(1))
    return sign | ((bits >> uint32(20)) - uint32(120 << 3))


@cuda.jit(device=True)
def _fp8_value(code):
    size = code & uint32(127)
    x = float32(size) * float32(0.001953125)
    if size >= uint32(8):
        x = uint32((size << uint32(20)) + uint32(120 << 23)).view(np.float32)
    if size == uint32(127):
        x = float32(np.nan)
    return -x if code & uint32(128) else x


@cuda.jit(device=True)
def _int4_code(x):
    """Return 8 + the whole number nearest to x in [-7, 7]; a NaN becomes 8, its row's scale is NaN."""
    if x != x:
        return uint32(8)
    return uint32(round(min(max(x, float32(-_INT4_MAX)), float32(_INT4_MAX))) + 8)


@cuda.jit(device=True)
def _largest(row, most):
    """Return the largest magnitude of the block's row, a NaN if there is one; most [threads] is in shared memory."""
    mine = uint32(0)  # bits of magnitudes order as these do, NaN above all
    thread, half = int(cuda.threadIdx.x), _THREADS // 2
    for c in range(thread, row.size, _THREADS):
        mine = max(mine, float32(row[c]).view(np.uint32) & uint32(0x7FFFFFFF))
    most[thread] = mine
    cuda.syncthreads()
    while half > 0:
        if thread < half:
            most[thread] = max(most[thread], most[thread + half])
        cuda.syncthreads()
        half //= 2
    return uint32(most[0]).view(np.float32)


@cuda.jit
def _encode(rows, storage, codes):
    most = cuda.shared.array(_THREADS, np.uint32)
    row, code = rows[cuda.blockIdx.x], codes[cuda.blockIdx.x]
    thread, threads, width = int(cuda.threadIdx.x), _THREADS, rows.shape[1]
    if storage == BF16:
        for c in range(thread, width, threads):
            bits = _bf16_bits(float32(row[c]))
            code[2 * c] = bits & uint32(255)
            code[2 * c + 1] = bits >> uint32(8)
        return
    scale = _largest(row, most) / float32(_FP8_MAX if storage == FP8 else _INT4_MAX)
    inverse = float32(1.0) / scale if scale > float32(0.0) else float32(0.0)
    if thread < 4:
        code[code.size - 4 + thread] = (float32(scale).view(np.uint32) >> uint32(8 * thread)) & uint32(255)
    if storage == FP8:
        for c in range(thread, width, threads):
            code[c] = _fp8_code(float32(row[c]) * inverse)
    else:
        for c in range(2 * thread, width, 2 * threads):
            low = _int4_code(float32(row[c]) * inverse)
            high = _int4_code(float32(row[c + 1]) * inverse) if c + 1 < width else uint32(0)
            code[c // 2] = low | (high << uint32(4))


@cuda.jit
def _decode(codes, storage, rows):
    row, code = rows[cuda.blockIdx.x], codes[cuda.blockIdx.x]
    thread, threads, width = int(cuda.threadIdx.x), _THREADS, rows.shape[1]
    if storage == BF16:
        for c in range(thread, width, threads):
            bits = uint32(code[2 * c]) | (uint32(code[2 * c + 1]) << uint32(8))
            row[c] = uint32(bits << uint32(16)).view(np.float32)
        return
    bits = uint32(0)
    for i in range(4):
        bits |= uint32(code[code.size - 4 + i]) << uint32(8 * i)
    scale = uint32(bits).view(np.float32)
    for c in range(thread, width, threads):
        if storage == FP8:
            row[c] = _fp8_value(uint32(code[c])) * scale
        else:
            nibble = (uint32(code[c // 2]) >> uint32(4 * (c % 2))) & uint32(15)
            row[c] = float32(np.int32(nibble) - 8) * scale
