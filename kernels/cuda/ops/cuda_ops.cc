// Host checks, then the launchers.
#include "sparsegdn/cuda_ops.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/ops/attention_cudnn.h"
#include "kernels/cuda/ops/gemm.h"
#include "kernels/cuda/ops/launch.h"

namespace sparsegdn {

namespace {

absl::Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
}

absl::Status Bad(const char* field, int64_t got, const std::string& wanted) {
  return absl::InvalidArgumentError(absl::StrCat(field, " = ", got, ", wanted ", wanted));
}

absl::Status CheckShape(const AttentionShape& s) {
  if (s.head_dim < 1 || s.head_dim > 256) return Bad("head_dim", s.head_dim, "[1, 256]");
  if (s.num_kv_heads < 1 || s.num_q_heads % s.num_kv_heads != 0) {
    return Bad("num_q_heads", s.num_q_heads,
               absl::StrCat("a multiple of num_kv_heads = ", s.num_kv_heads));
  }
  if (s.rotary_dim % 2 != 0 || s.rotary_dim > s.head_dim) {
    return Bad("rotary_dim", s.rotary_dim, absl::StrCat("even, at most ", s.head_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckGemm(ConstRows x, const CudaMatrix& weight, ConstRows residual, int64_t stride) {
  const auto odd = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 != 0; };
  if (weight.in % 8 != 0) return Bad("weight.in", weight.in, "a multiple of 8");
  if (x.stride % 8 != 0) return Bad("x.stride", x.stride, "a multiple of 8");
  if (residual.stride % 8 != 0) return Bad("residual.stride", residual.stride, "a multiple of 8");
  if (stride % 8 != 0) return Bad("y.stride", stride, "a multiple of 8");
  if (odd(x.data) || odd(weight.data) || odd(residual.data)) {
    return absl::InvalidArgumentError("operand = unaligned, wanted 16-byte aligned");
  }
  return absl::OkStatus();
}

enum class AttentionPath { kCudnn, kWgmma, kPortable };

}  // namespace

struct CudaOps::Impl {
  AttentionPath PathOf(const AttentionArgs& args) const {
    if (portable) return AttentionPath::kPortable;
    if (cudnn != nullptr && cudnn->Supports(args)) return AttentionPath::kCudnn;
    const bool wgmma = major == 9 && cuda_ops::AttentionWgmmaSupports(args);
    return wgmma ? AttentionPath::kWgmma : AttentionPath::kPortable;
  }

  int device = 0;
  int major = 0;
  bool portable = false;
  cudaStream_t stream = nullptr;
  std::unique_ptr<cuda_ops::LtGemm> gemm;
  std::unique_ptr<cuda_ops::CudnnAttention> cudnn;
};

size_t CudaKvBlockBytes(const AttentionShape& shape, int32_t block_tokens) {
  return size_t{4} * static_cast<size_t>(block_tokens) * static_cast<size_t>(shape.num_kv_heads) *
         static_cast<size_t>(shape.head_dim);
}

CudaOps::CudaOps(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaOps::~CudaOps() = default;

absl::StatusOr<std::unique_ptr<CudaOps>> CudaOps::Create(int device, void* stream) {
  auto impl = std::make_unique<Impl>();
  impl->device = device;
  impl->stream = static_cast<cudaStream_t>(stream);
  absl::Status s = FromCuda(cudaSetDevice(device), "set device");
  if (s.ok()) {
    s = FromCuda(cudaDeviceGetAttribute(&impl->major, cudaDevAttrComputeCapabilityMajor, device),
                 "compute capability");
  }
  if (!s.ok()) return s;
  if (impl->major < 8) {
    return absl::FailedPreconditionError(absl::StrCat("device ", device, ": compute capability ",
                                                      impl->major, ".x, wanted 8.0 or later"));
  }
  auto gemm = cuda_ops::LtGemm::Create(kGemmWorkspaceBytes);
  if (!gemm.ok()) return gemm.status();
  impl->gemm = *std::move(gemm);
  return std::unique_ptr<CudaOps>(new CudaOps(std::move(impl)));
}

void CudaOps::set_portable(bool portable) { impl_->portable = portable; }

absl::Status CudaOps::Gemm(int64_t rows, ConstRows x, const CudaMatrix& weight, ConstRows residual,
                           Rows y) {
  if (absl::Status s = CheckGemm(x, weight, residual, y.stride); !s.ok()) return s;
  return impl_->gemm->Run({rows, x, weight, residual, y, false}, impl_->stream);
}

absl::Status CudaOps::TuneGemm(int64_t rows, ConstRows x, const CudaMatrix& weight,
                               ConstRows residual, Rows y) {
  if (absl::Status s = CheckGemm(x, weight, residual, y.stride); !s.ok()) return s;
  return impl_->gemm->Tune({rows, x, weight, residual, y, false}, impl_->stream);
}

int64_t CudaOps::TunedRows(int64_t rows, const CudaMatrix& weight, bool residual) const {
  const ConstRows some{weight.data, weight.out};
  return impl_->gemm->TunedRows({rows, {}, weight, residual ? some : ConstRows{}, {}, false});
}

absl::Status CudaOps::GemmLogits(int64_t rows, ConstRows x, const CudaMatrix& weight, float* y) {
  if (absl::Status s = CheckGemm(x, weight, {}, 0); !s.ok()) return s;
  return impl_->gemm->Run({rows, x, weight, {}, {y, weight.out}, true}, impl_->stream);
}

absl::Status CudaOps::GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x,
                                 Rows y) {
  return FromCuda(cuda_ops::LaunchGatherRows(rows, cols, index, x, y, impl_->stream), "gather");
}

absl::Status CudaOps::RmsNorm(const RmsNormArgs& args) {
  return FromCuda(cuda_ops::LaunchRmsNorm(args, impl_->stream), "norm");
}

absl::Status CudaOps::GatedNorm(const GatedNormArgs& args) {
  return FromCuda(cuda_ops::LaunchGatedNorm(args, impl_->stream), "gated norm");
}

absl::Status CudaOps::GdnFront(const GdnFrontArgs& args) {
  return FromCuda(cuda_ops::LaunchGdnFront(args, impl_->stream), "GDN front");
}

absl::Status CudaOps::ConvStateAt(const ConvStateAtArgs& args) {
  return FromCuda(cuda_ops::LaunchConvStateAt(args, impl_->stream), "conv state");
}

absl::Status CudaOps::RopeTable(const RopeTableArgs& args) {
  return FromCuda(cuda_ops::LaunchRopeTable(args, impl_->stream), "rope table");
}

absl::Status CudaOps::AttentionFront(const AttentionFrontArgs& args) {
  if (absl::Status s = CheckShape(args.shape); !s.ok()) return s;
  if (impl_->cudnn != nullptr && args.cache.consecutive &&
      args.pack.num_tokens >= cuda_ops::kCudnnLeastTokens) {
    const cudaError_t padded =
        cuda_ops::LaunchCachePad(args, cuda_ops::kCudnnKeyTile, impl_->stream);
    if (padded != cudaSuccess) return FromCuda(padded, "attention cache");
  }
  return FromCuda(cuda_ops::LaunchAttentionFront(args, impl_->stream), "attention front");
}

absl::Status CudaOps::KvLoad(const KvLoadArgs& args) {
  return FromCuda(cuda_ops::LaunchKvLoad(args, impl_->stream), "cache load");
}

std::string CudaOps::PrepareAttention(const AttentionLimits& limits) {
  if (absl::Status s = FromCuda(cudaSetDevice(impl_->device), "set device"); !s.ok()) {
    return absl::StrCat("own kernel (", s.message(), ")");
  }
  auto cudnn = cuda_ops::CudnnAttention::Create(limits, impl_->stream);
  if (!cudnn.ok()) return absl::StrCat("own kernel (", cudnn.status().message(), ")");
  impl_->cudnn = *std::move(cudnn);
  return absl::StrCat("cudnn ", impl_->cudnn->version());
}

absl::Status CudaOps::Attention(const AttentionArgs& args) {
  if (absl::Status s = CheckShape(args.shape); !s.ok()) return s;
  switch (impl_->PathOf(args)) {
    case AttentionPath::kCudnn: {
      absl::Status s = impl_->cudnn->Run(args);
      if (s.ok() || cudaStreamSynchronize(impl_->stream) != cudaSuccess) return s;
      impl_->cudnn.reset();  // the device is well: from here on by our own kernel
      return Attention(args);
    }
    case AttentionPath::kWgmma:
      return FromCuda(cuda_ops::LaunchAttentionWgmma(args, impl_->stream), "attention");
    case AttentionPath::kPortable:
      break;
  }
  return FromCuda(cuda_ops::LaunchAttentionPortable(args, impl_->stream), "attention");
}

const char* CudaOps::AttentionKernel(const AttentionArgs& args) const {
  switch (impl_->PathOf(args)) {
    case AttentionPath::kCudnn:
      return "cudnn";
    case AttentionPath::kWgmma:
      return "wgmma";
    case AttentionPath::kPortable:
      break;
  }
  return "portable";
}

absl::Status CudaOps::SwiGlu(const SwiGluArgs& args) {
  return FromCuda(cuda_ops::LaunchSwiGlu(args, impl_->stream), "swiglu");
}

absl::Status CudaOps::LogProb(const LogProbArgs& args) {
  return FromCuda(cuda_ops::LaunchLogProb(args, impl_->stream), "log probabilities");
}

absl::Status CudaOps::CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x, int32_t* flags) {
  return FromCuda(cuda_ops::LaunchCheckFinite(pack, cols, x, flags, impl_->stream), "finiteness");
}

}  // namespace sparsegdn
