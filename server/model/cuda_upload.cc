#include "server/model/cuda_upload.h"

#include <algorithm>
#include <cstring>

#include "server/model/cuda_readback.h"
#include "server/model/narrow.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

// Elements [first, first + count) of any alignment to BF16.
void Narrow(const HostTensor& tensor, int64_t first, int64_t count, uint16_t* out) {
  const size_t n = static_cast<size_t>(count);
  if (tensor.dtype == DType::kBF16) {
    std::memcpy(out, tensor.bytes.data() + 2 * first, 2 * n);
    return;
  }
  for (size_t i = 0; i < n; ++i) out[i] = NarrowBf16(tensor.At(first + static_cast<int64_t>(i)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaUpload>> CudaUpload::Create(int device) {
  std::unique_ptr<CudaUpload> upload(new CudaUpload(device));
  SPARSEGDN_RETURN_IF_ERROR(upload->Init());
  return upload;
}

absl::Status CudaUpload::Init() {
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  SPARSEGDN_RETURN_IF_ERROR(
      FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "upload stream"));
  for (int i = 0; i < kStages; ++i) {
    SPARSEGDN_RETURN_IF_ERROR(FromCuda(
        cudaHostAlloc(&stages_[i], kStageBytes, cudaHostAllocDefault), "pinned staging memory"));
    SPARSEGDN_RETURN_IF_ERROR(
        FromCuda(cudaEventCreateWithFlags(&sent_[i], cudaEventDisableTiming), "event"));
  }
  return absl::OkStatus();
}

CudaUpload::~CudaUpload() {
  cudaSetDevice(device_);
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (int i = 0; i < kStages; ++i) {
    if (sent_[i] != nullptr) cudaEventDestroy(sent_[i]);
    if (stages_[i] != nullptr) cudaFreeHost(stages_[i]);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status CudaUpload::Matrix(const HostTensor& tensor, void* to) {
  constexpr int64_t kPiece = kStageBytes / sizeof(uint16_t);
  const int64_t elements = tensor.elements();
  for (int64_t first = 0; first < elements; first += kPiece) {
    const int64_t count = std::min(kPiece, elements - first);
    // A stage is filled again only when its last copy has left it; a fresh event counts as done.
    SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaEventSynchronize(sent_[next_]), "upload"));
    Narrow(tensor, first, count, static_cast<uint16_t*>(stages_[next_]));
    SPARSEGDN_RETURN_IF_ERROR(
        FromCuda(cudaMemcpyAsync(static_cast<uint16_t*>(to) + first, stages_[next_],
                                 static_cast<size_t>(count) * sizeof(uint16_t),
                                 cudaMemcpyHostToDevice, stream_),
                 "upload"));
    SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaEventRecord(sent_[next_], stream_), "record event"));
    next_ = (next_ + 1) % kStages;
  }
  return absl::OkStatus();
}

absl::Status CudaUpload::Finish() { return FromCuda(cudaStreamSynchronize(stream_), "upload"); }

}  // namespace sparsegdn::model
