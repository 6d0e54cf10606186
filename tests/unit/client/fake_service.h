// A prefill service on a loopback port whose answers a test scripts, and one good answer to break.
#ifndef SPARSEGDN_TESTS_UNIT_CLIENT_FAKE_SERVICE_H_
#define SPARSEGDN_TESTS_UNIT_CLIENT_FAKE_SERVICE_H_

#include <grpcpp/grpcpp.h>
#include <xxhash.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sparsegdn/client/client.h"
#include "sparsegdn/client/snapshot.h"
#include "sparsegdn/v1/prefill.grpc.pb.h"

namespace sparsegdn::client::testing {

using Events = std::vector<v1::PrefillResponse>;

class FakeService : public v1::PrefillService::Service {
 public:
  using Writer = grpc::ServerWriter<v1::PrefillResponse>;
  std::function<grpc::Status(grpc::ServerContext*, const v1::PrefillRequest&, Writer*)> on_prefill;
  std::function<grpc::Status(const std::vector<v1::SnapshotFrame>&, v1::SnapshotRef*)> on_import;
  std::function<grpc::Status(const v1::ReleaseSnapshotRequest&)> on_release;
  std::function<grpc::Status(v1::ModelInfo*)> on_info;

  grpc::Status Prefill(grpc::ServerContext* context, const v1::PrefillRequest* request,
                       Writer* writer) override {
    return on_prefill(context, *request, writer);
  }
  grpc::Status ImportSnapshot(grpc::ServerContext*, grpc::ServerReader<v1::SnapshotFrame>* reader,
                              v1::SnapshotRef* ref) override {
    std::vector<v1::SnapshotFrame> frames;
    v1::SnapshotFrame frame;
    while (reader->Read(&frame)) frames.push_back(frame);
    return on_import(frames, ref);
  }
  grpc::Status ReleaseSnapshot(grpc::ServerContext*, const v1::ReleaseSnapshotRequest* request,
                               v1::ReleaseSnapshotResponse*) override {
    return on_release(*request);
  }
  grpc::Status GetModelInfo(grpc::ServerContext*, const v1::GetModelInfoRequest*,
                            v1::ModelInfo* info) override {
    return on_info(info);
  }
};

class FakeServer {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    // Port 0 with SO_REUSEPORT may name a port that a test run in parallel listens on already.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(-1);
    builder.RegisterService(&service);
    server_ = builder.BuildAndStart();
    target = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

  std::unique_ptr<Client> Connect(uint64_t max_snapshot_bytes = 1 << 20) const {
    ConnectOptions options;
    options.target = target;
    options.max_snapshot_bytes = max_snapshot_bytes;
    return *Client::Connect(options);
  }

  FakeService service;
  std::string target;

 private:
  std::unique_ptr<grpc::Server> server_;
};

inline v1::TensorInfo* AddTensor(v1::Manifest* manifest, const std::string& name,
                                 v1::TensorKind kind, v1::DType dtype,
                                 const std::vector<int64_t>& shape) {
  v1::TensorInfo* info = manifest->add_tensors();
  info->set_name(name);
  info->set_kind(kind);
  info->set_layer(0);
  info->set_dtype(dtype);
  uint64_t bytes = DTypeBytes(dtype);
  for (int64_t dim : shape) {
    info->add_shape(dim);
    bytes *= static_cast<uint64_t>(dim);
  }
  info->set_bytes(bytes);
  manifest->set_total_bytes(manifest->total_bytes() + bytes);
  return info;
}

// Six tensors: every storage size, an odd one before a wide one, one without bytes, a checkpoint.
inline v1::Manifest GoodManifest() {
  v1::Manifest m;
  m.set_model_identity(std::string(64, 'a'));
  m.set_format_version(1);
  m.set_position(7);
  auto* fp8 = AddTensor(&m, "layers.0.recurrent_state", v1::TENSOR_KIND_RECURRENT_STATE,
                        v1::DTYPE_FP8_E4M3, {1, 3, 5});
  fp8->set_state_layout(v1::STATE_LAYOUT_VALUE_MAJOR);
  fp8->set_position(7);
  auto* scale = AddTensor(&m, "layers.0.recurrent_state_scale",
                          v1::TENSOR_KIND_RECURRENT_STATE_SCALE, v1::DTYPE_FP32, {1, 3});
  scale->set_position(7);
  auto* conv =
      AddTensor(&m, "layers.0.conv_state", v1::TENSOR_KIND_CONV_STATE, v1::DTYPE_BF16, {9, 3});
  conv->set_conv_layout(v1::CONV_LAYOUT_THREE_COLUMNS);
  conv->set_position(7);
  AddTensor(&m, "layers.3.key", v1::TENSOR_KIND_KEY, v1::DTYPE_FP32, {7, 2, 64})->set_layer(3);
  AddTensor(&m, "layers.3.value", v1::TENSOR_KIND_VALUE, v1::DTYPE_FP32, {0, 2, 64})->set_layer(3);
  auto* old = AddTensor(&m, "checkpoints.4.layers.0.recurrent_state",
                        v1::TENSOR_KIND_RECURRENT_STATE, v1::DTYPE_FP32, {1, 5, 3});
  old->set_state_layout(v1::STATE_LAYOUT_KEY_MAJOR);
  old->set_position(4);
  return m;
}

// Deterministic bytes of tensor `index`.
inline std::string GoodBytes(const v1::Manifest& manifest, int index) {
  std::string bytes(manifest.tensors(index).bytes(), '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 + index * 17 + 5);
  return bytes;
}

inline void SetData(v1::TensorChunk* chunk, const std::string& data) {
  chunk->set_data(data);
  chunk->set_xxh3_64(XXH3_64bits(data.data(), data.size()));
}

inline uint64_t GoodDigest(const v1::Manifest& manifest) {
  std::vector<uint64_t> hashes;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const std::string bytes = GoodBytes(manifest, i);
    hashes.push_back(XXH3_64bits(bytes.data(), bytes.size()));
  }
  return DigestOf(hashes);
}

// Accepted, Progress, Manifest, chunks of at most 100 bytes in reverse order with the tensors
// mixed, Result. Indices: 0, 1, 2, then chunks, the last is the result.
inline Events GoodEvents() {
  const v1::Manifest manifest = GoodManifest();
  Events events(3);
  events[0].mutable_accepted()->set_queue_position(3);
  events[1].mutable_progress()->set_tokens_total(7);
  *events[2].mutable_manifest() = manifest;
  Events chunks;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const std::string bytes = GoodBytes(manifest, i);
    for (size_t offset = 0; offset < bytes.size(); offset += 100) {
      v1::PrefillResponse event;
      event.mutable_chunk()->set_tensor(i);
      event.mutable_chunk()->set_byte_offset(offset);
      SetData(event.mutable_chunk(), bytes.substr(offset, 100));
      chunks.push_back(event);
    }
  }
  events.insert(events.end(), chunks.rbegin(), chunks.rend());
  v1::PrefillResponse end;
  v1::Result* result = end.mutable_result();
  result->set_digest(GoodDigest(manifest));
  result->mutable_effective_budget()->set_mode(v1::BUDGET_MODE_RETENTION);
  result->mutable_effective_budget()->set_retention(0.29);
  result->mutable_usage()->set_computed_tokens(7);
  result->set_next_token(42);
  result->set_snapshot_position(7);
  events.push_back(end);
  return events;
}

inline grpc::Status Send(const Events& events, FakeService::Writer* writer,
                         grpc::Status status = grpc::Status::OK) {
  for (const v1::PrefillResponse& event : events) writer->Write(event);
  return status;
}

}  // namespace sparsegdn::client::testing

#endif  // SPARSEGDN_TESTS_UNIT_CLIENT_FAKE_SERVICE_H_
