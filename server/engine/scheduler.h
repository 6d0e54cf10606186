// Who runs next: pure functions over what the engine knows of each request, so that the bounds are
// tested without an engine.
#ifndef SPARSEGDN_SERVER_ENGINE_SCHEDULER_H_
#define SPARSEGDN_SERVER_ENGINE_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sparsegdn::engine {

// A running request counts one priority level higher for each span of steps it was passed over. A
// span is longer than two rounds of everybody, so that plain round-robin ages nobody.
constexpr int64_t AgingSteps(size_t running) { return 8 + 2 * static_cast<int64_t>(running); }
// A waiting request counts one priority level higher for each of these spans it has waited.
inline constexpr int64_t kAgingWaitNs = 5'000'000'000;
// So many others may be admitted past a request that lacks room for its KV or frames; then all wait
// for it. After as many a long request may take the slot that is kept for short ones.
inline constexpr int32_t kMaxBypass = 64;
// From this many slots on, the last free one is kept for requests of a single chunk, so that long
// prompts cannot hold every slot against short ones.
inline constexpr int32_t kSlotsWithReserve = 4;

// Whether `bytes` more may be emitted while `buffered` wait unread: within the bound of all calls,
// or alone.
constexpr bool FramesFit(int64_t buffered, int64_t bytes, int64_t max_buffered) {
  return buffered <= 0 || buffered + bytes <= max_buffered;
}

struct Waiting {
  int32_t priority = 0;
  int64_t arrival_ns = 0;
  uint64_t sequence = 0;       // of arrival
  int64_t tenant_running = 0;  // requests of its tenant that hold a slot
};

// Indices in admission order: priority with aging, then the tenant that runs least, then arrival.
// So a slot that falls free goes to the tenant with the fewest, however many requests another one
// has queued.
std::vector<size_t> AdmissionOrder(std::span<const Waiting> waiting, int64_t now_ns);

struct Runnable {
  int32_t priority = 0;
  bool started = false;   // has run a chunk
  int64_t last_step = 0;  // the step it last ran in, or was admitted before
  int64_t chunk_tokens = 0;
  int64_t remaining_tokens = 0;
  uint64_t sequence = 0;      // of arrival
  int64_t emitted_bytes = 0;  // frames of this chunk
};

struct StepLimits {
  int64_t max_tokens = 0;
  int32_t max_seqs = 0;
  bool started_first = false;
  int64_t buffered_bytes = 0;      // unread frames now
  int64_t max_buffered_bytes = 0;  // the chosen chunks' frames stay below, or one runs alone
};

// Indices of the requests whose next chunk runs in step `step`, each whole. First by priority with
// aging, then those that have not run yet, then the one that ran longest ago (round-robin), then
// the shortest, then arrival. The first in order always fits, but for unread frames that leave no
// room for its own: smaller ones then pass it for one span of AgingSteps, and after that nobody
// runs until readers (or the slow readers' end) have made room. `limits.started_first` turns the
// second rule round; set it after a step in which only new ones ran while others waited
// (NewOnesTookTheStep). So however many long prompts run, a short one that is admitted during a
// step waits for one more at most, unless other new or higher ones fill it, and however many new
// ones come, the long ones get every second step.
std::vector<size_t> PackStep(std::span<const Runnable> running, int64_t step,
                             const StepLimits& limits);
bool NewOnesTookTheStep(std::span<const Runnable> running, std::span<const size_t> chosen);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SCHEDULER_H_
