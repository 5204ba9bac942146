// The sum of a reduction: sources added in order in the wide type, first those of each node, then
// the nodes; divided, rounded once.
#include <cmath>

#include "../floats.h"
#include "streaming.h"

namespace {

constexpr int64_t LARGE = 1 << 18;  // bytes of a result that goes past the caches

template <typename W>
struct Block {  // what is summed at a time: in registers, however many sources there are
  static constexpr int VECTORS = 8, LANES = 32 / sizeof(W), SIZE = VECTORS * LANES;
  typedef W Vector __attribute__((vector_size(32)));  // wider ones leave AVX2's registers
  Vector vectors[VECTORS];
};

typedef Block<float>::Vector Floats;
typedef Block<double>::Vector Doubles;
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef uint16_t HalfBits __attribute__((vector_size(16)));

ALWAYS_INLINE void load(const float* from, Floats& to) { std::memcpy(&to, from, 32); }
ALWAYS_INLINE void load(const double* from, Doubles& to) { std::memcpy(&to, from, 32); }
ALWAYS_INLINE void load(const _Float16* from, Floats& to) {
  for (int i = 0; i < Block<float>::LANES; ++i) to[i] = widen(from[i]);
}
ALWAYS_INLINE void load(const bf16* from, Floats& to) {
  HalfBits half;
  std::memcpy(&half, from, 16);
  Bits bits = __builtin_convertvector(half, Bits) << 16;
  std::memcpy(&to, &bits, 32);
}

ALWAYS_INLINE void store(const Floats& from, float* to) { std::memcpy(to, &from, 32); }
ALWAYS_INLINE void store(const Doubles& from, double* to) { std::memcpy(to, &from, 32); }
ALWAYS_INLINE void store(const Floats& from, _Float16* to) {
  for (int i = 0; i < Block<float>::LANES; ++i) narrow(from[i], to[i]);
}
ALWAYS_INLINE void store(const Floats& from, bf16* to) {  // as `narrow`
  Bits bits;
  std::memcpy(&bits, &from, 32);
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  Bits nan = (Bits)(from != from);
  HalfBits half = __builtin_convertvector((nan & 0x7fc0u) | (~nan & bits), HalfBits);
  std::memcpy(to, &half, 16);
}

// What to multiply by for the bits of a division, in a fraction of its time: there is such a number
// for powers of two. Else 0.
template <typename W>
ALWAYS_INLINE W exact_inverse(W x) {
  int exponent;
  return std::frexp(x, &exponent) == (W)0.5 ? 1 / x : 0;
}

template <typename W, typename S>
ALWAYS_INLINE void add_up(const S* const* sources, int count, int64_t start, Block<W>& sums) {
  for (int v = 0; v < Block<W>::VECTORS; ++v)
    load(sources[0] + start + v * Block<W>::LANES, sums.vectors[v]);
  for (int source = 1; source < count; ++source)
    for (int v = 0; v < Block<W>::VECTORS; ++v) {
      typename Block<W>::Vector next;
      load(sources[source] + start + v * Block<W>::LANES, next);
      sums.vectors[v] += next;
    }
}

template <typename W, typename S, typename R>
ALWAYS_INLINE void sum_block(const S* const* sources, const int* nodes, int count_of_nodes, R* out,
                             int64_t start, W divisor, W inverse, bool add, bool streams) {
  constexpr int SIZE = Block<W>::SIZE;
  Block<W> sums, node;
  add_up(sources, nodes[0], start, sums);
  for (int number = 1; number < count_of_nodes; ++number) {
    sources += nodes[number - 1];
    add_up(sources, nodes[number], start, node);
    for (int v = 0; v < Block<W>::VECTORS; ++v) sums.vectors[v] += node.vectors[v];
  }
  if (inverse != 0)
    for (int v = 0; v < Block<W>::VECTORS; ++v) sums.vectors[v] *= inverse;
  else
    for (int v = 0; v < Block<W>::VECTORS; ++v) sums.vectors[v] /= divisor;
  R results[SIZE], *target = out + start;
  for (int v = 0, i = 0; v < Block<W>::VECTORS; ++v, i += Block<W>::LANES) {
    if (!add) {
      store(sums.vectors[v], results + i);
      continue;
    }
    R rounded[Block<W>::LANES];
    store(sums.vectors[v], rounded);
    typename Block<W>::Vector before, more;
    load(target + i, before);
    load(rounded, more);
    store(before + more, target + i);
  }
  if (add) return;
  if (streams)
    streaming::write(target, results, sizeof results);
  else
    std::memcpy(target, results, sizeof results);
}

template <typename W, typename S, typename R>
ALWAYS_INLINE void sum_one(const S* const* sources, const int* nodes, int count_of_nodes, R* out,
                           int64_t at, W divisor, bool add) {
  W sum = 0;
  for (int number = 0; number < count_of_nodes; ++number) {
    W node = (W)widen(sources[0][at]);
    for (int source = 1; source < nodes[number]; ++source) node += (W)widen(sources[source][at]);
    sum = number ? sum + node : node;
    sources += nodes[number];
  }
  R rounded;
  narrow(sum / divisor, rounded);
  if (add) narrow((W)(widen(out[at]) + widen(rounded)), rounded);
  out[at] = rounded;
}

template <typename W, typename S, typename R>
ALWAYS_INLINE void run(const S* const* sources, const int* nodes, int count_of_nodes, R* out,
                       int64_t count, W divisor, bool add) {
  bool streams = !add && count * (int64_t)sizeof(R) >= LARGE;
  W inverse = exact_inverse(divisor);
  int64_t start = 0;
  for (; streams && start < count && (intptr_t)(out + start) % streaming::LINE; ++start)
    sum_one(sources, nodes, count_of_nodes, out, start, divisor, add);
  for (; start + Block<W>::SIZE <= count; start += Block<W>::SIZE)
    sum_block(sources, nodes, count_of_nodes, out, start, divisor, inverse, add, streams);
  for (; start < count; ++start) sum_one(sources, nodes, count_of_nodes, out, start, divisor, add);
  if (streams) streaming::finish();
}

}  // namespace

// sum_<sources>_<out>: of nodes[0] + nodes[1] + ... sources; `out` may be one.
#define KERNEL(NAME, W, S, R)                                                                   \
  extern "C" CLONES void NAME(const S* const* sources, const int* nodes, int count_of_nodes,    \
                              R* out, int64_t count, W divisor, int add) {                      \
    if (add)                                                                                    \
      run<W>(sources, nodes, count_of_nodes, out, count, divisor, true);                        \
    else                                                                                        \
      run<W>(sources, nodes, count_of_nodes, out, count, divisor, false);                       \
  }

KERNEL(sum_float32_float32, float, float, float)
KERNEL(sum_float32_bfloat16, float, float, bf16)
KERNEL(sum_float32_float16, float, float, _Float16)
KERNEL(sum_bfloat16_bfloat16, float, bf16, bf16)
KERNEL(sum_bfloat16_float32, float, bf16, float)
KERNEL(sum_float16_float16, float, _Float16, _Float16)
KERNEL(sum_float16_float32, float, _Float16, float)
KERNEL(sum_float64_float64, double, double, double)
