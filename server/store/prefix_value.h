// A prefix entry as bytes: a header, and the state and the KV each cut into compressed parts
// (docs/snapshot_format.md, section 5). What is read comes from a store that others write to, so
// nothing of it is believed: sizes come from the model's layout, never from the value.
#ifndef SPARSEGDN_SERVER_STORE_PREFIX_VALUE_H_
#define SPARSEGDN_SERVER_STORE_PREFIX_VALUE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/layout.h"
#include "server/engine/prefix_entry.h"

namespace sparsegdn::store {

inline constexpr int64_t kPartRawBytes = 15 << 20;  // so that a part that does not shrink stays
inline constexpr int64_t kMaxPartBytes = 16 << 20;  // within this
inline constexpr size_t kHeaderBytes = 88;

struct ValueHeader {
  engine::PrefixKey key{};
  int64_t position = 0;
  int64_t state_bytes = 0, kv_bytes = 0;  // before compression
  uint64_t state_hash = 0, kv_hash = 0;   // as PrefixEntry's
};

std::string EncodeHeader(const ValueHeader& header);
// DATA_LOSS unless it is the header of this key and position for a model of this layout.
absl::StatusOr<ValueHeader> DecodeHeader(std::string_view bytes, const engine::PrefixKey& key,
                                         int64_t position, const engine::Layout& layout);

// Parts of a section of `bytes` bytes.
int64_t PartCount(int64_t bytes);

enum class Section { kState, kKv };

// One part, compressed with zstd; `part` is below PartCount.
std::string EncodePart(const engine::PrefixEntry& entry, Section section, int64_t part);

// The bytes of a section put together from its parts, in order, and cut into blobs. Takes at most
// the section's size in memory, whatever a part claims to hold.
class SectionReader {
 public:
  SectionReader(const engine::Layout& layout, Section section);
  int64_t parts() const { return PartCount(bytes_); }
  // DATA_LOSS when it is no zstd frame of exactly the size that the part must have.
  absl::Status Add(std::string_view part);
  // After all parts: into `entry`, with the header's hash. DATA_LOSS when some are missing.
  absl::Status Finish(const ValueHeader& header, engine::PrefixEntry& entry);

 private:
  const engine::Layout& layout_;
  const Section section_;
  const int64_t bytes_;
  std::string raw_;
};

}  // namespace sparsegdn::store

#endif  // SPARSEGDN_SERVER_STORE_PREFIX_VALUE_H_
