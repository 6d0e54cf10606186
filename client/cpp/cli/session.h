// What every command shares: the connection, its options, Ctrl-C, and how errors are told.
#ifndef SPARSEGDN_CLIENT_CLI_SESSION_H_
#define SPARSEGDN_CLIENT_CLI_SESSION_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/flags.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

FlagGroup SessionFlags();  // server, timeout, wait, tenant, json, quiet

// Fires on SIGINT or SIGTERM once WatchSignals has run; a second signal ends the process.
client::Cancellation& Interrupt();
// Once, before any other thread exists: blocks the two signals and starts the thread that waits for
// them.
void WatchSignals();
// Makes SIGPIPE and SIGXFSZ plain write errors.
void IgnoreWriteSignals();

struct Session {
  std::unique_ptr<client::Client> client;
  client::CallOptions call;  // timeout and cancellation; the timeout is per call
  std::string tenant;
  bool json = false;
  bool quiet = false;

  // Connects, and with --wait asks until the server is ready.
  static absl::StatusOr<Session> Open(const Args& args);
};

// "error: ..." with field, reason and retry delay on stderr.
void PrintError(const absl::Status& status);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_SESSION_H_
