// Requests, events and results of the engine: the wire contract (proto/sparsegdn/v1) in plain C++,
// so that the engine runs and is tested without gRPC.
#ifndef SPARSEGDN_SERVER_ENGINE_TYPES_H_
#define SPARSEGDN_SERVER_ENGINE_TYPES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "sparsegdn/types.h"

namespace sparsegdn::engine {

inline constexpr uint32_t kSnapshotFormatVersion = 1;
inline constexpr size_t kMaxLogitsPositions = 4096;
inline constexpr uint32_t kMaxTopK = 1024;
inline constexpr size_t kMaxTenantBytes = 256;

// Fields absent on the wire: the configured default applies.
struct BudgetOverrides {
  std::optional<BudgetMode> mode;
  std::optional<Selector> selector;
  std::optional<Solver> solver;
  std::optional<LocalTerm> local;
  std::optional<double> retention, coverage, min_retention, max_retention;
  std::optional<int64_t> keep_first, keep_last;
};

enum class SnapshotAt { kBeforeLast, kAfterLast };
enum class ExportDType { kF32, kBF16, kF8E4M3, kI32 };
enum class ConvLayout { kFourColumns, kThreeColumns };

struct Outputs {
  bool state = true;
  bool conv_state = true;
  bool kv = true;
  ExportDType state_dtype = ExportDType::kF32;
  std::optional<ExportDType> kv_dtype;  // absent: the model's compute dtype
  StateLayout state_layout = StateLayout::kKeyMajor;
  ConvLayout conv_layout = ConvLayout::kFourColumns;
  int64_t checkpoint_every = 0;
  std::vector<int64_t> logits_positions;
  uint32_t top_k = 0;
  std::optional<int64_t> logprobs_from;
};

struct PrefillRequest {
  std::vector<int32_t> tokens;
  BudgetOverrides budget;
  SnapshotAt snapshot_at = SnapshotAt::kBeforeLast;
  Outputs outputs;
  std::string resume_from;
  std::optional<int64_t> first_position;
  bool keep_snapshot = false;
  bool pin_snapshot = false;  // never evicted before its time
  uint32_t ttl_seconds = 0;
  bool prefix_reuse = true;  // may start from a stored prefix and leave its own
  int32_t priority = 0;
  std::string request_id;
  std::string tenant;
  std::optional<int64_t> deadline_ns;  // steady clock of the engine
};

enum class TensorKind {
  kRecurrentState,
  kRecurrentStateScale,
  kConvState,
  kKey,
  kValue,
  kLogits,
  kTopKIds,
  kTopKLogits,
  kPromptLogprobs
};

struct TensorInfo {
  std::string name;
  TensorKind kind = TensorKind::kRecurrentState;
  int32_t layer = -1;
  ExportDType dtype = ExportDType::kF32;
  std::vector<int64_t> shape;
  StateLayout state_layout = StateLayout::kKeyMajor;
  ConvLayout conv_layout = ConvLayout::kFourColumns;
  uint64_t bytes = 0;
  int64_t position = 0;
};

struct Manifest {
  std::string model_identity;
  uint32_t format_version = kSnapshotFormatVersion;
  int64_t position = 0;
  std::vector<TensorInfo> tensors;
  uint64_t total_bytes = 0;
};

struct Accepted {
  uint32_t queue_position = 0;
  int64_t queued_tokens = 0;
};
struct Progress {
  int64_t tokens_done = 0;
  int64_t tokens_total = 0;
};
// A frame of one tensor; `data` is immutable and may be shared with the kept snapshot.
struct TensorChunk {
  uint32_t tensor = 0;
  uint64_t byte_offset = 0;
  std::shared_ptr<const std::string> data;
  uint64_t xxh3_64 = 0;
};
struct Usage {
  int64_t prompt_tokens = 0, computed_tokens = 0, cached_tokens = 0;
  int64_t events_total = 0, events_selected = 0;
};
struct Timings {
  double queue_seconds = 0, selection_seconds = 0, gdn_core_seconds = 0;
  double engine_seconds = 0, total_seconds = 0;
};
struct Result {
  Budget effective_budget;  // bounds resolved
  Usage usage;
  Timings timings;
  std::vector<int32_t> retained_layers;      // model layer index of each row of retained
  std::vector<std::vector<float>> retained;  // [linear layers][Hk]
  uint64_t digest = 0;
  std::optional<int32_t> next_token;
  std::string snapshot_id;
  int64_t snapshot_position = 0;
  uint32_t snapshot_ttl_seconds = 0;
};

using Event =
    std::variant<Accepted, Progress, std::shared_ptr<const Manifest>, TensorChunk, Result>;

struct SnapshotRef {
  std::string snapshot_id;
  int64_t position = 0;
  uint64_t bytes = 0;
  uint32_t ttl_seconds = 0;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_TYPES_H_
