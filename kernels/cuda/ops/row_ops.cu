// Row-wise operations: norms, SwiGLU, gathers, log-probabilities, finiteness.
//
// All are bound by memory traffic: each input is read once from HBM (norms read their row twice,
// the second time from L1) and each output written once, 16 bytes an access where rows allow it.
#include <cmath>

#include "kernels/cuda/ops/ops_common.cuh"

namespace sparsegdn::cuda_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <int kN>
__global__ void __launch_bounds__(kThreads)
    GatherRowsKernel(int64_t rows, int64_t cols, const int32_t* index, ConstRows x, Rows y) {
  const int64_t pieces = cols / kN;
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= rows * pieces) return;
  const int64_t row = item / pieces, at = item % pieces * kN;
  float v[kN];
  Load<kN>(RowOf(x, index[row]) + at, v);
  Store<kN>(RowOf(y, row) + at, v);
}

template <int kN>
__global__ void __launch_bounds__(kThreads) RmsNormKernel(RmsNormArgs a) {
  __shared__ float shared[kWarps];
  const bf16* x = RowOf(a.x, blockIdx.x);
  bf16* y = RowOf(a.y, blockIdx.x);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x * kN; i < a.cols; i += kThreads * kN) {
    float v[kN];
    Load<kN>(x + i, v);
#pragma unroll
    for (int j = 0; j < kN; ++j) sum += v[j] * v[j];
  }
  const float scale = rsqrtf(BlockSum(sum, shared) / static_cast<float>(a.cols) + a.eps);
  for (int64_t i = threadIdx.x * kN; i < a.cols; i += kThreads * kN) {
    float v[kN], w[kN];
    Load<kN>(x + i, v);
    LoadFloats<kN>(a.weight + i, w);
#pragma unroll
    for (int j = 0; j < kN; ++j) v[j] = v[j] * scale * (1.0f + w[j]);
    Store<kN>(y + i, v);
  }
}

// kLanes lanes a head, each with 8 elements in registers: dim = 8 kLanes.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) GatedNormKernel(GatedNormArgs a) {
  const int64_t item = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const bool valid = item < a.rows * a.heads;
  const int64_t row = valid ? item / a.heads : 0;
  const int at = static_cast<int>(threadIdx.x % kLanes) * kVector;
  const int64_t column = (valid ? item % a.heads : 0) * a.dim + at;
  float o[kVector], z[kVector], w[kVector], sum = 0.0f;
  Load<kVector>(RowOf(a.o, row) + column, o);
  Load<kVector>(RowOf(a.z, row) + column, z);
  LoadFloats<kVector>(a.weight + at, w);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum += o[j] * o[j];
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  const float scale = rsqrtf(sum / static_cast<float>(a.dim) + a.eps);
#pragma unroll
  for (int j = 0; j < kVector; ++j) o[j] = w[j] * (o[j] * scale) * Silu(z[j]);
  if (valid) Store<kVector>(RowOf(a.y, row) + column, o);
}

// Any dim: one warp a head, elements read twice.
__global__ void __launch_bounds__(kThreads) GatedNormAnyKernel(GatedNormArgs a) {
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= a.rows * a.heads) return;
  const int64_t row = item / a.heads, column = item % a.heads * a.dim;
  const bf16* o = RowOf(a.o, row) + column;
  const bf16* z = RowOf(a.z, row) + column;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < a.dim; i += 32) {
    const float v = __bfloat162float(o[i]);
    sum += v * v;
  }
  const float scale = rsqrtf(WarpSum(sum) / static_cast<float>(a.dim) + a.eps);
  for (int i = threadIdx.x % 32; i < a.dim; i += 32) {
    const float v = a.weight[i] * (__bfloat162float(o[i]) * scale) * Silu(__bfloat162float(z[i]));
    RowOf(a.y, row)[column + i] = __float2bfloat16_rn(v);
  }
}

template <int kN>
__global__ void __launch_bounds__(kThreads) SwiGluKernel(SwiGluArgs a) {
  const int64_t pieces = a.inner / kN;
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= a.rows * pieces) return;
  const int64_t row = item / pieces, at = item % pieces * kN;
  float gate[kN], up[kN];
  Load<kN>(RowOf(a.gate_up, row) + at, gate);
  Load<kN>(RowOf(a.gate_up, row) + a.inner + at, up);
#pragma unroll
  for (int j = 0; j < kN; ++j) gate[j] = Silu(gate[j]) * up[j];
  Store<kN>(RowOf(a.y, row) + at, gate);
}

__global__ void __launch_bounds__(kThreads) LogProbKernel(LogProbArgs a) {
  __shared__ float shared[kWarps];
  const float* row = a.logits + int64_t{blockIdx.x} * a.vocab;
  float max = -INFINITY;
  for (int64_t i = threadIdx.x; i < a.vocab; i += kThreads) max = fmaxf(max, row[i]);
  max = WarpMax(max);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = max;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, shared[w]);
  __syncthreads();
  float sum = 0.0f;  // a NaN logit, which fmaxf passes over, makes the sum NaN
  for (int64_t i = threadIdx.x; i < a.vocab; i += kThreads) sum += expf(row[i] - max);
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) a.out[blockIdx.x] = row[a.targets[blockIdx.x]] - max - logf(sum);
}

__global__ void __launch_bounds__(kThreads)
    CheckFiniteKernel(PackArgs pack, int64_t cols, ConstRows x, int32_t* flags) {
  const bf16* row = RowOf(x, blockIdx.x);
  bool finite = true;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    finite &= isfinite(__bfloat162float(row[i])) != 0;
  }
  if (!finite) flags[SequenceOf(pack, blockIdx.x)] = 1;  // every writer writes the same
}

}  // namespace

cudaError_t LaunchGatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x, Rows y,
                             cudaStream_t stream) {
  if (rows == 0 || cols == 0) return cudaSuccess;
  if (Aligned(x) && Aligned(y) && cols % kVector == 0) {
    GatherRowsKernel<kVector>
        <<<Blocks(rows * cols / kVector, kThreads), kThreads, 0, stream>>>(rows, cols, index, x, y);
  } else {
    GatherRowsKernel<1>
        <<<Blocks(rows * cols, kThreads), kThreads, 0, stream>>>(rows, cols, index, x, y);
  }
  return cudaGetLastError();
}

cudaError_t LaunchRmsNorm(const RmsNormArgs& a, cudaStream_t stream) {
  if (a.rows == 0 || a.cols == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(a.rows);
  if (Aligned(a.x) && Aligned(a.y) && Aligned(a.weight, 0) && a.cols % kVector == 0) {
    RmsNormKernel<kVector><<<blocks, kThreads, 0, stream>>>(a);
  } else {
    RmsNormKernel<1><<<blocks, kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

cudaError_t LaunchGatedNorm(const GatedNormArgs& a, cudaStream_t stream) {
  if (a.rows == 0 || a.heads == 0 || a.dim == 0) return cudaSuccess;
  const bool aligned =
      Aligned(a.o) && Aligned(a.z) && Aligned(ConstRows(a.y)) && Aligned(a.weight, 0);
  const auto blocks = [&](int lanes) { return Blocks(a.rows * a.heads * lanes, kThreads); };
  if (aligned && a.dim == 256) {
    GatedNormKernel<32><<<blocks(32), kThreads, 0, stream>>>(a);
  } else if (aligned && a.dim == 128) {
    GatedNormKernel<16><<<blocks(16), kThreads, 0, stream>>>(a);
  } else if (aligned && a.dim == 64) {
    GatedNormKernel<8><<<blocks(8), kThreads, 0, stream>>>(a);
  } else {
    GatedNormAnyKernel<<<blocks(32), kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

cudaError_t LaunchSwiGlu(const SwiGluArgs& a, cudaStream_t stream) {
  if (a.rows == 0 || a.inner == 0) return cudaSuccess;
  if (Aligned(a.gate_up) && Aligned(ConstRows(a.y)) && a.inner % kVector == 0) {
    SwiGluKernel<kVector><<<Blocks(a.rows * a.inner / kVector, kThreads), kThreads, 0, stream>>>(a);
  } else {
    SwiGluKernel<1><<<Blocks(a.rows * a.inner, kThreads), kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

cudaError_t LaunchLogProb(const LogProbArgs& a, cudaStream_t stream) {
  if (a.rows == 0) return cudaSuccess;
  LogProbKernel<<<static_cast<unsigned>(a.rows), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t LaunchCheckFinite(const PackArgs& pack, int64_t cols, ConstRows x, int32_t* flags,
                              cudaStream_t stream) {
  if (pack.num_tokens == 0) return cudaSuccess;
  CheckFiniteKernel<<<static_cast<unsigned>(pack.num_tokens), kThreads, 0, stream>>>(pack, cols, x,
                                                                                     flags);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda_ops
