// What GdnTimings counts as selection.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "tests/unit/kernels/test_device.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

// Reading every beta to check its range is no selection: dense calls select nothing, and must
// report next to no time for it however many rows they have.
TEST(Timings, DenseSelectionTakesLessThanAScanOfBeta) {
  constexpr int64_t kTokens = 65536;
  Pack p;
  p.shape = {1, 4, 1, 1};
  p.Add(kTokens, DenseBudget());
  FillRandom(&p, 41);
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  const size_t bytes = *(*backend)->WorkspaceBytes({p.shape, kTokens, 1, 1.0, DType::kF32});
  DeviceBuffer workspace(TestDevices()[0], bytes);
  std::vector<float> o(kTokens * 4), state(p.state_size());
  GdnTimings timings;
  GdnForwardArgs a;
  a.shape = p.shape;
  a.num_tokens = kTokens;
  a.num_seqs = 1;
  a.cu_seqlens = p.cu_seqlens.data();
  a.sequences = p.sequences.data();
  a.q = {p.q.data(), DType::kF32, 1, 1};
  a.k = {p.k.data(), DType::kF32, 1, 1};
  a.v = {p.v.data(), DType::kF32, 4, 1};
  a.log_gate = {p.log_gate.data(), DType::kF32, 4, 1};
  a.beta = {p.beta.data(), DType::kF32, 4, 1};
  a.o = {o.data(), DType::kF32, 4, 1};
  a.final_state = {state.data(), 1, StateLayout::kKeyMajor};
  a.workspace = workspace.data();
  a.workspace_bytes = bytes;
  a.timings = &timings;
  // The least of each, until the claim holds: a busy machine only ever adds.
  int64_t selection_ns = std::numeric_limits<int64_t>::max(), scan_ns = selection_ns;
  int64_t above_half = 0;
  for (int repeat = 0; repeat < 5 || (repeat < 200 && selection_ns >= scan_ns); ++repeat) {
    ASSERT_TRUE((*backend)->Forward(a, nullptr).ok());
    selection_ns = std::min(selection_ns, timings.selection_ns);
    const auto start = std::chrono::steady_clock::now();
    for (float b : p.beta) above_half += b > 0.5f ? 1 : 0;
    const auto took = std::chrono::steady_clock::now() - start;
    scan_ns = std::min<int64_t>(scan_ns, std::chrono::nanoseconds(took).count());
  }
  EXPECT_GT(above_half, 0);
  EXPECT_LT(selection_ns, scan_ns);
}

}  // namespace
}  // namespace sparsegdn::test
