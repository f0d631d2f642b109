// What the machine can do: reads and multiply-adds of the kernels' own kind. For benchmarks only.
#include "vec.h"

constexpr long AHEAD = 16384;  // floats

extern "C" {

// Reads `bytes` bytes in one stream a thread; returns a sum that nobody can optimise away.
float baton_read(const float *from, long bytes, int threads) {
  const long num_vectors = bytes / (long)sizeof(Vec), run = num_vectors / threads;
  float total = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : total)
  for (int t = 0; t < threads; t++) {
    const float *p = from + t * run * LANES;
    Vec sums[4] = {};
    for (long i = 0; i + 4 <= run; i += 4, p += 4 * LANES) {
      UNROLL for (int s = 0; s < 4; s++) {
        __builtin_prefetch(p + AHEAD + s * LANES, 0, 2);
        sums[s] += load(p + s * LANES);
      }
    }
    UNROLL for (int s = 0; s < 4; s++) total += sum_lanes(sums[s]);
  }
  return total;
}

// `rounds` rounds of 12 independent multiply-adds a thread: 24 * LANES * rounds * threads operations.
float baton_multiply_add(long rounds, float factor, int threads) {
  float total = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : total)
  for (int t = 0; t < threads; t++) {
    Vec c[12];
    UNROLL for (int i = 0; i < 12; i++) c[i] = splat(t + i);
    const Vec a = splat(factor), b = splat(1 - factor);
    for (long n = 0; n < rounds; n++) UNROLL for (int i = 0; i < 12; i++) c[i] = c[i] * a + b;
    UNROLL for (int i = 0; i < 12; i++) total += sum_lanes(c[i]);
  }
  return total;
}
}
