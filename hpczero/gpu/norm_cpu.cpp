// The sum of squares in float64: each block in lanes, then the lanes in halves; see norm.py.
#include "../floats.h"

namespace {

constexpr int64_t LANES = 2048;  // stay in the first cache

template <typename G>
ALWAYS_INLINE double run(const G* flat, int64_t count) {
  double lanes[LANES];
  for (int64_t i = 0; i < LANES; ++i) lanes[i] = 0;
  for (int64_t start = 0; start < count; start += LANES) {
    int64_t size = count - start < LANES ? count - start : LANES;
    for (int64_t i = 0; i < size; ++i) {
      double x = (double)widen(flat[start + i]);
      lanes[i] += x * x;
    }
  }
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[half + i];
  return lanes[0];
}

}  // namespace

// squares_<dtype>: of each block; how many there are follows from `count`.
#define KERNEL(NAME, G)                                                                          \
  extern "C" CLONES double NAME##_block(const G* flat, int64_t count) { return run(flat, count); } \
  extern "C" void NAME(const G* flat, int64_t count, int64_t block, double* out, int threads) {  \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")           \
    for (int64_t start = 0; start < count; start += block)                                       \
      out[start / block] = NAME##_block(flat + start, count - start < block ? count - start : block); \
  }

KERNEL(squares_float32, float)
KERNEL(squares_bfloat16, bf16)
KERNEL(squares_float16, _Float16)
KERNEL(squares_float64, double)
