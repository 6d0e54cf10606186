// What every engine test needs: an injected clock, an observer that counts, a reader that checks
// each frame as a client must, and an engine without a thread over the fake runner.
#ifndef SPARSEGDN_TESTS_UNIT_ENGINE_ENGINE_TEST_UTIL_H_
#define SPARSEGDN_TESTS_UNIT_ENGINE_ENGINE_TEST_UTIL_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/engine_impl.h"
#include "tests/unit/engine/fake_runner.h"

namespace sparsegdn::testing {

class FakeClock final : public engine::Clock {
 public:
  int64_t NowNs() const override { return now_ns_; }
  void AdvanceSeconds(double seconds) { now_ns_ += static_cast<int64_t>(seconds * 1e9); }

 private:
  std::atomic<int64_t> now_ns_{1'000'000'000};
};

class CountingObserver final : public engine::EngineObserver {
 public:
  void OnQueueWait(double seconds) override {
    ++queue_waits;
    last_queue_wait = seconds;
  }
  void OnStep(int64_t tokens, int64_t, const model::StepStats&) override {
    ++steps;
    step_tokens += tokens;
  }
  void OnComputed(double, const engine::Result&) override { ++computed; }
  void OnFirstFrame(double) override { ++first_frames; }
  void OnSnapshotReady(double) override { ++ready; }
  void OnCancelled(Stage stage, int64_t wasted) override {
    ++cancelled[static_cast<int>(stage)];
    wasted_tokens += wasted;
  }
  void OnExpiredInQueue() override { ++expired; }
  void OnNonFinite() override { ++nonfinite; }
  void OnCorruptSnapshot() override { ++corrupt_snapshots; }
  void OnSnapshotBytes(engine::ExportDType, int64_t bytes) override { snapshot_bytes += bytes; }
  void OnSlowReader(int64_t) override { ++slow; }

  std::atomic<double> last_queue_wait{-1};
  std::atomic<int64_t> queue_waits{0}, steps{0}, step_tokens{0}, computed{0}, first_frames{0},
      ready{0}, wasted_tokens{0}, expired{0}, nonfinite{0}, corrupt_snapshots{0}, snapshot_bytes{0},
      slow{0};
  std::atomic<int64_t> cancelled[3] = {};
};

// All that one call gave, checked while read: frame hashes, contiguous offsets, bounds, order of
// events, completeness and digest before an OK status.
struct Collected {
  std::optional<engine::Accepted> accepted;
  std::vector<engine::Progress> progress;
  std::shared_ptr<const engine::Manifest> manifest;
  std::vector<std::string> tensors;
  size_t frames = 0;
  size_t frames_before_result = 0;
  std::optional<engine::Result> result;
  std::optional<absl::Status> status;

  // Bytes of the tensor of this name; fails the test when there is none.
  const std::string& Bytes(const std::string& name) const;
  const engine::TensorInfo& Info(const std::string& name) const;
  bool Has(const std::string& name) const;
  std::vector<float> Floats(const std::string& name) const;  // FP32 or BF16, widened
};

// Takes what is there now into `out`.
void ReadAvailable(engine::PrefillCall& call, Collected& out);

// An engine in inline mode with everything injected.
class Harness {
 public:
  explicit Harness(FakeRunnerOptions options = {}, engine::EngineConfig config = DenseConfig());

  // Frames small enough that every tensor has several, default budget dense.
  static engine::EngineConfig DenseConfig();
  static engine::PrefillRequest Prompt(int64_t tokens, int32_t seed = 1);

  std::shared_ptr<engine::PrefillCall> Submit(engine::PrefillRequest request);
  absl::Status SubmitError(engine::PrefillRequest request);
  // Runs rounds until nothing happens, at most `rounds`.
  void RunRounds(int rounds = 10000);
  // Submits, runs and reads to the end.
  Collected Complete(engine::PrefillRequest request);
  void ExpectNoLeak() const;

  engine::EngineImpl& engine() { return *engine_; }

  FakeClock clock;
  CountingObserver observer;
  std::shared_ptr<FakeRunnerLog> log = std::make_shared<FakeRunnerLog>();
  const model::ModelInfo info;
  const model::RunnerLimits limits;

 private:
  std::unique_ptr<engine::EngineImpl> engine_;
};

// Code, field and reason of a refusal, for one-line expectations.
std::string Describe(const absl::Status& status);

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_ENGINE_ENGINE_TEST_UTIL_H_
