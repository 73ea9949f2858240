// Sparse delta rule, forward, over whole sequences: staged column kernel.
//
// Equations: delta_token.cuh (spec section 4; paper equations 3 to 5). The table is written in place; a functional call
// copies it first.
//
// Shapes (n = B T H tokens in the public layout, L lanes; real is float, or double for State double):
//   table [.., D] State          row_start [L] int64: the lane's row 0 in the table; slots count from there
//   values, readings [n, D] real, error [n, D] real or null (rule "shared": e, kept for the backward)
//   write_weights [n, W], read_weights [n, R], alpha [n, A] (A = 1 or W; sparse_delta_gates.cu), beta [n] real
//   log_place [n, W] int32 or null: row of the log, or -1; log_rows, log_scales, storage: delta_log.cuh
//   rows .. row_stride: the plan, plan.cuh, made with a row budget <= row_budget
// State: float, bf16, fp16, double. A written row is rounded to it at every token; all arithmetic is in real.
// Units: sizes and strides in elements, alpha a factor in [0, 1].
//
// Launch: grid (L, ceil(D / TILE)), 4 TILE threads, shared bytes as shared_memory.py has it: s(x) = x rounded up to 16,
//   2 s(row_budget TILE sizeof State) + 3 s(8 row_budget) + 2 s(parts TILE sizeof real), parts = 4 (TILE 32) or 8,
//   + 2 token_budget (s(2 W) + s(2 R) + s(W real) + s(R real) + s(A real) + 16 + s(TILE real) + [log: s(4 W)])
// Ownership: a block owns (lane, TILE columns) and walks the sequence alone: nobody else touches its columns of the
// lane's rows. Threads and the order of sums: delta_tile.cuh. The bits of every result are the same for any TILE,
// budgets, batch, packing and schedule, and those of decode_step.cu.
// Traffic per token and lane: at most (2 W + R) D sizeof State, less what neighbouring chunks share; D real each for
// values, readings, error; per tile 6 (W + R) + 8 (W + R) + 4 (A + 1) bytes of inputs and lists, from L2.
// Two barriers a token.
//
// The caller ensures: write slots of a token distinct, all slots in [0, N), row_start and the plan of the same lanes,
// row_budget >= W + R, D >= 1, arrays contiguous, log_rows and plan rows aligned to 16 bytes (others to their element:
// rows of other than whole 16 bytes are copied in pieces of 4, 16-bit ones number by number).
// Twins: sdm_lite/reference/delta.py, sdm_lite/cpu/forward.py (whose sums over rows run in one chain, not by groups:
// results of more than one row differ in the last bits; everything else is the same operations).
#include "delta_token.cuh"
#include "delta_walk.cuh"

// Rows in shared memory, from the thread's first column on.
template <typename State, int TILE>
struct StagedRows {
  using two = typename Arithmetic<State>::two;
  State* rows;
  __device__ __forceinline__ two load(int place) const { return load_two(rows + place * TILE); }
  __device__ __forceinline__ void store(int place, two x) const { store_two(rows + place * TILE, x); }
};

template <typename State, int TILE, bool PER_SLOT>
__global__ void __launch_bounds__(TILE * 4, 1) sparse_delta_forward(
    State* table, const long long* row_start, const typename Arithmetic<State>::real* values,
    const typename Arithmetic<State>::real* write_weights, const typename Arithmetic<State>::real* alpha,
    const typename Arithmetic<State>::real* beta, const typename Arithmetic<State>::real* read_weights,
    typename Arithmetic<State>::real* readings, typename Arithmetic<State>::real* error, const int* log_place,
    unsigned char* log_rows, float* log_scales, int storage, const RowEntry* rows, const int* row_count,
    const int* chunk_start, const int* chunks, const unsigned short* place_w, const unsigned short* place_r, int row_stride,
    int row_budget, int token_budget, const long long* cu_seqlens, int heads, int tokens, int width, int writes, int reads,
    int decays) {
  using real = typename Arithmetic<State>::real;
  using two = typename Arithmetic<State>::two;
  using Block = Tile<State, TILE>;
  const int lane_index = blockIdx.x;
  const Block tile(blockIdx.y, width);
  const Lane lane = lane_at(lane_index, heads, tokens, cu_seqlens);
  const Plan whole{rows, row_count, chunk_start, chunks, place_w, place_r, row_stride};
  const LanePlan plan = plan_of(whole, lane, lane_index, writes, reads);
  const Columns<State, TILE> columns(table, row_start[lane_index], width, tile.column0, tile.columns);
  const Log<State> log(log_rows, log_scales, storage, width);

  SmemCut cut{dynamic_smem()};
  const auto buffers = cut.ring<State>(2, row_budget * TILE);
  const auto lists = cut.ring<RowEntry>(3, (row_budget + 1) / 2 * 2);  // copied two entries at a time
  const int at_w = staged<unsigned short>(writes), at_r = staged<unsigned short>(reads), at_k = staged<real>(writes),
            at_q = staged<real>(reads), at_alpha = staged<real>(decays), at_beta = staged<real>(1),
            at_log = staged<int>(writes);
  const auto s_place_w = cut.ring<unsigned short>(2, token_budget * at_w);
  const auto s_place_r = cut.ring<unsigned short>(2, token_budget * at_r);
  const auto s_k = cut.ring<real>(2, token_budget * at_k), s_q = cut.ring<real>(2, token_budget * at_q);
  const auto s_alpha = cut.ring<real>(2, token_budget * at_alpha), s_beta = cut.ring<real>(2, token_budget * at_beta);
  const auto s_value = cut.ring<real>(2, token_budget * TILE);
  real* part_error = cut.take<real>(Block::kParts * TILE);
  real* part_y = cut.take<real>(Block::kParts * TILE);
  const auto s_log = cut.ring<int>(2, log_place ? token_budget * at_log : 0);

  auto fetch_rows = [&](const RowEntry* list, int count, int buffer) {
    columns.fetch(buffers[buffer], list, count, [](RowEntry e) { return e.from == kNoPlace; });
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
      stage(s_beta[buffer] + i * at_beta, beta + token, 1);
      stage(s_value[buffer] + i * TILE, values + token * width + tile.column0, tile.columns);
      if (log_place) stage(s_log[buffer] + i * at_log, log_place + token * writes, writes);
    }
  };

  long long due = -1;  // token whose reading still lies in part_y
  auto settle = [&] {
    if (due >= 0 && tile.group == 0)
      store_columns(readings + due * width + tile.column0 + tile.column, tile.sum_parts(part_y), tile.live);
  };
  auto run = [&](int begin, int end, int rows_buffer, int buffer) {
    const StagedRows<State, TILE> staged_rows{buffers[rows_buffer] + tile.column};
#pragma unroll 1
    for (int t = begin; t < end; ++t) {
      const int i = t - begin;
      Token<real, unsigned short> x;
      x.write_at = s_place_w[buffer] + i * at_w;
      x.read_at = s_place_r[buffer] + i * at_r;
      x.k = s_k[buffer] + i * at_k;
      x.q = s_q[buffer] + i * at_q;
      x.alpha = s_alpha[buffer] + i * at_alpha;
      x.log_place = log_place ? s_log[buffer] + i * at_log : nullptr;
      x.beta = s_beta[buffer][i * at_beta];
      x.writes = writes;
      x.reads = reads;
      x.decay_per_slot = decays > 1;
      const two value = load_two(s_value[buffer] + i * TILE + tile.column);
      const two e = forward_token<PER_SLOT>(tile, staged_rows, x, value, part_error, part_y, log, settle);
      due = lane.token(t);
      if (error && tile.group == 1) store_columns(error + due * width + tile.column0 + tile.column, e, tile.live);
    }
  };
  auto leave = [&](const RowEntry* list, int count, const RowEntry* next_list, int next_count, int buffer) {
    columns.put_back(buffers[buffer], list, count, [](RowEntry e) { return e.write_back(); });
    columns.hand_over(buffers[buffer ^ 1], buffers[buffer], next_list, next_count,
                      [](RowEntry e) { return (int)e.from; });
  };
  walk<false, Block::kThreads>(plan, lists, token_budget, fetch_rows, fetch_tokens, run, leave);
  __syncthreads();
  settle();
}
