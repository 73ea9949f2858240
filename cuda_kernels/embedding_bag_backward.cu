// Weighted sums of table rows (an embedding bag), backward: the gradients of the table and of the weights.
//
//   dV[i]  = sum over the reads (t, a) of slot i of w_ta dy_t     t ascending, then a; one fma each, from zero
//   dw_ta  = <V[slot_ta], dy_t>                                   16 sums of every 16th column, then a tree 8, 4, 2, 1
//
// Shapes: dreadings [n, D], weights, dweights [n, K], values, dvalues [S, D] Real (float or double); slots [n, K] int32
// in [0, S). A read is its number t K + a. order [n K] int64: the reads sorted by slot, equal slots in their order (a
// stable sort). dvalues comes in as zeros: rows that no token reads are not touched.
//
// Ownership, 128 threads each, no shared memory:
//   embedding_bag_values_backward   grid (n K, ceil(D / 128)): block p owns the slot whose reads begin at order[p], if
//                                   any do, and 128 columns; a thread one of them. No atomics: nobody else adds to it.
//   embedding_bag_weights_backward  grid (ceil(n K / 8)): 16 threads a read
// Bytes: n K D sizeof Real of rows each, and the rows of dvalues that are read, once. A slot that very many tokens read is
// summed by its block alone, in order: that is what a fixed order costs.
// The bits are those of the CPU room. Twins: sdm_lite/cpu/bag.py, sdm_lite/reference/bag.py (which rounds products too).
#include "device_compat.cuh"

template <typename Real>
__global__ void __launch_bounds__(128)
embedding_bag_values_backward(const Real* dreadings, const int* slots, const Real* weights, const long long* order,
                              Real* dvalues, int reads, int bag, int width) {
  const int p = blockIdx.x;
  const int slot = slots[order[p]], c = blockIdx.y * 128 + threadIdx.x;
  if (c >= width || (p > 0 && slots[order[p - 1]] == slot)) return;
  Real sum = 0;
  for (int i = p; i < reads; ++i) {
    const int read = (int)order[i];  // the grid has a block a read, so their number fits
    if (slots[read] != slot) break;
    sum = fused(weights[read], dreadings[(long long)(read / bag) * width + c], sum);
  }
  dvalues[(long long)slot * width + c] = sum;
}

template <typename Real>
__global__ void __launch_bounds__(128)
embedding_bag_weights_backward(const Real* dreadings, const Real* values, const int* slots, Real* dweights,
                               long long reads, int bag, int width) {
  const long long read = (long long)blockIdx.x * 8 + threadIdx.x / 16;
  if (read >= reads) return;
  const Real* dy = dreadings + read / bag * width;
  const Real* row = values + (long long)slots[read] * width;
  Real sum = 0;
#pragma unroll 4
  for (int c = threadIdx.x % 16; c < (width + 15) / 16 * 16; c += 16)  // columns that do not exist count as zeros
    sum = fused(c < width ? dy[c] : (Real)0, c < width ? row[c] : (Real)0, sum);
  const unsigned half = 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int apart = 8; apart; apart /= 2) sum += __shfl_xor_sync(half, sum, apart);
  if (threadIdx.x % 16 == 0) dweights[read] = sum;
}
