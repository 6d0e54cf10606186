// Greedy decoding through the service: one-token Prefill calls, each resuming from the snapshot
// that the one before kept.
#ifndef SPARSEGDN_CLIENT_CLI_DECODER_H_
#define SPARSEGDN_CLIENT_CLI_DECODER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

// Owns the newest kept snapshot: releases the one before after each call, and the last one on
// destruction unless Keep was called. Not thread-safe.
class Decoder {
 public:
  // `client` is borrowed. `keep` is used by every call.
  Decoder(client::Client* client, client::CallOptions call, v1::Keep keep, std::string tenant);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // Starts from a snapshot that the server holds.
  void Adopt(const std::string& snapshot_id) { snapshot_id_ = snapshot_id; }

  // Runs `request` with keep_snapshot and no tensors, resuming from the current snapshot if any.
  absl::StatusOr<v1::Result> Prefill(v1::PrefillRequest request, const client::CallOptions& call);
  // Runs one token with a dense budget; returns the greedy next one.
  absl::StatusOr<int32_t> Step(int32_t token);

  void Keep() { release_at_end_ = false; }
  const std::string& snapshot_id() const { return snapshot_id_; }

 private:
  client::Client* client_;
  client::CallOptions call_;
  v1::Keep keep_;
  std::string tenant_;
  std::string snapshot_id_;
  bool release_at_end_ = true;
};

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_DECODER_H_
