// Linear layers on packed weights, and what packs them.
//
// A weight [outputs][inputs] lies as panels [inputs][PANEL], zero-padded. Every output element is one chain of fused
// multiply-adds over the inputs in order, whatever the batch, the tile or the thread: that is why a row's bits never
// depend on its company.
#include "vec.h"

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };
enum Mode { PLAIN = 0, ADD = 1, SILU_MUL = 2 };
constexpr long BLOCK_ROWS = 10 * MAX_ROWS;  // activations of so many rows stay in L2 while all panels pass

struct Layer {
  const float *x;
  long x_stride;
  const void *weight;
  const float *scales, *bias;  // by panel position; null where there are none
  long num_outputs, num_inputs;  // outputs as stored: gate and up are one output
  float *out;
  long out_stride;
  int mode;
};

struct Prefetch {
  const char *at;
  long step;  // bytes per input
};

template <int ROWS>
static inline void finish(const Layer &layer, long row, long panel, Vec (&c)[ROWS][PANEL_VECTORS]) {
  const long width = layer.mode == SILU_MUL ? PANEL / 2 : PANEL;
  const long column = panel * width, count = layer.num_outputs - column < width ? layer.num_outputs - column : width;
  UNROLL for (int r = 0; r < ROWS; r++) {
    alignas(64) float edge[PANEL];
    float *out = layer.out + (row + r) * layer.out_stride + column;
    float *to = count < width ? edge : out;
    if (count < width && layer.mode == ADD) memcpy(edge, out, count * 4);
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
      if (layer.scales) c[r][v] *= load(layer.scales + panel * PANEL + v * LANES);
      if (layer.bias) c[r][v] += load(layer.bias + panel * PANEL + v * LANES);
    }
    if (layer.mode == SILU_MUL) {
      UNROLL for (int v = 0; v < PANEL_VECTORS / 2; v++) {
        Vec gate = c[r][v], up = c[r][v + PANEL_VECTORS / 2];
        store(to + v * LANES, gate / (splat(1.0f) + exp_lanes(-gate)) * up);
      }
    } else {
      UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
        store(to + v * LANES, layer.mode == ADD ? load(to + v * LANES) + c[r][v] : c[r][v]);
    }
    if (count < width) memcpy(out, edge, count * 4);
  }
}

template <class W, int ROWS>
static void tile(const Layer &layer, long row, long panel, Prefetch next) {
  Vec c[ROWS][PANEL_VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) c[r][v] = Vec{};
  const long num_inputs = layer.num_inputs, stride = layer.x_stride;
  const float *x = layer.x + row * stride;
  const W *w = (const W *)layer.weight + panel * PANEL * num_inputs;
  for (long k = 0; k < num_inputs; k++, w += PANEL, next.at += next.step) {
    __builtin_prefetch(next.at, 0, 2);  // the panel after this one, under the arithmetic
    __builtin_prefetch(next.at + next.step / 2, 0, 2);
    Vec b[PANEL_VECTORS];
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) b[v] = load(w + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      Vec a = splat(x[r * stride + k]);
      UNROLL for (int v = 0; v < PANEL_VECTORS; v++) c[r][v] += a * b[v];
    }
  }
  finish<ROWS>(layer, row, panel, c);
}

typedef void (*Tile)(const Layer &, long, long, Prefetch);

template <class W>
static Tile tile_of(long rows) {
  static const Tile tiles[] = {
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

// All tiles of `rows` rows on one panel. Tiles differ by at most one row: 16 rows are 8 + 8, not 14 + 2.
template <class W>
static void panel_rows(const Layer &layer, long row, long rows, long panel, const char *next) {
  const long num_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, base = rows / num_tiles, longer = rows % num_tiles;
  const long step = PANEL * (long)sizeof(W) / num_tiles;
  for (long t = 0; t < num_tiles; t++) {
    const long count = base + (t < longer);
    tile_of<W>(count)(layer, row, panel, Prefetch{next + t * step * layer.num_inputs, step});
    row += count;
  }
}

template <class W>
static void linear(const Layer &layer, long num_rows, const char *after, int threads) {
  const long width = layer.mode == SILU_MUL ? PANEL / 2 : PANEL;
  const long num_panels = (layer.num_outputs + width - 1) / width;
  const long num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, jobs = num_blocks * num_panels;
  const char *weight = (const char *)layer.weight;
  const long panel_bytes = PANEL * (long)sizeof(W) * layer.num_inputs;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long job = 0; job < jobs; job++) {
    const long block = job / num_panels, panel = job % num_panels;
    const long first = block * num_rows / num_blocks, last = (block + 1) * num_rows / num_blocks;
    const char *next = job + 1 < jobs ? weight + (panel + 1) % num_panels * panel_bytes : after;
    panel_rows<W>(layer, first, last - first, panel, next);
  }
}

extern "C" {

int baton_panel() { return PANEL; }

// x [num_rows] rows of `x_stride` floats. `after`: what is read next, or null.
void baton_linear(const float *x, long x_stride, long num_rows, const void *weight, int kind, const float *scales,
                  const float *bias, long num_outputs, long num_inputs, float *out, long out_stride, int mode,
                  const void *after, int threads) {
  const Layer layer{x, x_stride, weight, scales, bias, num_outputs, num_inputs, out, out_stride, mode};
  const char *next = after ? (const char *)after : (const char *)weight;
  if (kind == FLOAT32) linear<float>(layer, num_rows, next, threads);
  if (kind == BFLOAT16) linear<bf16>(layer, num_rows, next, threads);
  if (kind == INT8) linear<int8_t>(layer, num_rows, next, threads);
}
}

// Position of an output in its packed weight: `half` 0 is a gate, 1 an up, -1 neither.
static inline long position(long output, int half) {
  if (half < 0) return output;
  return output / (PANEL / 2) * PANEL + output % (PANEL / 2) + half * (PANEL / 2);
}

template <class W>
static void pack(const W *from, long rows, long inputs, W *to, long first_output, int half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long start = 0; start < rows; start += PANEL / 2) {
    for (long k0 = 0; k0 < inputs; k0 += 64) {
      const long k1 = k0 + 64 < inputs ? k0 + 64 : inputs;
      for (long row = start; row < start + PANEL / 2 && row < rows; row++) {
        const long at = position(first_output + row, half);
        W *column = to + at / PANEL * PANEL * inputs + at % PANEL;
        for (long k = k0; k < k1; k++) column[k * PANEL] = from[row * inputs + k];
      }
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
