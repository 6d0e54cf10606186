// Mutations that keep most of a JSON text's structure.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "tests/fuzz/mutate.h"

namespace sparsegdn::fuzz {
namespace {

struct Token {
  size_t begin, end;
};

constexpr const char* kValues[] = {
    "0",           "-1",       "1",     "-0",    "0.5",    "1.5",         "2.0",
    "1e-320",      "1e15",     "1e308", "1e400", "-1e400", "NaN",         "99999999999999999999999",
    "null",        "true",     "false", "\"\"",  "\"a\"",  "\"\\u0000\"", "\"\\ud83d\\ude00\"",
    "\"\\ud800\"", "\"\xff\"", "[]",    "{}",    "[[]]",   "[0,0]",       "{\"a\":{}}",
    "[null]",      ""};

// Strings whole, runs of letters and digits whole, everything else byte by byte.
std::vector<Token> Tokens(const std::string& text) {
  std::vector<Token> tokens;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    const auto is_word = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '+' || c == '.';
    };
    if (text[at] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (is_word(text[at])) {
      while (end < text.size() && is_word(text[end])) ++end;
    }
    if (!std::isspace(static_cast<unsigned char>(text[at]))) tokens.push_back({at, end});
    at = end;
  }
  return tokens;
}

// Where the value that starts at tokens[first] ends, as an index of tokens.
size_t ValueEnd(const std::string& text, const std::vector<Token>& tokens, size_t first) {
  int depth = 0;
  for (size_t i = first; i < tokens.size(); ++i) {
    const char c = text[tokens[i].begin];
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth <= 0) return i;
  }
  return tokens.size() - 1;
}

std::string SomeValue(Rng& rng) {
  if (rng.OneIn(3)) {
    return absl::StrCat(rng.OneIn(4) ? "-" : "", SpecialNumber(rng));
  }
  // Rarely so deep that a recursive walk would run out of stack.
  if (rng.OneIn(300)) return Nested(200'000);
  if (rng.OneIn(20)) return Nested(2 + rng.Below(50), "1");
  if (rng.OneIn(40)) return absl::StrCat("\"", std::string(1 << rng.Below(14), 'x'), "\"");
  return kValues[rng.Below(std::size(kValues))];
}

// JSON inside a JSON string, as snapshot files have it.
std::string MutateQuotedJson(const std::string& quoted, Rng& rng) {
  std::string inner = quoted.substr(1, quoted.size() - 2);
  for (size_t at = 0; (at = inner.find('\\', at)) != std::string::npos; ++at) inner.erase(at, 1);
  std::string out = "\"";
  for (const char c : MutateJson(inner, rng)) {
    if (c == '"' || c == '\\') out.push_back('\\');
    out.push_back(c);
  }
  out.push_back('"');
  return out;
}

}  // namespace

std::string MutateJson(const std::string& input, Rng& rng) {
  const std::vector<Token> tokens = Tokens(input);
  if (tokens.empty() || rng.OneIn(12)) return MutateBytes(input, input, rng);
  size_t first = rng.Below(tokens.size());
  // Mostly a value or a key: without its punctuation nothing of a text is left.
  for (int i = 0; i < 8 && std::strchr(",:]}", input[tokens[first].begin]) != nullptr; ++i) {
    first = rng.Below(tokens.size());
  }
  const size_t last = ValueEnd(input, tokens, first);
  const size_t begin = tokens[first].begin;
  const size_t size = tokens[last].end - begin;
  const std::string value = input.substr(begin, size);
  std::string out = input;
  if (value.find("\\\"") != std::string::npos && value[0] == '"' && !rng.OneIn(3)) {
    return out.replace(begin, size, MutateQuotedJson(value, rng));
  }
  switch (rng.Below(8)) {
    case 0:
      // With the comma that follows or goes before, as long as it is an item of a list.
      if (last + 1 < tokens.size() && input[tokens[last + 1].begin] == ',') {
        return out.erase(begin, tokens[last + 1].end - begin);
      }
      return out.erase(begin, size);
    case 1: {  // a value, or a key with its value, once more
      const bool is_key = last + 2 < tokens.size() && input[tokens[last + 1].begin] == ':';
      const size_t end = is_key ? tokens[ValueEnd(input, tokens, last + 2)].end : begin + size;
      return out.insert(begin, input.substr(begin, end - begin) + ",");
    }
    case 2: {  // what stands elsewhere
      const size_t from = rng.Below(tokens.size());
      const size_t to = ValueEnd(input, tokens, from);
      const std::string other =
          input.substr(tokens[from].begin, tokens[to].end - tokens[from].begin);
      return out.replace(begin, size, other);
    }
    case 3:
      return out.replace(begin, size, Nested(1 + rng.Below(4), value));
    case 4:
      return out.replace(begin, size, MutateBytes(value, input, rng));
    default:
      return out.replace(begin, size, SomeValue(rng));
  }
}

}  // namespace sparsegdn::fuzz
