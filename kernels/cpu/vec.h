// Vectors of the machine's width from one source: GCC's vector extensions, so AVX-512, AVX2, NEON or plain SSE.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, PANEL_VECTORS = 2, MAX_ROWS = 14, STEP_VECTORS = 4, STEP_ROWS = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, PANEL_VECTORS = 2, MAX_ROWS = 6, STEP_VECTORS = 2, STEP_ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, PANEL_VECTORS = 4, MAX_ROWS = 6, STEP_VECTORS = 4, STEP_ROWS = 6;
#else
constexpr int LANES = 4, PANEL_VECTORS = 4, MAX_ROWS = 2, STEP_VECTORS = 2, STEP_ROWS = 4;
#endif
constexpr int PANEL = LANES * PANEL_VECTORS;  // outputs of one packed panel

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

// Every loop over an array of accumulators must be unrolled, or GCC keeps the array in memory: 64 instead of 165 GF/s.
#define UNROLL _Pragma("GCC unroll 16")

static inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, so this is a mere broadcast
static inline Vec load(const float *p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
// GCC 12 widens narrow types lane by lane from __builtin_convertvector, hence the intrinsics.
static inline Vec load(const bf16 *p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
  HalfVec h;
  memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, IntVec) << 16);
#endif
}
static inline Vec load(const int8_t *p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  ByteVec b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, IntVec), Vec);
#endif
}
static inline void store(float *p, Vec v) { memcpy(p, &v, sizeof v); }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}
static inline void narrow(float x, float *to) { *to = x; }
// Round to nearest even, NaN stays NaN: what torch's conversion does.
static inline void narrow(float x, bf16 *to) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  to->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline Vec select(IntVec mask, Vec yes, Vec no) { return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no)); }

// Halves of a vector, of which both are needed: reductions are trees, since a chain over 16 lanes is slow.
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));
static inline float sum_lanes(Vec v) {
  Quad q[LANES / 4];
  memcpy(q, &v, sizeof v);
  UNROLL for (int n = LANES / 8; n > 0; n /= 2) UNROLL for (int i = 0; i < n; i++) q[i] += q[i + n];
  return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}
static inline float max_lanes(Vec v) {
  Quad q[LANES / 4];
  memcpy(q, &v, sizeof v);
  UNROLL for (int n = LANES / 8; n > 0; n /= 2) UNROLL for (int i = 0; i < n; i++) {
    IntQuad more = q[i] > q[i + n];
    q[i] = (Quad)((more & (IntQuad)q[i]) | (~more & (IntQuad)q[i + n]));
  }
  const float a = q[0][0] > q[0][2] ? q[0][0] : q[0][2], b = q[0][1] > q[0][3] ? q[0][1] : q[0][3];
  return a > b ? a : b;
}

// e^x to 1 ulp or so (Cephes' polynomial); clamped to finite results, exactly 1 at 0, NaN stays NaN.
static inline Vec exp_lanes(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);
  x = select(x < low, low, x);
  x = select(x > high, high, x);
  Vec n = (x * splat(1.44269504f) + magic) - magic;
  Vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return p * (Vec)power;
}
