// Causal attention of a mixed batch over the paged cache, with online softmax.
//
// A block holds a layer's keys as [kv_heads][head_dim][block_size], so that neighbouring keys are neighbours in memory
// and scores need no transpose, and its values as [kv_heads][block_size][head_dim]. A work item is a run of one
// sequence's rows; the query heads of a KV head become rows of it. Every row walks the keys in steps of STEP from
// position 0, and keys it may not see weigh exactly 0: its bits do not depend on how the batch was cut.
#include "vec.h"

constexpr int STEP = 64, RUN = 16, MAX_ITEM_ROWS = 64, MAX_HEAD_DIM = 256, STEP_VECS = STEP / LANES;

struct Item {
  int32_t first_row, num_rows, context_len, table_start;
};

struct Call {
  const float *q;
  long q_stride;
  float *out;
  long out_stride, num_heads, num_kv_heads, head_dim, block_size;
  const void *pool;
  long block_stride, layer_offset;  // in elements
  const int32_t *block_ids;
  float scale;
};

// Where the keys and values of one step are: keys by vector, values by runs of RUN positions.
template <class T>
struct Step {
  const T *k[STEP_VECS], *v[STEP / RUN];
  long k_stride, v_stride;
};

struct Scratch {
  alignas(64) float q[MAX_ITEM_ROWS * MAX_HEAD_DIM], out[MAX_ITEM_ROWS * MAX_HEAD_DIM];
  alignas(64) float p[MAX_ITEM_ROWS * STEP], k[MAX_HEAD_DIM * STEP], v[MAX_HEAD_DIM * STEP];
  float most[MAX_ITEM_ROWS], total[MAX_ITEM_ROWS], keep[MAX_ITEM_ROWS];
};

template <class T>
static inline const T *head_of(const Call &call, const Item &item, long head, long key, long which) {
  const long block = call.block_ids[item.table_start + (uint32_t)key / (uint32_t)call.block_size];
  const long half = call.block_size * call.head_dim;
  return (const T *)call.pool + block * call.block_stride + call.layer_offset +
         (which * call.num_kv_heads + head) * half;
}

// Past the sequence's last key the addresses repeat that of the last: read, and masked.
template <class T>
static Step<T> locate(const Call &call, const Item &item, long head, long key0) {
  Step<T> step;
  step.k_stride = call.block_size;
  step.v_stride = call.head_dim;
  const long last = item.context_len - 1, values = call.num_kv_heads * call.block_size * call.head_dim;
  for (int run = 0; run < STEP / RUN; run++) {
    const long key = key0 + run * RUN < last ? key0 + run * RUN : last / RUN * RUN, offset = (uint32_t)key % (uint32_t)call.block_size;
    const T *first = head_of<T>(call, item, head, key, 0), *k = first + offset;
    step.v[run] = first + values + offset * call.head_dim;
    for (int i = 0; i < RUN / LANES; i++) step.k[run * (RUN / LANES) + i] = k + i * LANES;
  }
  return step;
}

// For sizes that vectors do not divide: one step's keys and values, widened into the same shape.
template <class T>
static Step<float> gather(const Call &call, const Item &item, long head, long key0, Scratch &s, long width) {
  const long dim = call.head_dim, left = item.context_len - key0, keys = left < STEP ? left : STEP;
  for (long j = 0; j < keys; j++) {
    const long offset = (key0 + j) % call.block_size;
    const T *k = head_of<T>(call, item, head, key0 + j, 0) + offset;
    const T *v = head_of<T>(call, item, head, key0 + j, 1) + offset * dim;
    for (long d = 0; d < dim; d++) s.k[d * STEP + j] = widen(k[d * call.block_size]);
    for (long d = 0; d < width; d++) s.v[j * width + d] = d < dim ? widen(v[d]) : 0.0f;
  }
  Step<float> step;
  step.k_stride = STEP;
  step.v_stride = width;
  for (int i = 0; i < STEP_VECS; i++) step.k[i] = s.k + i * LANES;
  for (int run = 0; run < STEP / RUN; run++) step.v[run] = s.v + run * RUN * width;
  return step;
}

template <class T, int ROWS>
static void scores(const float *q, long dim, const Step<T> &at, const Step<T> *next, long keys, float *p) {
  for (int first = 0; first * LANES < keys; first += STEP_VECTORS) {
    Vec c[ROWS][STEP_VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < STEP_VECTORS; v++) c[r][v] = Vec{};
    const T *k[STEP_VECTORS], *ahead[STEP_VECTORS];
    UNROLL for (int v = 0; v < STEP_VECTORS; v++) {
      k[v] = at.k[first + v];
      ahead[v] = next ? next->k[first + v] : k[v];
    }
    for (long d = 0; d < dim; d++) {
      Vec x[STEP_VECTORS];
      UNROLL for (int v = 0; v < STEP_VECTORS; v++) {
        __builtin_prefetch(ahead[v] + d * at.k_stride, 0, 2);
        x[v] = load(k[v] + d * at.k_stride);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        Vec a = splat(q[r * dim + d]);
        UNROLL for (int v = 0; v < STEP_VECTORS; v++) c[r][v] += a * x[v];
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < STEP_VECTORS; v++)
      store(p + r * STEP + (first + v) * LANES, c[r][v]);
  }
}

// Scores of one row to weights; `visible` keys of the step count. Returns what to multiply earlier sums with.
static float soften(float *p, long visible, float &most, float &total) {
  Vec x[STEP_VECS], sum = Vec{};
  const Vec nothing = splat(-INFINITY);
  IntVec index;
  UNROLL for (int i = 0; i < LANES; i++) index[i] = i;
  Vec high = nothing;
  UNROLL for (int v = 0; v < STEP_VECS; v++) {
    x[v] = select(index + v * LANES < (int32_t)visible, load(p + v * LANES), nothing);
    high = select(x[v] > high, x[v], high);
  }
  const float step_most = max_lanes(high), now = step_most > most ? step_most : most;
  UNROLL for (int v = 0; v < STEP_VECS; v++) {
    x[v] = select(index + v * LANES < (int32_t)visible, exp_lanes(x[v] - splat(now)), Vec{});
    sum += x[v];
    store(p + v * LANES, x[v]);
  }
  const float keep = exp_lanes(splat(most - now))[0];
  total = total * keep + sum_lanes(sum);
  most = now;
  return keep;
}

template <class T, int ROWS, int VECS>
static inline void mix(const float *p, const float *keep, const Step<T> &at, const Step<T> *next, long keys, long column,
                       float *out) {
  const long width = at.v_stride;
  Vec c[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
    c[r][v] = load(out + r * width + column + v * LANES) * splat(keep[r]);
  for (long run = 0; run * RUN < keys; run++) {
    const long count = keys - run * RUN < RUN ? keys - run * RUN : RUN;
    const T *from = at.v[run] + column, *ahead = next ? next->v[run] + column : from;
    for (long j = 0; j < count; j++, from += width, ahead += width) {
      Vec x[VECS];
      UNROLL for (int v = 0; v < VECS; v++) {
        __builtin_prefetch(ahead + v * LANES, 0, 2);
        x[v] = load(from + v * LANES);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        Vec a = splat(p[r * STEP + run * RUN + j]);
        UNROLL for (int v = 0; v < VECS; v++) c[r][v] += a * x[v];
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
    store(out + r * width + column + v * LANES, c[r][v]);
}

struct Rows {
  long first, keys, visible, group, width, dim;  // `visible` to token 0 of the item, of this step
};

template <class T, int ROWS>
static void some_rows(Scratch &s, const Rows &rows, const Step<T> &at, const Step<T> *next) {
  const long first = rows.first, width = rows.width;
  float *p = s.p + first * STEP;
  scores<T, ROWS>(s.q + first * rows.dim, rows.dim, at, next, rows.keys, p);
  for (int r = 0; r < ROWS; r++)
    s.keep[first + r] =
        soften(p + r * STEP, rows.visible + (first + r) / rows.group, s.most[first + r], s.total[first + r]);
  float *out = s.out + first * width;
  long column = 0;
  for (; column + STEP_VECTORS * LANES <= width; column += STEP_VECTORS * LANES)
    mix<T, ROWS, STEP_VECTORS>(p, s.keep + first, at, next, rows.keys, column, out);
  for (; column < width; column += LANES) mix<T, ROWS, 1>(p, s.keep + first, at, next, rows.keys, column, out);
}

template <class T>
static void all_rows(Scratch &s, Rows rows, long num_rows, const Step<T> &at, const Step<T> *next) {
  typedef void (*Some)(Scratch &, const Rows &, const Step<T> &, const Step<T> *);
  static const Some some[] = {
      some_rows<T, 1>, some_rows<T, 2>, some_rows<T, 3>, some_rows<T, 4>,
#if !defined(__SSE2__) || defined(__AVX2__)
      some_rows<T, 5>, some_rows<T, 6>,
#endif
  };
  for (rows.first = 0; rows.first < num_rows;) {
    const long left = num_rows - rows.first, count = left < STEP_ROWS ? left : STEP_ROWS;
    some[count - 1](s, rows, at, rows.first ? nullptr : next);
    rows.first += count;
  }
}

static void begin(const Call &call, const Item &item, long head, Scratch &s, long rows, long group, long width) {
  for (long r = 0; r < rows; r++) {
    const float *q = call.q + (item.first_row + r / group) * call.q_stride + (head * group + r % group) * call.head_dim;
    float *to = s.q + r * call.head_dim;
    long d = 0;
    for (; d + LANES <= call.head_dim; d += LANES) store(to + d, load(q + d) * splat(call.scale));
    for (; d < call.head_dim; d++) to[d] = q[d] * call.scale;
    s.most[r] = -INFINITY;
    s.total[r] = 0;
  }
  memset(s.out, 0, rows * width * sizeof(float));
}

template <class T>
static void attend(const Call &call, const Item &item, long head, Scratch &s, const Item *next_item, long next_head) {
  const long group = call.num_heads / call.num_kv_heads, rows = item.num_rows * group, dim = call.head_dim;
  const bool direct = call.block_size % RUN == 0 && dim % LANES == 0;
  const long width = (dim + LANES - 1) / LANES * LANES;
  begin(call, item, head, s, rows, group, width);
  Step<T> at, next;
  if (direct) at = locate<T>(call, item, head, 0);
  for (long key0 = 0; key0 < item.context_len; key0 += STEP) {
    const long left = item.context_len - key0, keys = left < STEP ? left : STEP;
    const Rows part{0, keys, item.context_len - item.num_rows + 1 - key0, group, width, dim};
    if (!direct) {
      all_rows<float>(s, part, rows, gather<T>(call, item, head, key0, s, width), nullptr);
      continue;
    }
    const bool last = left <= STEP, known = !last || next_item;
    if (known) next = last ? locate<T>(call, *next_item, next_head, 0) : locate<T>(call, item, head, key0 + STEP);
    all_rows<T>(s, part, rows, at, known ? &next : nullptr);
    at = next;
  }
  for (long r = 0; r < rows; r++) {
    float *out = call.out + (item.first_row + r / group) * call.out_stride + (head * group + r % group) * dim;
    const Vec share = splat(1.0f / s.total[r]);
    for (long d = 0; d < dim; d += LANES) {
      const Vec mixed = load(s.out + r * width + d) * share;
      memcpy(out + d, &mixed, (dim - d < LANES ? dim - d : LANES) * sizeof(float));
    }
  }
}

// A thread takes its next job before it starts one, so that it knows what to prefetch at the end.
template <class T>
static void attend_all(const Call &call, const Item *items, long num_items, int threads) {
  const long heads = call.num_kv_heads, jobs = num_items * heads;
  long taken = 0;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    long job = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
    while (job < jobs) {
      const long next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
      attend<T>(call, items[job / heads], job % heads, scratch, next < jobs ? items + next / heads : nullptr,
                next % heads);
      job = next;
    }
  }
}

extern "C" {

int baton_max_item_rows() { return MAX_ITEM_ROWS; }
int baton_max_head_dim() { return MAX_HEAD_DIM; }

// `items`: [num_items][4], each of at most MAX_ITEM_ROWS rows times heads of a group, longest first.
void baton_attention(const float *q, long q_stride, float *out, long out_stride, long num_heads, long num_kv_heads,
                     long head_dim, long block_size, const void *pool, int kind, long block_stride, long layer_offset,
                     const int32_t *block_ids, const int32_t *items, long num_items, float scale, int threads) {
  const Call call{q,    q_stride,     out,          out_stride, num_heads, num_kv_heads, head_dim, block_size,
                  pool, block_stride, layer_offset, block_ids,  scale};
  if (kind == 0) attend_all<float>(call, (const Item *)items, num_items, threads);
  if (kind == 1) attend_all<bf16>(call, (const Item *)items, num_items, threads);
}
}
