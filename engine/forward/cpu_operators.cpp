// The operators between the matrix products of a pass of a few rows, for CPUs with AVX-512; and a
// model's layers, which are these operators and the products of cpu_products.cpp in order.
//
// Numbers are float32, or bfloat16 that becomes float32 when it is read and is rounded once when it
// is written. Where transformers rounds between two steps (a sum before its norm, an activation
// before its product), so do these. A row's numbers do not depend on other rows.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <vector>

// Of cpu_products.cpp: y [rows, outputs] = product of x [rows, inputs] with a matrix; whether AMX's
// tile registers may be used; and their shape for products of 16 rows or fewer.
extern "C" int slipstream_product(const void* matrix, int is_float32, const void* x, void* y, int64_t rows);
extern "C" int slipstream_may_use_tiles();
extern "C" void slipstream_shape_tiles(int rows);

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

// -- norms ----------------------------------------------------------------------------------------

// Returns 1 / sqrt(mean(x^2) + epsilon) of [dim] numbers.
template <typename X>
inline float inverse_size(const X* x, int64_t dim, float epsilon) {
  Floats sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < dim; i += 16) {
    const Floats part = load(x + i, first(dim - i));
    sum = _mm512_fmadd_ps(part, part, sum);
  }
  return 1 / sqrtf(_mm512_reduce_add_ps(sum) / dim + epsilon);
}

template <typename X>
inline void norm(const X* x, const X* weight, X* y, int64_t dim, float epsilon) {
  const Floats factor = _mm512_set1_ps(inverse_size(x, dim, epsilon));
  for (int64_t i = 0; i < dim; i += 16) {
    const __mmask16 mask = first(dim - i);
    store(y + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), factor), load(weight + i, mask)), mask);
  }
}

// hidden += change (if there is one), in place; normed = norm of it; all [rows, dim].
template <typename X>
void add_and_norm(X* hidden, const X* change, const X* weight, X* normed, int64_t rows, int64_t dim, float epsilon) {
  for (int64_t m = 0; m < rows; m++, hidden += dim, normed += dim) {
    if (change) {
      for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 mask = first(dim - i);
        store(hidden + i, _mm512_add_ps(load(hidden + i, mask), load(change + i, mask)), mask);
      }
      change += dim;
    }
    norm(hidden, weight, normed, dim, epsilon);
  }
}

// For less work than this, waking a thread costs more.
constexpr int64_t GATES_WORTH_THREADS = 1 << 13, PRODUCTS_WORTH_THREADS = 1 << 16;  // the latter: of attention

// -- the feed-forward block's gate ----------------------------------------------------------------

// y [rows, inner] = silu(gate) * up, of gates and ups [rows, 2 inner].
template <typename X>
void gate(const X* both, X* y, int64_t rows, int64_t inner) {
  const Floats one = _mm512_set1_ps(1);
#pragma omp parallel for collapse(2) schedule(static) if (rows * inner > GATES_WORTH_THREADS)
  for (int64_t m = 0; m < rows; m++)
    for (int64_t i = 0; i < inner; i += 16) {
      const __mmask16 mask = first(inner - i);
      const X* gates = both + 2 * m * inner + i;
      const Floats x = load(gates, mask);
      const Floats below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
      store(y + m * inner + i, _mm512_mul_ps(as_written(_mm512_div_ps(x, below), y), load(gates + inner, mask)), mask);
    }
}

// -- queries, keys and values ---------------------------------------------------------------------

struct Heads {
  int64_t num_rows, num_heads, num_kv_heads, dim, num_slots;
  float epsilon;
};

// Norms (if there are weights) and turns the queries and keys of each row by its position. Writes
// queries to `queries` and keys and values to the row's slot of the cache.
//
//   qkv, queries  [rows, (heads + 2 kv_heads) * dim]; of `queries` the first heads * dim are written
//   weights       [heads + kv_heads or more, dim] or null
//   cos, sin      [rows, dim]; sin is negative in its first half
//   cache         [2 kv_heads, slots, dim]: keys, then values
template <typename X>
void turn_and_write(const Heads& h, const X* qkv, const X* weights, const X* cos, const X* sin, const int64_t* slots,
                    X* queries, X* cache) {
  const int64_t dim = h.dim, half = dim / 2, row = (h.num_heads + 2 * h.num_kv_heads) * dim;
  std::vector<X> normed(dim);
  for (int64_t m = 0; m < h.num_rows; m++, qkv += row, queries += row, cos += dim, sin += dim) {
    X* place = cache + slots[m] * dim;
    for (int64_t head = 0; head < h.num_heads + h.num_kv_heads; head++) {
      const X* from = qkv + head * dim;
      if (weights) {
        norm(from, weights + head * dim, normed.data(), dim, h.epsilon);
        from = normed.data();
      }
      X* to = head < h.num_heads ? queries + head * dim : place + (head - h.num_heads) * h.num_slots * dim;
      for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = first(half - i);
        const Floats low = load(from + i, mask), high = load(from + half + i, mask);
        const auto turned = [&](Floats self, Floats other, int64_t at) {
          return _mm512_fmadd_ps(other, load(sin + at, mask), as_written(_mm512_mul_ps(self, load(cos + at, mask)), to));
        };
        const Floats new_low = turned(low, high, i), new_high = turned(high, low, half + i);
        store(to + i, new_low, mask);
        store(to + half + i, new_high, mask);
      }
    }
    for (int64_t head = 0; head < h.num_kv_heads; head++)
      memcpy(place + (h.num_kv_heads + head) * h.num_slots * dim, qkv + (h.num_heads + h.num_kv_heads + head) * dim,
             dim * sizeof(X));
  }
}

// -- attention ------------------------------------------------------------------------------------

struct Look {
  int64_t num_lanes, num_kv_heads, num_rows, num_keys, dim;
  int64_t lane_stride, head_stride;           // of keys and values, in numbers
  int64_t mask_lane_stride, mask_row_stride;  // 0: all rows share one
  float scale;
};

// Writes 16 rows of words of 32 bits as columns: `to` [words][16]. `num_words` is a multiple of 8.
inline void turn(const int32_t* const* rows, int64_t num_words, int32_t* to) {
  for (int64_t first_word = 0; first_word < num_words; first_word += 16) {
    const int64_t left = num_words - first_word;
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi32(first(left), rows[i] + first_word);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int k = 0; k < 2; k++) {
        a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + 2 + k]);
        a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + 2 + k]);
      }
    // Register 4 i + k now has words k, 4 + k, 8 + k and 12 + k of rows 4 i to 4 i + 3.
    for (int k = 0; k < 4; k++) {
      const __m512i low = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88), high = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
      const __m512i more = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
      const __m512i most = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
      b[k] = _mm512_shuffle_i32x4(low, more, 0x88);
      b[8 + k] = _mm512_shuffle_i32x4(low, more, 0xdd);
      b[4 + k] = _mm512_shuffle_i32x4(high, most, 0x88);
      b[12 + k] = _mm512_shuffle_i32x4(high, most, 0xdd);
    }
    for (int i = 0; i < (left < 16 ? left : 16); i++) _mm512_storeu_si512(to + 16 * (first_word + i), b[i]);
  }
}

// Adds the products of the numbers in a word: one, or two of bfloat16.
inline Floats add_word(Floats sum, __m512i query, __m512i key, const float*) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(query), _mm512_castsi512_ps(key), sum);
}
inline Floats add_word(Floats sum, __m512i query, __m512i key, const Half*) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)query, (__m512bh)key);
#else
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  const auto low = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  const auto high = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, upper)); };
  return _mm512_fmadd_ps(high(query), high(key), _mm512_fmadd_ps(low(query), low(key), sum));
#endif
}

// Computes the products of ROWS rows' queries and the 16 keys of `turned` [words][16].
template <int ROWS, typename X>
inline void score_some(const X* const* queries, const int32_t* turned, int64_t num_words, float* scores, int64_t stride) {
  Floats sum[ROWS][2];  // of even and odd words: two sums hide the latency
  for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t w = 0; w < num_words; w += 2)
    for (int i = 0; i < 2; i++) {
      const __m512i key = _mm512_loadu_si512(turned + 16 * (w + i));
      for (int r = 0; r < ROWS; r++) {
        int32_t word;
        memcpy(&word, (const char*)queries[r] + 4 * (w + i), 4);
        sum[r][i] = add_word(sum[r][i], _mm512_set1_epi32(word), key, (const X*)nullptr);
      }
    }
  for (int r = 0; r < ROWS; r++)
    store(scores + r * stride, _mm512_add_ps(sum[r][0], sum[r][1]));
}

// Computes the products of all rows' queries and keys of a head, [rows, stride]. `turned` has room for 16 keys.
template <typename X>
void score(const X* const* queries, const X* keys, int64_t num_rows, int64_t num_keys, int64_t dim, int64_t stride,
           int32_t* turned, float* scores) {
  const int64_t num_words = dim * sizeof(X) / 4;
  for (int64_t j = 0; j < num_keys; j += 16) {
    const int32_t* of_key[16];
    for (int64_t t = 0; t < 16; t++) of_key[t] = (const int32_t*)(keys + (j + t < num_keys ? j + t : num_keys - 1) * dim);
    turn(of_key, num_words, turned);
    float* to = scores + j;
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) score_some<4>(queries + r, turned, num_words, to + r * stride, stride);
    for (; r < num_rows; r++) score_some<1>(queries + r, turned, num_words, to + r * stride, stride);
  }
}

// Computes BLOCKS * 16 numbers of ROWS rows, from the `first` on: weights [keys] times values [keys, dim] of a head.
template <int ROWS, int BLOCKS, typename X>
inline void weigh(const float* weights, int64_t stride, const X* values, int64_t num_keys, int64_t dim, X* const* outs,
                  int64_t first) {
  Floats sum[ROWS][BLOCKS];
  for (int r = 0; r < ROWS; r++)
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = _mm512_setzero_ps();
  for (int64_t j = 0; j < num_keys; j++, values += dim) {
    Floats value[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) value[b] = load(values + first + 16 * b);
    for (int r = 0; r < ROWS; r++)
      for (int b = 0; b < BLOCKS; b++)
        sum[r][b] = _mm512_fmadd_ps(_mm512_set1_ps(weights[r * stride + j]), value[b], sum[r][b]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int b = 0; b < BLOCKS; b++) store(outs[r] + first + 16 * b, sum[r][b]);
}

template <int ROWS, typename X>
inline void weigh_all(const float* weights, int64_t stride, const X* values, int64_t num_keys, int64_t dim,
                      X* const* outs) {
  int64_t i = 0;
  for (; i + 64 <= dim; i += 64) weigh<ROWS, 4>(weights, stride, values, num_keys, dim, outs, i);
  for (; i < dim; i += 16) weigh<ROWS, 1>(weights, stride, values, num_keys, dim, outs, i);
}

// The rows of one key head of one lane, those of its group of query heads: where each one's query, mask
// and output lie. A thread has one, so that memory is not allocated anew.
template <typename X>
struct HeadRows {
  std::vector<const X*> queries, masks;
  std::vector<X*> outs;
  std::vector<float> scores;
  std::vector<int32_t> turned;

  void clear() { queries.clear(), masks.clear(), outs.clear(); }
  void add(const X* query, const X* mask, X* out) { queries.push_back(query), masks.push_back(mask), outs.push_back(out); }
};

// Makes weights of a row's products of queries and keys [num], in place.
template <typename X>
void make_weights(float* scores, const X* hidden, int64_t num, float scale) {
  Floats most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < num; j += 16) {
    const __mmask16 here = first(num - j);
    const Floats scaled = _mm512_mul_ps(load(scores + j, here), _mm512_set1_ps(scale));
    const Floats score = _mm512_add_ps(scaled, load(hidden + j, here));
    store(scores + j, score);
    most = _mm512_mask_max_ps(most, here, most, score);
  }
  const Floats largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t j = 0; j < num; j += 16) {
    const Floats weight = exponential(_mm512_sub_ps(load(scores + j), largest));
    store(scores + j, weight);
    sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(first(num - j), weight));
  }
  const Floats share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(sum));
  for (int64_t j = 0; j < num; j += 16) store(scores + j, _mm512_mul_ps(load(scores + j), share), first(num - j));
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILE_REGISTERS

// Tile registers 0 to 3 hold sums and 4 and 5 the left factor, [rows][64 bytes]; 6 and 7 the right one, 16 such rows.
inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void store_sums(float* to, int64_t from_tile_to_tile, int64_t bytes_of_row) {
  _tile_stored(0, to, bytes_of_row);
  _tile_stored(1, to + from_tile_to_tile, bytes_of_row);
  _tile_stored(2, to + 2 * from_tile_to_tile, bytes_of_row);
  _tile_stored(3, to + 3 * from_tile_to_tile, bytes_of_row);
}

// What a thread needs for attention in tile registers. It is small, so that it stays in a cache.
struct TileRoom {
  std::vector<Half> queries;         // [rows, dim]
  std::vector<int32_t> keys;         // of 64 keys: [4][words][16]
  std::vector<float> scores;         // [rows, keys]; keys come in 64s
  std::vector<Half> weights, rest;   // [rows, keys]: rounded, and what that lost
  alignas(64) int32_t values[2][4][16][16];  // of 32 keys and 64 numbers: [of even and odd 32s][numbers / 16][pair of keys]
  alignas(64) float sums[4][16][16];

  void make_room(int64_t num_rows, int64_t stride, int64_t dim) {
    queries.resize(num_rows * dim);
    keys.resize(32 * dim);
    for (auto* one : {&weights, &rest}) one->resize(num_rows * stride);
    scores.resize(num_rows * stride);
  }
};

// Computes the products of the rows' queries and 64 keys, from key j on.
inline void score_in_tiles(TileRoom& a, const Half* keys, int64_t num, int64_t stride, int64_t dim, int64_t j) {
  const int64_t words = dim / 2;
  for (int64_t block = 0; block < 4; block++) {
    const int32_t* of_key[16];
    for (int64_t t = 0; t < 16; t++) {
      const int64_t key = j + 16 * block + t;
      of_key[t] = (const int32_t*)(keys + (key < num ? key : num - 1) * dim);
    }
    turn(of_key, words, a.keys.data() + block * 16 * words);
  }
  asm volatile("" ::: "memory");
  clear_sums();
  for (int64_t w = 0; w < words; w += 16) {
    const int32_t* turned = a.keys.data() + 16 * w;
    _tile_loadd(4, a.queries.data() + 2 * w, 2 * dim);
    _tile_loadd(6, turned, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, turned + 16 * words, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, turned + 32 * words, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, turned + 48 * words, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  store_sums(a.scores.data() + j, 16, 4 * stride);
}

// Rounds a row's weights to bfloat16, and what that loses.
inline void round_weights(TileRoom& a, int64_t row, int64_t num, int64_t stride) {
  for (int64_t j = 0; j < stride; j += 16) {
    const Floats weight = load(a.scores.data() + row * stride + j, num > j ? first(num - j) : 0);
    const __m256i nearest = (__m256i)_mm512_cvtneps_pbh(weight);
    const Floats rest = _mm512_sub_ps(weight, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(nearest), 16)));
    _mm256_storeu_si256((__m256i*)(a.weights.data() + row * stride + j), nearest);
    _mm256_storeu_si256((__m256i*)(a.rest.data() + row * stride + j), (__m256i)_mm512_cvtneps_pbh(rest));
  }
}

// Lays out 64 numbers or fewer of 32 values as pairs of keys, from key j and number i on.
inline void pair_values(TileRoom& a, const Half* values, int64_t num, int64_t dim, int64_t j, int64_t i) {
  const auto value = [&](int64_t key, int64_t at) {  // 0 beyond the last
    const __mmask16 is_there = key < num ? 0xffff : 0;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(is_there, values + key * dim + at));
  };
  for (int64_t pair = 0; pair < 16; pair++)
    for (int64_t b = 0; b < 4 && i + 16 * b < dim; b++) {
      const __m512i even = value(j + 2 * pair, i + 16 * b), odd = value(j + 2 * pair + 1, i + 16 * b);
      _mm512_store_si512(a.values[j / 32 % 2][b][pair], _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

// Adds up the rows' weights times 64 numbers or fewer of the values, from number i on. Values are laid
// out one step early: a tile register waits until what was just written has arrived in the cache.
inline void weigh_in_tiles(TileRoom& a, const Half* values, int64_t num, int64_t stride, int64_t dim, int64_t i) {
  const int64_t num_blocks = (dim - i) / 16;
  pair_values(a, values, num, dim, 0, i);
  clear_sums();
  for (int64_t j = 0; j < num; j += 32) {
    if (j + 32 < num) pair_values(a, values, num, dim, j + 32, i);
    asm volatile("" ::: "memory");
    _tile_loadd(4, a.weights.data() + j, 2 * stride);
    _tile_loadd(5, a.rest.data() + j, 2 * stride);
#define BLOCK(B, REGISTER) \
  if (B < num_blocks) { \
    _tile_loadd(REGISTER, a.values[j / 32 % 2][B], 64); \
    _tile_dpbf16ps(B, 4, REGISTER); \
    _tile_dpbf16ps(B, 5, REGISTER); \
  }
    BLOCK(0, 6)
    BLOCK(1, 7)
    BLOCK(2, 6)
    BLOCK(3, 7)
#undef BLOCK
  }
  store_sums(a.sums[0][0], 256, 64);
}

// As `attend_head`, by AMX, of 16 rows at most. A weight is two bfloat16 numbers, which keep 16 bits of it.
inline void attend_in_tiles(HeadRows<Half>& rows, const Half* keys, const Half* values, int64_t num, int64_t dim,
                            float scale) {
  static thread_local TileRoom room;  // so that memory is not allocated anew
  const int64_t num_rows = rows.queries.size(), stride = (num + 63) / 64 * 64;
  room.make_room(num_rows, stride, dim);
  for (int64_t r = 0; r < num_rows; r++) memcpy(room.queries.data() + r * dim, rows.queries[r], dim * sizeof(Half));
  slipstream_shape_tiles(num_rows);
  for (int64_t j = 0; j < num; j += 64) score_in_tiles(room, keys, num, stride, dim, j);
  asm volatile("" ::: "memory");
  for (int64_t r = 0; r < num_rows; r++) {
    make_weights(room.scores.data() + r * stride, rows.masks[r], num, scale);
    round_weights(room, r, num, stride);
  }
  for (int64_t i = 0; i < dim; i += 64) {
    weigh_in_tiles(room, values, num, stride, dim, i);
    asm volatile("" ::: "memory");
    for (int64_t r = 0; r < num_rows; r++)
      for (int64_t b = 0; b < 4 && i + 16 * b < dim; b++) store(rows.outs[r] + i + 16 * b, load(room.sums[b][r]));
  }
  _tile_release();
}
#endif

// The attention of one key head of one lane.
template <typename X>
void attend_head(HeadRows<X>& rows, const X* keys, const X* values, int64_t num, int64_t dim, float scale) {
#ifdef HAS_TILE_REGISTERS
  if constexpr (sizeof(X) == sizeof(Half))
    if (dim % 32 == 0 && slipstream_may_use_tiles()) return attend_in_tiles(rows, keys, values, num, dim, scale);
#endif
  const int64_t num_rows = rows.queries.size(), stride = (num + 15) / 16 * 16;
  rows.scores.resize(num_rows * stride);
  rows.turned.resize(16 * dim);
  float* scores = rows.scores.data();
  score(rows.queries.data(), keys, num_rows, num, dim, stride, rows.turned.data(), scores);
  for (int64_t r = 0; r < num_rows; r++) make_weights(scores + r * stride, rows.masks[r], num, scale);
  X* const* outs = rows.outs.data();
  int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4) weigh_all<4>(scores + r * stride, stride, values, num, dim, outs + r);
  for (; r + 2 <= num_rows; r += 2) weigh_all<2>(scores + r * stride, stride, values, num, dim, outs + r);
  for (; r < num_rows; r++) weigh_all<1>(scores + r * stride, stride, values, num, dim, outs + r);
}

constexpr int64_t ROWS_OF_PART = 16;  // of a head that a thread takes at once

template <typename X>
void attend(const Look& a, const X* query, const X* keys, const X* values, const X* mask, X* out) {
  const int64_t num_heads = a.num_lanes * a.num_kv_heads, size = a.num_rows * a.dim;
  const int64_t num_parts = (a.num_rows + ROWS_OF_PART - 1) / ROWS_OF_PART;
#pragma omp parallel for schedule(dynamic) if (num_heads * size * a.num_keys > PRODUCTS_WORTH_THREADS)
  for (int64_t part = 0; part < num_heads * num_parts; part++) {
    static thread_local HeadRows<X> rows;
    const int64_t i = part / num_parts, begin = part % num_parts * ROWS_OF_PART;
    const int64_t lane = i / a.num_kv_heads, at = lane * a.lane_stride + i % a.num_kv_heads * a.head_stride;
    rows.clear();
    for (int64_t r = begin; r < begin + ROWS_OF_PART && r < a.num_rows; r++) {
      const int64_t here = i * size + r * a.dim;
      rows.add(query + here, mask + lane * a.mask_lane_stride + r * a.mask_row_stride, out + here);
    }
    attend_head(rows, keys + at, values + at, a.num_keys, a.dim, a.scale);
  }
}

}  // namespace

// -- layers ---------------------------------------------------------------------------------------

namespace {

// As cpu_layers.py passes them. Matrices are those of cpu_products.cpp.
struct Layer {
  const void *qkv, *out, *gate_up, *down;
  const void *head_norm, *before_mlp, *after;  // weights of norms; of queries and keys, or null
  void* cache;
  int64_t kind;  // which of the pass's `seen`
};

struct Lane {
  int64_t first_row, num_rows, first_slot;
};

// What layers of a kind see: from `num_skipped` slots after a lane's first on, under a mask [rows, num_keys].
struct Seen {
  const void* mask;
  int64_t mask_stride, num_keys, num_skipped;
};

struct Pass {
  Heads heads;
  int64_t size, inner;  // of a row of `hidden`; of the feed-forward block
  void *hidden, *normed, *change;  // [rows, size]
  void *qkv, *queries;             // as `turn_and_write` has them
  void *both, *gated;              // [rows, 2 inner], [rows, inner]
  const void *cos, *sin;
  const int64_t* slots;
  // Only if attention is computed here too:
  int64_t num_lanes;
  const Lane* lanes;
  const Seen* seen;
  void* attended;  // [rows, heads * dim]
  float scale;
};

template <typename X>
void multiply(const void* matrix, const void* x, void* y, const Pass& p) {
  slipstream_product(matrix, sizeof(X) == 4, x, y, p.heads.num_rows);
}

// hidden += change; normed = norm of it.
template <typename X>
void add_change(const Pass& p, const void* weight) {
  add_and_norm((X*)p.hidden, (const X*)p.change, (const X*)weight, (X*)p.normed, p.heads.num_rows, p.size, p.heads.epsilon);
}

// From `normed` to what attention reads.
template <typename X>
void before_attention(const Layer& a, const Pass& p) {
  multiply<X>(a.qkv, p.normed, p.qkv, p);
  turn_and_write(p.heads, (const X*)p.qkv, (const X*)a.head_norm, (const X*)p.cos, (const X*)p.sin, p.slots,
                 (X*)p.queries, (X*)a.cache);
}

// Each lane's rows see its own slots.
template <typename X>
void attend_lanes(const Layer& a, const Pass& p) {
  const Heads& h = p.heads;
  const Seen& seen = p.seen[a.kind];
  const int64_t group = h.num_heads / h.num_kv_heads, width = h.num_heads * h.dim;
  const int64_t row_of_queries = width + 2 * h.num_kv_heads * h.dim, head_stride = h.num_slots * h.dim;
  int64_t most_rows = 0;
  for (int64_t i = 0; i < p.num_lanes; i++) most_rows = p.lanes[i].num_rows > most_rows ? p.lanes[i].num_rows : most_rows;
  const int64_t num_parts = (most_rows * group + ROWS_OF_PART - 1) / ROWS_OF_PART;
  const int64_t num = p.num_lanes * h.num_kv_heads * num_parts;
#pragma omp parallel for schedule(dynamic) if (h.num_rows * width * seen.num_keys > PRODUCTS_WORTH_THREADS)
  for (int64_t i = 0; i < num; i++) {
    static thread_local HeadRows<X> rows;
    const Lane& lane = p.lanes[i / num_parts / h.num_kv_heads];
    const int64_t head = i / num_parts % h.num_kv_heads, begin = i % num_parts * ROWS_OF_PART;
    rows.clear();
    for (int64_t r = begin; r < begin + ROWS_OF_PART && r < lane.num_rows * group; r++) {
      const int64_t m = lane.first_row + r / group, at = (head * group + r % group) * h.dim;
      rows.add((const X*)p.queries + m * row_of_queries + at, (const X*)seen.mask + m * seen.mask_stride,
               (X*)p.attended + m * width + at);
    }
    if (rows.queries.empty()) continue;  // another lane has more parts
    const X* keys = (const X*)a.cache + head * head_stride + (lane.first_slot + seen.num_skipped) * h.dim;
    attend_head(rows, keys, keys + h.num_kv_heads * head_stride, seen.num_keys, h.dim, p.scale);
  }
}

// From attention's outputs to `normed` for the next layer.
template <typename X>
void after_attention(const Layer& a, const Pass& p, const X* attended) {
  multiply<X>(a.out, attended, p.change, p);
  add_change<X>(p, a.before_mlp);
  multiply<X>(a.gate_up, p.normed, p.both, p);
  gate((const X*)p.both, (X*)p.gated, p.heads.num_rows, p.inner);
  multiply<X>(a.down, p.gated, p.change, p);
  add_change<X>(p, a.after);
}

template <typename X>
void layers(const Layer* all, int64_t first, int64_t last, const Pass& p) {
  for (int64_t i = first; i < last; i++) {
    before_attention<X>(all[i], p);
    attend_lanes<X>(all[i], p);
    after_attention<X>(all[i], p, (const X*)p.attended);
  }
}

}  // namespace

// Each function twice, for both types of numbers.
#define BOTH(NAME, PARAMETERS, CALL) \
  extern "C" void slipstream_##NAME##_float32 PARAMETERS(float) { CALL(float); } \
  extern "C" void slipstream_##NAME##_bfloat16 PARAMETERS(Half) { CALL(Half); }

#define PARAMETERS(X) (X * hidden, const X* change, const X* weight, X* normed, int64_t rows, int64_t dim, float epsilon)
#define CALL(X) add_and_norm<X>(hidden, change, weight, normed, rows, dim, epsilon)
BOTH(add_and_norm, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) (const X* both, X* y, int64_t rows, int64_t inner)
#define CALL(X) gate<X>(both, y, rows, inner)
BOTH(gate, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) \
  (const Heads* heads, const X* qkv, const X* weights, const X* cos, const X* sin, const int64_t* slots, X* queries, \
   X* cache)
#define CALL(X) turn_and_write<X>(*heads, qkv, weights, cos, sin, slots, queries, cache)
BOTH(turn_and_write, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) (const Look* look, const X* query, const X* keys, const X* values, const X* mask, X* out)
#define CALL(X) attend<X>(*look, query, keys, values, mask, out)
BOTH(attend, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) (const Layer* layer, const Pass* pass)
#define CALL(X) before_attention<X>(*layer, *pass)
BOTH(before_attention, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) (const Layer* layer, const Pass* pass, const X* attended)
#define CALL(X) after_attention<X>(*layer, *pass, attended)
BOTH(after_attention, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) (const Layer* all, int64_t first, int64_t last, const Pass* pass)
#define CALL(X) layers<X>(all, first, last, *pass)
BOTH(layers, PARAMETERS, CALL)
