// One call's tensors in shared memory: the segment, where each tensor lies in it, and the messages
// that say so.
#ifndef SPARSEGDN_SERVER_SERVICE_SHARED_HAND_OFF_H_
#define SPARSEGDN_SERVER_SERVICE_SHARED_HAND_OFF_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/types.h"
#include "server/service/shared_segment.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::service {

// Not thread-safe. Dropping it takes the segment's name away at once.
class SharedHandOff {
 public:
  // The errors of SegmentPool::Create: the call then streams.
  static absl::StatusOr<std::unique_ptr<SharedHandOff>> Begin(SegmentPool& pool,
                                                              const engine::Manifest& manifest);

  // The PrefillResponse of the manifest, with its SharedMemory.
  grpc::ByteBuffer EncodeManifest(const engine::Manifest& manifest) const;
  // Writes the chunk's bytes to their place; the next EncodeChunks tells the client.
  absl::Status Put(const engine::TensorChunk& chunk);
  // Bytes put since the last EncodeChunks.
  uint64_t untold_bytes() const { return untold_bytes_; }
  grpc::ByteBuffer EncodeChunks();
  // The call ended well: the name stays for the pool's delay.
  static void Finish(SegmentPool& pool, std::unique_ptr<SharedHandOff> done);

 private:
  SharedHandOff(std::unique_ptr<SharedSegment> segment, std::vector<uint64_t> offsets)
      : segment_(std::move(segment)), offsets_(std::move(offsets)) {}

  std::unique_ptr<SharedSegment> segment_;
  const std::vector<uint64_t> offsets_;  // of the tensors, then the end
  v1::PrefillResponse untold_;
  uint64_t untold_bytes_ = 0;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_SHARED_HAND_OFF_H_
