// Large copies, past the caches.
#include "streaming.h"

extern "C" void copy_streaming(void* out, const void* in, int64_t nbytes, int threads) {
  int64_t part = ((nbytes + threads - 1) / threads + 4095) / 4096 * 4096;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t start = 0; start < nbytes; start += part) {
    int64_t size = nbytes - start < part ? nbytes - start : part;
    streaming::write((char*)out + start, (const char*)in + start, size);
    streaming::finish();
  }
}
