// GdnBackend on CUDA: host checks, workspace carving, and the order of the launches.
#include <cuda_runtime_api.h>

#include <cmath>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/validate.h"
#include "kernels/cuda/params.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn {
namespace {

absl::Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
}

int64_t PoolElements(const GdnShape& s, const StatePool& pool) {
  return int64_t{pool.slots} * s.num_v_heads * s.head_dim_k * s.head_dim_v;
}

bool PoolsOverlap(const GdnForwardArgs& a) {
  const float* first = a.initial_state.data;
  const float* second = a.final_state.data;
  if (first == nullptr || second == nullptr) return false;
  return first < second + PoolElements(a.shape, a.final_state) &&
         second < first + PoolElements(a.shape, a.initial_state);
}

cuda::DeviceStates ToDevice(const StatePool& pool) {
  return {pool.data, pool.data == nullptr ? 0 : pool.slots,
          pool.layout == StateLayout::kValueMajor};
}

cuda::Params ToParams(const GdnForwardArgs& a, bool select_only) {
  cuda::Params p{};
  p.shape = a.shape;
  p.ratio = a.shape.num_v_heads / a.shape.num_k_heads;
  p.num_tokens = a.num_tokens;
  p.num_seqs = a.num_seqs;
  p.cu_seqlens = a.cu_seqlens;
  p.sequences = a.sequences;
  p.q = a.q;
  p.k = a.k;
  p.v = a.v;
  p.log_gate = a.log_gate;
  p.beta = a.beta;
  p.scale =
      a.scale != 0.0f ? a.scale : static_cast<float>(1.0 / std::sqrt(double(a.shape.head_dim_k)));
  p.normalize_qk = a.normalize_qk;
  p.select_only = select_only;
  p.states_alias = PoolsOverlap(a);
  p.initial_state = ToDevice(a.initial_state);
  p.final_state = ToDevice(a.final_state);
  p.o = a.o;
  p.mask = a.mask;
  p.mask_out = a.mask_out;
  p.selected = a.selected;
  p.snapshots = a.snapshots;
  p.snapshot_slots = a.snapshots == nullptr ? 0 : a.snapshot_slots;
  p.nonfinite = a.nonfinite;
  p.status = a.status;
  return p;
}

class CudaBackend : public GdnBackend {
 public:
  CudaBackend(int device, int major) : device_(device), major_(major) {}
  const char* name() const override { return "cuda"; }

  absl::StatusOr<size_t> WorkspaceBytes(const GdnLimits& limits) const override {
    if (auto s = ValidateLimits(limits); !s.ok()) return s;
    return cuda::LayoutWorkspace(limits.shape, limits.max_tokens, limits.max_seqs, nullptr,
                                 nullptr);
  }

  absl::Status Forward(const GdnForwardArgs& args, void* stream) override {
    return Run(args, EntryPoint::kForward, static_cast<cudaStream_t>(stream));
  }
  absl::Status Select(const GdnForwardArgs& args, void* stream) override {
    return Run(args, EntryPoint::kSelect, static_cast<cudaStream_t>(stream));
  }

 private:
  absl::Status Run(const GdnForwardArgs& args, EntryPoint entry, cudaStream_t stream) {
    if (auto s = ValidateArgs(args, entry); !s.ok()) return s;
    cuda::Params p = ToParams(args, entry == EntryPoint::kSelect);
    p.hopper = major_ == 9;
    if (auto s = Carve(args, &p.ws); !s.ok()) return s;
    if (auto s = FromCuda(cudaSetDevice(device_), "set device"); !s.ok()) return s;
    if (p.num_seqs == 0) {
      if (p.status == nullptr) return absl::OkStatus();
      return FromCuda(cudaMemsetAsync(p.status, 0, sizeof(uint32_t), stream), "clear status");
    }
    if (auto s = Selection(p, stream); !s.ok() || p.select_only) return s;
    if (args.selection_done != nullptr) {
      const auto event = static_cast<cudaEvent_t>(args.selection_done);
      if (auto s = FromCuda(cudaEventRecord(event, stream), "record event"); !s.ok()) return s;
    }
    return Core(p, stream);
  }

  absl::Status Carve(const GdnForwardArgs& args, cuda::Workspace* ws) const {
    char* base = static_cast<char*>(args.workspace);
    const size_t wanted =
        cuda::LayoutWorkspace(args.shape, args.num_tokens, args.num_seqs, base, ws);
    if (base == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("workspace = null, must be given, of >= ", wanted, " bytes"));
    }
    if (args.workspace_bytes < wanted) {
      return absl::ResourceExhaustedError(
          absl::StrCat("workspace_bytes = ", args.workspace_bytes, ", must be >= ", wanted));
    }
    if (reinterpret_cast<uintptr_t>(base) % 256 != 0) {
      return absl::InvalidArgumentError("workspace = unaligned, must be 256-byte aligned");
    }
    return absl::OkStatus();
  }

  absl::Status Selection(const cuda::Params& p, cudaStream_t stream) const {
    absl::Status s = FromCuda(cuda::LaunchPlan(p, stream), "plan");
    if (cuda::SelectSupports(p)) {
      s.Update(FromCuda(cuda::LaunchSelect(p, stream), "select"));
      return s;
    }
    s.Update(FromCuda(cuda::LaunchScores(p, stream), "scores"));
    s.Update(FromCuda(cuda::LaunchQuota(p, stream), "quota"));
    s.Update(FromCuda(cuda::LaunchCompact(p, stream), "compact"));
    return s;
  }

  absl::Status Core(const cuda::Params& p, cudaStream_t stream) const {
    if (p.normalize_qk) {
      if (auto s = FromCuda(cuda::LaunchNorms(p, stream), "norms"); !s.ok()) return s;
    }
    if (!cuda::FusedSupports(p, major_)) {
      return FromCuda(cuda::LaunchRecurrent(p, stream), "recurrent");
    }
    return FromCuda(cuda::LaunchFused(p, stream), "fused");
  }

  int device_;
  int major_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GdnBackend>> CreateCudaBackend(const CudaBackendOptions& options) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || options.device < 0 || options.device >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("device = ", options.device, ", must be below the ", count, " CUDA devices"));
  }
  int major = 0;
  if (auto s = FromCuda(
          cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.device),
          "compute capability");
      !s.ok()) {
    return s;
  }
  if (major < 8) {
    return absl::FailedPreconditionError(absl::StrCat(
        "device = ", options.device, " of compute capability ", major, ".x, must be 8.0 or later"));
  }
  return std::unique_ptr<GdnBackend>(std::make_unique<CudaBackend>(options.device, major));
}

}  // namespace sparsegdn
