#include "server/model/cpu_op_table.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"
#include "sparsegdn/cpu_ops.h"

namespace sparsegdn::model {
namespace {

constexpr size_t kAlign = 256;

class CpuWeight : public Weight {
 public:
  explicit CpuWeight(PackedMatrix packed) : packed_(std::move(packed)) {}
  int64_t out() const override { return packed_.out(); }
  int64_t in() const override { return packed_.in(); }
  PackedMatrix& packed() { return packed_; }
  const PackedMatrix& packed() const { return packed_; }

 private:
  PackedMatrix packed_;
};

struct FreeMemory {
  void operator()(void* data) const { std::free(data); }
};

class CpuOpTable : public OpTable {
 public:
  CpuOpTable(int num_threads, std::unique_ptr<GdnBackend> gdn)
      : ops_(num_threads), gdn_(std::move(gdn)) {}

  const char* name() const override { return "cpu"; }
  DType activation_dtype() const override { return DType::kF32; }

  absl::StatusOr<void*> Allocate(size_t bytes, std::string_view what) override {
    // calloc leaves large ranges to the kernel's zero pages: memory that no step touches costs
    // nothing.
    void* data = std::calloc(bytes + kAlign, 1);
    if (data == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot allocate ", bytes, " bytes for ", std::string(what)));
    }
    memory_.emplace_back(data);
    const uintptr_t address = reinterpret_cast<uintptr_t>(data);
    return static_cast<char*>(data) + (kAlign - address % kAlign) % kAlign;
  }
  absl::Status CopyIn(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status Zero(void* data, size_t bytes) override {
    if (bytes > 0) std::memset(data, 0, bytes);
    return absl::OkStatus();
  }
  absl::Status ToHost(std::span<const MemoryRange> ranges, std::span<const void*> views) override {
    for (size_t i = 0; i < ranges.size(); ++i) views[i] = ranges[i].data;
    return absl::OkStatus();
  }

  absl::StatusOr<const Weight*> UploadMatrix(std::span<const HostTensor> parts) override {
    int64_t out = 0;
    DType dtype = DType::kBF16;
    for (const HostTensor& part : parts) {
      out += part.shape[0];
      if (part.dtype != DType::kBF16) dtype = DType::kF32;
    }
    auto weight = std::make_unique<CpuWeight>(PackedMatrix(dtype, out, parts[0].shape[1]));
    if (!weight->packed().allocated()) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", weight->packed().bytes(),
                                                       " bytes for a weight [", out, ", ",
                                                       parts[0].shape[1], "]"));
    }
    int64_t row = 0;
    for (const HostTensor& part : parts) {
      ops_.Pack(weight->packed(), row, part.shape[0], part.bytes.data(), part.dtype);
      row += part.shape[0];
    }
    weights_.push_back(std::move(weight));
    return weights_.back().get();
  }

  size_t KvBlockBytes(const AttentionShape& shape, int32_t block_tokens) const override {
    return CpuKvBlockBytes(shape, block_tokens);
  }

  absl::Status Embed(int64_t rows, const int32_t* tokens, const Weight& table, Rows y) override {
    ops_.Embed(rows, tokens, Packed(table), y);
    return absl::OkStatus();
  }
  absl::Status Gemm(int64_t rows, ConstRows x, const Weight& weight, ConstRows residual,
                    Rows y) override {
    ops_.Gemm(rows, x, Packed(weight), residual, y);
    return absl::OkStatus();
  }
  absl::Status GemmLogits(int64_t rows, ConstRows x, const Weight& weight, float* y) override {
    ops_.Gemm(rows, x, Packed(weight), {}, {y, weight.out()});
    return absl::OkStatus();
  }
  absl::Status GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x,
                          Rows y) override {
    ops_.GatherRows(rows, cols, index, x, y);
    return absl::OkStatus();
  }
  absl::Status RmsNorm(const RmsNormArgs& args) override {
    ops_.RmsNorm(args);
    return absl::OkStatus();
  }
  absl::Status GatedNorm(const GatedNormArgs& args) override {
    ops_.GatedNorm(args);
    return absl::OkStatus();
  }
  absl::Status GdnFront(const GdnFrontArgs& args) override {
    ops_.GdnFront(args);
    return absl::OkStatus();
  }
  absl::Status ConvStateAt(const ConvStateAtArgs& args) override {
    ops_.ConvStateAt(args);
    return absl::OkStatus();
  }
  absl::Status RopeTable(const RopeTableArgs& args) override {
    ops_.RopeTable(args);
    return absl::OkStatus();
  }
  absl::Status AttentionFront(const AttentionFrontArgs& args) override {
    ops_.AttentionFront(args);
    return absl::OkStatus();
  }
  absl::Status KvLoad(const KvLoadArgs& args) override {
    ops_.KvLoad(args);
    return absl::OkStatus();
  }
  absl::Status Attention(const AttentionArgs& args) override {
    ops_.Attention(args);
    return absl::OkStatus();
  }
  absl::Status SwiGlu(const SwiGluArgs& args) override {
    ops_.SwiGlu(args);
    return absl::OkStatus();
  }
  absl::Status LogProb(const LogProbArgs& args) override {
    ops_.LogProb(args);
    return absl::OkStatus();
  }
  absl::Status CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x,
                           int32_t* flags) override {
    ops_.CheckFinite(pack, cols, x, flags);
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> GdnWorkspaceBytes(const GdnLimits& limits) const override {
    return gdn_->WorkspaceBytes(limits);
  }
  absl::Status GdnForward(const GdnForwardArgs& args) override {
    GdnTimings timings;
    GdnForwardArgs timed = args;
    timed.timings = &timings;
    SPARSEGDN_RETURN_IF_ERROR(gdn_->Forward(timed, nullptr));
    timings_.selection_ns += timings.selection_ns;
    timings_.core_ns += timings.core_ns;
    return absl::OkStatus();
  }
  absl::StatusOr<GdnTimings> TakeGdnTimings() override {
    return std::exchange(timings_, GdnTimings{});
  }

 private:
  static const PackedMatrix& Packed(const Weight& weight) {
    return static_cast<const CpuWeight&>(weight).packed();
  }

  CpuOps ops_;
  std::unique_ptr<GdnBackend> gdn_;
  GdnTimings timings_;
  std::vector<std::unique_ptr<CpuWeight>> weights_;
  std::vector<std::unique_ptr<void, FreeMemory>> memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OpTable>> CreateCpuOpTable(int num_threads,
                                                          std::unique_ptr<GdnBackend> gdn) {
  if (gdn == nullptr) {
    SPARSEGDN_ASSIGN_OR_RETURN(gdn, CreateCpuBackend({.num_threads = num_threads}));
  }
  return std::unique_ptr<OpTable>(new CpuOpTable(num_threads, std::move(gdn)));
}

}  // namespace sparsegdn::model
