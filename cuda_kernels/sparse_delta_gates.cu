// Factors of the sparse delta rule's rows, once per token instead of once per block of columns.
//
//   decay_factors   alpha = exp(log_decay)
//   undo_factors    inverse = 1 / alpha, or, rule "per_slot", 1 / (alpha_w (1 - beta k_w))
//
// Shapes: log_decay, alpha [n, A] real (A = 1 or W); beta [n]; write_weights [n, W]; inverse [n, W] where PER_SLOT,
// else [n, A]. Logarithms are natural.
// Bits: exp is taken in double (below 1 ulp of it) and rounded once to real, as the CPU room does; 1 / x is one
// correctly rounded division. Under NVRTC's -ftz=true a float result below 2^-126 becomes zero.
// Ownership: one number a thread; grid (ceil(numbers / 256)), 256 threads. Bytes: each number once in, once out.
// Inverses are infinite only where the log's plan keeps the row, and are not used there.
// Twins: sdm_lite/cpu/forward.py decays, sdm_lite/cpu/backward.py _inverses.
#include "device_compat.cuh"

template <typename Real>
__global__ void __launch_bounds__(256) decay_factors(const Real* log_decay, Real* alpha, long long numbers) {
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i < numbers) alpha[i] = (Real)exp((double)log_decay[i]);
}

template <typename Real, bool PER_SLOT>
__global__ void __launch_bounds__(256)
undo_factors(const Real* alpha, const Real* beta, const Real* write_weights, Real* inverse, long long numbers, int writes,
             int decays) {
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i >= numbers) return;
  if (!PER_SLOT) {
    inverse[i] = (Real)1 / alpha[i];
    return;
  }
  const long long token = i / writes;
  inverse[i] = (Real)1 / (alpha[decays > 1 ? i : token] * ((Real)1 - beta[token] * write_weights[i]));
}
