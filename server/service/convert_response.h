// Engine -> wire. Tensor frames are not copied: the message's header is written by hand and the
// data is a slice that shares the engine's buffer.
#ifndef SPARSEGDN_SERVER_SERVICE_CONVERT_RESPONSE_H_
#define SPARSEGDN_SERVER_SERVICE_CONVERT_RESPONSE_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "server/engine/engine.h"
#include "server/engine/types.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::service {

// One serialised PrefillResponse. `traceparent` is echoed in a Result.
grpc::ByteBuffer EncodeEvent(const engine::Event& event, const std::string& traceparent);

// Every field that the mode uses is set; the others (coverage in mode RETENTION, ...) stay absent,
// so that an effective budget can be sent back as a request's budget.
v1::Budget ToProto(const Budget& budget);
v1::Result ToProto(const engine::Result& result, const std::string& traceparent);
v1::Manifest ToProto(const engine::Manifest& manifest);
v1::SnapshotRef ToProto(const engine::SnapshotRef& ref);
v1::ModelInfo ToModelInfo(const engine::Engine& engine, const engine::EngineLimits& limits,
                          const std::string& server_version);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CONVERT_RESPONSE_H_
