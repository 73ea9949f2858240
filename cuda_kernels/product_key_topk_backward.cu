// Gradient of the product-key selection: each selected sum's gradient goes to one column of each factor.
//
//   dscores[row, first_f + c_f(slot_i)] += dvalues[row, i]      for every factor f, in ascending order of i
//
// dvalues [rows, k] float or double, slots [rows, k] int, dscores [rows, columns]: every cell is written.
//
// A block owns a row. Of the entries with one column the first adds them all, in order, from 0: no atomics, k^2 / 2
// comparisons a factor whatever the width. Shared memory: k values and 2 k ints.
// Twins: sdm_lite/cpu/addressing.py, sdm_lite/reference/addressing.py.
#include "device_compat.cuh"

template <typename Value, int THREADS>
__global__ void __launch_bounds__(THREADS)
    product_key_topk_backward(const Value* dvalues, const int* slots, const int* widths, int factors, int columns,
                              int k, Value* dscores) {
  SmemCut cut{dynamic_smem()};
  Value* gradient = cut.take<Value>(k);
  int* rest = cut.take<int>(k);  // the slot without the columns of the factors done
  int* column = cut.take<int>(k);
  const long long row = blockIdx.x;
  Value* out = dscores + row * columns;

#pragma unroll 1
  for (int c = threadIdx.x; c < columns; c += THREADS) out[c] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < k; i += THREADS) gradient[i] = dvalues[row * k + i], rest[i] = slots[row * k + i];
  int first = columns;
#pragma unroll 1
  for (int f = factors - 1; f >= 0; --f) {
    const int width = widths[f];
    first -= width;
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += THREADS) column[i] = rest[i] % width, rest[i] /= width;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += THREADS) {
      int earlier = 0;
#pragma unroll 1
      while (column[earlier] != column[i]) ++earlier;
      if (earlier < i) continue;
      Value sum = 0;
#pragma unroll 1
      for (int j = i; j < k; ++j)
        if (column[j] == column[i]) sum = add_rn(sum, gradient[j]);
      out[first + column[i]] = sum;
    }
    __syncthreads();
  }
}
