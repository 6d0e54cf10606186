// Everything a Qwen3.5 graph writes, allocated once: state pools, activations, one step's indices.
#ifndef SPARSEGDN_SERVER_MODEL_QWEN35_MEMORY_H_
#define SPARSEGDN_SERVER_MODEL_QWEN35_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/config.h"
#include "server/model/model_runner.h"
#include "server/model/op_table.h"

namespace sparsegdn::model {

// Rows of logits computed at a time: 32 MB of a 250,000-word vocabulary.
inline constexpr int64_t kLogitRows = 32;

struct Qwen35Memory {
  // Per layer of the model, null where the layer is of the other kind.
  struct Layer {
    float* recurrent = nullptr;  // [slots, Hv, Dk, Dv]
    void* conv = nullptr;        // [slots, C, 4]
    void* kv = nullptr;          // [blocks][KvBlockBytes]
  };
  std::vector<Layer> layers;
  int64_t recurrent_elements = 0;  // of one slot
  int64_t conv_elements = 0;       // of one slot
  size_t activation_bytes = 0;     // of one element
  int64_t max_blocks = 0;          // of one sequence

  // Activations, T = max_batch_tokens. `fused` takes the stacked projections of a layer, `mixed`
  // what is made of them, `mixer_out` what goes into the output projection.
  Rows x, normed;     // [T, H]
  Rows fused;         // [T, widest stack]
  Rows mixed;         // [T, max(C, Nq D, I)]
  Rows mixer_out;     // [T, max(Hv Dv, Nq D)]
  void* k = nullptr;  // [T, Nkv, D] contiguous
  void* v = nullptr;
  float* log_gate = nullptr;  // [T, Hv]
  float* beta = nullptr;
  float* cos = nullptr;  // [T, rotary / 2]
  float* sin = nullptr;
  Rows head_rows;              // [kLogitRows, H]
  Rows head_normed;            // [kLogitRows, H]
  float* logits = nullptr;     // [kLogitRows, V]
  float* log_probs = nullptr;  // [kLogitRows]

  // One step's indices. S = max_batch_seqs.
  int32_t* tokens = nullptr;                // [T]
  int32_t* cu_seqlens = nullptr;            // [S + 1]
  int32_t* slots = nullptr;                 // [S]
  int64_t* first_positions = nullptr;       // [S]
  int32_t* block_tables = nullptr;          // [S, max_blocks]
  SequenceParams* sequences = nullptr;      // [linear layers, S of the step]
  int32_t* selected = nullptr;              // [linear layers, S, Hk]
  int32_t* nonfinite = nullptr;             // [linear layers + 1, S]; the last row is the stream's
  uint32_t* gdn_status = nullptr;           // [linear layers]
  int32_t* head_index = nullptr;            // [kLogitRows]
  int32_t* head_targets = nullptr;          // [kLogitRows]
  int32_t* head_cu_seqlens = nullptr;       // [2 S], of the stretches of head rows
  int64_t* head_first_positions = nullptr;  // [S]

  // Checkpoints inside a step, of one layer at a time.
  int64_t max_checkpoints = 0;
  float* checkpoint_recurrent = nullptr;  // [max_checkpoints, Hv, Dk, Dv]
  void* checkpoint_conv = nullptr;        // [max_checkpoints, C, 4]

  void* workspace = nullptr;  // of the GDN core
  size_t workspace_bytes = 0;
};

AttentionShape AttentionShapeOf(const ModelConfig& config);

// Bytes that AllocateMemory will ask the table for, each allocation rounded up to `granule`, and
// the most that a step hands to the host at once. Errors of the table's GDN core.
struct MemoryNeeds {
  DeviceMemory device;  // no weights
  size_t to_host_bytes = 0;
};
absl::StatusOr<MemoryNeeds> NeededMemory(const ModelConfig& config, const RunnerLimits& limits,
                                         int64_t num_blocks, size_t granule, OpTable& ops);

// Errors of the table. `num_blocks` counts the cache's blocks over all sequences.
absl::StatusOr<Qwen35Memory> AllocateMemory(const ModelConfig& config, const RunnerLimits& limits,
                                            int64_t num_blocks, OpTable& ops);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_QWEN35_MEMORY_H_
