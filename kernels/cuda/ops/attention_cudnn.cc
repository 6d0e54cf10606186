// One graph of cuDNN's for each power of two of sequences. Queries, outputs, keys and values are
// "ragged": sequence s starts at an offset of its own in each of them, read on the device, so that
// a plan serves every pack with as many sequences or fewer (the rest are empty) and the graph never
// changes with lengths or places in the cache. Outputs past a sequence's end are not written.
#include "kernels/cuda/ops/attention_cudnn.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/ops/launch.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the frontend finds every function of the library through this
}

namespace sparsegdn::cuda_ops {
namespace {

namespace fe = cudnn_frontend;

constexpr int32_t kMaxSeqs = 64;    // of a plan
constexpr int64_t kMinTokens = 128;  // below, our own kernel's shorter blocks win

enum Uid : int64_t { kQ = 1, kK, kV, kO, kQLength, kKvLength, kQOffset, kKvOffset, kOOffset };

absl::Status FromFrontend(const fe::error_t& error, const char* what) {
  if (error.is_good()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("cudnn: ", what, ": ", error.err_msg));
}

absl::StatusOr<void*> OpenLibrary() {
  if (fe::cudnn_dlhandle != nullptr) return fe::cudnn_dlhandle;
  for (const char* name : {"libcudnn.so.9", "libcudnn.so"}) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL); handle != nullptr) return handle;
  }
  const char* why = dlerror();
  return absl::FailedPreconditionError(why == nullptr ? "libcudnn.so.9 not found" : why);
}

struct Plan {
  fe::graph::Graph graph;
  int64_t workspace_bytes = 0;
};

// Heads side by side in rows of `stride` elements.
fe::graph::Tensor_attributes Heads(const char* name, Uid uid, int64_t seqs, int64_t heads,
                                   int64_t rows, int64_t dim, int64_t stride,
                                   std::shared_ptr<fe::graph::Tensor_attributes> offset) {
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(uid)
      .set_dim({seqs, heads, rows, dim})
      .set_stride({rows * stride, dim, stride, 1})
      .set_ragged_offset(std::move(offset));
}

fe::graph::Tensor_attributes Numbers(const char* name, Uid uid, int64_t count, fe::DataType_t type) {
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(uid)
      .set_dim({count, 1, 1, 1})
      .set_stride({1, 1, 1, 1})
      .set_data_type(type);
}

absl::StatusOr<std::unique_ptr<Plan>> MakePlan(const AttentionLimits& l, int64_t seqs,
                                               cudnnHandle_t handle) {
  auto plan = std::make_unique<Plan>();
  fe::graph::Graph& graph = plan->graph;
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const int64_t dim = l.shape.head_dim, row = int64_t{2} * l.shape.num_kv_heads * dim;
  const auto number = fe::DataType_t::INT32, offset = fe::DataType_t::INT64;
  const auto q_length = graph.tensor(Numbers("q_length", kQLength, seqs, number));
  const auto kv_length = graph.tensor(Numbers("kv_length", kKvLength, seqs, number));
  const auto q_offset = graph.tensor(Numbers("q_offset", kQOffset, seqs + 1, offset));
  const auto kv_offset = graph.tensor(Numbers("kv_offset", kKvOffset, seqs + 1, offset));
  const auto o_offset = graph.tensor(Numbers("o_offset", kOOffset, seqs + 1, offset));
  const auto q = graph.tensor(
      Heads("q", kQ, seqs, l.shape.num_q_heads, l.max_tokens, dim, l.q_stride, q_offset));
  const auto k = graph.tensor(
      Heads("k", kK, seqs, l.shape.num_kv_heads, l.kv_tokens, dim, row, kv_offset));
  const auto v = graph.tensor(
      Heads("v", kV, seqs, l.shape.num_kv_heads, l.kv_tokens, dim, row, kv_offset));
  const auto [o, stats] =
      graph.sdpa(q, k, v,
                 fe::graph::SDPA_attributes()
                     .set_name("attention")
                     .set_generate_stats(false)
                     .set_attn_scale(1.0f / std::sqrt(static_cast<float>(dim)))
                     .set_padding_mask(true)
                     .set_seq_len_q(q_length)
                     .set_seq_len_kv(kv_length)
                     .set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT)
                     .set_diagonal_band_right_bound(0));
  o->set_output(true)
      .set_uid(kO)
      .set_dim({seqs, l.shape.num_q_heads, l.max_tokens, dim})
      .set_stride({l.max_tokens * l.out_stride, dim, l.out_stride, 1})
      .set_ragged_offset(o_offset);
  absl::Status s = FromFrontend(graph.build(handle, {fe::HeurMode_t::A}), "plan");
  if (!s.ok()) return s;
  plan->workspace_bytes = graph.get_workspace_size();
  return plan;
}

class Cudnn : public CudnnAttention {
 public:
  explicit Cudnn(const AttentionLimits& limits) : limits_(limits) {}
  ~Cudnn() override {
    plans_.clear();
    if (handle_ != nullptr) fe::detail::destroy_handle(handle_);
    if (memory_ != nullptr) cudaFree(memory_);
  }

  absl::Status Init(cudaStream_t stream) {
    stream_ = stream;
    absl::StatusOr<void*> library = OpenLibrary();
    if (!library.ok()) return library.status();
    fe::cudnn_dlhandle = *library;
    if (fe::detail::create_handle(&handle_) != CUDNN_STATUS_SUCCESS ||
        fe::detail::set_stream(handle_, stream) != CUDNN_STATUS_SUCCESS) {
      return absl::FailedPreconditionError("cudnn: cannot create a handle");
    }
    int64_t workspace = 0;
    for (int32_t seqs = 1;; seqs *= 2) {
      absl::StatusOr<std::unique_ptr<Plan>> plan = MakePlan(limits_, seqs, handle_);
      if (!plan.ok()) return plan.status();
      workspace = std::max(workspace, (*plan)->workspace_bytes);
      plans_.push_back(*std::move(plan));
      if (seqs >= std::min(limits_.max_seqs, kMaxSeqs)) break;
    }
    max_seqs_ = int32_t{1} << (plans_.size() - 1);
    const size_t layout = AttentionLayoutBytes(max_seqs_);
    if (cudaMalloc(&memory_, layout + static_cast<size_t>(workspace)) != cudaSuccess) {
      cudaGetLastError();
      return absl::FailedPreconditionError("cudnn: no device memory for its workspace");
    }
    workspace_ = static_cast<char*>(memory_) + layout;
    return absl::OkStatus();
  }

  std::string version() const override {
    const size_t v = fe::detail::get_backend_version();
    return absl::StrCat(v / 10000, ".", v / 100 % 100, ".", v % 100);
  }

  bool Supports(const AttentionArgs& a) const override {
    const AttentionLimits& l = limits_;
    return a.cache.consecutive && a.cache.block_tokens == l.block_tokens &&
           a.pack.num_seqs <= max_seqs_ && a.pack.num_tokens >= kMinTokens &&
           a.pack.num_tokens <= l.max_tokens && a.q.stride == l.q_stride &&
           a.out.stride == l.out_stride && a.shape.num_q_heads == l.shape.num_q_heads &&
           a.shape.num_kv_heads == l.shape.num_kv_heads && a.shape.head_dim == l.shape.head_dim;
  }

  absl::Status Run(const AttentionArgs& a) override {
    size_t index = 0;
    while ((int32_t{1} << index) < a.pack.num_seqs) ++index;
    const int32_t seqs = int32_t{1} << index;
    const AttentionLayout layout = AttentionLayoutIn(memory_, seqs);
    if (LaunchAttentionLayout(a, layout, stream_) != cudaSuccess) {
      return absl::InternalError("cudnn: layout kernel");
    }
    const int64_t half = int64_t{a.shape.num_kv_heads} * a.shape.head_dim;
    auto* keys = static_cast<uint16_t*>(a.cache.data);
    std::unordered_map<int64_t, void*> tensors{{kQ, const_cast<void*>(a.q.data)},
                                               {kK, keys},
                                               {kV, keys + half},
                                               {kO, a.out.data},
                                               {kQLength, layout.q_length},
                                               {kKvLength, layout.kv_length},
                                               {kQOffset, layout.q_offset},
                                               {kKvOffset, layout.kv_offset},
                                               {kOOffset, layout.o_offset}};
    try {
      const fe::error_t error = plans_[index]->graph.execute(handle_, tensors, workspace_);
      if (!error.is_good()) return absl::InternalError(absl::StrCat("cudnn: ", error.err_msg));
    } catch (const std::exception& e) {
      return absl::InternalError(absl::StrCat("cudnn: ", e.what()));
    }
    if (LaunchAttentionGate(a, stream_) != cudaSuccess) {
      return absl::InternalError("cudnn: gate kernel");
    }
    return absl::OkStatus();
  }

 private:
  const AttentionLimits limits_;
  cudaStream_t stream_ = nullptr;
  cudnnHandle_t handle_ = nullptr;
  int32_t max_seqs_ = 0;
  std::vector<std::unique_ptr<Plan>> plans_;  // of 1, 2, 4 .. max_seqs_ sequences
  void* memory_ = nullptr;                    // layout, then workspace
  void* workspace_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudnnAttention>> CudnnAttention::Create(
    const AttentionLimits& limits, cudaStream_t stream) {
  // Rows past a sequence's end that the kernel reads must lie in a block of the sequence's own.
  if (limits.block_tokens % kCudnnKeyTile != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cache blocks of ", limits.block_tokens,
                                                      " tokens, wanted a multiple of ",
                                                      kCudnnKeyTile));
  }
  try {
    auto attention = std::make_unique<Cudnn>(limits);
    if (absl::Status s = attention->Init(stream); !s.ok()) return s;
    return attention;
  } catch (const std::exception& e) {
    return absl::FailedPreconditionError(absl::StrCat("cudnn: ", e.what()));
  }
}

}  // namespace sparsegdn::cuda_ops
