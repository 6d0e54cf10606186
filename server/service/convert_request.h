// Wire -> engine. What only the wire can get wrong is judged here: unknown enum values and the size
// of a manifest; ranges of a request are the engine's (request_validation.h). INVALID_ARGUMENT
// names the field.
#ifndef SPARSEGDN_SERVER_SERVICE_CONVERT_REQUEST_H_
#define SPARSEGDN_SERVER_SERVICE_CONVERT_REQUEST_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/types.h"
#include "server/model/model_runner.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::service {

inline constexpr size_t kMaxLogLabelBytes = 128;
inline constexpr size_t kMaxSnapshotIdBytes = 256;
inline constexpr int kMaxManifestTensors = 1 << 16;
inline constexpr size_t kMaxTensorNameBytes = 256;

// Parses a raw message. INVALID_ARGUMENT when it is not one of its kind.
absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
// A raw answer.
grpc::ByteBuffer ToBytes(const google::protobuf::Message& message);

// Deadline and tenant are the caller's to fill in.
absl::StatusOr<engine::PrefillRequest> FromProto(const v1::PrefillRequest& request);
absl::StatusOr<engine::BudgetOverrides> FromProto(const v1::Budget& budget);

// FAILED_PRECONDITION when the worker believes in another model, vocabulary or format.
absl::Status CheckWorker(const v1::WorkerIdentity& worker, const model::ModelInfo& info);

absl::StatusOr<engine::Manifest> FromProto(const v1::Manifest& manifest);

// What a call is logged under, also one that the engine will refuse for its id: the id, cut, or a
// new one for none.
std::string LogLabel(const std::string& request_id);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CONVERT_REQUEST_H_
