// How fast a snapshot reaches a verified client on the same host: shared memory against TCP, and
// against the stream over a Unix socket.
//
// Goal: shared memory at least 3x faster than TCP for 48 MiB of state and 256 MiB of KV. Method:
// one process, one server with both listeners and a scripted engine whose frames are ready, so that
// nothing but the export is measured; the C++ client library as a worker uses it, every checksum
// and the digest checked. Time is from the call to the verified snapshot in the caller's hands. The
// ways alternate, `rounds` times, and their medians are compared. What arrives is compared byte for
// byte once, before timing; a later wrong byte fails its checksum.
//
// usage: sparsegdn-hand-off-bench [rounds] [state_mib] [kv_mib]; prints JSON.
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/service/server.h"
#include "sparsegdn/client/client.h"
#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kStateLayers = 24, kKvLayers = 8;  // Qwen3.5-4B and 9B
constexpr int64_t kRowElements = 4 * 256;        // of a key or value, BF16

struct Load {
  int rounds = 9;
  size_t state_bytes = 48 * kMiB, kv_bytes = 256 * kMiB;
};

// A manifest, its frames of 1 MiB as the engine cuts them, and the digest.
struct Export {
  std::shared_ptr<engine::Manifest> manifest = std::make_shared<engine::Manifest>();
  std::vector<std::string> tensors;
  std::vector<engine::TensorChunk> chunks;
  uint64_t digest = 0;

  void Add(engine::TensorInfo info, size_t bytes) {
    info.bytes = bytes;
    std::string data(bytes, '\0');
    uint64_t x = manifest->tensors.size() + 1;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      std::copy_n(reinterpret_cast<const char*>(&x), 8, data.data() + i);
    }
    const auto tensor = static_cast<uint32_t>(manifest->tensors.size());
    for (size_t at = 0; at < bytes; at += kMiB) {
      const size_t n = std::min(kMiB, bytes - at);
      chunks.push_back(MakeChunk(tensor, at, data.substr(at, n)));
      chunks.back().xxh3_64 = XXH3_64bits(data.data() + at, n);
    }
    manifest->total_bytes += bytes;
    manifest->tensors.push_back(std::move(info));
    tensors.push_back(std::move(data));
  }
};

Export MakeExport(const Load& load) {
  Export out;
  const auto state_elements = static_cast<int64_t>(load.state_bytes / kStateLayers / 4);
  for (int i = 0; i < kStateLayers; ++i) {
    engine::TensorInfo info;
    info.name = "layers." + std::to_string(i) + ".recurrent_state";
    info.layer = i;
    info.shape = {1, 1, state_elements};
    out.Add(info, static_cast<size_t>(state_elements) * 4);
  }
  const auto rows = static_cast<int64_t>(load.kv_bytes / (2 * kKvLayers) / (2 * kRowElements));
  for (int i = 0; i < 2 * kKvLayers; ++i) {
    engine::TensorInfo info;
    info.layer = kStateLayers + i / 2;
    info.kind = i % 2 == 0 ? engine::TensorKind::kKey : engine::TensorKind::kValue;
    info.name = "layers." + std::to_string(info.layer) + (i % 2 == 0 ? ".key" : ".value");
    info.dtype = engine::ExportDType::kBF16;
    info.shape = {rows, 4, 256};
    out.Add(info, static_cast<size_t>(rows * kRowElements) * 2);
  }
  out.manifest->model_identity = std::string(64, 'a');
  out.manifest->position = rows;
  std::string hashes;
  for (const std::string& tensor : out.tensors) {
    const uint64_t hash = XXH3_64bits(tensor.data(), tensor.size());
    hashes.append(reinterpret_cast<const char*>(&hash), 8);  // little endian, as this machine
  }
  out.digest = XXH3_64bits(hashes.data(), hashes.size());
  return out;
}

std::shared_ptr<engine::PrefillCall> Scripted(const Export& data) {
  auto call = std::make_shared<FakeCall>();
  call->Push(engine::Accepted{});
  call->Push(std::shared_ptr<const engine::Manifest>(data.manifest));
  for (const engine::TensorChunk& chunk : data.chunks) call->Push(chunk);
  engine::Result result = MakeResult();
  result.digest = data.digest;
  call->Push(result);
  call->Close(absl::OkStatus());
  return call;
}

struct Way {
  const char* name;
  std::unique_ptr<client::Client> client;
  std::vector<double> seconds;
};

// Seconds of one call; negative when it fails or, with `compare`, when a byte differs.
double Run(client::Client& client, const Export* compare) {
  v1::PrefillRequest request;
  request.add_token_ids(1);
  client::CallOptions options;
  options.timeout = absl::Seconds(60);
  const auto start = std::chrono::steady_clock::now();
  absl::StatusOr<client::PrefillOutcome> outcome = client.Prefill(request, options);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!outcome.ok()) {
    std::fprintf(stderr, "%s\n", outcome.status().ToString().c_str());
    return -1;
  }
  for (int i = 0; compare != nullptr && i < outcome->snapshot.size(); ++i) {
    const auto got = outcome->snapshot.data(i);
    if (!std::equal(got.begin(), got.end(), compare->tensors[i].begin(), compare->tensors[i].end(),
                    [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); })) {
      return -1;
    }
  }
  return seconds;
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

int Measure(const Load& load, const Export& data, std::vector<Way>& ways, const Server& server) {
  for (Way& way : ways) {
    if (Run(*way.client, &data) < 0) return 1;
  }
  for (int round = 0; round < load.rounds; ++round) {
    for (Way& way : ways) {
      // What the last way left to be given back must not run on this one's time.
      std::this_thread::sleep_for(std::chrono::milliseconds(2000));
      way.seconds.push_back(Run(*way.client, nullptr));
      if (way.seconds.back() < 0) return 1;
    }
  }
  const double bytes = static_cast<double>(data.manifest->total_bytes);
  std::printf(
      "{\"commit\": \"%s\", \"cores\": %ld, \"state_bytes\": %zu, \"kv_bytes\": %zu, "
      "\"frame_bytes\": %zu, \"rounds\": %d",
      kServerCommit, sysconf(_SC_NPROCESSORS_ONLN), load.state_bytes, load.kv_bytes, kMiB,
      load.rounds);
  for (const Way& way : ways) {
    std::printf(", \"%s\": {\"median_s\": %.4f, \"p90_s\": %.4f, \"gb_per_s\": %.3f}", way.name,
                Quantile(way.seconds, 0.5), Quantile(way.seconds, 0.9),
                bytes / Quantile(way.seconds, 0.5) * 1e-9);
  }
  const double shared = Quantile(ways[0].seconds, 0.5);
  std::printf(", \"tcp_over_shared\": %.2f, \"unix_over_shared\": %.2f, \"goal\": 3.0}\n",
              Quantile(ways[1].seconds, 0.5) / shared, Quantile(ways[2].seconds, 0.5) / shared);
  return server.port() > 0 ? 0 : 1;
}

int Main(const Load& load) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("sparsegdn-bench-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  ServerConfig config;
  config.listen = "127.0.0.1:0,unix:" + folder + "/grpc.sock";
  config.metrics_listen = "";
  config.shared_memory_linger_seconds = 1;  // segments of 304 MiB would pile up otherwise
  auto server = Server::Start(config);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().ToString().c_str());
    return 1;
  }
  const Export data = MakeExport(load);
  auto engine = std::make_shared<FakeEngine>();
  engine->on_submit = [&](const engine::PrefillRequest&) { return Scripted(data); };
  (*server)->Serve(engine);
  const std::string socket = "unix:" + folder + "/grpc.sock";
  std::vector<Way> ways;
  for (const auto& [name, target, shared] :
       {std::tuple{"shared_memory", socket, true},
        std::tuple{"tcp", "127.0.0.1:" + std::to_string((*server)->port()), false},
        std::tuple{"unix_stream", socket, false}}) {
    client::ConnectOptions options;
    options.target = target;
    options.shared_memory = shared;
    auto client = client::Client::Connect(options);
    if (!client.ok()) return 1;
    ways.push_back({name, *std::move(client), {}});
  }
  const int code = Measure(load, data, ways, **server);
  ways.clear();
  (*server)->Shutdown(std::chrono::milliseconds(100));
  std::filesystem::remove_all(folder);
  return code;
}

}  // namespace
}  // namespace sparsegdn::service

int main(int argc, char** argv) {
  sparsegdn::service::Load load;
  const auto number = [&](int i, size_t standard) {
    return argc > i ? static_cast<size_t>(std::max(1, std::atoi(argv[i]))) : standard;
  };
  load.rounds = static_cast<int>(number(1, 9));
  load.state_bytes = number(2, 48) << 20;
  load.kv_bytes = number(3, 256) << 20;
  return sparsegdn::service::Main(load);
}
