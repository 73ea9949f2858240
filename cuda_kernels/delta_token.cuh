// The sparse delta rule for one token (spec section 4, paper equations 3 to 5), by one block on its columns.
//
//   error = v - sum_w (alpha_w k_w) M[i_w]                    rule "shared"
//   M[i]  = alpha M[i] + k (beta error)                      or, rule "per_slot", alpha M[i] + (beta k)(v - alpha M[i])
//   y     = sum_r q_r M[i_r]
//
// Both ways to reach rows (staged in shared memory; in the table itself) run this, so they give the same bits.
#pragma once
#include "delta_log.cuh"

// One token's inputs, in shared or global memory. Index: place in the staged rows, or slot of the table.
template <typename Real, typename Index>
struct Token {
  const Index *write_at, *read_at;
  const Real *k, *q, *alpha;
  const int* log_place;  // null: nothing is logged
  Real beta;
  int writes, reads;
  bool decay_per_slot;

  __device__ __forceinline__ Real alpha_of(int w) const { return alpha[decay_per_slot ? w : 0]; }
};

// Returns the prediction error of the thread's columns; the reading's parts lie in part_y after the next barrier.
// `between` is called after the first of the two barriers: there the previous token's part_y may be summed up.
template <bool PER_SLOT, typename State, int TILE, typename Rows, typename Real, typename Index, typename Between>
__device__ __forceinline__ typename Arithmetic<State>::two forward_token(
    const Tile<State, TILE>& tile, const Rows& rows, const Token<Real, Index>& x, typename Arithmetic<State>::two value,
    Real* part_error, Real* part_y, const Log<State>& log, Between between) {
  using two = typename Arithmetic<State>::two;
  const Run writes = run_of(x.writes, tile.group);
  two old[kHeld], sum = {0, 0};
#pragma unroll 1
  for (int first = writes.begin; first < writes.end; first += kHeld)
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int w = first + i;
      if (w >= writes.end) continue;
      old[i] = rows.load(x.write_at[w]);
      if (!PER_SLOT) sum = fused_two(x.alpha_of(w) * x.k[w], old[i], sum);
    }
  if (!PER_SLOT) tile.put_part(part_error, sum);
  __syncthreads();
  between();
  const two error = PER_SLOT ? value : minus_two(value, tile.sum_parts(part_error));
  const two delta = times_two(x.beta, error);

  if (x.log_place)
#pragma unroll 1
    for (int w = writes.begin; w < writes.end; ++w)
      if (x.log_place[w] >= 0) log.put(x.log_place[w], tile.column0 + tile.column, rows.load(x.write_at[w]), tile.live);

  const int last = last_batch(writes);  // the batch that is still in registers: written first, the others loaded again
#pragma unroll 1
  for (int first = last; first >= writes.begin; first -= kHeld)
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int w = first + i;
      if (w >= writes.end) continue;
      if (first != last) old[i] = rows.load(x.write_at[w]);
      const two decayed = times_two(x.alpha_of(w), old[i]);
      rows.store(x.write_at[w], PER_SLOT ? fused_two(x.beta * x.k[w], minus_two(value, decayed), decayed)
                                         : fused_two(x.k[w], delta, decayed));
    }
  __syncthreads();

  const Run reads = run_of(x.reads, tile.group);
  sum = two{0, 0};
#pragma unroll 1
  for (int first = reads.begin; first < reads.end; first += kHeld)
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int r = first + i;
      if (r < reads.end) sum = fused_two(x.q[r], rows.load(x.read_at[r]), sum);
    }
  tile.put_part(part_y, sum);
  return error;
}
