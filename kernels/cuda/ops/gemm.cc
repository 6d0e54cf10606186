// cuBLASLt sees columns: y^T [out, rows] = W [out, in] x^T [in, rows], with W's rows as columns of
// a transposed first operand.
#include "kernels/cuda/ops/gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace sparsegdn::cuda_ops {
namespace {

constexpr size_t kMaxPlans = 4096;  // shapes remembered; a server meets one set per batch size
constexpr int kCandidates = 8;      // algorithms that Tune times
constexpr int kTimedRuns = 3;
constexpr float kClearlyFaster = 0.98f;  // of the heuristic's first choice

// The library's entry points that this file calls.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) check = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
};

template <typename F>
bool Find(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  return function != nullptr;
}

absl::StatusOr<Library> OpenLibrary() {
  void* handle = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
    if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    const char* why = dlerror();
    return absl::FailedPreconditionError(
        absl::StrCat("backend = \"cuda\" needs cuBLASLt (libcublasLt.so.13) on the library path: ",
                     why == nullptr ? "not found" : why));
  }
  Library lt;
  const bool all = Find(handle, "cublasLtCreate", lt.create) &&
                   Find(handle, "cublasLtDestroy", lt.destroy) &&
                   Find(handle, "cublasLtMatmul", lt.matmul) &&
                   Find(handle, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic) &&
                   Find(handle, "cublasLtMatmulAlgoCheck", lt.check) &&
                   Find(handle, "cublasLtMatmulDescCreate", lt.desc_create) &&
                   Find(handle, "cublasLtMatmulDescDestroy", lt.desc_destroy) &&
                   Find(handle, "cublasLtMatmulDescSetAttribute", lt.desc_set) &&
                   Find(handle, "cublasLtMatrixLayoutCreate", lt.layout_create) &&
                   Find(handle, "cublasLtMatrixLayoutDestroy", lt.layout_destroy) &&
                   Find(handle, "cublasLtMatmulPreferenceCreate", lt.preference_create) &&
                   Find(handle, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy) &&
                   Find(handle, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
  if (!all) return absl::FailedPreconditionError("libcublasLt lacks a function that is needed");
  return lt;
}

absl::Status FromLt(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cublasLt: ", what, ": status ", int{status}));
}

// rows, out, in, stride of x, of the residual (-1: none) and of y, FP32 out.
using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>;

// out, in, with residual, FP32 out.
using MatrixKey = std::tuple<int64_t, int64_t, bool, bool>;

struct Plan {
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, c = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm;
};

}  // namespace

struct LtGemm::Impl {
  ~Impl() {
    Clear();
    if (description != nullptr) lt.desc_destroy(description);
    if (preference != nullptr) lt.preference_destroy(preference);
    if (handle != nullptr) lt.destroy(handle);
    if (workspace != nullptr) cudaFree(workspace);
    for (cudaEvent_t event : {begin, end}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }

  void Clear() {
    for (auto& [key, plan] : plans) Destroy(plan);
    plans.clear();
  }
  void Destroy(Plan& plan) {
    for (cublasLtMatrixLayout_t layout : {plan.w, plan.x, plan.c, plan.y}) {
      if (layout != nullptr) lt.layout_destroy(layout);
    }
  }

  absl::Status Init(size_t bytes) {
    workspace_bytes = bytes;
    if (cudaMalloc(&workspace, bytes) != cudaSuccess) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot allocate ", bytes, " bytes of device memory for products"));
    }
    if (cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess) {
      return absl::InternalError("cuda: cannot create events");
    }
    absl::Status s = FromLt(lt.create(&handle), "create");
    if (s.ok()) {
      s = FromLt(lt.desc_create(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description");
    }
    if (s.ok()) s = FromLt(lt.preference_create(&preference), "preference");
    if (!s.ok()) return s;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    s = FromLt(
        lt.desc_set(description, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
        "transpose");
    s.Update(FromLt(lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                      &workspace_bytes, sizeof(workspace_bytes)),
                    "workspace"));
    return s;
  }

  absl::StatusOr<Plan*> PlanOf(const Product& p) {
    const Key key{p.rows,
                  p.weight.out,
                  p.weight.in,
                  p.x.stride,
                  p.residual.data == nullptr ? -1 : p.residual.stride,
                  p.y.stride,
                  p.fp32_out};
    if (auto it = plans.find(key); it != plans.end()) return &it->second;
    if (plans.size() >= kMaxPlans) Clear();
    Plan plan;
    absl::Status s = MakePlan(p, plan);
    if (!s.ok()) {
      Destroy(plan);
      return s;
    }
    return &plans.emplace(key, plan).first->second;
  }

  absl::Status MakeLayouts(const Product& p, Plan& plan) {
    const cudaDataType_t out = p.fp32_out ? CUDA_R_32F : CUDA_R_16BF;
    const uint64_t n = static_cast<uint64_t>(p.weight.out), k = static_cast<uint64_t>(p.weight.in);
    const uint64_t m = static_cast<uint64_t>(p.rows);
    const int64_t c_stride = p.residual.data == nullptr ? p.y.stride : p.residual.stride;
    absl::Status s = FromLt(lt.layout_create(&plan.w, CUDA_R_16BF, k, n, p.weight.in), "layout");
    s.Update(FromLt(lt.layout_create(&plan.x, CUDA_R_16BF, k, m, p.x.stride), "layout"));
    s.Update(FromLt(lt.layout_create(&plan.c, out, n, m, c_stride), "layout"));
    s.Update(FromLt(lt.layout_create(&plan.y, out, n, m, p.y.stride), "layout"));
    return s;
  }

  // Usable ones, best first; at least one.
  absl::StatusOr<std::vector<cublasLtMatmulHeuristicResult_t>> Candidates(const Product& p,
                                                                          const Plan& plan,
                                                                          int most) {
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
    int found = 0;
    absl::Status s = FromLt(lt.heuristic(handle, description, plan.w, plan.x, plan.c, plan.y,
                                         preference, most, results.data(), &found),
                            "heuristic");
    if (!s.ok()) return s;
    results.resize(static_cast<size_t>(found));
    std::erase_if(results, [](const auto& r) { return r.state != CUBLAS_STATUS_SUCCESS; });
    if (results.empty()) {
      return absl::InternalError(absl::StrCat("cublasLt: no algorithm for [", p.rows, ", ",
                                              p.weight.in, "] x [", p.weight.out, ", ", p.weight.in,
                                              "]^T"));
    }
    return results;
  }

  // What was chosen for the greatest tuned number of rows that is not far above p.rows, or null.
  const std::pair<const int64_t, cublasLtMatmulAlgo_t>* TunedFor(const Product& p) const {
    const auto matrix = tuned.find(KeyOf(p));
    if (matrix == tuned.end()) return nullptr;
    const auto above = matrix->second.upper_bound(p.rows + p.rows / 3);
    return above == matrix->second.begin() ? nullptr : &*std::prev(above);
  }

  // The tuned algorithm where there is one and it is valid; else the heuristic's first.
  absl::Status MakePlan(const Product& p, Plan& plan) {
    absl::Status s = MakeLayouts(p, plan);
    if (!s.ok()) return s;
    if (const auto* chosen = TunedFor(p); chosen != nullptr) {
      plan.algorithm = chosen->second;
      cublasLtMatmulHeuristicResult_t result{};
      if (lt.check(handle, description, plan.w, plan.x, plan.c, plan.y, &plan.algorithm,
                   &result) == CUBLAS_STATUS_SUCCESS &&
          result.workspaceSize <= workspace_bytes) {
        return absl::OkStatus();
      }
    }
    auto candidates = Candidates(p, plan, 1);
    if (!candidates.ok()) return candidates.status();
    plan.algorithm = candidates->front().algo;
    return absl::OkStatus();
  }

  absl::Status Multiply(const Product& p, const Plan& plan, cudaStream_t stream) {
    const float one = 1.0f, zero = 0.0f;
    const bool add = p.residual.data != nullptr;
    return FromLt(
        lt.matmul(handle, description, &one, p.weight.data, plan.w, p.x.data, plan.x,
                  add ? &one : &zero, add ? p.residual.data : p.y.data, plan.c, p.y.data, plan.y,
                  &plan.algorithm, workspace, workspace_bytes, stream),
        "product");
  }

  // Milliseconds of kTimedRuns products.
  absl::StatusOr<float> Time(const Product& p, const Plan& plan, cudaStream_t stream) {
    cudaError_t recorded = cudaSuccess;
    for (int run = 0; run <= kTimedRuns; ++run) {
      if (run == 1) recorded = cudaEventRecord(begin, stream);  // the first warms up
      if (absl::Status s = Multiply(p, plan, stream); !s.ok()) return s;
    }
    float ms = 0.0f;
    if (recorded != cudaSuccess || cudaEventRecord(end, stream) != cudaSuccess ||
        cudaEventSynchronize(end) != cudaSuccess ||
        cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
      return absl::InternalError("cublasLt: a product failed while it was timed");
    }
    return ms;
  }

  static MatrixKey KeyOf(const Product& p) {
    return {p.weight.out, p.weight.in, p.residual.data != nullptr, p.fp32_out};
  }

  Library lt;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  cudaEvent_t begin = nullptr, end = nullptr;  // of Time
  std::map<Key, Plan> plans;
  std::map<MatrixKey, std::map<int64_t, cublasLtMatmulAlgo_t>> tuned;  // by rows
};

LtGemm::LtGemm(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LtGemm::~LtGemm() = default;

absl::StatusOr<std::unique_ptr<LtGemm>> LtGemm::Create(size_t workspace_bytes) {
  absl::StatusOr<Library> library = OpenLibrary();
  if (!library.ok()) return library.status();
  auto impl = std::make_unique<Impl>();
  impl->lt = *library;
  if (absl::Status s = impl->Init(workspace_bytes); !s.ok()) return s;
  return std::unique_ptr<LtGemm>(new LtGemm(std::move(impl)));
}

absl::Status LtGemm::Run(const Product& p, cudaStream_t stream) {
  if (p.rows == 0 || p.weight.out == 0) return absl::OkStatus();
  absl::StatusOr<Plan*> plan = impl_->PlanOf(p);
  if (!plan.ok()) return plan.status();
  return impl_->Multiply(p, **plan, stream);
}

absl::Status LtGemm::Tune(const Product& p, cudaStream_t stream) {
  if (p.rows == 0 || p.weight.out == 0) return absl::OkStatus();
  Impl& impl = *impl_;
  Plan plan;
  absl::Status s = impl.MakeLayouts(p, plan);
  if (s.ok()) {
    auto candidates = impl.Candidates(p, plan, kCandidates);
    s = candidates.status();
    float least = 0.0f;  // 0: none yet
    for (size_t i = 0; s.ok() && i < candidates->size(); ++i) {
      plan.algorithm = (*candidates)[i].algo;
      const auto ms = impl.Time(p, plan, stream);
      if (!ms.ok()) {  // refused by the library, or the device is lost
        if (cudaStreamSynchronize(stream) != cudaSuccess) s = ms.status();
        continue;
      }
      if (least > 0.0f && *ms >= least) continue;
      least = i == 0 ? *ms * kClearlyFaster : *ms;
      impl.tuned[Impl::KeyOf(p)].insert_or_assign(p.rows, plan.algorithm);
    }
  }
  impl.Destroy(plan);
  impl.Clear();  // plans made before do not know of it
  return s;
}

int64_t LtGemm::TunedRows(const Product& p) const {
  const auto* chosen = impl_->TunedFor(p);
  return chosen == nullptr ? 0 : chosen->first;
}

}  // namespace sparsegdn::cuda_ops
