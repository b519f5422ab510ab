// Products of cpu_products.h with inputs of float32.

#include "cpu_products.h"

extern "C" int slipstream_product_float32(const void* matrix, const float* x, float* y, int64_t rows) {
  return product(*(const Matrix*)matrix, x, y, rows);
}
