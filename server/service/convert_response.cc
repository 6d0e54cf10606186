#include "server/service/convert_response.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/slice.h>

#include <memory>
#include <type_traits>
#include <variant>

#include "sparsegdn/gdn.h"

namespace sparsegdn::service {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;
using SharedData = std::shared_ptr<const std::string>;

v1::DType ToProto(engine::ExportDType dtype) { return static_cast<v1::DType>(int(dtype) + 1); }
v1::DType ToProto(DType dtype) { return dtype == DType::kF32 ? v1::DTYPE_FP32 : v1::DTYPE_BF16; }
static_assert(int(engine::ExportDType::kF32) + 1 == v1::DTYPE_FP32);
static_assert(int(engine::ExportDType::kBF16) + 1 == v1::DTYPE_BF16);
static_assert(int(engine::ExportDType::kF8E4M3) + 1 == v1::DTYPE_FP8_E4M3);
static_assert(int(engine::ExportDType::kI32) + 1 == v1::DTYPE_INT32);

v1::TensorKind ToProto(engine::TensorKind kind) {
  return static_cast<v1::TensorKind>(int(kind) + 1);
}
static_assert(int(engine::TensorKind::kRecurrentState) + 1 == v1::TENSOR_KIND_RECURRENT_STATE);
static_assert(int(engine::TensorKind::kKey) + 1 == v1::TENSOR_KIND_KEY);
static_assert(int(engine::TensorKind::kPromptLogprobs) + 1 == v1::TENSOR_KIND_PROMPT_LOGPROBS);

static_assert(int(BudgetMode::kCoverage) + 1 == v1::BUDGET_MODE_COVERAGE);
static_assert(int(Selector::kWriteNorm) + 1 == v1::SELECTOR_WRITE_NORM);
static_assert(int(Solver::kBlockAdjacent) + 1 == v1::SOLVER_BLOCK_ADJACENT);
static_assert(int(LocalTerm::kNone) + 1 == v1::LOCAL_TERM_NONE);
static_assert(int(StateLayout::kValueMajor) + 1 == v1::STATE_LAYOUT_VALUE_MAJOR);
static_assert(int(engine::ConvLayout::kThreeColumns) + 1 == v1::CONV_LAYOUT_THREE_COLUMNS);

uint8_t* WriteTag(int field, WireFormatLite::WireType type, uint8_t* out) {
  return CodedOutputStream::WriteVarint32ToArray(WireFormatLite::MakeTag(field, type), out);
}

// PrefillResponse{chunk{tensor, byte_offset, xxh3_64, data}} with `data` last and shared.
grpc::ByteBuffer EncodeChunk(const engine::TensorChunk& chunk) {
  using C = v1::TensorChunk;
  const uint64_t data_bytes = chunk.data->size();
  uint8_t body[64];
  uint8_t* end = body;
  if (chunk.tensor != 0) {
    end = WriteTag(C::kTensorFieldNumber, WireFormatLite::WIRETYPE_VARINT, end);
    end = CodedOutputStream::WriteVarint32ToArray(chunk.tensor, end);
  }
  if (chunk.byte_offset != 0) {
    end = WriteTag(C::kByteOffsetFieldNumber, WireFormatLite::WIRETYPE_VARINT, end);
    end = CodedOutputStream::WriteVarint64ToArray(chunk.byte_offset, end);
  }
  if (chunk.xxh3_64 != 0) {
    end = WriteTag(C::kXxh364FieldNumber, WireFormatLite::WIRETYPE_FIXED64, end);
    end = CodedOutputStream::WriteLittleEndian64ToArray(chunk.xxh3_64, end);
  }
  end = WriteTag(C::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, end);
  end = CodedOutputStream::WriteVarint64ToArray(data_bytes, end);

  uint8_t head[16];
  uint8_t* head_end = WriteTag(v1::PrefillResponse::kChunkFieldNumber,
                               WireFormatLite::WIRETYPE_LENGTH_DELIMITED, head);
  head_end = CodedOutputStream::WriteVarint64ToArray(uint64_t(end - body) + data_bytes, head_end);

  std::string prefix(reinterpret_cast<char*>(head), head_end - head);
  prefix.append(reinterpret_cast<char*>(body), end - body);
  auto* owner = new SharedData(chunk.data);
  const grpc::Slice slices[2] = {grpc::Slice(prefix),
                                 grpc::Slice(
                                     const_cast<char*>((*owner)->data()), (*owner)->size(),
                                     [](void* p) { delete static_cast<SharedData*>(p); }, owner)};
  return grpc::ByteBuffer(slices, 2);
}

grpc::ByteBuffer Serialize(const v1::PrefillResponse& response) {
  std::string bytes;
  response.SerializeToString(&bytes);
  auto* owner = new std::string(std::move(bytes));
  const grpc::Slice slice(
      owner->data(), owner->size(), [](void* p) { delete static_cast<std::string*>(p); }, owner);
  return grpc::ByteBuffer(&slice, 1);
}

void SetUsage(const engine::Usage& in, v1::Usage* out) {
  out->set_prompt_tokens(in.prompt_tokens);
  out->set_computed_tokens(in.computed_tokens);
  out->set_cached_tokens(in.cached_tokens);
  out->set_events_total(in.events_total);
  out->set_events_selected(in.events_selected);
}

void SetTimings(const engine::Timings& in, v1::Timings* out) {
  out->set_queue_seconds(in.queue_seconds);
  out->set_selection_seconds(in.selection_seconds);
  out->set_gdn_core_seconds(in.gdn_core_seconds);
  out->set_engine_seconds(in.engine_seconds);
  out->set_total_seconds(in.total_seconds);
}

void SetLimits(const engine::EngineConfig& config, const engine::EngineLimits& limits,
               int64_t model_context, v1::Limits* out) {
  const int64_t configured = limits.max_prompt_tokens;
  out->set_max_context_tokens(configured > 0 && (model_context <= 0 || configured < model_context)
                                  ? configured
                                  : model_context);
  out->set_max_snapshot_bytes(config.kept_snapshot_bytes);
  out->set_max_logits_positions(engine::kMaxLogitsPositions);
  out->set_max_top_k(engine::kMaxTopK);
  out->set_max_queue_requests(limits.max_queue_requests);
  out->set_max_queue_tokens(limits.max_queue_tokens);
  out->set_max_ttl_seconds(limits.max_ttl_seconds);
}

}  // namespace

grpc::ByteBuffer EncodeEvent(const engine::Event& event, const std::string& traceparent) {
  if (const auto* chunk = std::get_if<engine::TensorChunk>(&event)) return EncodeChunk(*chunk);
  v1::PrefillResponse response;
  if (const auto* accepted = std::get_if<engine::Accepted>(&event)) {
    response.mutable_accepted()->set_queue_position(accepted->queue_position);
    response.mutable_accepted()->set_queued_tokens(accepted->queued_tokens);
  } else if (const auto* progress = std::get_if<engine::Progress>(&event)) {
    response.mutable_progress()->set_tokens_done(progress->tokens_done);
    response.mutable_progress()->set_tokens_total(progress->tokens_total);
  } else if (const auto* manifest = std::get_if<std::shared_ptr<const engine::Manifest>>(&event)) {
    *response.mutable_manifest() = ToProto(**manifest);
  } else if (const auto* result = std::get_if<engine::Result>(&event)) {
    *response.mutable_result() = ToProto(*result, traceparent);
  }
  return Serialize(response);
}

v1::Budget ToProto(const Budget& budget) {
  v1::Budget out;
  out.set_mode(static_cast<v1::BudgetMode>(int(budget.mode) + 1));
  out.set_selector(static_cast<v1::Selector>(int(budget.selector) + 1));
  out.set_solver(static_cast<v1::Solver>(int(budget.solver) + 1));
  out.set_local(static_cast<v1::LocalTerm>(int(budget.local) + 1));
  if (budget.mode == BudgetMode::kRetention) out.set_retention(budget.retention);
  if (budget.mode == BudgetMode::kCoverage) out.set_coverage(budget.coverage);
  if (budget.mode != BudgetMode::kDense) {
    const RetentionBounds bounds = ResolveBounds(budget);
    out.set_min_retention(bounds.min_retention);
    out.set_max_retention(bounds.max_retention);
    out.set_keep_first(budget.keep_first);
    out.set_keep_last(budget.keep_last);
  }
  return out;
}

v1::Result ToProto(const engine::Result& result, const std::string& traceparent) {
  v1::Result out;
  *out.mutable_effective_budget() = ToProto(result.effective_budget);
  SetUsage(result.usage, out.mutable_usage());
  SetTimings(result.timings, out.mutable_timings());
  for (size_t row = 0; row < result.retained.size(); ++row) {
    v1::RetainedShare* share = out.add_retained();
    const bool known = row < result.retained_layers.size();
    share->set_layer(known ? result.retained_layers[row] : int32_t(row));
    share->mutable_pair_share()->Add(result.retained[row].begin(), result.retained[row].end());
  }
  out.set_digest(result.digest);
  if (result.next_token) out.set_next_token(*result.next_token);
  out.set_snapshot_id(result.snapshot_id);
  out.set_snapshot_position(result.snapshot_position);
  out.set_snapshot_ttl_seconds(result.snapshot_ttl_seconds);
  out.set_traceparent(traceparent);
  return out;
}

v1::Manifest ToProto(const engine::Manifest& manifest) {
  v1::Manifest out;
  out.set_model_identity(manifest.model_identity);
  out.set_format_version(manifest.format_version);
  out.set_position(manifest.position);
  out.set_total_bytes(manifest.total_bytes);
  for (const engine::TensorInfo& tensor : manifest.tensors) {
    v1::TensorInfo* info = out.add_tensors();
    info->set_name(tensor.name);
    info->set_kind(ToProto(tensor.kind));
    info->set_layer(tensor.layer);
    info->set_dtype(ToProto(tensor.dtype));
    info->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    if (tensor.kind == engine::TensorKind::kRecurrentState ||
        tensor.kind == engine::TensorKind::kRecurrentStateScale) {
      info->set_state_layout(static_cast<v1::StateLayout>(int(tensor.state_layout) + 1));
    }
    if (tensor.kind == engine::TensorKind::kConvState) {
      info->set_conv_layout(static_cast<v1::ConvLayout>(int(tensor.conv_layout) + 1));
    }
    info->set_bytes(tensor.bytes);
    info->set_position(tensor.position);
  }
  return out;
}

v1::SnapshotRef ToProto(const engine::SnapshotRef& ref) {
  v1::SnapshotRef out;
  out.set_snapshot_id(ref.snapshot_id);
  out.set_position(ref.position);
  out.set_bytes(ref.bytes);
  out.set_ttl_seconds(ref.ttl_seconds);
  return out;
}

v1::ModelInfo ToModelInfo(const engine::Engine& engine, const engine::EngineLimits& limits,
                          const std::string& server_version) {
  const model::ModelInfo& info = engine.model_info();
  v1::ModelInfo out;
  out.set_model_identity(info.identity);
  out.set_model_name(info.name);
  out.set_format_version(engine::kSnapshotFormatVersion);
  out.set_server_version(server_version);
  out.set_backend(info.backend);
  for (const model::LayerKind kind : info.layers) {
    out.add_layers(kind == model::LayerKind::kLinear ? v1::LAYER_KIND_LINEAR_ATTENTION
                                                     : v1::LAYER_KIND_FULL_ATTENTION);
  }
  out.set_vocab_size(info.vocab_size);
  out.set_hidden_size(info.hidden_size);
  out.set_num_k_heads(info.gdn.num_k_heads);
  out.set_num_v_heads(info.gdn.num_v_heads);
  out.set_head_dim_k(info.gdn.head_dim_k);
  out.set_head_dim_v(info.gdn.head_dim_v);
  out.set_conv_channels(info.conv_channels);
  out.set_conv_kernel(info.conv_kernel);
  out.set_num_q_heads(info.num_q_heads);
  out.set_num_kv_heads(info.num_kv_heads);
  out.set_attention_head_dim(info.attention_head_dim);
  out.set_weight_dtype(ToProto(info.weight_dtype));
  out.set_compute_dtype(ToProto(info.compute_dtype));
  for (const v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_BF16, v1::DTYPE_FP8_E4M3}) {
    out.add_state_dtypes(dtype);
  }
  for (const v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_BF16}) out.add_kv_dtypes(dtype);
  out.add_state_layouts(v1::STATE_LAYOUT_KEY_MAJOR);
  out.add_state_layouts(v1::STATE_LAYOUT_VALUE_MAJOR);
  out.set_window(kWindow);
  out.set_chunk_tokens(engine.config().chunk_windows * kWindow);
  *out.mutable_default_budget() = ToProto(engine.config().default_budget);
  SetLimits(engine.config(), limits, info.max_context_tokens, out.mutable_limits());
  out.set_round_a_log(info.round_a_log);
  return out;
}

}  // namespace sparsegdn::service
