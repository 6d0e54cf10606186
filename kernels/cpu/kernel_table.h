// The vector kernels of the CPU backend behind tables of function pointers, so that the driver is
// compiled once and the instruction set is chosen at run time.
//
// Packed formats. A panel is 32 columns. A right-hand operand B [depth, 32] is stored
//   float:    b[d][32]
//   bf16:     b[d / 2][32][2], two depths interleaved, odd depth padded with zeros
// Left-hand operands are row-major with depth contiguous. Products accumulate in fp32, over depth
// in ascending order, one accumulator per output element: a result does not depend on how rows and
// panels are tiled over threads.
#ifndef SPARSEGDN_KERNELS_CPU_KERNEL_TABLE_H_
#define SPARSEGDN_KERNELS_CPU_KERNEL_TABLE_H_

#include <cstdint>

#include "sparsegdn/types.h"

namespace sparsegdn::cpu {

inline constexpr int kPanel = 32;
inline constexpr int kRows = 64;   // events of a group, tokens of an output tile
inline constexpr int kBlock = 16;  // solver block
static_assert(kRows == kGroup);

// c[m][32] = alpha[m] * sum_d q[m][d] state[d][32] + sum_i probs[m][i] updates[i][32]
// The second sum is in fp32 for either element type: with similar keys the updates of neighbours
// nearly cancel, and rounding them or their weights to bf16 once each leaves 1 % of the output.
template <typename E>
struct OutputArgs {
  const E* q;
  int64_t ldq;
  int rows;
  int depth;                  // head_dim_k, rounded up to even for bf16
  const E* state;             // packed panel
  const float* alpha;         // [rows]
  const float* probs;         // [rows][kRows], 0 where i is not visible
  const int32_t* row_events;  // [rows] events visible to a row, non-decreasing
  const float* updates;       // [kRows][32]
  float* c;                   // [rows][32]
};

// state[d][32] = decay * state[d][32] + sum_i keys_t[d][i] updates[i][32], and its packed copy.
// For bf16 the updates are the sum of two bf16 panels, for the same reason as above.
template <typename E>
struct UpdateArgs {
  const E* keys_t;  // [dim_k][kRows]
  int dim_k;
  int events;            // rounded up to even for bf16
  const E* updates;      // packed panel [kRows, 32], already scaled
  const E* updates_low;  // what rounding took from `updates`; unused for float
  float decay;
  float* state;     // [dim_k][32]
  E* state_packed;  // equals state for float
};

// Matrix-shaped work in one element type.
template <typename E>
struct ProductKernels {
  const char* name;
  // c[m][32] = sum_d a[m][d] b[d][32]
  void (*multiply)(const E* a, int64_t lda, int rows, int depth, const E* b, float* c);
  void (*output)(const OutputArgs<E>& args);
  void (*update)(const UpdateArgs<E>& args);
  void (*pack_state)(const float* state, int dim_k, E* packed);
  // rows [kRows][ld] of gathered keys -> packed panels of K^T (panel_stride apart, events as
  // columns) and keys_t [dim_k][kRows]. Rows from `events` on must be zero.
  void (*pack_keys)(const E* rows, int64_t ld, int dim_k, int64_t panel_stride, E* panels,
                    E* keys_t);
  // factor[i] * u[i] of u [events16][32] as a packed panel, and (bf16 only) its rounding error as
  // another; events16 is a multiple of 16.
  void (*pack_updates)(const float* u, const float* factor, int events16, E* scaled, E* low);
};

struct RhsArgs {
  const void* v;  // element [row 0, head, first column of the panel]
  DType dtype;
  int64_t token_stride;
  const int32_t* rows;  // [events] row of each event
  int events;
  int columns;         // valid columns of the panel, <= 32
  const float* beta;   // [events]
  const float* decay;  // [events] e^{G_i}, times the key's normalisation
  float* c;            // in: K S; out: beta (v - decay * K S); rows up to a multiple of 16 zeroed
};

struct StoreArgs {
  const float* c;  // [rows][32]
  int rows;
  int columns;
  const float* self;  // [rows] factor of v, 0 for events; null: no self term
  const void* v;      // element [first row, head, first column of the panel]
  DType v_dtype;
  int64_t v_stride;
  void* o;
  DType o_dtype;
  int64_t o_stride;
};

// A gate sum as two floats, so that differences keep their digits where sums are large.
struct GateSums {
  const float* hi;
  const float* lo;
};

struct ProbsArgs {
  const float* qk;    // [2 panels][kRows][32]
  GateSums row_gate;  // [rows]
  GateSums event_gate;
  const float* row_factor;    // [rows]
  const float* event_factor;  // [kRows]
  const int32_t* row_events;
  int rows;
  float* probs;  // [kRows][kRows]
};

struct SystemArgs {
  const float* kk;  // [2 panels][kRows][32] k_i . k_j
  GateSums gate;    // [events], padded to kRows
  const float* beta;
  const float* norm;  // [kRows] factor of each key
  int events;
  float* system;  // [kRows][kRows], strictly lower triangle, rows to a multiple of 16 zeroed
};

// Everything else, in fp32.
struct VectorKernels {
  const char* target;
  ProductKernels<float> product;
  void (*exp_inplace)(float* x, int n);
  // out[r][0..dim) of gathered rows, widened; ld floats apart.
  void (*load_rows)(const void* x, DType dtype, int64_t stride, const int32_t* rows, int n, int dim,
                    float* out, int64_t ld);
  // out[r] = sum_d x[r][d] y[r][d] for n consecutive rows.
  void (*row_dots)(const void* x, int64_t x_stride, const void* y, int64_t y_stride, DType dtype,
                   int n, int dim, float* out);
  void (*rhs)(const RhsArgs& args);
  void (*store)(const StoreArgs& args);
  void (*probs)(const ProbsArgs& args);
  void (*system)(const SystemArgs& args);
  // Inverse of (I + diagonal block b) for every block, [4][16][16].
  void (*invert_blocks)(const float* system, int blocks, float* inverse);
  // In place on a panel [blocks * 16][32]: the solution with all blocks, or with those that
  // BLOCK_ADJACENT keeps.
  void (*solve)(const float* system, const float* inverse, int blocks, bool adjacent, float* panel);
  // |v| by selection_math.h's RowNorm, bit for bit.
  float (*row_norm)(const void* v, DType dtype, int dim);
};

// The best of what this CPU runs.
const VectorKernels& GetVectorKernels();
// Null where the CPU or the compiler has no bf16 dot products.
const ProductKernels<uint16_t>* GetBf16Kernels();

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_KERNEL_TABLE_H_
