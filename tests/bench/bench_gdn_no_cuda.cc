// Stands in for bench_gdn_cuda.cc in a build without CUDA.
#include "tests/bench/bench_gdn.h"

namespace sparsegdn::bench {

absl::StatusOr<CudaTimes> TimeOnCuda(const Problem&, int, int) {
  return absl::UnimplementedError("backend = cuda, but this build has no CUDA");
}

}  // namespace sparsegdn::bench
