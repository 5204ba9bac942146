// 16-bit floats and wide ones, and which instruction sets kernels for the CPU are compiled for.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(CLONES)  // given: the tests build one for each instruction set
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

// Into every clone: a call would be to code of the baseline.
#define ALWAYS_INLINE static inline __attribute__((always_inline))

struct bf16 {
  uint16_t bits;
};

ALWAYS_INLINE float widen(float x) { return x; }
ALWAYS_INLINE double widen(double x) { return x; }
ALWAYS_INLINE float widen(_Float16 x) { return (float)x; }
ALWAYS_INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

ALWAYS_INLINE void narrow(float x, float& out) { out = x; }
ALWAYS_INLINE void narrow(double x, double& out) { out = x; }
ALWAYS_INLINE void narrow(float x, _Float16& out) { out = (_Float16)x; }
ALWAYS_INLINE void narrow(float x, bf16& out) {  // to the nearest, ties to even; as c10::BFloat16
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t rounded = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  out.bits = x != x ? (uint16_t)0x7fc0u : rounded;
}
