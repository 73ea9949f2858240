// CUDA C++ for g++: keywords, built-in variables, vector types, intrinsics. A kernel file is included as it stands;
// `simt_engine.h` runs it. Not modelled: weak memory (a missing __threadfence), bank conflicts, cooperative groups,
// mbarrier, TMA, wgmma, launches from kernels. Static shared arrays keep the values of the block before.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include "simt_engine.h"

// ---- language --------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ thread_local  // static at block scope, and each OS thread runs one block at a time
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (::simt::current->thread)
#define blockIdx (::simt::worker->block_index)
#define blockDim (::simt::worker->block)
#define gridDim (::simt::worker->grid)
static constexpr int warpSize = 32;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- values as bits --------------------------------------------------------------------------------------------
namespace simt {
template <class T>
uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t u = 0;
  memcpy(&u, &value, sizeof value);
  return u;
}
template <class T>
T unbits(uint64_t u) {
  T value;
  memcpy(&value, &u, sizeof value);
  return value;
}
// As cvt.rn: to the nearest, ties to even, NaN to 0x7fff.
inline unsigned short bf16_bits(float x) {
  const uint32_t u = (uint32_t)bits(x);
  return x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline unsigned short fp16_bits(float x) { return x != x ? 0x7fff : (unsigned short)bits((_Float16)x); }
inline float fp16_value(unsigned short b) { return (float)unbits<_Float16>(b); }
}  // namespace simt
inline float __int_as_float(int x) { return simt::unbits<float>((uint32_t)x); }
inline int __float_as_int(float x) { return (int)simt::bits(x); }
inline float __uint_as_float(unsigned x) { return simt::unbits<float>(x); }
inline unsigned __float_as_uint(float x) { return (unsigned)simt::bits(x); }
inline double __longlong_as_double(long long x) { return simt::unbits<double>((uint64_t)x); }
inline long long __double_as_longlong(double x) { return (long long)simt::bits(x); }

// ---- barriers; `line` is the caller's --------------------------------------------------------------------------
inline void __syncthreads(int line = __builtin_LINE()) { simt::barrier(line, 0, 0); }
inline int __syncthreads_or(int p, int line = __builtin_LINE()) { return simt::barrier(line, p, 0); }
inline int __syncthreads_and(int p, int line = __builtin_LINE()) { return simt::barrier(line, p, 1); }
inline int __syncthreads_count(int p, int line = __builtin_LINE()) { return simt::barrier(line, p, 2); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- warp operations -------------------------------------------------------------------------------------------
namespace simt {
enum Operation { op_sync, op_shuffle, op_ballot, op_add, op_max, op_min, op_match };

inline uint64_t nothing(const Warp&, uint32_t, int) { return 0; }
inline uint64_t pick(const Warp& w, uint32_t lanes, int lane) {
  const uint32_t source = w.argument[lane];
  return lanes >> source & 1 ? w.value[source] : ~0ull;  // undefined on a GPU: here it shows
}
inline uint64_t equal_lanes(const Warp& w, uint32_t lanes, int lane) {
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) r |= (uint32_t)((lanes >> i & 1) && w.value[i] == w.value[lane]) << i;
  return r;
}
inline uint64_t nonzero_lanes(const Warp& w, uint32_t lanes, int) {
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) r |= (uint32_t)((lanes >> i & 1) && w.value[i]) << i;
  return r;
}
template <class T, int OPERATION>
uint64_t reduced(const Warp& w, uint32_t lanes, int) {
  T r = 0;
  bool first = true;
  for (int i = 0; i < 32; ++i) {
    if (!(lanes >> i & 1)) continue;
    const T x = unbits<T>(w.value[i]);
    const T sum = (T)((unsigned)r + (unsigned)x), greater = std::max(r, x), smaller = std::min(r, x);
    r = first ? x : OPERATION == op_add ? sum : OPERATION == op_max ? greater : smaller;
    first = false;
  }
  return bits(r);
}
inline int lane() { return (int)(current->flat % 32); }
template <class T>
T shuffle(const char* what, uint32_t mask, T value, int source, int line) {
  return unbits<T>(collective(what, op_shuffle, mask, bits(value), (uint32_t)source & 31, pick, line));
}
template <class T, int OPERATION>
T reduce(const char* what, uint32_t mask, T value, int line) {
  static_assert(sizeof(T) == 4, "the GPU reduces 32-bit integers");
  return unbits<T>(collective(what, OPERATION, mask, bits(value), 0, reduced<T, OPERATION>, line));
}
}  // namespace simt

inline void __syncwarp(uint32_t mask = ~0u, int line = __builtin_LINE()) {
  simt::collective("__syncwarp", simt::op_sync, mask, 0, 0, simt::nothing, line);
}
// A width cuts the warp into groups; a source outside the lane's group is the lane itself.
template <class T>
T __shfl_sync(uint32_t mask, T x, int source, int width = 32, int line = __builtin_LINE()) {
  const int group = simt::lane() & ~(width - 1);
  return simt::shuffle("__shfl_sync", mask, x, group | (source & (width - 1)), line);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T x, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = simt::lane(), place = lane & (width - 1);
  return simt::shuffle("__shfl_down_sync", mask, x, place + (int)delta >= width ? lane : lane + (int)delta, line);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = simt::lane(), place = lane & (width - 1);
  return simt::shuffle("__shfl_up_sync", mask, x, place < (int)delta ? lane : lane - (int)delta, line);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int with, int width = 32, int line = __builtin_LINE()) {
  const int lane = simt::lane(), source = lane ^ with;
  return simt::shuffle("__shfl_xor_sync", mask, x, source >= (lane & ~(width - 1)) + width ? lane : source, line);
}
inline unsigned __ballot_sync(uint32_t mask, int p, int line = __builtin_LINE()) {
  return (unsigned)simt::collective("__ballot_sync", simt::op_ballot, mask, p != 0, 0, simt::nonzero_lanes, line);
}
inline int __any_sync(uint32_t mask, int p, int line = __builtin_LINE()) { return __ballot_sync(mask, p, line) != 0; }
inline int __all_sync(uint32_t mask, int p, int line = __builtin_LINE()) { return __ballot_sync(mask, !p, line) == 0; }
template <class T>
unsigned __match_any_sync(uint32_t mask, T x, int line = __builtin_LINE()) {
  const uint64_t bits = simt::bits(x);
  return (unsigned)simt::collective("__match_any_sync", simt::op_match, mask, bits, 0, simt::equal_lanes, line);
}
template <class T>
T __reduce_add_sync(uint32_t mask, T x, int line = __builtin_LINE()) {
  return simt::reduce<T, simt::op_add>("__reduce_add_sync", mask, x, line);
}
template <class T>
T __reduce_max_sync(uint32_t mask, T x, int line = __builtin_LINE()) {
  return simt::reduce<T, simt::op_max>("__reduce_max_sync", mask, x, line);
}
template <class T>
T __reduce_min_sync(uint32_t mask, T x, int line = __builtin_LINE()) {
  return simt::reduce<T, simt::op_min>("__reduce_min_sync", mask, x, line);
}

// ---- atomics: relaxed, as on the GPU ---------------------------------------------------------------------------
namespace simt {
template <class T, class F>
T update(T* p, F f) {
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  Word old = __atomic_load_n((Word*)p, __ATOMIC_RELAXED), wanted;
  do wanted = (Word)bits((T)f(unbits<T>(old)));
  while (!__atomic_compare_exchange_n((Word*)p, &old, wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return unbits<T>(old);
}
}  // namespace simt
template <class T, class V>
T atomicAdd(T* p, V v) { return simt::update(p, [=](T x) { return x + (T)v; }); }
template <class T, class V>
T atomicMax(T* p, V v) { return simt::update(p, [=](T x) { return std::max(x, (T)v); }); }
template <class T, class V>
T atomicMin(T* p, V v) { return simt::update(p, [=](T x) { return std::min(x, (T)v); }); }
template <class T, class V>
T atomicOr(T* p, V v) { return simt::update(p, [=](T x) { return x | (T)v; }); }
template <class T, class V>
T atomicExch(T* p, V v) { return simt::update(p, [=](T) { return (T)v; }); }
template <class T>
T atomicCAS(T* p, T expected, T v) { return simt::update(p, [=](T x) { return x == expected ? v : x; }); }

// ---- arithmetic ------------------------------------------------------------------------------------------------
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T v) { *p = v; }
using std::fma;
using std::max;
using std::min;
