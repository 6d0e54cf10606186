#include "server/model/cuda_op_table.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/cuda_readback.h"
#include "server/model/cuda_upload.h"
#include "server/model/status_macros.h"
#include "sparsegdn/cuda_ops.h"

namespace sparsegdn::model {
namespace {

// Left to the driver, to loaded kernels and to the library that multiplies.
constexpr size_t kMarginBytes = size_t{512} << 20;
constexpr size_t kMinHostBytes = size_t{1} << 20;

class CudaWeight : public Weight {
 public:
  explicit CudaWeight(CudaMatrix matrix) : matrix_(matrix) {}
  int64_t out() const override { return matrix_.out; }
  int64_t in() const override { return matrix_.in; }
  const CudaMatrix& matrix() const { return matrix_; }

 private:
  CudaMatrix matrix_;
};

// Events around the GDN cores of one step, made as they are first needed and kept.
class CoreClock {
 public:
  struct Marks {
    cudaEvent_t begin = nullptr, selected = nullptr, end = nullptr;
  };
  ~CoreClock() {
    for (const Marks& m : marks_) {
      for (cudaEvent_t e : {m.begin, m.selected, m.end}) {
        if (e != nullptr) cudaEventDestroy(e);
      }
    }
  }
  absl::StatusOr<Marks> Next() {
    if (used_ == marks_.size()) {
      Marks m;
      for (cudaEvent_t* e : {&m.begin, &m.selected, &m.end}) {
        SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaEventCreate(e), "event"));
      }
      marks_.push_back(m);
    }
    return marks_[used_++];
  }
  // After the device has passed every mark.
  absl::StatusOr<GdnTimings> Take() {
    GdnTimings sum;
    for (size_t i = 0; i < used_; ++i) {
      float selection = 0.0f, core = 0.0f;
      SPARSEGDN_RETURN_IF_ERROR(
          FromCuda(cudaEventElapsedTime(&selection, marks_[i].begin, marks_[i].selected), "event"));
      SPARSEGDN_RETURN_IF_ERROR(
          FromCuda(cudaEventElapsedTime(&core, marks_[i].selected, marks_[i].end), "event"));
      sum.selection_ns += static_cast<int64_t>(1e6 * double{selection});
      sum.core_ns += static_cast<int64_t>(1e6 * double{core});
    }
    used_ = 0;
    return sum;
  }
  void Forget() { used_ = 0; }

 private:
  std::vector<Marks> marks_;
  size_t used_ = 0;
};

class CudaOpTable : public OpTable {
 public:
  explicit CudaOpTable(int device) : device_(device) {}
  ~CudaOpTable() override;
  absl::Status Init();

  const char* name() const override { return "cuda"; }
  DType activation_dtype() const override { return DType::kBF16; }
  bool healthy() const override { return healthy_; }

  absl::Status Reserve(size_t device_bytes, size_t to_host_bytes) override;
  absl::StatusOr<void*> Allocate(size_t bytes, std::string_view what) override;
  absl::Status CopyIn(void* to, const void* from, size_t bytes) override;
  absl::Status Zero(void* data, size_t bytes) override;
  absl::Status ToHost(std::span<const MemoryRange> ranges, std::span<const void*> views) override;
  absl::Status ToHostLater(std::span<const MemoryRange> ranges,
                           std::function<void(HostViews)> done) override;
  absl::Status FinishToHost() override;
  absl::StatusOr<const Weight*> UploadMatrix(std::span<const HostTensor> parts) override;
  size_t MatrixBytes(int64_t elements) const override { return 2 * static_cast<size_t>(elements); }
  size_t KvBlockBytes(const AttentionShape& shape, int32_t block_tokens) const override {
    return CudaKvBlockBytes(shape, block_tokens);
  }

  std::string PrepareAttention(const AttentionLimits& limits) override {
    return ops_->PrepareAttention(limits);
  }

  absl::Status Embed(int64_t rows, const int32_t* tokens, const Weight& table, Rows y) override {
    const CudaMatrix& m = Matrix(table);
    return Watch(ops_->GatherRows(rows, m.in, tokens, {m.data, m.in}, y));
  }
  absl::Status Gemm(int64_t rows, ConstRows x, const Weight& weight, ConstRows residual,
                    Rows y) override {
    return Watch(ops_->Gemm(rows, x, Matrix(weight), residual, y));
  }
  bool tunes_gemm() const override { return true; }
  absl::Status TuneGemm(int64_t rows, ConstRows x, const Weight& weight, ConstRows residual,
                        Rows y) override {
    return Watch(ops_->TuneGemm(rows, x, Matrix(weight), residual, y));
  }
  absl::Status GemmLogits(int64_t rows, ConstRows x, const Weight& weight, float* y) override {
    return Watch(ops_->GemmLogits(rows, x, Matrix(weight), y));
  }
  absl::Status GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x,
                          Rows y) override {
    return Watch(ops_->GatherRows(rows, cols, index, x, y));
  }
  absl::Status RmsNorm(const RmsNormArgs& args) override { return Watch(ops_->RmsNorm(args)); }
  absl::Status GatedNorm(const GatedNormArgs& args) override {
    return Watch(ops_->GatedNorm(args));
  }
  absl::Status GdnFront(const GdnFrontArgs& args) override { return Watch(ops_->GdnFront(args)); }
  // Writes a buffer that an earlier layer's ToHostLater may still be reading.
  absl::Status ConvStateAt(const ConvStateAtArgs& args) override {
    SPARSEGDN_RETURN_IF_ERROR(BehindCopies());
    return Watch(ops_->ConvStateAt(args));
  }
  absl::Status RopeTable(const RopeTableArgs& args) override {
    return Watch(ops_->RopeTable(args));
  }
  absl::Status AttentionFront(const AttentionFrontArgs& args) override {
    SPARSEGDN_RETURN_IF_ERROR(BehindCopies());
    return Watch(ops_->AttentionFront(args));
  }
  absl::Status KvLoad(const KvLoadArgs& args) override { return Watch(ops_->KvLoad(args)); }
  absl::Status Attention(const AttentionArgs& args) override {
    return Watch(ops_->Attention(args));
  }
  absl::Status SwiGlu(const SwiGluArgs& args) override { return Watch(ops_->SwiGlu(args)); }
  absl::Status LogProb(const LogProbArgs& args) override { return Watch(ops_->LogProb(args)); }
  absl::Status CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x,
                           int32_t* flags) override {
    return Watch(ops_->CheckFinite(pack, cols, x, flags));
  }

  absl::StatusOr<size_t> GdnWorkspaceBytes(const GdnLimits& limits) const override {
    return gdn_->WorkspaceBytes(limits);
  }
  absl::Status GdnForward(const GdnForwardArgs& args) override;
  absl::StatusOr<GdnTimings> TakeGdnTimings() override { return clock_.Take(); }

 private:
  static const CudaMatrix& Matrix(const Weight& weight) {
    return static_cast<const CudaWeight&>(weight).matrix();
  }
  absl::Status BehindCopies() {
    return readback_ == nullptr ? absl::OkStatus() : Watch(readback_->OrderBehind(stream_));
  }
  // Passes a status on; after an error it looks whether the device can go on at all.
  absl::Status Watch(absl::Status status) {
    if (!status.ok() && cudaDeviceSynchronize() != cudaSuccess) healthy_ = false;
    return status;
  }

  const int device_;
  bool healthy_ = true;
  size_t allocated_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  void* host_ = nullptr;  // pinned, of ToHost
  size_t host_bytes_ = 0;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<GdnBackend> gdn_;
  std::unique_ptr<CudaUpload> upload_;
  std::unique_ptr<CudaReadback> readback_;
  CoreClock clock_;
  std::vector<void*> memory_;
  std::vector<std::unique_ptr<CudaWeight>> weights_;
};

CudaOpTable::~CudaOpTable() {
  cudaSetDevice(device_);
  readback_.reset();
  upload_.reset();
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  ops_.reset();
  for (void* data : memory_) cudaFree(data);
  if (host_ != nullptr) cudaFreeHost(host_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status CudaOpTable::Init() {
  SPARSEGDN_ASSIGN_OR_RETURN(gdn_, CreateCudaBackend({.device = device_}));
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  SPARSEGDN_RETURN_IF_ERROR(
      FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
  SPARSEGDN_ASSIGN_OR_RETURN(ops_, CudaOps::Create(device_, stream_));
  return absl::OkStatus();
}

absl::Status CudaOpTable::Reserve(size_t device_bytes, size_t to_host_bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaMemGetInfo(&free_bytes, &total_bytes), "device memory"));
  if (device_bytes + kMarginBytes > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "device ", device_, ": ", free_bytes, " of ", total_bytes, " bytes are free, wanted ",
        device_bytes + kMarginBytes, " for the model with these --state-slots, --kv-tokens and ",
        "--max-batch-tokens"));
  }
  // Two results on their way at once, and room for the padding of their parts.
  const size_t host = std::max(kMinHostBytes, to_host_bytes) + (size_t{1} << 16);
  SPARSEGDN_ASSIGN_OR_RETURN(readback_, CudaReadback::Create(device_, 2 * host));
  SPARSEGDN_RETURN_IF_ERROR(
      FromCuda(cudaHostAlloc(&host_, host, cudaHostAllocDefault), "pinned memory for results"));
  host_bytes_ = host;
  SPARSEGDN_ASSIGN_OR_RETURN(upload_, CudaUpload::Create(device_));
  return absl::OkStatus();
}

absl::StatusOr<void*> CudaOpTable::Allocate(size_t bytes, std::string_view what) {
  void* data = nullptr;
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  if (cudaMalloc(&data, std::max<size_t>(bytes, 1)) != cudaSuccess) {
    cudaGetLastError();  // not sticky: the next call must not see it
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes for ",
                                                     std::string(what), " on device ", device_,
                                                     " beside ", allocated_bytes_));
  }
  allocated_bytes_ += bytes;
  memory_.push_back(data);
  SPARSEGDN_RETURN_IF_ERROR(Zero(data, bytes));
  return data;
}

absl::Status CudaOpTable::CopyIn(void* to, const void* from, size_t bytes) {
  // The first call of a step: the thread may be another than the one that loaded the model.
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  if (bytes == 0) return absl::OkStatus();
  return Watch(
      FromCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copy in"));
}

absl::Status CudaOpTable::Zero(void* data, size_t bytes) {
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  if (bytes == 0) return absl::OkStatus();
  return Watch(FromCuda(cudaMemsetAsync(data, 0, bytes, stream_), "zero"));
}

absl::Status CudaOpTable::ToHost(std::span<const MemoryRange> ranges,
                                 std::span<const void*> views) {
  size_t at = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (at + ranges[i].bytes > host_bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("results beyond ", host_bytes_, " bytes at once"));
    }
    views[i] = static_cast<char*>(host_) + at;
    if (ranges[i].bytes > 0) {
      SPARSEGDN_RETURN_IF_ERROR(
          Watch(FromCuda(cudaMemcpyAsync(static_cast<char*>(host_) + at, ranges[i].data,
                                         ranges[i].bytes, cudaMemcpyDeviceToHost, stream_),
                         "copy out")));
    }
    at += (ranges[i].bytes + 255) / 256 * 256;
  }
  return Watch(FromCuda(cudaStreamSynchronize(stream_), "wait for results"));
}

absl::Status CudaOpTable::ToHostLater(std::span<const MemoryRange> ranges,
                                      std::function<void(HostViews)> done) {
  if (readback_ == nullptr) return absl::FailedPreconditionError("Reserve was not called");
  return Watch(readback_->Enqueue(stream_, ranges, std::move(done)));
}

absl::Status CudaOpTable::FinishToHost() {
  return readback_ == nullptr ? absl::OkStatus() : Watch(readback_->Finish());
}

absl::StatusOr<const Weight*> CudaOpTable::UploadMatrix(std::span<const HostTensor> parts) {
  if (upload_ == nullptr) return absl::FailedPreconditionError("Reserve was not called");
  const int64_t in = parts[0].shape[1];
  if (in % 8 != 0) {
    return absl::UnimplementedError(
        absl::StrCat("a weight of ", in, " inputs, wanted a multiple of 8 on CUDA"));
  }
  int64_t out = 0;
  for (const HostTensor& part : parts) out += part.shape[0];
  SPARSEGDN_ASSIGN_OR_RETURN(void* data, Allocate(MatrixBytes(out * in), "a weight"));
  // The upload has a stream of its own; the zeros must not arrive after it.
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaStreamSynchronize(stream_), "zero"));
  int64_t row = 0;
  for (const HostTensor& part : parts) {
    SPARSEGDN_RETURN_IF_ERROR(
        Watch(upload_->Matrix(part, static_cast<uint16_t*>(data) + row * in)));
    row += part.shape[0];
  }
  SPARSEGDN_RETURN_IF_ERROR(Watch(upload_->Finish()));
  weights_.push_back(std::make_unique<CudaWeight>(CudaMatrix{data, out, in}));
  return weights_.back().get();
}

absl::Status CudaOpTable::GdnForward(const GdnForwardArgs& args) {
  if (args.snapshots != nullptr) SPARSEGDN_RETURN_IF_ERROR(BehindCopies());
  SPARSEGDN_ASSIGN_OR_RETURN(const CoreClock::Marks marks, clock_.Next());
  GdnForwardArgs timed = args;
  timed.selection_done = marks.selected;
  SPARSEGDN_RETURN_IF_ERROR(Watch(FromCuda(cudaEventRecord(marks.begin, stream_), "event")));
  if (absl::Status s = Watch(gdn_->Forward(timed, stream_)); !s.ok()) {
    clock_.Forget();
    return s;
  }
  return Watch(FromCuda(cudaEventRecord(marks.end, stream_), "event"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaOpTable(int device) {
  auto table = std::make_unique<CudaOpTable>(device);
  SPARSEGDN_RETURN_IF_ERROR(table->Init());
  return std::unique_ptr<OpTable>(std::move(table));
}

bool CudaDevicePresent(int device) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && device >= 0 && device < count;
}

}  // namespace sparsegdn::model
