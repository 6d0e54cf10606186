#include "server/service/prefill_service.h"

#include "absl/strings/str_cat.h"
#include "server/service/auth.h"
#include "server/service/convert_request.h"
#include "server/service/convert_response.h"
#include "server/service/health.h"
#include "server/service/import_reactor.h"
#include "server/service/log.h"
#include "server/service/metrics.h"
#include "server/service/prefill_reactor.h"
#include "server/service/status.h"

namespace sparsegdn::service {
namespace {

grpc::ServerUnaryReactor* EndUnary(const ServiceContext& service,
                                   grpc::CallbackServerContext* context, Method method,
                                   const absl::Status& status) {
  const grpc::Status out = ToGrpc(status);
  service.metrics->OnRequest(method, out.error_code());
  // Clients poll these: what went well is for debugging only.
  Log(out.ok() ? LogLevel::kDebug : LogLevel::kInfo,
      method == Method::kReleaseSnapshot ? "release ended" : "model info ended",
      {{"request_id", NewRequestId()},
       {"code", std::string(CodeName(out.error_code()))},
       {"message", LogMessage(status)},
       {"traceparent", TraceparentOf(*context)}});
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(out);
  return reactor;
}

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* PrefillServiceImpl::Prefill(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return PrefillReactor::Start(service_, context, *request);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* PrefillServiceImpl::ImportSnapshot(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return ImportReactor::Start(service_, context, response);
}

grpc::ServerUnaryReactor* PrefillServiceImpl::ReleaseSnapshot(grpc::CallbackServerContext* context,
                                                              const grpc::ByteBuffer* bytes,
                                                              grpc::ByteBuffer* response) {
  const auto release = [&]() -> absl::Status {
    absl::StatusOr<Caller> caller = Authenticate(*context, service_.tokens);
    if (!caller.ok()) return caller.status();
    absl::StatusOr<std::shared_ptr<engine::Engine>> engine = service_.health->ForNewCall();
    if (!engine.ok()) return engine.status();
    v1::ReleaseSnapshotRequest request;
    if (absl::Status status = ParseMessage(*bytes, &request); !status.ok()) return status;
    const std::string& id = request.snapshot_id();
    if (id.empty() || id.size() > kMaxSnapshotIdBytes) {
      return InvalidField(
          "snapshot_id", "BAD_SNAPSHOT_ID",
          absl::StrCat("snapshot_id has ", id.size(), " bytes, wanted 1 .. ", kMaxSnapshotIdBytes));
    }
    absl::StatusOr<std::string> tenant = TenantOf(*caller, request.tenant());
    if (!tenant.ok()) return tenant.status();
    *response = ToBytes(v1::ReleaseSnapshotResponse());
    return (*engine)->ReleaseSnapshot(id, *tenant);
  };
  return EndUnary(service_, context, Method::kReleaseSnapshot, release());
}

grpc::ServerUnaryReactor* PrefillServiceImpl::GetModelInfo(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* bytes,
                                                           grpc::ByteBuffer* response) {
  const auto info = [&]() -> absl::Status {
    absl::StatusOr<Caller> caller = Authenticate(*context, service_.tokens);
    if (!caller.ok()) return caller.status();
    absl::StatusOr<std::shared_ptr<engine::Engine>> engine = service_.health->ForNewCall();
    if (!engine.ok()) return engine.status();
    v1::GetModelInfoRequest request;
    if (absl::Status status = ParseMessage(*bytes, &request); !status.ok()) return status;
    *response = ToBytes(ToModelInfo(**engine, limits_(), version_));
    return absl::OkStatus();
  };
  return EndUnary(service_, context, Method::kGetModelInfo, info());
}

}  // namespace sparsegdn::service
