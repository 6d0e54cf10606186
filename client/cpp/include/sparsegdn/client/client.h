// Client of the SparseGDN prefill service: a prompt goes in, a verified snapshot comes out.
//
//   auto client = Client::Connect({.target = "prefill.example:50051"});
//   v1::PrefillRequest request;
//   request.mutable_token_ids()->Add(ids.begin(), ids.end());
//   auto outcome = (*client)->Prefill(request);
//   if (outcome.ok()) WriteSnapshotFile("prompt.safetensors", outcome->snapshot, &outcome->result);
#ifndef SPARSEGDN_CLIENT_CLIENT_H_
#define SPARSEGDN_CLIENT_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "sparsegdn/client/snapshot.h"
#include "sparsegdn/client/status.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace grpc {
class ChannelCredentials;
class ClientContext;
}  // namespace grpc

namespace sparsegdn::client {

// Files are PEM. They are looked at again every ten seconds, so a rotated certificate is taken
// without a restart (by new connections).
struct TlsOptions {
  bool on = false;             // also without any file: the system's authorities
  std::string ca_file = {};    // authorities that may have signed the server's certificate
  std::string cert_file = {};  // this client's, for servers that ask for one; needs ca_file
  std::string key_file = {};
  std::string server_name = {};  // the certificate's name, where it is not the target's
  bool enabled() const { return on || !ca_file.empty() || !cert_file.empty(); }
};

struct ConnectOptions {
  // "host:port" (resolved as dns:///host:port, so that every address is used), any gRPC URI, or
  // "address:port,address:port,...": round_robin over a static list, watching each one's health.
  std::string target = {};
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;  // wins over `tls`
  TlsOptions tls = {};
  // Holds the bearer token that each call brings; read for each call. Empty: none. Refused for
  // plain text to another machine unless allow_plain_text_token.
  std::string token_file = {};
  bool allow_plain_text_token = false;
  // Ask for same-host hand-off: on a unix: target the tensors come in shared memory and are used
  // where they are. A server that has no room, or whose memory this process cannot see, streams.
  bool shared_memory = false;
  int max_receive_message_bytes = 64 << 20;
  // Prefill, ImportSnapshot and Release: a call that ends with UNAVAILABLE before its first answer
  // (connection failed, server loading or draining) is sent again after 0.1 to 1 s, up to this many
  // times in all; over several addresses the next attempt goes to another one. 1 to 5, gRPC's
  // limit.
  int max_attempts = 4;
  // Only a call whose request fits is sent again: gRPC's own default, 256 KiB, is a prompt of 64K
  // tokens.
  int64_t retry_buffer_bytes = 64 << 20;
  // Bound on Manifest.total_bytes, whatever a server claims.
  uint64_t max_snapshot_bytes = uint64_t{64} << 30;
};

// Where a call stands. All counters only grow.
struct PrefillProgress {
  enum class Stage { kQueued, kComputing, kStreaming };
  Stage stage = Stage::kQueued;
  uint32_t queue_position = 0;
  int64_t queued_tokens = 0;
  int64_t tokens_done = 0, tokens_total = 0;
  uint64_t bytes_done = 0, bytes_total = 0;
};

// Cancels the calls it is given to, from any thread, before or while they run. Reusable only as
// "cancelled for good". Thread-safe; outlives the calls that use it.
class Cancellation {
 public:
  void Cancel();
  bool cancelled() const;

 private:
  friend class CancellationScope;
  mutable std::mutex mutex_;
  bool cancelled_ = false;
  std::vector<grpc::ClientContext*> contexts_;
};

struct CallOptions {
  std::optional<absl::Duration> timeout;  // DEADLINE_EXCEEDED after it; carried to the server
  Cancellation* cancellation = nullptr;   // borrowed; CANCELLED once it fires
  std::string traceparent;                // W3C trace context, sent as metadata when not empty
  // Prefill only: a call that ends with UNAVAILABLE even after its answer began (the server died or
  // was stopped) runs again from its start, so often at most. The counters of `progress` start
  // anew.
  int restarts = 0;
  // Prefill only: runs on the calling thread, between messages; may call Cancellation::Cancel.
  std::function<void(const PrefillProgress&)> progress;
};

struct PrefillOutcome {
  Snapshot snapshot;
  v1::Result result;
  // Seconds from the start of the call as this process saw it; first chunk absent when none came.
  std::optional<double> first_chunk_seconds;
  double total_seconds = 0;
};

// Thread-safe; calls may run concurrently and block their caller.
class Client {
 public:
  // INVALID_ARGUMENT for an empty target or options that contradict each other, FILE_IO for a
  // certificate or token file that cannot be read. Does not wait for the server.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ConnectOptions& options);
  virtual ~Client() = default;

  // A complete snapshot, or an error, never something in between: each chunk's XXH3-64, each byte
  // of each tensor exactly once, the digest over whole-tensor hashes, then Result, then OK. Errors:
  // the server's, or those of DetailsOf above.
  virtual absl::StatusOr<PrefillOutcome> Prefill(const v1::PrefillRequest& request,
                                                 const CallOptions& options = {}) = 0;

  // Uploads the importable tensors of `snapshot` (ImportableTensors), so that Prefill can resume
  // from the id in the answer.
  virtual absl::StatusOr<v1::SnapshotRef> Import(const Snapshot& snapshot, const v1::Keep& keep,
                                                 const std::string& tenant = "",
                                                 const CallOptions& options = {}) = 0;

  // NOT_FOUND when the server does not hold it.
  virtual absl::Status Release(const std::string& snapshot_id, const std::string& tenant = "",
                               const CallOptions& options = {}) = 0;

  // UNAVAILABLE while the server loads.
  virtual absl::StatusOr<v1::ModelInfo> Info(const CallOptions& options = {}) = 0;

  // Info, asked again while the answer is UNAVAILABLE, for at most `limit`.
  absl::StatusOr<v1::ModelInfo> WaitUntilReady(absl::Duration limit,
                                               const CallOptions& options = {});
};

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_CLIENT_H_
