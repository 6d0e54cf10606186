#include "tests/unit/service/fake_engine.h"

#include <thread>

namespace sparsegdn::service {

void FakeCall::Push(engine::Event event) {
  {
    std::lock_guard lock(mutex_);
    if (status_) return;
    events_.push_back(std::move(event));
  }
  Notify();
}

void FakeCall::Close(absl::Status status) {
  {
    std::lock_guard lock(mutex_);
    if (status_) return;
    if (!status.ok()) events_.clear();
    status_ = std::move(status);
  }
  Notify();
}

void FakeCall::Notify() {
  std::function<void()> ready;
  {
    std::lock_guard lock(mutex_);
    ready = ready_;
  }
  if (ready) ready();
}

size_t FakeCall::unread() const {
  std::lock_guard lock(mutex_);
  return events_.size();
}

bool FakeCall::WaitCancelled() const {
  return Eventually([this] { return cancels_ > 0; });
}

std::optional<engine::Event> FakeCall::TryPop() {
  std::lock_guard lock(mutex_);
  if (events_.empty()) return std::nullopt;
  engine::Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

std::optional<absl::Status> FakeCall::status() const {
  std::lock_guard lock(mutex_);
  return events_.empty() ? status_ : std::nullopt;
}

void FakeCall::SetReadyCallback(std::function<void()> ready) {
  {
    std::lock_guard lock(mutex_);
    ready_ = std::move(ready);
  }
  Notify();
}

// As the engine's: the callback never runs on the canceller's thread.
void FakeCall::Cancel(bool deadline) {
  ++cancels_;
  by_deadline_ = deadline;
  if (hold_cancel_) return;
  std::lock_guard lock(mutex_);
  if (status_) return;
  events_.clear();
  status_ = deadline ? absl::DeadlineExceededError("deadline") : absl::CancelledError("cancelled");
}

class FakeImport final : public engine::SnapshotImport {
 public:
  FakeImport(FakeEngine* engine, uint32_t ttl_seconds)
      : engine_(engine), ttl_seconds_(ttl_seconds) {}
  absl::Status Add(uint32_t, uint64_t, std::string_view data, uint64_t) override {
    bytes_ += data.size();
    engine_->imported_bytes_ += static_cast<int64_t>(data.size());
    return engine_->import_add;
  }
  absl::StatusOr<engine::SnapshotRef> Finish(uint64_t) override {
    engine_->on_import_finish();
    if (!engine_->import_finish.ok()) return engine_->import_finish;
    return engine::SnapshotRef{"imported-1", 17, bytes_, ttl_seconds_};
  }

 private:
  FakeEngine* const engine_;
  const uint32_t ttl_seconds_;
  uint64_t bytes_ = 0;
};

FakeEngine::FakeEngine() {
  info_.identity = std::string(64, 'a');
  info_.name = "fake";
  info_.backend = "cpu";
  info_.layers = {model::LayerKind::kLinear, model::LayerKind::kFull};
  info_.vocab_size = 512;
  info_.hidden_size = 64;
  info_.max_context_tokens = 32768;
  info_.gdn = {2, 4, 128, 64};
  info_.conv_channels = 2 * 2 * 128 + 4 * 64;
  on_submit = [](const engine::PrefillRequest&) { return WholeCall(); };
}

std::vector<engine::PrefillRequest> FakeEngine::requests() const {
  std::lock_guard lock(mutex_);
  return requests_;
}
std::vector<engine::Manifest> FakeEngine::imports() const {
  std::lock_guard lock(mutex_);
  return imports_;
}
std::vector<std::pair<std::string, std::string>> FakeEngine::releases() const {
  std::lock_guard lock(mutex_);
  return releases_;
}
engine::EngineLimits FakeEngine::limits() const {
  std::lock_guard lock(mutex_);
  return limits_;
}

absl::StatusOr<std::shared_ptr<engine::PrefillCall>> FakeEngine::Submit(
    engine::PrefillRequest request) {
  {
    std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }
  return on_submit(request);
}

absl::StatusOr<std::unique_ptr<engine::SnapshotImport>> FakeEngine::BeginImport(
    const engine::Manifest& manifest, uint32_t ttl_seconds, std::string) {
  {
    std::lock_guard lock(mutex_);
    imports_.push_back(manifest);
  }
  if (!import_begin.ok()) return import_begin;
  return std::unique_ptr<engine::SnapshotImport>(new FakeImport(this, ttl_seconds));
}

absl::Status FakeEngine::ReleaseSnapshot(const std::string& id, const std::string& tenant) {
  std::lock_guard lock(mutex_);
  releases_.emplace_back(id, tenant);
  return release;
}

absl::Status FakeEngine::SetLimits(const engine::EngineLimits& limits) {
  std::lock_guard lock(mutex_);
  limits_ = limits;
  return absl::OkStatus();
}

engine::TensorChunk MakeChunk(uint32_t tensor, uint64_t offset, std::string data) {
  return {tensor, offset, std::make_shared<const std::string>(std::move(data)),
          0x1122334455667788u + tensor};
}

engine::Result MakeResult() {
  engine::Result result;
  result.effective_budget.min_retention = 0.0725;
  result.effective_budget.max_retention = 0.58;
  result.usage = {100, 90, 10, 1000, 290};
  result.timings = {0.001, 0.002, 0.003, 0.004, 0.005};
  result.retained_layers = {0, 2};
  result.retained = {{0.25f, 0.33f}, {0.5f, 0.08f}};
  result.digest = 0xfedcba9876543210u;
  result.next_token = 7;
  result.snapshot_position = 99;
  return result;
}

std::shared_ptr<FakeCall> WholeCall(int frames, size_t frame_bytes) {
  auto call = std::make_shared<FakeCall>();
  call->Push(engine::Accepted{3, 4096});
  call->Push(engine::Progress{50, 100});
  auto manifest = std::make_shared<engine::Manifest>();
  manifest->position = 99;
  manifest->tensors.resize(1);
  manifest->tensors[0].name = "state.0";
  manifest->tensors[0].bytes = static_cast<uint64_t>(frames) * frame_bytes;
  manifest->tensors[0].shape = {4, 128, 64};
  call->Push(std::shared_ptr<const engine::Manifest>(manifest));
  for (int i = 0; i < frames; ++i) {
    call->Push(MakeChunk(0, static_cast<uint64_t>(i) * frame_bytes,
                         std::string(frame_bytes, static_cast<char>('a' + i % 26))));
  }
  call->Push(MakeResult());
  call->Close(absl::OkStatus());
  return call;
}

bool Eventually(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace sparsegdn::service
