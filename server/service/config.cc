// Parsing of flags, variables and the JSON file into a ServerConfig.
#include "server/service/config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/service/listeners.h"
#include "server/service/small_file.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::service {
namespace {

using nlohmann::json;

absl::Status Wrong(const std::string& name, const std::string& got, const std::string& wanted) {
  return absl::InvalidArgumentError(absl::StrCat(name, " = ", got, ", wanted ", wanted));
}

bool IsChoice(std::string_view choices, std::string_view value) {
  while (!choices.empty()) {
    const size_t bar = choices.find('|');
    if (choices.substr(0, bar) == value) return true;
    if (bar == std::string_view::npos) break;
    choices.remove_prefix(bar + 1);
  }
  return false;
}

// Stores one textual value into an option's field.
struct TextSetter {
  const Option& option;
  const std::string& name;  // as the user wrote it
  const std::string& value;
  ServerConfig& config;

  std::string Quoted() const { return absl::StrCat("\"", value, "\""); }
  absl::Status InRange(double number) const {
    if (number >= option.min && number <= option.max) return absl::OkStatus();
    // Six digits would hide the bound of a count.
    const auto text = [](double bound) {
      return std::trunc(bound) == bound ? absl::StrCat(static_cast<int64_t>(bound))
                                        : absl::StrCat(bound);
    };
    return Wrong(name, value,
                 absl::StrCat("a number in [", text(option.min), ", ", text(option.max), "]"));
  }
  absl::Status operator()(std::string ServerConfig::*field) const {
    if (option.choices[0] != '\0' && !IsChoice(option.choices, value)) {
      return Wrong(name, Quoted(), option.choices);
    }
    config.*field = value;
    return absl::OkStatus();
  }
  absl::Status operator()(int64_t ServerConfig::*field) const {
    int64_t number = 0;
    if (!absl::SimpleAtoi(value, &number)) return Wrong(name, Quoted(), "a whole number");
    absl::Status status = InRange(static_cast<double>(number));
    if (status.ok()) config.*field = number;
    return status;
  }
  absl::Status operator()(double ServerConfig::*field) const {
    double number = 0;
    if (!absl::SimpleAtod(value, &number)) return Wrong(name, Quoted(), "a number");
    absl::Status status = InRange(number);
    if (status.ok()) config.*field = number;
    return status;
  }
  absl::Status operator()(std::optional<double> ServerConfig::*field) const {
    double number = 0;
    if (!absl::SimpleAtod(value, &number)) return Wrong(name, Quoted(), "a number");
    absl::Status status = InRange(number);
    if (status.ok()) config.*field = number;
    return status;
  }
  absl::Status operator()(bool ServerConfig::*field) const {
    if (value != "true" && value != "false") return Wrong(name, Quoted(), "true or false");
    config.*field = value == "true";
    return absl::OkStatus();
  }
};

absl::Status SetText(const Option& option, const std::string& name, const std::string& value,
                     ServerConfig& config) {
  return std::visit(TextSetter{option, name, value, config}, option.field);
}

const Option* FindFlag(std::string_view flag) {
  for (const Option& option : Options()) {
    if (flag == option.flag) return &option;
  }
  return nullptr;
}

const Option* FindJson(const std::string& path) {
  for (const Option& option : Options()) {
    if (option.json[0] != '\0' && path == option.json) return &option;
  }
  return nullptr;
}

bool IsSection(const std::string& path) {
  const std::string prefix = path + ".";
  for (const Option& option : Options()) {
    if (std::string_view(option.json).substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

absl::Status SetJson(const Option& option, const json& value, ServerConfig& config) {
  const std::string path = option.json;
  const bool is_text = std::holds_alternative<std::string ServerConfig::*>(option.field);
  const bool is_bool = std::holds_alternative<bool ServerConfig::*>(option.field);
  if (is_text && value.is_string()) return SetText(option, path, value.get<std::string>(), config);
  if (is_bool && value.is_boolean()) {
    return SetText(option, path, value.get<bool>() ? "true" : "false", config);
  }
  if (!is_text && !is_bool && value.is_number()) return SetText(option, path, value.dump(), config);
  return Wrong(path, value.dump(-1, ' ', true, json::error_handler_t::replace),
               is_text ? "a string" : (is_bool ? "true or false" : "a number"));
}

absl::Status WalkJson(const json& node, const std::string& path, ServerConfig& config) {
  for (const auto& [key, value] : node.items()) {
    const std::string here = path.empty() ? key : absl::StrCat(path, ".", key);
    if (const Option* option = FindJson(here)) {
      absl::Status status = SetJson(*option, value, config);
      if (!status.ok()) return status;
    } else if (IsSection(here)) {
      if (!value.is_object()) return Wrong(here, value.type_name(), "an object");
      absl::Status status = WalkJson(value, here, config);
      if (!status.ok()) return status;
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unknown key ", here));
    }
  }
  return absl::OkStatus();
}

// SPARSEGDN_[...]PORT[_n_TCP[_...]] and SPARSEGDN_[...]SERVICE_{HOST,PORT[_name]}.
bool IsKubernetesServiceLink(std::string_view name) {
  const auto ends = [&](std::string_view tail) {
    return name.size() >= tail.size() && name.substr(name.size() - tail.size()) == tail;
  };
  if (name.find("_SERVICE_HOST") != name.npos || name.find("_SERVICE_PORT") != name.npos) {
    return true;
  }
  if (ends("_PORT")) return true;
  return name.find("_PORT_") != name.npos &&
         (name.find("_TCP") != name.npos || name.find("_UDP") != name.npos);
}

absl::Status ApplyEnv(const std::vector<std::string>& env, ServerConfig& config) {
  for (const std::string& entry : env) {
    if (entry.rfind("SPARSEGDN_", 0) != 0) continue;
    const size_t equals = entry.find('=');
    if (equals == std::string::npos) continue;
    const std::string name = entry.substr(0, equals);
    const Option* found = nullptr;
    for (const Option& option : Options()) {
      if (EnvName(option) == name) found = &option;
    }
    if (found == nullptr) {
      if (IsKubernetesServiceLink(name)) continue;
      if (name == "SPARSEGDN_SERVER") continue;  // the command line client's, often exported
      return absl::InvalidArgumentError(absl::StrCat("unknown variable ", name));
    }
    absl::Status status = SetText(*found, name, entry.substr(equals + 1), config);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ApplyFlags(const std::vector<std::string>& args, Invocation& out) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--help" || arg == "-h") out.help = true;
    if (arg == "--version") out.version = true;
    if (arg == "--help" || arg == "-h" || arg == "--version") continue;
    if (arg.rfind("--", 0) != 0) {
      return absl::InvalidArgumentError(absl::StrCat("unknown argument ", arg, " (see --help)"));
    }
    const size_t equals = arg.find('=');
    const std::string name = arg.substr(0, equals);
    const Option* option = FindFlag(std::string_view(name).substr(2));
    if (option == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name, " (see --help)"));
    }
    std::string value;
    if (equals != std::string::npos) {
      value = arg.substr(equals + 1);
    } else if (std::holds_alternative<bool ServerConfig::*>(option->field)) {
      value = "true";
    } else if (i + 1 < args.size()) {
      value = args[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat(name, " needs a value"));
    }
    absl::Status status = SetText(*option, name, value, out.config);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ApplyFile(const std::string& path, ServerConfig& config) {
  absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (!text.ok()) {
    return absl::Status(text.status().code(), absl::StrCat("--config ", path, ": ",
                                                           std::string(text.status().message())));
  }
  absl::Status status = ApplyJson(*text, config);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("--config ", path, ": ", std::string(status.message())));
}

absl::Status CheckTogether(const ServerConfig& config) {
  if (config.tls_cert.empty() != config.tls_key.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key must be given together");
  }
  if (!config.tls_client_ca.empty() && config.tls_cert.empty()) {
    return absl::InvalidArgumentError("--tls-client-ca needs --tls-cert and --tls-key");
  }
  if (config.redis.empty() && !config.redis_password_file.empty()) {
    return absl::InvalidArgumentError("--redis-password-file needs --redis");
  }
  if (!config.redis.empty() && config.prefix_cache_bytes == 0) {
    return absl::InvalidArgumentError(
        "--redis needs --prefix-cache-bytes: prefixes from Redis pass through memory");
  }
  if (absl::StatusOr<std::vector<ListenAddress>> listen =
          ParseListenList(config.listen, "--listen");
      !listen.ok()) {
    return listen.status();
  }
  if (config.default_ttl_seconds > config.max_ttl_seconds) {
    return Wrong("--default-ttl-seconds", absl::StrCat(config.default_ttl_seconds),
                 absl::StrCat("at most --max-ttl-seconds = ", config.max_ttl_seconds));
  }
  const int64_t windows = std::max<int64_t>(1, config.chunk_windows);
  if (const int64_t chunk = windows * kWindow; BatchTokens(config) < chunk) {
    return Wrong("--max-batch-tokens", absl::StrCat(config.max_batch_tokens),
                 absl::StrCat("at least ", chunk,
                              ", one chunk of --chunk-windows = ", windows));
  }
  absl::StatusOr<Budget> budget = DefaultBudget(config);
  if (!budget.ok()) return budget.status();
  absl::Status valid = ValidateBudget(*budget);
  if (!valid.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--default-... budget: ", std::string(valid.message())));
  }
  if (config.model_dir.empty()) {
    return absl::InvalidArgumentError("--model is required: the folder of a checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyJson(const std::string& text, ServerConfig& config) {
  const json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) return absl::InvalidArgumentError("not valid JSON");
  if (!document.is_object()) {
    return Wrong("the document", document.type_name(), "an object");
  }
  return WalkJson(document, "", config);
}

absl::StatusOr<Invocation> ParseConfig(const std::vector<std::string>& args,
                                       const std::vector<std::string>& env) {
  // A first pass over variables and flags finds the file; the second puts them over it.
  Invocation first;
  absl::Status status = ApplyEnv(env, first.config);
  status.Update(ApplyFlags(args, first));
  if (!status.ok()) return status;
  if (first.help || first.version) return first;

  Invocation out;
  if (!first.config.config_file.empty()) {
    status = ApplyFile(first.config.config_file, out.config);
    if (!status.ok()) return status;
  }
  status.Update(ApplyEnv(env, out.config));
  status.Update(ApplyFlags(args, out));
  status.Update(CheckTogether(out.config));
  if (!status.ok()) return status;
  return out;
}

}  // namespace sparsegdn::service
