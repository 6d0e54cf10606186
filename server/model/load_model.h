// From a checkpoint folder to a resident model.
#ifndef SPARSEGDN_SERVER_MODEL_LOAD_MODEL_H_
#define SPARSEGDN_SERVER_MODEL_LOAD_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/model/model_runner.h"

namespace sparsegdn::model {

struct LoadOptions {
  std::string dir;
  std::string backend = "auto";  // "auto" (a CUDA device if there is one), "cpu" or "cuda"
  int device = 0;                // index of the CUDA device
  int num_threads = 0;           // CPU; 0: the cores this process may use
  bool round_a_log = false;      // as a BF16 load in transformers does (QWEN3.5 rounding of A_log)
  std::string budget_profile;    // a file; "none"; "": budget_profile.json in dir, if it is there
  RunnerLimits limits;
  // Called on the loading thread: stage "identity" in bytes, "weights" in layers.
  std::function<void(std::string_view stage, int64_t done, int64_t total)> progress;
  // One call per warning, e.g. a tensor that is not used.
  std::function<void(std::string_view message)> warning;
};

// NOT_FOUND when the folder or a file is missing; INVALID_ARGUMENT naming field or tensor, got,
// wanted, for a configuration or checkpoint that is not a Qwen3.5 text model, an unknown backend,
// or a limit out of range; UNIMPLEMENTED for a backend that this build does not have;
// FAILED_PRECONDITION for a device that cannot be used; RESOURCE_EXHAUSTED for one too small.
absl::StatusOr<std::unique_ptr<ModelRunner>> LoadModel(const LoadOptions& options);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_LOAD_MODEL_H_
