// Linear layers on packed weights, and what packs them.
//
// A weight [outputs][inputs] lies as panels [inputs][PANEL], zero-padded. Every output element is one chain of fused
// multiply-adds over the inputs in order, whatever the batch, the tile or the thread: that is why a row's bits never
// depend on its company.
#include <omp.h>

#include <vector>

#include "vec.h"

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };
constexpr long BLOCK_ROWS = 10 * MAX_ROWS;  // activations of so many rows stay in L2 while all panels pass

constexpr long WORTH_WIDENING = 5;               // tiles from which a narrow panel is widened beforehand; 2 lost a third

struct Weight {
  const void *data;
  const float *scales, *bias;  // by panel position; null where there are none
  const Weight *next;          // what is probably read next, or null
  long num_outputs, num_inputs;  // outputs as computed: a gate and its up are one
  int kind, gate_up;

  long width() const { return gate_up ? PANEL / 2 : PANEL; }
  long num_panels() const { return (num_outputs + width() - 1) / width(); }
  long panel_bytes() const { return PANEL * num_inputs * (kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1); }
  const char *panel(long index) const { return (const char *)data + index * panel_bytes(); }
};

struct Call {
  const Weight &weight;
  const float *x;
  long x_stride;
  float *out;
  long out_stride;
  bool add;
};

struct Prefetch {
  const char *at;
  long step;  // bytes per input
};

template <int ROWS>
static inline void finish(const Call &call, long row, long panel, Vec (&c)[ROWS][PANEL_VECTORS]) {
  const Weight &weight = call.weight;
  const long width = weight.width(), column = panel * width;
  const long count = weight.num_outputs - column < width ? weight.num_outputs - column : width;
  UNROLL for (int r = 0; r < ROWS; r++) {
    alignas(64) float edge[PANEL];
    float *out = call.out + (row + r) * call.out_stride + column;
    float *to = count < width ? edge : out;
    if (count < width && call.add) memcpy(edge, out, count * 4);
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
      if (weight.scales) c[r][v] *= load(weight.scales + panel * PANEL + v * LANES);
      if (weight.bias) c[r][v] += load(weight.bias + panel * PANEL + v * LANES);
    }
    if (weight.gate_up) {
      UNROLL for (int v = 0; v < PANEL_VECTORS / 2; v++) {
        Vec gate = c[r][v], up = c[r][v + PANEL_VECTORS / 2];
        store(to + v * LANES, gate / (splat(1.0f) + exp_lanes(-gate)) * up);
      }
    } else {
      UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
        store(to + v * LANES, call.add ? load(to + v * LANES) + c[r][v] : c[r][v]);
    }
    if (count < width) memcpy(out, edge, count * 4);
  }
}

template <class W, int ROWS>
static void tile(const Call &call, const W *w, long row, long panel, Prefetch next) {
  Vec c[ROWS][PANEL_VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) c[r][v] = Vec{};
  const long num_inputs = call.weight.num_inputs, stride = call.x_stride;
  const float *x = call.x + row * stride;
  const bool two_lines = next.step > 64;
  for (long k = 0; k < num_inputs; k++, w += PANEL, next.at += next.step) {
    __builtin_prefetch(next.at, 0, 2);  // the panel after this one, under the arithmetic
    if (two_lines) __builtin_prefetch(next.at + 64, 0, 2);
    Vec b[PANEL_VECTORS];
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) b[v] = load(w + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      Vec a = splat(x[r * stride + k]);
      UNROLL for (int v = 0; v < PANEL_VECTORS; v++) c[r][v] += a * b[v];
    }
  }
  finish<ROWS>(call, row, panel, c);
}

template <class W>
using Tile = void (*)(const Call &, const W *, long, long, Prefetch);

template <class W>
static Tile<W> tile_of(long rows) {
  static const Tile<W> tiles[] = {
      tile<W, 1>, tile<W, 2>,
#if !defined(__SSE2__) || defined(__AVX2__)
      tile<W, 3>, tile<W, 4>, tile<W, 5>, tile<W, 6>,
#endif
#if defined(__AVX512F__)
      tile<W, 7>, tile<W, 8>, tile<W, 9>, tile<W, 10>, tile<W, 11>, tile<W, 12>, tile<W, 13>, tile<W, 14>,
#endif
  };
  return tiles[rows - 1];
}

static inline const float *widened(const float *panel, long) { return panel; }

// A narrow panel that many tiles use is widened once, into memory that the thread keeps.
template <class W>
static const float *widened(const W *panel, long count) {
  static thread_local std::vector<float> wide;
  if ((long)wide.size() < count) wide.resize(count);
  for (long i = 0; i < count; i += LANES) store(wide.data() + i, load(panel + i));
  return wide.data();
}

// All tiles of `rows` rows on one panel. Tiles differ by at most one row: 16 rows are 8 + 8, not 14 + 2.
template <class W>
static void panel_rows(const Call &call, long row, long rows, long panel, const char *next) {
  const long num_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, base = rows / num_tiles, longer = rows % num_tiles;
  const long step = PANEL * (long)sizeof(W) / num_tiles, num_inputs = call.weight.num_inputs;
  const W *w = (const W *)call.weight.panel(panel);
  const float *wide = num_tiles >= WORTH_WIDENING ? widened(w, PANEL * num_inputs) : nullptr;
  for (long t = 0; t < num_tiles; t++) {
    const long count = base + (t < longer);
    const Prefetch ahead{next + t * step * num_inputs, step};
    if (wide)
      tile_of<float>(count)(call, wide, row, panel, ahead);
    else
      tile_of<W>(count)(call, w, row, panel, ahead);
    row += count;
  }
}

// One thread's share: a run of jobs, each a panel for a block of rows. At its end the thread already fetches the first
// panel of its share of the weight that is used next, so that no weight starts cold.
template <class W>
static void share(const Call &call, long num_rows, long thread, long threads) {
  const Weight &weight = call.weight;
  const long num_panels = weight.num_panels(), num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const long jobs = num_blocks * num_panels, end = jobs * (thread + 1) / threads;
  for (long job = jobs * thread / threads; job < end; job++) {
    const long block = job / num_panels, panel = job % num_panels;
    const long first = block * num_rows / num_blocks, last = (block + 1) * num_rows / num_blocks;
    const char *next = weight.panel(panel);
    if (job + 1 < end) {
      next = weight.panel((panel + 1) % num_panels);
    } else if (weight.next) {
      const long after = weight.next->num_panels();
      next = weight.next->panel(num_blocks * after * thread / threads % after);
    }
    panel_rows<W>(call, first, last - first, panel, next);
  }
}

extern "C" {

int baton_panel() { return PANEL; }

// x [num_rows] rows of `x_stride` floats; `add` adds to what `out` holds.
void baton_linear(const Weight *weight, const float *x, long x_stride, long num_rows, float *out, long out_stride,
                  int add, int threads) {
  const Call call{*weight, x, x_stride, out, out_stride, add != 0};
#pragma omp parallel num_threads(threads)
  {
    const long thread = omp_get_thread_num(), team = omp_get_num_threads();
    if (weight->kind == FLOAT32) share<float>(call, num_rows, thread, team);
    if (weight->kind == BFLOAT16) share<bf16>(call, num_rows, thread, team);
    if (weight->kind == INT8) share<int8_t>(call, num_rows, thread, team);
  }
}
}

// Position of an output in its packed weight: `half` 0 is a gate, 1 an up, -1 neither.
static inline long position(long output, int half) {
  if (half < 0) return output;
  return output / (PANEL / 2) * PANEL + output % (PANEL / 2) + half * (PANEL / 2);
}

// Turns GROUP rows of TILE inputs each into TILE runs of GROUP outputs: whole vectors are read and written.
constexpr long GROUP = PANEL / 2, TILE = 16;
template <class W>
static inline void pack_tile(const W *from, long inputs, W *to) {
  W tile[GROUP][TILE];
  for (long row = 0; row < GROUP; row++) memcpy(tile[row], from + row * inputs, sizeof tile[row]);
  for (long k = 0; k < TILE; k++) {
    W run[GROUP];
    UNROLL for (long row = 0; row < GROUP; row++) run[row] = tile[row][k];
    memcpy(to + k * PANEL, run, sizeof run);
  }
}

template <class W>
static void pack(const W *from, long rows, long inputs, W *to, long first_output, int half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long start = 0; start < rows; start += GROUP) {
    const bool whole = start + GROUP <= rows && (first_output + start) % GROUP == 0;
    const long tiled = whole ? inputs / TILE * TILE : 0;
    for (long k = 0; k < tiled; k += TILE) {
      const long at = position(first_output + start, half);
      pack_tile(from + start * inputs + k, inputs, to + at / PANEL * PANEL * inputs + k * PANEL + at % PANEL);
    }
    for (long row = start; row < start + GROUP && row < rows; row++) {
      const long at = position(first_output + row, half);
      W *column = to + at / PANEL * PANEL * inputs + at % PANEL;
      for (long k = tiled; k < inputs; k++) column[k * PANEL] = from[row * inputs + k];
    }
  }
}

extern "C" {

// Packs `rows` rows of a weight, from output `first_output` on.
void baton_pack(const void *from, int kind, long rows, long inputs, void *to, long first_output, int half,
                int threads) {
  if (kind == FLOAT32) pack((const float *)from, rows, inputs, (float *)to, first_output, half, threads);
  if (kind == BFLOAT16) pack((const bf16 *)from, rows, inputs, (bf16 *)to, first_output, half, threads);
  if (kind == INT8) pack((const int8_t *)from, rows, inputs, (int8_t *)to, first_output, half, threads);
}

// Places one value per output (bias, scale) as the panels lie.
void baton_pack_values(const float *from, long rows, float *to, long first_output, int half) {
  for (long row = 0; row < rows; row++) to[position(first_output + row, half)] = from[row];
}
}
