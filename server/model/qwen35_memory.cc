#include "server/model/qwen35_memory.h"

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

// Rows start on whole vectors and cache lines in either activation dtype.
constexpr int64_t kRowAlign = 64;

// What errors call the allocations that are counted apart.
constexpr char kRecurrentStates[] = "recurrent states", kConvStates[] = "conv states",
               kCheckpoints[] = "checkpoints", kAttentionCache[] = "attention cache",
               kGdnWorkspace[] = "GDN workspace";

// Takes memory from the table, or only counts it.
class Allocator {
 public:
  using Source = std::function<absl::StatusOr<void*>(size_t bytes, std::string_view what)>;
  Allocator(Source source, size_t activation_bytes)
      : source_(std::move(source)), activation_bytes_(activation_bytes) {}

  // Sets `pointer` unless an earlier call failed.
  template <typename T>
  void Array(T*& pointer, int64_t count, const char* what) {
    Bytes(pointer, static_cast<size_t>(count) * sizeof(T), what);
  }
  template <typename T>
  void Bytes(T*& pointer, size_t bytes, const char* what) {
    if (!status_.ok()) return;
    absl::StatusOr<void*> memory = source_(bytes, what);
    status_ = memory.status();
    if (memory.ok()) pointer = static_cast<T*>(*memory);
  }
  void Activations(Rows& rows, int64_t count, int64_t width, const char* what) {
    rows.stride = (width + kRowAlign - 1) / kRowAlign * kRowAlign;
    Bytes(rows.data, static_cast<size_t>(count * rows.stride) * activation_bytes_, what);
  }
  const absl::Status& status() const { return status_; }

 private:
  Source source_;
  size_t activation_bytes_;
  absl::Status status_;
};

int64_t LinearLayers(const ModelConfig& c) {
  return std::count(c.layers.begin(), c.layers.end(), LayerKind::kLinear);
}

void AllocatePools(const ModelConfig& c, const RunnerLimits& limits, int64_t num_blocks,
                   OpTable& ops, Allocator& alloc, Qwen35Memory& m) {
  m.recurrent_elements = int64_t{c.gdn.num_v_heads} * c.gdn.head_dim_k * c.gdn.head_dim_v;
  m.conv_elements = c.conv_channels() * c.conv_kernel;
  m.layers.resize(c.layers.size());
  for (size_t i = 0; i < c.layers.size(); ++i) {
    Qwen35Memory::Layer& layer = m.layers[i];
    if (c.layers[i] == LayerKind::kLinear) {
      alloc.Array(layer.recurrent, limits.state_slots * m.recurrent_elements, kRecurrentStates);
      alloc.Bytes(layer.conv,
                  static_cast<size_t>(limits.state_slots * m.conv_elements) * m.activation_bytes,
                  kConvStates);
    } else {
      alloc.Bytes(layer.kv,
                  static_cast<size_t>(num_blocks) *
                      ops.KvBlockBytes(AttentionShapeOf(c), limits.kv_block_tokens),
                  kAttentionCache);
    }
  }
}

void AllocateActivations(const ModelConfig& c, int64_t tokens, Allocator& alloc, Qwen35Memory& m) {
  const int64_t hidden = c.hidden_size, inner = c.intermediate_size, heads = c.gdn.num_v_heads;
  const int64_t q = int64_t{c.num_q_heads} * c.head_dim, kv = int64_t{c.num_kv_heads} * c.head_dim;
  const int64_t linear_in = c.conv_channels() + c.value_dim() + 2 * heads;
  alloc.Activations(m.x, tokens, hidden, "residual stream");
  alloc.Activations(m.normed, tokens, hidden, "normed activations");
  alloc.Activations(m.fused, tokens, std::max({linear_in, 2 * q + 2 * kv, 2 * inner}),
                    "projections");
  alloc.Activations(m.mixed, tokens, std::max({c.conv_channels(), q, inner}), "mixed activations");
  alloc.Activations(m.mixer_out, tokens, std::max(c.value_dim(), q), "mixer outputs");
  alloc.Bytes(m.k, static_cast<size_t>(tokens * kv) * m.activation_bytes, "keys");
  alloc.Bytes(m.v, static_cast<size_t>(tokens * kv) * m.activation_bytes, "values");
  alloc.Array(m.log_gate, tokens * heads, "gates");
  alloc.Array(m.beta, tokens * heads, "betas");
  alloc.Array(m.cos, tokens * c.rotary_dim() / 2, "rope table");
  alloc.Array(m.sin, tokens * c.rotary_dim() / 2, "rope table");
  alloc.Activations(m.head_rows, kLogitRows, hidden, "head rows");
  alloc.Activations(m.head_normed, kLogitRows, hidden, "head rows");
  alloc.Array(m.logits, kLogitRows * c.vocab_size, "logits");
  alloc.Array(m.log_probs, kLogitRows, "log probabilities");
}

void AllocateIndices(const ModelConfig& c, const RunnerLimits& limits, Allocator& alloc,
                     Qwen35Memory& m) {
  const int64_t seqs = limits.max_batch_seqs, linear = LinearLayers(c);
  alloc.Array(m.tokens, limits.max_batch_tokens, "token ids");
  alloc.Array(m.cu_seqlens, seqs + 1, "cu_seqlens");
  alloc.Array(m.slots, seqs, "slots");
  alloc.Array(m.first_positions, seqs, "positions");
  alloc.Array(m.block_tables, seqs * m.max_blocks, "block tables");
  alloc.Array(m.sequences, std::max<int64_t>(1, linear) * seqs, "sequence parameters");
  alloc.Array(m.selected, linear * seqs * c.gdn.num_k_heads, "selected counts");
  alloc.Array(m.nonfinite, (linear + 1) * seqs, "flags");
  alloc.Array(m.gdn_status, std::max<int64_t>(1, linear), "flags");
  alloc.Array(m.head_index, kLogitRows, "head rows");
  alloc.Array(m.head_targets, kLogitRows, "head rows");
  alloc.Array(m.head_cu_seqlens, 2 * seqs, "head rows");
  alloc.Array(m.head_first_positions, seqs, "head rows");
}

absl::StatusOr<Qwen35Memory> LayOut(const ModelConfig& c, const RunnerLimits& limits,
                                    int64_t num_blocks, OpTable& ops, Allocator::Source source) {
  Qwen35Memory m;
  m.activation_bytes = ops.activation_dtype() == DType::kF32 ? 4 : 2;
  m.max_blocks = num_blocks;
  if (num_blocks > 0) {
    const int64_t block = limits.kv_block_tokens;
    m.max_blocks = std::min(num_blocks, (c.max_position_embeddings + block - 1) / block);
  }
  Allocator alloc(std::move(source), m.activation_bytes);
  AllocatePools(c, limits, num_blocks, ops, alloc, m);
  AllocateActivations(c, limits.max_batch_tokens, alloc, m);
  AllocateIndices(c, limits, alloc, m);
  if (LinearLayers(c) > 0) {
    // Dense steps may ask for a state every kGroup tokens, one more where a chunk starts unaligned.
    m.max_checkpoints = limits.max_batch_tokens / kGroup + limits.max_batch_seqs;
    alloc.Array(m.checkpoint_recurrent, m.max_checkpoints * m.recurrent_elements, kCheckpoints);
    alloc.Bytes(m.checkpoint_conv,
                static_cast<size_t>(m.max_checkpoints * m.conv_elements) * m.activation_bytes,
                kCheckpoints);
    const GdnLimits gdn{c.gdn, limits.max_batch_tokens, limits.max_batch_seqs, 1.0,
                        ops.activation_dtype()};
    SPARSEGDN_ASSIGN_OR_RETURN(m.workspace_bytes, ops.GdnWorkspaceBytes(gdn));
    alloc.Bytes(m.workspace, m.workspace_bytes, kGdnWorkspace);
  }
  SPARSEGDN_RETURN_IF_ERROR(alloc.status());
  return m;
}

// Where an allocation is counted.
int64_t& UseOf(std::string_view what, DeviceMemory& memory) {
  if (what == kRecurrentStates || what == kConvStates || what == kCheckpoints) return memory.states;
  if (what == kAttentionCache) return memory.kv;
  return what == kGdnWorkspace ? memory.workspace : memory.activations;
}

}  // namespace

AttentionShape AttentionShapeOf(const ModelConfig& c) {
  return {c.num_q_heads, c.num_kv_heads, c.head_dim, c.rotary_dim()};
}

absl::StatusOr<MemoryNeeds> NeededMemory(const ModelConfig& c, const RunnerLimits& limits,
                                         int64_t num_blocks, size_t granule, OpTable& ops) {
  MemoryNeeds needs;
  const auto count = [&](size_t bytes, std::string_view what) -> absl::StatusOr<void*> {
    UseOf(what, needs.device) += static_cast<int64_t>((bytes + granule - 1) / granule * granule);
    return nullptr;
  };
  SPARSEGDN_ASSIGN_OR_RETURN(const Qwen35Memory m, LayOut(c, limits, num_blocks, ops, count));
  const size_t state = static_cast<size_t>(m.recurrent_elements) * sizeof(float) +
                       static_cast<size_t>(m.conv_elements) * m.activation_bytes;
  const size_t kv = num_blocks == 0
                        ? 0
                        : static_cast<size_t>(limits.max_batch_tokens) * 2 *
                              static_cast<size_t>(c.num_kv_heads * c.head_dim) * m.activation_bytes;
  const size_t logits = static_cast<size_t>(kLogitRows) * (c.vocab_size + 1) * sizeof(float);
  const size_t stats = static_cast<size_t>(LinearLayers(c) + 1) * sizeof(int32_t) *
                       static_cast<size_t>(limits.max_batch_seqs * (c.gdn.num_k_heads + 1) + 1);
  needs.to_host_bytes = std::max({state, kv, logits, stats});
  return needs;
}

absl::StatusOr<Qwen35Memory> AllocateMemory(const ModelConfig& c, const RunnerLimits& limits,
                                            int64_t num_blocks, OpTable& ops) {
  return LayOut(c, limits, num_blocks, ops,
                [&ops](size_t bytes, std::string_view what) { return ops.Allocate(bytes, what); });
}

}  // namespace sparsegdn::model
