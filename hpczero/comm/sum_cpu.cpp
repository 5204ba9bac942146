// The sum of a reduction: sources added in order in the wide type, first those of each node, then
// the nodes; divided, rounded once.
#include "../floats.h"
#include "streaming.h"

namespace {

constexpr int64_t LARGE = 1 << 18;  // bytes of a result that goes past the caches

template <typename W>
struct Block {  // what is summed at a time: in registers, however many sources there are
  static constexpr int VECTORS = 4, LANES = 64 / sizeof(W), SIZE = VECTORS * LANES;
  typedef W Vector __attribute__((vector_size(64)));
  Vector vectors[VECTORS];
};

ALWAYS_INLINE void load(const float* from, Block<float>::Vector& to) { std::memcpy(&to, from, 64); }
ALWAYS_INLINE void load(const double* from, Block<double>::Vector& to) {
  std::memcpy(&to, from, 64);
}
ALWAYS_INLINE void load(const _Float16* from, Block<float>::Vector& to) {
  float wide[Block<float>::LANES];
  for (int i = 0; i < Block<float>::LANES; ++i) wide[i] = widen(from[i]);
  std::memcpy(&to, wide, 64);
}
ALWAYS_INLINE void load(const bf16* from, Block<float>::Vector& to) {
  typedef uint16_t Narrow __attribute__((vector_size(32)));
  typedef uint32_t Wide __attribute__((vector_size(64)));
  Narrow bits;
  std::memcpy(&bits, from, 32);
  Wide shifted = __builtin_convertvector(bits, Wide) << 16;
  std::memcpy(&to, &shifted, 64);
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
                             int64_t start, W divisor, bool add, bool streams) {
  constexpr int SIZE = Block<W>::SIZE;
  Block<W> sums, node;
  add_up(sources, nodes[0], start, sums);
  for (int number = 1; number < count_of_nodes; ++number) {
    sources += nodes[number - 1];
    add_up(sources, nodes[number], start, node);
    for (int v = 0; v < Block<W>::VECTORS; ++v) sums.vectors[v] += node.vectors[v];
  }
  if (divisor != 1)
    for (int v = 0; v < Block<W>::VECTORS; ++v) sums.vectors[v] /= divisor;
  W wide[SIZE];
  std::memcpy(wide, sums.vectors, sizeof wide);
  R results[SIZE], *target = out + start;
  for (int i = 0; i < SIZE; ++i) narrow(wide[i], results[i]);
  if (add)
    for (int i = 0; i < SIZE; ++i) narrow((W)(widen(target[i]) + widen(results[i])), target[i]);
  else if (streams)
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
  narrow(divisor != 1 ? sum / divisor : sum, rounded);
  if (add) narrow((W)(widen(out[at]) + widen(rounded)), rounded);
  out[at] = rounded;
}

template <typename W, typename S, typename R>
ALWAYS_INLINE void run(const S* const* sources, const int* nodes, int count_of_nodes, R* out,
                       int64_t count, W divisor, bool add) {
  bool streams = !add && count * (int64_t)sizeof(R) >= LARGE;
  int64_t start = 0;
  for (; start + Block<W>::SIZE <= count; start += Block<W>::SIZE)
    sum_block(sources, nodes, count_of_nodes, out, start, divisor, add, streams);
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
