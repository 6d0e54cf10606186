// Causal attention by cuDNN: faster than our own kernel for long prompts, but it wants the keys of
// a sequence side by side, plans built in advance, and its library at hand.
#ifndef SPARSEGDN_KERNELS_CUDA_OPS_ATTENTION_CUDNN_H_
#define SPARSEGDN_KERNELS_CUDA_OPS_ATTENTION_CUDNN_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/ops.h"

namespace sparsegdn::cuda_ops {

// Rows that cuDNN's kernel reads past the end of a sequence's keys and values: up to the next
// multiple. It multiplies the values by zero, so they must be finite.
inline constexpr int32_t kCudnnKeyTile = 128;
// Packs of fewer tokens run on our own kernel.
inline constexpr int64_t kCudnnLeastTokens = 128;

class CudnnAttention {
 public:
  // Builds one plan for each power of two of sequences, the first in 1 to 2 s, further ones in
  // 0.1 s, and tries one. FAILED_PRECONDITION says why cuDNN cannot serve these limits: built without
  // its frontend, library not found, shape not supported, too much workspace, NaN read from beyond
  // kCudnnKeyTile.
  static absl::StatusOr<std::unique_ptr<CudnnAttention>> Create(const AttentionLimits& limits,
                                                                cudaStream_t stream);
  virtual ~CudnnAttention() = default;

  virtual std::string version() const = 0;  // "9.14.0"
  // Whether Run may be called with these arguments.
  virtual bool Supports(const AttentionArgs& args) const = 0;
  // Enqueues on Create's stream.
  virtual absl::Status Run(const AttentionArgs& args) = 0;
};

}  // namespace sparsegdn::cuda_ops

#endif  // SPARSEGDN_KERNELS_CUDA_OPS_ATTENTION_CUDNN_H_
