// Input: a file of token ids for the command line client, read in every format. Promise: the ids,
// or a usage error.
#include <nlohmann/json.hpp>

#include "cli/tokens.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

void CheckJson(const std::string& bytes, const std::vector<int32_t>& tokens) {
  const nlohmann::json list = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  Require(list.is_array() && list.size() == tokens.size(), "no list of as many items");
  for (size_t i = 0; i < tokens.size(); ++i) {
    Require(list[i].is_number() && list[i].get<double>() == tokens[i], "another number");
  }
}

}  // namespace

int FuzzTokens(const uint8_t* data, size_t size) {
  using cli::TokenFormat;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  for (const TokenFormat format :
       {TokenFormat::kAuto, TokenFormat::kText, TokenFormat::kJson, TokenFormat::kInt32}) {
    const auto tokens = cli::ParseTokens(bytes, format);
    if (format != TokenFormat::kInt32) NoteOutcome(tokens.status());  // its size says it all
    if (!tokens.ok()) {
      RequireRefusal(tokens.status(), {absl::StatusCode::kInvalidArgument}, 512);
      continue;
    }
    Require(format != TokenFormat::kInt32 || tokens->size() == size / 4, "ids of another number");
    if (format == TokenFormat::kJson) CheckJson(bytes, *tokens);
    Require(tokens->size() <= size, "more ids than bytes");
    // What was read, written out, reads the same.
    std::string text;
    for (const int32_t token : *tokens) text += std::to_string(token) + ",";
    const auto again = cli::ParseTokens(text, TokenFormat::kText);
    Require(again.ok() && *again == *tokens, "ids change when written and read");
  }
  return 0;
}

std::vector<std::string> TokensSeeds() {
  return {"[1, 2, 3]",
          "1 2,3\n4\t5",
          "[]",
          "",
          "[2147483647, -2147483648, 0]",
          "[2147483648]",
          "[18446744073709551615]",
          "[1.5, null]",
          "[1, [2, 3]]",
          "[{\"a\": \"\xc3\xa9\"}]",
          std::string("\1\0\0\0\xff\xff\xff\x7f", 8),
          "4294967296 -1 0x10",
          Nested(kDeep),
          std::string(100'000, '[')};
}

}  // namespace sparsegdn::fuzz
