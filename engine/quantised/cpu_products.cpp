// Products of a few rows with a quantised or bfloat16 matrix, for CPUs with AVX-512.
//
// y[m, n] = bias[n] + sum over groups g of
//           scale[n, g] * sum over k in g of x[m, k] * code[n, k]  +  offset[n, g] * sum over k in g of x[m, k]
//
// Codes become bfloat16 numbers, which is exact, and products are summed in float32. So nothing is
// rounded but sums, and the result where it is written as bfloat16.
//
// Layout. Outputs lie in tiles of 16, which are the 16 lanes of a register; nothing is ever summed
// across lanes. Of a tile, 64 bytes hold
//
//     bfloat16   2 inputs   32-bit lane n: inputs 0, 1 of output n
//     8 bits     4 inputs   byte 16 L + 8 h + 2 d + j: input 2 h + j of output 4 L + d, as a sign bit
//                           and seven bits of magnitude
//     4 bits     8 inputs   16-bit lane 2 n + j, bits 4 t to 4 t + 3: input 2 t + j of output n
//
// so that few operations make of them registers of 16 outputs x 2 inputs, which is what the
// instruction for bfloat16 products takes.
//
// Scales and offsets of a tile lie by group, 16 numbers each: float32, float16, or bytes that are
// multiplied with a float32 unit, one for several groups (GGUF's K formats).

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

namespace {

enum Scales { ONE, FLOAT32, FLOAT16, BYTES };

struct Matrix {
  const uint8_t* codes;    // [tiles][inputs / per chunk][64]
  const uint8_t* scales;   // [tiles][groups][16], float32 / float16 / uint8 or int8
  const uint8_t* offsets;  // the same, or null
  const float* units;      // BYTES: [tiles][inputs / unit][2][16]: of scales, of offsets
  const float* bias;       // [outputs], or null
  int64_t num_outputs, num_inputs, group, unit;
};

typedef __m512 Floats;
typedef __m512i Bytes;

// Two inputs of a row, in all lanes.
struct Pair {
#ifdef __AVX512BF16__
  Bytes both;
  explicit Pair(const uint16_t* x) {
    int32_t bits;
    memcpy(&bits, x, 4);
    both = _mm512_set1_epi32(bits);
    asm("" : "+v"(both));  // in a register: reading it anew for each tile takes twice as long
  }
#else
  Floats first, second;
  explicit Pair(const uint16_t* x) : first(number(x[0])), second(number(x[1])) {}
  static Floats number(uint16_t x) { return _mm512_castsi512_ps(_mm512_set1_epi32((uint32_t)x << 16)); }
#endif
};

struct FloatPair {
  Floats first, second;
  explicit FloatPair(const float* x) : first(_mm512_set1_ps(x[0])), second(_mm512_set1_ps(x[1])) {}
};

inline Pair pair_of(const uint16_t* x) { return Pair(x); }
inline FloatPair pair_of(const float* x) { return FloatPair(x); }

template <typename X>
inline Floats dot(Floats sum, Bytes weights, const X& x) {
  const Floats first = _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
  const Floats second = _mm512_castsi512_ps(_mm512_and_si512(weights, _mm512_set1_epi32(0xffff0000)));
  return _mm512_fmadd_ps(second, x.second, _mm512_fmadd_ps(first, x.first, sum));
}

#ifdef __AVX512BF16__
inline Floats dot(Floats sum, Bytes weights, const Pair& x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x.both);
}
#endif

// -- decoding -------------------------------------------------------------------------------------

template <int BITS>
struct Decoder;

template <>
struct Decoder<16> {
  static constexpr int num_pairs = 1;
  inline Bytes decode(Bytes chunk, int) const { return chunk; }
};

template <>
struct Decoder<8> {
  static constexpr int num_pairs = 2;
#ifdef __AVX512VBMI__
  Bytes high[2], low[2];  // halves of the bfloat16 numbers 0 to 127
  Decoder() {
    uint8_t tables[4][64];
    for (int number = 0; number < 128; number++) {
      const float value = number;
      uint32_t bits;
      memcpy(&bits, &value, 4);
      tables[number / 64][number % 64] = bits >> 24;
      tables[2 + number / 64][number % 64] = bits >> 16;
    }
    for (int half = 0; half < 2; half++) {
      high[half] = _mm512_loadu_si512(tables[half]);
      low[half] = _mm512_loadu_si512(tables[2 + half]);
    }
  }
  inline Bytes decode(Bytes chunk, int p) const {
    const Bytes above = _mm512_ternarylogic_epi32(
        _mm512_permutex2var_epi8(high[0], chunk, high[1]), chunk, _mm512_set1_epi8((char)0x80), 0xf8);
    const Bytes below = _mm512_permutex2var_epi8(low[0], chunk, low[1]);
    return p == 0 ? _mm512_unpacklo_epi8(below, above) : _mm512_unpackhi_epi8(below, above);
  }
#else
  static inline Bytes number(Bytes lanes) {  // sign and magnitude in the lowest byte -> float32
    const Bytes size = _mm512_and_si512(lanes, _mm512_set1_epi32(0x7f));
    const Bytes sign = _mm512_slli_epi32(_mm512_and_si512(lanes, _mm512_set1_epi32(0x80)), 24);
    return _mm512_or_si512(_mm512_castps_si512(_mm512_cvtepi32_ps(size)), sign);
  }
  static inline Bytes pair(Bytes lanes) {
    return _mm512_or_si512(_mm512_srli_epi32(number(lanes), 16), number(_mm512_srli_epi32(lanes, 8)));
  }
  inline Bytes decode(Bytes chunk, int p) const {
    const Bytes zero = _mm512_setzero_si512();
    return pair(p == 0 ? _mm512_unpacklo_epi16(chunk, zero) : _mm512_unpackhi_epi16(chunk, zero));
  }
#endif
};

template <>
struct Decoder<4> {
  static constexpr int num_pairs = 4;
  Bytes table;  // 16 numbers, twice: the instruction looks at five bits
  Decoder() {
    uint16_t numbers[32];
    for (int number = 0; number < 32; number++) {
      const float value = number % 16;
      uint32_t bits;
      memcpy(&bits, &value, 4);
      numbers[number] = bits >> 16;
    }
    table = _mm512_loadu_si512(numbers);
  }
  inline Bytes decode(Bytes chunk, int p) const {
    return _mm512_permutexvar_epi16(p == 0 ? chunk : _mm512_srli_epi16(chunk, 4 * p), table);
  }
};

// -- scales ---------------------------------------------------------------------------------------

template <int SCALES, bool SIGNED>
inline Floats scales_at(const uint8_t* scales, int64_t index, const float* unit) {
  if constexpr (SCALES == FLOAT32) return _mm512_loadu_ps((const float*)scales + 16 * index);
  if constexpr (SCALES == FLOAT16)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(scales + 32 * index)));
  const __m128i bytes = _mm_loadu_si128((const __m128i*)(scales + 16 * index));
  const Bytes wide = SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_loadu_ps(unit));
}

// -- a block of rows and tiles --------------------------------------------------------------------

inline void store(uint16_t* y, Floats sum, int num) {
  const __mmask16 mask = num >= 16 ? 0xffff : (1 << num) - 1;
#ifdef __AVX512BF16__
  const __m256i out = (__m256i)_mm512_cvtneps_pbh(sum);
#else
  const Bytes bits = _mm512_castps_si512(sum);
  const Bytes odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Bytes sum_of = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __m256i out = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum_of, 16));
#endif
  _mm256_mask_storeu_epi16(y, mask, out);
}

inline void store(float* y, Floats sum, int num) {
  const __mmask16 mask = num >= 16 ? 0xffff : (1 << num) - 1;
  _mm512_mask_storeu_ps(y, mask, sum);
}

template <int BITS, int SCALES, bool SIGNED, bool OFFSETS, int ROWS, int TILES, typename X>
void block(const Matrix& a, const Decoder<BITS>& decoder, const X* x, const float* sums, X* y,
           int64_t tile) {
  constexpr int PAIRS = Decoder<BITS>::num_pairs, INPUTS = 2 * PAIRS;
  constexpr int AHEAD = TILES == 1 ? 4096 : 8192 / TILES;  // bytes of a tile that are asked for early
  const int64_t k_all = a.num_inputs, num_groups = k_all / a.group;
  const int64_t bytes_of_tile = k_all / INPUTS * 64;
  const uint8_t* codes = a.codes + tile * bytes_of_tile;
  Floats total[ROWS][TILES];
  for (int m = 0; m < ROWS; m++)
    for (int t = 0; t < TILES; t++) total[m][t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < num_groups; g++) {
    Floats sum[ROWS][TILES];
    for (int m = 0; m < ROWS; m++)
      for (int t = 0; t < TILES; t++) sum[m][t] = SCALES == ONE ? total[m][t] : _mm512_setzero_ps();
    for (int64_t k = g * a.group; k < (g + 1) * a.group; k += INPUTS) {
      Bytes chunks[TILES];
      for (int t = 0; t < TILES; t++) {
        const uint8_t* here = codes + t * bytes_of_tile + k / INPUTS * 64;
        _mm_prefetch((const char*)here + AHEAD, _MM_HINT_T0);
        chunks[t] = _mm512_loadu_si512(here);
      }
#pragma GCC unroll 4
      for (int p = 0; p < PAIRS; p++) {
        Bytes weights[TILES];
        for (int t = 0; t < TILES; t++) weights[t] = decoder.decode(chunks[t], p);
        for (int m = 0; m < ROWS; m++) {
          const auto inputs = pair_of(x + m * k_all + k + 2 * p);
          for (int t = 0; t < TILES; t++) sum[m][t] = dot(sum[m][t], weights[t], inputs);
        }
      }
    }
    for (int t = 0; t < TILES; t++) {
      if constexpr (SCALES == ONE) {
        for (int m = 0; m < ROWS; m++) total[m][t] = sum[m][t];
        continue;
      }
      const int64_t at = (tile + t) * num_groups + g;
      const float* unit = nullptr;
      if constexpr (SCALES == BYTES)
        unit = a.units + ((tile + t) * (k_all / a.unit) + g * a.group / a.unit) * 32;
      const Floats scale = scales_at<SCALES, SIGNED>(a.scales, at, unit);
      for (int m = 0; m < ROWS; m++) total[m][t] = _mm512_fmadd_ps(scale, sum[m][t], total[m][t]);
      if constexpr (OFFSETS) {
        const Floats offset = scales_at<SCALES, SIGNED>(a.offsets, at, unit + 16);
        for (int m = 0; m < ROWS; m++)
          total[m][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[m * num_groups + g]), total[m][t]);
      }
    }
  }
  for (int t = 0; t < TILES; t++) {
    const int64_t n = (tile + t) * 16;
    const int num = a.num_outputs - n < 16 ? a.num_outputs - n : 16;
    const __mmask16 mask = num >= 16 ? 0xffff : (1 << num) - 1;
    const Floats bias = a.bias ? _mm512_maskz_loadu_ps(mask, a.bias + n) : _mm512_setzero_ps();
    for (int m = 0; m < ROWS; m++) store(y + m * a.num_outputs + n, _mm512_add_ps(total[m][t], bias), num);
  }
}

// Tiles that are computed together: enough independent sums to hide an instruction's latency, as
// many as there are registers for. One row of bfloat16 waits for memory alone.
constexpr int tiles_for(int rows, int bits) {
  if (rows == 1) return bits == 16 ? 1 : 4;
  return rows == 2 ? 6 : rows <= 4 ? 4 : rows <= 6 ? 3 : 2;
}
constexpr int MOST_ROWS = 8;

template <int BITS, int SCALES, bool SIGNED, bool OFFSETS, int ROWS, typename X>
void some_tiles(const Matrix& a, const Decoder<BITS>& decoder, const X* x, const float* sums, X* y,
                int64_t first, int64_t last) {
  constexpr int TILES = tiles_for(ROWS, BITS);
  int64_t tile = first;
  for (; tile + TILES <= last; tile += TILES)
    block<BITS, SCALES, SIGNED, OFFSETS, ROWS, TILES>(a, decoder, x, sums, y, tile);
  for (; tile < last; tile++) block<BITS, SCALES, SIGNED, OFFSETS, ROWS, 1>(a, decoder, x, sums, y, tile);
}

template <int BITS, int SCALES, bool SIGNED, bool OFFSETS, typename X>
void rows_of_tiles(const Matrix& a, const Decoder<BITS>& decoder, const X* x, const float* sums, X* y,
                   int64_t num_rows, int64_t first, int64_t last) {
  const int64_t num_groups = a.num_inputs / a.group;
  while (num_rows > 0) {
    int64_t now = num_rows <= MOST_ROWS ? num_rows : num_rows < 2 * MOST_ROWS ? (num_rows + 1) / 2 : MOST_ROWS;
#define CASE(R) \
  case R: some_tiles<BITS, SCALES, SIGNED, OFFSETS, R>(a, decoder, x, sums, y, first, last); break;
    switch (now) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
    num_rows -= now;
    x += now * a.num_inputs;
    y += now * a.num_outputs;
    sums += now * num_groups;
  }
}

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <int BITS, int SCALES, bool SIGNED, bool OFFSETS, typename X>
void multiply(const Matrix& a, const X* x, X* y, int64_t num_rows, float* sums) {
  const int64_t num_tiles = (a.num_outputs + 15) / 16;
  if constexpr (OFFSETS) {
    const int64_t num_sums = num_rows * (a.num_inputs / a.group);
    for (int64_t i = 0; i < num_sums; i++) {
      float sum = 0;
      for (int64_t k = 0; k < a.group; k++) sum += as_float(x[i * a.group + k]);
      sums[i] = sum;
    }
  }
  // Pieces are handed out as threads become free: one that has lost its core delays little.
  const int64_t piece = 4 * ((num_tiles / 4 + 8 * omp_get_max_threads() - 1) / (8 * omp_get_max_threads()) + 1);
#pragma omp parallel
  {
    const Decoder<BITS> decoder;
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < num_tiles; first += piece) {
      const int64_t last = first + piece < num_tiles ? first + piece : num_tiles;
      rows_of_tiles<BITS, SCALES, SIGNED, OFFSETS>(a, decoder, x, sums, y, num_rows, first, last);
    }
  }
}

template <typename X>
int product(int bits, int scales, int is_signed, const Matrix& a, const X* x, X* y, int64_t rows, float* sums) {
  const bool offsets = a.offsets != nullptr;
#define FORM(B, S, SIGN, O) \
  if (bits == B && scales == S && is_signed == SIGN && offsets == O) { \
    multiply<B, S, SIGN, O>(a, x, y, rows, sums); \
    return 0; \
  }
  FORM(16, ONE, false, false)
  FORM(8, FLOAT32, false, false)
  FORM(8, FLOAT16, false, false)
  FORM(8, BYTES, true, false)
  FORM(4, FLOAT32, false, true)
  FORM(4, FLOAT16, false, true)
  FORM(4, BYTES, false, true)
#undef FORM
  return 1;
}

}  // namespace

extern "C" int slipstream_product(int bits, int scales, int is_signed, int is_float32, const void* codes,
                                  const void* scales_, const void* offsets, const void* units,
                                  const void* bias, int64_t num_outputs, int64_t num_inputs, int64_t group,
                                  int64_t unit, const void* x, void* y, int64_t rows, void* sums) {
  const Matrix a = {(const uint8_t*)codes, (const uint8_t*)scales_, (const uint8_t*)offsets,
                    (const float*)units, (const float*)bias, num_outputs, num_inputs, group, unit};
  if (is_float32)
    return product(bits, scales, is_signed, a, (const float*)x, (float*)y, rows, (float*)sums);
  return product(bits, scales, is_signed, a, (const uint16_t*)x, (uint16_t*)y, rows, (float*)sums);
}
