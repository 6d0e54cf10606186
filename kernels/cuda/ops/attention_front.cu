// Rope tables, q/k norm with rope, and the attention cache.
//
//   q and k <- rope(x * rsqrt(mean(x^2) + eps) * (1 + weight)), pairs (i, i + rotary_dim / 2)
// One warp a head of a token. Bound by memory: every projection read once, q, k, v and the cache
// written once.
#include <cmath>

#include "kernels/cuda/ops/ops_common.cuh"

namespace sparsegdn::cuda_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxDim = 256;

__global__ void __launch_bounds__(kThreads) RopeTableKernel(RopeTableArgs a) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= a.pack.num_tokens * a.half) return;
  const int64_t position = PositionOf(a.pack, item / a.half);
  // The product is rounded to FP32, as the reference has it; sine and cosine are the exact ones.
  const float theta = __fmul_rn(static_cast<float>(position), a.inv_freq[item % a.half]);
  a.cos[item] = cosf(theta);
  a.sin[item] = sinf(theta);
}

// Norm and rope of one head by a warp; `x` [dim] in shared memory is the warp's own.
__device__ void NormRope(const AttentionFrontArgs& a, const bf16* from, const float* weight,
                         int64_t row, float* x) {
  const int lane = threadIdx.x % 32, dim = a.shape.head_dim, half = a.shape.rotary_dim / 2;
  float sum = 0.0f;
  for (int d = lane; d < dim; d += 32) {
    x[d] = __bfloat162float(from[d]);
    sum += x[d] * x[d];
  }
  const float scale = rsqrtf(WarpSum(sum) / static_cast<float>(dim) + a.eps);
  for (int d = lane; d < dim; d += 32) x[d] *= scale * (1.0f + weight[d]);
  __syncwarp();
  for (int i = lane; i < half; i += 32) {
    const float c = a.cos[row * half + i], s = a.sin[row * half + i];
    const float low = x[i], high = x[i + half];
    x[i] = low * c - high * s;
    x[i + half] = high * c + low * s;
  }
  __syncwarp();
}

// Item `head` of a token: query heads, then key heads, then value heads.
__global__ void __launch_bounds__(kThreads) AttentionFrontKernel(AttentionFrontArgs a) {
  __shared__ float shared[kWarps][kMaxDim];
  const int heads = a.shape.num_q_heads + 2 * a.shape.num_kv_heads;
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= a.pack.num_tokens * heads) return;
  const int64_t row = item / heads;
  const int dim = a.shape.head_dim, lane = threadIdx.x % 32;
  int head = static_cast<int>(item % heads);
  float* x = shared[threadIdx.x / 32];
  if (head < a.shape.num_q_heads) {
    NormRope(a, RowOf(a.q_gate, row) + int64_t{2} * head * dim, a.q_norm, row, x);
    bf16* out = RowOf(a.q_out, row) + int64_t{head} * dim;
    for (int d = lane; d < dim; d += 32) out[d] = __float2bfloat16_rn(x[d]);
    return;
  }
  head -= a.shape.num_q_heads;
  const bool value = head >= a.shape.num_kv_heads;
  if (value) head -= a.shape.num_kv_heads;
  const int64_t width = int64_t{a.shape.num_kv_heads} * dim, column = int64_t{head} * dim;
  const int seq = SequenceOf(a.pack, row);
  const int64_t position = a.pack.first_positions[seq] + (row - a.pack.cu_seqlens[seq]);
  bf16* cached =
      CacheRow(a.cache, a.cache.block_tables + seq * a.cache.max_blocks, 2 * width, position) +
      column + (value ? width : 0);
  bf16* out = static_cast<bf16*>(value ? a.v_out : a.k_out) + row * width + column;
  const bf16* from = RowOf(value ? a.v : a.k, row) + column;
  if (!value) NormRope(a, from, a.k_norm, row, x);
  for (int d = lane; d < dim; d += 32) {
    const bf16 rounded = value ? from[d] : __float2bfloat16_rn(x[d]);
    out[d] = rounded;
    cached[d] = rounded;
  }
}

__global__ void __launch_bounds__(kThreads) KvLoadKernel(KvLoadArgs a) {
  const int64_t width = int64_t{a.shape.num_kv_heads} * a.shape.head_dim;
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= a.rows * width) return;
  const int64_t row = item / width, column = item % width;
  bf16* to = CacheRow(a.cache, a.cache.block_tables, 2 * width, a.first_position + row) + column;
  to[0] = static_cast<const bf16*>(a.k)[item];
  to[width] = static_cast<const bf16*>(a.v)[item];
}

}  // namespace

cudaError_t LaunchRopeTable(const RopeTableArgs& a, cudaStream_t stream) {
  if (a.pack.num_tokens == 0 || a.half == 0) return cudaSuccess;
  RopeTableKernel<<<Blocks(a.pack.num_tokens * a.half, kThreads), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t LaunchAttentionFront(const AttentionFrontArgs& a, cudaStream_t stream) {
  if (a.pack.num_tokens == 0) return cudaSuccess;
  if (a.shape.head_dim > kMaxDim) return cudaErrorInvalidValue;
  const int64_t heads = a.shape.num_q_heads + 2 * int64_t{a.shape.num_kv_heads};
  AttentionFrontKernel<<<Blocks(a.pack.num_tokens * heads, kWarps), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t LaunchKvLoad(const KvLoadArgs& a, cudaStream_t stream) {
  const int64_t items = a.rows * a.shape.num_kv_heads * a.shape.head_dim;
  if (items == 0) return cudaSuccess;
  KvLoadKernel<<<Blocks(items, kThreads), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda_ops
