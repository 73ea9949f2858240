// The only file that knows which compiler reads a kernel: NVRTC, nvcc, or g++ under the emulator (SIMT_CPU).
// It includes no toolkit header, so NVRTC needs no include path but this folder's.
//
//   bf16, fp16                    16-bit floats as their bits; to_float(x), from_float<T>(f) round to nearest even
//   add_rn(a, b)                  a sum that keeps numbers below 2^-126, which CuPy's -ftz=true turns into zeros
//   fused(a, b, c)               a b + c, rounded once
//   load_two, store_two           two neighbouring columns of a row as float2 (double2 for double): one access each
//   dynamic_smem()                the block's dynamic shared memory, 128-byte aligned
//   SmemCut, SmemRing             cut it into arrays; smem_bytes_for(bytes) is what one array takes
//   async_copy_16, async_copy_4   global -> shared without registers; async_commit(), async_wait<groups still open>()
//
// Everything else (threadIdx, __syncthreads, __shfl_*_sync, __ballot_sync, __syncwarp, fmaf, float2..) is CUDA's own.
#pragma once

#ifdef SIMT_CPU
#include "simt_cpu.h"
#endif

struct __align__(2) bf16 {
  unsigned short bits;
};
struct __align__(2) fp16 {
  unsigned short bits;
};

#ifdef SIMT_CPU
__device__ __forceinline__ unsigned char* dynamic_smem() { return simt::dynamic_smem; }
__device__ __forceinline__ void async_copy_16(void* to_smem, const void* from) { simt::async_copy(to_smem, from, 16); }
__device__ __forceinline__ void async_copy_4(void* to_smem, const void* from) { simt::async_copy(to_smem, from, 4); }
__device__ __forceinline__ void async_commit() { simt::async_commit(); }
template <int OPEN>
__device__ __forceinline__ void async_wait() {
  simt::async_wait(OPEN);
}
__device__ __forceinline__ float add_rn(float a, float b) { return a + b; }
__device__ __forceinline__ unsigned short bf16_bits(float x) { return simt::bf16_bits(x); }
__device__ __forceinline__ unsigned short fp16_bits(float x) { return simt::fp16_bits(x); }
__device__ __forceinline__ float fp16_value(unsigned short bits) { return simt::fp16_value(bits); }
__device__ __forceinline__ unsigned bf16_pair_bits(float low, float high) {
  return simt::bf16_bits(low) | (unsigned)simt::bf16_bits(high) << 16;
}
#else
__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char smem_of_block[];
  return smem_of_block;
}
__device__ __forceinline__ void async_copy_16(void* to_smem, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to_smem)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void async_copy_4(void* to_smem, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(to_smem)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
}
__device__ __forceinline__ float add_rn(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ unsigned short bf16_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ unsigned short fp16_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ float fp16_value(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ unsigned bf16_pair_bits(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
#endif

__device__ __forceinline__ double add_rn(double a, double b) { return a + b; }
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

// ---- 16-bit floats: widening is exact, narrowing rounds to nearest even, a NaN becomes 0x7fff ----
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return fp16_value(x.bits); }
__device__ __forceinline__ double to_float(double x) { return x; }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return bf16{bf16_bits(x)}; }
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) { return fp16{fp16_bits(x)}; }

// ---- two neighbouring columns; p must be aligned to the pair ----
__device__ __forceinline__ float2 load_two(const float* p) { return *(const float2*)p; }
__device__ __forceinline__ double2 load_two(const double* p) { return *(const double2*)p; }
__device__ __forceinline__ float2 load_two(const bf16* p) {
  const unsigned pair = *(const unsigned*)p;
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ float2 load_two(const fp16* p) {
  const unsigned pair = *(const unsigned*)p;
  return make_float2(fp16_value((unsigned short)pair), fp16_value((unsigned short)(pair >> 16)));
}
__device__ __forceinline__ void store_two(float* p, float2 x) { *(float2*)p = x; }
__device__ __forceinline__ void store_two(double* p, double2 x) { *(double2*)p = x; }
__device__ __forceinline__ void store_two(bf16* p, float2 x) { *(unsigned*)p = bf16_pair_bits(x.x, x.y); }
__device__ __forceinline__ void store_two(fp16* p, float2 x) {
  *(unsigned*)p = fp16_bits(x.x) | (unsigned)fp16_bits(x.y) << 16;
}

// ---- shared memory in pieces -----------------------------------------------------------------------------------
// What one array of so many bytes takes of the block's dynamic shared memory.
__host__ __device__ constexpr int smem_bytes_for(int bytes) { return (bytes + 15) / 16 * 16; }

#ifdef SIMT_CPU
constexpr int kSmemStrip = simt::kStripBytes;  // not part of what a launch asks for
#else
constexpr int kSmemStrip = 0;
#endif

// Several arrays of one length, chosen by a number known only at run time: base and stride stay in registers,
// where an array of pointers would go to local memory.
template <typename T>
struct SmemRing {
  unsigned char* base;
  int stride;
  __device__ __forceinline__ T* operator[](int i) const { return (T*)(base + i * stride); }
};

struct SmemCut {
  unsigned char* next;
#ifdef SIMT_CPU
  int strips = 0;
#endif

  template <typename T>
  __device__ __forceinline__ T* take(int count) {
    T* piece = (T*)next;
    next += smem_bytes_for(count * (int)sizeof(T)) + kSmemStrip;
#ifdef SIMT_CPU
    simt::check_piece(piece, piece + count, next, strips++);
#endif
    return piece;
  }
  template <typename T>
  __device__ __forceinline__ SmemRing<T> ring(int arrays, int count) {
    const SmemRing<T> r{next, smem_bytes_for(count * (int)sizeof(T)) + kSmemStrip};
    for (int i = 0; i < arrays; ++i) take<T>(count);
    return r;
  }
};
