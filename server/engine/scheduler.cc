#include "server/engine/scheduler.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace sparsegdn::engine {
namespace {

template <typename Key>
std::vector<size_t> SortedBy(size_t n, Key key) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  return order;
}

}  // namespace

std::vector<size_t> AdmissionOrder(std::span<const Waiting> waiting, int64_t now_ns) {
  return SortedBy(waiting.size(), [&](size_t i) {
    const Waiting& w = waiting[i];
    return std::tuple(-(w.priority + (now_ns - w.arrival_ns) / kAgingWaitNs), w.tenant_running,
                      w.sequence);
  });
}

std::vector<size_t> PackStep(std::span<const Runnable> running, int64_t step,
                             const StepLimits& limits) {
  const int64_t span = AgingSteps(running.size());
  const std::vector<size_t> order = SortedBy(running.size(), [&](size_t i) {
    const Runnable& r = running[i];
    return std::tuple(-(r.priority + (step - r.last_step) / span),
                      r.started != limits.started_first, r.last_step, r.remaining_tokens,
                      r.sequence);
  });
  std::vector<size_t> chosen;
  int64_t tokens = 0;
  int64_t bytes = limits.buffered_bytes;
  for (const size_t i : order) {
    if (static_cast<int64_t>(chosen.size()) >= limits.max_seqs) break;
    const Runnable& r = running[i];
    if (tokens + r.chunk_tokens > limits.max_tokens) continue;
    if (!FramesFit(bytes, r.emitted_bytes, limits.max_buffered_bytes)) {
      if (i == order.front() && step - r.last_step > span) break;
      continue;
    }
    chosen.push_back(i);
    tokens += r.chunk_tokens;
    bytes += r.emitted_bytes;
  }
  return chosen;
}

bool NewOnesTookTheStep(std::span<const Runnable> running, std::span<const size_t> chosen) {
  const auto started = [&](size_t i) { return running[i].started; };
  return !chosen.empty() && std::none_of(chosen.begin(), chosen.end(), started) &&
         std::any_of(running.begin(), running.end(), [](const Runnable& r) { return r.started; });
}

}  // namespace sparsegdn::engine
