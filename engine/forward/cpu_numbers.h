// Numbers of 16 lanes for our C++ on CPUs with AVX-512: float32, and bfloat16 that becomes float32 when it
// is read and is rounded once when it is written.

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

typedef __m512 Floats;
typedef uint16_t Half;  // the upper half of a float32: bfloat16

inline __mmask16 first(int64_t num) { return num >= 16 ? 0xffff : (1 << num) - 1; }

inline Floats load(const float* x, __mmask16 mask = 0xffff) { return _mm512_maskz_loadu_ps(mask, x); }
inline Floats load(const Half* x, __mmask16 mask = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

// Returns bfloat16 numbers, rounded to the nearest, in the lower halves.
inline __m512i rounded(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc00000)), 16);
}

inline void store(float* y, Floats x, __mmask16 mask = 0xffff) { _mm512_mask_storeu_ps(y, mask, x); }
inline void store(Half* y, Floats x, __mmask16 mask = 0xffff) {
  _mm256_mask_storeu_epi16(y, mask, _mm512_cvtepi32_epi16(rounded(x)));
}

// Returns what `x` becomes when it is written and read again.
inline Floats as_written(Floats x, const float*) { return x; }
inline Floats as_written(Floats x, const Half*) { return _mm512_castsi512_ps(_mm512_slli_epi32(rounded(x), 16)); }

// e^x with an error of less than 2 in the last place; 0 below -104. NaN stays NaN.
inline Floats exponential(Floats x) {
  x = _mm512_min_ps(_mm512_set1_ps(89), _mm512_max_ps(_mm512_set1_ps(-104), x));
  const Floats n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  Floats r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  Floats p = _mm512_set1_ps(1 / 5040.f);
  for (const float c : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 1 / 2.f, 1.f, 1.f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

}  // namespace
