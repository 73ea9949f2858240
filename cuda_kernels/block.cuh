// What the threads of one block do together: sort, and number the flagged ones.
//
// Loops here and in the selection are kept rolled: left alone the compiler unrolls each by four, for three times the
// compile time and nothing to hide, since blocks of other rows run meanwhile.
#pragma once
#include "device_compat.cuh"

__host__ __device__ constexpr int power_of_two_from(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Bitonic sort of `size` items, a power of two; in_order(a, b) says that a goes before b. Barriers before and after.
template <int THREADS, typename Item, typename InOrder>
__device__ __forceinline__ void block_sort(Item* items, int size, InOrder in_order) {
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2)
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < size; i += THREADS) {
        const int j = i ^ step;
        if (j < i) continue;
        const Item a = items[i], b = items[j];
        if (in_order(a, b) != ((i & run) == 0)) items[i] = b, items[j] = a;
      }
    }
  __syncthreads();
}

// How many threads before this one have the flag, and how many of the block. Every thread calls it.
template <int THREADS>
__device__ __forceinline__ int flags_before(bool flag, int* of_block) {
  __shared__ int of_warp[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned flags = __ballot_sync(0xffffffffu, flag);
  __syncthreads();  // the counts of the call before have been read
  if (lane == 0) of_warp[warp] = __popc(flags);
  __syncthreads();
  int before = __popc(flags & ((1u << lane) - 1)), total = 0;
#pragma unroll 1
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  *of_block = total;
  return before;
}
