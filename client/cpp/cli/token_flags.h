// The token argument shared by prefill and generate.
#ifndef SPARSEGDN_CLIENT_CLI_TOKEN_FLAGS_H_
#define SPARSEGDN_CLIENT_CLI_TOKEN_FLAGS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/flags.h"
#include "cli/tokens.h"

namespace sparsegdn::cli {

inline Flag TokenFormatFlag() {
  return {"format", "NAME",
          "Of TOKENS: auto (default), text, json, or int32 (binary, little endian)."};
}

// The tokens of the one positional argument, or of standard input without one.
inline absl::StatusOr<std::vector<int32_t>> TokensOf(const Args& args) {
  if (args.positional().size() > 1) {
    return UsageError("more than one TOKENS argument: " + args.positional()[1]);
  }
  int format = 0;
  absl::Status status = args.ReadChoice("format", {"auto", "text", "json", "int32"}, &format);
  if (!status.ok()) return status;
  return ReadTokens(args.positional().empty() ? "-" : args.positional()[0],
                    static_cast<TokenFormat>(format));
}

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_TOKEN_FLAGS_H_
