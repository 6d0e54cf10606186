// The problem that sparsegdn-bench gdn times, on the host, and its CUDA half.
#ifndef SPARSEGDN_TESTS_BENCH_BENCH_GDN_H_
#define SPARSEGDN_TESTS_BENCH_BENCH_GDN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::bench {

struct Problem {
  GdnShape shape;
  int64_t tokens;
  DType dtype;
  std::vector<char> q, k, v, o;
  std::vector<float> log_gate, beta, state;
  std::vector<uint8_t> mask;
  std::vector<int32_t> cu_seqlens;
  SequenceParams sequence;
  std::vector<char> workspace;
  GdnTimings timings;
  GdnForwardArgs args;
};

// Medians on a CUDA device, of the whole call: selection, compaction, states and outputs.
struct CudaTimes {
  std::vector<double> eager_ms;  // one call after another on a stream
  std::vector<double> graph_ms;  // the call captured once and replayed
  double kept = 0.0;             // share of the mask that is set
};
// Copies the problem to the device, runs it, and checks that the state is finite. UNIMPLEMENTED in
// a build without CUDA, else the backend's errors.
absl::StatusOr<CudaTimes> TimeOnCuda(const Problem& problem, int device, int repeats);

}  // namespace sparsegdn::bench

#endif  // SPARSEGDN_TESTS_BENCH_BENCH_GDN_H_
