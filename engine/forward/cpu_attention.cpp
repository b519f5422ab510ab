// Attention of the rows of a pass over the slots of their lanes, for CPUs with AVX-512.
//
// A row's numbers depend on its query and on the keys and values that it sees, in the order of their
// *positions*: not on the slots in which these lie, on other rows, on how many rows a pass has or on
// threads. So a draft's row in a tree has the same bits as the row of its token alone.
//
//   sums over positions  of weights: 16 sums, of the positions with the same remainder by 16. Of values:
//                        one after another; by AMX in blocks of 32 positions
//   what a row does not see  has the weight zero, which changes no sum
//   slots                positions below a row's `linear` lie in slots of their own number, for all rows
//                        that share them. Behind it each row has slots of its own, its *tail*
//
// Numbers are float32 or bfloat16, sums and weights are float32. By AMX a weight is two bfloat16 numbers,
// which keep 16 bits of it.

#include <algorithm>
#include <vector>

#include <omp.h>

#include "cpu_numbers.h"

// Of cpu_products.cpp: whether AMX's tile registers may be used, and their shape for so many rows (at most
// 16) of sums and left factors.
extern "C" int slipstream_may_use_tiles();
extern "C" void slipstream_shape_tiles(int rows);

namespace {

constexpr int64_t MOST_IN_TREE = 64;  // slots of a tree that a row may see
constexpr int64_t ROWS = 16;          // of a tile register
constexpr int64_t MOST_ROWS = 4 * ROWS;  // that share what is read of keys and values

// -- what rows see --------------------------------------------------------------------------------

// A row sees the positions from `low` on that are below `num`. One below `shown` lies in the slot of its
// own number, counted from the lane's first; position base + i lies in slot tail[i].
struct Row {
  int64_t low, shown, base, num;
  int64_t linear;      // positions below it lie in slots of their own number
  int64_t begin, end;  // of the slots that the row sees
  int32_t tail[MOST_IN_TREE];

  inline int64_t slot(int64_t position) const { return position < shown ? position : tail[position - base]; }
  inline bool is_linear() const { return linear >= num; }
};

// As cpu_attention.py passes it.
struct Lane {
  int64_t first_row, num_rows, first_slot;
};

// The integers of a pass: lines of [num_rows] each, of which the second has positions, the third slots of the
// cache, the fourth how many slots of the lane a row sees from the first on, the fifth the bits of the others.
struct Told {
  const int64_t* lines;
  int64_t num_rows, num_lanes;
  const Lane* lanes;
  int64_t num_kinds;
  const int64_t* windows;  // of each kind of layer: the line of its lowest slots, and bits follow; or 0
  int32_t* placed;         // of each slot of the cache: the position of the token in it
};

inline void see_row(const Told& a, const Lane& lane, int64_t m, int64_t window, Row& to) {
  const int64_t n = a.num_rows;
  const int32_t* placed = a.placed + lane.first_slot;
  to.shown = a.lines[3 * n + m];
  to.low = window ? std::min(a.lines[window * n + m], to.shown) : 0;
  uint64_t bits = a.lines[(window ? window + 1 : 4) * n + m];
  int64_t num = 0;
  for (; bits; bits &= bits - 1) {  // insertion by position: they nearly come in order
    const int32_t slot = to.shown + __builtin_ctzll(bits);
    int64_t at = num++;
    for (; at > 0 && placed[to.tail[at - 1]] > placed[slot]; at--) to.tail[at] = to.tail[at - 1];
    to.tail[at] = slot;
  }
  // A window may hide all before the tail, and its first tokens.
  const bool has_only_tail = to.low == to.shown && num > 0;
  to.base = has_only_tail ? placed[to.tail[0]] : to.shown;
  if (has_only_tail) to.low = to.base;
  to.num = to.base + num;
  to.linear = to.base;
  while (to.linear < to.num && to.tail[to.linear - to.base] == to.linear) to.linear++;
  to.begin = has_only_tail ? INT64_MAX : to.low, to.end = to.shown;
  for (int64_t i = 0; i < num; i++) {
    to.begin = std::min<int64_t>(to.begin, to.tail[i]);
    to.end = std::max<int64_t>(to.end, to.tail[i] + 1);
  }
}

// Writes what each row sees in the layers of each kind: [kinds][rows].
void see(const Told& a, Row* to) {
  for (int64_t m = 0; m < a.num_rows; m++) a.placed[a.lines[2 * a.num_rows + m]] = a.lines[a.num_rows + m];
  for (int64_t kind = 0; kind < a.num_kinds; kind++, to += a.num_rows)
    for (int64_t i = 0; i < a.num_lanes; i++)
      for (int64_t m = a.lanes[i].first_row; m < a.lanes[i].first_row + a.lanes[i].num_rows; m++)
        see_row(a, a.lanes[i], m, a.windows[kind], to[m]);
}

// Rows of one key head of one lane: some of those of its group of query heads. A thread has one, so that
// memory is not allocated anew.
template <typename X>
struct Part {
  std::vector<const Row*> seen;
  std::vector<const X*> queries;
  std::vector<X*> outs;
  std::vector<float> scores;  // [rows][stride]: of a slot or position p at p - first; then weights
  std::vector<float> sums;    // of values
  std::vector<int32_t> turned;
  int64_t first, end, stride;  // slots or positions, the first of a block; those that are read; both
  int64_t shared;  // all rows read the values of positions below it from slots of their own number

  int64_t num_rows() const { return seen.size(); }
  void clear() { seen.clear(), queries.clear(), outs.clear(); }
  void add(const Row* row, const X* query, X* out) { seen.push_back(row), queries.push_back(query), outs.push_back(out); }

  // `block`: of how many positions sums over values are made.
  void measure(int64_t block) {
    int64_t begin = INT64_MAX, num = 0, linear = INT64_MAX;
    end = 0;
    for (const Row* row : seen) {
      begin = std::min({begin, row->low, row->begin});
      num = std::max(num, row->num), end = std::max(end, row->end);
      if (!row->is_linear()) linear = std::min(linear, row->linear);
    }
    first = begin / block * block;
    shared = linear == INT64_MAX ? num : std::max(first, linear / block * block);
    stride = (std::max(num, end) - first + 63) / 64 * 64;
    scores.resize(num_rows() * stride);
  }
};

// Puts a row's scores, which lie by slot, in the order of positions.
inline void order(const Row& row, float* scores, int64_t first) {
  float tail[MOST_IN_TREE];
  for (int64_t p = row.linear; p < row.num; p++) tail[p - row.linear] = scores[row.slot(p) - first];
  memcpy(scores + row.linear - first, tail, (row.num - row.linear) * sizeof(float));
}

// A weight that is e^69 times smaller than the largest counts as zero. It changes no sum of numbers that float32
// can hold beside each other, and processors take a hundred times as long for numbers below float32's smallest
// normal one.
constexpr float LEAST = -69;

// Makes weights of a row's scores, in place: zero where it sees nothing. `first` is a multiple of 16.
inline void make_weights(const Row& row, float* scores, int64_t first_position, int64_t stride, float scale) {
  const int64_t low = row.low - first_position, num = std::max(low, row.num - first_position);
  const int64_t begin = low / 16 * 16, end = (num + 15) / 16 * 16;
  const auto seen = [&](int64_t j) { return (__mmask16)(first(num - j) & ~(j < low ? first(low - j) : 0)); };
  Floats most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int64_t j = begin; j < num; j += 16) {
    const Floats score = _mm512_mul_ps(load(scores + j), _mm512_set1_ps(scale));
    store(scores + j, score);
    most = _mm512_mask_max_ps(most, seen(j), most, score);
  }
  const Floats largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t j = begin; j < num; j += 16) {
    const Floats below = _mm512_sub_ps(load(scores + j), largest), least = _mm512_set1_ps(LEAST);
    const __mmask16 counts = seen(j) & _mm512_cmp_ps_mask(below, least, _CMP_NLT_UQ);  // also if it is NaN
    const Floats weight = _mm512_maskz_mov_ps(counts, exponential(_mm512_mask_mov_ps(least, counts, below)));
    store(scores + j, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  const Floats share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(sum));
  for (int64_t j = begin; j < num; j += 16) store(scores + j, _mm512_mul_ps(load(scores + j), share));
  memset(scores, 0, begin * sizeof(float));
  memset(scores + end, 0, (stride - end) * sizeof(float));
}

template <typename X>
inline void make_weights(Part<X>& part, float scale) {
  for (int64_t r = 0; r < part.num_rows(); r++) {
    float* scores = part.scores.data() + r * part.stride;
    if (!part.seen[r]->is_linear()) order(*part.seen[r], scores, part.first);
    make_weights(*part.seen[r], scores, part.first, part.stride, scale);
  }
}

// Writes a sum. Weights of zero may have changed the sign of a zero: here all are positive.
template <typename X>
inline void store_sum(X* to, Floats sum) {
  store(to, _mm512_add_ps(sum, _mm512_setzero_ps()));
}

// -- in vector registers --------------------------------------------------------------------------

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

// Turns the keys of 16 slots from `slot` on, of which those from `end` on are not read.
template <typename X>
inline void turn_keys(const X* keys, int64_t slot, int64_t end, int64_t dim, int32_t* to) {
  const int32_t* of_key[16];
  for (int64_t t = 0; t < 16; t++) of_key[t] = (const int32_t*)(keys + std::min(slot + t, end - 1) * dim);
  turn(of_key, dim * sizeof(X) / 4, to);
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

// Keeps the compiler from reading a number anew for each instruction that takes it.
template <typename Register>
inline void in_register(Register& number) {
  asm("" : "+v"(number));
}

// Computes the products of NUM rows' queries and 32 keys, `turned` [2][words][16].
template <int NUM, typename X>
inline void score_some(const X* const* queries, const int32_t* turned, int64_t num_words, float* scores, int64_t stride) {
  Floats sum[NUM][2][2];  // of 16 keys; of even and odd words, because two sums hide the latency
  for (int r = 0; r < NUM; r++)
    for (int i = 0; i < 2; i++) sum[r][0][i] = sum[r][1][i] = _mm512_setzero_ps();
  for (int64_t w = 0; w < num_words; w += 2)
    for (int i = 0; i < 2; i++) {
      const __m512i some = _mm512_loadu_si512(turned + 16 * (w + i));
      const __m512i others = _mm512_loadu_si512(turned + 16 * (num_words + w + i));
      for (int r = 0; r < NUM; r++) {
        int32_t word;
        memcpy(&word, (const char*)queries[r] + 4 * (w + i), 4);
        __m512i query = _mm512_set1_epi32(word);
        in_register(query);
        sum[r][0][i] = add_word(sum[r][0][i], query, some, (const X*)nullptr);
        sum[r][1][i] = add_word(sum[r][1][i], query, others, (const X*)nullptr);
      }
    }
  for (int r = 0; r < NUM; r++)
    for (int k = 0; k < 2; k++) store(scores + r * stride + 16 * k, _mm512_add_ps(sum[r][k][0], sum[r][k][1]));
}

template <typename X>
void score(Part<X>& a, const X* keys, int64_t dim) {
  const int64_t num_words = dim * sizeof(X) / 4, num_rows = a.num_rows();
  a.turned.resize(32 * dim);
  for (int64_t slot = a.first; slot < a.end; slot += 32) {
    for (int k = 0; k < 2; k++) turn_keys(keys, slot + 16 * k, a.end, dim, a.turned.data() + k * 16 * num_words);
    float* to = a.scores.data() + slot - a.first;
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4)
      score_some<4>(a.queries.data() + r, a.turned.data(), num_words, to + r * a.stride, a.stride);
    for (; r < num_rows; r++)
      score_some<1>(a.queries.data() + r, a.turned.data(), num_words, to + r * a.stride, a.stride);
  }
}

constexpr int64_t VALUES = 128;  // that rows read one after another, while they are in the fastest cache

// Adds weights times values [keys, dim] of a head to BLOCKS * 16 sums of NUM rows. Loops are unrolled, because
// the compiler keeps sums in registers only if it knows the number of each.
template <int NUM, int BLOCKS, typename X>
inline void weigh(const float* weights, int64_t stride, const X* values, int64_t num, int64_t dim, float* sums) {
  Floats sum[NUM][BLOCKS];
#pragma GCC unroll 4
  for (int r = 0; r < NUM; r++)
#pragma GCC unroll 4
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = load(sums + r * dim + 16 * b);
  for (int64_t j = 0; j < num; j++, values += dim) {
    Floats value[BLOCKS];
#pragma GCC unroll 4
    for (int b = 0; b < BLOCKS; b++) value[b] = load(values + 16 * b);
#pragma GCC unroll 4
    for (int r = 0; r < NUM; r++) {
      Floats weight = _mm512_set1_ps(weights[r * stride + j]);
      in_register(weight);
#pragma GCC unroll 4
      for (int b = 0; b < BLOCKS; b++) sum[r][b] = _mm512_fmadd_ps(weight, value[b], sum[r][b]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < NUM; r++)
#pragma GCC unroll 4
    for (int b = 0; b < BLOCKS; b++) store(sums + r * dim + 16 * b, sum[r][b]);
}

template <int NUM, typename X>
inline void weigh_all(const float* weights, int64_t stride, const X* values, int64_t num, int64_t dim, float* sums) {
  int64_t i = 0;
  for (; i + 64 <= dim; i += 64) weigh<NUM, 4>(weights, stride, values + i, num, dim, sums + i);
  for (; i < dim; i += 16) weigh<NUM, 1>(weights, stride, values + i, num, dim, sums + i);
}

template <typename X>
void attend_in_vectors(Part<X>& a, const X* keys, const X* values, int64_t dim, float scale) {
  a.measure(16);
  score(a, keys, dim);
  make_weights(a, scale);
  const int64_t num_rows = a.num_rows();
  a.sums.assign(num_rows * dim, 0);
  for (int64_t p = a.first; p < a.shared; p += VALUES) {
    const float* weights = a.scores.data() + p - a.first;
    const int64_t num = std::min(VALUES, a.shared - p);
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4)
      weigh_all<4>(weights + r * a.stride, a.stride, values + p * dim, num, dim, a.sums.data() + r * dim);
    for (; r + 2 <= num_rows; r += 2)
      weigh_all<2>(weights + r * a.stride, a.stride, values + p * dim, num, dim, a.sums.data() + r * dim);
    for (; r < num_rows; r++)
      weigh_all<1>(weights + r * a.stride, a.stride, values + p * dim, num, dim, a.sums.data() + r * dim);
  }
  for (int64_t r = 0; r < num_rows; r++) {
    const float* weights = a.scores.data() + r * a.stride - a.first;
    float* sums = a.sums.data() + r * dim;
    for (int64_t p = std::max(a.shared, a.seen[r]->low); p < a.seen[r]->num; p++)
      weigh_all<1>(weights + p, a.stride, values + a.seen[r]->slot(p) * dim, 1, dim, sums);
    for (int64_t i = 0; i < dim; i += 16) store_sum(a.outs[r] + i, load(sums + i));
  }
}

// -- in AMX's tile registers ----------------------------------------------------------------------

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILE_REGISTERS

constexpr int64_t BLOCK = 32;  // positions whose values an instruction adds up

// What a thread needs beside a part. Of each 16 rows (a *group*) tile registers hold sums in 0 to 3, queries or
// weights in 4 and 5; keys or values are in 6 and 7.
struct TileRoom {
  std::vector<Half> queries;        // [rows, dim]
  std::vector<int32_t> keys;        // of 64 slots: [4][words][16]
  std::vector<Half> weights, rest;  // [rows, stride]: rounded, and what that lost
  alignas(64) int32_t values[VALUES / BLOCK][4][16][16];  // [32 positions][numbers / 16][pair of positions]

  void make_room(int64_t num_rows, int64_t stride, int64_t dim) {
    queries.resize(num_rows * dim);
    keys.resize(32 * dim);
    for (auto* one : {&weights, &rest}) one->resize(num_rows * stride);
  }
};

inline void written_by_stores() { asm volatile("" ::: "memory"); }

// Computes the products of all rows' queries and the keys of 64 slots, from `slot` on.
inline void score_in_tiles(Part<Half>& a, TileRoom& room, const Half* keys, int64_t num_groups, int64_t dim,
                           int64_t slot) {
  const int64_t words = dim / 2;
  for (int64_t b = 0; b < 4; b++) turn_keys(keys, slot + 16 * b, a.end, dim, room.keys.data() + b * 16 * words);
  written_by_stores();
  for (int64_t g = 0; g < num_groups; g++) {
    const Half* queries = room.queries.data() + g * ROWS * dim;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t w = 0; w < words; w += 16) {
      const int32_t* turned = room.keys.data() + 16 * w;
      _tile_loadd(4, queries + 2 * w, 2 * dim);
      _tile_loadd(6, turned, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, turned + 16 * words, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, turned + 32 * words, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, turned + 48 * words, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    float* to = a.scores.data() + g * ROWS * a.stride + slot - a.first;
    _tile_stored(0, to, 4 * a.stride);
    _tile_stored(1, to + 16, 4 * a.stride);
    _tile_stored(2, to + 32, 4 * a.stride);
    _tile_stored(3, to + 48, 4 * a.stride);
  }
}

// Rounds all rows' weights to bfloat16, and what that loses.
inline void round_weights(const Part<Half>& a, TileRoom& room) {
  for (int64_t j = 0; j < a.num_rows() * a.stride; j += 16) {
    const Floats weight = load(a.scores.data() + j);
    const __m256i nearest = (__m256i)_mm512_cvtneps_pbh(weight);
    const Floats rest = _mm512_sub_ps(weight, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(nearest), 16)));
    _mm256_storeu_si256((__m256i*)(room.weights.data() + j), nearest);
    _mm256_storeu_si256((__m256i*)(room.rest.data() + j), (__m256i)_mm512_cvtneps_pbh(rest));
  }
}

// Lays out 64 numbers or fewer, from number i on, of the values of 32 positions, of which those from `end` on
// are not read. `slot`: position -> slot.
template <class Slot>
inline void pair_values(int32_t (*to)[16][16], const Half* values, int64_t position, int64_t end, int64_t dim, int64_t i,
                        const Slot& slot) {
  for (int64_t pair = 0; pair < 16; pair++) {
    const int64_t even = position + 2 * pair, odd = even + 1;
    const Half *of_even = values + (even < end ? slot(even) : 0) * dim, *of_odd = values + (odd < end ? slot(odd) : 0) * dim;
    const __mmask16 has_even = even < end ? 0xffff : 0, has_odd = odd < end ? 0xffff : 0;
    for (int64_t b = 0; b < 4 && i + 16 * b < dim; b++) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_even, of_even + i + 16 * b));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_odd, of_odd + i + 16 * b));
      _mm512_store_si512(to[b][pair], _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// Adds weights times the values of some blocks of positions to sums [4][16 rows][16] of some rows of a group.
// weights, rest: of the first row and position. is_begin: the sums begin here.
inline void weigh_in_tiles(const TileRoom& room, const Half* weights, const Half* rest, int64_t stride,
                           int64_t num_blocks, int64_t num_sums, float* sums, bool is_begin) {
  if (is_begin) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    if (num_sums > 1) _tile_loadd(1, sums + 256, 64);
    if (num_sums > 2) _tile_loadd(2, sums + 512, 64);
    if (num_sums > 3) _tile_loadd(3, sums + 768, 64);
  }
  for (int64_t n = 0; n < num_blocks; n++) {
    _tile_loadd(4, weights + n * BLOCK, 2 * stride);
    _tile_loadd(5, rest + n * BLOCK, 2 * stride);
#define SUM(S, REGISTER) \
  if (S < num_sums) { \
    _tile_loadd(REGISTER, room.values[n][S], 64); \
    _tile_dpbf16ps(S, 4, REGISTER); \
    _tile_dpbf16ps(S, 5, REGISTER); \
  }
    SUM(0, 6)
    SUM(1, 7)
    SUM(2, 6)
    SUM(3, 7)
#undef SUM
  }
  _tile_stored(0, sums, 64);
  if (num_sums > 1) _tile_stored(1, sums + 256, 64);
  if (num_sums > 2) _tile_stored(2, sums + 512, 64);
  if (num_sums > 3) _tile_stored(3, sums + 768, 64);
}

// Adds the values of the positions from `shared` on to the sums of each group, 64 numbers from i on: rows with
// one tail (all linear rows that lie side by side, or the heads of a row) together.
inline void weigh_tails(Part<Half>& a, TileRoom& room, const Half* values, int64_t dim, int64_t i, float* sums) {
  const int64_t num_rows = a.num_rows(), num_sums = std::min<int64_t>(4, (dim - i) / 16);
  for (int64_t r = 0, count; r < num_rows; r += count) {
    const Row& row = *a.seen[r];
    int64_t num = row.num;
    for (count = 1; r + count < num_rows && (r + count) % ROWS; count++) {
      const Row& next = *a.seen[r + count];
      if (&next != &row && !(next.is_linear() && row.is_linear())) break;
      num = std::max(num, next.num);
    }
    if (num <= a.shared) continue;
    slipstream_shape_tiles(count);
    float* to = sums + r / ROWS * 4 * 256 + r % ROWS * 16;
    for (int64_t p = a.shared; p < num; p += VALUES) {
      const int64_t num_blocks = std::min(VALUES / BLOCK, (num - p + BLOCK - 1) / BLOCK);
      for (int64_t n = 0; n < num_blocks; n++)
        pair_values(room.values[n], values, p + n * BLOCK, num, dim, i,
                    [&](int64_t position) { return row.is_linear() ? position : row.slot(position); });
      written_by_stores();
      const int64_t at = r * a.stride + p - a.first;
      const bool is_begin = p == a.first;
      weigh_in_tiles(room, room.weights.data() + at, room.rest.data() + at, a.stride, num_blocks, num_sums, to, is_begin);
    }
  }
}

void attend_in_tiles(Part<Half>& a, const Half* keys, const Half* values, int64_t dim, float scale) {
  static thread_local TileRoom room;  // so that memory is not allocated anew
  a.measure(BLOCK);
  const int64_t num_rows = a.num_rows(), num_groups = (num_rows + ROWS - 1) / ROWS;
  const int64_t rows_of_tile = num_groups > 1 ? ROWS : num_rows, with_none = num_groups > 1 ? num_groups * ROWS : num_rows;
  a.scores.resize(with_none * a.stride);
  room.make_room(with_none, a.stride, dim);
  for (int64_t r = 0; r < num_rows; r++) memcpy(room.queries.data() + r * dim, a.queries[r], dim * sizeof(Half));
  slipstream_shape_tiles(rows_of_tile);
  for (int64_t slot = a.first; slot < a.end; slot += 64) score_in_tiles(a, room, keys, num_groups, dim, slot);
  written_by_stores();
  make_weights(a, scale);
  round_weights(a, room);
  a.sums.resize(num_groups * 4 * 256);
  for (int64_t i = 0; i < dim; i += 64) {
    const int64_t num_sums = std::min<int64_t>(4, (dim - i) / 16);
    slipstream_shape_tiles(rows_of_tile);
    for (int64_t p = a.first; p < a.shared; p += VALUES) {
      const int64_t num_blocks = std::min(VALUES / BLOCK, (a.shared - p + BLOCK - 1) / BLOCK);
      for (int64_t n = 0; n < num_blocks; n++)
        pair_values(room.values[n], values, p + n * BLOCK, a.shared, dim, i, [](int64_t position) { return position; });
      written_by_stores();
      for (int64_t g = 0; g < num_groups; g++) {
        const int64_t at = g * ROWS * a.stride + p - a.first;
        weigh_in_tiles(room, room.weights.data() + at, room.rest.data() + at, a.stride, num_blocks, num_sums,
                       a.sums.data() + g * 4 * 256, p == a.first);
      }
    }
    weigh_tails(a, room, values, dim, i, a.sums.data());
    written_by_stores();
    for (int64_t r = 0; r < num_rows; r++)
      for (int64_t b = 0; b < num_sums; b++)
        store_sum(a.outs[r] + i + 16 * b, load(a.sums.data() + (r / ROWS * 4 + b) * 256 + r % ROWS * 16));
  }
  _tile_release();
}
#endif

// -- all rows of a pass ---------------------------------------------------------------------------

template <typename X>
void attend_part(Part<X>& part, const X* keys, const X* values, int64_t dim, float scale) {
#ifdef HAS_TILE_REGISTERS
  if constexpr (sizeof(X) == sizeof(Half))
    if (dim % 32 == 0 && slipstream_may_use_tiles()) return attend_in_tiles(part, keys, values, dim, scale);
#endif
  attend_in_vectors(part, keys, values, dim, scale);
}

// As cpu_attention.py passes it.
struct Look {
  int64_t num_heads, num_kv_heads, dim, num_slots;
  int64_t row_stride;  // of queries, in numbers
  float scale;
  int64_t num_lanes;
  const Lane* lanes;
  const Row* seen;  // [rows]
};

// For less work than this, waking a thread costs more.
constexpr int64_t PRODUCTS_WORTH_THREADS = 1 << 16;

// queries [rows][row_stride], all_keys, all_values [kv_heads, slots, dim], outs [rows][heads * dim].
template <typename X>
void attend(const Look& a, const X* queries, const X* all_keys, const X* all_values, X* outs) {
  const int64_t group = a.num_heads / a.num_kv_heads, width = a.num_heads * a.dim, head_stride = a.num_slots * a.dim;
  int64_t most_rows = 0, num_rows = 0, most_seen = 0;
  for (int64_t i = 0; i < a.num_lanes; i++) {
    most_rows = std::max(most_rows, a.lanes[i].num_rows);
    num_rows += a.lanes[i].num_rows;
  }
  for (int64_t m = 0; m < num_rows; m++) most_seen = std::max(most_seen, a.seen[m].num - a.seen[m].low);
  // As many rows together as leave each thread some parts. That changes no row's numbers.
  const int64_t num_tiles = a.num_lanes * a.num_kv_heads * ((most_rows * group + ROWS - 1) / ROWS);
  const int64_t together = std::clamp<int64_t>(num_tiles / (4 * omp_get_max_threads()), 1, MOST_ROWS / ROWS) * ROWS;
  const int64_t num_parts = (most_rows * group + together - 1) / together;
#pragma omp parallel for schedule(dynamic) if (num_rows * width * most_seen > PRODUCTS_WORTH_THREADS)
  for (int64_t i = 0; i < a.num_lanes * a.num_kv_heads * num_parts; i++) {
    static thread_local Part<X> part;
    const Lane& lane = a.lanes[i / num_parts / a.num_kv_heads];
    const int64_t head = i / num_parts % a.num_kv_heads, begin = i % num_parts * together;
    part.clear();
    for (int64_t r = begin; r < begin + together && r < lane.num_rows * group; r++) {
      const int64_t m = lane.first_row + r / group, at = (head * group + r % group) * a.dim;
      if (a.seen[m].num > a.seen[m].low) part.add(a.seen + m, queries + m * a.row_stride + at, outs + m * width + at);
      else memset(outs + m * width + at, 0, a.dim * sizeof(X));
    }
    if (!part.num_rows()) continue;  // another lane has more parts
    const int64_t at = head * head_stride + lane.first_slot * a.dim;
    attend_part(part, all_keys + at, all_values + at, a.dim, a.scale);
  }
}

}  // namespace

// Notes where the tokens of a pass lie, and writes what its rows see, `Row` [kinds][rows].
extern "C" void slipstream_see(const void* told, void* seen) { see(*(const Told*)told, (Row*)seen); }

extern "C" int64_t slipstream_row_bytes() { return sizeof(Row); }

#define ATTEND(NAME, X) \
  extern "C" void slipstream_attend_##NAME(const void* look, const void* queries, const void* keys, const void* values, \
                                           void* outs) { \
    attend(*(const Look*)look, (const X*)queries, (const X*)keys, (const X*)values, (X*)outs); \
  }
ATTEND(float32, float)
ATTEND(bfloat16, Half)
