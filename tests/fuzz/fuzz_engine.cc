#include "tests/fuzz/fuzz_engine.h"

#include <utility>

#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/engine/fake_runner.h"

namespace sparsegdn::fuzz {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kRoundsMax = 100'000;

class StoppedClock final : public engine::Clock {
 public:
  int64_t NowNs() const override { return 1'000'000'000; }
};

}  // namespace

FuzzEngine& FuzzEngine::Get() {
  static FuzzEngine engine;
  return engine;
}

FuzzEngine::FuzzEngine() {
  static StoppedClock clock;
  static engine::EngineObserver observer;
  engine::EngineConfig config;
  config.default_budget.mode = BudgetMode::kDense;
  config.frame_bytes = 4096;
  config.kept_snapshot_bytes = 2 * kMiB;
  config.limits.max_prompt_tokens = 8192;
  config.limits.max_buffered_bytes_per_call = 4 * kMiB;
  config.limits.max_buffered_bytes = 8 * kMiB;
  auto created = engine::EngineImpl::Create(
      config,
      std::make_unique<testing::FakeRunner>(testing::FakeRunnerOptions{},
                                            std::make_shared<testing::FakeRunnerLog>()),
      &observer, &clock, engine::EngineImpl::Mode::kInline);
  Require(created.ok(), created.status().ToString());
  engine_ = *std::move(created);
  engine_->RunOneRound();
  idle_ = engine_->gauges();
}

Answer FuzzEngine::Complete(engine::PrefillRequest request) {
  Answer answer;
  auto call = engine_->Submit(std::move(request));
  answer.status = call.status();
  if (!call.ok()) return answer;
  const auto take = [&] {
    while (std::optional<engine::Event> event = (*call)->TryPop()) {
      if (auto* m = std::get_if<std::shared_ptr<const engine::Manifest>>(&*event)) {
        answer.manifest = *m;
      } else if (auto* chunk = std::get_if<engine::TensorChunk>(&*event)) {
        std::string& bytes = answer.tensors[chunk->tensor];
        Require(bytes.size() == chunk->byte_offset, "a frame is not where the last one ended");
        bytes += *chunk->data;
      } else if (auto* result = std::get_if<engine::Result>(&*event)) {
        answer.result = std::move(*result);
      }
    }
  };
  for (int round = 0; !(*call)->status().has_value(); ++round) {
    Require(round < kRoundsMax, "an accepted call does not end");
    engine_->RunOneRound();
    take();
  }
  take();
  answer.status = *(*call)->status();
  if (!answer.status.ok()) return answer;
  Require(answer.manifest != nullptr && answer.result.has_value(), "OK without manifest or result");
  for (uint32_t i = 0; i < answer.manifest->tensors.size(); ++i) {
    Require(answer.tensors[i].size() == answer.manifest->tensors[i].bytes,
            "OK, but " + answer.manifest->tensors[i].name + " is not whole");
  }
  return answer;
}

void FuzzEngine::RequireIdle() {
  engine_->RunOneRound();
  const engine::EngineGauges now = engine_->gauges();
  Require(now.queue_requests == 0 && now.queue_tokens == 0 && now.running_requests == 0,
          "a request is left behind");
  Require(now.free_slots == idle_.free_slots && now.free_kv_tokens == idle_.free_kv_tokens,
          "a slot is left behind");
  Require(now.buffered_bytes == 0, "frames are left behind");
  Require(engine_->healthy(), "the engine is not healthy");
}

}  // namespace sparsegdn::fuzz
