// Sparse delta rule, forward, for few tokens of many lanes: rows are worked on where they lie, nothing is staged.
//
// Equations: delta_token.cuh. Shapes, State, units, ownership and order of sums as in sparse_delta_forward.cu, with
// log_decay [n, A] (natural logarithm; exp in double, rounded once) in place of alpha, and slots [n, W], [n, R] int32
// in place of a plan. The bits are those of sparse_delta_forward.cu: a sequence may go on token by token.
//
// Launch: grid (L, ceil(D / TILE)), 4 TILE threads, shared bytes: s(x) = x rounded up to 16,
// s(A sizeof real) + 2 s(parts TILE sizeof real), parts = 4 (TILE 32) or 8.
// Traffic per token and lane: (2 W + R) D sizeof State + 2 D real, and per tile 8 (W + R) + 4 (A + 1) bytes.
// Three barriers a token, and the latency of rows three times: for long sequences use sparse_delta_forward.cu.
// Where W + R rows do not fit in shared memory at all, this kernel serves any number of tokens.
// The caller ensures: as there, but for the plan. Twins: as there.
#include "delta_token.cuh"
#include "plan.cuh"

template <typename State>
struct TableRows {
  using two = typename Arithmetic<State>::two;
  State* first;  // the thread's first column in the lane's row 0
  long long width;
  int live;
  __device__ __forceinline__ two load(int slot) const { return load_columns(first + slot * width, live); }
  __device__ __forceinline__ void store(int slot, two x) const { store_columns(first + slot * width, x, live); }
};

template <typename State, int TILE, bool PER_SLOT>
__global__ void __launch_bounds__(TILE * 4, 1) decode_step(
    State* table, const long long* row_start, const typename Arithmetic<State>::real* values, const int* write_slots,
    const typename Arithmetic<State>::real* write_weights, const typename Arithmetic<State>::real* log_decay,
    const typename Arithmetic<State>::real* beta, const int* read_slots, const typename Arithmetic<State>::real* read_weights,
    typename Arithmetic<State>::real* readings, const long long* cu_seqlens, int heads, int tokens, int width, int writes,
    int reads, int decays) {
  using real = typename Arithmetic<State>::real;
  using Block = Tile<State, TILE>;
  const Block tile(blockIdx.y, width);
  const Lane lane = lane_at(blockIdx.x, heads, tokens, cu_seqlens);
  const long long column = tile.column0 + tile.column;
  const TableRows<State> rows{table + row_start[blockIdx.x] * width + column, width, tile.live};
  const Log<State> no_log(nullptr, nullptr, kNative, width);
  SmemCut cut{dynamic_smem()};
  real* s_alpha = cut.take<real>(decays);
  real* part_error = cut.take<real>(Block::kParts * TILE);
  real* part_y = cut.take<real>(Block::kParts * TILE);

  long long due = -1;  // token whose reading still lies in part_y
  auto settle = [&] {
    if (due >= 0 && tile.group == 0) store_columns(readings + due * width + column, tile.sum_parts(part_y), tile.live);
  };
  for (int t = 0; t < lane.tokens; ++t) {
    const long long token = lane.token(t);
    for (int w = threadIdx.x; w < decays; w += Block::kThreads)
      s_alpha[w] = (real)exp((double)log_decay[token * decays + w]);
    __syncthreads();
    Token<real, int> x;
    x.write_at = write_slots + token * writes;
    x.read_at = read_slots + token * reads;
    x.k = write_weights + token * writes;
    x.q = read_weights + token * reads;
    x.alpha = s_alpha;
    x.log_place = nullptr;
    x.beta = beta[token];
    x.writes = writes;
    x.reads = reads;
    x.decay_per_slot = decays > 1;
    const auto value = load_columns(values + token * width + column, tile.live);
    forward_token<PER_SLOT>(tile, rows, x, value, part_error, part_y, no_log, settle);
    due = token;
  }
  __syncthreads();
  settle();
}
