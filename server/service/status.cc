#include "server/service/status.h"

#include <string_view>

#include "server/engine/status_payload.h"
#include "sparsegdn/rpc/status.pb.h"

namespace sparsegdn::service {
namespace {

constexpr size_t kMaxFieldBytes = 256;
constexpr size_t kMaxReasonBytes = 64;

// Protobuf strings must be UTF-8 and grpc-message is percent-encoded outside printable ASCII.
std::string Printable(std::string_view text, size_t max_bytes) {
  std::string out(text.substr(0, max_bytes));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

void AddDetail(const google::protobuf::Message& message, rpc::Status& status) {
  google::protobuf::Any* any = status.add_details();
  any->set_type_url("type.googleapis.com/google.rpc." + message.GetDescriptor()->name());
  message.SerializeToString(any->mutable_value());
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message = Printable(std::string(status.message()), kMaxMessageBytes);
  const engine::StatusDetails details = engine::DetailsOf(status);
  if (details.reason.empty() && details.field.empty() && !details.retry_after_ms) {
    return grpc::Status(code, message);
  }
  rpc::Status out;
  out.set_code(static_cast<int>(code));
  out.set_message(message);
  rpc::ErrorInfo info;
  info.set_reason(Printable(details.reason, kMaxReasonBytes));
  info.set_domain("sparsegdn");
  const std::string field = Printable(details.field, kMaxFieldBytes);
  if (!field.empty()) (*info.mutable_metadata())["field"] = field;
  AddDetail(info, out);
  if (!field.empty()) {
    rpc::BadRequest bad;
    rpc::BadRequest::FieldViolation* violation = bad.add_field_violations();
    violation->set_field(field);
    violation->set_description(message);
    AddDetail(bad, out);
  }
  if (details.retry_after_ms) {
    rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(*details.retry_after_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(*details.retry_after_ms % 1000) *
                                           1000000);
    AddDetail(retry, out);
  }
  static_assert(3 * kMaxMessageBytes + 4 * kMaxFieldBytes < kMaxDetailsBytes,
                "the bounds above keep the details under the limit");
  return grpc::Status(code, message, out.SerializeAsString());
}

const char* CodeName(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const int index = static_cast<int>(code);
  return index >= 0 && index <= 16 ? kNames[index] : "UNKNOWN";
}

std::string LogMessage(const absl::Status& status) {
  if (status.ok()) return "";
  const engine::StatusDetails details = engine::DetailsOf(status);
  for (const char* content : {"token_ids", "resume_from", "snapshot_id"}) {
    if (details.field.rfind(content, 0) == 0) return details.reason + " in " + details.field;
  }
  return Printable(std::string(status.message()), kMaxMessageBytes);
}

absl::Status InvalidField(const std::string& field, const std::string& reason,
                          const std::string& message) {
  return engine::WithDetails(absl::InvalidArgumentError(message), {field, reason, std::nullopt});
}

}  // namespace sparsegdn::service
