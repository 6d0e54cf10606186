#include "cli/tokens.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cli/flags.h"
#include "src/errors.h"

namespace sparsegdn::cli {
namespace {

constexpr int64_t kMaxToken = std::numeric_limits<int32_t>::max();

// For a message. A list or an object is named only: printing it recurses as deep as it is nested.
std::string Shown(const nlohmann::json& item) {
  if (item.is_structured()) return item.type_name();
  return item.dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 40);
}

absl::StatusOr<std::vector<int32_t>> ParseText(const std::string& bytes) {
  std::vector<int32_t> tokens;
  constexpr char kSeparators[] = " \t\r\n\v\f,";
  size_t begin = bytes.find_first_not_of(kSeparators);
  while (begin != std::string::npos) {
    const size_t end = std::min(bytes.find_first_of(kSeparators, begin), bytes.size());
    const std::string word = bytes.substr(begin, end - begin);
    int32_t token = 0;
    if (!absl::SimpleAtoi(word, &token)) {
      return UsageError(absl::StrCat("token ", tokens.size(), " is \"",
                                     absl::CHexEscape(word.substr(0, 40)),
                                     "\", must be a 32-bit integer"));
    }
    tokens.push_back(token);
    begin = bytes.find_first_not_of(kSeparators, end);
  }
  return tokens;
}

absl::StatusOr<std::vector<int32_t>> ParseJson(const std::string& bytes) {
  const nlohmann::json list = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (!list.is_array()) return UsageError("the token input is not a JSON list");
  std::vector<int32_t> tokens;
  for (const nlohmann::json& item : list) {
    // A number above int64 is unsigned here and would turn negative.
    const bool in_range = item.is_number_integer() &&
                          !(item.is_number_unsigned() && item.get<uint64_t>() > kMaxToken) &&
                          item.get<int64_t>() >= std::numeric_limits<int32_t>::min() &&
                          item.get<int64_t>() <= kMaxToken;
    if (!in_range) {
      return UsageError(
          absl::StrCat("token ", tokens.size(), " is ", Shown(item), ", must be a 32-bit integer"));
    }
    tokens.push_back(item.get<int32_t>());
  }
  return tokens;
}

absl::StatusOr<std::vector<int32_t>> ParseInt32(const std::string& bytes) {
  if (bytes.size() % 4 != 0) {
    return UsageError(absl::StrCat("the token input has ", bytes.size(),
                                   " bytes, must be a multiple of 4 with --format int32"));
  }
  std::vector<int32_t> tokens;
  tokens.reserve(bytes.size() / 4);
  for (size_t i = 0; i < bytes.size(); i += 4) {
    uint32_t value = 0;
    for (int b = 3; b >= 0; --b) value = value << 8 | static_cast<unsigned char>(bytes[i + b]);
    tokens.push_back(static_cast<int32_t>(value));
  }
  return tokens;
}

// Far more than any prompt as text: an endless input (/dev/zero) ends here, not with the memory.
constexpr size_t kMaxInputBytes = size_t{256} << 20;

}  // namespace

absl::StatusOr<std::string> ReadInput(const std::string& path) {
  if (path == "-" && isatty(STDIN_FILENO) == 1) {
    std::fprintf(stderr, "reading token ids from the terminal, end with Ctrl-D\n");
  }
  std::FILE* file = path == "-" ? stdin : std::fopen(path.c_str(), "rb");
  if (file == nullptr) return client::FileError("read", path, errno);
  std::string bytes;
  char block[1 << 16];
  size_t got = 0;
  while (bytes.size() <= kMaxInputBytes && (got = std::fread(block, 1, sizeof(block), file)) > 0) {
    bytes.append(block, got);
  }
  const int error = std::ferror(file) ? (errno != 0 ? errno : EIO) : 0;
  if (file != stdin) std::fclose(file);
  if (error != 0 && path == "-") {
    const char* closed = error == EBADF ? ", which is closed" : "";
    return client::FileError("read", absl::StrCat("standard input", closed), error);
  }
  if (error != 0) return client::FileError("read", path, error);
  if (bytes.size() > kMaxInputBytes) {
    return UsageError(absl::StrCat("the token input ", path, " has more than ", kMaxInputBytes,
                                   " bytes, must be a list of token ids"));
  }
  return bytes;
}

absl::StatusOr<std::vector<int32_t>> ParseTokens(const std::string& bytes, TokenFormat format) {
  if (format == TokenFormat::kAuto) {
    const size_t first = bytes.find_first_not_of(" \t\r\n");
    format =
        first != std::string::npos && bytes[first] == '[' ? TokenFormat::kJson : TokenFormat::kText;
  }
  switch (format) {
    case TokenFormat::kJson:
      return ParseJson(bytes);
    case TokenFormat::kInt32:
      return ParseInt32(bytes);
    default:
      return ParseText(bytes);
  }
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(const std::string& path, TokenFormat format) {
  absl::StatusOr<std::string> bytes = ReadInput(path);
  if (!bytes.ok()) return bytes.status();
  return ParseTokens(*bytes, format);
}

}  // namespace sparsegdn::cli
