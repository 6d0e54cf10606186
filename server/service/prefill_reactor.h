// One Prefill call: pulls events from the engine's call and writes them, one at a time.
//
// Threads: gRPC calls OnWriteDone, OnCancel and OnDone on its own threads, the engine calls the
// ready callback on its executor thread, the registry calls CutIfStalled on its own. No reactor
// method blocks, and every path ends in exactly one Finish, because a call without one keeps
// Server::Shutdown from returning.
//
// With shared-memory hand-off the work of Pump (making the segment, copying into it) is done on a
// worker.
//
// A reader that takes nothing for too long: the call gives up what it holds in the engine and is
// finished behind the write in flight, so that a client that reads on learns why; one that still
// takes nothing for as long again loses the stream.
//
// Backpressure: an event is taken from the engine only when the transport has taken the last one,
// so what a slow client leaves unread stays in the engine, where it is bounded and pauses the call.
#ifndef SPARSEGDN_SERVER_SERVICE_PREFILL_REACTOR_H_
#define SPARSEGDN_SERVER_SERVICE_PREFILL_REACTOR_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/service/call_registry.h"
#include "server/service/context.h"
#include "server/service/shared_hand_off.h"

namespace sparsegdn::service {

class PrefillReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                             public OpenCall,
                             public std::enable_shared_from_this<PrefillReactor> {
 public:
  // Validates, submits, and starts to stream; a refusal is a call that is finished at once. The
  // reactor owns itself until OnDone. `request` is read before this returns.
  static grpc::ServerWriteReactor<grpc::ByteBuffer>* Start(const ServiceContext& service,
                                                           grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer& request);

  PrefillReactor(const ServiceContext& service, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void CutIfStalled(std::chrono::steady_clock::time_point now,
                    std::chrono::nanoseconds timeout) override;

 private:
  using SteadyTime = std::chrono::steady_clock::time_point;

  // The call, or why it was refused.
  absl::StatusOr<std::shared_ptr<engine::PrefillCall>> Submit(const grpc::ByteBuffer& request);
  // Has Pump run, here or on a worker.
  void Wake();
  // Writes the next event or finishes, unless a write is in flight.
  void Pump();
  // The message of an event; with hand-off its bytes are put in their place first.
  absl::StatusOr<grpc::ByteBuffer> Encode(const engine::Event& event);
  absl::StatusOr<grpc::ByteBuffer> EncodeShared(const engine::TensorChunk& first);
  void NoteLocked(const engine::Event& event);
  void End(const absl::Status& status);
  // Tells the engine that nobody reads any more; the status to end with.
  absl::Status AbandonLocked();

  const ServiceContext service_;
  const SteadyTime started_ = std::chrono::steady_clock::now();
  std::string traceparent_, request_id_;
  std::string peer_;
  int64_t prompt_tokens_ = 0;
  const CallDeadline deadline_;
  bool wants_shared_ = false;             // asked for, over a Unix-domain socket; set by Submit
  std::shared_ptr<PrefillReactor> self_;  // until OnDone

  std::mutex mutex_;
  std::shared_ptr<engine::PrefillCall> call_;
  bool writing_ = false;
  bool ended_ = false;      // Finish was called, or the caller is about to
  bool cancelled_ = false;  // the client is gone or its deadline passed
  bool stalled_ = false;    // cut by the registry
  bool in_flight_ = false;  // StartWrite of the current write has returned
  uint64_t writes_ = 0;     // begun
  SteadyTime write_started_;
  std::optional<SteadyTime> first_frame_;
  std::optional<engine::Result> result_;  // for the log line
  int64_t bytes_written_ = 0;

  grpc::ByteBuffer buffer_;  // of the write in flight
  int64_t write_bytes_ = 0;  // its length
  bool pump_queued_ = false;

  // Touched by whoever set writing_ or ended_.
  std::unique_ptr<SharedHandOff> hand_off_;
  std::optional<engine::Event> next_event_;  // taken behind the chunks of one message

  // Keeps the context alive while CutIfStalled uses it; never held together with mutex_.
  std::mutex context_mutex_;
  grpc::CallbackServerContext* context_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_PREFILL_REACTOR_H_
