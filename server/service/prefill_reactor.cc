#include "server/service/prefill_reactor.h"

#include <google/protobuf/arena.h>

#include <cmath>
#include <utility>

#include "server/engine/status_payload.h"
#include "server/service/auth.h"
#include "server/service/convert_request.h"
#include "server/service/convert_response.h"
#include "server/service/health.h"
#include "server/service/log.h"
#include "server/service/metrics.h"
#include "server/service/status.h"
#include "server/service/worker_pool.h"

namespace sparsegdn::service {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kBytesPerSharedMessage = 8 << 20;

double Seconds(steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// For the log: whole microseconds.
double Rounded(double value) { return std::round(value * 1e6) / 1e6; }

}  // namespace

PrefillReactor::PrefillReactor(const ServiceContext& service, grpc::CallbackServerContext* context)
    : service_(service),
      traceparent_(TraceparentOf(*context)),
      peer_(context->peer()),
      deadline_(*context, *service.clock),
      context_(context) {}

grpc::ServerWriteReactor<grpc::ByteBuffer>* PrefillReactor::Start(
    const ServiceContext& service, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer& request) {
  auto reactor = std::make_shared<PrefillReactor>(service, context);
  reactor->self_ = reactor;
  absl::StatusOr<std::shared_ptr<engine::PrefillCall>> call = reactor->Submit(request);
  if (!call.ok()) {
    reactor->ended_ = true;
    reactor->End(call.status());
    return reactor.get();
  }
  reactor->call_ = *call;
  service.calls->Add(reactor);
  // Weak: the callback sits inside the call, which the reactor owns.
  (*call)->SetReadyCallback([weak = std::weak_ptr<PrefillReactor>(reactor)] {
    if (const std::shared_ptr<PrefillReactor> self = weak.lock()) self->Wake();
  });
  reactor->Wake();
  return reactor.get();
}

absl::StatusOr<std::shared_ptr<engine::PrefillCall>> PrefillReactor::Submit(
    const grpc::ByteBuffer& bytes) {
  request_id_ = LogLabel("");
  absl::StatusOr<Caller> caller = Authenticate(*context_, service_.tokens);
  if (!caller.ok()) return caller.status();
  google::protobuf::Arena arena;
  auto* message = google::protobuf::Arena::CreateMessage<v1::PrefillRequest>(&arena);
  absl::Status status = ParseMessage(bytes, message);
  if (!status.ok()) return status;
  if (!message->request_id().empty()) request_id_ = LogLabel(message->request_id());
  prompt_tokens_ = message->token_ids_size();

  absl::StatusOr<std::shared_ptr<engine::Engine>> engine = service_.health->ForNewCall();
  if (!engine.ok()) return engine.status();
  status = CheckWorker(message->worker(), (*engine)->model_info());
  if (!status.ok()) return status;
  absl::StatusOr<engine::PrefillRequest> request = FromProto(*message);
  if (!request.ok()) return request.status();
  absl::StatusOr<std::string> tenant = TenantOf(*caller, message->tenant());
  if (!tenant.ok()) return tenant.status();
  request->tenant = *std::move(tenant);
  if (request->request_id.empty()) request->request_id = request_id_;
  request->deadline_ns = deadline_.ns();
  wants_shared_ = message->shared_memory() && IsLocalPeer(*context_);
  Log(LogLevel::kDebug, "prefill received",
      {{"request_id", request_id_}, {"prompt_tokens", prompt_tokens_}, {"peer", peer_}});
  return (*engine)->Submit(*std::move(request));
}

void PrefillReactor::Wake() {
  if (!wants_shared_) return Pump();
  {
    std::lock_guard lock(mutex_);
    if (pump_queued_) return;
    pump_queued_ = true;
  }
  service_.workers->Run([self = shared_from_this()] {
    {
      std::lock_guard lock(self->mutex_);
      self->pump_queued_ = false;
    }
    self->Pump();
  });
}

void PrefillReactor::Pump() {
  std::optional<engine::Event> event;
  std::optional<absl::Status> end;
  {
    std::lock_guard lock(mutex_);
    if (writing_ || ended_ || call_ == nullptr) return;
    event = next_event_ ? std::exchange(next_event_, std::nullopt) : call_->TryPop();
    if (event) {
      NoteLocked(*event);
    } else {
      end = call_->status();
      if (!end) return;  // the ready callback comes back
      ended_ = true;
    }
  }
  // Outside the lock: `writing_` or `ended_` keeps every other thread away.
  if (end) return End(*end);
  absl::StatusOr<grpc::ByteBuffer> message = Encode(*event);
  const std::shared_ptr<PrefillReactor> self = shared_from_this();  // beyond StartWrite
  uint64_t write = 0;
  {
    std::lock_guard lock(mutex_);
    write = writes_;
    if (message.ok()) {
      buffer_ = *std::move(message);
      write_bytes_ = static_cast<int64_t>(buffer_.Length());
      bytes_written_ += write_bytes_;
    } else {
      call_->Cancel(false);
      writing_ = false;
      ended_ = true;
    }
  }
  if (!message.ok()) return End(message.status());
  StartWrite(&buffer_);
  std::lock_guard lock(mutex_);
  if (writing_ && write == writes_) in_flight_ = true;  // else a later write has set it already
}

void PrefillReactor::NoteLocked(const engine::Event& event) {
  write_started_ = steady_clock::now();
  if (!first_frame_ && std::holds_alternative<engine::TensorChunk>(event)) {
    first_frame_ = write_started_;
  }
  if (const auto* result = std::get_if<engine::Result>(&event)) result_ = *result;
  write_bytes_ = 0;
  writing_ = true;
  in_flight_ = false;
  ++writes_;
}

absl::StatusOr<grpc::ByteBuffer> PrefillReactor::Encode(const engine::Event& event) {
  if (const auto* manifest = std::get_if<std::shared_ptr<const engine::Manifest>>(&event);
      manifest != nullptr && wants_shared_) {
    auto hand_off = SharedHandOff::Begin(*service_.segments, **manifest);
    service_.metrics->OnSharedMemory(hand_off.ok());
    if (hand_off.ok()) {
      hand_off_ = *std::move(hand_off);
      return hand_off_->EncodeManifest(**manifest);
    }
    Log(LogLevel::kDebug, "shared memory refused, the call streams",
        {{"request_id", request_id_}, {"why", std::string(hand_off.status().message())}});
  }
  if (const auto* chunk = std::get_if<engine::TensorChunk>(&event);
      chunk != nullptr && hand_off_ != nullptr) {
    return EncodeShared(*chunk);
  }
  return EncodeEvent(event, traceparent_);
}

// Chunks that are ready share a message: without their bytes it costs more than they do.
absl::StatusOr<grpc::ByteBuffer> PrefillReactor::EncodeShared(const engine::TensorChunk& first) {
  absl::Status status = hand_off_->Put(first);
  while (status.ok() && hand_off_->untold_bytes() < kBytesPerSharedMessage) {
    next_event_ = call_->TryPop();
    const auto* chunk = next_event_ ? std::get_if<engine::TensorChunk>(&*next_event_) : nullptr;
    if (chunk == nullptr) break;
    status = hand_off_->Put(*chunk);
    next_event_.reset();
  }
  if (!status.ok()) return status;
  return hand_off_->EncodeChunks();
}

void PrefillReactor::OnWriteDone(bool ok) {
  std::optional<absl::Status> end;
  {
    std::lock_guard lock(mutex_);
    writing_ = in_flight_ = false;
    buffer_.Clear();
    if (ok && result_ && first_frame_ && !ended_) {
      service_.metrics->OnStreamed(Seconds(steady_clock::now() - *first_frame_));
    }
    if ((!ok || cancelled_) && !ended_) {
      end = AbandonLocked();
      ended_ = true;
    }
  }
  if (end) {
    End(*end);
  } else {
    Wake();
  }
}

// The engine counts what it had to cancel; not a call whose last event was already on its way.
absl::Status PrefillReactor::AbandonLocked() {
  const std::optional<absl::Status> status = call_->status();
  const bool expired = deadline_.Passed();
  if (!status) {
    call_->Cancel(expired);
  } else if (status->ok() && !cancelled_ && !stalled_) {
    service_.metrics->OnCancelled(engine::EngineObserver::Stage::kStreaming, 0);
  }
  cancelled_ = true;
  if (status && !status->ok()) return *status;
  if (stalled_) {
    return engine::WithDetails(absl::ResourceExhaustedError("the client took nothing for too long"),
                               {"", "SLOW_READER", std::nullopt});
  }
  return CancelStatus(expired);
}

void PrefillReactor::OnCancel() {
  std::optional<absl::Status> end;
  {
    std::lock_guard lock(mutex_);
    if (ended_ || call_ == nullptr) return;
    absl::Status why = AbandonLocked();
    if (writing_) return;  // OnWriteDone follows and ends the call
    end = std::move(why);
    ended_ = true;
  }
  End(*end);
}

void PrefillReactor::CutIfStalled(steady_clock::time_point now, std::chrono::nanoseconds timeout) {
  std::optional<absl::Status> end;
  {
    std::lock_guard lock(mutex_);
    if (!in_flight_ || now - write_started_ < timeout) return;
    write_started_ = now;  // as long again to take what is in flight, and the status behind it
    if (!ended_ && !cancelled_) {
      service_.metrics->OnSlowReader(write_bytes_);
      stalled_ = true;
      end = AbandonLocked();
      ended_ = true;
    }
  }
  if (end) return End(*end);
  std::lock_guard lock(context_mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void PrefillReactor::End(const absl::Status& status) {
  const grpc::Status out = ToGrpc(status);
  service_.metrics->OnRequest(Method::kPrefill, out.error_code());
  const LogLevel level = out.error_code() == grpc::StatusCode::INTERNAL ||
                                 out.error_code() == grpc::StatusCode::DATA_LOSS
                             ? LogLevel::kError
                             : LogLevel::kInfo;
  if (LogEnabled(level)) {
    const engine::Usage usage = result_ ? result_->usage : engine::Usage{};
    const engine::Timings timings = result_ ? result_->timings : engine::Timings{};
    const double share =
        usage.events_total > 0 ? double(usage.events_selected) / double(usage.events_total) : 0;
    Log(level, "prefill ended",
        {{"request_id", request_id_},
         {"code", std::string(CodeName(out.error_code()))},
         {"message", LogMessage(status)},
         {"traceparent", traceparent_},
         {"peer", peer_},
         {"tokens", prompt_tokens_},
         {"computed_tokens", usage.computed_tokens},
         {"cached_tokens", usage.cached_tokens},
         {"retained_share", Rounded(share)},
         {"queue_seconds", Rounded(timings.queue_seconds)},
         {"engine_seconds", Rounded(timings.engine_seconds)},
         {"bytes_written", bytes_written_},
         {"shared_memory", hand_off_ != nullptr},
         {"total_seconds", Rounded(Seconds(steady_clock::now() - started_))}});
  }
  // Before the client sees the end: a name that is not there any more is never a surprise.
  if (hand_off_ != nullptr && status.ok()) {
    SharedHandOff::Finish(*service_.segments, std::move(hand_off_));
  }
  if (hand_off_ != nullptr) {
    // On a worker: giving back a large segment's pages takes a while.
    service_.workers->Run([dropped = std::shared_ptr<SharedHandOff>(std::move(hand_off_))] {});
  }
  Finish(out);
}

void PrefillReactor::OnDone() {
  {
    std::lock_guard lock(context_mutex_);
    context_ = nullptr;
  }
  service_.calls->Remove(this);
  std::shared_ptr<PrefillReactor> last = std::move(self_);  // destroyed on return
}

}  // namespace sparsegdn::service
