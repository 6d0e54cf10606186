// Host memory to the device through pinned staging, for weights.
#ifndef SPARSEGDN_SERVER_MODEL_CUDA_UPLOAD_H_
#define SPARSEGDN_SERVER_MODEL_CUDA_UPLOAD_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/checkpoint.h"

namespace sparsegdn::model {

class CudaUpload {
 public:
  static absl::StatusOr<std::unique_ptr<CudaUpload>> Create(int device);
  ~CudaUpload();
  CudaUpload(const CudaUpload&) = delete;
  CudaUpload& operator=(const CudaUpload&) = delete;

  // The tensor's elements as BF16 (round to nearest even) from `to` on. Returns when the last piece
  // has been handed to the copy engine; the mapped file is read once, piece by piece, while the
  // piece before it is on its way.
  absl::Status Matrix(const HostTensor& tensor, void* to);
  absl::Status Finish();

 private:
  static constexpr size_t kStageBytes = size_t{32} << 20;
  static constexpr int kStages = 2;

  explicit CudaUpload(int device) : device_(device) {}
  absl::Status Init();

  int device_;
  int next_ = 0;
  cudaStream_t stream_ = nullptr;
  void* stages_[kStages] = {};
  cudaEvent_t sent_[kStages] = {};
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_CUDA_UPLOAD_H_
