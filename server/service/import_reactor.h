// One ImportSnapshot call: header, chunks in any order, end.
#ifndef SPARSEGDN_SERVER_SERVICE_IMPORT_REACTOR_H_
#define SPARSEGDN_SERVER_SERVICE_IMPORT_REACTOR_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/service/auth.h"
#include "server/service/call_registry.h"
#include "server/service/context.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::service {

// Reads are answered one at a time on gRPC's threads. The end is not: it hashes, scans and lays out
// the whole snapshot, seconds at worst, and so runs on a worker. An error finishes the call at
// once, and what the client still sends is dropped by the transport. See prefill_reactor.h for the
// rules.
class ImportReactor final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                            public OpenCall,
                            public std::enable_shared_from_this<ImportReactor> {
 public:
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(const ServiceContext& service,
                                                          grpc::CallbackServerContext* context,
                                                          grpc::ByteBuffer* response);

  ImportReactor(const ServiceContext& service, grpc::CallbackServerContext* context,
                grpc::ByteBuffer* response);

  void OnReadDone(bool ok) override;
  void OnCancel() override {}  // the read in flight fails, or the worker sees it
  void OnDone() override;
  void CutIfStalled(std::chrono::steady_clock::time_point now,
                    std::chrono::nanoseconds timeout) override;

 private:
  using SteadyTime = std::chrono::steady_clock::time_point;

  // Takes bytes_ in. `done` becomes true after a good SnapshotEnd.
  absl::Status Take(bool& done);
  absl::Status TakeHeader(const v1::SnapshotHeader& header);
  // After SnapshotEnd, on a worker: checks and keeps the upload, and ends the call.
  void Complete();
  bool IsCancelled();
  void End(const absl::Status& status);

  const ServiceContext service_;
  grpc::ByteBuffer* const response_;
  const std::string request_id_ = NewRequestId();
  const std::string traceparent_;
  const CallDeadline deadline_;
  std::shared_ptr<ImportReactor> self_;  // until OnDone

  // Touched by one read at a time, then by the worker.
  grpc::ByteBuffer bytes_;
  v1::SnapshotFrame frame_;  // parsed from bytes_
  v1::SnapshotRef ref_;
  std::shared_ptr<engine::Engine> engine_;
  Caller caller_;
  std::unique_ptr<engine::SnapshotImport> import_;

  std::mutex context_mutex_;
  grpc::CallbackServerContext* context_;
  bool reading_ = false;
  bool stalled_ = false;
  SteadyTime read_started_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_IMPORT_REACTOR_H_
