// Uploads and the rest of the engine: what one costs the others.
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "tests/unit/engine/upload_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ExportDType;
using engine::PrefillRequest;

// Time stands still, and stops one thread that asks for it until it is let go.
class StoppingClock final : public engine::Clock {
 public:
  int64_t NowNs() const override {
    std::unique_lock lock(mutex_);
    if (std::this_thread::get_id() == stopped_) {
      reached_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return stopped_ == std::thread::id(); });
    }
    return 1'000'000'000;
  }
  void Stop(std::thread::id thread) {
    std::lock_guard lock(mutex_);
    stopped_ = thread;
  }
  void AwaitStopped() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  void LetGo() {
    Stop(std::thread::id());
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable bool reached_ = false;
  std::thread::id stopped_;
};

TEST(ImportLoad, TheExecutorGoesOnWhileAnUploadFinishes) {
  Harness source;
  const Upload upload = UploadOf(source.Complete(AfterLast(100)));
  StoppingClock clock;
  CountingObserver observer;
  auto engine = *engine::EngineImpl::Create(
      Harness::DenseConfig(),
      std::make_unique<FakeRunner>(FakeRunnerOptions{}, std::make_shared<FakeRunnerLog>()),
      &observer, &clock, engine::EngineImpl::Mode::kInline);
  auto import = *engine->BeginImport(upload.manifest, 50, "t");
  for (const Piece& p : upload.pieces) {
    ASSERT_TRUE(import->Add(p.tensor, p.offset, p.data, p.hash).ok());
  }
  absl::StatusOr<engine::SnapshotRef> ref;
  std::thread finisher([&] {
    clock.Stop(std::this_thread::get_id());
    ref = import->Finish(upload.digest);  // asks for the time when it keeps the snapshot
  });
  clock.AwaitStopped();
  auto call = *engine->Submit(Harness::Prompt(1000));
  auto executor = std::async(std::launch::async, [&] {
    while (engine->RunOneRound()) {
    }
  });
  const bool went_on = executor.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(went_on) << "the executor waits for the upload";
  if (went_on) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_TRUE(got.status && got.status->ok());
  }
  clock.LetGo();
  finisher.join();
  executor.wait();
  EXPECT_TRUE(ref.ok()) << ref.status();
}

}  // namespace
}  // namespace sparsegdn::testing
