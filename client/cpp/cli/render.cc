#include "cli/render.h"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sparsegdn::cli {
namespace {

// "BUDGET_MODE_DENSE" -> "dense".
std::string EnumText(const std::string& name, const std::string& prefix) {
  std::string text = name.size() > prefix.size() ? name.substr(prefix.size()) : name;
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string Mode(const v1::Budget& b) {
  return EnumText(v1::BudgetMode_Name(b.mode()), "BUDGET_MODE_");
}
std::string SelectorText(const v1::Budget& b) {
  return EnumText(v1::Selector_Name(b.selector()), "SELECTOR_");
}
std::string SolverText(const v1::Budget& b) {
  return EnumText(v1::Solver_Name(b.solver()), "SOLVER_");
}
std::string LocalText(const v1::Budget& b) {
  return EnumText(v1::LocalTerm_Name(b.local()), "LOCAL_TERM_");
}
std::string DTypeText(int dtype) {
  return EnumText(v1::DType_Name(static_cast<v1::DType>(dtype)), "DTYPE_");
}

std::string Row(const char* name, const std::string& value) {
  return absl::StrFormat("%-16s %s\n", name, value);
}

std::string TimingRow(const char* name, double seconds, int64_t tokens) {
  const std::string rate =
      tokens > 0 && seconds > 0 ? Grouped(static_cast<int64_t>(tokens / seconds)) : "";
  return absl::StrFormat("  %-14s %10.4f %13s\n", name, seconds, rate);
}

double Mean(const v1::RetainedShare& share) {
  double sum = 0;
  for (float value : share.pair_share()) sum += value;
  return share.pair_share_size() > 0 ? sum / share.pair_share_size() : 0.0;
}

std::string RetainedTable(const v1::Result& result) {
  if (result.retained_size() == 0) return "";
  std::string out = "\nretained share   mean      min      max  of the head pairs\n";
  for (const v1::RetainedShare& share : result.retained()) {
    if (share.pair_share_size() == 0) continue;
    const auto [low, high] =
        std::minmax_element(share.pair_share().begin(), share.pair_share().end());
    absl::StrAppendFormat(&out, "  layer %-5d %7.1f %% %6.1f %% %6.1f %%\n", share.layer(),
                          Mean(share) * 100, *low * 100, *high * 100);
  }
  return out;
}

std::string EventsText(const v1::Usage& usage) {
  const double share =
      usage.events_total() > 0 ? 100.0 * usage.events_selected() / usage.events_total() : 0.0;
  return absl::StrFormat("%s of %s computed (%.1f %%)", Grouped(usage.events_selected()),
                         Grouped(usage.events_total()), share);
}

std::string Hex16(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

// Fields that the mode does not use are null.
Json BudgetJson(const v1::Budget& b) {
  auto number = [](bool has, auto value) { return has ? Json(value) : Json(nullptr); };
  return {{"mode", Mode(b)},
          {"selector", SelectorText(b)},
          {"solver", SolverText(b)},
          {"local", LocalText(b)},
          {"retention", number(b.has_retention(), b.retention())},
          {"coverage", number(b.has_coverage(), b.coverage())},
          {"min_retention", number(b.has_min_retention(), b.min_retention())},
          {"max_retention", number(b.has_max_retention(), b.max_retention())},
          {"keep_first", number(b.has_keep_first(), b.keep_first())},
          {"keep_last", number(b.has_keep_last(), b.keep_last())}};
}

}  // namespace

std::string Grouped(int64_t value) {
  const std::string digits = absl::StrCat(value);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    const bool group_starts = (digits.size() - i) % 3 == 0;
    if (i > 0 && group_starts && digits[i - 1] != '-') out.push_back(',');
    out.push_back(digits[i]);
  }
  return out;
}

std::string Bytes(uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, units[unit]);
}

std::string BudgetText(const v1::Budget& b) {
  std::string text = Mode(b);
  if (b.mode() == v1::BUDGET_MODE_RETENTION) absl::StrAppendFormat(&text, " %g", b.retention());
  if (b.mode() == v1::BUDGET_MODE_COVERAGE) absl::StrAppendFormat(&text, " %g", b.coverage());
  if (b.mode() == v1::BUDGET_MODE_DENSE) return text;
  absl::StrAppendFormat(&text,
                        " (head pairs %g to %g), selector %s, solver %s, local %s, first %d "
                        "and last %d tokens kept",
                        b.min_retention(), b.max_retention(), SelectorText(b), SolverText(b),
                        LocalText(b), b.keep_first(), b.keep_last());
  return text;
}

std::string PrefillTable(const client::PrefillOutcome& outcome, const std::string& path) {
  const v1::Result& result = outcome.result;
  const v1::Usage& usage = result.usage();
  const v1::Timings& t = result.timings();
  const v1::Manifest& manifest = outcome.snapshot.manifest();
  const int64_t computed = usage.computed_tokens();
  std::string out =
      Row("prompt", absl::StrCat(Grouped(usage.prompt_tokens()), " tokens (", Grouped(computed),
                                 " computed, ", Grouped(usage.cached_tokens()), " cached)"));
  absl::StrAppend(&out, Row("snapshot", absl::StrCat("after ", Grouped(manifest.position()),
                                                     " tokens, ", manifest.tensors_size(),
                                                     " tensors, ", Bytes(manifest.total_bytes()),
                                                     ", digest ", Hex16(result.digest()))));
  if (!path.empty()) absl::StrAppend(&out, Row("written to", path));
  absl::StrAppend(&out, Row("budget", BudgetText(result.effective_budget())));
  absl::StrAppend(&out, Row("updates", EventsText(usage)));
  if (result.has_next_token()) {
    absl::StrAppend(&out, Row("next token", absl::StrCat(result.next_token())));
  }
  if (!result.snapshot_id().empty()) {
    absl::StrAppend(&out, Row("kept as", absl::StrCat(result.snapshot_id(), " for ",
                                                      result.snapshot_ttl_seconds(), " s")));
  }
  absl::StrAppend(&out, "\ntimings             seconds      tokens/s\n");
  absl::StrAppend(&out, TimingRow("queue", t.queue_seconds(), 0),
                  TimingRow("selection", t.selection_seconds(), 0),
                  TimingRow("GDN core", t.gdn_core_seconds(), computed),
                  TimingRow("engine", t.engine_seconds(), computed),
                  TimingRow("total", t.total_seconds(), computed),
                  TimingRow("seen here", outcome.total_seconds, computed));
  return out + RetainedTable(result);
}

Json PrefillJson(const client::PrefillOutcome& outcome, const std::string& path) {
  const v1::Result& result = outcome.result;
  const v1::Usage& usage = result.usage();
  const v1::Timings& t = result.timings();
  const v1::Manifest& manifest = outcome.snapshot.manifest();
  Json retained = Json::array();
  for (const v1::RetainedShare& share : result.retained()) {
    retained.push_back(
        {{"layer", share.layer()},
         {"mean", Mean(share)},
         {"pair_share", std::vector<float>(share.pair_share().begin(), share.pair_share().end())}});
  }
  Json out = {{"model_identity", manifest.model_identity()},
              {"position", manifest.position()},
              {"tensors", manifest.tensors_size()},
              {"bytes", manifest.total_bytes()},
              {"digest", Hex16(result.digest())},
              {"file", path.empty() ? Json(nullptr) : Json(path)},
              {"budget", BudgetJson(result.effective_budget())},
              {"usage",
               {{"prompt_tokens", usage.prompt_tokens()},
                {"computed_tokens", usage.computed_tokens()},
                {"cached_tokens", usage.cached_tokens()},
                {"events_total", usage.events_total()},
                {"events_selected", usage.events_selected()}}},
              {"timings",
               {{"queue_seconds", t.queue_seconds()},
                {"selection_seconds", t.selection_seconds()},
                {"gdn_core_seconds", t.gdn_core_seconds()},
                {"engine_seconds", t.engine_seconds()},
                {"total_seconds", t.total_seconds()},
                {"client_seconds", outcome.total_seconds}}},
              {"retained", retained}};
  out["next_token"] = result.has_next_token() ? Json(result.next_token()) : Json(nullptr);
  out["snapshot_id"] = result.snapshot_id().empty() ? Json(nullptr) : Json(result.snapshot_id());
  return out;
}

std::string InfoTable(const v1::ModelInfo& info) {
  int linear = 0;
  for (int kind : info.layers()) linear += kind == v1::LAYER_KIND_LINEAR_ATTENTION;
  std::string out = Row("model", info.model_name());
  absl::StrAppend(&out, Row("identity", info.model_identity()));
  absl::StrAppend(&out,
                  Row("server", absl::StrCat(info.server_version(), ", ", info.backend(),
                                             " backend, format version ", info.format_version())));
  absl::StrAppend(&out, Row("layers", absl::StrCat(info.layers_size(), " (", linear, " linear, ",
                                                   info.layers_size() - linear, " full)")));
  absl::StrAppend(
      &out, Row("shape", absl::StrCat("vocabulary ", Grouped(info.vocab_size()), ", hidden ",
                                      info.hidden_size(), ", linear heads ", info.num_k_heads(),
                                      " key / ", info.num_v_heads(), " value of ",
                                      info.head_dim_k(), " x ", info.head_dim_v())));
  absl::StrAppend(&out,
                  Row("computes in", absl::StrCat(DTypeText(info.compute_dtype()), ", weights ",
                                                  DTypeText(info.weight_dtype()))));
  absl::StrAppend(&out, Row("budget", BudgetText(info.default_budget())));
  absl::StrAppend(
      &out,
      Row("limits", absl::StrCat(Grouped(info.limits().max_context_tokens()), " tokens a prompt, ",
                                 info.limits().max_queue_requests(), " requests and ",
                                 Grouped(info.limits().max_queue_tokens()), " tokens queued")));
  absl::StrAppend(&out, Row("window", absl::StrCat(info.window(), " tokens, computed in chunks of ",
                                                   Grouped(info.chunk_tokens()))));
  return out;
}

Json InfoJson(const v1::ModelInfo& info) {
  Json layers = Json::array();
  for (int kind : info.layers()) {
    layers.push_back(EnumText(v1::LayerKind_Name(static_cast<v1::LayerKind>(kind)), "LAYER_KIND_"));
  }
  return {{"model_identity", info.model_identity()},
          {"model_name", info.model_name()},
          {"format_version", info.format_version()},
          {"server_version", info.server_version()},
          {"backend", info.backend()},
          {"layers", layers},
          {"vocab_size", info.vocab_size()},
          {"hidden_size", info.hidden_size()},
          {"num_k_heads", info.num_k_heads()},
          {"num_v_heads", info.num_v_heads()},
          {"head_dim_k", info.head_dim_k()},
          {"head_dim_v", info.head_dim_v()},
          {"conv_channels", info.conv_channels()},
          {"num_q_heads", info.num_q_heads()},
          {"num_kv_heads", info.num_kv_heads()},
          {"attention_head_dim", info.attention_head_dim()},
          {"weight_dtype", DTypeText(info.weight_dtype())},
          {"compute_dtype", DTypeText(info.compute_dtype())},
          {"window", info.window()},
          {"chunk_tokens", info.chunk_tokens()},
          {"default_budget", BudgetJson(info.default_budget())},
          {"max_context_tokens", info.limits().max_context_tokens()},
          {"max_snapshot_bytes", info.limits().max_snapshot_bytes()},
          {"round_a_log", info.round_a_log()}};
}

}  // namespace sparsegdn::cli
