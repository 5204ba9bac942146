// The update of adam.h for the CPU: each type of gradient and weight, for each instruction set.
#include <cstdint>

#include "adam.h"
#include "../floats.h"

namespace {

constexpr int64_t TILE = 65536;

template <bool DECAYS, bool WRITES, typename T, typename G, typename W>
ALWAYS_INLINE void run(W* __restrict__ weights, T* __restrict__ master,
                        const G* __restrict__ gradient, T* __restrict__ moment1,
                        T* __restrict__ moment2, int64_t count, const AdamConstants<T>& given) {
  const AdamConstants<T> c = given;
  for (int64_t i = 0; i < count; ++i) {
    adam_element<DECAYS>(master[i], (T)widen(gradient[i]), moment1[i], moment2[i], c);
    if (WRITES) narrow(master[i], weights[i]);
  }
}

}  // namespace

// adam_<weights>_<gradient>: weights "none" are the masters themselves.
#define KERNEL(NAME, WRITES, T, G, W)                                                            \
  extern "C" CLONES void NAME##_tile(W* weights, T* master, const G* gradient, T* moment1,       \
                                     T* moment2, int64_t count, const AdamConstants<T>* c) {     \
    if (c->weight_decay != 0)                                                                    \
      run<true, WRITES>(weights, master, gradient, moment1, moment2, count, *c);                 \
    else                                                                                         \
      run<false, WRITES>(weights, master, gradient, moment1, moment2, count, *c);                \
  }                                                                                              \
  extern "C" void NAME(W* weights, T* master, const G* gradient, T* moment1, T* moment2,         \
                       int64_t count, const AdamConstants<T>* c, int threads) {                  \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")           \
    for (int64_t start = 0; start < count; start += TILE) {                                      \
      int64_t size = count - start < TILE ? count - start : TILE;                                \
      NAME##_tile(WRITES ? weights + start : nullptr, master + start, gradient + start,          \
                  moment1 + start, moment2 + start, size, c);                                    \
    }                                                                                            \
  }

KERNEL(adam_none_float32, false, float, float, float)
KERNEL(adam_none_bfloat16, false, float, bf16, float)
KERNEL(adam_none_float16, false, float, _Float16, float)
KERNEL(adam_bfloat16_float32, true, float, float, bf16)
KERNEL(adam_bfloat16_bfloat16, true, float, bf16, bf16)
KERNEL(adam_float16_float32, true, float, float, _Float16)
KERNEL(adam_float16_float16, true, float, _Float16, _Float16)
KERNEL(adam_none_float64, false, double, double, double)

// Which of the clones runs here.
extern "C" const char* instruction_set() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return "AVX-512";
  if (__builtin_cpu_supports("avx2")) return "AVX2";
  return "SSE2";
#else
  return "baseline";
#endif
}
