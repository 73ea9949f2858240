// How a block walks a lane's plan (plan.cuh) with its rows in shared memory, forward or in reverse.
//
//   buffers of rows x 2   chunk p computes in buffer p % 2 while the next chunk's rows are copied into the other one;
//                         a row that both use is handed over from buffer to buffer when chunk p is done
//   row lists x 3         needed one chunk earlier than the rows they name
//   token inputs x 2      for up to `token_budget` tokens at a time: a chunk of many tokens takes several steps
//
// All copies are asynchronous, in one group per step; the wait at the start of a step is for copies issued a step ago.
// The barrier at the start of a step stands between a row's being written back and its being fetched again (two chunks
// later at the soonest), and between the last use of a buffer and its next filling.
#pragma once
#include "delta_tile.cuh"
#include "plan.cuh"

template <int BYTES>
__device__ __forceinline__ void copy_async(void* to_smem, const void* from) {
  if (BYTES == 16) async_copy_16(to_smem, from);
  else if (BYTES == 4) async_copy_4(to_smem, from);
  else *(unsigned short*)to_smem = *(const unsigned short*)from;  // below what the hardware copies by itself
}
template <int BYTES>
__device__ __forceinline__ void copy_back(void* to, const void* from_smem) {
  if (BYTES == 16) *(uint4*)to = *(const uint4*)from_smem;
  else if (BYTES == 4) *(unsigned*)to = *(const unsigned*)from_smem;
  else *(unsigned short*)to = *(const unsigned short*)from_smem;
}

// One warp copies `count` numbers of a token to shared memory. Four bytes a thread: few tokens have enough for more.
template <typename T>
__device__ __forceinline__ void stage(T* to_smem, const T* from, int count) {
  const int bytes = count * (int)sizeof(T), thread = threadIdx.x % 32;
  char* to = (char*)to_smem;
  const char* source = (const char*)from;
  const bool wide = sizeof(T) >= 4 || ((size_t)from | bytes) % 4 == 0;
#pragma unroll 1
  for (int i = thread * 4; i < bytes; i += 32 * 4)
    if (wide) {
      copy_async<4>(to + i, source + i);
    } else {
      copy_async<2>(to + i, source + i);
      if (i + 2 < bytes) copy_async<2>(to + i + 2, source + i + 2);
    }
}
// Numbers of type T that one token takes of a staged array: whole 16-byte pieces, so that each begins on one.
template <typename T>
__host__ __device__ constexpr int staged(int count) {
  return (count * (int)sizeof(T) + 15) / 16 * 16 / (int)sizeof(T);
}

// The tile's columns of a lane's rows in a table [.., width] of T.
template <typename T, int TILE>
struct Columns {
  static constexpr int kThreads = TILE / 2 * kGroups;
  T* first;  // column 0 of the tile in the lane's row 0
  long long width;
  int bytes;  // of a row's columns that exist
  bool wide;  // whether rows are copied 16 bytes at a time; else, rows lying on odd addresses, kNarrow
  static constexpr int kNarrow = sizeof(T) < 4 ? 2 : 4;

  __device__ __forceinline__ Columns(T* table, long long row0, int width_, int column0, int columns)
      : first(table + row0 * width_ + column0), width(width_), bytes(columns * (int)sizeof(T)) {
    wide = ((size_t)table | (size_t)(width_ * (int)sizeof(T))) % 16 == 0;
  }

  // Calls whole(offset in the buffer, address in the table) for each 16 bytes of the listed rows that are wanted, or
  // narrow(..) for each kNarrow of them. One loop for both: each loop of these kernels costs its part of the compile time.
  template <typename Wanted, typename Whole, typename Narrow>
  __device__ __forceinline__ void each_piece(const RowEntry* list, int rows, Wanted wanted, Whole whole,
                                             Narrow narrow) const {
    constexpr int kPieces = TILE * (int)sizeof(T) / 16;
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
      const RowEntry e = list[i / kPieces];
      const int at = i % kPieces * 16, in_buffer = i / kPieces * TILE * (int)sizeof(T) + at;
      if (at >= bytes || !wanted(e)) continue;
      char* in_table = (char*)(first + (long long)e.slot * width) + at;
      if (wide) whole(in_buffer, in_table);
      else
#pragma unroll 1
        for (int b = 0; b < min(16, bytes - at); b += kNarrow) narrow(in_buffer + b, in_table + b);
    }
  }
  template <typename Wanted>
  __device__ __forceinline__ void fetch(T* buffer, const RowEntry* list, int rows, Wanted wanted) const {
    char* to = (char*)buffer;
    each_piece(list, rows, wanted, [=](int at, char* p) { copy_async<16>(to + at, p); },
               [=](int at, char* p) { copy_async<kNarrow>(to + at, p); });
  }
  template <typename Wanted>
  __device__ __forceinline__ void put_back(const T* buffer, const RowEntry* list, int rows, Wanted wanted) const {
    const char* from = (const char*)buffer;
    each_piece(list, rows, wanted, [=](int at, char* p) { copy_back<16>(p, from + at); },
               [=](int at, char* p) { copy_back<kNarrow>(p, from + at); });
  }
  // Copies the rows that the chunk just done and the next one share; came_from(e) is e's place in the former.
  template <typename CameFrom>
  static __device__ __forceinline__ void hand_over(T* to, const T* from, const RowEntry* list, int rows,
                                                   CameFrom came_from) {
    constexpr int kPieces = TILE * (int)sizeof(T) / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
      const int place = came_from(list[i / kPieces]);
      if (place != kNoPlace)
        ((uint4*)(to + i / kPieces * TILE))[i % kPieces] = ((const uint4*)(from + place * TILE))[i % kPieces];
    }
  }
};

struct Chunk {
  int begin, end, rows;  // its tokens; its distinct rows
};
// The chunk at a position of the walk; none past the last.
template <bool REVERSE>
__device__ __forceinline__ Chunk chunk_at(const LanePlan& plan, int position) {
  if (position >= plan.chunks) return Chunk{0, 0, 0};
  const int c = REVERSE ? plan.chunks - 1 - position : position;
  return Chunk{plan.chunk_start[c], plan.chunk_start[c + 1], plan.row_count[c]};
}
// The tokens of a chunk's first step, and of the step after one; none after the last.
template <bool REVERSE>
__device__ __forceinline__ Chunk first_step(Chunk chunk, int budget) {
  if (REVERSE) chunk.begin = max(chunk.begin, chunk.end - budget);
  else chunk.end = min(chunk.end, chunk.begin + budget);
  return chunk;
}
template <bool REVERSE>
__device__ __forceinline__ Chunk step_after(Chunk chunk, Chunk step, int budget) {
  if (REVERSE) return first_step<true>(Chunk{chunk.begin, step.begin, chunk.rows}, budget);
  return first_step<false>(Chunk{step.end, chunk.end, chunk.rows}, budget);
}

// Walks the plan; every thread of the block calls. In order of a chunk's life:
//   fetch_rows(list, rows, buffer)        start copying the rows that the chunk before has not got
//   fetch_tokens(begin, end, buffer)      start copying the inputs of a step's tokens
//   run(begin, end, rows buffer, tokens buffer)   work through a step's tokens
//   leave(list, rows, next list, next rows, rows buffer)   put rows back or hand them over to the other buffer
template <bool REVERSE, int THREADS, typename FetchRows, typename FetchTokens, typename Work, typename Leave>
__device__ __forceinline__ void walk(const LanePlan& plan, SmemRing<RowEntry> lists, int token_budget,
                                     FetchRows fetch_rows, FetchTokens fetch_tokens, Work run, Leave leave) {
  auto fetch_list = [&](int position, Chunk chunk) {
    const char* from = (const char*)(plan.rows + (long long)chunk.begin * plan.row_stride);
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < chunk.rows * (int)sizeof(RowEntry); i += THREADS * 16)
      async_copy_16((char*)lists[position % 3] + i, from + i);
  };
  // The walk begins one chunk before the first, with no rows and no tokens: so each copy stands in the code once.
  Chunk now = {0, 0, 0}, next = chunk_at<REVERSE>(plan, 0), later = chunk_at<REVERSE>(plan, 1), step = now;
  fetch_list(0, next);
  async_commit();
  int tokens_buffer = 1;
#pragma unroll 1
  for (int p = -1; p < plan.chunks; ++p) {
    const Chunk after_later = chunk_at<REVERSE>(plan, p + 3);  // three ahead, so that its loading is not waited for
    bool first = true, last = false;
#pragma unroll 1
    while (!last) {
      async_wait<0>();
      __syncthreads();
      if (first) {
        fetch_rows(lists[(p + 1) % 3], next.rows, (p + 1) & 1);
        fetch_list(p + 2, later);
      }
      first = false;
      last = REVERSE ? step.begin == now.begin : step.end == now.end;
      const Chunk following =
          last ? first_step<REVERSE>(next, token_budget) : step_after<REVERSE>(now, step, token_budget);
      fetch_tokens(following.begin, following.end, tokens_buffer ^ 1);
      async_commit();
      run(step.begin, step.end, p & 1, tokens_buffer);
      tokens_buffer ^= 1;
      step = following;
    }
    leave(lists[(p + 3) % 3], now.rows, lists[(p + 1) % 3], next.rows, p & 1);
    now = next;
    next = later;
    later = after_later;
  }
}
