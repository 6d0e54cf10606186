#include "server/service/prefill_reactor.h"

#include <google/protobuf/arena.h>

#include <cmath>
#include <utility>

#include "server/engine/status_payload.h"
#include "server/service/convert_request.h"
#include "server/service/convert_response.h"
#include "server/service/health.h"
#include "server/service/log.h"
#include "server/service/metrics.h"
#include "server/service/status.h"

namespace sparsegdn::service {
namespace {

using std::chrono::steady_clock;

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
    if (const std::shared_ptr<PrefillReactor> self = weak.lock()) self->Pump();
  });
  reactor->Pump();
  return reactor.get();
}

absl::StatusOr<std::shared_ptr<engine::PrefillCall>> PrefillReactor::Submit(
    const grpc::ByteBuffer& bytes) {
  google::protobuf::Arena arena;
  auto* message = google::protobuf::Arena::CreateMessage<v1::PrefillRequest>(&arena);
  absl::Status status = ParseRequest(bytes, message);
  if (!status.ok()) return status;
  request_id_ = LogLabel(message->request_id());
  prompt_tokens_ = message->token_ids_size();

  absl::StatusOr<std::shared_ptr<engine::Engine>> engine = service_.health->ForNewCall();
  if (!engine.ok()) return engine.status();
  status = CheckWorker(message->worker(), (*engine)->model_info());
  if (!status.ok()) return status;
  absl::StatusOr<engine::PrefillRequest> request = FromProto(*message);
  if (!request.ok()) return request.status();
  absl::StatusOr<std::string> tenant = TenantOf(*context_, message->tenant());
  if (!tenant.ok()) return tenant.status();
  request->tenant = *std::move(tenant);
  if (request->request_id.empty()) request->request_id = request_id_;
  request->deadline_ns = deadline_.ns();
  Log(LogLevel::kDebug, "prefill received",
      {{"request_id", request_id_}, {"prompt_tokens", prompt_tokens_}, {"peer", peer_}});
  return (*engine)->Submit(*std::move(request));
}

void PrefillReactor::Pump() {
  std::optional<absl::Status> end;
  {
    std::lock_guard lock(mutex_);
    if (writing_ || ended_ || call_ == nullptr) return;
    if (std::optional<engine::Event> event = call_->TryPop()) {
      PrepareLocked(*event);
    } else {
      end = call_->status();
      if (!end) return;  // the ready callback comes back
      ended_ = true;
    }
  }
  // Outside the lock: `writing_` or `ended_` keeps every other thread away.
  if (end) {
    End(*end);
  } else {
    StartWrite(&buffer_);
  }
}

void PrefillReactor::PrepareLocked(const engine::Event& event) {
  write_started_ = steady_clock::now();
  if (!first_frame_ && std::holds_alternative<engine::TensorChunk>(event)) {
    first_frame_ = write_started_;
  }
  if (const auto* result = std::get_if<engine::Result>(&event)) result_ = *result;
  buffer_ = EncodeEvent(event, traceparent_);
  bytes_written_ += static_cast<int64_t>(buffer_.Length());
  writing_ = true;
}

void PrefillReactor::OnWriteDone(bool ok) {
  std::optional<absl::Status> end;
  {
    std::lock_guard lock(mutex_);
    writing_ = false;
    buffer_.Clear();
    if (ok && result_ && first_frame_) {
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
    Pump();
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
  {
    std::lock_guard lock(mutex_);
    if (!writing_ || now - write_started_ < timeout) return;
    if (!stalled_) service_.metrics->OnSlowReader(static_cast<int64_t>(buffer_.Length()));
    stalled_ = true;
  }
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
         {"message", out.error_message()},
         {"traceparent", traceparent_},
         {"peer", peer_},
         {"tokens", prompt_tokens_},
         {"computed_tokens", usage.computed_tokens},
         {"cached_tokens", usage.cached_tokens},
         {"retained_share", Rounded(share)},
         {"queue_seconds", Rounded(timings.queue_seconds)},
         {"engine_seconds", Rounded(timings.engine_seconds)},
         {"bytes_written", bytes_written_},
         {"total_seconds", Rounded(Seconds(steady_clock::now() - started_))}});
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
