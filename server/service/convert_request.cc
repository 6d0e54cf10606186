#include "server/service/convert_request.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/engine/status_payload.h"
#include "server/service/context.h"
#include "server/service/status.h"

namespace sparsegdn::service {
namespace {

absl::Status UnknownEnum(const std::string& field, int got, const std::string& wanted) {
  return InvalidField(field, "UNKNOWN_ENUM_VALUE",
                      absl::StrCat(field, " = ", got, ", wanted ", wanted));
}

// wire value w stands for row w - 1; 0 is the default (absent).
template <typename T, size_t N>
absl::Status MapEnum(const std::string& field, int got, const T (&values)[N], const char* wanted,
                     std::optional<T>& out) {
  if (got == 0) return absl::OkStatus();
  if (got < 0 || got > static_cast<int>(N)) return UnknownEnum(field, got, wanted);
  out = values[got - 1];
  return absl::OkStatus();
}

constexpr BudgetMode kModes[] = {BudgetMode::kDense, BudgetMode::kRetention, BudgetMode::kCoverage};
constexpr Selector kSelectors[] = {Selector::kBeta, Selector::kWriteNorm};
constexpr Solver kSolvers[] = {Solver::kAuto, Solver::kExact, Solver::kBlockAdjacent};
constexpr LocalTerm kLocals[] = {LocalTerm::kSelf, LocalTerm::kNone};
constexpr engine::ExportDType kDTypes[] = {engine::ExportDType::kF32, engine::ExportDType::kBF16,
                                           engine::ExportDType::kF8E4M3, engine::ExportDType::kI32};
constexpr StateLayout kStateLayouts[] = {StateLayout::kKeyMajor, StateLayout::kValueMajor};
constexpr engine::ConvLayout kConvLayouts[] = {engine::ConvLayout::kFourColumns,
                                               engine::ConvLayout::kThreeColumns};
constexpr engine::TensorKind kKinds[] = {
    engine::TensorKind::kRecurrentState, engine::TensorKind::kRecurrentStateScale,
    engine::TensorKind::kConvState,      engine::TensorKind::kKey,
    engine::TensorKind::kValue,          engine::TensorKind::kLogits,
    engine::TensorKind::kTopKIds,        engine::TensorKind::kTopKLogits,
    engine::TensorKind::kPromptLogprobs};
constexpr char kDTypeChoices[] = "DTYPE_FP32, DTYPE_BF16 or DTYPE_FP8_E4M3";

absl::Status ConvertOutputs(const v1::Outputs& in, engine::Outputs& out) {
  out.state = !in.has_state() || in.state();
  out.conv_state = !in.has_conv_state() || in.conv_state();
  out.kv = !in.has_kv() || in.kv();
  std::optional<engine::ExportDType> state_dtype, kv_dtype;
  std::optional<StateLayout> state_layout;
  std::optional<engine::ConvLayout> conv_layout;
  absl::Status status =
      MapEnum("outputs.state_dtype", in.state_dtype(), kDTypes, kDTypeChoices, state_dtype);
  status.Update(
      MapEnum("outputs.kv_dtype", in.kv_dtype(), kDTypes, "DTYPE_FP32 or DTYPE_BF16", kv_dtype));
  status.Update(MapEnum("outputs.state_layout", in.state_layout(), kStateLayouts,
                        "KEY_MAJOR or VALUE_MAJOR", state_layout));
  status.Update(MapEnum("outputs.conv_layout", in.conv_layout(), kConvLayouts,
                        "FOUR_COLUMNS or THREE_COLUMNS", conv_layout));
  if (!status.ok()) return status;
  out.state_dtype = state_dtype.value_or(out.state_dtype);
  out.kv_dtype = kv_dtype;
  out.state_layout = state_layout.value_or(out.state_layout);
  out.conv_layout = conv_layout.value_or(out.conv_layout);
  out.checkpoint_every = in.checkpoint_every();
  if (in.has_prompt_logprobs_from()) out.logprobs_from = in.prompt_logprobs_from();
  const auto& positions = in.logits().positions();
  out.logits_positions.assign(positions.begin(), positions.end());
  out.top_k = in.logits().top_k();
  return absl::OkStatus();
}

absl::Status ConvertTensor(const v1::TensorInfo& in, const std::string& field,
                           engine::TensorInfo& out) {
  if (in.name().empty() || in.name().size() > kMaxTensorNameBytes) {
    return InvalidField(field + ".name", "BAD_TENSOR_NAME",
                        absl::StrCat(field, ".name has ", in.name().size(), " bytes, wanted 1 .. ",
                                     kMaxTensorNameBytes));
  }
  if (in.shape_size() > 8) {
    return InvalidField(
        field + ".shape", "BAD_SHAPE",
        absl::StrCat(field, ".shape has ", in.shape_size(), " dimensions, wanted at most 8"));
  }
  std::optional<engine::TensorKind> kind;
  std::optional<engine::ExportDType> dtype;
  std::optional<StateLayout> state_layout;
  std::optional<engine::ConvLayout> conv_layout;
  absl::Status status = MapEnum(field + ".kind", in.kind(), kKinds, "a TensorKind", kind);
  status.Update(MapEnum(field + ".dtype", in.dtype(), kDTypes, "a DType", dtype));
  status.Update(MapEnum(field + ".state_layout", in.state_layout(), kStateLayouts,
                        "KEY_MAJOR or VALUE_MAJOR", state_layout));
  status.Update(MapEnum(field + ".conv_layout", in.conv_layout(), kConvLayouts,
                        "FOUR_COLUMNS or THREE_COLUMNS", conv_layout));
  if (!status.ok()) return status;
  // A manifest describes bytes that exist: here 0 stands for nothing.
  if (!kind) return UnknownEnum(field + ".kind", 0, "a TensorKind");
  if (!dtype) return UnknownEnum(field + ".dtype", 0, "a DType");
  out.name = in.name();
  out.kind = *kind;
  out.layer = in.layer();
  out.dtype = *dtype;
  out.shape.assign(in.shape().begin(), in.shape().end());
  out.state_layout = state_layout.value_or(out.state_layout);
  out.conv_layout = conv_layout.value_or(out.conv_layout);
  out.bytes = in.bytes();
  out.position = in.position();
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer copy = bytes;  // shares the slices; the reader wants a mutable one
  grpc::ProtoBufferReader reader(&copy);
  if (!reader.status().ok() || !message->ParseFromZeroCopyStream(&reader)) {
    return InvalidField("", "MALFORMED_MESSAGE",
                        absl::StrCat("the message is not a ", message->GetDescriptor()->name()));
  }
  return absl::OkStatus();
}

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

std::string LogLabel(const std::string& id) {
  return id.empty() ? NewRequestId() : id.substr(0, kMaxLogLabelBytes);
}

absl::StatusOr<engine::BudgetOverrides> FromProto(const v1::Budget& in) {
  engine::BudgetOverrides out;
  absl::Status status =
      MapEnum("budget.mode", in.mode(), kModes, "DENSE, RETENTION or COVERAGE", out.mode);
  status.Update(
      MapEnum("budget.selector", in.selector(), kSelectors, "BETA or WRITE_NORM", out.selector));
  status.Update(
      MapEnum("budget.solver", in.solver(), kSolvers, "AUTO, EXACT or BLOCK_ADJACENT", out.solver));
  status.Update(MapEnum("budget.local", in.local(), kLocals, "SELF or NONE", out.local));
  if (!status.ok()) return status;
  if (in.has_retention()) out.retention = in.retention();
  if (in.has_coverage()) out.coverage = in.coverage();
  if (in.has_min_retention()) out.min_retention = in.min_retention();
  if (in.has_max_retention()) out.max_retention = in.max_retention();
  if (in.has_keep_first()) out.keep_first = in.keep_first();
  if (in.has_keep_last()) out.keep_last = in.keep_last();
  return out;
}

absl::StatusOr<engine::PrefillRequest> FromProto(const v1::PrefillRequest& in) {
  engine::PrefillRequest out;
  absl::StatusOr<engine::BudgetOverrides> budget = FromProto(in.budget());
  if (!budget.ok()) return budget.status();
  out.budget = *budget;
  constexpr engine::SnapshotAt kPlaces[] = {engine::SnapshotAt::kBeforeLast,
                                            engine::SnapshotAt::kAfterLast};
  std::optional<engine::SnapshotAt> place;
  absl::Status status =
      MapEnum("snapshot_at", in.snapshot_at(), kPlaces, "BEFORE_LAST or AFTER_LAST", place);
  status.Update(ConvertOutputs(in.outputs(), out.outputs));
  if (!status.ok()) return status;
  out.snapshot_at = place.value_or(out.snapshot_at);
  out.tokens.assign(in.token_ids().begin(), in.token_ids().end());
  out.resume_from = in.resume_from();
  if (in.has_first_position()) out.first_position = in.first_position();
  constexpr bool kReuse[] = {true, false};
  std::optional<bool> reuse;
  status = MapEnum("prefix_reuse", in.prefix_reuse(), kReuse, "ON or OFF", reuse);
  if (!status.ok()) return status;
  out.prefix_reuse = reuse.value_or(out.prefix_reuse);
  out.keep_snapshot = in.has_keep_snapshot();
  out.pin_snapshot = in.keep_snapshot().pin();
  out.ttl_seconds = in.keep_snapshot().ttl_seconds();
  out.priority = in.priority();
  out.request_id = in.request_id();
  return out;
}

absl::Status CheckWorker(const v1::WorkerIdentity& worker, const model::ModelInfo& info) {
  const auto mismatch = [](const char* field, const std::string& got, const std::string& wanted) {
    return engine::WithDetails(absl::FailedPreconditionError(
                                   absl::StrCat(field, " = ", got, ", this server has ", wanted)),
                               {field, "WORKER_MISMATCH", std::nullopt});
  };
  if (!worker.model_identity().empty() && worker.model_identity() != info.identity) {
    return mismatch("worker.model_identity", worker.model_identity().substr(0, 128), info.identity);
  }
  if (worker.vocab_size() != 0 && static_cast<int64_t>(worker.vocab_size()) != info.vocab_size) {
    return mismatch("worker.vocab_size", absl::StrCat(worker.vocab_size()),
                    absl::StrCat(info.vocab_size));
  }
  if (worker.format_version() != 0 && worker.format_version() != engine::kSnapshotFormatVersion) {
    return mismatch("worker.format_version", absl::StrCat(worker.format_version()),
                    absl::StrCat(engine::kSnapshotFormatVersion));
  }
  return absl::OkStatus();
}

absl::StatusOr<engine::Manifest> FromProto(const v1::Manifest& in) {
  if (in.tensors_size() > kMaxManifestTensors) {
    return InvalidField("manifest.tensors", "TOO_MANY_TENSORS",
                        absl::StrCat("manifest.tensors has ", in.tensors_size(),
                                     " entries, wanted at most ", kMaxManifestTensors));
  }
  engine::Manifest out;
  out.model_identity = in.model_identity();
  out.format_version = in.format_version();
  out.position = in.position();
  out.total_bytes = in.total_bytes();
  out.tensors.resize(in.tensors_size());
  for (int i = 0; i < in.tensors_size(); ++i) {
    absl::Status status =
        ConvertTensor(in.tensors(i), absl::StrCat("manifest.tensors[", i, "]"), out.tensors[i]);
    if (!status.ok()) return status;
  }
  return out;
}

}  // namespace sparsegdn::service
