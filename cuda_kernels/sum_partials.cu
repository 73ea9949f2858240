// Sums of the sparse delta backward over the D columns, from its partial sums by blocks of 32 columns.
//
//   dread_weights = sum_b dq_b              dwrite_weights = sum_b dk_b        (rule "per_slot": beta times that sum s_w)
//   dlog_decay    = sum_b ddecay_b, and summed over w for a decay per head
//   dbeta         = sum_b dbeta_b           rule "per_slot": sum_w k_w s_w
//
// Shapes: partials [blocks, n, W or R], dbeta's [blocks, n] (rule "shared"; else null), blocks = ceil(D / 32); beta [n];
// write_weights [n, W]; results [n, W], [n, A], [n], [n, R], real.
// Ownership: a warp a token; grid (ceil(n / 4)), 128 threads.
// Order of sums: over blocks ascending, from zero; over w by each thread w = thread, thread + 32, .. ascending, then the
// 32 threads in a tree 16, 8, 4, 2, 1 apart. It depends on D and W alone.
// Bytes per token: blocks (2 W + R + 1) sizeof real in, (W + A + 1 + R) sizeof real out.
// Twin: sdm_lite/cpu/tables.py sum_parts.
#include "device_compat.cuh"

template <typename Real>
__device__ __forceinline__ Real sum_over_blocks(const Real* partial, int blocks, long long stride) {
  Real sum = 0;
#pragma unroll 4
  for (int b = 0; b < blocks; ++b) sum += partial[b * stride];
  return sum;
}
template <typename Real>
__device__ __forceinline__ Real sum_of_warp(Real x) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
  return x;
}

template <typename Real, bool PER_SLOT>
__global__ void __launch_bounds__(128) sum_partials(
    const Real* dk_parts, const Real* ddecay_parts, const Real* dbeta_parts, const Real* dq_parts, const Real* beta,
    const Real* write_weights, Real* dwrite_weights, Real* dlog_decay, Real* dbeta, Real* dread_weights, long long tokens,
    int blocks, int writes, int reads, int decays) {
  const long long token = (long long)blockIdx.x * 4 + threadIdx.x / 32;
  if (token >= tokens) return;
  const int thread = threadIdx.x % 32;
  Real decay = 0, strength = 0;
#pragma unroll 1
  for (int w = thread; w < writes; w += 32) {
    const long long at = token * writes + w;
    const Real s = sum_over_blocks(dk_parts + at, blocks, tokens * writes);
    dwrite_weights[at] = PER_SLOT ? beta[token] * s : s;
    if (PER_SLOT) strength += write_weights[at] * s;
    const Real d = sum_over_blocks(ddecay_parts + at, blocks, tokens * writes);
    if (decays > 1) dlog_decay[at] = d;
    decay += d;
  }
#pragma unroll 1
  for (int r = thread; r < reads; r += 32)
    dread_weights[token * reads + r] = sum_over_blocks(dq_parts + token * reads + r, blocks, tokens * reads);
  decay = sum_of_warp(decay);
  if (PER_SLOT) strength = sum_of_warp(strength);
  if (thread) return;
  if (decays == 1) dlog_decay[token] = decay;
  dbeta[token] = PER_SLOT ? strength : sum_over_blocks(dbeta_parts + token, blocks, tokens);
}
