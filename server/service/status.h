// absl::Status with engine::StatusDetails -> grpc::Status with google.rpc details. The one place
// where error codes are mapped.
#ifndef SPARSEGDN_SERVER_SERVICE_STATUS_H_
#define SPARSEGDN_SERVER_SERVICE_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace sparsegdn::service {

// Larger trailers than this turned into another code on the client's side (gRPC 1.51).
inline constexpr size_t kMaxDetailsBytes = 7 * 1024;
inline constexpr size_t kMaxMessageBytes = 1024;

// The code is kept; the message is cut at kMaxMessageBytes and made printable ASCII. An error with
// details carries grpc-status-details-bin: sparsegdn.rpc.Status with ErrorInfo, BadRequest where a
// field is named, RetryInfo where a delay is known.
grpc::Status ToGrpc(const absl::Status& status);

// "OK", "INVALID_ARGUMENT", ...; the label of requests_total and of logs.
const char* CodeName(grpc::StatusCode code);

// The message for the log: empty where it would repeat what the client sent as content (a token id,
// a snapshot's id); field and reason stand for it.
std::string LogMessage(const absl::Status& status);

// INVALID_ARGUMENT for `field`; `message` says field, got and wanted.
absl::Status InvalidField(const std::string& field, const std::string& reason,
                          const std::string& message);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_STATUS_H_
