#include "cli/flags.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/errors.h"

namespace sparsegdn::cli {
namespace {

const Flag* Find(const std::vector<FlagGroup>& groups, const std::string& name) {
  for (const FlagGroup& group : groups) {
    for (const Flag& flag : group.flags) {
      if (flag.name == name) return &flag;
    }
  }
  return nullptr;
}

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replace});
    }
  }
  return row[b.size()];
}

absl::Status UnknownFlag(const std::vector<FlagGroup>& groups, const std::string& name) {
  std::string nearest;
  size_t best = 4;
  for (const FlagGroup& group : groups) {
    for (const Flag& flag : group.flags) {
      const size_t distance = EditDistance(name, flag.name);
      if (distance < best) {
        best = distance;
        nearest = flag.name;
      }
    }
  }
  return UsageError(absl::StrCat(
      "unknown flag --", name, nearest.empty() ? "" : absl::StrCat("; is --", nearest, " meant?")));
}

// `text` in lines of at most `width`, each but the first indented.
std::string Wrap(const std::string& text, size_t indent, size_t width) {
  std::string out;
  size_t column = 0;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(text, ' '))) {
    if (column > 0 && column + 1 + word.size() > width) {
      absl::StrAppend(&out, "\n", std::string(indent, ' '));
      column = 0;
    }
    absl::StrAppend(&out, column > 0 ? " " : "", word);
    column += word.size() + (column > 0 ? 1 : 0);
  }
  return out;
}

}  // namespace

absl::Status UsageError(const std::string& message) {
  return client::MakeError(absl::StatusCode::kInvalidArgument, "USAGE", "", message);
}

absl::StatusOr<Args> Args::Parse(const std::vector<FlagGroup>& groups,
                                 const std::vector<std::string>& arguments) {
  Args args;
  bool flags_end = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (flags_end || argument == "-" || argument.empty() || argument[0] != '-') {
      args.positional_.push_back(argument);
      continue;
    }
    if (argument == "--") {
      flags_end = true;
      continue;
    }
    const std::string body = argument.substr(argument.rfind("--", 0) == 0 ? 2 : 1);
    const size_t equals = body.find('=');
    const std::string name = body == "h" ? "help" : body.substr(0, equals);
    const Flag* flag = Find(groups, name);
    if (flag == nullptr) return UnknownFlag(groups, name);
    if (args.Has(name)) return UsageError(absl::StrCat("--", name, " is given twice"));
    std::string value;
    if (flag->value.empty()) {
      if (equals != std::string::npos)
        return UsageError(absl::StrCat("--", name, " takes no value"));
    } else if (equals != std::string::npos) {
      value = body.substr(equals + 1);
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      return UsageError(absl::StrCat("--", name, " needs a value: ", flag->value));
    }
    args.values_[name] = value;
  }
  return args;
}

std::string Args::Text(const std::string& name, const std::string& fallback) const {
  auto value = values_.find(name);
  return value == values_.end() ? fallback : value->second;
}

absl::Status Args::Read(const std::string& name, int64_t min, int64_t max, int64_t* out) const {
  if (!Has(name)) return absl::OkStatus();
  int64_t value = 0;
  if (!absl::SimpleAtoi(Text(name), &value) || value < min || value > max) {
    return UsageError(absl::StrCat("--", name, " = ", Text(name), ", must be an integer from ", min,
                                   " to ", max));
  }
  *out = value;
  return absl::OkStatus();
}

absl::Status Args::Read(const std::string& name, std::optional<double>* out) const {
  if (!Has(name)) return absl::OkStatus();
  double value = 0;
  if (!absl::SimpleAtod(Text(name), &value)) {
    return UsageError(absl::StrCat("--", name, " = ", Text(name), ", must be a number"));
  }
  *out = value;
  return absl::OkStatus();
}

absl::Status Args::ReadList(const std::string& name, std::vector<int64_t>* out) const {
  if (!Has(name)) return absl::OkStatus();
  out->clear();
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(Text(name), ','))) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(part, &value)) {
      return UsageError(absl::StrCat("--", name, ": \"", part, "\" is not an integer"));
    }
    out->push_back(value);
  }
  return absl::OkStatus();
}

absl::Status Args::ReadChoice(const std::string& name, const std::vector<std::string>& choices,
                              int* out) const {
  if (!Has(name)) return absl::OkStatus();
  auto found = std::find(choices.begin(), choices.end(), Text(name));
  if (found == choices.end()) {
    return UsageError(absl::StrCat("--", name, " = ", Text(name), ", must be one of ",
                                   absl::StrJoin(choices, ", ")));
  }
  *out = static_cast<int>(found - choices.begin());
  return absl::OkStatus();
}

std::string DescribeFlags(const std::vector<FlagGroup>& groups) {
  constexpr size_t kIndent = 30;
  std::string out;
  for (const FlagGroup& group : groups) {
    absl::StrAppend(&out, "\n", group.title, "\n");
    for (const Flag& flag : group.flags) {
      std::string left = absl::StrCat("  ", flag.name.size() == 1 ? "-" : "--", flag.name,
                                      flag.value.empty() ? "" : " ", flag.value);
      if (left.size() + 2 > kIndent) {
        absl::StrAppend(&left, "\n", std::string(kIndent, ' '));
      } else {
        left.append(kIndent - left.size(), ' ');
      }
      absl::StrAppend(&out, left, Wrap(flag.help, kIndent, 100 - kIndent), "\n");
    }
  }
  return out;
}

}  // namespace sparsegdn::cli
