// Stands in for kernels/cuda in a build without it.
#include "absl/status/status.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn {

absl::StatusOr<std::unique_ptr<GdnBackend>> CreateCudaBackend(const CudaBackendOptions&) {
  return absl::UnimplementedError("backend = cuda, but this build has no CUDA");
}

}  // namespace sparsegdn
