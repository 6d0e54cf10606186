#include "server/engine/engine_impl.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/engine/request_validation.h"
#include "server/engine/scheduler.h"

namespace sparsegdn::engine {
namespace {

constexpr int64_t kMinRetryMs = 100, kMaxRetryMs = 30'000;

TaskThread::Mode TaskMode(EngineImpl::Mode mode) {
  return mode == EngineImpl::Mode::kThread ? TaskThread::Mode::kThread : TaskThread::Mode::kInline;
}

std::unique_ptr<PrefixCache> MakePrefixCache(const EngineConfig& config, const Layout& layout,
                                             const Clock* clock,
                                             const std::shared_ptr<StreamShared>& shared,
                                             EngineImpl::Mode mode) {
  if (config.prefix_cache_bytes == 0) return nullptr;
  PrefixCache::Options options;
  options.max_bytes = config.prefix_cache_bytes;
  options.fetch_ns = static_cast<int64_t>(config.prefix_fetch_seconds * 1e9);
  options.remote = config.prefix_remote;
  options.mode = TaskMode(mode);
  return std::make_unique<PrefixCache>(options, layout, clock, [shared] { shared->waker.Wake(); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineConfig& config,
                                                       std::unique_ptr<model::ModelRunner> runner,
                                                       EngineObserver* observer, Clock* clock) {
  return EngineImpl::Create(config, std::move(runner), observer, clock, EngineImpl::Mode::kThread);
}

absl::StatusOr<std::unique_ptr<EngineImpl>> EngineImpl::Create(
    const EngineConfig& config, std::unique_ptr<model::ModelRunner> runner,
    EngineObserver* observer, Clock* clock, Mode mode) {
  if (absl::Status s = ValidateConfig(config, *runner); !s.ok()) return s;
  std::unique_ptr<EngineImpl> engine(
      new EngineImpl(config, std::move(runner), observer, clock, mode));
  if (mode == Mode::kThread) {
    engine->executor_ = std::thread([raw = engine.get()] { raw->ExecutorLoop(); });
  }
  return engine;
}

EngineImpl::EngineImpl(const EngineConfig& config, std::unique_ptr<model::ModelRunner> runner,
                       EngineObserver* observer, Clock* clock, Mode mode)
    : config_(config),
      runner_(std::move(runner)),
      observer_(observer),
      clock_(clock),
      layout_(runner_->info()),
      snapshots_(config.kept_snapshot_bytes, clock),
      shared_(std::make_shared<StreamShared>()),
      prefix_cache_(MakePrefixCache(config, layout_, clock, shared_, mode)),
      checker_(TaskMode(mode), snapshots_, layout_, [shared = shared_] { shared->waker.Wake(); }),
      limits_(config.limits) {
  shared_->clock = clock;
  snapshots_.SetTenantLimit(config.limits.max_tenant_kept_bytes);
  PublishGauges();
}

EngineImpl::~EngineImpl() {
  draining_ = true;
  stopping_ = true;
  shared_->waker.Wake();
  if (executor_.joinable()) executor_.join();
  const absl::Status closed =
      Refuse(absl::StatusCode::kUnavailable, "", "SHUTTING_DOWN",
             "the server stopped before the request was done", kReplicaRetryMs);
  for (const RequestPtr& request : running_) {
    ReleaseSlot(*request);
    request->stream->Close(closed);
  }
  for (const RequestPtr& request : waiting_) request->stream->Close(closed);
}

EngineLimits EngineImpl::limits() const {
  std::lock_guard lock(queue_mutex_);
  return limits_;
}

absl::Status EngineImpl::SetLimits(const EngineLimits& limits) {
  if (absl::Status s = ValidateLimits(limits); !s.ok()) return s;
  {
    std::lock_guard lock(queue_mutex_);
    limits_ = limits;
  }
  snapshots_.SetTenantLimit(limits.max_tenant_kept_bytes);
  shared_->waker.Wake();
  return absl::OkStatus();
}

absl::Status EngineImpl::CheckOpen() const {
  if (dead_) {
    return Refuse(absl::StatusCode::kUnavailable, "", "DEVICE_LOST",
                  "the device failed; the server must restart");
  }
  if (draining_) {
    return Refuse(absl::StatusCode::kUnavailable, "", "DRAINING", "the server is draining",
                  kReplicaRetryMs);
  }
  return absl::OkStatus();
}

// How long the queue ahead will take, by the rate of late.
int64_t EngineImpl::RetryMs() const {
  const double rate = tokens_per_second_.load(std::memory_order_relaxed);
  if (rate <= 0) return 1000;
  const double ms = 1000.0 * static_cast<double>(waiting_tokens_) / rate;
  return static_cast<int64_t>(
      std::clamp<double>(ms, static_cast<double>(kMinRetryMs), static_cast<double>(kMaxRetryMs)));
}

void EngineImpl::CountQueued(const Request& request, int64_t sign) {
  waiting_tokens_ += sign * static_cast<int64_t>(request.plan.request.tokens.size());
  waiting_bytes_ += sign * request.queued_bytes;
}

absl::Status EngineImpl::CheckQueue(const Request& request) const {
  if (waiting_.size() >= limits_.max_queue_requests) {
    return Refuse(absl::StatusCode::kResourceExhausted, "", "QUEUE_FULL",
                  absl::StrCat("the queue holds ", waiting_.size(), " requests, its limit"),
                  RetryMs());
  }
  const int64_t tokens = static_cast<int64_t>(request.plan.request.tokens.size());
  if (waiting_tokens_ + tokens > limits_.max_queue_tokens) {
    return Refuse(absl::StatusCode::kResourceExhausted, "", "QUEUE_FULL",
                  absl::StrCat("the queue holds ", waiting_tokens_, " tokens and takes at most ",
                               limits_.max_queue_tokens, "; the request has ", tokens),
                  RetryMs());
  }
  if (waiting_bytes_ + request.queued_bytes > limits_.max_queue_bytes) {
    return Refuse(absl::StatusCode::kResourceExhausted, "", "QUEUE_FULL",
                  absl::StrCat("the queue holds ", waiting_bytes_, " bytes and takes at most ",
                               limits_.max_queue_bytes, "; the request has ", request.queued_bytes),
                  RetryMs());
  }
  return absl::OkStatus();
}

// The tenant's name is not in the message: it may be that of a certificate.
absl::Status EngineImpl::CheckTenant(const Request& request) const {
  const TenantLedger::Use use = tenants_.Of(request.plan.request.tenant);
  const int64_t tokens = std::ssize(request.plan.request.tokens);
  const bool requests_full =
      limits_.max_tenant_requests > 0 && use.requests >= limits_.max_tenant_requests;
  const bool tokens_full =
      limits_.max_tenant_tokens > 0 && use.tokens + tokens > limits_.max_tenant_tokens;
  if (!requests_full && !tokens_full) return absl::OkStatus();
  return Refuse(
      absl::StatusCode::kResourceExhausted, "", "TENANT_LIMIT",
      requests_full
          ? absl::StrCat("the tenant has ", use.requests, " requests waiting or running, its limit")
          : absl::StrCat("the tenant has ", use.tokens, " tokens waiting or running and may have ",
                         limits_.max_tenant_tokens, "; the request has ", tokens),
      RetryMs());
}

// Takes both when it returns OK, leaves them as they are otherwise.
absl::Status EngineImpl::Enqueue(RequestPtr& entry, PrefixPlan& prefix) {
  std::lock_guard lock(queue_mutex_);
  // Again under the lock, so that Drain and a device fault see every accepted request.
  if (absl::Status s = CheckOpen(); !s.ok()) return s;
  if (absl::Status s = CheckQueue(*entry); !s.ok()) return s;
  if (absl::Status s = CheckTenant(*entry); !s.ok()) return s;
  Accepted accepted;
  for (const RequestPtr& other : waiting_) {
    if (other->plan.request.priority < entry->plan.request.priority) continue;
    ++accepted.queue_position;
    accepted.queued_tokens += static_cast<int64_t>(other->plan.request.tokens.size());
  }
  entry->stream->Push(accepted);  // nobody has a callback yet
  if (prefix_cache_ != nullptr) entry->prefix = prefix_cache_->Start(std::move(prefix));
  if (entry->plan.base != nullptr) entry->base_check = checker_.Start(entry->plan.base);
  entry->sequence = next_sequence_++;
  CountQueued(*entry, 1);
  tenants_.Enter(entry->plan.request.tenant, std::ssize(entry->plan.request.tokens));
  active_.fetch_add(1, std::memory_order_acq_rel);
  waiting_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<PrefillCall>> EngineImpl::Submit(PrefillRequest request) {
  if (absl::Status s = CheckOpen(); !s.ok()) return s;
  const int64_t now = clock_->NowNs();
  const EngineLimits current = limits();
  absl::StatusOr<RequestPlan> plan =
      PlanRequest(std::move(request), ValidationContext{runner_->info(), runner_->limits(), layout_,
                                                        config_, current, snapshots_, now});
  if (!plan.ok()) return plan.status();

  auto stream = std::make_shared<EventStream>(shared_);
  auto entry = std::make_unique<Request>(*std::move(plan), stream);
  entry->arrival_ns = now;
  PrefixPlan prefix;
  if (prefix_cache_ != nullptr) prefix = PlanPrefix(entry->plan, runner_->info());
  entry->queued_bytes = entry->plan.QueuedBytes();
  absl::Status queued = Enqueue(entry, prefix);
  // What was cancelled or has expired waits for the end of a step to leave the queue, but its room
  // is not refused to others meanwhile.
  if (absl::IsResourceExhausted(queued) && ReapQueue(clock_->NowNs())) {
    queued = Enqueue(entry, prefix);
  }
  if (!queued.ok()) return queued;
  shared_->waker.Wake();
  return std::make_shared<CallHandle>(std::move(stream));
}

absl::StatusOr<std::unique_ptr<SnapshotImport>> EngineImpl::BeginImport(const Manifest& manifest,
                                                                        uint32_t ttl_seconds,
                                                                        std::string tenant) {
  if (absl::Status s = CheckOpen(); !s.ok()) return s;
  const EngineLimits current = limits();
  const uint32_t ttl = std::min(ttl_seconds == 0 ? current.default_ttl_seconds : ttl_seconds,
                                current.max_ttl_seconds);
  return imports_.Begin(manifest, runner_->info(), layout_, snapshots_, clock_, ttl,
                        std::move(tenant));
}

absl::Status EngineImpl::ReleaseSnapshot(const std::string& id, const std::string& tenant) {
  if (snapshots_.Release(id, tenant)) return absl::OkStatus();
  return Refuse(absl::StatusCode::kNotFound, "snapshot_id", "SNAPSHOT_NOT_FOUND",
                "the server holds no snapshot of this id");
}

EngineGauges EngineImpl::gauges() const {
  EngineGauges gauges;
  {
    std::lock_guard lock(queue_mutex_);
    gauges.queue_requests = static_cast<int64_t>(waiting_.size());
    gauges.queue_tokens = waiting_tokens_;
    gauges.queue_bytes = waiting_bytes_;
  }
  gauges.running_requests = running_count_;
  gauges.free_slots = free_slots_;
  gauges.free_kv_tokens = free_kv_tokens_;
  gauges.kept_snapshots = snapshots_.size();
  gauges.kept_snapshot_bytes = snapshots_.bytes();
  gauges.buffered_bytes = shared_->buffered_bytes;
  if (prefix_cache_ != nullptr) gauges.prefix = prefix_cache_->stats();
  return gauges;
}

bool EngineImpl::healthy() const {
  if (dead_) return false;
  const int64_t started = step_started_ns_;
  if (started < 0 || config_.stuck_step_seconds <= 0) return true;
  return static_cast<double>(clock_->NowNs() - started) < config_.stuck_step_seconds * 1e9;
}

bool EngineImpl::Drain(int64_t timeout_ns) {
  {
    std::lock_guard lock(queue_mutex_);
    draining_ = true;
  }
  const int64_t deadline = clock_->NowNs() + timeout_ns;
  const auto turn = [this] {
    if (!executor_.joinable()) return RunOneRound();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return true;
  };
  bool progress = true;
  while (active_ > 0 && progress && clock_->NowNs() < deadline) progress = turn();
  if (active_ == 0) return true;
  cancel_all_ = true;
  shared_->waker.Wake();
  for (progress = true; active_ > 0 && progress && healthy();) progress = turn();
  return false;
}

}  // namespace sparsegdn::engine
