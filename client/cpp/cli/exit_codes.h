// Exit codes of `sparsegdn`, as --help lists them.
#ifndef SPARSEGDN_CLIENT_CLI_EXIT_CODES_H_
#define SPARSEGDN_CLIENT_CLI_EXIT_CODES_H_

#include "absl/status/status.h"

namespace sparsegdn::cli {

enum ExitCode : int {
  kOk = 0,
  kOther = 1,         // an error of neither kind below
  kUsage = 2,         // the command line or the token input is wrong; nothing was sent
  kRefused = 3,       // the server refused the request; the same request will be refused again
  kTryLater = 4,      // server unavailable or full: try again later
  kDeadline = 5,      // --timeout passed
  kIntegrity = 6,     // what came is not a complete, verified snapshot
  kFile = 7,          // a file cannot be read or written
  kNoBudget = 8,      // calibrate measured, and no budget meets the target
  kInterrupted = 130  // SIGINT or SIGTERM
};

// A status of the wire or of the client library. OK is kOk.
ExitCode ExitCodeOf(const absl::Status& status);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_EXIT_CODES_H_
