#include "cli/request.h"

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "sparsegdn/client/snapshot.h"

namespace sparsegdn::cli {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// Collects the first error, so that a list of flags reads as a list.
class Reader {
 public:
  explicit Reader(const Args& args) : args_(args) {}
  void Double(const std::string& name, std::optional<double>* out) {
    if (status_.ok()) status_ = args_.Read(name, out);
  }
  std::optional<int64_t> Int(const std::string& name, int64_t min, int64_t max) {
    int64_t value = 0;
    if (status_.ok()) status_ = args_.Read(name, min, max, &value);
    return status_.ok() && args_.Has(name) ? std::optional<int64_t>(value) : std::nullopt;
  }
  // The choice's enum value: choices are listed in the enum's order, from 1.
  int Choice(const std::string& name, const std::vector<std::string>& choices) {
    int index = -1;
    if (status_.ok()) status_ = args_.ReadChoice(name, choices, &index);
    return index + 1;
  }
  absl::Status status() const { return status_; }

 private:
  const Args& args_;
  absl::Status status_;
};

absl::Status ApplyLogits(const Args& args, int64_t last_position, v1::Outputs* outputs) {
  if (!args.Has("logits")) {
    return args.Has("top-k") ? UsageError("--top-k needs --logits") : absl::OkStatus();
  }
  v1::LogitsRequest* logits = outputs->mutable_logits();
  for (const std::string& part :
       std::vector<std::string>(absl::StrSplit(args.Text("logits"), ','))) {
    int64_t position = last_position;
    if (part != "last" && !absl::SimpleAtoi(part, &position)) {
      return UsageError(absl::StrCat("--logits: \"", part, "\" is not a position or \"last\""));
    }
    logits->add_positions(position);
  }
  int64_t top_k = 0;
  absl::Status status = args.Read("top-k", 1, 1024, &top_k);
  logits->set_top_k(static_cast<uint32_t>(top_k));
  return status;
}

}  // namespace

FlagGroup BudgetFlags() {
  return {"Budget: how many recurrent updates are computed (default: the server's)",
          {{"dense", "", "Every update: exact, slowest."},
           {"retention", "SHARE", "Keep this share of the updates, 0 < SHARE <= 1."},
           {"coverage", "SHARE", "Keep as many updates as hold this share of the squared score."},
           {"min-retention", "SHARE", "Each head pair keeps at least this share."},
           {"max-retention", "SHARE", "Each head pair keeps at most this share."},
           {"keep-first", "N", "The first N tokens are always updates."},
           {"keep-last", "N", "The last N tokens are always updates."},
           {"selector", "NAME", "beta or write_norm: what ranks the updates."},
           {"solver", "NAME", "auto, exact or block_adjacent."},
           {"local", "NAME", "self or none: whether a skipped token still sees its own write."}}};
}

FlagGroup OutputFlags() {
  return {"What the snapshot carries",
          {{"no-state", "", "Leave out the recurrent states."},
           {"no-conv-state", "", "Leave out the convolution states."},
           {"no-kv", "", "Leave out the attention keys and values."},
           {"state-dtype", "NAME", "fp32 (default), bf16 or fp8."},
           {"kv-dtype", "NAME", "fp32 or bf16 (default: what the server computes in)."},
           {"state-layout", "NAME", "key_major (default, transformers) or value_major (vLLM)."},
           {"conv-columns", "N", "4 (default, transformers) or 3 (vLLM)."},
           {"checkpoint-every", "N", "States also at each multiple of N tokens."},
           {"logits", "POS,...", "Logits at these absolute positions; \"last\" is allowed."},
           {"top-k", "K", "With --logits: only the K largest."},
           {"logprobs-from", "POS", "Log-probabilities of the prompt's own tokens from POS on."}}};
}

FlagGroup CallFlags() {
  return {"The call",
          {{"snapshot-at", "WHEN",
            "before_last (default: the worker runs the last token itself) or after_last (the "
            "result names the next token)."},
           {"resume-from", "ID", "Continue from a snapshot the server holds."},
           {"first-position", "N", "With --resume-from: its position, checked by the server."},
           {"keep", "", "The server keeps the snapshot and the result names it."},
           {"ttl", "SECONDS", "With --keep: for how long (default: the server's)."},
           {"pin", "", "With --keep: never evicted for room before its time."},
           {"no-prefix-reuse", "", "Neither start from stored prefixes nor leave any."},
           {"priority", "N", "-8 to 8; higher runs sooner."},
           {"request-id", "TEXT", "A label for the server's log."},
           {"expect-model", "IDENTITY", "Fail unless the server runs this model (see info)."}}};
}

absl::Status ApplyBudget(const Args& args, v1::Budget* budget) {
  Reader reader(args);
  if (args.Has("dense")) budget->set_mode(v1::BUDGET_MODE_DENSE);
  std::optional<double> retention, coverage, low, high;
  reader.Double("retention", &retention);
  reader.Double("coverage", &coverage);
  reader.Double("min-retention", &low);
  reader.Double("max-retention", &high);
  if (retention) budget->set_retention(*retention);
  if (coverage) budget->set_coverage(*coverage);
  if (low) budget->set_min_retention(*low);
  if (high) budget->set_max_retention(*high);
  if (auto n = reader.Int("keep-first", 0, kMax)) budget->set_keep_first(*n);
  if (auto n = reader.Int("keep-last", 0, kMax)) budget->set_keep_last(*n);
  budget->set_selector(
      static_cast<v1::Selector>(reader.Choice("selector", {"beta", "write_norm"})));
  budget->set_solver(
      static_cast<v1::Solver>(reader.Choice("solver", {"auto", "exact", "block_adjacent"})));
  budget->set_local(static_cast<v1::LocalTerm>(reader.Choice("local", {"self", "none"})));
  return reader.status();
}

absl::Status ApplyOutputs(const Args& args, int64_t last_position, v1::Outputs* outputs) {
  Reader reader(args);
  if (args.Has("no-state")) outputs->set_state(false);
  if (args.Has("no-conv-state")) outputs->set_conv_state(false);
  if (args.Has("no-kv")) outputs->set_kv(false);
  outputs->set_state_dtype(
      static_cast<v1::DType>(reader.Choice("state-dtype", {"fp32", "bf16", "fp8"})));
  outputs->set_kv_dtype(static_cast<v1::DType>(reader.Choice("kv-dtype", {"fp32", "bf16"})));
  outputs->set_state_layout(
      static_cast<v1::StateLayout>(reader.Choice("state-layout", {"key_major", "value_major"})));
  outputs->set_conv_layout(static_cast<v1::ConvLayout>(reader.Choice("conv-columns", {"4", "3"})));
  if (auto n = reader.Int("checkpoint-every", 1, kMax)) outputs->set_checkpoint_every(*n);
  if (auto n = reader.Int("logprobs-from", 1, kMax)) outputs->set_prompt_logprobs_from(*n);
  if (!reader.status().ok()) return reader.status();
  return ApplyLogits(args, last_position, outputs);
}

absl::Status ApplyCall(const Args& args, v1::PrefillRequest* request) {
  Reader reader(args);
  request->set_snapshot_at(
      static_cast<v1::SnapshotAt>(reader.Choice("snapshot-at", {"before_last", "after_last"})));
  request->set_resume_from(args.Text("resume-from"));
  if (auto n = reader.Int("first-position", 0, kMax)) request->set_first_position(*n);
  const auto ttl = reader.Int("ttl", 1, std::numeric_limits<uint32_t>::max());
  if (ttl && !args.Has("keep")) return UsageError("--ttl needs --keep");
  if (args.Has("keep")) {
    request->mutable_keep_snapshot()->set_ttl_seconds(static_cast<uint32_t>(ttl.value_or(0)));
  }
  if (args.Has("pin") && !args.Has("keep")) return UsageError("--pin needs --keep");
  if (args.Has("pin")) request->mutable_keep_snapshot()->set_pin(true);
  if (args.Has("no-prefix-reuse")) request->set_prefix_reuse(v1::PREFIX_REUSE_OFF);
  if (auto n = reader.Int("priority", -8, 8)) request->set_priority(static_cast<int32_t>(*n));
  request->set_request_id(args.Text("request-id"));
  // A server of another format would send bytes that this client cannot read.
  request->mutable_worker()->set_format_version(client::kFormatVersion);
  if (args.Has("expect-model")) {
    request->mutable_worker()->set_model_identity(args.Text("expect-model"));
  }
  return reader.status();
}

}  // namespace sparsegdn::cli
