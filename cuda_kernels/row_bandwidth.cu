// How fast random rows move: what the sparse delta kernels' floors are measured against (benchmarks/device_check.py).
//
//   move_rows<false>   rows[i] = table[index[i]]          move_rows<true>   table[index[i]] = rows[i]
//
// table [slots, row_bytes], rows [count, row_bytes], row_bytes a multiple of 16; index [count] int32 in [0, slots).
// Ownership: a thread moves 16 bytes; neighbouring threads the pieces of one row. Grid (ceil(count row_bytes / 4096)), 256
// threads. Bytes: 2 row_bytes + 4 per row. Two equal indices of a scatter leave either row.
#include "device_compat.cuh"

template <bool SCATTER>
__global__ void __launch_bounds__(256)
move_rows(unsigned char* table, unsigned char* rows, const int* index, long long pieces, int pieces_per_row) {
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i >= pieces) return;
  const long long row = index[i / pieces_per_row];
  uint4* in_table = (uint4*)table + row * pieces_per_row + i % pieces_per_row;
  uint4* in_rows = (uint4*)rows + i;
  if (SCATTER) *in_table = *in_rows;
  else *in_rows = *in_table;
}
