// How a block walks a lane's plan (plan.cuh) with its rows in shared memory, forward or in reverse.
//
//   buffers of rows x 2   chunk p computes in buffer p % 2 while the next chunk's rows are copied into the other one;
//                         a row that both use is handed over from buffer to buffer when chunk p is done
//   row lists x 3         needed one chunk earlier than the rows they name
//   token inputs x 2      for up to `token_budget` tokens at a time: a chunk of many tokens takes several steps
//
// All copies are asynchronous, in one group per step; the wait at the start of a step is for copies issued a step ago.
// Two barriers' worth of order are relied on: the one at the start of a step stands between a row written back and
// its being fetched again (two chunks later at the soonest), and between the last use of a buffer and its next filling.
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

// One warp copies `bytes` to shared memory (16-byte aligned), in the widest pieces that the source's alignment allows.
__device__ __forceinline__ void stage(void* to_smem, const void* from, int bytes) {
  const int lane = threadIdx.x % 32;
  const unsigned odd = (unsigned)(size_t)from | (unsigned)bytes;
  char* to = (char*)to_smem;
  const char* source = (const char*)from;
  if (odd % 16 == 0) {
#pragma unroll 1
    for (int i = lane * 16; i < bytes; i += 32 * 16) copy_async<16>(to + i, source + i);
  } else if (odd % 4 == 0) {
#pragma unroll 1
    for (int i = lane * 4; i < bytes; i += 32 * 4) copy_async<4>(to + i, source + i);
  } else {
#pragma unroll 1
    for (int i = lane * 2; i < bytes; i += 32 * 2) copy_async<2>(to + i, source + i);
  }
}
// Numbers of type T that one token takes of a staged array of `count`: whole 16-byte pieces, so that each begins on one.
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
  int piece;  // 16, 4 or 2: what every row is aligned to

  __device__ __forceinline__ Columns(T* table, long long row0, int width_, int column0, int columns)
      : first(table + row0 * width_ + column0), width(width_), bytes(columns * (int)sizeof(T)) {
    const unsigned odd = (unsigned)(size_t)table | (unsigned)(width_ * (int)sizeof(T));
    piece = odd % 16 == 0 ? 16 : odd % 4 == 0 ? 4 : 2;
  }

  // Calls move(offset in the buffer, address in the table, BYTES) for each piece of the listed rows that are wanted.
  template <int BYTES, typename Wanted, typename Move>
  __device__ __forceinline__ void each_piece(const RowEntry* list, int rows, Wanted wanted, Move move) const {
    constexpr int kPieces = TILE * (int)sizeof(T) / BYTES;
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
      const RowEntry e = list[i / kPieces];
      const int at = i % kPieces * BYTES;
      if (at < bytes && wanted(e)) move(i / kPieces * TILE * (int)sizeof(T) + at, (char*)(first + (long long)e.slot * width) + at);
    }
  }
  template <typename Wanted>
  __device__ __forceinline__ void fetch(T* buffer, const RowEntry* list, int rows, Wanted wanted) const {
    char* to = (char*)buffer;
    if (piece == 16) each_piece<16>(list, rows, wanted, [=](int at, char* p) { copy_async<16>(to + at, p); });
    else if (piece == 4) each_piece<4>(list, rows, wanted, [=](int at, char* p) { copy_async<4>(to + at, p); });
    else each_piece<2>(list, rows, wanted, [=](int at, char* p) { copy_async<2>(to + at, p); });
  }
  template <typename Wanted>
  __device__ __forceinline__ void put_back(const T* buffer, const RowEntry* list, int rows, Wanted wanted) const {
    const char* from = (const char*)buffer;
    if (piece == 16) each_piece<16>(list, rows, wanted, [=](int at, char* p) { copy_back<16>(p, from + at); });
    else if (piece == 4) each_piece<4>(list, rows, wanted, [=](int at, char* p) { copy_back<4>(p, from + at); });
    else each_piece<2>(list, rows, wanted, [=](int at, char* p) { copy_back<2>(p, from + at); });
  }
  // Copies the rows that the chunk just done and the next one share; came_from(e) is e's place in the former.
  template <typename CameFrom>
  static __device__ __forceinline__ void hand_over(T* to, const T* from, const RowEntry* list, int rows, CameFrom came_from) {
    constexpr int kPieces = TILE * (int)sizeof(T) / 16;
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
      const int place = came_from(list[i / kPieces]);
      if (place != kNoPlace) ((uint4*)(to + i / kPieces * TILE))[i % kPieces] = ((const uint4*)(from + place * TILE))[i % kPieces];
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
__device__ __forceinline__ void walk(const LanePlan& plan, SmemRing<RowEntry> lists, int token_budget, FetchRows fetch_rows,
                                     FetchTokens fetch_tokens, Work run, Leave leave) {
  auto fetch_list = [&](int position, Chunk chunk) {
    const char* from = (const char*)(plan.rows + (long long)chunk.begin * plan.row_stride);
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < chunk.rows * (int)sizeof(RowEntry); i += THREADS * 16)
      async_copy_16((char*)lists[position % 3] + i, from + i);
  };
  Chunk now = chunk_at<REVERSE>(plan, 0), next = chunk_at<REVERSE>(plan, 1), later = chunk_at<REVERSE>(plan, 2);
  fetch_list(0, now);
  async_commit();
  async_wait<0>();
  __syncthreads();
  Chunk step = first_step<REVERSE>(now, token_budget);
  fetch_rows(lists[0], now.rows, 0);
  fetch_list(1, next);
  fetch_tokens(step.begin, step.end, 0);
  async_commit();

  int tokens_buffer = 0;
  for (int p = 0; p < plan.chunks; ++p) {
    const Chunk after_later = chunk_at<REVERSE>(plan, p + 3);  // three ahead, so that its loading is not waited for
    bool first = true, last = false;
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
    leave(lists[p % 3], now.rows, lists[(p + 1) % 3], next.rows, p & 1);
    now = next;
    next = later;
    later = after_later;
  }
}
