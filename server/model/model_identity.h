// The identity of a model: what a snapshot belongs to.
//
// Lowercase hex SHA-256 over, in this order (UTF-8, "\n" newlines, "\0" a zero byte):
//   "sparsegdn-model-identity-1\n";
//   the text configuration, one line "key=value\n" per key in alphabetical order (IdentityConfig);
//   "round_a_log=true\n" or "round_a_log=false\n";
//   for each text tensor, bytewise sorted by canonical name: "name\0DTYPE\0d0,d1,...\0", the byte
//   count as u64 little endian, the raw bytes.
// docs/snapshot_format.md is the normative text; the Python client computes the same.
#ifndef SPARSEGDN_SERVER_MODEL_MODEL_IDENTITY_H_
#define SPARSEGDN_SERVER_MODEL_MODEL_IDENTITY_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "server/model/checkpoint.h"
#include "server/model/config.h"

namespace sparsegdn::model {

// Name of the cache file inside the model folder.
inline constexpr char kIdentityCacheName[] = ".sparsegdn-identity.json";

// The configuration lines of the hash.
std::string IdentityConfig(const ModelConfig& config);

// Hashes everything; about one second per GiB or less. `progress` may be empty.
absl::StatusOr<std::string> ComputeModelIdentity(
    const ModelConfig& config, const Checkpoint& checkpoint, bool round_a_log,
    const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress);

// The cached identity when names, sizes and modification times of config.json and all shards are
// those of the cache, else computed and cached. A folder that cannot be written is no error: then
// nothing is cached. An error to compute is one.
absl::StatusOr<std::string> ModelIdentity(
    const std::string& dir, const ModelConfig& config, const Checkpoint& checkpoint,
    bool round_a_log, const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_MODEL_IDENTITY_H_
