// One element's Adam or AdamW update: the same text for the CPU's compiler and for NVRTC.
//
// Every operation rounds once, in the order of reference.py, its twin in torch: so all kernels give
// the same bits on every instruction set, in any cut, on any number of threads. Compile with
// -ffp-contract=off (g++) or -fmad=false (NVRTC): a fused multiply-add would round differently.
#pragma once

#ifdef __CUDACC__
#define HPCZERO_INLINE __host__ __device__ __forceinline__
#else
#define HPCZERO_INLINE inline __attribute__((always_inline))
#endif

// The constants of a step, worked out in double and rounded once; see AdamStep in reference.py.
template <typename T>
struct AdamConstants {
  T scale;         // factor on the gradient
  T keep;          // AdamW: 1 - lr * weight_decay, a factor on the weight
  T weight_decay;  // Adam: added to the gradient, times the weight
  T beta1, rest1;  // rest = 1 - beta
  T beta2, rest2;
  T correction2;   // sqrt(1 - beta2^step)
  T eps;
  T size;          // lr / (1 - beta1^step)
};

HPCZERO_INLINE float root(float x) { return __builtin_sqrtf(x); }
HPCZERO_INLINE double root(double x) { return __builtin_sqrt(x); }

// DECAYS: Adam with weight decay. Without it nothing is added: adding zero would lose minus zeros.
template <bool DECAYS, typename T>
HPCZERO_INLINE void adam_element(T& master, T gradient, T& moment1, T& moment2,
                                 const AdamConstants<T>& c) {
  T g = gradient * c.scale;
  T w = master * c.keep;
  if (DECAYS) g = g + w * c.weight_decay;
  T m = moment1 * c.beta1 + g * c.rest1;
  T v = moment2 * c.beta2 + (g * g) * c.rest2;
  T step = m / (root(v) / c.correction2 + c.eps) * c.size;
  moment1 = m;
  moment2 = v;
  master = w - step;
}
