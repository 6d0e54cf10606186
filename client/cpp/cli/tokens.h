// Token ids from a file or standard input.
#ifndef SPARSEGDN_CLIENT_CLI_TOKENS_H_
#define SPARSEGDN_CLIENT_CLI_TOKENS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sparsegdn::cli {

enum class TokenFormat { kAuto, kText, kJson, kInt32 };

// kText: integers separated by white space or commas. kJson: one flat list. kInt32: little-endian
// binary. kAuto: JSON when the first character is '[', else text. An error names the position of
// the first bad token.
absl::StatusOr<std::vector<int32_t>> ParseTokens(const std::string& bytes, TokenFormat format);

// The bytes of a file, or of standard input for "-". FILE_IO when it cannot be read, a usage error
// above 256 MiB.
absl::StatusOr<std::string> ReadInput(const std::string& path);

// As ReadInput. FILE_IO when it cannot be read; a usage error when it holds
// something else.
absl::StatusOr<std::vector<int32_t>> ReadTokens(const std::string& path, TokenFormat format);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_TOKENS_H_
