// The checksum over a snapshot file's metadata.
#ifndef SPARSEGDN_CLIENT_SRC_METADATA_CHECKSUM_H_
#define SPARSEGDN_CLIENT_SRC_METADATA_CHECKSUM_H_

#include <string>
#include <vector>

#include "src/xxh.h"

namespace sparsegdn::client {

// The metadata under the checksum, in its order; a key that is absent counts as "".
inline constexpr const char* kChecksummedKeys[] = {
    "sparsegdn.format_version", "sparsegdn.model_identity", "sparsegdn.position",
    "sparsegdn.digest",         "sparsegdn.tensors",        "sparsegdn.result"};

// XXH3-64 over the values, each followed by a zero byte.
inline uint64_t MetadataChecksum(const std::vector<std::string>& values) {
  std::string bytes;
  for (const std::string& value : values) bytes.append(value).push_back('\0');
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_METADATA_CHECKSUM_H_
