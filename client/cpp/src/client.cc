#include "sparsegdn/client/client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "sparsegdn/v1/prefill.grpc.pb.h"
#include "src/assembler.h"
#include "src/channel.h"
#include "src/errors.h"
#include "src/restarts.h"
#include "src/shared_mapping.h"
#include "src/xxh.h"

namespace sparsegdn::client {

// Registers a call with a Cancellation for the call's lifetime.
class CancellationScope {
 public:
  CancellationScope(Cancellation* cancellation, grpc::ClientContext* context)
      : cancellation_(cancellation), context_(context) {
    if (cancellation_ == nullptr) return;
    std::lock_guard<std::mutex> lock(cancellation_->mutex_);
    cancellation_->contexts_.push_back(context);
    if (cancellation_->cancelled_) context->TryCancel();
  }
  ~CancellationScope() {
    if (cancellation_ == nullptr) return;
    std::lock_guard<std::mutex> lock(cancellation_->mutex_);
    auto& contexts = cancellation_->contexts_;
    contexts.erase(std::remove(contexts.begin(), contexts.end(), context_), contexts.end());
  }
  CancellationScope(const CancellationScope&) = delete;
  CancellationScope& operator=(const CancellationScope&) = delete;

 private:
  Cancellation* cancellation_;
  grpc::ClientContext* context_;
};

void Cancellation::Cancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = true;
  for (grpc::ClientContext* context : contexts_) context->TryCancel();
}

bool Cancellation::cancelled() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cancelled_;
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr absl::Duration kLongestTimeout = absl::Hours(10 * 365 * 24);
constexpr uint64_t kImportChunkBytes = 1 << 20;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// INVALID_ARGUMENT or FILE_IO when the token cannot be had.
absl::Status Prepare(const ConnectOptions& connect, const CallOptions& options,
                     grpc::ClientContext* context) {
  if (options.timeout.has_value()) {
    // Bounded: an infinite duration added to now would overflow.
    const absl::Duration timeout = std::min(*options.timeout, kLongestTimeout);
    context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout));
  }
  if (!options.traceparent.empty()) context->AddMetadata("traceparent", options.traceparent);
  if (connect.token_file.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> token = ReadToken(connect.token_file);
  if (!token.ok()) return token.status();
  context->AddMetadata("authorization", absl::StrCat("Bearer ", *token));
  return absl::OkStatus();
}

// The events of one Prefill stream, in the order the contract allows.
class StreamState {
 public:
  StreamState(uint64_t max_bytes, bool allow_shared, const CallOptions& options,
              Clock::time_point start)
      : assembler_(max_bytes), allow_shared_(allow_shared), options_(options), start_(start) {}

  absl::Status OnEvent(v1::PrefillResponse* response);
  absl::StatusOr<PrefillOutcome> Finish();

 private:
  void Report();

  Assembler assembler_;
  const bool allow_shared_;
  const CallOptions& options_;
  Clock::time_point start_;
  PrefillProgress progress_;
  std::optional<v1::Result> result_;
  std::optional<double> first_chunk_seconds_;
};

void StreamState::Report() {
  progress_.bytes_done = assembler_.bytes_done();
  progress_.bytes_total = assembler_.bytes_total();
  if (options_.progress) options_.progress(progress_);
}

absl::Status StreamState::OnEvent(v1::PrefillResponse* response) {
  if (result_.has_value()) {
    return DataLoss("EVENT_AFTER_RESULT", "result", "the server sent an event after the result");
  }
  absl::Status status;
  switch (response->event_case()) {
    case v1::PrefillResponse::kAccepted:
      progress_.queue_position = response->accepted().queue_position();
      progress_.queued_tokens = response->accepted().queued_tokens();
      break;
    case v1::PrefillResponse::kProgress:
      progress_.stage = std::max(progress_.stage, PrefillProgress::Stage::kComputing);
      progress_.tokens_done = std::max(progress_.tokens_done, response->progress().tokens_done());
      progress_.tokens_total = response->progress().tokens_total();
      break;
    case v1::PrefillResponse::kManifest:
      status = assembler_.SetManifest(std::move(*response->mutable_manifest()), allow_shared_);
      break;
    case v1::PrefillResponse::kChunk:
      if (!first_chunk_seconds_.has_value()) first_chunk_seconds_ = SecondsSince(start_);
      progress_.stage = PrefillProgress::Stage::kStreaming;
      status = assembler_.Add(response->chunk());
      break;
    case v1::PrefillResponse::kSharedChunks:
      if (!first_chunk_seconds_.has_value()) first_chunk_seconds_ = SecondsSince(start_);
      progress_.stage = PrefillProgress::Stage::kStreaming;
      for (const v1::SharedChunk& chunk : response->shared_chunks().chunks()) {
        if (status.ok()) status = assembler_.Add(chunk);
      }
      break;
    case v1::PrefillResponse::kResult:
      result_ = std::move(*response->mutable_result());
      break;
    default:
      return absl::OkStatus();  // an event kind of a newer server: nothing a snapshot depends on
  }
  if (status.ok()) Report();
  return status;
}

absl::StatusOr<PrefillOutcome> StreamState::Finish() {
  if (!result_.has_value()) {
    return DataLoss("RESULT_MISSING", "result", "the stream ended with OK but without a result");
  }
  absl::StatusOr<Snapshot> snapshot = assembler_.Finish(result_->digest());
  if (!snapshot.ok()) return snapshot.status();
  return PrefillOutcome{*std::move(snapshot), *std::move(result_), first_chunk_seconds_,
                        SecondsSince(start_)};
}

class GrpcClient : public Client {
 public:
  GrpcClient(std::shared_ptr<grpc::Channel> channel, const ConnectOptions& options)
      : stub_(v1::PrefillService::NewStub(channel)),
        connect_(options),
        ask_shared_(options.shared_memory) {}

  absl::StatusOr<PrefillOutcome> Prefill(const v1::PrefillRequest& request,
                                         const CallOptions& options) override {
    return WithRestarts(options, [&](const CallOptions& o) { return PrefillAnyWay(request, o); });
  }
  absl::StatusOr<v1::SnapshotRef> Import(const Snapshot& snapshot, const v1::Keep& keep,
                                         const std::string& tenant,
                                         const CallOptions& options) override;
  absl::Status Release(const std::string& snapshot_id, const std::string& tenant,
                       const CallOptions& options) override;
  absl::StatusOr<v1::ModelInfo> Info(const CallOptions& options) override;

 private:
  absl::StatusOr<PrefillOutcome> PrefillOnce(const v1::PrefillRequest& request,
                                             const CallOptions& options);
  // Through shared memory where that was asked for and works, else through the stream.
  absl::StatusOr<PrefillOutcome> PrefillAnyWay(const v1::PrefillRequest& request,
                                               const CallOptions& options);
  absl::Status FromCall(const grpc::Status& status) const {
    return ExplainTls(FromGrpc(status), connect_.tls.enabled() || connect_.credentials != nullptr);
  }

  std::unique_ptr<v1::PrefillService::Stub> stub_;
  const ConnectOptions connect_;
  std::atomic<bool> ask_shared_;  // false for good once a segment could not be mapped
};

absl::StatusOr<PrefillOutcome> GrpcClient::PrefillAnyWay(const v1::PrefillRequest& request,
                                                         const CallOptions& options) {
  if (ask_shared_ && !request.shared_memory()) {
    v1::PrefillRequest asking = request;
    asking.set_shared_memory(true);
    absl::StatusOr<PrefillOutcome> outcome = PrefillOnce(asking, options);
    if (outcome.ok() || DetailsOf(outcome.status()).reason != kSharedMemoryUnavailable) {
      return outcome;
    }
    ask_shared_ = false;
  }
  return PrefillOnce(request, options);
}

absl::StatusOr<PrefillOutcome> GrpcClient::PrefillOnce(const v1::PrefillRequest& request,
                                                       const CallOptions& options) {
  grpc::ClientContext context;
  if (absl::Status ready = Prepare(connect_, options, &context); !ready.ok()) return ready;
  CancellationScope scope(options.cancellation, &context);
  StreamState state(connect_.max_snapshot_bytes, request.shared_memory(), options, Clock::now());
  auto reader = stub_->Prefill(&context, request);
  v1::PrefillResponse response;
  absl::Status bad;
  while (bad.ok() && reader->Read(&response)) bad = state.OnEvent(&response);
  if (!bad.ok()) {
    // The server must not go on computing for a client that has given up.
    context.TryCancel();
    while (reader->Read(&response)) {
    }
  }
  const grpc::Status end = reader->Finish();
  if (!bad.ok()) return bad;
  if (!end.ok()) return FromCall(end);
  return state.Finish();
}

// The manifest of what an import sends, and where each tensor comes from.
v1::Manifest ImportManifest(const Snapshot& snapshot, const std::vector<int>& tensors) {
  v1::Manifest manifest;
  manifest.set_model_identity(snapshot.manifest().model_identity());
  manifest.set_format_version(snapshot.manifest().format_version());
  manifest.set_position(snapshot.manifest().position());
  uint64_t total = 0;
  for (int tensor : tensors) {
    *manifest.add_tensors() = snapshot.info(tensor);
    total += snapshot.info(tensor).bytes();
  }
  manifest.set_total_bytes(total);
  return manifest;
}

// False when the server has closed the stream: Finish says why.
bool SendTensor(absl::Span<const uint8_t> data, uint32_t index,
                grpc::ClientWriter<v1::SnapshotFrame>* writer) {
  v1::SnapshotFrame frame;
  for (uint64_t offset = 0; offset < data.size(); offset += kImportChunkBytes) {
    const uint64_t size = std::min<uint64_t>(kImportChunkBytes, data.size() - offset);
    v1::TensorChunk* chunk = frame.mutable_chunk();
    chunk->set_tensor(index);
    chunk->set_byte_offset(offset);
    chunk->set_data(data.data() + offset, size);
    chunk->set_xxh3_64(XXH3_64bits(data.data() + offset, size));
    if (!writer->Write(frame)) return false;
  }
  return true;
}

absl::StatusOr<v1::SnapshotRef> GrpcClient::Import(const Snapshot& snapshot, const v1::Keep& keep,
                                                   const std::string& tenant,
                                                   const CallOptions& options) {
  const std::vector<int> tensors = ImportableTensors(snapshot.manifest());
  grpc::ClientContext context;
  if (absl::Status ready = Prepare(connect_, options, &context); !ready.ok()) return ready;
  CancellationScope scope(options.cancellation, &context);
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(&context, &ref);
  v1::SnapshotFrame frame;
  v1::SnapshotHeader* header = frame.mutable_header();
  *header->mutable_manifest() = ImportManifest(snapshot, tensors);
  *header->mutable_keep() = keep;
  header->set_tenant(tenant);
  bool open = writer->Write(frame);
  std::vector<uint64_t> hashes;
  for (uint32_t i = 0; open && i < tensors.size(); ++i) {
    open = SendTensor(snapshot.data(tensors[i]), i, writer.get());
    hashes.push_back(snapshot.hash(tensors[i]));
  }
  if (open) {
    v1::SnapshotFrame end;
    end.mutable_end()->set_digest(DigestOf(hashes));
    open = writer->Write(end);
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (!status.ok()) return FromCall(status);
  if (!open) return absl::InternalError("the server accepted the snapshot before its end");
  return ref;
}

absl::Status GrpcClient::Release(const std::string& snapshot_id, const std::string& tenant,
                                 const CallOptions& options) {
  grpc::ClientContext context;
  if (absl::Status ready = Prepare(connect_, options, &context); !ready.ok()) return ready;
  CancellationScope scope(options.cancellation, &context);
  v1::ReleaseSnapshotRequest request;
  request.set_snapshot_id(snapshot_id);
  request.set_tenant(tenant);
  v1::ReleaseSnapshotResponse response;
  return FromCall(stub_->ReleaseSnapshot(&context, request, &response));
}

absl::StatusOr<v1::ModelInfo> GrpcClient::Info(const CallOptions& options) {
  grpc::ClientContext context;
  if (absl::Status ready = Prepare(connect_, options, &context); !ready.ok()) return ready;
  CancellationScope scope(options.cancellation, &context);
  v1::ModelInfo info;
  const grpc::Status status = stub_->GetModelInfo(&context, v1::GetModelInfoRequest(), &info);
  if (!status.ok()) return FromCall(status);
  return info;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ConnectOptions& options) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(options);
  if (!channel.ok()) return channel.status();
  return std::make_unique<GrpcClient>(*std::move(channel), options);
}

absl::StatusOr<v1::ModelInfo> Client::WaitUntilReady(absl::Duration limit,
                                                     const CallOptions& options) {
  const absl::Time end = absl::Now() + limit;
  while (true) {
    CallOptions attempt = options;
    const absl::Duration left = end - absl::Now();
    attempt.timeout = std::clamp(left, absl::Milliseconds(200), absl::Seconds(5));
    absl::StatusOr<v1::ModelInfo> info = Info(attempt);
    const bool again =
        absl::IsUnavailable(info.status()) || absl::IsDeadlineExceeded(info.status());
    if (!again || absl::Now() >= end) return info;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace sparsegdn::client
