// The open loop of `sparsegdn bench`.
#ifndef SPARSEGDN_CLIENT_CLI_CMD_LOAD_H_
#define SPARSEGDN_CLIENT_CLI_CMD_LOAD_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/flags.h"
#include "cli/load_plan.h"

namespace sparsegdn::cli {

FlagGroup OpenLoopFlags();  // --rate, whose presence asks for this loop, and what needs it

absl::StatusOr<LoadOptions> ReadLoadOptions(const Args& args);

absl::Status RunOpenLoop(const Args& args);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_CMD_LOAD_H_
