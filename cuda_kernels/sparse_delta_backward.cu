// Sparse delta rule, backward: the forward's tokens in reverse, its writes undone (spec sections 5 and 6). G is dL/dM.
//
//   read :  G[r] += q_r dy;                 dq_r = <M[r], dy>
//   write:  ddelta = sum_i k_i G[i];        dv = beta ddelta;     dbeta = <ddelta, error>
//           M_prev[i] = logged row, or (M[i] - k_i delta) inverse_i,  delta = beta error
//           dm_i = G[i] - beta k_i ddelta;  dk_i = <G[i], delta> - beta <ddelta, alpha_i M_prev[i]>
//           dlog_decay_i = <dm_i, alpha_i M_prev[i]>
//           G[i] = alpha_i dm_i;            M[i] = M_prev[i]
//   rule "per_slot": s_i = <G[i], v - alpha_i M_prev[i]> in place of dk_i (dk_i = beta s_i, dbeta = sum_i k_i s_i:
//           sum_partials.cu);  dv = sum_i beta k_i G[i];  M_prev[i] = logged row, or (M[i] - beta k_i v) inverse_i;
//           dm_i = G[i] - beta k_i G[i];    the rest as above
//
// Shapes as in sparse_delta_forward.cu, and:
//   table [.., D] State, in: after the last token, out: before the first, as restored
//   grad [.., D] real, in: dL/d(final state) or zeros, out: dL/d(initial state); rows no token touches stay as they are
//   target [n, D] real: the saved error ("shared"), values ("per_slot");  dreadings, dvalues [n, D] real
//   alpha [n, A], inverse [n, I] (I = W for "per_slot", else A; sparse_delta_gates.cu)
//   log_place [n, W] or null, log_rows, log_scales, storage: as the forward left them (delta_log.cuh)
//   *_parts: partial sums by 32 columns for sum_partials.cu: [ceil(D / 32), n, W or R], dbeta_parts [ceil(D / 32), n]
//   all_tokens: n
// State: that of the forward where every write is logged, or where it is float or double. Rows of a 16-bit state that
// are inverted need a float table (State float, storage kBf16 or kFp16 for what is logged): they are no 16-bit numbers.
//
// Launch: grid (L, ceil(D / TILE)), 4 TILE threads, shared bytes as shared_memory.py has it: s(x) = x rounded up to 16,
//   2 s(row_budget TILE sizeof State) + 2 s(row_budget TILE sizeof real) + 3 s(8 row_budget) + s(parts TILE sizeof real)
//   + 2 token_budget (s(2 W) + s(2 R) + s(W real) + s(R real) + s(A real) + s(I real) + 16 + 2 s(TILE real)
//                     + [log_place: s(4 W) + W TILE bits / 8 + s(4 W TILE / 32)])
// Ownership: as in the forward. M and G of a row travel together. Logged rows are staged like the tokens' inputs.
// Order of sums: over rows as in delta_tile.cuh; over a block of 32 columns: a thread's two columns first, then 16
// threads in a tree 8, 4, 2, 1 apart. The plan is the forward's, walked backwards; the bits of every result are the
// same for any TILE, budgets, batch and schedule.
// Traffic per token and lane: at most 2 (W + R) D (State + real) bytes + 4 D real, less what neighbouring chunks share,
// the logged rows, and (2 W + R + 1) ceil(D / 32) real of partial sums. Barriers a token: three; "per_slot" two.
//
// The caller ensures: as for the forward; a row that is not logged has a finite inverse.
// Twins: sdm_lite/reference/delta.py, sdm_lite/cpu/backward.py (whose sums run in other orders).
#include "delta_log.cuh"
#include "delta_walk.cuh"

__device__ __forceinline__ unsigned half_warp() { return 0xffffu << (threadIdx.x & 16); }

// Sums each of kHeld numbers over the half warp's 16 threads; thread i gets the sum of number i / 2.
template <typename Real>
__device__ __forceinline__ Real sum_rows(Real (&x)[kHeld]) {
#pragma unroll
  for (int left = kHeld / 2; left; left /= 2) {  // threads 2 * left apart: each keeps half of its numbers
    const bool upper = threadIdx.x & (2 * left);
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const Real sent = upper ? x[i] : x[i + left];
      x[i] = (upper ? x[i + left] : x[i]) + __shfl_xor_sync(half_warp(), sent, 2 * left);
    }
  }
  return x[0] + __shfl_xor_sync(half_warp(), x[0], 1);
}
template <typename Real>
__device__ __forceinline__ Real sum_one(Real x) {
#pragma unroll
  for (int apart = 8; apart; apart /= 2) x += __shfl_xor_sync(half_warp(), x, apart);
  return x;
}
// a.x b.x + a.y b.y on top of `sum`, one fma each.
template <typename Real, typename Two>
__device__ __forceinline__ Real dot_two(Two a, Two b, Real sum) { return fused(a.y, b.y, fused(a.x, b.x, sum)); }

// One token's staged inputs; target and dy are those of the thread's columns.
template <typename Real, typename Two>
struct StagedToken {
  const unsigned short *write_at, *read_at;
  const Real *k, *q, *alpha, *inverse;
  const int* log_place;  // null: nothing is logged
  const unsigned char* codes;
  const float* scales;
  Real beta;
  Two target, dy;
  long long number;
};

// What a block needs to undo tokens, and how; m and g: the staged rows of M and G from the thread's first column on.
template <typename State, int TILE, bool PER_SLOT>
struct Undo {
  using real = typename Arithmetic<State>::real;
  using two = typename Arithmetic<State>::two;
  using Staged = StagedToken<real, two>;
  const Tile<State, TILE>& tile;
  real *parts, *dvalues, *dk_parts, *ddecay_parts, *dbeta_parts, *dq_parts;
  long long all_tokens;
  int width, writes, reads, decays, inverses, storage, code_bytes;
  State* m;
  real* g;

  __device__ __forceinline__ int block_of_columns() const { return (tile.column0 + tile.column) / kScaled; }
  __device__ __forceinline__ bool block_exists() const { return block_of_columns() * kScaled < width; }

  // Writes the sums of a batch of rows over the half warp's 32 columns to partials [.., n, count].
  __device__ __forceinline__ void put_sums(real* partials, long long token, int count, int first, int end,
                                           real (&x)[kHeld]) const {
    const real sum = sum_rows(x);
    const int row = first + threadIdx.x % 16 / 2;
    if (threadIdx.x % 2 == 0 && row < end && block_exists())
      partials[(block_of_columns() * all_tokens + token) * count + row] = sum;
  }
  __device__ __forceinline__ void put_dvalues(long long token, two x) const {
    if (tile.group == 0) store_columns(dvalues + token * width + tile.column0 + tile.column, x, tile.live);
  }

  // Rows past a run's end are its last row again, computed and dropped: straight code compiles sooner than guarded.
  __device__ __forceinline__ void take_reading_back(const Staged& x) const {
    const Run run = run_of(reads, tile.group);
#pragma unroll 1
    for (int first = run.begin; first < run.end; first += kHeld) {
      real along[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int r = min(first + j, run.end - 1), at = x.read_at[r] * TILE;
        const two changed = fused_two(x.q[r], x.dy, load_two(g + at));
        if (first + j < run.end) store_two(g + at, changed);
        along[j] = dot_two(load_two(m + at), x.dy, (real)0);
      }
      put_sums(dq_parts, x.number, reads, first, run.end, along);
    }
  }

  // Logged rows take their place; nobody else looks at them before the token's last barrier.
  __device__ __forceinline__ void restore_logged(const Staged& x, Run run) const {
    if (!x.log_place) return;
#pragma unroll 1
    for (int w = run.begin; w < run.end; ++w) {
      if (x.log_place[w] < 0) continue;
      const float scale = x.scales[w * (TILE / kScaled) + tile.column / kScaled];
      two before = decode_two<State>(x.codes + w * code_bytes, tile.column, storage, scale);
      if (tile.live < 1) before.x = 0;
      if (tile.live < 2) before.y = 0;
      store_two(m + x.write_at[w] * TILE, before);
    }
  }

  // Returns ddelta, of which dv and dbeta are made on the way. One barrier.
  __device__ __forceinline__ two take_error_back(const Staged& x, Run run) const {
    two sum = {0, 0};
#pragma unroll 1
    for (int first = run.begin; first < run.end; first += kHeld)
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int w = min(first + j, run.end - 1);
        const two more = fused_two(x.k[w], load_two(g + x.write_at[w] * TILE), sum);
        if (first + j < run.end) sum = more;
      }
    tile.put_part(parts, sum);
    __syncthreads();
    const two ddelta = tile.sum_parts(parts);
    put_dvalues(x.number, times_two(x.beta, ddelta));
    if (tile.group == 0) {
      const real dbeta = sum_one(dot_two(ddelta, x.target, (real)0));
      if (threadIdx.x % 16 == 0 && block_exists()) dbeta_parts[block_of_columns() * all_tokens + x.number] = dbeta;
    }
    return ddelta;
  }

  // Rows back to M_prev, G through the decay and the residual. Returns the group's part of dv, rule "per_slot".
  __device__ __forceinline__ two undo_writes(const Staged& x, Run run, two delta, two pull) const {
    two sum = {0, 0};
#pragma unroll 1
    for (int first = run.begin; first < run.end; first += kHeld) {
      real along[kHeld], gate[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        along[j] = gate[j] = 0;
        const int w = first + j;
        if (w >= run.end) continue;
        const int at = x.write_at[w] * TILE;
        const real alpha = x.alpha[decays > 1 ? w : 0], step = PER_SLOT ? x.beta * x.k[w] : x.k[w];
        const two gi = load_two(g + at);
        two before = load_two(m + at);
        if (!x.log_place || x.log_place[w] < 0)
          before = times_two(x.inverse[inverses > 1 ? w : 0],
                             fused_two(-step, PER_SLOT ? x.target : delta, before));
        const two decayed = times_two(alpha, before);
        const two dm = PER_SLOT ? fused_two(-step, gi, gi) : fused_two(step, pull, gi);
        if (PER_SLOT) sum = fused_two(step, gi, sum);
        store_two(g + at, times_two(alpha, dm));
        store_two(m + at, before);
        along[j] = PER_SLOT ? dot_two(gi, minus_two(x.target, decayed), (real)0)
                            : dot_two(pull, decayed, dot_two(gi, delta, (real)0));
        gate[j] = dot_two(dm, decayed, (real)0);
      }
      put_sums(dk_parts, x.number, writes, first, run.end, along);
      put_sums(ddecay_parts, x.number, writes, first, run.end, gate);
    }
    return sum;
  }

  __device__ __forceinline__ void token(const Staged& x) const {
    take_reading_back(x);
    __syncthreads();
    const Run run = run_of(writes, tile.group);
    restore_logged(x, run);
    two delta = {0, 0}, pull = {0, 0};
    if (!PER_SLOT) {
      pull = times_two(-x.beta, take_error_back(x, run));
      delta = times_two(x.beta, x.target);
    }
    const two dvalue = undo_writes(x, run, delta, pull);
    if (PER_SLOT) tile.put_part(parts, dvalue);
    __syncthreads();
    if (PER_SLOT && tile.group == 0) put_dvalues(x.number, tile.sum_parts(parts));
  }
};

// One block for a multiprocessor is asked of the compiler: shared memory hardly leaves room for two, and for three of
// them ptxas would spill registers.
template <typename State, int TILE, bool PER_SLOT>
__global__ void __launch_bounds__(TILE * 4, 1) sparse_delta_backward(
    State* table, typename Arithmetic<State>::real* grad, const long long* row_start,
    const typename Arithmetic<State>::real* target, const typename Arithmetic<State>::real* dreadings,
    const typename Arithmetic<State>::real* write_weights, const typename Arithmetic<State>::real* alpha,
    const typename Arithmetic<State>::real* inverse, const typename Arithmetic<State>::real* beta,
    const typename Arithmetic<State>::real* read_weights, typename Arithmetic<State>::real* dvalues,
    typename Arithmetic<State>::real* dk_parts, typename Arithmetic<State>::real* ddecay_parts,
    typename Arithmetic<State>::real* dbeta_parts, typename Arithmetic<State>::real* dq_parts, const int* log_place,
    unsigned char* log_rows, float* log_scales, int storage, const RowEntry* rows, const int* row_count, const int* chunk_start,
    const int* chunks, const unsigned short* place_w, const unsigned short* place_r, int row_stride, int row_budget,
    int token_budget, const long long* cu_seqlens, long long all_tokens, int heads, int tokens, int width, int writes,
    int reads, int decays) {
  using real = typename Arithmetic<State>::real;
  using two = typename Arithmetic<State>::two;
  using Block = Tile<State, TILE>;
  const int lane_index = blockIdx.x;
  const Block tile(blockIdx.y, width);
  const Lane lane = lane_at(lane_index, heads, tokens, cu_seqlens);
  const Plan whole{rows, row_count, chunk_start, chunks, place_w, place_r, row_stride};
  const LanePlan plan = plan_of(whole, lane, lane_index, writes, reads);
  const Columns<State, TILE> columns(table, row_start[lane_index], width, tile.column0, tile.columns);
  const Columns<real, TILE> grad_columns(grad, row_start[lane_index], width, tile.column0, tile.columns);
  const Log<State> log(log_rows, log_scales, storage, width);
  const int inverses = PER_SLOT ? writes : decays;
  const int code_bytes = TILE * log_bits(storage, sizeof(State)) / 8;  // of a logged row's TILE columns
  constexpr int kScales = TILE / kScaled;
  const int logged = log_place ? token_budget : 0;

  SmemCut cut{dynamic_smem()};
  const auto s_m = cut.ring<State>(2, row_budget * TILE);
  const auto s_g = cut.ring<real>(2, row_budget * TILE);
  const auto lists = cut.ring<RowEntry>(3, (row_budget + 1) / 2 * 2);  // copied two entries at a time
  const int at_w = staged<unsigned short>(writes), at_r = staged<unsigned short>(reads), at_k = staged<real>(writes),
            at_q = staged<real>(reads), at_alpha = staged<real>(decays), at_inverse = staged<real>(inverses),
            at_beta = staged<real>(1), at_log = staged<int>(writes), at_scale = staged<float>(writes * kScales);
  const auto s_place_w = cut.ring<unsigned short>(2, token_budget * at_w);
  const auto s_place_r = cut.ring<unsigned short>(2, token_budget * at_r);
  const auto s_k = cut.ring<real>(2, token_budget * at_k), s_q = cut.ring<real>(2, token_budget * at_q);
  const auto s_alpha = cut.ring<real>(2, token_budget * at_alpha);
  const auto s_inverse = cut.ring<real>(2, token_budget * at_inverse);
  const auto s_beta = cut.ring<real>(2, token_budget * at_beta);
  const auto s_target = cut.ring<real>(2, token_budget * TILE), s_dy = cut.ring<real>(2, token_budget * TILE);
  real* parts = cut.take<real>(Block::kParts * TILE);
  const auto s_log = cut.ring<int>(2, logged * at_log);
  const auto s_codes = cut.ring<unsigned char>(2, logged * writes * code_bytes);
  const auto s_scale = cut.ring<float>(2, logged * at_scale);

  if (tile.columns < TILE)  // columns that do not exist count as zeros in the sums over columns
#pragma unroll 1
    for (int b = 0; b < 2; ++b) {
#pragma unroll 1
      for (int i = threadIdx.x; i < row_budget * TILE; i += Block::kThreads) {
        store_one(s_m[b] + i, (real)0);
        s_g[b][i] = 0;
      }
#pragma unroll 1
      for (int i = threadIdx.x; i < token_budget * TILE; i += Block::kThreads) s_target[b][i] = s_dy[b][i] = 0;
    }

  auto fetch_rows = [&](const RowEntry* list, int count, int buffer) {
    auto wanted = [](RowEntry e) { return e.to == kNoPlace; };
    columns.fetch(s_m[buffer], list, count, wanted);
    grad_columns.fetch(s_g[buffer], list, count, wanted);
  };
  auto fetch_log = [&](long long token, int i, int buffer) {  // by a warp: a token's logged rows, 32 at a time
    const int pieces = code_bytes / 16, at_once = max(1, 32 / pieces), thread = threadIdx.x % 32;
    const long long offset = (long long)tile.column0 * log_bits(storage, sizeof(State)) / 8;
    const int bytes = (int)min((long long)code_bytes, log.pitch - offset);
#pragma unroll 1
    for (int w0 = 0; w0 < writes; w0 += 32) {
      const int mine = w0 + thread < writes ? log_place[token * writes + w0 + thread] : -1;
      if ((storage == kFp8 || storage == kInt4) && mine >= 0)
#pragma unroll 1
        for (int s = 0; s < kScales && tile.column0 + s * kScaled < width; ++s)
          async_copy_4(s_scale[buffer] + i * at_scale + (w0 + thread) * kScales + s,
                       log.scale_of(mine, tile.column0 + s * kScaled));
#pragma unroll 1
      for (int j = 0; j < 32; j += at_once) {
        const int row = j + thread / pieces % at_once, place = __shfl_sync(0xffffffffu, mine, row);
        if (place < 0) continue;
        unsigned char* to = s_codes[buffer] + (i * writes + w0 + row) * code_bytes;
        const unsigned char* from = log.rows + place * log.pitch + offset;
#pragma unroll 1
        for (int at = thread % pieces * 16; at < bytes; at += 32 * 16) async_copy_16(to + at, from + at);
      }
    }
  };
  auto fetch_tokens = [&](int begin, int end, int buffer) {  // a token by each warp
#pragma unroll 1
    for (int t = begin + (int)threadIdx.x / 32; t < end; t += Block::kWarps) {
      const int i = t - begin;
      const long long token = lane.token(t);
      stage(s_place_w[buffer] + i * at_w, plan.place_w + (long long)t * writes, writes);
      stage(s_place_r[buffer] + i * at_r, plan.place_r + (long long)t * reads, reads);
      stage(s_k[buffer] + i * at_k, write_weights + token * writes, writes);
      stage(s_q[buffer] + i * at_q, read_weights + token * reads, reads);
      stage(s_alpha[buffer] + i * at_alpha, alpha + token * decays, decays);
      stage(s_inverse[buffer] + i * at_inverse, inverse + token * inverses, inverses);
      stage(s_beta[buffer] + i * at_beta, beta + token, 1);
      stage(s_target[buffer] + i * TILE, target + token * width + tile.column0, tile.columns);
      stage(s_dy[buffer] + i * TILE, dreadings + token * width + tile.column0, tile.columns);
      if (!log_place) continue;
      stage(s_log[buffer] + i * at_log, log_place + token * writes, writes);
      fetch_log(token, i, buffer);
    }
  };

  Undo<State, TILE, PER_SLOT> undo{tile,       parts,  dvalues, dk_parts, ddecay_parts, dbeta_parts, dq_parts,
                                   all_tokens, width,  writes,  reads,    decays,       inverses,    storage,
                                   code_bytes, nullptr, nullptr};
  auto run = [&](int begin, int end, int rows_buffer, int buffer) {
    undo.m = s_m[rows_buffer] + tile.column;
    undo.g = s_g[rows_buffer] + tile.column;
#pragma unroll 1
    for (int t = end - 1; t >= begin; --t) {
      const int i = t - begin;
      StagedToken<real, two> x;
      x.write_at = s_place_w[buffer] + i * at_w;
      x.read_at = s_place_r[buffer] + i * at_r;
      x.k = s_k[buffer] + i * at_k;
      x.q = s_q[buffer] + i * at_q;
      x.alpha = s_alpha[buffer] + i * at_alpha;
      x.inverse = s_inverse[buffer] + i * at_inverse;
      x.log_place = log_place ? s_log[buffer] + i * at_log : nullptr;
      x.codes = s_codes[buffer] + i * writes * code_bytes;
      x.scales = s_scale[buffer] + i * at_scale;
      x.beta = s_beta[buffer][i * at_beta];
      x.target = load_two(s_target[buffer] + i * TILE + tile.column);
      x.dy = load_two(s_dy[buffer] + i * TILE + tile.column);
      x.number = lane.token(t);
      undo.token(x);
    }
  };
  auto leave = [&](const RowEntry* list, int count, const RowEntry* next_list, int next_count, int buffer) {
    auto leaves = [](RowEntry e) { return e.from == kNoPlace; };  // M of a row that was only read is what it was
    columns.put_back(s_m[buffer], list, count, [=](RowEntry e) { return leaves(e) && (e.written || e.to != kNoPlace); });
    grad_columns.put_back(s_g[buffer], list, count, leaves);
    auto came_from = [](RowEntry e) { return (int)e.to; };
    columns.hand_over(s_m[buffer ^ 1], s_m[buffer], next_list, next_count, came_from);
    grad_columns.hand_over(s_g[buffer ^ 1], s_g[buffer], next_list, next_count, came_from);
  };
  walk<true, Block::kThreads>(plan, lists, token_budget, fetch_rows, fetch_tokens, run, leave);
}
