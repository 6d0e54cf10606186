// What the engine needs of a resident model: slots that hold a sequence's state, a step that runs
// chunks of several sequences, and a sink that receives results layer by layer while later layers
// still run. Implemented by the Qwen3.5 graph (qwen35_runner.h) and by a fake in the engine's
// tests.
#ifndef SPARSEGDN_SERVER_MODEL_MODEL_RUNNER_H_
#define SPARSEGDN_SERVER_MODEL_MODEL_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/types.h"

namespace sparsegdn::model {

enum class LayerKind { kLinear, kFull };

// Bytes reserved on a device at load, by use; all 0 on the CPU.
struct DeviceMemory {
  int64_t weights = 0, states = 0, kv = 0, workspace = 0, activations = 0;
};

// Shapes and identity of the resident model, constant after load.
struct ModelInfo {
  std::string identity;  // 64 hex digits: SHA-256 defined in docs/snapshot_format.md
  std::string name;      // last component of the model folder
  std::string backend;   // "cpu" or "cuda"
  std::string attention;  // what computes it where there is a choice: "cudnn 9.14.0"
  std::vector<LayerKind> layers;
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int64_t max_context_tokens = 0;
  GdnShape gdn;               // of the linear layers
  int32_t conv_channels = 0;  // C = 2 Hk Dk + Hv Dv
  int32_t conv_kernel = 4;
  int32_t num_q_heads = 0;  // full attention
  int32_t num_kv_heads = 0;
  int32_t attention_head_dim = 0;
  DType weight_dtype = DType::kBF16;
  DType compute_dtype = DType::kF32;  // of conv states and KV as the sink receives them
  bool round_a_log = false;
  std::vector<double> budget_profile;  // relative retention per GDN layer; empty: the same
  DeviceMemory device_memory;
};

// Fixed at creation; memory for all of it is reserved then.
struct RunnerLimits {
  int32_t state_slots = 0;  // sequences resident at once
  int64_t kv_tokens = 0;    // KV capacity over all slots, in tokens; block granular
  int32_t kv_block_tokens = 0;
  int64_t max_batch_tokens = 0;  // tokens of one Step
  int32_t max_batch_seqs = 0;
};

// A typed, borrowed view of contiguous elements.
struct BufferView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t elements = 0;
  size_t bytes() const {
    return static_cast<size_t>(elements) * (dtype == DType::kF32 ? size_t{4} : size_t{2});
  }
};

// One sequence's part of a step.
struct Chunk {
  int32_t slot = -1;
  std::span<const int32_t> tokens;  // at least one; ids already checked against the vocabulary
  int64_t first_position = 0;       // absolute position of tokens[0] = tokens the slot has seen
  int64_t prompt_tokens = 0;        // N of the request
  Budget budget;                    // effective, valid
  bool emit_state = false;          // after this chunk: recurrent and conv state of linear layers
  bool emit_kv = false;             // this chunk's rows of full layers
  int64_t checkpoint_every = 0;     // states also at each multiple inside this chunk
  std::span<const int64_t> logits_positions;  // ascending, absolute, inside this chunk
  int64_t logprobs_from = -1;  // >= 0: log p of each token t >= this predicted in this chunk
  int32_t next_token = -1;     // the token after the chunk, whose log p its last row gives; -1 none
};

// Receives results during Step, on the thread that runs it or one that the runner owns, never
// concurrently. Views are valid only during the call. `chunk` indexes the step's chunks.
class StepSink {
 public:
  virtual ~StepSink() = default;
  // State of linear layer `layer` after `position` tokens: recurrent FP32 [Hv, Dk, Dv], conv
  // [C, 4] in compute_dtype: the last four raw projections, oldest first, left zero filled.
  virtual void OnState(size_t chunk, int32_t layer, int64_t position, BufferView recurrent,
                       BufferView conv) = 0;
  // Rows [tokens, Nkv, D] of full layer `layer` from `first_position` on, in compute_dtype.
  virtual void OnKv(size_t chunk, int32_t layer, int64_t first_position, BufferView key,
                    BufferView value) = 0;
  // FP32 [vocab], computed from the token at `position`.
  virtual void OnLogits(size_t chunk, int64_t position, std::span<const float> logits) = 0;
  // log p of tokens first_position, first_position + 1, ...
  virtual void OnLogprobs(size_t chunk, int64_t first_position, std::span<const float> values) = 0;
};

struct ChunkStats {
  std::vector<int32_t> selected;  // [linear layers, Hk] events selected in this chunk
  bool nonfinite = false;         // a state or the chunk's logits hold NaN or Inf
};

struct StepStats {
  std::vector<ChunkStats> chunks;
  int64_t selection_ns = 0;
  int64_t gdn_core_ns = 0;
  int64_t total_ns = 0;
};

// The states of a sequence as the sink gave them, to be loaded into a slot. Views are borrowed.
struct SlotImage {
  int64_t position = 0;  // tokens seen
  // Per layer of the model. Linear: recurrent FP32 [Hv, Dk, Dv] and conv [C, 4]; full: KV in
  // consecutive segments of rows [n, Nkv, D] that add up to `position` rows. FP32 or BF16.
  struct Layer {
    BufferView recurrent;
    BufferView conv;
    std::vector<BufferView> key_segments;
    std::vector<BufferView> value_segments;
  };
  std::vector<Layer> layers;
};

// Thread-compatible: the engine calls it from one thread. info() and limits() are safe anywhere.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  virtual const ModelInfo& info() const = 0;
  virtual const RunnerLimits& limits() const = 0;

  // A zeroed slot with room for max_tokens of KV. RESOURCE_EXHAUSTED when none is free now.
  virtual absl::StatusOr<int32_t> Acquire(int64_t max_tokens) = 0;
  virtual void Release(int32_t slot) = 0;
  // Free slots and KV tokens, for admission and for metrics.
  virtual int32_t free_slots() const = 0;
  virtual int64_t free_kv_tokens() const = 0;

  // Fills a freshly acquired slot. INVALID_ARGUMENT names layer, got, wanted.
  virtual absl::Status Load(int32_t slot, const SlotImage& image) = 0;

  // Runs the chunks, at most limits() of them, distinct slots. An error fails the whole step and
  // leaves the slots unspecified; healthy() then tells whether the runner can go on.
  // A chunk with stats.nonfinite fails alone.
  virtual absl::Status Step(std::span<const Chunk> chunks, StepSink& sink, StepStats& stats) = 0;

  // False after a sticky device fault: no later call can succeed, the process must restart.
  virtual bool healthy() const { return true; }
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_MODEL_RUNNER_H_
