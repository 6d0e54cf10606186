// The operations that the Qwen3.5 graph is written over. One implementation per backend:
// cpu_op_table.h; a CUDA one sits beside it without a change to the graph.
//
// Pointers are in the backend's memory, which the graph never dereferences. Activations have one
// dtype per table (activation_dtype); norms' weights, gates, rope tables and logits are FP32,
// indices int32 or int64. The argument structs and their equations are those of sparsegdn/ops.h.
// Calls are made from one thread and take effect in order; a backend may run them behind it, so
// results are read through ToHost alone.
#ifndef SPARSEGDN_SERVER_MODEL_OP_TABLE_H_
#define SPARSEGDN_SERVER_MODEL_OP_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/checkpoint.h"
#include "sparsegdn/gdn.h"
#include "sparsegdn/ops.h"
#include "sparsegdn/types.h"

namespace sparsegdn::model {

// A projection in the form that the backend multiplies by. Owned by the table that made it.
class Weight {
 public:
  virtual ~Weight() = default;
  virtual int64_t out() const = 0;
  virtual int64_t in() const = 0;
};

// A range of the backend's memory.
struct MemoryRange {
  const void* data = nullptr;
  size_t bytes = 0;
};

class OpTable {
 public:
  virtual ~OpTable() = default;
  virtual const char* name() const = 0;  // "cpu", "cuda"
  virtual DType activation_dtype() const = 0;
  // False after a sticky device fault.
  virtual bool healthy() const { return true; }

  // Once, before anything is allocated: what a model will ask for in all, and the most bytes that
  // one ToHost or ToHostLater will ask for. RESOURCE_EXHAUSTED, got and wanted, when the device is
  // too small; afterwards no step allocates.
  virtual absl::Status Reserve(size_t device_bytes, size_t to_host_bytes) {
    static_cast<void>(device_bytes), static_cast<void>(to_host_bytes);
    return absl::OkStatus();
  }
  // Memory of the table's lifetime, zeroed, 256-byte aligned; called while a model is loaded,
  // never by a step. RESOURCE_EXHAUSTED names `what` and the size.
  virtual absl::StatusOr<void*> Allocate(size_t bytes, std::string_view what) = 0;
  virtual absl::Status CopyIn(void* to, const void* from, size_t bytes) = 0;
  virtual absl::Status Zero(void* data, size_t bytes) = 0;
  // Waits for what was issued before, then makes every range readable by the host: views[i] is
  // ranges[i]. Views are valid until the next call of any function of the table.
  virtual absl::Status ToHost(std::span<const MemoryRange> ranges,
                              std::span<const void*> views) = 0;

  // As ToHost, but may return at once: `done` gets the views later, on this thread or one of the
  // table's, call after call in order, never two at a time. The ranges may be overwritten by later
  // operations of the table as soon as this returns; FinishToHost waits until every `done` has
  // returned. An error of a copy comes from one of the two, and its `done` is never called.
  using HostViews = std::span<const void* const>;
  virtual absl::Status ToHostLater(std::span<const MemoryRange> ranges,
                                   std::function<void(HostViews)> done) {
    std::vector<const void*> views(ranges.size());
    if (absl::Status s = ToHost(ranges, views); !s.ok()) return s;
    done(views);
    return absl::OkStatus();
  }
  virtual absl::Status FinishToHost() { return absl::OkStatus(); }

  // [parts[0]; parts[1]; ...] stacked by rows, each [rows, in]. The table owns the result.
  // RESOURCE_EXHAUSTED names the size.
  virtual absl::StatusOr<const Weight*> UploadMatrix(std::span<const HostTensor> parts) = 0;
  // Bytes that UploadMatrix takes for a matrix of so many elements; 0 where Reserve does not ask.
  virtual size_t MatrixBytes(int64_t elements) const {
    static_cast<void>(elements);
    return 0;
  }

  // Bytes of one block of the attention cache.
  virtual size_t KvBlockBytes(const AttentionShape& shape, int32_t block_tokens) const = 0;

  // Once, after the model's memory is allocated: what every Attention call will have in common.
  // Returns what computes it, for the log; empty where there is no choice.
  virtual std::string PrepareAttention(const AttentionLimits& limits) {
    static_cast<void>(limits);
    return "";
  }

  virtual absl::Status Embed(int64_t rows, const int32_t* tokens, const Weight& table, Rows y) = 0;
  // y = x W^T (+ residual, when its data is not null; it may be y).
  virtual absl::Status Gemm(int64_t rows, ConstRows x, const Weight& weight, ConstRows residual,
                            Rows y) = 0;
  // While a model is loaded, where tunes_gemm(): chooses by timing how products of this shape are
  // computed from then on; y holds nothing of use afterwards.
  virtual bool tunes_gemm() const { return false; }
  virtual absl::Status TuneGemm(int64_t, ConstRows, const Weight&, ConstRows, Rows) {
    return absl::OkStatus();
  }
  // As Gemm without residual, FP32 out: y [rows, weight.out()] contiguous.
  virtual absl::Status GemmLogits(int64_t rows, ConstRows x, const Weight& weight, float* y) = 0;
  virtual absl::Status GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x,
                                  Rows y) = 0;
  virtual absl::Status RmsNorm(const RmsNormArgs& args) = 0;
  virtual absl::Status GatedNorm(const GatedNormArgs& args) = 0;
  virtual absl::Status GdnFront(const GdnFrontArgs& args) = 0;
  virtual absl::Status ConvStateAt(const ConvStateAtArgs& args) = 0;
  virtual absl::Status RopeTable(const RopeTableArgs& args) = 0;
  virtual absl::Status AttentionFront(const AttentionFrontArgs& args) = 0;
  virtual absl::Status KvLoad(const KvLoadArgs& args) = 0;
  virtual absl::Status Attention(const AttentionArgs& args) = 0;
  virtual absl::Status SwiGlu(const SwiGluArgs& args) = 0;
  virtual absl::Status LogProb(const LogProbArgs& args) = 0;
  // flags[s] = 1 where a row of sequence s holds NaN or Inf; other flags stay.
  virtual absl::Status CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x,
                                   int32_t* flags) = 0;

  virtual absl::StatusOr<size_t> GdnWorkspaceBytes(const GdnLimits& limits) const = 0;
  // The GDN core. args.timings is the table's business: TakeGdnTimings adds up what cores took.
  virtual absl::Status GdnForward(const GdnForwardArgs& args) = 0;
  // Time spent in cores since the last call, after waiting for them.
  virtual absl::StatusOr<GdnTimings> TakeGdnTimings() = 0;
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_OP_TABLE_H_
