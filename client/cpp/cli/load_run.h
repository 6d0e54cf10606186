// Runs an open-loop plan: every call starts when its time has come, whatever the server does.
#ifndef SPARSEGDN_CLIENT_CLI_LOAD_RUN_H_
#define SPARSEGDN_CLIENT_CLI_LOAD_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/load_plan.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

// One arrival. All times but `queue` are seconds after the intended arrival, so that a call which
// the client itself sent late counts as late (no coordinated omission).
struct CallRecord {
  int64_t length = 0;
  int64_t priority = 0;
  bool dropped = false;                  // by the client: max_outstanding calls were under way
  bool slow = false;                     // read slowly on purpose
  absl::Status status;                   // of the call; says nothing when dropped
  double lag = 0;                        // until the call began
  double first_frame = 0, snapshot = 0;  // of an OK call: first tensor frame, verified snapshot
  double queue = 0;                      // of an OK call, as the server saw it
  double end = 0;                        // seconds after the start of the run
};

struct LoadResult {
  std::vector<CallRecord> calls;  // in order of arrival
  double wall_seconds = 0;        // until the last call ended, at least the planned time
  bool interrupted = false;
};

// Blocks until every call has ended. `call` is what each call starts from; its cancellation (may be
// null) ends the run early. `client` is borrowed and used from up to options.max_outstanding
// threads.
LoadResult RunLoad(client::Client* client, const client::CallOptions& call,
                   const v1::PrefillRequest& base, uint32_t vocab_size, const LoadOptions& options,
                   const std::vector<Arrival>& plan);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_LOAD_RUN_H_
