// Kernels with one planted fault each, and the same kernels without: what the emulator must catch and must not.
#include "device_compat.cuh"

enum Fault {
  none,
  no_barrier,          // between two steps of a sum in shared memory
  no_warp_barrier,     // __syncwarp
  past_global,         // one element past an array in global memory
  past_dynamic,        // one past a piece of dynamic shared memory, into the next
  past_static,         // past a static shared array
  past_launch,         // pieces that take more shared memory than the launch gives
  copy_not_awaited,    // cp.async
  copy_awaited_late,   // after its first use
  divergent_barrier,
  return_before_barrier,
  returned_lane,       // a warp operation that waits for it
  mixed_operations,    // lanes of one mask at different warp operations
  shared_cell,         // two blocks write one cell
  misaligned,          // a float4 at an address that is no multiple of 16
};

// out[block] = sum of the block's 4 THREADS numbers of x [n]; n must be a multiple of 4.
template <int THREADS, Fault FAULT>
__global__ void __launch_bounds__(THREADS) block_sum(const float* x, float* out, int n) {
  __shared__ float total[2];
  SmemCut cut{dynamic_smem()};
  float* part = cut.take<float>(THREADS);
  float4* stage = cut.take<float4>(FAULT == past_launch ? THREADS + 1 : THREADS);
  const int t = threadIdx.x, first = (blockIdx.x * THREADS + t) * 4;
  if constexpr (FAULT == return_before_barrier)
    if (first >= n) return;

  if (first < n)
    async_copy_16(&stage[t], x + first);
  else
    stage[t] = make_float4(0.f, 0.f, 0.f, 0.f);
  async_commit();
  if constexpr (FAULT != copy_not_awaited && FAULT != copy_awaited_late) async_wait<0>();
  const float4 four = stage[t];
  if constexpr (FAULT == copy_awaited_late) async_wait<0>();
  part[t] = (four.x + four.y) + (four.z + four.w);
  if constexpr (FAULT == past_dynamic) part[t + 1] = part[t];
  if constexpr (FAULT == past_static) total[t / 32] = 0.f;
  if constexpr (FAULT == divergent_barrier)
    if (t < 32) __syncthreads();
  __syncthreads();
  for (int half = THREADS / 2; half >= 32; half /= 2) {
    if (t < half) part[t] += part[t + half];
    if constexpr (FAULT != no_barrier) __syncthreads();
  }
  if (t < 32) {
    float sum = part[t];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (t == 0) {
      total[0] = sum;
      out[FAULT == shared_cell ? 0 : blockIdx.x] = total[0];
      if constexpr (FAULT == past_global) out[gridDim.x] = 1.f;
    }
  }
}

// out[0] = sum of 32 numbers through shared memory, out[1] = through the warp's own operations.
template <Fault FAULT>
__global__ void warp_sum(const float* x, float* out) {
  __shared__ __align__(16) float part[64];
  const int t = threadIdx.x;
  if constexpr (FAULT == returned_lane)
    if (t == 5) return;
  part[t] = x[t];
  part[t + 32] = 0.f;
  if constexpr (FAULT != no_warp_barrier) __syncwarp();
  for (int step = 16; step > 0; step /= 2) {
    const float sum = part[t] + part[t + step];
    if constexpr (FAULT != no_warp_barrier) __syncwarp();
    part[t] = sum;
    if constexpr (FAULT != no_warp_barrier) __syncwarp();
  }
  if constexpr (FAULT == misaligned) out[0] = (*(const float4*)(part + 1)).x;
  if constexpr (FAULT == mixed_operations)
    if (t < 16) __syncwarp();
  float sum = x[t];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (t == 0) out[0] = part[0], out[1] = sum;
}

// Both halves of a warp at work on their own, each with its mask; atomics; all 65,536 16-bit floats and back.
__global__ void diverged_halves(int* sums) {
  const int t = threadIdx.x;
  int v = t;
  if (t < 16)
    for (int step = 8; step; step /= 2) v += __shfl_xor_sync(0x0000ffffu, v, step, 16);
  else
    for (int step = 8; step; step /= 2) v = max(v, __shfl_xor_sync(0xffff0000u, v, step, 16));
  __syncwarp();
  sums[t] = v;
}
__global__ void histogram(const unsigned* x, int n, unsigned* bins, unsigned* total) {
  __shared__ unsigned mine[16];
  const int t = threadIdx.y * blockDim.x + threadIdx.x, i = blockIdx.x * blockDim.x * blockDim.y + t;
  if (t < 16) mine[t] = 0;
  __syncthreads();
  const unsigned v = i < n ? x[i] % 16 : 0;
  if (i < n) atomicAdd(&mine[v], 1u);
  const unsigned sum = __reduce_add_sync(0xffffffffu, v);
  if (t % 32 == 0) atomicAdd(total, sum);
  __syncthreads();
  if (t < 16) atomicAdd(&bins[t], mine[t]);
}
template <typename T>
__global__ void round_trip(const float* x, float* wide, T* narrow, int n) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  if (i + 1 >= n) return;
  store_two(narrow + i, make_float2(x[i], x[i + 1]));
  const float2 two = load_two(narrow + i);
  wide[i] = two.x, wide[i + 1] = to_float(from_float<T>(x[i + 1]));
  if (__float_as_uint(wide[i + 1]) != __float_as_uint(two.y)) wide[i + 1] = -1.f;
}
