// Random checkpoints in the published format, for shapes without a download.
//
// The weights of a tensor are a function of (seed, canonical name, shape, depth of the model)
// alone: the same on every machine, whatever the shard size. They are drawn so that activations
// stay of order one and decays are diverse, as in the reference initialisation of Gated DeltaNet: A
// uniform in [0.01, 16], dt log-uniform in [0.001, 0.1], so log_gate runs from about -1e-5 to
// beyond -1.
#ifndef SPARSEGDN_SERVER_MODEL_RANDOM_CHECKPOINT_H_
#define SPARSEGDN_SERVER_MODEL_RANDOM_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/types.h"

namespace sparsegdn::model {

struct RandomCheckpointOptions {
  std::string config_json;  // written as config.json
  std::string out_dir;      // created; must not hold a config.json yet
  uint64_t seed = 1;
  DType dtype = DType::kBF16;  // kBF16 (A_log and the gate norm stay F32) or kF32
  int64_t shard_bytes = int64_t{5} << 30;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // may be empty
};

// config.json of a named shape: tiny, tiny-gdn (no full attention), 0.8b, 2b, 4b, 9b, 27b.
// INVALID_ARGUMENT lists the names.
absl::StatusOr<std::string> ConfigJsonOfShape(const std::string& shape);

// Writes shards, index and config.json, streaming: memory use does not grow with the model.
// INVALID_ARGUMENT for a bad configuration, ALREADY_EXISTS when out_dir holds a model.
absl::Status WriteRandomCheckpoint(const RandomCheckpointOptions& options);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_RANDOM_CHECKPOINT_H_
