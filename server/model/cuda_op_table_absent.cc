// Stands in for cuda_op_table.cc in a build without CUDA.
#include "server/model/cuda_op_table.h"

namespace sparsegdn::model {

absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaOpTable(int) {
  return absl::UnimplementedError(
      "backend = \"cuda\", wanted \"auto\" or \"cpu\": this build runs the model on the CPU only");
}

bool CudaDevicePresent(int) { return false; }

}  // namespace sparsegdn::model
