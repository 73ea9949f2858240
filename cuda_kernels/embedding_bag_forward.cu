// Weighted sums of table rows (an embedding bag), forward.
//
//   y_t = sum_a w_ta V[slot_ta]         a ascending, one fma each, from zero
//
// Shapes: values [S, D] Real; slots [n, K] int32 in [0, S), also twice in a token; weights [n, K], readings [n, D] Real.
// Real is float or double. Ownership: a block owns (token, 128 columns), a thread one of them; grid (n, ceil(D / 128)),
// 128 threads, no shared memory. Bytes per token: K D sizeof Real of rows and D sizeof Real out; slots and weights once
// for each 128 columns, from the caches. Nothing depends on the grid: the bits are those of the CPU room.
// Twins: sdm_lite/cpu/bag.py, sdm_lite/reference/bag.py (which rounds the product too).
#include "device_compat.cuh"

template <typename Real>
__global__ void __launch_bounds__(128)
embedding_bag_forward(const Real* values, const int* slots, const Real* weights, Real* readings, int bag, int width) {
  const long long token = blockIdx.x;
  const int c = blockIdx.y * 128 + threadIdx.x;
  if (c >= width) return;
  const int* slot = slots + token * bag;
  const Real* weight = weights + token * bag;
  Real sum = 0;
#pragma unroll 4  // rows lie anywhere: four are on their way at a time
  for (int a = 0; a < bag; ++a) sum = fused(weight[a], values[(long long)slot[a] * width + c], sum);
  readings[token * width + c] = sum;
}
