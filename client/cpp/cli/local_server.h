// A server of this command's own, on a free loopback port, for as long as the object lives.
#ifndef SPARSEGDN_CLIENT_CLI_LOCAL_SERVER_H_
#define SPARSEGDN_CLIENT_CLI_LOCAL_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

struct LocalServerOptions {
  std::string binary;              // a path, or a name to be found in $PATH
  std::string model;               // folder
  std::vector<std::string> flags;  // after the ones that Start sets
  // Text of a budget profile (docs/quality.md), or empty: layers alike, whatever lies beside the
  // model.
  std::string profile;
};

// "sparsegdn-server" beside this executable where it is there, else the bare name.
std::string DefaultServerBinary();

class LocalServer {
 public:
  // Waits until the model is loaded. FAILED_PRECONDITION (SERVER_ENDED) with the end of its log
  // when the server does not come up, FILE_IO, CANCELLED once `cancellation` fires.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(const LocalServerOptions& options,
                                                            client::Cancellation* cancellation);
  ~LocalServer();  // SIGTERM, waits for the end, removes the folder
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  client::Client& client() { return *client_; }

 private:
  LocalServer() = default;
  absl::Status Launch(const LocalServerOptions& options);
  absl::Status Connect(client::Cancellation* cancellation);
  // True once the process has ended; it is not waited for again.
  bool Ended();
  absl::Status EndedEarly() const;

  std::string folder_;  // port file, profile and log
  pid_t pid_ = -1;
  std::unique_ptr<client::Client> client_;
};

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_LOCAL_SERVER_H_
