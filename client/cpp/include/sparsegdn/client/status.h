// Errors of the client: absl::Status with decodable details.
#ifndef SPARSEGDN_CLIENT_STATUS_H_
#define SPARSEGDN_CLIENT_STATUS_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace sparsegdn::client {

// What the server (or this library) said beside code and message. Empty strings: not said.
struct ErrorDetails {
  std::string field;   // the request field at fault, e.g. "token_ids[17]"
  std::string reason;  // stable UPPER_SNAKE_CASE, e.g. "QUEUE_FULL"
  std::optional<absl::Duration> retry_after;
};

// Decodes the google.rpc details (ErrorInfo, BadRequest, RetryInfo) carried by a status that this
// library returned. Never fails: details that cannot be read are absent.
//
// Reasons this library sets itself, with DATA_LOSS unless another code is named:
//   MANIFEST_INVALID, MANIFEST_MISSING, MANIFEST_REPEATED, CHUNK_HASH, CHUNK_OUT_OF_BOUNDS,
//   CHUNK_OVERLAP, CHUNK_TENSOR_UNKNOWN, BYTES_MISSING, DIGEST, EVENT_AFTER_RESULT, RESULT_MISSING,
//   CHUNK_NOT_SHARED, SHARED_MEMORY_UNAVAILABLE (FAILED_PRECONDITION; not seen by callers, whose
//   call is repeated without), TLS_HANDSHAKE (UNAUTHENTICATED), BAD_OPTION and TOKEN_FILE
//   (INVALID_ARGUMENT),
//   SNAPSHOT_TOO_LARGE (RESOURCE_EXHAUSTED: above the caller's own bound),
//   FILE_IO (UNKNOWN, or NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED for a full disk),
//   FILE_FORMAT (INVALID_ARGUMENT: not a snapshot file), FILE_CORRUPT.
ErrorDetails DetailsOf(const absl::Status& status);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_STATUS_H_
