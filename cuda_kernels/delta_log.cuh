// The log of overwritten rows: how a row of it is stored, two columns at a time.
//
//   kNative  the state's own dtype (exact)       kBf16, kFp16  16 bits (exact for a state of that dtype)
//   kFp8     e4m3 codes, a scale per 32 columns  kInt4         8 + a whole number in [-7, 7], a scale per 32 columns
//
// Row p of the log is the `pitch` bytes from rows + p * pitch, pitch = the codes of D columns rounded up to 16 bytes;
// an int4 byte holds columns 2 j (low) and 2 j + 1. Scales are [logged, ceil(D / 32)] float32: the largest magnitude
// of the block's 32 columns over 448 (fp8) or 7 (int4).
//
// Why not a scale per row, as the CPU room has: a row's columns lie in many blocks of threads, so its largest entry is
// known only after all of them have read it, and then they have overwritten it. A second pass would write and read
// the log in full once more. A scale per 32 columns is found by half a warp in passing, is at least as exact (a
// block's largest entry is at most its row's), and depends on no tile width. It costs 1 bit a column.
#pragma once
#include "delta_tile.cuh"

constexpr int kNative = 0, kBf16 = 1, kFp8 = 2, kInt4 = 3, kFp16 = 4;
constexpr int kScaled = 32;  // columns that share a scale

// The e4m3 code nearest to x (ties to even), |x| <= 448.
__device__ __forceinline__ unsigned fp8_code(float x) {
  const unsigned sign = x < 0.f ? 128u : 0u;
  const float size = fabsf(x);
  if (size != size) return 127u;
  if (size < 0.015625f) return sign | (unsigned)rintf(size * 512.f);  // below 2^-6: multiples of 2^-9
  unsigned bits = __float_as_uint(fminf(size, 448.f));
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return sign | ((bits >> 20) - (120u << 3));
}
__device__ __forceinline__ float fp8_value(unsigned code) {
  const unsigned size = code & 127u;
  float x = size < 8u ? (float)size * 0.001953125f : __uint_as_float((size << 20) + (120u << 23));
  if (size == 127u) x = __uint_as_float(0x7fffffffu);
  return code & 128u ? -x : x;
}
__device__ __forceinline__ unsigned int4_code(float x) {
  return x != x ? 8u : (unsigned)((int)rintf(fminf(fmaxf(x, -7.f), 7.f)) + 8);
}

// The largest magnitude among the 32 columns of this half of the warp, a NaN if there is one; all 16 threads call.
__device__ __forceinline__ float largest_of_half_warp(float low, float high) {
  const unsigned half = 0xffffu << (threadIdx.x & 16);
  unsigned most = max(__float_as_uint(fabsf(low)), __float_as_uint(fabsf(high)));  // bits order as magnitudes do
#pragma unroll
  for (int apart = 8; apart; apart /= 2) most = max(most, __shfl_xor_sync(half, most, apart));
  return __uint_as_float(most);
}

__host__ __device__ constexpr int log_bits(int storage, int state_bytes) {
  return storage == kNative ? 8 * state_bytes : storage == kFp8 ? 8 : storage == kInt4 ? 4 : 16;
}

template <typename State>
struct Log {
  using two = typename Arithmetic<State>::two;
  unsigned char* rows;
  float* scales;
  int storage, width;
  long long pitch;

  __device__ __forceinline__ Log(unsigned char* rows_, float* scales_, int storage_, int width_)
      : rows(rows_), scales(scales_), storage(storage_), width(width_),
        pitch(((long long)width_ * log_bits(storage_, sizeof(State)) + 127) / 128 * 16) {}

  __device__ __forceinline__ float* scale_of(int place, int column) const {
    return scales + (long long)place * ((width + kScaled - 1) / kScaled) + column / kScaled;
  }

  // Store the thread's two columns of a row; called by all threads of a half warp for the same row.
  __device__ __forceinline__ void put(int place, int column, two x, int live) const {
    unsigned char* row = rows + place * pitch;
    if (storage == kNative) {
      if (live) store_two((State*)row + column, x);
      return;
    }
    const float low = live > 0 ? (float)x.x : 0.f, high = live > 1 ? (float)x.y : 0.f;
    if (storage == kBf16 || storage == kFp16) {
      if (live && storage == kBf16) store_two((bf16*)row + column, make_float2(low, high));
      else if (live) store_two((fp16*)row + column, make_float2(low, high));
      return;
    }
    const float scale = largest_of_half_warp(low, high) / (storage == kFp8 ? 448.f : 7.f);
    const float inverse = scale > 0.f ? 1.f / scale : 0.f;
    if (!live) return;
    if (threadIdx.x % 16 == 0) *scale_of(place, column) = scale;
    if (storage == kFp8)
      *(unsigned short*)(row + column) = (unsigned short)(fp8_code(low * inverse) | fp8_code(high * inverse) << 8);
    else
      row[column / 2] = (unsigned char)(int4_code(low * inverse) | int4_code(high * inverse) << 4);
  }
};

// Two columns of a logged row, from the codes of the pair's 32-column block or tile.
template <typename State>
__device__ __forceinline__ typename Arithmetic<State>::two decode_two(
    const unsigned char* codes, int column, int storage, float scale) {
  using two = typename Arithmetic<State>::two;
  if (storage == kNative) return load_two((const State*)codes + column);
  if (storage == kBf16 || storage == kFp16) {
    const float2 x = storage == kBf16 ? load_two((const bf16*)codes + column) : load_two((const fp16*)codes + column);
    return two{x.x, x.y};
  }
  if (storage == kFp8) {
    const unsigned pair = *(const unsigned short*)(codes + column);
    return two{fp8_value(pair & 255u) * scale, fp8_value(pair >> 8) * scale};
  }
  const unsigned pair = codes[column / 2];
  return two{(float)((int)(pair & 15u) - 8) * scale, (float)((int)(pair >> 4) - 8) * scale};
}
