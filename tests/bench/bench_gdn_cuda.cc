// The CUDA half of sparsegdn-bench gdn: events around whole calls, eager and as a graph.
#include <cuda_runtime_api.h>

#include <cmath>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/bench/bench_gdn.h"

namespace sparsegdn::bench {
namespace {

absl::Status Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
}

// Device memory, a stream and two events of one run; freed together.
class Device {
 public:
  ~Device() {
    for (void* p : memory_) cudaFree(p);
    for (cudaEvent_t e : {begin_, end_}) {
      if (e != nullptr) cudaEventDestroy(e);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  absl::Status Init(int device) {
    absl::Status s = Check(cudaSetDevice(device), "set device");
    if (s.ok()) s = Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    if (s.ok()) s = Check(cudaEventCreate(&begin_), "event");
    if (s.ok()) s = Check(cudaEventCreate(&end_), "event");
    return s;
  }
  // A copy of `bytes` from the host, or zeros.
  void* Put(const void* from, size_t bytes) {
    void* p = nullptr;
    status_.Update(Check(cudaMalloc(&p, bytes + 1), "allocate"));
    if (!status_.ok()) return nullptr;
    memory_.push_back(p);
    status_.Update(from == nullptr
                       ? Check(cudaMemset(p, 0, bytes), "clear")
                       : Check(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), "copy in"));
    return p;
  }
  // Milliseconds of what `enqueue` puts on the stream.
  template <typename F>
  absl::StatusOr<double> Time(F enqueue) {
    absl::Status s = Check(cudaEventRecord(begin_, stream_), "event");
    if (s.ok()) s = enqueue();
    if (s.ok()) s = Check(cudaEventRecord(end_, stream_), "event");
    if (s.ok()) s = Check(cudaEventSynchronize(end_), "run");
    float ms = 0.0f;
    if (s.ok()) s = Check(cudaEventElapsedTime(&ms, begin_, end_), "event");
    if (!s.ok()) return s;
    return double{ms};
  }
  cudaStream_t stream() const { return stream_; }
  const absl::Status& status() const { return status_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<void*> memory_;
  absl::Status status_;
};

GdnForwardArgs OnDevice(const Problem& p, size_t workspace_bytes, Device& d) {
  GdnForwardArgs a = p.args;
  a.timings = nullptr;
  a.cu_seqlens = static_cast<int32_t*>(d.Put(p.cu_seqlens.data(), 2 * sizeof(int32_t)));
  a.sequences = static_cast<SequenceParams*>(d.Put(&p.sequence, sizeof(p.sequence)));
  a.q.data = d.Put(p.q.data(), p.q.size());
  a.k.data = d.Put(p.k.data(), p.k.size());
  a.v.data = d.Put(p.v.data(), p.v.size());
  a.o.data = d.Put(nullptr, p.o.size());
  a.log_gate.data = d.Put(p.log_gate.data(), p.log_gate.size() * sizeof(float));
  a.beta.data = d.Put(p.beta.data(), p.beta.size() * sizeof(float));
  a.final_state.data = static_cast<float*>(d.Put(nullptr, p.state.size() * sizeof(float)));
  a.mask_out = static_cast<uint8_t*>(d.Put(nullptr, p.mask.size()));
  a.workspace = d.Put(nullptr, workspace_bytes);
  a.workspace_bytes = workspace_bytes;
  return a;
}

// The call as a graph, replayed `repeats` times.
absl::Status TimeGraph(GdnBackend& backend, const GdnForwardArgs& args, int repeats, Device& d,
                       std::vector<double>& times) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  absl::Status s =
      Check(cudaStreamBeginCapture(d.stream(), cudaStreamCaptureModeThreadLocal), "capture");
  if (s.ok()) s = backend.Forward(args, d.stream());
  s.Update(Check(cudaStreamEndCapture(d.stream(), &graph), "capture"));
  if (s.ok()) s = Check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  for (int i = -1; i < repeats && s.ok(); ++i) {
    const absl::StatusOr<double> ms =
        d.Time([&] { return Check(cudaGraphLaunch(exec, d.stream()), "graph launch"); });
    s = ms.status();
    if (s.ok() && i >= 0) times.push_back(*ms);
  }
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return s;
}

absl::Status CheckResult(const Problem& p, const GdnForwardArgs& args, double& kept) {
  std::vector<float> state(p.state.size());
  std::vector<uint8_t> mask(p.mask.size());
  absl::Status s = Check(cudaMemcpy(state.data(), args.final_state.data,
                                    state.size() * sizeof(float), cudaMemcpyDeviceToHost),
                         "copy out");
  s.Update(Check(cudaMemcpy(mask.data(), args.mask_out, mask.size(), cudaMemcpyDeviceToHost),
                 "copy out"));
  if (!s.ok()) return s;
  for (const float x : state) {
    if (!std::isfinite(x)) return absl::InternalError("the state is not finite");
  }
  int64_t set = 0;
  for (const uint8_t m : mask) set += m;
  kept = static_cast<double>(set) / static_cast<double>(mask.size());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CudaTimes> TimeOnCuda(const Problem& problem, int device, int repeats) {
  auto backend = CreateCudaBackend({.device = device});
  if (!backend.ok()) return backend.status();
  const auto bytes =
      (*backend)->WorkspaceBytes({problem.shape, problem.tokens, 1, 1.0, problem.dtype});
  if (!bytes.ok()) return bytes.status();
  Device d;
  if (absl::Status s = d.Init(device); !s.ok()) return s;
  const GdnForwardArgs args = OnDevice(problem, *bytes, d);
  if (!d.status().ok()) return d.status();
  CudaTimes times;
  for (int i = -2; i < repeats; ++i) {  // the first two are warm-up
    const absl::StatusOr<double> ms = d.Time([&] { return (*backend)->Forward(args, d.stream()); });
    if (!ms.ok()) return ms.status();
    if (i >= 0) times.eager_ms.push_back(*ms);
  }
  absl::Status s = TimeGraph(**backend, args, repeats, d, times.graph_ms);
  if (s.ok()) s = CheckResult(problem, args, times.kept);
  if (!s.ok()) return s;
  return times;
}

}  // namespace sparsegdn::bench
