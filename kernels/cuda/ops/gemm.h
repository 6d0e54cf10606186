// y = x W^T (+ residual) by cuBLASLt, with the algorithm of every shape kept.
//
// The library is loaded at run time, so that a binary with CUDA starts on a machine without it.
#ifndef SPARSEGDN_KERNELS_CUDA_OPS_GEMM_H_
#define SPARSEGDN_KERNELS_CUDA_OPS_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/cuda_ops.h"

namespace sparsegdn::cuda_ops {

class LtGemm {
 public:
  // Takes `workspace_bytes` of device memory.
  static absl::StatusOr<std::unique_ptr<LtGemm>> Create(size_t workspace_bytes);
  ~LtGemm();
  LtGemm(const LtGemm&) = delete;
  LtGemm& operator=(const LtGemm&) = delete;

  struct Product {
    int64_t rows = 0;
    ConstRows x;  // BF16 [rows, weight.in]
    CudaMatrix weight;
    ConstRows residual;  // BF16 [rows, weight.out], or null data
    Rows y;
    bool fp32_out = false;  // else BF16
  };
  absl::Status Run(const Product& product, cudaStream_t stream);
  // Times the algorithms that the library's heuristic names first and keeps the fastest, if it is
  // clearly faster than the first, for later products of this matrix shape with about as many rows.
  // y may be residual, and holds nothing of use afterwards. Waits for the stream.
  absl::Status Tune(const Product& product, cudaStream_t stream);
  // The rows of the Tune whose choice a product like this gets; 0: the heuristic's.
  int64_t TunedRows(const Product& product) const;

 private:
  struct Impl;
  explicit LtGemm(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparsegdn::cuda_ops

#endif  // SPARSEGDN_KERNELS_CUDA_OPS_GEMM_H_
