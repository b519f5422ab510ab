// Products of cpu_products.h with inputs of bfloat16, and what other files call.

#include "cpu_products.h"

// Of cpu_products_float32.cpp.
extern "C" int slipstream_product_float32(const void* matrix, const float* x, float* y, int64_t rows);

bool slipstream_one_by_one = false;

// Returns 1 if there are tile registers, and the system lets this process use them.
extern "C" int slipstream_may_use_tiles() {
#ifdef HAS_TILE_REGISTERS
  return may_use_tiles();
#else
  return 0;
#endif
}

// Of 64 bytes, and of `rows` rows (at most 16) for sums and inputs; only if they may be used.
extern "C" void slipstream_shape_tiles(int rows) {
#ifdef HAS_TILE_REGISTERS
  shape_tiles(rows, 0, 64);
#endif
}

extern "C" void slipstream_read_tiles(int are_read_one_by_one) { slipstream_one_by_one = are_read_one_by_one; }

extern "C" int slipstream_product(const void* matrix, int is_float32, const void* x, void* y, int64_t rows) {
  if (is_float32) return slipstream_product_float32(matrix, (const float*)x, (float*)y, rows);
  return product(*(const Matrix*)matrix, (const uint16_t*)x, (uint16_t*)y, rows);
}
