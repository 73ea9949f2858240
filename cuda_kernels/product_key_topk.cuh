// Selection within a block: the best `want` of many entries by (key descending, slot ascending), then sorted.
#pragma once
#include "block.cuh"

// The type in which scores of a type are added and compared, and the integer that orders like it.
template <typename Score>
struct Wide {
  using Value = float;
  using Key = unsigned;
};
template <>
struct Wide<double> {
  using Value = double;
  using Key = unsigned long long;
};

// Integers that order like the floats: -0 as +0, NaN as -inf. No float has the key 0. Zeros and NaNs are told by their
// bits: where the compiler flushes numbers below 2^-126, == would take these for zeros.
__device__ __forceinline__ unsigned order_key(float x) {
  unsigned bits = __float_as_uint(x);
  const unsigned size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) bits = 0xff800000u;
  if (size == 0u) bits = 0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ unsigned long long order_key(double x) {
  unsigned long long bits = (unsigned long long)__double_as_longlong(x);
  const unsigned long long size = bits & 0x7fffffffffffffffull;
  if (size > 0x7ff0000000000000ull) bits = 0xfff0000000000000ull;
  if (size == 0ull) bits = 0ull;
  return bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
}
__device__ __forceinline__ float without_nan(float x) { return x == x ? x : __uint_as_float(0xff800000u); }
__device__ __forceinline__ double without_nan(double x) {
  return x == x ? x : __longlong_as_double((long long)0xfff0000000000000ull);
}

template <typename Key>
struct Entry {
  Key key;
  unsigned low;  // ~slot: the greater, the better among equal keys, so (key, low) is one number with no ties
  int place;     // where the entry's value is
  __device__ __forceinline__ int slot() const { return (int)~low; }
};

constexpr int kBins = 256;  // the search fixes 8 bits of (key, low) at a time

template <typename Key>
struct Selector {
  // What the search has fixed of the worst chosen entry: leading bits of key and low, and which bits these are.
  Key key, key_mask;
  unsigned low, low_mask;

  __device__ __forceinline__ bool agrees(Key k, unsigned l) const {
    return (k & key_mask) == key && (l & low_mask) == low;
  }
  __device__ __forceinline__ bool takes(Key k, unsigned l) const {
    return (k & key_mask) > key || ((k & key_mask) == key && (l & low_mask) >= low);
  }
};

// Of 256 counts find the greatest digit d such that at least `want` counts lie at or above d. One warp.
// result = {d, how many of d are wanted, count of d}
__device__ __forceinline__ void find_digit(const int* bins, int want, int* result) {
  const int lane = threadIdx.x, each = kBins / 32, top = kBins - 1 - lane * each;
  int mine = 0;
#pragma unroll 1
  for (int i = 0; i < each; ++i) mine += bins[top - i];
  int until = mine;  // counts of this lane's digits and all greater ones
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += below;
  }
  int before = until - mine;
  if (before >= want || until < want) return;
#pragma unroll 1
  for (int d = top;; --d) {
    if (before + bins[d] >= want) {
      result[0] = d, result[1] = want - before, result[2] = bins[d];
      return;
    }
    before += bins[d];
  }
}

// Write the best `want` of `count` entries to chosen, in no order; entry(p) gives the p-th. `want` <= count.
// Every thread of the block calls this; chosen may be read after the barrier at its end.
template <int THREADS, typename Key, typename EntryAt>
__device__ __forceinline__ void choose(int count, int want, EntryAt entry, Entry<Key>* chosen) {
  __shared__ int bins[kBins], found[3], taken;
  constexpr int kKeyDigits = sizeof(Key), kDigits = kKeyDigits + 4;
  Selector<Key> s{0, 0, 0, 0};
  int left = want;
#pragma unroll 1
  for (int digit = 0; digit < kDigits; ++digit) {
    const bool in_key = digit < kKeyDigits;
    const int shift = 8 * ((in_key ? kKeyDigits : kDigits) - 1 - digit);
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += THREADS) bins[i] = 0;
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
#pragma unroll 1
    for (int p = threadIdx.x; p < count; p += THREADS) {
      const Entry<Key> e = entry(p);
      if (s.agrees(e.key, e.low)) atomicAdd(&bins[(in_key ? (unsigned)(e.key >> shift) : e.low >> shift) & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(bins, left, found);
    __syncthreads();
    if (in_key)
      s.key |= (Key)found[0] << shift, s.key_mask |= (Key)255 << shift;
    else
      s.low |= (unsigned)found[0] << shift, s.low_mask |= 255u << shift;
    left = found[1];
    if (left == found[2]) break;  // all that agree so far are wanted
  }
#pragma unroll 1
  for (int p = threadIdx.x; p < count; p += THREADS) {
    const Entry<Key> e = entry(p);
    if (s.takes(e.key, e.low)) chosen[atomicAdd(&taken, 1)] = e;
  }
  __syncthreads();
}

// Sort count entries, by slot ascending or best first; room for power_of_two_from(count) of them.
template <int THREADS, typename Key>
__device__ __forceinline__ void sort(Entry<Key>* entries, int count, bool by_slot) {
  const int size = power_of_two_from(count);
#pragma unroll 1
  for (int i = count + threadIdx.x; i < size; i += THREADS) entries[i] = Entry<Key>{0, 0, 0};  // last in both orders
  block_sort<THREADS>(entries, size, [=](const Entry<Key>& a, const Entry<Key>& b) {
    return by_slot || a.key == b.key ? a.low > b.low : a.key > b.key;
  });
}
