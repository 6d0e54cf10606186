// Input: the text of the server's --config file. Promise: every option within its row's bounds, or
// INVALID_ARGUMENT; what is derived from an accepted file never crashes.
#include <algorithm>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/service/config.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

using service::Option;
using service::ServerConfig;

struct InBounds {
  const Option& option;
  const ServerConfig& config;

  bool Number(double value) const { return value >= option.min && value <= option.max; }
  bool operator()(int64_t ServerConfig::*f) const { return Number(static_cast<double>(config.*f)); }
  bool operator()(double ServerConfig::*f) const { return Number(config.*f); }
  bool operator()(bool ServerConfig::*) const { return true; }
  bool operator()(std::optional<double> ServerConfig::*f) const {
    return !(config.*f).has_value() || Number(*(config.*f));
  }
  bool operator()(std::string ServerConfig::*f) const {
    const std::vector<std::string> choices = absl::StrSplit(option.choices, '|');
    return choices[0].empty() || (config.*f).empty() ||
           std::find(choices.begin(), choices.end(), config.*f) != choices.end();
  }
};

// ApplyJson prints a value of the wrong type however deep it is, which recurses; the operator's own
// file is trusted not to be nested deeper than this.
constexpr int kMaxNesting = 1000;

bool IsNestedDeeper(const std::string& text) {
  int depth = 0, deepest = 0;
  for (const char c : text) {
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    deepest = std::max(deepest, depth);
  }
  return deepest > kMaxNesting;
}

}  // namespace

int FuzzServerConfig(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (IsNestedDeeper(text)) return 0;
  ServerConfig config;
  const absl::Status status = service::ApplyJson(text, config);
  NoteOutcome(status);
  // A value that was refused is shown with each byte as an escape at most.
  if (!status.ok()) RequireRefusal(status, {absl::StatusCode::kInvalidArgument}, 1024 + 6 * size);
  for (const Option& option : service::Options()) {
    Require(std::visit(InBounds{option, config}, option.field), std::string(option.flag));
  }
  if (status.ok()) {
    service::DefaultBudget(config).status().IgnoreError();
    service::ToEngineLimits(config);
    Require(service::ReceiveLimitBytes(config) > 0, "the receive limit overflows");
  }
  return 0;
}

std::vector<std::string> ServerConfigSeeds() {
  std::string all = "{";
  for (const Option& option : service::Options()) {
    if (option.json[0] == '\0') continue;
    const bool is_text = std::holds_alternative<std::string ServerConfig::*>(option.field);
    const bool is_bool = std::holds_alternative<bool ServerConfig::*>(option.field);
    const char* number = option.min <= 1 ? "1" : "65536";
    const std::vector<std::string> choices = absl::StrSplit(option.choices, '|');
    absl::StrAppend(&all, all.size() > 1 ? ",\"" : "\"", option.json, "\":",
                    is_text   ? absl::StrCat("\"", choices[0], "\"")
                    : is_bool ? "true"
                              : number);
  }
  return {
      R"({"model":{"dir":"/m","backend":"cpu","threads":2},"listen":"0.0.0.0:1",)"
      R"("budget":{"mode":"retention","retention":0.29,"keep_last":64},)"
      R"("limits":{"max_prompt_tokens":1000,"slow_reader_timeout_seconds":1.5},)"
      R"("engine":{"chunk_windows":2,"kept_snapshot_bytes":1073741824},"log":{"level":"debug"}})",
      all + "}",
      "{}",
      R"({"limits":7})",
      R"({"engine":{"chunk_windows":513}})",
      R"({"model":{"threads":"\ud83d\ude00"}})",
      R"({"unknown":)" + Nested(500) + "}",
      R"({"model":{"threads":)" + Nested(500, "1") + "}}",
  };
}

}  // namespace sparsegdn::fuzz
