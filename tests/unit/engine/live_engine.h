// An engine with its real thread and clock over the fake runner, and a reader as a reactor is one.
#ifndef SPARSEGDN_TESTS_UNIT_ENGINE_LIVE_ENGINE_H_
#define SPARSEGDN_TESTS_UNIT_ENGINE_LIVE_ENGINE_H_

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {

struct Live {
  explicit Live(FakeRunnerOptions options = {},
                engine::EngineConfig config = Harness::DenseConfig()) {
    auto created =
        engine::Engine::Create(config, std::make_unique<FakeRunner>(std::move(options), log),
                               &observer, engine::Clock::Real());
    EXPECT_TRUE(created.ok());
    engine = *std::move(created);
  }
  CountingObserver observer;
  std::shared_ptr<FakeRunnerLog> log = std::make_shared<FakeRunnerLog>();
  std::unique_ptr<engine::Engine> engine;
};

// Reads a call to its end, woken by the ready callback as a reactor is.
inline Collected ReadToEnd(engine::PrefillCall& call) {
  std::mutex mutex;
  std::condition_variable changed;
  bool ready = false;
  call.SetReadyCallback([&] {
    std::lock_guard lock(mutex);
    ready = true;
    changed.notify_one();
  });
  Collected got;
  while (!got.status) {
    ReadAvailable(call, got);
    if (got.status) break;
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(60), [&] { return ready; }));
    ready = false;
  }
  call.SetReadyCallback(nullptr);
  return got;
}

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_ENGINE_LIVE_ENGINE_H_
