#include "src/errors.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "sparsegdn/client/status.h"
#include "sparsegdn/rpc/status.pb.h"

namespace sparsegdn::client {
namespace {

// The payload is the serialised google.rpc.Status of the grpc-status-details-bin trailer.
constexpr char kPayloadUrl[] = "type.googleapis.com/google.rpc.Status";
constexpr char kTypePrefix[] = "type.googleapis.com/google.rpc.";

void Pack(const google::protobuf::Message& message, const char* name, rpc::Status* status) {
  google::protobuf::Any* any = status->add_details();
  any->set_type_url(absl::StrCat(kTypePrefix, name));
  any->set_value(message.SerializeAsString());
}

void Decode(const google::protobuf::Any& any, ErrorDetails* details) {
  if (any.type_url() == absl::StrCat(kTypePrefix, "ErrorInfo")) {
    rpc::ErrorInfo info;
    if (!info.ParseFromString(any.value())) return;
    details->reason = info.reason();
    auto field = info.metadata().find("field");
    if (field != info.metadata().end() && details->field.empty()) details->field = field->second;
  } else if (any.type_url() == absl::StrCat(kTypePrefix, "BadRequest")) {
    rpc::BadRequest request;
    if (!request.ParseFromString(any.value()) || request.field_violations_size() == 0) return;
    details->field = request.field_violations(0).field();
  } else if (any.type_url() == absl::StrCat(kTypePrefix, "RetryInfo")) {
    rpc::RetryInfo retry;
    if (!retry.ParseFromString(any.value())) return;
    details->retry_after = absl::Seconds(retry.retry_delay().seconds()) +
                           absl::Nanoseconds(retry.retry_delay().nanos());
  }
}

}  // namespace

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  auto payload = status.GetPayload(kPayloadUrl);
  rpc::Status wire;
  if (!payload.has_value() || !wire.ParseFromString(std::string(*payload))) return details;
  for (const google::protobuf::Any& any : wire.details()) Decode(any, &details);
  return details;
}

absl::Status MakeError(absl::StatusCode code, const std::string& reason, const std::string& field,
                       const std::string& message) {
  absl::Status status(code, message);
  rpc::Status wire;
  wire.set_code(static_cast<int>(code));
  wire.set_message(message);
  rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("sparsegdn.client");
  if (!field.empty()) (*info.mutable_metadata())["field"] = field;
  Pack(info, "ErrorInfo", &wire);
  status.SetPayload(kPayloadUrl, absl::Cord(wire.SerializeAsString()));
  return status;
}

absl::Status FileError(const std::string& action, const std::string& path, int error_number) {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  if (error_number == ENOENT || error_number == ENOTDIR) code = absl::StatusCode::kNotFound;
  if (error_number == EACCES || error_number == EPERM || error_number == EROFS) {
    code = absl::StatusCode::kPermissionDenied;
  }
  if (error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG) {
    code = absl::StatusCode::kResourceExhausted;
  }
  return MakeError(code, "FILE_IO", "path",
                   absl::StrCat("cannot ", action, " ", path, ": ", std::strerror(error_number)));
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status out(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  if (!status.error_details().empty()) {
    out.SetPayload(kPayloadUrl, absl::Cord(status.error_details()));
  }
  return out;
}

}  // namespace sparsegdn::client
