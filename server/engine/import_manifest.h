// Whether an uploaded manifest describes a whole snapshot of the resident model.
#ifndef SPARSEGDN_SERVER_ENGINE_IMPORT_MANIFEST_H_
#define SPARSEGDN_SERVER_ENGINE_IMPORT_MANIFEST_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/layout.h"
#include "server/engine/plan.h"
#include "server/engine/types.h"
#include "server/model/model_runner.h"

namespace sparsegdn::engine {

struct ImportPlan {
  int64_t position = 0;
  std::vector<TensorInfo> tensors;
  std::vector<LayerTensors> layers;  // ids by model layer
  int64_t total_held_bytes = 0;      // over the tensors, the larger of uploaded and kept size
};

// Every linear layer has its recurrent state (FP32, BF16, or FP8 with its scale; either layout) and
// conv state ([C, 4] or [C, 3], compute dtype), every full layer key and value of all `position`
// rows (FP32 or BF16), each once, under its own name, and nothing else is there.
// FAILED_PRECONDITION: another model or format version. INVALID_ARGUMENT: field, got, wanted.
absl::StatusOr<ImportPlan> PlanImport(const Manifest& manifest, const model::ModelInfo& model,
                                      const Layout& layout);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_IMPORT_MANIFEST_H_
