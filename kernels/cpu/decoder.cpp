// All layers of a step in one call: the same kernels in the same order as one by one, without a launch between them.
#include <cstdint>

struct Weight;

extern "C" {
void baton_linear(const Weight *, const float *x, long x_stride, long num_rows, float *out, long out_stride, int add,
                  int threads);
void baton_rms_norm(float *x, const float *delta, const int64_t *rows, long num_rows, long size, const float *weight,
                    float eps, float *out, int threads);
void baton_rope_store(float *qkv, long stride, long num_rows, long num_heads, long num_kv_heads, long head_dim,
                      const int64_t *positions, const float *cos, const float *sin, const float *query_norm,
                      const float *key_norm, float eps, void *pool, int kind, long block_stride, long layer_offset,
                      long block_size, const int64_t *slots, int threads);
void baton_attention(const float *q, long q_stride, float *out, long out_stride, long num_heads, long num_kv_heads,
                     long head_dim, long block_size, const void *pool, int kind, long block_stride, long layer_offset,
                     const int32_t *block_ids, const int32_t *items, long num_items, float scale, int threads);

struct DecoderLayer {
  const Weight *qkv, *output, *gate_up, *down;
  const float *input_norm, *post_norm, *query_norm, *key_norm;  // the last two null for models without
  int64_t rope;
};

struct DecoderStep {
  float *x, *hidden, *qkv, *attended, *inner;
  const int64_t *positions, *slots;
  const float *cos, *sin;
  void *pool;
  const int32_t *block_ids, *items;
  long num_rows, num_items, hidden_size, inner_size, num_heads, num_kv_heads, head_dim;
  long kind, block_size, block_stride, layer_stride;
  float eps, scale;
};

void baton_layers(const DecoderStep *step, const DecoderLayer *layers, long num_layers, int threads) {
  const DecoderStep &s = *step;
  const long rows = s.num_rows, queries = s.num_heads * s.head_dim;
  const long qkv_size = queries + 2 * s.num_kv_heads * s.head_dim;
  for (long i = 0; i < num_layers; i++) {
    const DecoderLayer &layer = layers[i];
    baton_rms_norm(s.x, nullptr, nullptr, rows, s.hidden_size, layer.input_norm, s.eps, s.hidden, threads);
    baton_linear(layer.qkv, s.hidden, s.hidden_size, rows, s.qkv, qkv_size, 0, threads);
    baton_rope_store(s.qkv, qkv_size, rows, s.num_heads, s.num_kv_heads, s.head_dim, s.positions,
                     layer.rope ? s.cos : nullptr, s.sin, layer.query_norm, layer.key_norm, s.eps, s.pool, s.kind,
                     s.block_stride, i * s.layer_stride, s.block_size, s.slots, threads);
    baton_attention(s.qkv, qkv_size, s.attended, queries, s.num_heads, s.num_kv_heads, s.head_dim, s.block_size, s.pool,
                    s.kind, s.block_stride, i * s.layer_stride, s.block_ids, s.items, s.num_items, s.scale, threads);
    baton_linear(layer.output, s.attended, queries, rows, s.x, s.hidden_size, 1, threads);
    baton_rms_norm(s.x, nullptr, nullptr, rows, s.hidden_size, layer.post_norm, s.eps, s.hidden, threads);
    baton_linear(layer.gate_up, s.hidden, s.hidden_size, rows, s.inner, s.inner_size, 0, threads);
    baton_linear(layer.down, s.inner, s.inner_size, rows, s.x, s.hidden_size, 1, threads);
  }
}
}
