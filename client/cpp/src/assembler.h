// Reassembles a stream of events into a verified snapshot; knows no gRPC.
#ifndef SPARSEGDN_CLIENT_SRC_ASSEMBLER_H_
#define SPARSEGDN_CLIENT_SRC_ASSEMBLER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/client/snapshot.h"
#include "sparsegdn/v1/prefill.pb.h"
#include "src/running_hash.h"

namespace sparsegdn::client {

// One snapshot in the making. After an error every further call is an error: nothing of a bad
// stream is ever exposed. Not thread-safe.
class Assembler {
 public:
  // `max_bytes` bounds the manifest's claim; buffers are allocated as the manifest says.
  explicit Assembler(uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // A manifest with shared_memory is refused unless `allow_shared`: it was not asked for.
  absl::Status SetManifest(v1::Manifest manifest, bool allow_shared = false);
  // Chunks come in any order, tensors mixed; a byte that comes twice is CHUNK_OVERLAP. An empty
  // chunk is legal and carries nothing.
  absl::Status Add(const v1::TensorChunk& chunk);
  // The same, of bytes in shared memory.
  absl::Status Add(const v1::SharedChunk& chunk);
  // BYTES_MISSING names the first incomplete tensor; DIGEST when whole-tensor hashes disagree.
  absl::StatusOr<Snapshot> Finish(uint64_t digest);

  bool has_manifest() const { return manifest_.has_value(); }
  uint64_t bytes_done() const { return bytes_done_; }
  uint64_t bytes_total() const { return manifest_.has_value() ? manifest_->total_bytes() : 0; }

 private:
  struct Part {
    Buffer data;
    std::map<uint64_t, uint64_t> ranges;  // received [begin, end), merged, disjoint
    RunningHash running;                  // over the bytes that came in order
    std::optional<uint64_t> hash;         // set when complete
  };
  // A chunk of either kind; `data` is null for one in shared memory.
  struct Piece {
    uint32_t tensor;
    uint64_t begin, size, xxh3_64;
    const uint8_t* data;
  };
  absl::Status Take(const Piece& piece);
  absl::Status Check(const Piece& piece) const;
  // False when [begin, end) meets a byte that is there already.
  static bool Insert(std::map<uint64_t, uint64_t>* ranges, uint64_t begin, uint64_t end);
  static void CompleteIfWhole(Part* part);

  uint64_t max_bytes_;
  std::optional<v1::Manifest> manifest_;
  std::vector<Part> parts_;
  uint64_t bytes_done_ = 0;
  bool shared_ = false;
  bool failed_ = false;
};

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_ASSEMBLER_H_
