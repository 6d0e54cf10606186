// What stands around cuDNN's attention: where the sequences of a pack lie, finite cache rows behind
// each, and the output's gate, which multiplies what cuDNN has rounded to BF16.
#include "kernels/cuda/ops/ops_common.cuh"

namespace sparsegdn::cuda_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kPadBlocks = 16;  // of a sequence

__global__ void LayoutKernel(AttentionArgs a, AttentionLayout layout) {
  const int s = static_cast<int>(threadIdx.x);
  if (s > layout.seqs) return;
  // Beyond the pack's sequences: empty ones at its end.
  const int seqs = a.pack.num_seqs;
  const bool live = s < seqs;
  const int64_t row = a.pack.cu_seqlens[live ? s : seqs];
  layout.q_offset[s] = row * a.q.stride;
  layout.o_offset[s] = row * a.out.stride;
  layout.kv_offset[s] = live ? int64_t{a.cache.block_tables[s * a.cache.max_blocks]} *
                                   a.cache.block_tokens * 2 * a.shape.num_kv_heads *
                                   a.shape.head_dim
                             : 0;
  if (s == layout.seqs) return;
  const int64_t count = live ? a.pack.cu_seqlens[s + 1] - row : 0;
  layout.q_length[s] = static_cast<int32_t>(count);
  layout.kv_length[s] = live ? static_cast<int32_t>(a.pack.first_positions[s] + count) : 0;
}

// out *= sigmoid(gate), kN elements a thread. Bound by memory: both read and out written once.
template <int kN>
__global__ void __launch_bounds__(kThreads) GateKernel(AttentionArgs a) {
  const int dim = a.shape.head_dim, width = a.shape.num_q_heads * dim;
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x, each = width / kN;
  if (item >= a.pack.num_tokens * each) return;
  const int64_t row = item / each;
  const int column = static_cast<int>(item % each) * kN, head = column / dim;
  float gate[kN], x[kN];
  Load<kN>(RowOf(a.q_gate, row) + int64_t{2} * head * dim + dim + column % dim, gate);
  bf16* out = RowOf(a.out, row) + column;
  Load<kN>(out, x);
#pragma unroll
  for (int i = 0; i < kN; ++i) x[i] *= Sigmoid(gate[i]);
  Store<kN>(out, x);
}

// Zeroes the cache rows from a sequence's last position to the next multiple of `tile`, 16 bytes a
// thread: at most 127 rows of 2 num_kv_heads head_dim elements.
__global__ void __launch_bounds__(kThreads) PadKernel(AttentionFrontArgs a, int tile) {
  const int s = static_cast<int>(blockIdx.x);
  const int64_t end =
      a.pack.first_positions[s] + a.pack.cu_seqlens[s + 1] - a.pack.cu_seqlens[s];
  const int64_t width = int64_t{2} * a.shape.num_kv_heads * a.shape.head_dim;
  const int64_t vectors = (tile - end % tile) % tile * width / kVector;
  if (vectors == 0) return;
  auto* rows = reinterpret_cast<uint4*>(
      CacheRow(a.cache, a.cache.block_tables + s * a.cache.max_blocks, width, end));
  const int64_t first = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  for (int64_t i = first; i < vectors; i += int64_t{kPadBlocks} * kThreads) {
    rows[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace

size_t AttentionLayoutBytes(int32_t seqs) {
  const size_t bytes = 3 * sizeof(int64_t) * (static_cast<size_t>(seqs) + 1) +
                       2 * sizeof(int32_t) * static_cast<size_t>(seqs);
  return (bytes + 255) / 256 * 256;
}

AttentionLayout AttentionLayoutIn(void* memory, int32_t seqs) {
  AttentionLayout layout;
  layout.seqs = seqs;
  layout.q_offset = static_cast<int64_t*>(memory);
  layout.o_offset = layout.q_offset + seqs + 1;
  layout.kv_offset = layout.o_offset + seqs + 1;
  layout.q_length = reinterpret_cast<int32_t*>(layout.kv_offset + seqs + 1);
  layout.kv_length = layout.q_length + seqs;
  return layout;
}

cudaError_t LaunchAttentionLayout(const AttentionArgs& a, const AttentionLayout& layout,
                                  cudaStream_t stream) {
  LayoutKernel<<<1, static_cast<unsigned>(layout.seqs) + 1, 0, stream>>>(a, layout);
  return cudaGetLastError();
}

cudaError_t LaunchAttentionGate(const AttentionArgs& a, cudaStream_t stream) {
  const int64_t items = a.pack.num_tokens * a.shape.num_q_heads * a.shape.head_dim;
  if (items == 0) return cudaSuccess;
  if (a.shape.head_dim % kVector == 0 && Aligned(a.q_gate) && Aligned(a.out)) {
    GateKernel<kVector><<<Blocks(items / kVector, kThreads), kThreads, 0, stream>>>(a);
  } else {
    GateKernel<1><<<Blocks(items, kThreads), kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

cudaError_t LaunchCachePad(const AttentionFrontArgs& a, int32_t tile, cudaStream_t stream) {
  if (a.pack.num_seqs == 0) return cudaSuccess;
  if (a.shape.head_dim % kVector != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(a.pack.num_seqs), kPadBlocks);
  PadKernel<<<grid, kThreads, 0, stream>>>(a, tile);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda_ops
