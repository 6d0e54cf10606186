#include "server/service/import_reactor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/status_payload.h"
#include "server/service/convert_request.h"
#include "server/service/convert_response.h"
#include "server/service/health.h"
#include "server/service/log.h"
#include "server/service/metrics.h"
#include "server/service/status.h"
#include "server/service/worker_pool.h"

namespace sparsegdn::service {

using std::chrono::steady_clock;

ImportReactor::ImportReactor(const ServiceContext& service, grpc::CallbackServerContext* context,
                             grpc::ByteBuffer* response)
    : service_(service),
      response_(response),
      traceparent_(TraceparentOf(*context)),
      deadline_(*context, *service.clock),
      context_(context) {}

grpc::ServerReadReactor<grpc::ByteBuffer>* ImportReactor::Start(
    const ServiceContext& service, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response) {
  auto reactor = std::make_shared<ImportReactor>(service, context, response);
  reactor->self_ = reactor;
  absl::StatusOr<Caller> caller = Authenticate(*context, service.tokens);
  if (!caller.ok()) {
    reactor->End(caller.status());
    return reactor.get();
  }
  reactor->caller_ = *std::move(caller);
  absl::StatusOr<std::shared_ptr<engine::Engine>> engine = service.health->ForNewCall();
  if (!engine.ok()) {
    reactor->End(engine.status());
    return reactor.get();
  }
  reactor->engine_ = *engine;
  service.calls->Add(reactor);
  {
    std::lock_guard lock(reactor->context_mutex_);
    reactor->reading_ = true;
    reactor->read_started_ = steady_clock::now();
  }
  reactor->StartRead(&reactor->bytes_);
  return reactor.get();
}

void ImportReactor::OnReadDone(bool ok) {
  bool cancelled = false, stalled = false;
  {
    std::lock_guard lock(context_mutex_);
    reading_ = false;
    stalled = stalled_;
    cancelled = context_->IsCancelled();
  }
  if (!ok) {
    import_.reset();
    if (stalled) {
      End(engine::WithDetails(absl::ResourceExhaustedError("the client sent nothing for too long"),
                              {"", "SLOW_WRITER", std::nullopt}));
    } else if (cancelled) {
      End(CancelStatus(deadline_.Passed()));
    } else {
      End(InvalidField("frame", "SNAPSHOT_INCOMPLETE",
                       "the stream ended before SnapshotEnd; nothing was kept"));
    }
    return;
  }
  bool done = false;
  absl::Status status = Take(done);
  if (!status.ok()) {
    import_.reset();
    End(status);
    return;
  }
  if (done) {
    // No read is in flight and none follows: the worker has the reactor to itself. It stays until
    // OnDone, which only follows End.
    service_.workers->Run([self = shared_from_this()] { self->Complete(); });
    return;
  }
  {
    std::lock_guard lock(context_mutex_);
    reading_ = true;
    read_started_ = steady_clock::now();
  }
  StartRead(&bytes_);
}

absl::Status ImportReactor::Take(bool& done) {
  absl::Status parsed = ParseMessage(bytes_, &frame_);
  bytes_.Clear();
  if (!parsed.ok()) return parsed;
  const bool first = import_ == nullptr;
  switch (frame_.frame_case()) {
    case v1::SnapshotFrame::kHeader:
      if (!first) {
        return InvalidField("frame.header", "SNAPSHOT_OUT_OF_ORDER",
                            "a second header, wanted chunks and then the end");
      }
      return TakeHeader(frame_.header());
    case v1::SnapshotFrame::kChunk: {
      if (first) {
        return InvalidField("frame.chunk", "SNAPSHOT_OUT_OF_ORDER",
                            "a chunk before the header, wanted the header first");
      }
      const v1::TensorChunk& chunk = frame_.chunk();
      return import_->Add(chunk.tensor(), chunk.byte_offset(), chunk.data(), chunk.xxh3_64());
    }
    case v1::SnapshotFrame::kEnd:
      if (first) {
        return InvalidField("frame.end", "SNAPSHOT_OUT_OF_ORDER",
                            "the end before the header, wanted the header first");
      }
      done = true;
      return absl::OkStatus();
    case v1::SnapshotFrame::FRAME_NOT_SET:
      break;
  }
  return InvalidField("frame", "SNAPSHOT_EMPTY_FRAME",
                      "a frame without content, wanted header, chunk or end");
}

absl::Status ImportReactor::TakeHeader(const v1::SnapshotHeader& header) {
  absl::StatusOr<engine::Manifest> manifest = FromProto(header.manifest());
  if (!manifest.ok()) return manifest.status();
  absl::StatusOr<std::string> tenant = TenantOf(caller_, header.tenant());
  if (!tenant.ok()) return tenant.status();
  absl::StatusOr<std::unique_ptr<engine::SnapshotImport>> import =
      engine_->BeginImport(*manifest, header.keep().ttl_seconds(), *std::move(tenant));
  if (!import.ok()) return import.status();
  import_ = *std::move(import);
  if (header.keep().pin()) import_->Pin();
  return absl::OkStatus();
}

void ImportReactor::Complete() {
  if (IsCancelled()) {
    import_.reset();
    End(CancelStatus(deadline_.Passed()));
    return;
  }
  absl::StatusOr<engine::SnapshotRef> ref = import_->Finish(frame_.end().digest());
  import_.reset();
  if (ref.ok()) {
    ref_ = ToProto(*ref);
    *response_ = ToBytes(ref_);
  }
  End(ref.status());
}

bool ImportReactor::IsCancelled() {
  std::lock_guard lock(context_mutex_);
  return context_->IsCancelled();
}

void ImportReactor::CutIfStalled(steady_clock::time_point now, std::chrono::nanoseconds timeout) {
  std::lock_guard lock(context_mutex_);
  if (!reading_ || context_ == nullptr || now - read_started_ < timeout) return;
  stalled_ = true;
  context_->TryCancel();
}

void ImportReactor::End(const absl::Status& status) {
  const grpc::Status out = ToGrpc(status);
  service_.metrics->OnRequest(Method::kImportSnapshot, out.error_code());
  Log(LogLevel::kInfo, "import ended",
      {{"request_id", request_id_},
       {"code", std::string(CodeName(out.error_code()))},
       {"message", LogMessage(status)},
       {"traceparent", traceparent_},
       {"bytes", static_cast<int64_t>(ref_.bytes())}});
  Finish(out);
}

void ImportReactor::OnDone() {
  {
    std::lock_guard lock(context_mutex_);
    context_ = nullptr;
  }
  service_.calls->Remove(this);
  std::shared_ptr<ImportReactor> last = std::move(self_);  // destroyed on return
}

}  // namespace sparsegdn::service
