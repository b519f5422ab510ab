// The operators between the matrix products of a pass, for CPUs with AVX-512; and a model's layers, which are
// these operators, attention (cpu_attention.cpp) and the products of cpu_products.cpp in order.
//
// Numbers are float32, or bfloat16 that becomes float32 when it is read and is rounded once when it
// is written. Where transformers rounds between two steps (a sum before its norm, an activation
// before its product), so do these. A row's numbers do not depend on other rows.

#include <vector>

#include "cpu_numbers.h"

// Of cpu_products.cpp: y [rows, outputs] = product of x [rows, inputs] with a matrix.
extern "C" int slipstream_product(const void* matrix, int is_float32, const void* x, void* y, int64_t rows);
// Of cpu_attention.cpp: outs [rows, heads * dim] = attention of queries over a layer's keys and values.
#define ATTEND(NAME) \
  extern "C" void slipstream_attend_##NAME(const void* look, const void* queries, const void* keys, const void* values, \
                                           void* outs);
ATTEND(float32)
ATTEND(bfloat16)
#undef ATTEND

namespace {

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
constexpr int64_t GATES_WORTH_THREADS = 1 << 13;

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

// -- layers ---------------------------------------------------------------------------------------

// As cpu_layers.py passes them. Matrices are those of cpu_products.h.
struct Layer {
  const void *qkv, *out, *gate_up, *down;
  const void *head_norm, *before_mlp, *after;  // weights of norms; of queries and keys, or null
  void* cache;
  int64_t kind;  // which of the pass's `looks`
};

struct Pass {
  Heads heads;
  int64_t size, inner;  // of a row of `hidden`; of the feed-forward block
  void *hidden, *normed, *change;  // [rows, size]
  void *qkv, *queries;             // as `turn_and_write` has them
  void *both, *gated;              // [rows, 2 inner], [rows, inner]
  const void *cos, *sin;
  const int64_t* slots;
  const void* const* looks;  // what layers of each kind see
  void* attended;            // [rows, heads * dim]
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

inline void attend(const void* look, const float* queries, const float* keys, const float* values, void* outs) {
  slipstream_attend_float32(look, queries, keys, values, outs);
}
inline void attend(const void* look, const Half* queries, const Half* keys, const Half* values, void* outs) {
  slipstream_attend_bfloat16(look, queries, keys, values, outs);
}

// From attention's outputs to `normed` for the next layer.
template <typename X>
void after_attention(const Layer& a, const Pass& p) {
  multiply<X>(a.out, p.attended, p.change, p);
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
    const X* keys = (const X*)all[i].cache;
    const X* values = keys + p.heads.num_kv_heads * p.heads.num_slots * p.heads.dim;
    attend(p.looks[all[i].kind], (const X*)p.queries, keys, values, p.attended);
    after_attention<X>(all[i], p);
  }
}

// -- a draft head of EAGLE-3 ----------------------------------------------------------------------

// What goes into the layer of such a head: of each row the norm of its token's embedding, behind it the norm of
// its state. `hidden`, to which attention is added, is the state or its norm.
//
//   embeddings  [tokens, dim]
//   hidden      [rows, dim]: states; changed in place if the residual is their norm
//   entering    [rows, 2 dim]
template <typename X>
void enter_head(const X* embeddings, const int64_t* ids, const X* of_embedding, const X* of_state, X* hidden,
                X* entering, int64_t rows, int64_t dim, float epsilon, int64_t residual_is_normed) {
  for (int64_t m = 0; m < rows; m++, hidden += dim, entering += 2 * dim) {
    norm(embeddings + ids[m] * dim, of_embedding, entering, dim, epsilon);
    norm(hidden, of_state, entering + dim, dim, epsilon);
    if (residual_is_normed) memcpy(hidden, entering + dim, dim * sizeof(X));
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

#define PARAMETERS(X) (const Layer* all, int64_t first, int64_t last, const Pass* pass)
#define CALL(X) layers<X>(all, first, last, *pass)
BOTH(layers, PARAMETERS, CALL)
#undef PARAMETERS
#undef CALL

#define PARAMETERS(X) \
  (const X* embeddings, const int64_t* ids, const X* of_embedding, const X* of_state, X* hidden, X* entering, \
   int64_t rows, int64_t dim, float epsilon, int64_t residual_is_normed)
#define CALL(X) \
  enter_head<X>(embeddings, ids, of_embedding, of_state, hidden, entering, rows, dim, epsilon, residual_is_normed)
BOTH(enter_head, PARAMETERS, CALL)
