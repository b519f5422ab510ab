// Products of a few rows with a quantised, bfloat16 or float32 matrix, for CPUs with AVX-512.
//
// y[m, n] = bias[n] + sum over groups g of
//           scale[n, g] * sum over k in g of x[m, k] * code[n, k]  +  offset[n, g] * sum over k in g of x[m, k]
//
// A CPU with instructions for 8-bit integers multiplies codes as they are: the inputs of a group
// become whole numbers of two digits to the base 256, from -128 to 127 each, times a power of two.
// That is exact for bfloat16 numbers down to 1/128 of the group's largest, and wrong by less than
// 1/32000 of the largest below. Sums of digits are exact. Everything else is float32.
//
// Layout. Outputs lie in tiles of 16, which are the 16 lanes of a register; nothing is ever summed
// across lanes. Of a tile, 64 bytes hold
//
//     float32    1 input    32-bit lane n: the input of output n
//     bfloat16   2 inputs   32-bit lane n: inputs 0, 1 of output n
//     8 bits     4 inputs   byte 4 n + j: the code of input j of output n
//     4 bits     8 inputs   byte 4 n + j: the codes of input j (lower half) and 4 + j of output n
//
// which is what instructions for integers and for bfloat16 take, and AMX, 16 such registers at a time.
//
// A code of 8 bits is signed. One of 4 bits is from 0 to 15; without offsets 8 stands for zero. Scales
// and offsets of a tile lie by group, 16 numbers each: float32, float16, or bytes that are multiplied
// with a float32 unit, one for several groups (GGUF's K formats).

// Each type of inputs has a file of its own (cpu_products.cpp: bfloat16; cpu_products_float32.cpp), so that the
// compiler is never long at one.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

// Whether tiles of codes are read one by one, or as many together as `tiles` says. It changes no number. Of some
// processors memory delivers one stream of bytes faster than several, others hide the latency of sums only by several.
extern bool slipstream_one_by_one;

namespace {

enum Scales { ONE, FLOAT32, FLOAT16, UINT8, INT8 };

// As cpu_products.py passes it.
struct Matrix {
  int32_t bits, form;      // of a weight: 32 (float32), 16 (bfloat16), 8 or 4; of scales
  const uint8_t* codes;    // [tiles][inputs / per chunk][64]
  const uint8_t* scales;   // [tiles][groups][16]
  const uint8_t* offsets;  // the same, or null
  const float* units;      // of bytes: [tiles][inputs / unit][2][16]: of scales, of offsets
  const float* bias;       // [outputs], or null
  int64_t num_outputs, num_inputs, group, unit;
};

typedef __m512 Floats;
typedef __m512i Bytes;

#define UNROLLED _Pragma("GCC unroll 16")

constexpr int DIGITS = 2;
constexpr int MOST = 127 * 256 + 127;  // of two digits
constexpr int inputs_of_chunk(int bits) { return 32 / bits; }

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline Floats floats_at(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline Floats floats_at(const uint16_t* x, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

// -- inputs ---------------------------------------------------------------------------------------

template <typename X>
struct Inputs {
  const X* x;  // [rows][inputs]
  int64_t num_rows, num_inputs, group;
  std::vector<int8_t> digits;   // [groups][rows][DIGITS][group], the lowest digit first
  std::vector<int32_t> starts;  // [groups][rows][DIGITS]: -128 times the sum of the digits
  std::vector<float> units;     // [groups][rows][DIGITS]: what a digit counts
  std::vector<float> sums;      // [groups][rows]: of inputs

  void take(const Matrix& a, const X* x_, int64_t rows) {
    x = x_, num_rows = rows, num_inputs = a.num_inputs, group = a.group;
  }

  void add_up() {
    sums.resize(num_inputs / group * num_rows);
    for (int64_t m = 0; m < num_rows; m++)
      for (int64_t k = 0; k < num_inputs; k += group) {
        float sum = 0;
        for (int64_t i = 0; i < group; i++) sum += as_float(x[m * num_inputs + k + i]);
        sums[k / group * num_rows + m] = sum;
      }
  }

#ifdef __AVX512VNNI__
  void make_room() {
    const int64_t num = num_inputs / group * num_rows;
    digits.resize(num * DIGITS * group);
    starts.resize(num * DIGITS);
    units.resize(num * DIGITS);
    sums.resize(num);
  }

  // Makes digits of the inputs. `part`: what the numbers that they are multiplied with count.
  // `adds_up`: `starts` and `sums` are needed too. Threads of a parallel region share the work.
  void split(float part, bool adds_up) {
    const int64_t num_groups = num_inputs / group;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_rows * num_groups; i++) split_group(i / num_groups, i % num_groups, part, adds_up);
  }

  void split_group(int64_t m, int64_t g, float part, bool adds_up) {
    const X* from = x + m * num_inputs + g * group;
    const int64_t at = g * num_rows + m;
    int8_t* to = digits.data() + at * DIGITS * group;
    const auto mask_at = [&](int64_t k) { return (__mmask16)(group - k >= 16 ? 0xffff : (1 << (group - k)) - 1); };
    Bytes largest = _mm512_setzero_si512();
    for (int64_t k = 0; k < group; k += 16) {
      const Bytes bits = _mm512_castps_si512(floats_at(from + k, mask_at(k)));
      largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    // The largest is of 2^14 to 2^15 units; of a group of smaller numbers, as if it had one of 2^-63.
    uint32_t exponent = (uint32_t)_mm512_reduce_max_epi32(largest) >> 23;
    const bool is_finite = exponent < 255;
    if (exponent < 64) exponent = 64;
    const uint32_t up_bits = (268 - exponent) << 23, unit_bits = is_finite ? (exponent - 14) << 23 : 0x7fc00000;
    float up, unit;
    memcpy(&up, &up_bits, 4);
    memcpy(&unit, &unit_bits, 4);
    // A digit from -128 to 127 is a byte of the number plus 128 at each place, less 128.
    const Bytes halves = _mm512_set1_epi32(0x8080), most = _mm512_set1_epi32(MOST);
    const Bytes by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const Bytes together = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    Bytes sum[DIGITS] = {};
    for (int64_t k = 0; k < group; k += 16) {
      const __mmask16 mask = mask_at(k);
      const Floats scaled = _mm512_mul_ps(floats_at(from + k, mask), _mm512_set1_ps(up));
      const Bytes nearest = _mm512_cvt_roundps_epi32(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const Bytes bytes = _mm512_xor_si512(_mm512_add_epi32(_mm512_min_epi32(nearest, most), halves), halves);
      const Bytes planes = _mm512_permutexvar_epi32(together, _mm512_shuffle_epi8(bytes, by_digit));
      _mm_mask_storeu_epi8(to + k, mask, _mm512_extracti32x4_epi32(planes, 0));
      _mm_mask_storeu_epi8(to + group + k, mask, _mm512_extracti32x4_epi32(planes, 1));
      if (!adds_up) continue;
      for (int d = 0; d < DIGITS; d++) sum[d] = _mm512_dpbusd_epi32(sum[d], _mm512_set1_epi32(1 << 8 * d), bytes);
    }
    for (int d = 0; d < DIGITS; d++) units[at * DIGITS + d] = unit * part * (1 << 8 * d);
    if (!adds_up) return;
    int64_t whole = 0;
    for (int d = DIGITS - 1; d >= 0; d--) {
      const int32_t of_digit = _mm512_reduce_add_epi32(sum[d]);
      starts[at * DIGITS + d] = -128 * of_digit;
      whole = whole * 256 + of_digit;
    }
    sums[at] = (float)whole * unit;
  }
#endif
};

// -- sums over a group ----------------------------------------------------------------------------
//
// Each way to add up the products of a group has the most rows that it computes together, the tiles
// that go with them (enough independent sums to hide an instruction's latency, as many as there are
// registers for), and sums of ROWS rows and TILES tiles: `add` computes them, `value` is one.

// Codes of some tiles, read from the first input on.
struct Codes {
  const uint8_t* at;
  int64_t bytes_of_tile;
  int64_t early;  // how much further on memory is asked for

  // `done` bytes of each tile have been read. What lies beyond the end of a tile is asked for where
  // the next tiles lie, which are read after these.
  static Codes of(const uint8_t* codes, int tiles, int64_t bytes_of_tile, int64_t done) {
    const int64_t early = tiles == 1 ? 4096 : 8192 / tiles;
    return {codes + done, bytes_of_tile, early + (done + early < bytes_of_tile ? 0 : (tiles - 1) * bytes_of_tile)};
  }

  inline const uint8_t* tile(int t) const { return at + t * bytes_of_tile; }
  inline void ask(int t, int64_t offset) const { _mm_prefetch((const char*)tile(t) + early + offset, _MM_HINT_T0); }
  inline Bytes chunk(int t, int64_t offset) const {
    ask(t, offset);
    return _mm512_loadu_si512(tile(t) + offset);
  }
};

// In float32: for inputs of float32, and where nothing better is there.
template <int BITS, typename X>
struct InFloats {
  // Weights of float32 take no work to read, so that more rows share what memory delivers.
  static constexpr int most_rows = BITS == 32 ? 12 : 8;
  static constexpr int tiles(int rows) { return rows == 1 ? 4 : rows == 2 ? 6 : rows <= 4 ? 4 : rows <= 6 ? 3 : 2; }

  static inline Floats number(Bytes chunk, int i) {
    if constexpr (BITS == 32) return _mm512_castsi512_ps(chunk);
    if constexpr (BITS == 16)
      return _mm512_castsi512_ps(i ? _mm512_and_si512(chunk, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(chunk, 16));
    if constexpr (BITS == 8) return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(chunk, 24 - 8 * i), 24));
    const int shift = 8 * (i % 4) + i / 4 * 4;
    const Bytes code = _mm512_and_si512(_mm512_srli_epi32(chunk, shift), _mm512_set1_epi32(15));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(8)));
  }

  template <int ROWS, int TILES>
  struct Sums {
    Floats sum[ROWS][TILES];

    inline void add(const Inputs<X>& in, int64_t row, int64_t g, const Codes& codes) {
      constexpr int NUM = inputs_of_chunk(BITS);
      for (int m = 0; m < ROWS; m++)
        for (int t = 0; t < TILES; t++) sum[m][t] = _mm512_setzero_ps();
      const X* x = in.x + row * in.num_inputs + g * in.group;
      for (int64_t k = 0, at = 0; k < in.group; k += NUM, at += 64) {
        Bytes chunks[TILES];
        for (int t = 0; t < TILES; t++) chunks[t] = codes.chunk(t, at);
#pragma GCC unroll 8
        for (int i = 0; i < NUM; i++) {
          Floats weights[TILES];
          for (int t = 0; t < TILES; t++) weights[t] = number(chunks[t], i);
          for (int m = 0; m < ROWS; m++) {
            Floats input = _mm512_set1_ps(as_float(x[m * in.num_inputs + k + i]));
            if constexpr (BITS == 32) asm("" : "+v"(input));  // in a register, as in `InPairs`
            for (int t = 0; t < TILES; t++) sum[m][t] = _mm512_fmadd_ps(weights[t], input, sum[m][t]);
          }
        }
      }
    }

    inline Floats value(const Inputs<X>&, int64_t, int64_t, int m, int t) const { return sum[m][t]; }
  };
};

#ifdef __AVX512BF16__
// Weights of bfloat16, by the instruction for two products. One row waits for memory alone.
struct InPairs {
  static constexpr int most_rows = 12;
  static constexpr int tiles(int rows) { return rows == 1 ? 1 : InFloats<16, uint16_t>::tiles(rows); }

  template <int ROWS, int TILES>
  struct Sums {
    Floats sum[ROWS][TILES];

    inline void add(const Inputs<uint16_t>& in, int64_t row, int64_t g, const Codes& codes) {
      for (int m = 0; m < ROWS; m++)
        for (int t = 0; t < TILES; t++) sum[m][t] = _mm512_setzero_ps();
      const uint16_t* x = in.x + row * in.num_inputs + g * in.group;
      for (int64_t k = 0, at = 0; k < in.group; k += 2, at += 64) {
        Bytes chunks[TILES];
        for (int t = 0; t < TILES; t++) chunks[t] = codes.chunk(t, at);
        for (int m = 0; m < ROWS; m++) {
          int32_t bits;
          memcpy(&bits, x + m * in.num_inputs + k, 4);
          Bytes both = _mm512_set1_epi32(bits);
          asm("" : "+v"(both));  // in a register: reading it anew for each tile takes twice as long
          for (int t = 0; t < TILES; t++) sum[m][t] = _mm512_dpbf16_ps(sum[m][t], (__m512bh)chunks[t], (__m512bh)both);
        }
      }
    }

    inline Floats value(const Inputs<uint16_t>&, int64_t, int64_t, int m, int t) const { return sum[m][t]; }
  };
};
#endif

#ifdef __AVX512VNNI__
// Returns what sums of digits come to.
inline Floats number_of(const float* units, Bytes low, Bytes high) {
  const Floats lower = _mm512_mul_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(units[0]));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(units[1]), lower);
}

// Adds products of unsigned codes and signed digits. The compiler's own function copies every sum.
inline void add_products(Bytes& sum, Bytes codes, Bytes digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digits));
}

// Returns codes as bytes: those of 8 bits, or of a half of those of 4 bits 16 times less 8.
// With IS_MORE each byte is 128 more, which makes it unsigned.
template <int BITS, bool IS_MORE>
inline Bytes codes_of(Bytes chunk, int half) {
  const Bytes top = _mm512_set1_epi8((char)128);
  if constexpr (BITS == 8) return IS_MORE ? _mm512_xor_si512(chunk, top) : chunk;
  const Bytes here = half ? chunk : _mm512_slli_epi16(chunk, 4), upper = _mm512_set1_epi8((char)240);
  return IS_MORE ? _mm512_and_si512(here, upper) : _mm512_ternarylogic_epi32(here, upper, top, 0x6a);
}

// Codes of 8 and 4 bits, times digits.
template <int BITS>
struct InDigits {
  static constexpr int most_rows = 8;
  static constexpr int tiles(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 3 ? 2 : 1; }

  template <int ROWS, int TILES>
  struct Sums {
    Bytes sum[ROWS][DIGITS][TILES];

    // All loops over rows, digits and tiles are unrolled, and the sums are variables of this function:
    // else the compiler keeps them in memory, and eight rows take twice as long.
    inline void add(const Inputs<uint16_t>& in, int64_t row, int64_t g, const Codes& codes) {
      constexpr int NUM = inputs_of_chunk(BITS);
      const int64_t at = (g * in.num_rows + row) * DIGITS;
      Bytes now[ROWS][DIGITS][TILES];
      UNROLLED for (int m = 0; m < ROWS; m++)
        UNROLLED for (int d = 0; d < DIGITS; d++)
          UNROLLED for (int t = 0; t < TILES; t++) now[m][d][t] = _mm512_set1_epi32(in.starts[at + m * DIGITS + d]);
      const int8_t* digits = in.digits.data() + at * in.group;
      for (int64_t k = 0, at = 0; k < in.group; k += NUM, at += 64) {
        Bytes chunks[TILES];
        UNROLLED for (int t = 0; t < TILES; t++) chunks[t] = codes.chunk(t, at);
#pragma GCC unroll 2
        for (int half = 0; half < NUM / 4; half++) {
          Bytes weights[TILES];
          UNROLLED for (int t = 0; t < TILES; t++) weights[t] = codes_of<BITS, true>(chunks[t], half);
          UNROLLED for (int m = 0; m < ROWS; m++)
            UNROLLED for (int d = 0; d < DIGITS; d++) {
              int32_t four;
              memcpy(&four, digits + (m * DIGITS + d) * in.group + k + 4 * half, 4);
              const Bytes digit = _mm512_set1_epi32(four);
              UNROLLED for (int t = 0; t < TILES; t++) add_products(now[m][d][t], weights[t], digit);
            }
        }
      }
      UNROLLED for (int m = 0; m < ROWS; m++)
        UNROLLED for (int d = 0; d < DIGITS; d++)
          UNROLLED for (int t = 0; t < TILES; t++) sum[m][d][t] = now[m][d][t];
    }

    inline Floats value(const Inputs<uint16_t>& in, int64_t row, int64_t g, int m, int t) const {
      const float* units = in.units.data() + (g * in.num_rows + row + m) * DIGITS;
      return number_of(units, sum[m][0][t], sum[m][1][t]);
    }
  };
};
#endif

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__)
#define HAS_TILE_REGISTERS

// The system hands out AMX's tile registers to a process that asks for them.
inline bool may_use_tiles() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return may;
}

// Tile registers 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights.
inline void shape_tiles(int rows, int more_rows, int bytes_of_row) {
  struct alignas(64) {
    uint8_t palette, start_row, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {};
  shape.palette = 1;
  const bool is_single = more_rows == 0;
  for (int tile = 0; tile < 8; tile++) {
    const bool is_second = !is_single && (tile == 1 || tile == 3 || tile == 5);
    shape.bytes[tile] = tile == 4 || tile == 5 ? bytes_of_row : 64;
    shape.rows[tile] = tile >= 6 ? bytes_of_row / 4 : is_second ? more_rows : rows;
  }
  asm volatile("" ::"r"(&shape) : "memory");  // the compiler believes that only eight bytes are read
  _tile_loadconfig(&shape);
}

// Codes of 8 and 4 bits, times digits, in AMX's tile registers: of at most 16 rows of digits each.
template <int BITS>
struct DigitsInTiles {
  static constexpr int most_rows = 16;
  static constexpr int parts(int rows) { return rows * DIGITS > 16 ? 2 : 1; }
  static constexpr int tiles(int rows) { return 4 / parts(rows); }
  static int64_t step(int64_t group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16; }
  static void shape(const Inputs<uint16_t>& in, int rows) {
    const int all = rows * DIGITS;
    shape_tiles(all < 16 ? all : 16, all > 16 ? all - 16 : 0, step(in.group));
  }

  template <int ROWS, int TILES>
  struct Sums {
    static constexpr int PARTS = parts(ROWS);
    alignas(64) int32_t sum[2][TILES][PARTS * 16][16];  // of even and odd groups
    alignas(64) uint8_t room[2][TILES][1024];           // codes of 4 bits as bytes: of even and odd steps

    inline void add(const Inputs<uint16_t>& in, int64_t row, int64_t g, const Codes& codes) {
      const int64_t group = in.group, by = step(group), num_steps = in.num_inputs / by;
      const int8_t* digits = in.digits.data() + (g * in.num_rows + row) * DIGITS * group;
      const int64_t bytes = by * BITS * 2;  // of a tile and a step
      const auto weights = [&](int64_t number, int64_t k, int t) -> const void* {
        if constexpr (BITS == 4) return room[number % 2][t];
        const int64_t here = k / by * bytes;
        for (int64_t line = 0; line < bytes; line += 64) codes.ask(t, here + line);
        return codes.tile(t) + here;
      };
      if (BITS == 4 && g == 0) unpack(0, codes, 0, by);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0, number = g * group / by; k < group; k += by, number++) {
        _tile_loadd(4, digits + k, group);
        if constexpr (PARTS == 2) _tile_loadd(5, digits + 16 * group + k, group);
#define TILE(T, WEIGHTS, SUM, MORE) \
  if constexpr (T < TILES) { \
    _tile_loadd(WEIGHTS, weights(number, k, T), 64); \
    _tile_dpbssd(SUM, 4, WEIGHTS); \
    if constexpr (PARTS == 2) _tile_dpbssd(MORE, 5, WEIGHTS); \
  }
        if constexpr (PARTS == 1) {
          TILE(0, 6, 0, 0)
          TILE(1, 7, 1, 1)
          TILE(2, 6, 2, 2)
          TILE(3, 7, 3, 3)
        } else {
          TILE(0, 6, 0, 1)
          TILE(1, 7, 2, 3)
        }
#undef TILE
        if (BITS == 4 && number + 1 < num_steps) unpack(number + 1, codes, (k / by + 1) * bytes, by);
      }
      auto& to = sum[g % 2];
      if constexpr (PARTS == 1) {
        _tile_stored(0, to[0], 64);
        if constexpr (TILES > 1) _tile_stored(1, to[1], 64);
        if constexpr (TILES > 2) _tile_stored(2, to[2], 64);
        if constexpr (TILES > 3) _tile_stored(3, to[3], 64);
      } else {
        _tile_stored(0, to[0], 64);
        _tile_stored(1, to[0][16], 64);
        if constexpr (TILES > 1) _tile_stored(2, to[1], 64);
        if constexpr (TILES > 1) _tile_stored(3, to[1][16], 64);
      }
    }

    // Writes the codes of a step as tile registers take them. That is done one step early: a tile
    // register is loaded from the cache, and waits until what was just written has arrived there.
    inline void unpack(int64_t number, const Codes& codes, int64_t at, int64_t by) {
      for (int t = 0; t < TILES; t++) {
        uint8_t* to = room[number % 2][t];
        for (int64_t k = 0; k < by; k += 8, to += 128) {
          const Bytes chunk = codes.chunk(t, at + k * 8);
          _mm512_store_si512(to, codes_of<4, false>(chunk, 0));
          _mm512_store_si512(to + 64, codes_of<4, false>(chunk, 1));
        }
      }
      asm volatile("" ::: "memory");
    }

    inline Floats value(const Inputs<uint16_t>& in, int64_t row, int64_t g, int m, int t) const {
      const float* units = in.units.data() + (g * in.num_rows + row + m) * DIGITS;
      const auto sum_of = [&](int d) { return _mm512_load_si512(sum[g % 2][t][m * DIGITS + d]); };
      return number_of(units, sum_of(0), sum_of(1));
    }
  };
};

// Weights of bfloat16 in AMX's tile registers, however many rows there are.
struct PairsInTiles {
  static constexpr int most_rows = 16;
  static constexpr int tiles(int) { return 4; }
  static void shape(const Inputs<uint16_t>&, int rows) { shape_tiles(rows, 0, 64); }

  template <int ROWS, int TILES>
  struct Sums {
    alignas(64) float sum[TILES][ROWS][16];

    inline void add(const Inputs<uint16_t>& in, int64_t row, int64_t, const Codes& codes) {
      const uint16_t* x = in.x + row * in.num_inputs;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < in.num_inputs; k += 32) {
        const Codes here = Codes::of(codes.at, TILES, codes.bytes_of_tile, 32 * k);
        _tile_loadd(4, x + k, in.num_inputs * 2);
#define TILE(T, WEIGHTS) \
  if constexpr (T < TILES) { \
    for (int line = 0; line < 1024; line += 64) here.ask(T, line); \
    _tile_loadd(WEIGHTS, here.tile(T), 64); \
    _tile_dpbf16ps(T, 4, WEIGHTS); \
  }
        TILE(0, 6)
        TILE(1, 7)
        TILE(2, 6)
        TILE(3, 7)
#undef TILE
      }
      _tile_stored(0, sum[0], 64);
      if constexpr (TILES > 1) _tile_stored(1, sum[1], 64);
      if constexpr (TILES > 2) _tile_stored(2, sum[2], 64);
      if constexpr (TILES > 3) _tile_stored(3, sum[3], 64);
    }

    inline Floats value(const Inputs<uint16_t>&, int64_t, int64_t, int m, int t) const { return _mm512_load_ps(sum[t][m]); }
  };
};
#endif

// -- scales ---------------------------------------------------------------------------------------

// Returns the scales, or the offsets, of a tile and a group.
inline Floats scales_at(const Matrix& a, const uint8_t* scales, int64_t tile, int64_t g) {
  const int64_t at = tile * (a.num_inputs / a.group) + g;
  if (a.form == FLOAT32) return _mm512_loadu_ps((const float*)scales + 16 * at);
  if (a.form == FLOAT16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(scales + 32 * at)));
  const int64_t unit = 2 * (tile * (a.num_inputs / a.unit) + g * a.group / a.unit) + (scales == a.offsets);
  const __m128i bytes = _mm_loadu_si128((const __m128i*)(scales + 16 * at));
  const Bytes wide = a.form == INT8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_loadu_ps(a.units + 16 * unit));
}

// Asks memory for the scales of some tiles, which are soon needed.
inline void ask_for_scales(const Matrix& a, int64_t tile, int64_t num_tiles) {
  const auto ask = [&](const void* memory, int64_t bytes) {
    if (memory == nullptr) return;
    for (int64_t k = 0; k < bytes * num_tiles; k += 64)
      _mm_prefetch((const char*)memory + bytes * tile + k, _MM_HINT_T0);
  };
  const int64_t num_scales = 16 * (a.num_inputs / a.group);
  const int64_t bytes = a.form == ONE ? 0 : a.form == FLOAT32 ? 4 : a.form == FLOAT16 ? 2 : 1;
  ask(a.scales, bytes * num_scales);
  ask(a.offsets, bytes * num_scales);
  ask(a.units, a.num_inputs / a.unit * 2 * 16 * 4);
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

// What is computed: bits of a weight, the way to add up a group's products, the type of inputs.
template <int BITS_, class Way_, typename X_>
struct Kind {
  static constexpr int BITS = BITS_;
  typedef Way_ Way;
  typedef X_ X;
};

template <class K, int ROWS, int TILES>
void block(const Matrix& a, const Inputs<typename K::X>& in, typename K::X* y, int64_t row, int64_t tile) {
  const int64_t num_groups = a.num_inputs / a.group;
  const int64_t bytes_of_group = a.group / inputs_of_chunk(K::BITS) * 64;
  const int64_t bytes_of_tile = num_groups * bytes_of_group;
  ask_for_scales(a, tile + TILES, TILES);
  // Sums that lie in memory are read after those of the next group are begun: they take long.
  constexpr bool IN_MEMORY = requires { K::Way::shape(in, ROWS); };
  typename K::Way::template Sums<ROWS, TILES> sums;
  const auto begin = [&](int64_t g) {
    sums.add(in, row, g, Codes::of(a.codes + tile * bytes_of_tile, TILES, bytes_of_tile, g * bytes_of_group));
  };
  Floats total[ROWS][TILES];
  for (int m = 0; m < ROWS; m++)
    for (int t = 0; t < TILES; t++) total[m][t] = _mm512_setzero_ps();
  if (IN_MEMORY) begin(0);
  for (int64_t g = 0; g < num_groups; g++) {
    if (g + IN_MEMORY < num_groups) begin(g + IN_MEMORY);
    for (int t = 0; t < TILES; t++) {
      if constexpr (K::BITS >= 16) {
        for (int m = 0; m < ROWS; m++) total[m][t] = sums.value(in, row, g, m, t);
        continue;
      }
      const Floats scale = scales_at(a, a.scales, tile + t, g);
      for (int m = 0; m < ROWS; m++) total[m][t] = _mm512_fmadd_ps(scale, sums.value(in, row, g, m, t), total[m][t]);
      if (a.offsets == nullptr) continue;
      Floats offset = scales_at(a, a.offsets, tile + t, g);
      if constexpr (K::BITS == 4) offset = _mm512_fmadd_ps(scale, _mm512_set1_ps(8), offset);
      for (int m = 0; m < ROWS; m++)
        total[m][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(in.sums[g * in.num_rows + row + m]), total[m][t]);
    }
  }
  for (int t = 0; t < TILES; t++) {
    const int64_t n = (tile + t) * 16;
    const int num = a.num_outputs - n < 16 ? a.num_outputs - n : 16;
    const __mmask16 mask = num >= 16 ? 0xffff : (1 << num) - 1;
    const Floats bias = a.bias ? _mm512_maskz_loadu_ps(mask, a.bias + n) : _mm512_setzero_ps();
    for (int m = 0; m < ROWS; m++) store(y + (row + m) * a.num_outputs + n, _mm512_add_ps(total[m][t], bias), num);
  }
}

template <class K, int ROWS>
void some_tiles(const Matrix& a, const Inputs<typename K::X>& in, typename K::X* y, int64_t row, int64_t first,
                int64_t last) {
  if constexpr (ROWS <= K::Way::most_rows) {
    constexpr int TILES = K::Way::tiles(ROWS);
    if constexpr (requires { K::Way::shape(in, ROWS); }) K::Way::shape(in, ROWS);
    constexpr bool MAY_BE_ONE_BY_ONE = K::BITS <= 8 && !requires { K::Way::shape(in, ROWS); };
    int64_t tile = first;
    if (!(MAY_BE_ONE_BY_ONE && slipstream_one_by_one)) {
      for (; tile + TILES <= last; tile += TILES) block<K, ROWS, TILES>(a, in, y, row, tile);
      if constexpr (TILES == 8)
        for (; tile + 4 <= last; tile += 4) block<K, ROWS, 4>(a, in, y, row, tile);
    }
    for (; tile < last; tile++) block<K, ROWS, 1>(a, in, y, row, tile);
  }
}

template <class K>
void rows_of_tiles(const Matrix& a, const Inputs<typename K::X>& in, typename K::X* y, int64_t first, int64_t last) {
  constexpr int64_t MOST = K::Way::most_rows;
  for (int64_t row = 0, now; row < in.num_rows; row += now) {
    const int64_t left = in.num_rows - row;
    now = left <= MOST ? left : left < 2 * MOST ? (left + 1) / 2 : MOST;
    switch (now) {
#define CASE(R) \
  case R: some_tiles<K, R>(a, in, y, row, first, last); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
      CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#undef CASE
    }
  }
}

// `prepare` makes of the inputs what the way reads.
template <class K, class Prepare>
void all_tiles(const Matrix& a, const Inputs<typename K::X>& in, typename K::X* y, const Prepare& prepare) {
  const int64_t num_tiles = (a.num_outputs + 15) / 16, num_threads = omp_get_max_threads();
  // Pieces are handed out as threads become free: one that has lost its core delays little. As many
  // large ones as come out even, then small ones.
  const int64_t large = 8 * (num_tiles / (64 * num_threads) + 1), small = 4;
  const int64_t num_large = num_tiles / large / num_threads * num_threads, rest = large * num_large;
  const int64_t num_pieces = num_large + (num_tiles - rest + small - 1) / small;
  if (in.num_rows == 1) prepare();  // too little to share
#pragma omp parallel
  {
    if (in.num_rows > 1) prepare();
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < num_pieces; i++) {
      const int64_t first = i < num_large ? i * large : rest + (i - num_large) * small;
      const int64_t last = first + (i < num_large ? large : small);
      rows_of_tiles<K>(a, in, y, first, last < num_tiles ? last : num_tiles);
    }
#ifdef HAS_TILE_REGISTERS
    if constexpr (requires { K::Way::shape(in, 1); }) _tile_release();
#endif
  }
}

// -- the form and the way -------------------------------------------------------------------------

template <int BITS>
void multiply(const Matrix& a, const uint16_t* x, uint16_t* y, int64_t num_rows) {
  static thread_local Inputs<uint16_t> kept;  // so that memory is not allocated anew
  Inputs<uint16_t>& in = kept;                // this thread's, in all threads
  in.take(a, x, num_rows);
#define BY(...) return all_tiles<Kind<BITS, __VA_ARGS__, uint16_t>>(a, in, y, prepare)
  if constexpr (BITS == 16) {
    const auto prepare = [] {};
#ifdef HAS_TILE_REGISTERS
    if (a.num_inputs % 32 == 0 && may_use_tiles()) BY(PairsInTiles);
#endif
#ifdef __AVX512BF16__
    BY(InPairs);
#else
    BY(InFloats<BITS, uint16_t>);
#endif
  } else {
#ifdef __AVX512VNNI__
    bool has_tiles = false;
#ifdef HAS_TILE_REGISTERS
    // Of one row, the other way is faster.
    has_tiles = num_rows > 1 && a.group % 16 == 0 && may_use_tiles();
#endif
    in.make_room();
    const auto prepare = [&] { in.split(BITS == 8 ? 1 : 1.f / 16, !has_tiles || a.offsets); };
#ifdef HAS_TILE_REGISTERS
    if (has_tiles) BY(DigitsInTiles<BITS>);
#endif
    BY(InDigits<BITS>);
#else
    if (a.offsets) in.add_up();
    const auto prepare = [] {};
    BY(InFloats<BITS, uint16_t>);
#endif
  }
#undef BY
}

template <int BITS>
void multiply(const Matrix& a, const float* x, float* y, int64_t num_rows) {
  static thread_local Inputs<float> in;
  in.take(a, x, num_rows);
  if (a.offsets) in.add_up();
  all_tiles<Kind<BITS, InFloats<BITS, float>, float>>(a, in, y, [] {});
}

constexpr int64_t MOST_AT_ONCE = 256;  // rows whose digits are kept at a time

template <typename X>
int product(const Matrix& a, const X* x, X* y, int64_t rows) {
  if ((a.bits >= 16) != (a.form == ONE) || (a.bits == 32 && sizeof(X) != 4)) return 1;
  for (int64_t now; rows > 0; rows -= now, x += now * a.num_inputs, y += now * a.num_outputs) {
    now = rows < MOST_AT_ONCE ? rows : MOST_AT_ONCE;
    if constexpr (sizeof(X) == 4)
      if (a.bits == 32) multiply<32>(a, x, y, now);
    if (a.bits == 16) multiply<16>(a, x, y, now);
    if (a.bits == 8) multiply<8>(a, x, y, now);
    if (a.bits == 4) multiply<4>(a, x, y, now);
  }
  return 0;
}

}  // namespace
