// In builds without cuDNN's frontend headers.
#include "kernels/cuda/ops/attention_cudnn.h"

namespace sparsegdn::cuda_ops {

absl::StatusOr<std::unique_ptr<CudnnAttention>> CudnnAttention::Create(const AttentionLimits&,
                                                                       cudaStream_t) {
  return absl::FailedPreconditionError("built without cuDNN");
}

}  // namespace sparsegdn::cuda_ops
