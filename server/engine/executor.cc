#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/scheduler.h"

namespace sparsegdn::engine {
namespace {

// While calls are live, deadlines and slow readers are looked at this often.
constexpr std::chrono::milliseconds kLivePoll(10);
constexpr std::chrono::milliseconds kIdlePoll(500);
constexpr double kRateSmoothing = 0.2;

model::Chunk ChunkOf(const Request& request, bool has_full_layers) {
  const RequestPlan& plan = request.plan;
  const int64_t begin = request.position;
  const int64_t end = plan.ChunkEnd(begin);
  const Outputs& outputs = plan.request.outputs;
  const bool in_snapshot = begin < plan.snapshot_position;
  model::Chunk chunk;
  chunk.slot = request.slot;
  chunk.tokens = std::span(plan.request.tokens)
                     .subspan(static_cast<size_t>(begin - plan.first_position),
                              static_cast<size_t>(end - begin));
  chunk.first_position = begin;
  chunk.prompt_tokens = plan.prompt_tokens;
  chunk.budget = plan.budget;
  chunk.emit_state = in_snapshot && end == plan.snapshot_position;
  chunk.emit_kv = in_snapshot && has_full_layers && (outputs.kv || plan.request.keep_snapshot);
  chunk.checkpoint_every = in_snapshot && !plan.checkpoints.empty() ? outputs.checkpoint_every : 0;
  const auto first = std::lower_bound(plan.runner_logits.begin(), plan.runner_logits.end(), begin);
  const auto last = std::lower_bound(first, plan.runner_logits.end(), end);
  chunk.logits_positions = std::span(plan.runner_logits)
                               .subspan(static_cast<size_t>(first - plan.runner_logits.begin()),
                                        static_cast<size_t>(last - first));
  if (outputs.logprobs_from && *outputs.logprobs_from <= end) {
    chunk.logprobs_from = *outputs.logprobs_from;
    if (end < plan.prompt_tokens) {
      chunk.next_token = plan.request.tokens[static_cast<size_t>(end - plan.first_position)];
    }
  }
  return chunk;
}

}  // namespace

// Hands the step's results to the builders of the chunks' requests.
class EngineImpl::Sink final : public model::StepSink {
 public:
  explicit Sink(std::vector<Request*> requests) : requests_(std::move(requests)) {}
  void OnState(size_t chunk, int32_t layer, int64_t position, model::BufferView recurrent,
               model::BufferView conv) override {
    requests_[chunk]->builder->AddState(layer, position, recurrent, conv);
    if (PrefixRecorder* recorder = requests_[chunk]->recorder.get()) {
      recorder->AddState(layer, position, recurrent, conv);
    }
  }
  void OnKv(size_t chunk, int32_t layer, int64_t first_position, model::BufferView key,
            model::BufferView value) override {
    requests_[chunk]->builder->AddKv(layer, first_position, key, value);
    if (PrefixRecorder* recorder = requests_[chunk]->recorder.get()) {
      recorder->AddKv(layer, first_position, key, value);
    }
  }
  void OnLogits(size_t chunk, int64_t position, std::span<const float> logits) override {
    requests_[chunk]->builder->AddLogits(position, logits);
  }
  void OnLogprobs(size_t chunk, int64_t first_position, std::span<const float> values) override {
    requests_[chunk]->builder->AddLogprobs(first_position, values);
  }

 private:
  const std::vector<Request*> requests_;
};

void EngineImpl::ExecutorLoop() {
  while (!stopping_) {
    if (RunOneRound()) continue;
    const bool live = active_ > 0 || !streaming_.empty() || imports_.size() > 0;
    shared_->waker.WaitFor(live ? kLivePoll : kIdlePoll);
  }
}

bool EngineImpl::RunOneRound() {
  const EngineLimits current = limits();
  bool progress = Reap(current);
  if (dead_) {
    FailDead();
  } else {
    progress |= Admit(current);
    progress |= Replay(current);
    progress |= Step(current);
  }
  PublishGauges();
  return progress;
}

bool EngineImpl::Admit(const EngineLimits& limits) {
  bool progress = false;
  while (RequestPtr request = NextAdmission(limits)) {
    Start(std::move(request));
    progress = true;
  }
  return progress;
}

// The next waiting request that gets its slot and KV now (with nothing to run: room for its frames,
// which leave at once), taken out of the queue.
EngineImpl::RequestPtr EngineImpl::NextAdmission(const EngineLimits& limits) {
  std::lock_guard lock(queue_mutex_);
  std::vector<Waiting> view;
  view.reserve(waiting_.size());
  for (const RequestPtr& r : waiting_) {
    view.push_back({r->plan.request.priority, r->arrival_ns, r->sequence,
                    tenants_.Of(r->plan.request.tenant).running});
  }
  const bool reserve_last = runner_->limits().state_slots >= kSlotsWithReserve;
  std::vector<Request*> passed;
  for (const size_t i : AdmissionOrder(view, clock_->NowNs())) {
    Request& request = *waiting_[i];
    if (request.base_check != nullptr && !request.base_check->done()) continue;
    if (request.plan.tokens_to_run() > 0) {
      const int32_t free = runner_->free_slots();
      if (free == 0 || !SettlePrefix(request)) continue;
      const bool is_long = request.tokens_to_run() > request.plan.chunk_tokens;
      if (free == 1 && reserve_last && is_long && request.bypassed < kMaxBypass) {
        passed.push_back(&request);
        continue;
      }
      absl::StatusOr<int32_t> slot = runner_->Acquire(request.plan.end_position);
      if (!slot.ok()) {
        // No KV room now. Smaller ones may go first, but not for ever.
        if (request.bypassed >= kMaxBypass) return nullptr;
        passed.push_back(&request);
        continue;
      }
      request.slot = *slot;
    } else if (!FramesFit(shared_->buffered_bytes, request.plan.MaxChunkBytes(),
                          limits.max_buffered_bytes)) {
      if (request.bypassed >= kMaxBypass) return nullptr;
      passed.push_back(&request);
      continue;
    }
    for (Request* other : passed) ++other->bypassed;
    RequestPtr taken = std::move(waiting_[i]);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    CountQueued(*taken, -1);
    tenants_.Admit(taken->plan.request.tenant);
    taken->admitted = true;
    return taken;
  }
  return nullptr;
}

void EngineImpl::Start(RequestPtr request) {
  Request& r = *request;
  r.admitted_ns = clock_->NowNs();
  running_count_.fetch_add(1, std::memory_order_relaxed);
  r.position = r.plan.first_position;
  r.last_step = step_;
  r.selected.assign(layout_.linear_layers.size() * static_cast<size_t>(layout_.pairs), 0);
  if (absl::Status s = Prepare(r); !s.ok()) return Fail(r, std::move(s));
  if (r.plan.tokens_to_run() == 0) {
    observer_->OnQueueWait(static_cast<double>(r.admitted_ns - r.arrival_ns) * 1e-9);
    return Finish(r);
  }
  running_.push_back(std::move(request));
}

// The tokens before the snapshot are not known here: nothing can be computed in its place.
absl::Status EngineImpl::CheckBase(const Request& request) {
  if (request.base_check == nullptr || request.base_check->sound()) return absl::OkStatus();
  if (snapshots_.Release(request.plan.request.resume_from, request.plan.request.tenant)) {
    observer_->OnCorruptSnapshot();  // once, however many requests had it
  }
  return Refuse(absl::StatusCode::kDataLoss, "resume_from", "SNAPSHOT_CORRUPT",
                "the kept snapshot no longer matches its checksum and was dropped; send the prompt "
                "again from its start");
}

absl::Status EngineImpl::Prepare(Request& request) {
  if (absl::Status s = CheckBase(request); !s.ok()) return s;
  RequestPlan& plan = request.plan;
  if (plan.request.keep_snapshot) {
    absl::StatusOr<std::unique_ptr<SnapshotTable::Reservation>> reservation = snapshots_.Reserve(
        layout_.kept_bytes(plan.snapshot_position), plan.base.get(), plan.request.tenant);
    if (!reservation.ok()) return reservation.status();
    request.reservation = *std::move(reservation);
    if (plan.request.pin_snapshot) {
      absl::Status s = request.reservation->Pin(layout_.kept_bytes(plan.snapshot_position));
      if (!s.ok()) return s;
    }
  }
  if (request.slot >= 0 && plan.base) {
    if (absl::Status s = runner_->Load(request.slot, ImageOf(*plan.base, layout_)); !s.ok()) {
      return Refuse(absl::StatusCode::kInternal, "resume_from", "LOAD_FAILED",
                    std::string(s.message()));
    }
  }
  if (absl::Status s = LoadPrefix(request); !s.ok()) return s;
  request.stream->Push(plan.manifest);
  request.stream->Push(Progress{0, request.tokens_to_run()});
  request.builder = std::make_unique<SnapshotBuilder>(
      plan, layout_, config_.frame_bytes, [this, r = &request](TensorChunk chunk) {
        if (!std::exchange(r->first_frame_seen, true)) {
          observer_->OnFirstFrame(static_cast<double>(clock_->NowNs() - r->arrival_ns) * 1e-9);
        }
        r->stream->Push(std::move(chunk));
      });
  if (plan.snapshot_position == plan.first_position) {
    request.builder->EmitUnchanged(plan.base ? *plan.base : ZeroSnapshot(layout_));
  } else if (plan.base) {
    request.builder->StartFrom(*plan.base);
  }
  plan.base.reset();  // loaded: the table may evict it
  return absl::OkStatus();
}

// The running requests of the next step; marks those that unread frames stop.
std::vector<size_t> EngineImpl::Choose(const EngineLimits& limits) {
  const int64_t now = clock_->NowNs();
  const auto pause = [&](Request& request) {
    if (request.paused_ns >= 0) return;
    request.paused_ns = now;
    request.stream->set_paused(true);
    observer_->OnSlowReader(request.stream->buffered_bytes());
  };
  std::vector<Runnable> runnable;
  std::vector<size_t> index;
  for (size_t i = 0; i < running_.size(); ++i) {
    Request& r = *running_[i];
    if (r.replaying()) continue;
    if (r.stream->buffered_bytes() >= limits.max_buffered_bytes_per_call) {
      pause(r);
      continue;
    }
    const int64_t end = r.plan.ChunkEnd(r.position);
    runnable.push_back({r.plan.request.priority, r.started, r.last_step, end - r.position,
                        r.plan.end_position - r.position, r.sequence,
                        r.plan.EmittedBytes(r.position, end)});
    index.push_back(i);
  }
  const model::RunnerLimits& device = runner_->limits();
  std::vector<size_t> chosen = PackStep(runnable, step_ + 1,
                                        {.max_tokens = device.max_batch_tokens,
                                         .max_seqs = device.max_batch_seqs,
                                         .started_first = started_first_,
                                         .buffered_bytes = shared_->buffered_bytes,
                                         .max_buffered_bytes = limits.max_buffered_bytes});
  if (!chosen.empty()) started_first_ = NewOnesTookTheStep(runnable, chosen);
  for (size_t& i : chosen) {
    i = index[i];
    running_[i]->paused_ns = -1;
    running_[i]->stream->set_paused(false);
  }
  if (chosen.empty()) {
    // Unread frames of all calls together leave no room: whoever holds some is slow.
    for (const size_t i : index) {
      if (running_[i]->stream->buffered_bytes() > 0) pause(*running_[i]);
    }
  }
  return chosen;
}

bool EngineImpl::Step(const EngineLimits& limits) {
  const std::vector<size_t> chosen = Choose(limits);
  if (chosen.empty()) return false;
  std::vector<model::Chunk> chunks;
  std::vector<Request*> requests;
  int64_t tokens = 0;
  const int64_t begin = clock_->NowNs();
  for (const size_t i : chosen) {
    const Request& r = *running_[i];
    if (!r.started) observer_->OnQueueWait(static_cast<double>(begin - r.arrival_ns) * 1e-9);
    requests.push_back(running_[i].get());
    chunks.push_back(ChunkOf(*running_[i], !layout_.full_layers.empty()));
    RecordChunk(*running_[i], chunks.back());
    tokens += static_cast<int64_t>(chunks.back().tokens.size());
  }
  ++step_;
  Sink sink(std::move(requests));
  model::StepStats stats;
  step_started_ns_ = begin;
  absl::Status status = runner_->Step(chunks, sink, stats);
  step_started_ns_ = -1;
  if (status.ok() && stats.chunks.size() != chunks.size()) {
    status = absl::InternalError(absl::StrCat("the runner gave statistics of ", stats.chunks.size(),
                                              " chunks, wanted ", chunks.size()));
  }
  if (const int64_t ns = clock_->NowNs() - begin; status.ok() && ns > 0) {
    const double rate = static_cast<double>(tokens) * 1e9 / static_cast<double>(ns);
    const double old = tokens_per_second_;
    tokens_per_second_ = old <= 0 ? rate : old + kRateSmoothing * (rate - old);
  }
  if (status.ok()) observer_->OnStep(tokens, static_cast<int64_t>(chunks.size()), stats);
  AfterStep(chosen, chunks, status, stats);
  return true;
}

void EngineImpl::AfterStep(const std::vector<size_t>& chosen,
                           const std::vector<model::Chunk>& chunks, const absl::Status& status,
                           const model::StepStats& stats) {
  int64_t step_tokens = 0;
  for (const model::Chunk& chunk : chunks) step_tokens += std::ssize(chunk.tokens);
  for (size_t c = 0; c < chosen.size(); ++c) {
    RequestPtr& request = running_[chosen[c]];
    if (!status.ok()) {
      Fail(*request, Refuse(absl::StatusCode::kInternal, "", "STEP_FAILED",
                            absl::StrCat("the model failed: ", std::string(status.message()))));
      request.reset();
      continue;
    }
    Account(*request, chunks[c], c, stats, step_tokens);
    request->builder->EndStep();
    if (stats.chunks[c].nonfinite) {
      observer_->OnNonFinite();
      Fail(*request, Refuse(absl::StatusCode::kDataLoss, "", "NON_FINITE_STATE",
                            absl::StrCat("a state or a logit is not finite within positions ",
                                         chunks[c].first_position, " to ", request->position - 1)));
      request.reset();
    } else if (!request->builder->status().ok()) {
      Fail(*request, request->builder->status());
      request.reset();
    } else {
      KeepRecorded(*request);
      request->stream->Push(Progress{request->computed_tokens, request->tokens_to_run()});
      if (request->position == request->plan.end_position) {
        Finish(*request);
        request.reset();
      }
    }
  }
  std::erase(running_, nullptr);
  if (!status.ok() && !runner_->healthy()) {
    std::lock_guard lock(queue_mutex_);
    dead_ = true;
  }
  if (dead_) FailDead();
}

void EngineImpl::Account(Request& request, const model::Chunk& chunk, size_t index,
                         const model::StepStats& stats, int64_t step_tokens) {
  const int64_t tokens = std::ssize(chunk.tokens);
  request.position += tokens;
  request.computed_tokens += tokens;
  request.started = true;
  request.last_step = step_;
  const double share = static_cast<double>(tokens) / static_cast<double>(step_tokens);
  request.selection_ns += share * static_cast<double>(stats.selection_ns);
  request.gdn_core_ns += share * static_cast<double>(stats.gdn_core_ns);
  const std::vector<int32_t>& selected = stats.chunks[index].selected;
  for (size_t i = 0; i < std::min(selected.size(), request.selected.size()); ++i) {
    request.selected[i] += selected[i];
  }
}

void EngineImpl::PublishGauges() {
  free_slots_ = runner_->free_slots();
  free_kv_tokens_ = runner_->free_kv_tokens();
}

}  // namespace sparsegdn::engine
