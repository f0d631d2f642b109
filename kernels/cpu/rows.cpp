// What is done row by row: embedding, norms, rotation with the cache write. Each row is computed alone.
#include "vec.h"

constexpr long MANY_ROWS = 8;  // from here on a second thread is worth waking

// Writes x / sqrt(mean(x²) + eps) * weight; in place is fine.
static void normalise(const float *x, long size, const float *weight, float eps, float *out) {
  Vec squares = Vec{};
  long i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum_lanes(squares);
  for (; i < size; i++) total += x[i] * x[i];
  const float scale = 1.0f / sqrtf(total / (float)size + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * splat(scale) * load(weight + i));
  for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// Hugging Face's convention: pairs are (i, i + half).
static void rotate(float *x, const float *cos, const float *sin, long half) {
  long i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// Sum of exp((x - shift) * scale), in short sums that float32 holds well. The order is that of the row, so that no
// batch and no thread can change it.
static double exp_sum(const float *x, long size, float shift, float scale) {
  constexpr long SHORT = 64 * LANES;
  const Vec from = splat(shift), by = splat(scale);
  double total = 0;
  long i = 0;
  while (i + LANES <= size) {
    const long end = i + SHORT < size ? i + SHORT : size;
    Vec even = Vec{}, odd = Vec{};
    for (; i + 2 * LANES <= end; i += 2 * LANES) {
      even += exp_lanes((load(x + i) - from) * by);
      odd += exp_lanes((load(x + i + LANES) - from) * by);
    }
    for (; i + LANES <= end; i += LANES) even += exp_lanes((load(x + i) - from) * by);
    total += sum_lanes(even + odd);
  }
  float rest[LANES];
  for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < size ? x[i + lane] : -INFINITY;
  store(rest, exp_lanes((load(rest) - from) * by));
  for (; i < size; i++) total += rest[i % LANES];
  return total;
}

struct Store {
  float *qkv;
  long stride, num_heads, num_kv_heads, head_dim, block_size, block_stride, layer_offset;
  const int64_t *positions, *slots;
  const float *cos, *sin, *query_norm, *key_norm;
  float eps;
};

template <class T>
static void store_row(const Store &call, T *pool, long row) {
  const long dim = call.head_dim, heads = call.num_heads, kv_heads = call.num_kv_heads, size = call.block_size;
  float *qkv = call.qkv + row * call.stride;
  for (long head = 0; head < heads + kv_heads; head++) {
    float *x = qkv + head * dim;
    const float *norm = head < heads ? call.query_norm : call.key_norm;
    const long angle = call.positions[row] * (dim / 2);
    if (norm) normalise(x, dim, norm, call.eps, x);
    if (call.cos) rotate(x, call.cos + angle, call.sin + angle, dim / 2);
  }
  const long block = call.slots[row] / size, offset = call.slots[row] % size;
  T *keys = pool + block * call.block_stride + call.layer_offset, *values = keys + kv_heads * size * dim;
  const float *k = qkv + heads * dim, *v = k + kv_heads * dim;
  for (long head = 0; head < kv_heads; head++) {
    for (long d = 0; d < dim; d++) narrow(k[head * dim + d], keys + (head * dim + d) * size + offset);
    for (long d = 0; d < dim; d++) narrow(v[head * dim + d], values + (head * size + offset) * dim + d);
  }
}

extern "C" {

// Rows `ids` of a table, widened.
void baton_embed(const int64_t *ids, long num_rows, const void *table, int kind, long size, float *out) {
  for (long row = 0; row < num_rows; row++) {
    float *to = out + row * size;
    if (kind == 0) memcpy(to, (const float *)table + ids[row] * size, size * 4);
    if (kind == 1) for (long i = 0; i < size; i++) to[i] = widen(((const bf16 *)table)[ids[row] * size + i]);
  }
}

// Adds `delta` (or null) into x, then normalises. `rows` (or null): which rows of x, in order.
void baton_rms_norm(float *x, const float *delta, const int64_t *rows, long num_rows, long size, const float *weight,
                    float eps, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (num_rows >= MANY_ROWS)
  for (long row = 0; row < num_rows; row++) {
    float *from = x + (rows ? rows[row] : row) * size;
    if (delta) for (long i = 0; i < size; i++) from[i] += delta[row * size + i];
    normalise(from, size, weight, eps, out + row * size);
  }
}

// For each of `rows` of a matrix: the sum of exp((x - shift) * scale) over its `size` values.
void baton_exp_sums(const float *matrix, const int64_t *rows, long num_rows, long size, const float *shifts,
                    const float *scales, double *sums, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (num_rows >= MANY_ROWS)
  for (long i = 0; i < num_rows; i++) sums[i] = exp_sum(matrix + rows[i] * size, size, shifts[i], scales[i]);
}

// Normalises (where there are weights) and rotates (where there are angles) queries and keys in place, and writes
// keys and values into their slots.
void baton_rope_store(float *qkv, long stride, long num_rows, long num_heads, long num_kv_heads, long head_dim,
                      const int64_t *positions, const float *cos, const float *sin, const float *query_norm,
                      const float *key_norm, float eps, void *pool, int kind, long block_stride, long layer_offset,
                      long block_size, const int64_t *slots, int threads) {
  const Store call{qkv,       stride, num_heads, num_kv_heads, head_dim,   block_size, block_stride, layer_offset,
                   positions, slots,  cos,       sin,          query_norm, key_norm,   eps};
#pragma omp parallel for schedule(static) num_threads(threads) if (num_rows >= MANY_ROWS)
  for (long row = 0; row < num_rows; row++) {
    if (kind == 0) store_row(call, (float *)pool, row);
    if (kind == 1) store_row(call, (bf16 *)pool, row);
  }
}
}
