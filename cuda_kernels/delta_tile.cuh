// What the sparse delta kernels share: a block's tile of columns, who owns what in it, and the order of its sums.
//
// A block owns TILE neighbouring columns of one lane. Its TILE * 4 threads are kGroups = 8 groups of TILE / 2: a thread
// owns two neighbouring columns (its pair) and, of a token's `count` rows, the run that its group owns:
// rows group * per to group * per + per - 1 with per = ceil(count / 8).
//
// Order of sums over rows, whatever TILE: within a group ascending, one fma a row, from zero; the groups' sums in a
// balanced tree, ((0+1)+(2+3))+((4+5)+(6+7)). For up to 8 rows the tree is all there is.
#pragma once
#include "device_compat.cuh"

template <typename State>
struct Arithmetic {
  using real = float;
  using two = float2;
};
template <>
struct Arithmetic<double> {
  using real = double;
  using two = double2;
};

// ---- arithmetic on two columns; fused is one rounding, everything else rounds each operation ----
template <typename Real, typename Two>
__device__ __forceinline__ Two fused_two(Real a, Two x, Two c) { return Two{fused(a, x.x, c.x), fused(a, x.y, c.y)}; }
template <typename Real, typename Two>
__device__ __forceinline__ Two times_two(Real a, Two x) { return Two{a * x.x, a * x.y}; }
template <typename Two>
__device__ __forceinline__ Two plus_two(Two a, Two b) { return Two{a.x + b.x, a.y + b.y}; }
template <typename Two>
__device__ __forceinline__ Two minus_two(Two a, Two b) { return Two{a.x - b.x, a.y - b.y}; }

__device__ __forceinline__ void store_one(float* p, float x) { *p = x; }
__device__ __forceinline__ void store_one(double* p, double x) { *p = x; }
__device__ __forceinline__ void store_one(bf16* p, float x) { p->bits = bf16_bits(x); }
__device__ __forceinline__ void store_one(fp16* p, float x) { p->bits = fp16_bits(x); }

// The `live` (0 to 2) columns at p, of any alignment; a column that is not live reads as zero and is not written.
template <typename T>
__device__ __forceinline__ typename Arithmetic<T>::two load_columns(const T* p, int live) {
  using Two = typename Arithmetic<T>::two;
  if (live == 2 && (size_t)p % (2 * sizeof(T)) == 0) return load_two(p);
  Two x = {0, 0};
  if (live > 0) x.x = to_float(p[0]);
  if (live > 1) x.y = to_float(p[1]);
  return x;
}
template <typename T>
__device__ __forceinline__ void store_columns(T* p, typename Arithmetic<T>::two x, int live) {
  if (live == 2 && (size_t)p % (2 * sizeof(T)) == 0) return store_two(p, x);
  if (live > 0) store_one(p, x.x);
  if (live > 1) store_one(p + 1, x.y);
}

constexpr int kGroups = 8;
constexpr int kHeld = 8;  // rows whose numbers a thread keeps in registers at a time

// A group's run of a token's rows.
struct Run {
  int begin, end;
};
__device__ __forceinline__ Run run_of(int count, int group) {
  const int per = (count + kGroups - 1) / kGroups;
  return Run{min(group * per, count), min(group * per + per, count)};
}
// Where the last batch of kHeld rows of a run begins.
__device__ __forceinline__ int last_batch(Run run) {
  return run.begin + max(run.end - run.begin - 1, 0) / kHeld * kHeld;
}

template <typename State, int TILE>
struct Tile {
  using real = typename Arithmetic<State>::real;
  using two = typename Arithmetic<State>::two;
  static constexpr int kPairs = TILE / 2;
  static constexpr int kThreads = kPairs * kGroups;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kParts = kPairs < 32 ? kWarps : kGroups;  // sums left after the warp's own
  static_assert(TILE == 32 || TILE == 64 || TILE == 128, "half a warp owns 32 columns");

  int column0;         // of the tile
  int columns;         // of the tile that exist
  int pair, group;     // of the thread
  int column, live;    // the thread's first column, counted from the tile's; how many of its two exist

  __device__ __forceinline__ Tile(int index, int width)
      : column0(index * TILE), columns(min(TILE, width - index * TILE)), pair(threadIdx.x % kPairs),
        group(threadIdx.x / kPairs), column(pair * 2), live(max(0, min(2, columns - column))) {}

  // The block's sum over groups: each thread puts its group's, then, after a barrier, any thread may take the total.
  __device__ __forceinline__ void put_part(real* parts, two x) const {
    if (kPairs < 32) {
#pragma unroll
      for (int apart = kPairs; apart < 32; apart *= 2) {
        x.x += __shfl_xor_sync(0xffffffffu, x.x, apart);
        x.y += __shfl_xor_sync(0xffffffffu, x.y, apart);
      }
      if (threadIdx.x % 32 < kPairs) store_two(parts + threadIdx.x / 32 * TILE + column, x);
    } else {
      store_two(parts + group * TILE + column, x);
    }
  }
  __device__ __forceinline__ two sum_parts(const real* parts) const {
    two x[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) x[i] = load_two(parts + i * TILE + column);
#pragma unroll
    for (int apart = 1; apart < kParts; apart *= 2)
#pragma unroll
      for (int i = 0; i + apart < kParts; i += 2 * apart) x[i] = plus_two(x[i], x[i + apart]);
    return x[0];
  }
};
