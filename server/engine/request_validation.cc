#include "server/engine/request_validation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/budget.h"
#include "server/engine/errors.h"

namespace sparsegdn::engine {
namespace {

absl::Status CheckLabels(const PrefillRequest& request) {
  if (request.priority < kMinPriority || request.priority > kMaxPriority) {
    return Invalid("priority", absl::StrCat("got ", request.priority, ", wanted ", kMinPriority,
                                            " to ", kMaxPriority));
  }
  if (request.request_id.size() > kMaxRequestIdBytes) {
    return Invalid("request_id", absl::StrCat("got ", request.request_id.size(),
                                              " bytes, wanted at most ", kMaxRequestIdBytes));
  }
  for (const char c : request.request_id) {
    if (c < 0x20 || c > 0x7e) return Invalid("request_id", "wanted printable ASCII only");
  }
  if (request.tenant.size() > kMaxTenantBytes) {
    return Invalid("tenant", absl::StrCat("got ", request.tenant.size(), " bytes, wanted at most ",
                                          kMaxTenantBytes));
  }
  return absl::OkStatus();
}

// Where the call's first token stands, and the snapshot it continues.
absl::Status ResolveStart(const ValidationContext& context, RequestPlan& plan) {
  const PrefillRequest& request = plan.request;
  if (request.resume_from.empty()) {
    if (request.first_position.value_or(0) != 0) {
      return Invalid("first_position", absl::StrCat("got ", *request.first_position,
                                                    ", wanted 0 without resume_from"));
    }
    return absl::OkStatus();
  }
  plan.base = context.snapshots.Find(request.resume_from, request.tenant);
  if (!plan.base) {
    return Refuse(absl::StatusCode::kNotFound, "resume_from", "SNAPSHOT_NOT_FOUND",
                  "the server holds no snapshot of this id");
  }
  plan.first_position = plan.base->position;
  if (request.first_position && *request.first_position != plan.first_position) {
    return Invalid("first_position",
                   absl::StrCat("got ", *request.first_position, ", wanted ", plan.first_position,
                                ", the position of the snapshot"));
  }
  return absl::OkStatus();
}

absl::Status CheckLength(const ValidationContext& context, RequestPlan& plan) {
  if (plan.request.tokens.empty()) {
    return Invalid("token_ids", "got none, wanted at least one");
  }
  int64_t most = context.model.max_context_tokens;
  if (const int64_t limit = context.limits.max_prompt_tokens; limit > 0) {
    most = std::min(most, limit);
  }
  plan.prompt_tokens = plan.first_position + static_cast<int64_t>(plan.request.tokens.size());
  if (plan.prompt_tokens > most) {
    return Refuse(absl::StatusCode::kOutOfRange, "token_ids", "PROMPT_TOO_LONG",
                  absl::StrCat("the prompt has ", plan.prompt_tokens, " tokens, of which ",
                               plan.first_position, " in the snapshot; wanted at most ", most));
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(const std::vector<int32_t>& tokens, int32_t vocab_size) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab_size) {
      return Invalid(absl::StrCat("token_ids[", i, "]"),
                     absl::StrCat("got ", tokens[i], ", wanted 0 to ", vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLogits(const Outputs& outputs, const RequestPlan& plan, int32_t vocab_size) {
  const std::vector<int64_t>& positions = outputs.logits_positions;
  if (positions.size() > kMaxLogitsPositions) {
    return Invalid(
        "outputs.logits.positions",
        absl::StrCat("got ", positions.size(), " positions, wanted at most ", kMaxLogitsPositions));
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    const std::string field = absl::StrCat("outputs.logits.positions[", i, "]");
    if (positions[i] < plan.first_position || positions[i] >= plan.prompt_tokens) {
      return Invalid(field, absl::StrCat("got ", positions[i], ", wanted ", plan.first_position,
                                         " to ", plan.prompt_tokens - 1));
    }
    // Row r of the tensor is positions[r]: an unordered list would leave that to guess.
    if (i > 0 && positions[i] <= positions[i - 1]) {
      return Invalid(field, absl::StrCat("got ", positions[i], ", wanted more than ",
                                         positions[i - 1], ", the one before"));
    }
  }
  const uint32_t most = std::min<uint32_t>(kMaxTopK, static_cast<uint32_t>(vocab_size));
  if (outputs.top_k > most) {
    return Invalid("outputs.logits.top_k",
                   absl::StrCat("got ", outputs.top_k, ", wanted at most ", most));
  }
  if (outputs.top_k > 0 && positions.empty()) {
    return Invalid("outputs.logits.top_k", "given without positions");
  }
  if (outputs.logprobs_from && (*outputs.logprobs_from <= plan.first_position ||
                                *outputs.logprobs_from >= plan.prompt_tokens)) {
    return Invalid("outputs.prompt_logprobs_from",
                   absl::StrCat("got ", *outputs.logprobs_from, ", wanted more than ",
                                plan.first_position, " and less than ", plan.prompt_tokens,
                                ": a token's probability needs the token before it in this call"));
  }
  return absl::OkStatus();
}

absl::Status CheckOutputs(const Outputs& outputs, const RequestPlan& plan, int32_t vocab_size) {
  if (outputs.state_dtype == ExportDType::kI32) {
    return Invalid("outputs.state_dtype", "got INT32, wanted FP32, BF16 or FP8_E4M3");
  }
  if (outputs.kv_dtype && *outputs.kv_dtype != ExportDType::kF32 &&
      *outputs.kv_dtype != ExportDType::kBF16) {
    return Invalid("outputs.kv_dtype", "wanted FP32 or BF16");
  }
  const int64_t unit = plan.budget.mode == BudgetMode::kDense ? kGroup : kWindow;
  if (outputs.checkpoint_every < 0 || outputs.checkpoint_every % unit != 0) {
    return Invalid("outputs.checkpoint_every",
                   absl::StrCat("got ", outputs.checkpoint_every, ", wanted a multiple of ", unit));
  }
  if (outputs.checkpoint_every > 0 && !outputs.state && !outputs.conv_state) {
    return Invalid("outputs.checkpoint_every", "given, but neither state nor conv_state is");
  }
  return CheckLogits(outputs, plan, vocab_size);
}

// Fills the rest of the plan; the request is valid in itself.
absl::Status Lay(const ValidationContext& context, RequestPlan& plan) {
  const PrefillRequest& request = plan.request;
  const bool before_last = request.snapshot_at == SnapshotAt::kBeforeLast;
  if (before_last && plan.budget.mode != BudgetMode::kDense && plan.budget.keep_last < 1) {
    return Invalid("budget.keep_last",
                   "got 0, wanted at least 1 with BEFORE_LAST, so that the worker's own step on "
                   "the last token is the server's");
  }
  plan.snapshot_position = plan.prompt_tokens - before_last;
  plan.runner_logits = request.outputs.logits_positions;
  const int64_t last = plan.prompt_tokens - 1;
  if (!before_last && (plan.runner_logits.empty() || plan.runner_logits.back() != last)) {
    plan.runner_logits.push_back(last);
  }
  const bool run_last = !plan.runner_logits.empty() && plan.runner_logits.back() == last;
  plan.end_position = before_last && run_last ? plan.prompt_tokens : plan.snapshot_position;
  plan.chunk_tokens = context.config.chunk_windows * kWindow;
  plan.ttl_seconds =
      std::min(request.ttl_seconds == 0 ? context.limits.default_ttl_seconds : request.ttl_seconds,
               context.limits.max_ttl_seconds);
  return PlanTensors(context.layout, context.model.identity, context.model.vocab_size, plan);
}

absl::Status CheckFits(const ValidationContext& context, const RequestPlan& plan) {
  const int64_t tokens = static_cast<int64_t>(plan.request.tokens.size());
  if (tokens > context.limits.max_queue_tokens) {
    return NeverFits("token_ids", absl::StrCat("got ", tokens, " tokens, but the queue holds ",
                                               context.limits.max_queue_tokens));
  }
  if (const int64_t most = context.limits.max_tenant_tokens; most > 0 && tokens > most) {
    return NeverFits("token_ids", absl::StrCat("got ", tokens, " tokens, but a tenant may have ",
                                               most, " at a time"));
  }
  if (const int64_t bytes = plan.QueuedBytes(); bytes > context.limits.max_queue_bytes) {
    return NeverFits("", absl::StrCat("the request takes ", bytes, " bytes with its plan, but the ",
                                      "queue holds ", context.limits.max_queue_bytes));
  }
  if (!context.layout.full_layers.empty()) {
    const int64_t block = std::max<int64_t>(1, context.runner.kv_block_tokens);
    const int64_t needed = (plan.end_position + block - 1) / block * block;
    if (needed > context.runner.kv_tokens) {
      return NeverFits("token_ids",
                       absl::StrCat("the prompt needs attention KV for ", needed,
                                    " tokens, but the device holds ", context.runner.kv_tokens));
    }
  }
  if (plan.request.keep_snapshot) {
    absl::Status s = context.snapshots.CheckSize("keep_snapshot",
                                                 context.layout.kept_bytes(plan.snapshot_position));
    if (!s.ok()) return s;
  }
  if (const int64_t bytes = plan.MaxChunkBytes(); bytes > context.limits.max_buffered_bytes) {
    return NeverFits(
        "outputs", absl::StrCat("one chunk returns ", bytes, " bytes, but unread frames may hold ",
                                context.limits.max_buffered_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RequestPlan> PlanRequest(PrefillRequest request, const ValidationContext& context) {
  if (request.deadline_ns && *request.deadline_ns <= context.now_ns) {
    return Refuse(absl::StatusCode::kDeadlineExceeded, "", "DEADLINE_EXCEEDED",
                  "the deadline had passed when the request arrived");
  }
  if (absl::Status s = CheckLabels(request); !s.ok()) return s;
  RequestPlan plan;
  plan.request = std::move(request);
  if (absl::Status s = ResolveStart(context, plan); !s.ok()) return s;
  if (absl::Status s = CheckLength(context, plan); !s.ok()) return s;
  if (absl::Status s = CheckTokens(plan.request.tokens, context.model.vocab_size); !s.ok()) {
    return s;
  }
  absl::StatusOr<Budget> budget = ResolveBudget(plan.request.budget, context.config.default_budget);
  if (!budget.ok()) return budget.status();
  plan.budget = *budget;
  if (absl::Status s = CheckOutputs(plan.request.outputs, plan, context.model.vocab_size);
      !s.ok()) {
    return s;
  }
  if (absl::Status s = Lay(context, plan); !s.ok()) return s;
  if (absl::Status s = CheckFits(context, plan); !s.ok()) return s;
  return plan;
}

}  // namespace sparsegdn::engine
