// Are the values of a sparse delta call such that no kernel leaves its arrays? (checks of sdm_lite/validate.py)
//
//   check_slots    every slot of a token in [0, N), and no slot twice in one token
//   check_decays   every log decay <= 0, and not NaN
//   check_offsets  cu_seqlens starts at 0, never decreases, ends at T
//   safe_offsets   no check: cu_seqlens made such that no sequence leaves [0, T)
//
// The checks set *bad to 1 and do nothing else; which value it was, the host finds out with the checks it has anyway.
// Shapes: slots [tokens, count] int32; log_decay [count] float or double; cu_seqlens [sequences + 1] int64; bad [1] int32.
// Ownership: check_slots gives a token to a warp; the others a value to a thread. Grids cover all values (x).
// Bytes: each value once. Order of work does not matter: *bad is only ever set.
#include "device_compat.cuh"

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
check_slots(const int* slots, long long tokens, int count, int num_slots, int* bad) {
  const long long token = (long long)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (token >= tokens) return;
  const int* mine = slots + token * count;
  bool wrong = false, rising = true;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int slot = mine[i];
    wrong |= slot < 0 || slot >= num_slots;
    rising &= i == 0 || mine[i - 1] < slot;
  }
  if (!__all_sync(0xffffffffu, rising))  // else they are distinct without looking further
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32)
#pragma unroll 1
      for (int j = 0; j < i; ++j) wrong |= mine[i] == mine[j];
  if (wrong) atomicMax(bad, 1);
}

template <typename F>
__global__ void __launch_bounds__(kThreads) check_decays(const F* log_decay, long long count, int* bad) {
  const long long i = (long long)blockIdx.x * kThreads + threadIdx.x;
  if (i < count && !(log_decay[i] <= 0)) atomicMax(bad, 1);
}

__global__ void __launch_bounds__(kThreads)
check_offsets(const long long* cu_seqlens, int sequences, long long tokens, int* bad) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i > sequences) return;
  const long long here = cu_seqlens[i];
  const bool right = i == 0 ? here == 0 : here >= cu_seqlens[i - 1] && (i < sequences || here == tokens);
  if (!right) atomicMax(bad, 1);
}

// safe[i]: the offsets, raised to their predecessors and kept in [0, tokens]; the same where check_offsets finds none bad.
__global__ void safe_offsets(const long long* cu_seqlens, int count, long long tokens, long long* safe) {
  if (threadIdx.x) return;
  long long least = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) safe[i] = least = max(least, min(cu_seqlens[i], tokens));
}
