// Makes the plan of plan.cuh in three launches: rows of each chunk, numbers of the chunks, links between neighbours.
//
// A lane's tokens are cut into windows of `window` tokens, planned side by side; in a window a chunk ends where one more
// token would take it past `row_budget` distinct rows. So a chunk has at most `window` tokens, and where chunks end
// depends on slots alone. (What the chunks compute does not depend on where they end.)
//
// write_slots [B, T, H, W] and read_slots [B, T, H, R] int in [0, 2^31); cu_seqlens [S + 1] or null (B sequences of
// `tokens`); the outputs as in plan.cuh, and rows_from [tokens of all lanes] int: scratch, distinct rows of the chunk
// that begins at a token, or 0.
//
// plan_rows, plan_links: block (lane * windows + window), windows = ceil(most tokens of a sequence / window)
// plan_chunks: block (lane)
// Shared memory of plan_rows: U = window (W + R) rounded up to a power of two: U keys of 8 bytes, U ints, 3 window ints.
// Traffic: slots once, places and rows once, binary searches in the rows of two neighbours.
// Required: 1 <= W + R <= row_budget < 65,535; window (W + R) <= 2^22; window <= 1,024.
#include "block.cuh"
#include "plan.cuh"

constexpr int kUseBits = 22, kSlotBits = 31;  // of a key: window's chunk, slot, whether it is a read, which use

// Sorted by (chunk, slot, writes before reads): equal rows of a chunk lie together, a write first if there is one.
__device__ __forceinline__ unsigned long long use_key(int chunk, unsigned slot, bool read, int use) {
  return (((unsigned long long)chunk << kSlotBits | slot) << 1 | (read ? 1u : 0u)) << kUseBits | (unsigned)use;
}
__device__ __forceinline__ int use_of(unsigned long long key) { return (int)(key & ((1u << kUseBits) - 1)); }
__device__ __forceinline__ bool is_read(unsigned long long key) { return key >> kUseBits & 1; }
__device__ __forceinline__ unsigned long long row_of(unsigned long long key) { return key >> (kUseBits + 1); }
__device__ __forceinline__ unsigned slot_of(unsigned long long key) { return (unsigned)row_of(key) & 0x7fffffffu; }
__device__ __forceinline__ int chunk_of(unsigned long long key) { return (int)(row_of(key) >> kSlotBits); }

constexpr unsigned long long kNoUse = ~0ull;

struct Window {
  int lane_index, first, count;  // tokens of the lane: count <= 0 where a short lane has no such window
  Lane lane;
};
__device__ __forceinline__ Window window_at(int block, int windows, int window, int heads, int tokens,
                                            const long long* cu_seqlens) {
  const int lane_index = block / windows, first = block % windows * window;
  const Lane lane = lane_at(lane_index, heads, tokens, cu_seqlens);
  return Window{lane_index, first, min(window, lane.tokens - first), lane};
}

// One warp cuts the window: earlier[use] is the token of the same row's use before, or -1.
// Writes the chunk of each token and the first token of each chunk, and returns the number of chunks.
__device__ __forceinline__ int cut(const int* earlier, int tokens, int uses, int row_budget, int* chunk_at, int* begin) {
  int chunks = 0, rows = 0;
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    int in_chunk = 0, alone = 0;  // rows that token t adds to the chunk, and that it has as the first of a chunk
#pragma unroll 1
    for (int base = 0; base < uses; base += 32) {
      const int i = base + threadIdx.x;
      const int before = i < uses ? earlier[t * uses + i] : t;
      in_chunk += __popc(__ballot_sync(0xffffffffu, chunks > 0 && before < begin[chunks - 1]));
      alone += __popc(__ballot_sync(0xffffffffu, before < t));
    }
    if (chunks == 0 || rows + in_chunk > row_budget) {
      if (threadIdx.x == 0) begin[chunks] = t;
      ++chunks;
      rows = alone;
      __syncwarp();
    } else {
      rows += in_chunk;
    }
    if (threadIdx.x == 0) chunk_at[t] = chunks - 1;
  }
  return chunks;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    plan_rows(const int* write_slots, const int* read_slots, const long long* cu_seqlens, int tokens, int heads,
              int writes, int reads, int window, int windows, int row_budget, int row_stride, RowEntry* rows,
              int* rows_from, unsigned short* place_w, unsigned short* place_r) {
  const Window w = window_at(blockIdx.x, windows, window, heads, tokens, cu_seqlens);
  if (w.count <= 0) return;  // the whole block
  const int each = writes + reads, uses = w.count * each, size = power_of_two_from(window * each);
  SmemCut smem{dynamic_smem()};
  auto* keys = smem.take<unsigned long long>(size);
  int* number = smem.take<int>(size);  // token of the use before; then which distinct row of the window
  int* chunk_at = smem.take<int>(window);
  int* begin = smem.take<int>(window);
  int* first_row = smem.take<int>(window);
  auto before = [](unsigned long long a, unsigned long long b) { return a < b; };

#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += THREADS) {
    const int i_of = i % each;
    const long long token = w.lane.token(w.first + i / each);
    keys[i] = i >= uses         ? kNoUse
              : i_of < writes   ? use_key(0, (unsigned)write_slots[token * writes + i_of], false, i)
                                : use_key(0, (unsigned)read_slots[token * reads + i_of - writes], false, i);
  }
  block_sort<THREADS>(keys, size, before);
#pragma unroll 1
  for (int p = threadIdx.x; p < uses; p += THREADS)
    number[use_of(keys[p])] = p > 0 && row_of(keys[p - 1]) == row_of(keys[p]) ? use_of(keys[p - 1]) / each : -1;
  __syncthreads();
  if (threadIdx.x < 32) cut(number, w.count, each, row_budget, chunk_at, begin);
  __syncthreads();

#pragma unroll 1
  for (int p = threadIdx.x; p < uses; p += THREADS) {
    const int use = use_of(keys[p]);
    keys[p] = use_key(chunk_at[use / each], slot_of(keys[p]), use % each >= writes, use);
  }
  block_sort<THREADS>(keys, size, before);
  int seen = 0;  // distinct rows so far, of all chunks
#pragma unroll 1
  for (int base = 0; base < size; base += THREADS) {
    const int p = base + threadIdx.x;
    const bool live = p < uses, head = live && (p == 0 || row_of(keys[p - 1]) != row_of(keys[p]));
    int here;
    const int mine = seen + flags_before<THREADS>(head, &here) + (head ? 1 : 0) - 1;
    if (live) number[p] = mine;
    if (head && (p == 0 || chunk_of(keys[p - 1]) != chunk_of(keys[p]))) first_row[chunk_of(keys[p])] = mine;
    seen += here;
  }
  __syncthreads();

  const long long at = w.lane.base + w.first;
#pragma unroll 1
  for (int t = threadIdx.x; t < w.count; t += THREADS) {
    const int chunk = chunk_at[t], last = chunk_at[w.count - 1];
    const int until = chunk == last ? seen : first_row[chunk + 1];
    rows_from[at + t] = begin[chunk] == t ? until - first_row[chunk] : 0;
  }
#pragma unroll 1
  for (int p = threadIdx.x; p < uses; p += THREADS) {
    const int chunk = chunk_of(keys[p]), place = number[p] - first_row[chunk], use = use_of(keys[p]);
    const int i_of = use % each;
    const long long token = at + use / each;
    if (i_of < writes)
      place_w[token * writes + i_of] = (unsigned short)place;
    else
      place_r[token * reads + i_of - writes] = (unsigned short)place;
    if (p > 0 && number[p - 1] == number[p]) continue;
    RowEntry& entry = rows[(at + begin[chunk]) * row_stride + place];
    entry.slot = slot_of(keys[p]), entry.written = !is_read(keys[p]);
    entry.from = entry.to = kNoPlace;
  }
}

// Number a lane's chunks: token t begins one where rows_from is not 0.
template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    plan_chunks(const int* rows_from, const long long* cu_seqlens, int tokens, int heads, int* row_count,
                int* chunk_start, int* chunks) {
  const Lane lane = lane_at(blockIdx.x, heads, tokens, cu_seqlens);
  int seen = 0;
#pragma unroll 1
  for (int first = 0; first < lane.tokens; first += THREADS) {
    const int t = first + threadIdx.x, rows = t < lane.tokens ? rows_from[lane.base + t] : 0;
    int here;
    const int c = seen + flags_before<THREADS>(rows > 0, &here);
    if (rows > 0) {
      row_count[lane.base + c] = rows;
      chunk_start[lane.base + blockIdx.x + c] = t;
    }
    seen += here;
  }
  if (threadIdx.x == 0) {
    chunks[blockIdx.x] = seen;
    chunk_start[lane.base + blockIdx.x + seen] = lane.tokens;
  }
}

// The place of a slot in a list of `count` rows, or kNoPlace.
__device__ __forceinline__ unsigned short place_of(unsigned slot, const RowEntry* list, int count) {
  int low = 0, high = count;
#pragma unroll 1
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle].slot < slot)
      low = middle + 1;
    else
      high = middle;
  }
  return low < count && list[low].slot == slot ? (unsigned short)low : kNoPlace;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    plan_links(RowEntry* rows, const int* row_count, const int* chunk_start, const int* chunks,
               const long long* cu_seqlens, int tokens, int heads, int window, int windows, int row_stride) {
  const Window w = window_at(blockIdx.x, windows, window, heads, tokens, cu_seqlens);
  if (w.count <= 0) return;
  RowEntry* list = rows + w.lane.base * row_stride;
  const int* count = row_count + w.lane.base;
  const int* start = chunk_start + w.lane.base + w.lane_index;
  const int all = chunks[w.lane_index];
  int c = 0;
#pragma unroll 1
  for (int high = all; c < high;) {  // the first chunk of this window
    const int middle = (c + high) / 2;
    if (start[middle] < w.first)
      c = middle + 1;
    else
      high = middle;
  }
  auto rows_of = [&](int chunk) { return list + (long long)start[chunk] * row_stride; };
#pragma unroll 1
  for (; c < all && start[c] < w.first + w.count; ++c)
#pragma unroll 1
    for (int i = threadIdx.x; i < count[c]; i += THREADS) {
      RowEntry& entry = rows_of(c)[i];
      if (c > 0) entry.from = place_of(entry.slot, rows_of(c - 1), count[c - 1]);
      if (c + 1 < all) entry.to = place_of(entry.slot, rows_of(c + 1), count[c + 1]);
    }
}
