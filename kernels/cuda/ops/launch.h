// Launchers of the operations of ops.h. Each enqueues on `stream` and returns the launch error;
// empty inputs launch nothing.
#ifndef SPARSEGDN_KERNELS_CUDA_OPS_LAUNCH_H_
#define SPARSEGDN_KERNELS_CUDA_OPS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "sparsegdn/ops.h"

namespace sparsegdn::cuda_ops {

cudaError_t LaunchGatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x, Rows y,
                             cudaStream_t stream);
cudaError_t LaunchRmsNorm(const RmsNormArgs& args, cudaStream_t stream);
cudaError_t LaunchGatedNorm(const GatedNormArgs& args, cudaStream_t stream);
cudaError_t LaunchSwiGlu(const SwiGluArgs& args, cudaStream_t stream);
cudaError_t LaunchLogProb(const LogProbArgs& args, cudaStream_t stream);
cudaError_t LaunchCheckFinite(const PackArgs& pack, int64_t cols, ConstRows x, int32_t* flags,
                              cudaStream_t stream);
cudaError_t LaunchGdnFront(const GdnFrontArgs& args, cudaStream_t stream);
cudaError_t LaunchConvStateAt(const ConvStateAtArgs& args, cudaStream_t stream);
cudaError_t LaunchRopeTable(const RopeTableArgs& args, cudaStream_t stream);
cudaError_t LaunchAttentionFront(const AttentionFrontArgs& args, cudaStream_t stream);
cudaError_t LaunchKvLoad(const KvLoadArgs& args, cudaStream_t stream);
// Any head_dim up to 256, any device.
cudaError_t LaunchAttentionPortable(const AttentionArgs& args, cudaStream_t stream);
// sm_90 only; head_dim 128 or 256, 16-byte aligned rows.
bool AttentionWgmmaSupports(const AttentionArgs& args);
cudaError_t LaunchAttentionWgmma(const AttentionArgs& args, cudaStream_t stream);

// Around cuDNN's attention. Where the sequences of a pack lie, for `seqs` sequences of which those
// beyond the pack's are empty; offsets in elements. At most 1023 sequences.
struct AttentionLayout {
  int32_t seqs = 0;
  int64_t* q_offset = nullptr;  // [seqs + 1]
  int64_t* o_offset = nullptr;
  int64_t* kv_offset = nullptr;
  int32_t* q_length = nullptr;  // [seqs]
  int32_t* kv_length = nullptr;
};
size_t AttentionLayoutBytes(int32_t seqs);
AttentionLayout AttentionLayoutIn(void* memory, int32_t seqs);
cudaError_t LaunchAttentionLayout(const AttentionArgs& args, const AttentionLayout& layout,
                                  cudaStream_t stream);
// out *= sigmoid(gate).
cudaError_t LaunchAttentionGate(const AttentionArgs& args, cudaStream_t stream);
// Zeroes the cache from each sequence's end to the next multiple of `tile`, which must divide
// block_tokens; head_dim a multiple of 8.
cudaError_t LaunchCachePad(const AttentionFrontArgs& args, int32_t tile, cudaStream_t stream);

}  // namespace sparsegdn::cuda_ops

#endif  // SPARSEGDN_KERNELS_CUDA_OPS_LAUNCH_H_
