// Product-key selection: the k slots with the greatest sums of one score per factor (docs/spec.md, section 2).
//
//   slot(c_0, .., c_{F-1}) = (..(c_0 n_1 + c_1) n_2 + ..) n_{F-1} + c_{F-1},   sum = (s_0[c_0] + s_1[c_1]) + ..
//
// scores [rows, columns] float, double, bf16 or fp16: the factors' scores side by side, columns = sum of widths
// values [rows, k] float (double for double): the sums, -inf for NaN;  slots [rows, k] int: ascending
//
// Rank lists hold the best of a factor, or of all factors combined so far, by (score descending, slot ascending).
// Factor f joins by the staircase: ranks (i, j) from 0 with (i + 1) (j + 1) <= k, ordered by (sum descending, slot
// ascending), k kept. Sums are rounded once. Every order is total, so the result depends on nothing but the scores.
//
// A block owns a row. Reads of scores: at most sizeof(key) + 5 times the row, all but the first from the caches.
// Shared memory: 3 lists [k], 1 staircase [k + 1], chosen [k up to a power of two], candidates [candidates]; the caller
// gives candidates = the most pairs that any factor's staircase has (0 for one factor).
// Required: 1 <= k <= product of widths < 2^31, widths <= 65,535. Twins: sdm_lite/cpu/select.py,
// sdm_lite/reference/addressing.py.
#include "product_key_topk.cuh"

template <typename Score, int THREADS>
struct TopK {
  using Value = typename Wide<Score>::Value;
  using Key = typename Wide<Score>::Key;

  // Best first: the values and slots of a factor's columns, or of all factors so far.
  struct List {
    Value* value;
    int* slot;
    int length;
  };

  // Pairs of ranks, row i of the staircase from start[i] on.
  struct Stairs {
    int* start;
    int rows, count;

    __device__ __forceinline__ int row_of(int p) const {
      int low = 0, high = rows - 1;  // the last i with start[i] <= p
#pragma unroll 1
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (start[middle] <= p)
          low = middle;
        else
          high = middle - 1;
      }
      return low;
    }
  };

  // start[i] = sum over i' < i of min(k / (i' + 1), columns); one warp scans.
  static __device__ __forceinline__ Stairs make_stairs(int* start, int rows, int columns, int k) {
    if (threadIdx.x < 32) {
      int before = 0;
#pragma unroll 1
      for (int first = 0; first < rows; first += 32) {
        const int i = first + threadIdx.x, length = i < rows ? min(k / (i + 1), columns) : 0;
        int until = length;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
          const int below = __shfl_up_sync(0xffffffffu, until, step);
          if ((int)threadIdx.x >= step) until += below;
        }
        if (i < rows) start[i] = before + until - length;
        before += __shfl_sync(0xffffffffu, until, 31);
      }
      if (threadIdx.x == 0) start[rows] = before;
    }
    __syncthreads();
    return Stairs{start, rows, start[rows]};
  }

  // The value of a candidate, whose slot may be wanted as well.
  static __device__ __forceinline__ Value pair_sum(const Stairs& stairs, const List& a, const List& b, int p, int* i,
                                                   int* j) {
    *i = stairs.row_of(p);
    *j = p - stairs.start[*i];
    return add_rn(a.value[*i], b.value[*j]);
  }

  template <typename ValueAt>
  static __device__ __forceinline__ void write(const Entry<Key>* chosen, int count, ValueAt value, Value* values,
                                               int* slots) {
#pragma unroll 1
    for (int r = threadIdx.x; r < count; r += THREADS) {
      values[r] = without_nan(value(chosen[r].place));
      slots[r] = chosen[r].slot();
    }
    __syncthreads();
  }

  static __device__ __forceinline__ void run(const Score* scores, const int* widths, int factors, int k,
                                             int candidates, Value* out_values, int* out_slots) {
    SmemCut cut{dynamic_smem()};
    const auto list_values = cut.ring<Value>(3, k);  // all so far, the factor to join, and what comes out
    const auto list_slots = cut.ring<int>(3, k);
    Entry<Key>* chosen = cut.take<Entry<Key>>(power_of_two_from(k));
    Key* keys = cut.take<Key>(candidates);
    unsigned* lows = cut.take<unsigned>(candidates);
    int* start = cut.take<int>(k + 1);
    int all = 0, length = 0;  // which list is that of all factors so far

    for (int f = 0; f < factors; ++f) {
      const int width = widths[f], kept = min(k, width);
      auto column = [&](int c) { return Entry<Key>{order_key((Value)to_float(scores[c])), ~(unsigned)c, c}; };
      auto score = [&](int c) { return (Value)to_float(scores[c]); };
      choose<THREADS, Key>(width, kept, column, chosen);
      sort<THREADS>(chosen, kept, factors == 1);
      if (factors == 1) return write(chosen, kept, score, out_values, out_slots);
      const int one = f == 0 ? all : 1;
      write(chosen, kept, score, list_values[one], list_slots[one]);
      scores += width;
      if (f == 0) {
        length = kept;
        continue;
      }

      const List a{list_values[all], list_slots[all], length}, b{list_values[1], list_slots[1], kept};
      const Stairs stairs = make_stairs(start, length, width, k);
#pragma unroll 1
      for (int p = threadIdx.x; p < stairs.count; p += THREADS) {
        int i, j;
        keys[p] = order_key(pair_sum(stairs, a, b, p, &i, &j));
        lows[p] = ~(unsigned)(a.slot[i] * width + b.slot[j]);
      }
      __syncthreads();
      length = (int)min((long long)k, (long long)length * width);
      auto pair = [&](int p) { return Entry<Key>{keys[p], lows[p], p}; };
      auto sum = [&](int p) {
        int i, j;
        return pair_sum(stairs, a, b, p, &i, &j);
      };
      const bool last = f == factors - 1;
      choose<THREADS, Key>(stairs.count, length, pair, chosen);
      sort<THREADS>(chosen, length, last);
      if (last) return write(chosen, k, sum, out_values, out_slots);
      all = 2 - all;
      write(chosen, length, sum, list_values[all], list_slots[all]);
    }
  }
};

template <typename Score, int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    product_key_topk_forward(const Score* scores, const int* widths, int factors, int columns, int k, int candidates,
                             typename Wide<Score>::Value* values, int* slots) {
  const long long row = blockIdx.x;
  TopK<Score, THREADS>::run(scores + row * columns, widths, factors, k, candidates, values + row * k, slots + row * k);
}
