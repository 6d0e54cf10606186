// Causal attention with grouped heads over the paged cache, without matrix units: any head_dim up
// to 256, any device. Correct first; the fast path is attention_wgmma.cu.
//
// One warp a (row, query head). Keys go by 32: lane j scores key j, then the lanes own dimensions
// and add the 32 values; online softmax in FP32.
#include <cmath>

#include "kernels/cuda/ops/ops_common.cuh"

namespace sparsegdn::cuda_ops {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxDim = 256;
constexpr int kPerLane = kMaxDim / 32;

__device__ __forceinline__ float Dot(const float* q, const bf16* k, int dim) {
  float sum = 0.0f;
  if (dim % kVector == 0 && reinterpret_cast<uintptr_t>(k) % 16 == 0) {
    for (int d = 0; d < dim; d += kVector) {
      float x[kVector];
      Load<kVector>(k + d, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum += q[d + j] * x[j];
    }
    return sum;
  }
  for (int d = 0; d < dim; ++d) sum += q[d] * __bfloat162float(k[d]);
  return sum;
}

__global__ void __launch_bounds__(kThreads) AttentionPortableKernel(AttentionArgs a) {
  __shared__ float shared[kWarps][kMaxDim];
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= a.pack.num_tokens * a.shape.num_q_heads) return;
  const int lane = threadIdx.x % 32, dim = a.shape.head_dim;
  const int64_t row = item / a.shape.num_q_heads, width = int64_t{a.shape.num_kv_heads} * dim;
  const int head = static_cast<int>(item % a.shape.num_q_heads);
  const int kv = head / (a.shape.num_q_heads / a.shape.num_kv_heads);
  const int seq = SequenceOf(a.pack, row);
  const int64_t last = a.pack.first_positions[seq] + (row - a.pack.cu_seqlens[seq]);
  const int32_t* table = a.cache.block_tables + seq * a.cache.max_blocks;
  float* q = shared[threadIdx.x / 32];
  const float scale = rsqrtf(static_cast<float>(dim));
  for (int d = lane; d < dim; d += 32) {
    q[d] = scale * __bfloat162float(RowOf(a.q, row)[int64_t{head} * dim + d]);
  }
  __syncwarp();
  float max = -INFINITY, sum = 0.0f, out[kPerLane] = {};
  for (int64_t first = 0; first <= last; first += 32) {
    // Tiles of 32 lie within a block: blocks hold a multiple of 64 positions.
    const bf16* rows = CacheRow(a.cache, table, 2 * width, first) + int64_t{kv} * dim;
    const bool visible = first + lane <= last;
    const float score = visible ? Dot(q, rows + lane * 2 * width, dim) : -INFINITY;
    const float next = fmaxf(max, WarpMax(score));
    const float shrink = max == -INFINITY ? 0.0f : expf(max - next);
    const float weight = visible ? expf(score - next) : 0.0f;
    sum = sum * shrink + WarpSum(weight);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) out[i] *= shrink;
    const int count = last - first < 31 ? static_cast<int>(last - first) + 1 : 32;
    for (int j = 0; j < count; ++j) {
      const float w = __shfl_sync(0xffffffffu, weight, j);
      const bf16* v = rows + j * 2 * width + width;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int d = lane + 32 * i;
        if (d < dim) out[i] += w * __bfloat162float(v[d]);
      }
    }
    max = next;
  }
  const bf16* gate = RowOf(a.q_gate, row) + (int64_t{2} * head + 1) * dim;
  bf16* to = RowOf(a.out, row) + int64_t{head} * dim;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + 32 * i;
    if (d < dim) to[d] = __float2bfloat16_rn(out[i] / sum * Sigmoid(__bfloat162float(gate[d])));
  }
}

}  // namespace

cudaError_t LaunchAttentionPortable(const AttentionArgs& a, cudaStream_t stream) {
  const int64_t items = a.pack.num_tokens * a.shape.num_q_heads;
  if (items == 0) return cudaSuccess;
  if (a.shape.head_dim > kMaxDim) return cudaErrorInvalidValue;
  AttentionPortableKernel<<<Blocks(items, kWarps), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda_ops
