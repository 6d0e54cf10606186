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

TEST(ImportLoad, IsChargedForWhatCameAndEvictsNobodyForLess) {
  const int64_t kept = engine::Layout(SmallHybridInfo()).kept_bytes(100);
  engine::EngineConfig config = Harness::DenseConfig();
  config.kept_snapshot_bytes = 2 * kept + 4000;
  Harness h({}, config);
  PrefillRequest request = AfterLast(100);
  request.keep_snapshot = true;
  const Upload upload = UploadOf(h.Complete(request));
  ASSERT_TRUE(h.Complete(request).status->ok());
  ASSERT_EQ(h.engine().gauges().kept_snapshots, 2);
  ASSERT_EQ(h.engine().gauges().kept_snapshot_bytes, 2 * kept);
  {
    auto import = *h.engine().BeginImport(upload.manifest, 50, "t");
    int64_t charged = 0;
    for (uint32_t t = 0; t < upload.tensors.size(); ++t) {
      const std::string& bytes = upload.tensors[t];
      const std::string first = bytes.substr(0, 1), last = bytes.substr(bytes.size() - 1);
      ASSERT_TRUE(import->Add(t, 0, first, engine::Xxh3(first)).ok());
      ASSERT_TRUE(import->Add(t, bytes.size() - 1, last, engine::Xxh3(last)).ok());
      charged += 2 + engine::kImportPieceBytes;
    }
    EXPECT_EQ(h.engine().gauges().kept_snapshots, 2) << "a few bytes evict nobody";
    EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 2 * kept + charged);
  }
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 2 * kept);
  ASSERT_TRUE(Send(h, upload).ok());
  EXPECT_EQ(h.engine().gauges().kept_snapshots, 2) << "a whole one takes the oldest one's place";
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 2 * kept);
}

// BF16 and FP8 states take more when kept than they took to send.
TEST(ImportLoad, TheWiderKeptFormIsReservedBeforeItIsMade) {
  for (const ExportDType dtype : {ExportDType::kBF16, ExportDType::kF8E4M3}) {
    const int64_t kept = engine::Layout(SmallHybridInfo()).kept_bytes(100);
    engine::EngineConfig config = Harness::DenseConfig();
    config.kept_snapshot_bytes = 2 * kept;
    Harness h({}, config);
    PrefillRequest request = AfterLast(100);
    request.outputs.state_dtype = dtype;
    const Upload upload = UploadOf(h.Complete(request));
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(Send(h, upload).ok());
      EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, std::min(i + 1, 2) * kept);
    }
  }
}

}  // namespace
}  // namespace sparsegdn::testing
