// The vectorised inner functions of the CPU operations. Each picks the best instruction set of
// this machine at run time. All are single-threaded and touch only what their arguments name.
#ifndef SPARSEGDN_KERNELS_CPU_OPS_OPS_KERNELS_H_
#define SPARSEGDN_KERNELS_CPU_OPS_OPS_KERNELS_H_

#include <cstdint>

#include "sparsegdn/ops.h"

namespace sparsegdn::cpu_ops {

// Columns of a panel: one cache line of BF16.
inline constexpr int kPanel = 32;

// c[r][0..32) (+)= sum_d a[r][d] b[d][0..32), one accumulator per element, d ascending.
struct TileArgs {
  const float* a;
  int64_t lda;
  int64_t rows;
  int64_t depth;
  const void* b;  // [depth][32]
  float* c;
  int64_t ldc;
  bool accumulate;  // start from c instead of 0
};
void GemmTileF32(const TileArgs& args);
void GemmTileBf16(const TileArgs& args);

void RmsNormRow(const float* x, const float* weight, float eps, int64_t n, float* y);
void GatedNormRow(const float* o, const float* z, const float* weight, float eps, int64_t n,
                  float* y);
void SwiGluRow(const float* gate, const float* up, int64_t n, float* y);
// x[i] *= scale * sigmoid(gate[i])
void SigmoidGateRow(const float* gate, float scale, int64_t n, float* x);
// x[i + n] and x[i] rotated by cos[i], sin[i].
void RotateRow(const float* cos, const float* sin, int64_t n, float* x);
// sum exp(x - max) and max, for a log-sum-exp; NaN anywhere gives a NaN sum.
void ExpSumRow(const float* x, int64_t n, float* max, double* sum);
bool AllFinite(const float* x, int64_t n);

// y[c] = silu(sum_j taps[j][c] x_j[c]) for one token; x_j are the rows of tokens t - 3 .. t.
struct ConvArgs {
  const float* rows[4];
  const float* taps;  // [4][tap_stride]
  int64_t tap_stride;
  int64_t n;
  float* y;
};
void ConvSiluRow(const ConvArgs& args);

// beta[h] = sigmoid(b[h]); log_gate[h] = -exp(a_log[h]) softplus(a[h] + dt_bias[h])
struct GateArgs {
  const float* a;
  const float* b;
  const float* a_log;
  const float* dt_bias;
  int64_t n;
  float* log_gate;
  float* beta;
};
void GateRow(const GateArgs& args);

// One tile of the online softmax: scores [rows][kKvTile] become probabilities, `visible[r]`
// columns of row r taking part. Updates running maximum and sum; rescales out rows.
struct SoftmaxArgs {
  float* scores;
  int64_t rows;
  const int32_t* visible;  // [rows], may be <= 0
  float* max;              // [rows]
  float* sum;              // [rows]
  float* out;              // [rows][ld_out]
  int64_t ld_out;
};
void SoftmaxTile(const SoftmaxArgs& args);

const char* TargetName();

}  // namespace sparsegdn::cpu_ops

#endif  // SPARSEGDN_KERNELS_CPU_OPS_OPS_KERNELS_H_
