// The operations of ops.h on a CUDA device: BF16 activations and weights, FP32 accumulation, norms,
// gates and softmax in FP32 with one rounding at the end.
//
// Every pointer is device memory. Calls are enqueued on one stream and take effect in order; none
// allocates device memory after Create. A result row is a function of its own inputs, but the
// library that multiplies may pick another algorithm, hence another order of its sums, for another
// number of rows.
#ifndef SPARSEGDN_CUDA_OPS_H_
#define SPARSEGDN_CUDA_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/ops.h"

namespace sparsegdn {

// A weight of y = x W^T: BF16 [out, in], row-major, `in` a multiple of 8, 16-byte aligned.
// Borrowed.
struct CudaMatrix {
  const void* data = nullptr;
  int64_t out = 0;
  int64_t in = 0;
};

// Bytes of one block of the attention cache: [block_tokens][key, value][num_kv_heads][head_dim].
size_t CudaKvBlockBytes(const AttentionShape& shape, int32_t block_tokens);

// Thread-compatible. Every function is defined by the argument struct's comment in ops.h, with BF16
// for the activations. INTERNAL carries CUDA's own words; INVALID_ARGUMENT names field, got,
// wanted.
class CudaOps {
 public:
  // `stream` is a cudaStream_t of `device`, borrowed. FAILED_PRECONDITION where the device is older
  // than sm_80 or cuBLASLt (libcublasLt.so.13 or .12) cannot be loaded.
  static absl::StatusOr<std::unique_ptr<CudaOps>> Create(int device, void* stream);
  ~CudaOps();
  CudaOps(const CudaOps&) = delete;
  CudaOps& operator=(const CudaOps&) = delete;

  // Device memory that Create takes for itself.
  static constexpr size_t kGemmWorkspaceBytes = size_t{64} << 20;

  // y = x W^T (+ residual); residual may be y, or have null data. Strides are multiples of 8. The
  // product may be rounded to BF16 before the residual is added.
  absl::Status Gemm(int64_t rows, ConstRows x, const CudaMatrix& weight, ConstRows residual,
                    Rows y);
  // Chooses by timing how products of this shape and about as many rows are computed from now on.
  // y may be residual, and holds nothing of use afterwards. Waits for the stream.
  absl::Status TuneGemm(int64_t rows, ConstRows x, const CudaMatrix& weight, ConstRows residual,
                        Rows y);
  // The rows of the TuneGemm whose choice such a product gets; 0: none.
  int64_t TunedRows(int64_t rows, const CudaMatrix& weight, bool residual) const;
  // As Gemm without residual, FP32 out: y [rows, out] contiguous.
  absl::Status GemmLogits(int64_t rows, ConstRows x, const CudaMatrix& weight, float* y);
  // y[i] = row index[i] of x; the rows of an embedding too.
  absl::Status GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x, Rows y);
  absl::Status RmsNorm(const RmsNormArgs& args);
  absl::Status GatedNorm(const GatedNormArgs& args);
  absl::Status GdnFront(const GdnFrontArgs& args);
  absl::Status ConvStateAt(const ConvStateAtArgs& args);
  absl::Status RopeTable(const RopeTableArgs& args);
  absl::Status AttentionFront(const AttentionFrontArgs& args);
  absl::Status KvLoad(const KvLoadArgs& args);
  // Lets Attention use cuDNN for packs within these limits whose cache blocks are consecutive: it
  // is loaded, plans are built and tried (about 2 s) and the device memory they need is taken. Returns what
  // will run: "cudnn 9.14.0", or "own kernel" and why. Everything works without this call. After it,
  // rows must be appended to a cache by AttentionFront with the same `consecutive` with which they
  // are attended to: the append also zeroes what cuDNN reads past a sequence's end.
  std::string PrepareAttention(const AttentionLimits& limits);
  // cuDNN where prepared; else wgmma on sm_90 for head_dim 128 and 256; else a kernel without
  // matrix units.
  absl::Status Attention(const AttentionArgs& args);
  // Which of them these arguments get: "cudnn", "wgmma" or "portable".
  const char* AttentionKernel(const AttentionArgs& args) const;
  absl::Status SwiGlu(const SwiGluArgs& args);
  absl::Status LogProb(const LogProbArgs& args);
  // flags[s] = 1 where a row of sequence s holds NaN or Inf; other flags stay.
  absl::Status CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x, int32_t* flags);

  // For tests: Attention by the kernel without matrix units.
  void set_portable(bool portable);

 private:
  struct Impl;
  explicit CudaOps(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparsegdn

#endif  // SPARSEGDN_CUDA_OPS_H_
