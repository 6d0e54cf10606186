// The op table on one CUDA device: BF16 activations and weights, FP32 states, over
// sparsegdn::CudaOps and a GdnBackend, on a stream of its own.
#ifndef SPARSEGDN_SERVER_MODEL_CUDA_OP_TABLE_H_
#define SPARSEGDN_SERVER_MODEL_CUDA_OP_TABLE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/model/op_table.h"

namespace sparsegdn::model {

// UNIMPLEMENTED in a build without CUDA; FAILED_PRECONDITION, saying why, where the device or
// cuBLASLt cannot be used.
absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaOpTable(int device);

// Whether this build has CUDA and the machine a device of that index.
bool CudaDevicePresent(int device);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_CUDA_OP_TABLE_H_
