// An engine whose calls are scripted by the test: no model, no threads of its own.
#ifndef SPARSEGDN_TESTS_UNIT_SERVICE_FAKE_ENGINE_H_
#define SPARSEGDN_TESTS_UNIT_SERVICE_FAKE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/engine.h"

namespace sparsegdn::service {

// Events are pushed by the test; Cancel closes the call as the real engine would, unless the test
// holds it.
class FakeCall final : public engine::PrefillCall {
 public:
  void Push(engine::Event event);
  void Close(absl::Status status);
  void HoldCancel() { hold_cancel_ = true; }
  int cancels() const { return cancels_; }
  bool cancelled_by_deadline() const { return by_deadline_; }
  size_t unread() const;
  // False when it did not happen within 5 s.
  bool WaitCancelled() const;

  std::optional<engine::Event> TryPop() override;
  std::optional<absl::Status> status() const override;
  void SetReadyCallback(std::function<void()> ready) override;
  void Cancel(bool deadline) override;

 private:
  void Notify();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<engine::Event> events_;
  std::optional<absl::Status> status_;
  std::function<void()> ready_;
  std::atomic<int> cancels_{0};
  std::atomic<bool> by_deadline_{false}, hold_cancel_{false};
};

class FakeImport;

class FakeEngine final : public engine::Engine {
 public:
  FakeEngine();

  // What Submit answers; by default a call that ends at once with a small whole stream.
  std::function<absl::StatusOr<std::shared_ptr<engine::PrefillCall>>(const engine::PrefillRequest&)>
      on_submit;
  absl::Status import_begin, import_add, import_finish, release;
  engine::EngineGauges gauges_now;
  std::atomic<bool> healthy_now{true};
  // Runs inside an import's Finish.
  std::function<void()> on_import_finish = [] {};
  // Runs inside Drain; its result is Drain's.
  std::function<bool(int64_t)> on_drain = [](int64_t) { return true; };

  std::vector<engine::PrefillRequest> requests() const;
  std::vector<engine::Manifest> imports() const;
  std::vector<std::pair<std::string, std::string>> releases() const;
  int64_t imported_bytes() const { return imported_bytes_; }
  engine::EngineLimits limits() const;

  absl::StatusOr<std::shared_ptr<engine::PrefillCall>> Submit(
      engine::PrefillRequest request) override;
  absl::StatusOr<std::unique_ptr<engine::SnapshotImport>> BeginImport(
      const engine::Manifest& manifest, uint32_t ttl_seconds, std::string tenant) override;
  absl::Status ReleaseSnapshot(const std::string& id, const std::string& tenant) override;
  const model::ModelInfo& model_info() const override { return info_; }
  const engine::EngineConfig& config() const override { return config_; }
  engine::EngineGauges gauges() const override { return gauges_now; }
  absl::Status SetLimits(const engine::EngineLimits& limits) override;
  bool healthy() const override { return healthy_now; }
  bool Drain(int64_t timeout_ns) override { return on_drain(timeout_ns); }

 private:
  friend class FakeImport;
  model::ModelInfo info_;
  engine::EngineConfig config_;
  mutable std::mutex mutex_;
  std::vector<engine::PrefillRequest> requests_;
  std::vector<engine::Manifest> imports_;
  std::vector<std::pair<std::string, std::string>> releases_;
  engine::EngineLimits limits_;
  std::atomic<int64_t> imported_bytes_{0};
};

engine::TensorChunk MakeChunk(uint32_t tensor, uint64_t offset, std::string data);
engine::Result MakeResult();
// Accepted, Progress, Manifest, `frames` of `frame_bytes`, Result, OK.
std::shared_ptr<FakeCall> WholeCall(int frames = 2, size_t frame_bytes = 1024);
// Polls until `done` or 5 s have passed.
bool Eventually(const std::function<bool()>& done);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_TESTS_UNIT_SERVICE_FAKE_ENGINE_H_
