// From flags to a PrefillRequest.
#ifndef SPARSEGDN_CLIENT_CLI_REQUEST_H_
#define SPARSEGDN_CLIENT_CLI_REQUEST_H_

#include "absl/status/status.h"
#include "cli/flags.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::cli {

FlagGroup BudgetFlags();
FlagGroup OutputFlags();
FlagGroup CallFlags();  // snapshot-at, resume-from, keep, priority, request-id, identity

absl::Status ApplyBudget(const Args& args, v1::Budget* budget);
absl::Status ApplyOutputs(const Args& args, int64_t last_position, v1::Outputs* outputs);
absl::Status ApplyCall(const Args& args, v1::PrefillRequest* request);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_REQUEST_H_
