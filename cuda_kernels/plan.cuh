// What the plan of a sequence is: which rows each chunk of a lane stages, and where each use finds its row.
//
// A lane is one (sequence s, head h), lane = s * H + h. Its token t is the flat token first + t * H of the inputs
// [B, T, H, ..]; its own arrays are indexed by base + t, the lane's tokens side by side.
// A chunk is a run of a lane's tokens that uses at most `row_budget` distinct rows. `plan.cu` makes the plan.
//
// Sizes to allocate, with `tokens` = B T H over all lanes and row_stride = W + R rounded up to even:
//   rows        [tokens, row_stride] RowEntry, 8 bytes   rows of a chunk: distinct, slot ascending; from its first token
//   row_count   [tokens] int                             distinct rows of chunk c at base + c
//   chunk_start [tokens + lanes] int                     first token of chunk c at base + lane + c; after the last: T
//   chunks      [lanes] int                              chunks of a lane
//   place_w     [tokens, W] unsigned short               place in the chunk's rows of each write
//   place_r     [tokens, R] unsigned short               ... and of each read
#pragma once
#include "device_compat.cuh"

struct Lane {
  long long first;  // flat token of the lane's token 0
  long long base;   // where the lane's own arrays begin, in tokens
  int tokens, stride;
  __device__ __forceinline__ long long token(int t) const { return first + (long long)t * stride; }
};

// cu_seqlens [S + 1] when sequences are packed, else null and each sequence has `tokens` tokens.
__device__ __forceinline__ Lane lane_at(int lane, int heads, int tokens, const long long* cu_seqlens) {
  const int s = lane / heads, h = lane % heads;
  const long long begin = cu_seqlens ? cu_seqlens[s] : (long long)s * tokens;
  const int count = cu_seqlens ? (int)(cu_seqlens[s + 1] - begin) : tokens;
  return Lane{begin * heads + h, begin * heads + (long long)h * count, count, heads};
}

constexpr unsigned short kNoPlace = 0xffff;  // so a row budget is at most 65,535

struct RowEntry {
  unsigned slot : 31;
  unsigned written : 1;  // some token of this chunk writes it
  unsigned short from;   // its place in the previous chunk's rows, or kNoPlace: fetch it from the table
  unsigned short to;     // its place in the next chunk's rows, or kNoPlace: the table needs it back if it changed

  // Walking forward: a row handed over may have been written by an earlier chunk.
  __device__ __forceinline__ bool write_back() const { return to == kNoPlace && (written || from != kNoPlace); }
};

struct Plan {
  const RowEntry* rows;
  const int* row_count;
  const int* chunk_start;
  const int* chunks;
  const unsigned short *place_w, *place_r;
  int row_stride;
};

// One lane's part of a plan.
struct LanePlan {
  const RowEntry* rows;
  const int *row_count, *chunk_start;
  const unsigned short *place_w, *place_r;
  int chunks, row_stride;

  __device__ __forceinline__ const RowEntry* rows_of(int c) const { return rows + (long long)chunk_start[c] * row_stride; }
};
__device__ __forceinline__ LanePlan plan_of(const Plan& plan, const Lane& lane, int index, int writes, int reads) {
  return LanePlan{plan.rows + lane.base * plan.row_stride, plan.row_count + lane.base, plan.chunk_start + lane.base + index,
                  plan.place_w + lane.base * writes,       plan.place_r + lane.base * reads, plan.chunks[index],
                  plan.row_stride};
}
