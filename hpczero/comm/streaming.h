// Writing past the caches what is mostly read much later, and by another core. A store that goes
// through them reads its line from memory first, which takes a third of the bandwidth.
#pragma once

#include <cstdint>
#include <cstring>

namespace streaming {

constexpr int64_t LINE = 64, PAGE = 4096;

}  // namespace streaming

#if defined(__x86_64__)
#include <immintrin.h>

namespace streaming {

__attribute__((target("avx2"))) static inline void avx2_line(char* to, const char* from) {
  for (int i = 0; i < LINE; i += 32)
    _mm256_stream_si256((__m256i*)(to + i), _mm256_loadu_si256((const __m256i*)(from + i)));
}

static inline void sse2_line(char* to, const char* from) {
  for (int i = 0; i < LINE; i += 16)
    _mm_stream_si128((__m128i*)(to + i), _mm_loadu_si128((const __m128i*)(from + i)));
}

// From two pages in turns, which memory gives faster than one after the other.
#define STREAMING_LINES(NAME, LINE_OF)                                            \
  static inline void NAME(char* to, const char* from, int64_t nbytes) {           \
    int64_t start = 0;                                                            \
    for (; start + 2 * PAGE <= nbytes; start += 2 * PAGE)                         \
      for (int64_t i = start; i < start + PAGE; i += LINE) {                      \
        LINE_OF(to + i, from + i);                                                \
        LINE_OF(to + i + PAGE, from + i + PAGE);                                  \
      }                                                                           \
    for (; start < nbytes; start += LINE) LINE_OF(to + start, from + start);      \
  }

__attribute__((target("avx2"))) STREAMING_LINES(avx2, avx2_line)
STREAMING_LINES(sse2, sse2_line)
#undef STREAMING_LINES

// Copies; others see it after `finish`.
static inline void write(void* out, const void* in, int64_t nbytes) {
  char* to = (char*)out;
  const char* from = (const char*)in;
  int64_t head = -(intptr_t)to & 31;
  if (head > nbytes) head = nbytes;
  std::memcpy(to, from, head);
  int64_t body = (nbytes - head) / LINE * LINE;
  if (__builtin_cpu_supports("avx2"))
    avx2(to + head, from + head, body);
  else
    sse2(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, nbytes - head - body);
}

static inline void finish() { _mm_sfence(); }

}  // namespace streaming

#else

namespace streaming {

static inline void write(void* out, const void* in, int64_t nbytes) { std::memcpy(out, in, nbytes); }
static inline void finish() {}

}  // namespace streaming

#endif
