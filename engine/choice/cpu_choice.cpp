// The parts of a choice that look at a whole vocabulary, for CPUs with AVX-512: the largest logit, the tokens
// that the coupled choice may take, and the tokens that cuts may keep. Of those, few in number, coupling.py and
// sampling.py compute the rest as they do without this file, so a choice is the same with and without it. Only where
// top-p alone cuts is the mass of the unlikely tokens a sum of float32 numbers: the last token that stays may be another
// one where the mass before it is top-p to within one part in ten million.

#include <algorithm>
#include <vector>

#include "../forward/cpu_numbers.h"

namespace {

typedef uint64_t Words __attribute__((vector_size(64)));  // eight words

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
// Exponentials here are at most this factor too small: errors of `exponential`, of float32 bits.
constexpr float GENEROUS = 1.001f;

// The function `mix` of the noise format (coupling.py).
template <typename Word>
inline Word mix(Word z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9;
  z ^= z >> 27;
  z *= 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// The noise of a token, by the noise format. Its last bits may differ from numpy's.
inline double noise(uint64_t key, int64_t id) {
  const uint64_t bits = mix(key + (id + 1) * GOLDEN) >> 12;
  return -log(-log1p(-(bits + 0.5) / 4503599627370496.0));
}

// Returns the id of the largest number, of equals the lowest; -1 if there is none that is finite, or a NaN.
int64_t best_of(const float* row, int64_t num) {
  Floats top = _mm512_set1_ps(-INFINITY);
  __mmask16 are_nan = 0;
  for (int64_t i = 0; i < num; i += 16) {
    const __mmask16 mask = first(num - i);
    const Floats x = load(row + i, mask);
    are_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    top = _mm512_mask_max_ps(top, mask, top, x);
  }
  const float most = _mm512_reduce_max_ps(top);
  if (are_nan || !isfinite(most)) return -1;
  for (int64_t i = 0;; i += 16)
    if (const __mmask16 found = _mm512_mask_cmp_ps_mask(first(num - i), load(row + i, first(num - i)), _mm512_set1_ps(most), _CMP_EQ_OQ))
      return i + __builtin_ctz(found);
}

// Writes the tokens that may have the largest sum of score and noise; a score is a logit times `factor`. Returns
// how many; -1: more than `most`.
//
// The likeliest token's sum is `best` or a little more. A token with the score s reaches it with noise of best - s,
// so with v <= 1 - exp(-exp(s - best)), which is at most exp(s - best).
int64_t may_win(const float* row, int64_t num, float factor, uint64_t key, int64_t likeliest, int64_t* ids, int64_t most) {
  const double sum = double(row[likeliest]) * factor + noise(key, likeliest);
  const Floats best = _mm512_set1_ps(sum - 1e-4 * (1 + fabs(sum) + fabs(double(row[likeliest]) * factor)));
  const Words steps = {0, GOLDEN, 2 * GOLDEN, 3 * GOLDEN, 4 * GOLDEN, 5 * GOLDEN, 6 * GOLDEN, 7 * GOLDEN};
  int64_t count = 0;
  for (int64_t i = 0; i < num; i += 16) {
    const __mmask16 mask = first(num - i);
    const Words low = mix(steps + (key + (i + 1) * GOLDEN)) >> 32, high = mix(steps + (key + (i + 9) * GOLDEN)) >> 32;
    const __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32((__m512i)low)),
                                            _mm512_cvtepi64_epi32((__m512i)high), 1);
    const Floats v = _mm512_mul_ps(_mm512_cvtepu32_ps(bits), _mm512_set1_ps(1 / 4294967296.f));
    const Floats behind = _mm512_sub_ps(_mm512_mul_ps(load(row + i, mask), _mm512_set1_ps(factor)), best);
    const Floats limit = _mm512_mul_ps(exponential(behind), _mm512_set1_ps(GENEROUS));
    for (unsigned found = _mm512_mask_cmp_ps_mask(mask, v, limit, _CMP_LE_OQ); found; found &= found - 1) {
      if (count == most) return -1;
      ids[count++] = i + __builtin_ctz(found);
    }
  }
  return count;
}

// Writes the tokens whose score is at most `span` below the largest, and to `rest` the sum of the others'
// exponentials, relative to the largest. Returns how many; -1: more than `most`.
int64_t likely(const float* row, int64_t num, float factor, float span, int64_t likeliest, int64_t* ids, int64_t most,
               double* rest) {
  const Floats top = _mm512_set1_ps(row[likeliest]);
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  int64_t count = 0;
  for (int64_t i = 0; i < num; i += 16) {
    const __mmask16 mask = first(num - i);
    const Floats behind = _mm512_mul_ps(_mm512_sub_ps(load(row + i, mask), top), _mm512_set1_ps(factor));
    const __mmask16 near = _mm512_mask_cmp_ps_mask(mask, behind, _mm512_set1_ps(-span), _CMP_GE_OQ);
    const Floats weights = _mm512_maskz_mov_ps(mask & ~near, exponential(behind));
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weights)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_shuffle_f32x4(weights, weights, 0xee))));
    for (unsigned found = near; found; found &= found - 1) {
      if (count == most) return -1;
      ids[count++] = i + __builtin_ctz(found);
    }
  }
  *rest = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
  return count;
}

// The logarithm of positive numbers, with an error of less than 3 in the last place.
inline Floats logarithm(Floats x) {
  Floats exponent = _mm512_getexp_ps(x), m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
  const __mmask16 is_large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
  m = _mm512_mask_mul_ps(m, is_large, m, _mm512_set1_ps(0.5f));
  exponent = _mm512_mask_add_ps(exponent, is_large, exponent, _mm512_set1_ps(1));
  // 2 artanh(r) with r = (m - 1) / (m + 1), at most 0.172
  const Floats one = _mm512_set1_ps(1), r = _mm512_div_ps(_mm512_sub_ps(m, one), _mm512_add_ps(m, one));
  const Floats square = _mm512_mul_ps(r, r);
  Floats p = _mm512_set1_ps(2 / 9.f);
  for (const float c : {2 / 7.f, 2 / 5.f, 2 / 3.f, 2.f}) p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(c));
  return _mm512_fmadd_ps(exponent, _mm512_set1_ps(0.693147181f), _mm512_mul_ps(p, r));
}

// The noise of eight tokens with these words of `mix`, nearly: errors are below 1e-5.
inline Floats near_noise(Words low, Words high) {
  typedef int64_t Signed __attribute__((vector_size(64)));
  typedef float Eight __attribute__((vector_size(32)));
  const auto of = [](Words bits, float plus) {
    return (__m256)(__builtin_convertvector((Signed)bits, Eight) + plus) * (1 / 4503599627370496.f);
  };
  const auto both = [](__m256 a, __m256 b) {
    return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(a)), _mm256_castps_pd(b), 1));
  };
  low >>= 12, high >>= 12;
  constexpr uint64_t ALL = (uint64_t(1) << 52) - 1;
  const Floats v = both(of(low, 0.5f), of(high, 0.5f)), other = both(of(ALL - low, 0.5f), of(ALL - high, 0.5f));
  Floats p = _mm512_set1_ps(1 / 5.f);
  for (const float c : {1 / 4.f, 1 / 3.f, 1 / 2.f, 1.f}) p = _mm512_fmadd_ps(p, v, _mm512_set1_ps(c));
  const Floats minus = _mm512_sub_ps(_mm512_setzero_ps(), logarithm(other));
  const __mmask16 is_small = _mm512_cmp_ps_mask(v, _mm512_set1_ps(1 / 64.f), _CMP_LT_OQ);
  return _mm512_sub_ps(_mm512_setzero_ps(), logarithm(_mm512_mask_mul_ps(minus, is_small, p, v)));
}

// Writes the columns with the `count` largest sums of score and noise, best first, and log softmax(beta sums) of
// them. Returns how many, fewer where others have -inf; -1 if the logits are not finite.
//
//   ids        [num] the tokens of the columns, or null: their indices
//   is_greedy  there is no noise
int64_t rank(const float* row, int64_t num, float temperature, int is_greedy, uint64_t key, const int64_t* ids, float beta,
             int64_t count, int64_t* columns, double* scores) {
  std::vector<float> sums(num);
  Floats top = _mm512_set1_ps(-INFINITY);
  const Floats divisor = _mm512_set1_ps(temperature);
  __mmask16 are_nan = 0;
  const auto words = [&](int64_t i) {  // of eight tokens
    Words numbers = {0, 1, 2, 3, 4, 5, 6, 7};
    if (ids)
      for (int k = 0; k < 8; k++) numbers[k] = i + k < num ? ids[i + k] : 0;
    else
      numbers += i;
    return mix((numbers + 1) * GOLDEN + key);
  };
  for (int64_t i = 0; i < num; i += 16) {
    const __mmask16 mask = first(num - i);
    Floats x = load(row + i, mask);
    are_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ);
    if (!is_greedy) x = _mm512_add_ps(_mm512_div_ps(x, divisor), near_noise(words(i), words(i + 8)));
    store(sums.data() + i, x, mask);
    top = _mm512_mask_max_ps(top, mask, top, x);
  }
  const float most = _mm512_reduce_max_ps(top);
  if (are_nan || !isfinite(most)) return -1;
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  for (int64_t i = 0; i < num; i += 16) {
    const __mmask16 mask = first(num - i);
    const Floats behind = _mm512_sub_ps(load(sums.data() + i, mask), _mm512_set1_ps(most));
    const Floats weights = _mm512_maskz_mov_ps(mask, exponential(_mm512_mul_ps(behind, _mm512_set1_ps(beta))));
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weights)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_shuffle_f32x4(weights, weights, 0xee))));
  }
  const double log_sum = log(_mm512_reduce_add_pd(_mm512_add_pd(low, high)));

  // Two more than asked for, with the noise as it is, so that near ones are in their order.
  struct Found {
    float sum;
    int64_t column;
  };
  std::vector<Found> found;
  for (int64_t n = 0, wanted = is_greedy ? count : std::min(count + 2, num); n < std::min(wanted, num); n++) {
    const int64_t column = best_of(sums.data(), num);
    if (column < 0) break;  // all that is left is ruled out
    const int64_t id = ids ? ids[column] : column;
    found.push_back({is_greedy ? row[column] : row[column] / temperature + float(noise(key, id)), column});
    sums[column] = -INFINITY;
  }
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return a.sum > b.sum || (a.sum == b.sum && a.column < b.column);
  });
  const int64_t num_found = std::min<int64_t>(count, found.size());
  for (int64_t n = 0; n < num_found; n++) {
    columns[n] = found[n].column;
    // The largest sum was only nearly known.
    scores[n] = std::min(0.0, double(beta) * (double(found[n].sum) - most) - log_sum);
  }
  return num_found;
}

// A row alone is not worth a second thread.
#define ROW_BY_ROW _Pragma("omp parallel for schedule(static) if (num_rows > 1)") for (int64_t m = 0; m < num_rows; m++)

}  // namespace

// Of rows [num_rows] of `num` logits, `stride` numbers apart: the best id of each, as `best_of`.
extern "C" void slipstream_best(const float* rows, int64_t num_rows, int64_t stride, int64_t num, int64_t* best) {
  ROW_BY_ROW best[m] = best_of(rows + m * stride, num);
}

// As `may_win`; `best` is what slipstream_best has found, `ids` [num_rows, most], `counts` [num_rows].
extern "C" void slipstream_may_win(const float* rows, int64_t num_rows, int64_t stride, int64_t num, const int64_t* best,
                                   float factor, const uint64_t* keys, int64_t* ids, int64_t most, int64_t* counts) {
  ROW_BY_ROW counts[m] = may_win(rows + m * stride, num, factor, keys[m], best[m], ids + m * most, most);
}

// As `likely`, of each row.
extern "C" void slipstream_likely(const float* rows, int64_t num_rows, int64_t stride, int64_t num, const int64_t* best,
                                  float factor, float span, int64_t* ids, int64_t most, int64_t* counts, double* rests) {
  ROW_BY_ROW counts[m] = likely(rows + m * stride, num, factor, span, best[m], ids + m * most, most, rests + m);
}

// As `rank`, of each row; `columns` and `scores` [num_rows, count].
extern "C" void slipstream_rank(const float* rows, int64_t num_rows, int64_t stride, int64_t num, float temperature, int is_greedy,
                                const uint64_t* keys, const int64_t* ids, float beta, int64_t count, int64_t* columns,
                                double* scores, int64_t* counts) {
  ROW_BY_ROW counts[m] = rank(rows + m * stride, num, temperature, is_greedy, keys[m], ids, beta, count, columns + m * count,
                              scores + m * count);
}
