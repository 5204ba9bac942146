// The sum of a reduction: sources added in order in the wide type, first those of each node, then
// the nodes; divided, rounded once.
#include "../floats.h"

namespace {

constexpr int64_t BLOCK = 1024;  // the running sums stay in the first cache

template <typename W, typename S>
ALWAYS_INLINE void add_up(const S* const* sources, int count, int64_t start, int64_t size, W* sums) {
  const S* first = sources[0] + start;
  for (int64_t i = 0; i < size; ++i) sums[i] = (W)widen(first[i]);
  for (int source = 1; source < count; ++source) {
    const S* next = sources[source] + start;
    for (int64_t i = 0; i < size; ++i) sums[i] += (W)widen(next[i]);
  }
}

template <typename W, typename S, typename R>
ALWAYS_INLINE void run(const S* const* sources, const int* nodes, int count_of_nodes, R* out,
                       int64_t count, W divisor, bool add) {
  W sums[BLOCK], node[BLOCK];
  for (int64_t start = 0; start < count; start += BLOCK) {
    int64_t size = count - start < BLOCK ? count - start : BLOCK;
    const S* const* next = sources;
    add_up(next, nodes[0], start, size, sums);
    for (int number = 1; number < count_of_nodes; ++number) {
      next += nodes[number - 1];
      add_up(next, nodes[number], start, size, node);
      for (int64_t i = 0; i < size; ++i) sums[i] += node[i];
    }
    if (divisor != 1)
      for (int64_t i = 0; i < size; ++i) sums[i] /= divisor;
    R* target = out + start;
    for (int64_t i = 0; i < size; ++i) {
      R rounded;
      narrow(sums[i], rounded);
      if (add) narrow((W)(widen(target[i]) + widen(rounded)), rounded);
      target[i] = rounded;
    }
  }
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
