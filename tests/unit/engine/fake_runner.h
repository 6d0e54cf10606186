// A model runner without a model, for tests of the engine and of what stands on it. States are a
// deterministic function of the tokens seen, so that any two ways to the same prefix agree bit for
// bit, and a wrong state, conv column or KV row after Load changes every later result.
#ifndef SPARSEGDN_TESTS_UNIT_ENGINE_FAKE_RUNNER_H_
#define SPARSEGDN_TESTS_UNIT_ENGINE_FAKE_RUNNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "server/model/model_runner.h"
#include "tests/unit/engine/fake_model.h"

namespace sparsegdn::testing {

struct FakeRunnerOptions {
  model::ModelInfo info = SmallHybridInfo();
  model::RunnerLimits limits = SmallLimits();
  int64_t ns_per_token = 0;  // real time that a step takes, its own work included
  int64_t ns_per_step = 0;
  bool log_chunks = true;     // off where millions would be kept
  int32_t nan_token = -1;     // a chunk that holds it has non-finite states and logits
  int32_t error_token = -1;   // a step that holds it fails
  int32_t fatal_token = -1;   // and leaves the runner dead
  int32_t silent_token = -1;  // a chunk that holds it emits no state: a bug of a runner
  // Called at the start and end of each step, on the thread that runs it.
  std::function<void(std::span<const model::Chunk>)> on_step;
  std::function<void()> after_step;
};

// What the fake was asked to do; outlives it. Thread-safe.
class FakeRunnerLog {
 public:
  struct ChunkRecord {
    int64_t step, first_position, tokens, prompt_tokens;
    int32_t slot, first_token;
    bool emit_state;
  };
  struct Counts {
    int64_t acquires = 0, releases = 0, loads = 0, steps = 0, tokens = 0;
  };
  void Add(const std::function<void(Counts&)>& change);
  void AddChunk(const ChunkRecord& record);
  Counts counts() const;
  std::vector<ChunkRecord> chunks() const;

 private:
  mutable std::mutex mutex_;
  Counts counts_;
  std::vector<ChunkRecord> chunks_;
};

class FakeRunner final : public model::ModelRunner {
 public:
  FakeRunner(FakeRunnerOptions options, std::shared_ptr<FakeRunnerLog> log);
  ~FakeRunner() override;

  const model::ModelInfo& info() const override { return options_.info; }
  const model::RunnerLimits& limits() const override { return options_.limits; }
  absl::StatusOr<int32_t> Acquire(int64_t max_tokens) override;
  void Release(int32_t slot) override;
  int32_t free_slots() const override;
  int64_t free_kv_tokens() const override { return free_kv_tokens_; }
  absl::Status Load(int32_t slot, const model::SlotImage& image) override;
  absl::Status Step(std::span<const model::Chunk> chunks, model::StepSink& sink,
                    model::StepStats& stats) override;
  bool healthy() const override { return healthy_; }

 private:
  struct Slot;
  struct Point;  // what a position's states follow from
  absl::Status CheckStep(std::span<const model::Chunk> chunks) const;
  void RunChunk(size_t index, const model::Chunk& chunk, model::StepSink& sink,
                model::ChunkStats& stats);
  void EmitState(size_t index, int32_t layer, const Point& point, bool nan, model::StepSink& sink);
  void EmitLogits(size_t index, int64_t position, const Slot& slot, bool nan,
                  model::StepSink& sink);
  void PushConv(std::vector<float>& conv, std::span<const int32_t> tokens) const;
  void AppendKv(Slot& slot, int32_t layer, const model::Chunk& chunk) const;

  const FakeRunnerOptions options_;
  const std::shared_ptr<FakeRunnerLog> log_;
  std::vector<std::unique_ptr<Slot>> slots_;
  int64_t free_kv_tokens_;
  int64_t steps_ = 0;
  bool healthy_ = true;
};

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_ENGINE_FAKE_RUNNER_H_
