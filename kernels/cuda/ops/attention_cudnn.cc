// One graph of cuDNN's for each power of two of sequences. Queries, outputs, keys and values are
// "ragged": sequence s starts at an offset of its own in each of them, read on the device, so that
// a plan serves every pack with as many sequences or fewer (the rest are empty) and the graph never
// changes with lengths or places in the cache. Outputs past a sequence's end are not written.
#include "kernels/cuda/ops/attention_cudnn.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
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

constexpr int32_t kMaxSeqs = 64;  // of a plan
constexpr int64_t kMaxWorkspaceBytes = int64_t{64} << 20;

enum Uid : int64_t { kQ = 1, kK, kV, kO, kQLength, kKvLength, kQOffset, kKvOffset, kOOffset };

absl::Status FromFrontend(const fe::error_t& error, const char* what) {
  if (error.is_good()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("cudnn: ", what, ": ", error.err_msg));
}

absl::Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
}

// Once a process; never closed, since plans of the frontend's hold functions of it.
absl::Status OpenLibrary() {
  static const absl::Status status = [] {
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (fe::cudnn_dlhandle != nullptr) return absl::OkStatus();
    const char* why = dlerror();
    return absl::FailedPreconditionError(why == nullptr ? "libcudnn.so.9 not found" : why);
  }();
  return status;
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

struct DeviceBytes {
  explicit DeviceBytes(size_t count) : bytes(count) {
    if (cudaMalloc(reinterpret_cast<void**>(&data), count) != cudaSuccess) {
      cudaGetLastError();
      data = nullptr;
    }
  }
  ~DeviceBytes() { cudaFree(data); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  char* data = nullptr;
  size_t bytes;
};

class Cudnn : public CudnnAttention {
 public:
  explicit Cudnn(const AttentionLimits& limits) : limits_(limits) {}
  ~Cudnn() override {
    cudaStreamSynchronize(stream_);
    plans_.clear();
    if (handle_ != nullptr) fe::detail::destroy_handle(handle_);
    if (memory_ != nullptr) cudaFree(memory_);
  }

  absl::Status Init(cudaStream_t stream) {
    stream_ = stream;
    if (absl::Status s = OpenLibrary(); !s.ok()) return s;
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
    if (workspace > kMaxWorkspaceBytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("cudnn: ", workspace, " bytes of workspace, wanted at most ",
                       kMaxWorkspaceBytes));
    }
    max_seqs_ = int32_t{1} << (plans_.size() - 1);
    const size_t layout = AttentionLayoutBytes(max_seqs_);
    if (cudaMalloc(&memory_, layout + static_cast<size_t>(workspace)) != cudaSuccess) {
      cudaGetLastError();
      return absl::FailedPreconditionError("cudnn: no device memory for its workspace");
    }
    workspace_ = static_cast<char*>(memory_) + layout;
    return Try();
  }

  std::string version() const override {
    const size_t v = fe::detail::get_backend_version();
    return absl::StrCat(v / 10000, ".", v / 100 % 100, ".", v % 100);
  }

  bool Supports(const AttentionArgs& a) const override {
    const AttentionLimits& l = limits_;
    return a.cache.consecutive && a.cache.block_tokens == l.block_tokens &&
           a.pack.num_seqs <= max_seqs_ && a.pack.num_tokens >= kCudnnLeastTokens &&
           a.pack.num_tokens <= l.max_tokens && a.q.stride == l.q_stride &&
           a.out.stride == l.out_stride && a.shape.num_q_heads == l.shape.num_q_heads &&
           a.shape.num_kv_heads == l.shape.num_kv_heads && a.shape.head_dim == l.shape.head_dim;
  }

  absl::Status Run(const AttentionArgs& a) override {
    size_t index = 0;
    while ((int32_t{1} << index) < a.pack.num_seqs) ++index;
    const int32_t seqs = int32_t{1} << index;
    const AttentionLayout layout = AttentionLayoutIn(memory_, seqs);
    if (absl::Status s = FromCuda(LaunchAttentionLayout(a, layout, stream_), "attention layout");
        !s.ok()) {
      return s;
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
    return FromCuda(LaunchAttentionGate(a, stream_), "attention gate");
  }

 private:
  // One short sequence of zeros with NaN behind what it may read: its output must be finite.
  absl::Status Try() {
    const AttentionShape& s = limits_.shape;
    const int64_t rows = kCudnnKeyTile + 1, width = int64_t{2} * s.num_kv_heads * s.head_dim;
    const int64_t read = int64_t{2} * kCudnnKeyTile;
    if (rows > limits_.max_tokens || read + limits_.block_tokens > limits_.kv_tokens) {
      return absl::OkStatus();  // no pack of such limits gets here with more
    }
    const size_t element = sizeof(uint16_t);
    const size_t cache = static_cast<size_t>((read + limits_.block_tokens) * width) * element;
    const size_t q = static_cast<size_t>(rows * limits_.q_stride) * element;
    const size_t gate = static_cast<size_t>(rows * 2 * s.num_q_heads * s.head_dim) * element;
    const size_t out = static_cast<size_t>(rows * limits_.out_stride) * element;
    const size_t indices = 256;
    DeviceBytes memory(cache + q + gate + out + indices);
    char* base = memory.data;
    if (base == nullptr) return absl::FailedPreconditionError("cudnn: no device memory to try it");
    const struct {
      int64_t first_position = 0;
      int32_t cu_seqlens[2] = {0, kCudnnKeyTile + 1};
      int32_t block = 0;
    } pack;
    char* at = base + cache + q + gate + out;
    cudaError_t error = cudaMemsetAsync(base, 0, memory.bytes, stream_);
    const size_t zeros = static_cast<size_t>(read * width) * element;
    if (error == cudaSuccess) error = cudaMemsetAsync(base + zeros, 0xff, cache - zeros, stream_);
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(at, &pack, sizeof(pack), cudaMemcpyHostToDevice, stream_);
    }
    if (error != cudaSuccess) return FromCuda(error, "attention trial");
    const auto* tables = reinterpret_cast<const int32_t*>(at + offsetof(decltype(pack), block));
    AttentionArgs args;
    args.pack = {1, rows,
                 reinterpret_cast<const int32_t*>(at + offsetof(decltype(pack), cu_seqlens)),
                 nullptr, reinterpret_cast<const int64_t*>(at)};
    args.shape = s;
    args.q = {base + cache, limits_.q_stride};
    args.q_gate = {base + cache + q, int64_t{2} * s.num_q_heads * s.head_dim};
    args.cache = {base, tables, 1, limits_.block_tokens, true};
    args.out = {base + cache + q + gate, limits_.out_stride};
    if (absl::Status status = Run(args); !status.ok()) return status;
    std::vector<uint16_t> got(out / element);
    error = cudaMemcpyAsync(got.data(), args.out.data, out, cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    if (error != cudaSuccess) return FromCuda(error, "attention trial");
    const bool finite = std::all_of(got.begin(), got.end(),
                                    [](uint16_t x) { return (x & 0x7f80) != 0x7f80; });
    if (finite) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "cudnn: reads keys and values more than ", kCudnnKeyTile, " past a sequence's end"));
  }

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
