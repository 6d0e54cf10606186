// One call inside the engine, from the queue to its result.
#ifndef SPARSEGDN_SERVER_ENGINE_REQUEST_H_
#define SPARSEGDN_SERVER_ENGINE_REQUEST_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/engine/event_stream.h"
#include "server/engine/plan.h"
#include "server/engine/prefix_cache.h"
#include "server/engine/prefix_recorder.h"
#include "server/engine/snapshot_builder.h"
#include "server/engine/snapshot_checker.h"
#include "server/engine/snapshot_table.h"

namespace sparsegdn::engine {

// Owned by the queue, then by the executor; never shared.
struct Request {
  Request(RequestPlan p, std::shared_ptr<EventStream> s)
      : plan(std::move(p)), stream(std::move(s)), start_position(plan.first_position) {}

  RequestPlan plan;
  std::shared_ptr<EventStream> stream;
  std::unique_ptr<SnapshotBuilder> builder;                 // from admission on; refers to plan
  std::unique_ptr<SnapshotTable::Reservation> reservation;  // with keep_snapshot
  std::shared_ptr<SnapshotCheck> base_check;                // with resume_from, from the queue on

  int64_t start_position;                    // what is before it came from a snapshot or a prefix
  std::shared_ptr<PrefixLookup> prefix;      // null: nothing to reuse or to store
  std::unique_ptr<PrefixRecorder> recorder;  // of the chunk that runs
  int64_t replayed = 0;                      // windows of the prefix that the stream has
  // Tokens that the model runs for it, in all and from now on.
  int64_t tokens_to_run() const { return plan.end_position - start_position; }
  int64_t tokens_left() const { return plan.end_position - position; }
  bool replaying() const { return prefix && replayed < std::ssize(prefix->entries()); }

  uint64_t sequence = 0;  // of arrival
  int64_t queued_bytes = 0;
  int64_t arrival_ns = 0;
  bool admitted = false;
  int64_t admitted_ns = 0;  // once admitted
  int64_t paused_ns = -1;   // since when its unread frames stop it; -1: they do not
  int32_t bypassed = 0;     // admissions past it
  int32_t slot = -1;
  bool first_frame_seen = false;

  int64_t position = 0;  // tokens the slot has seen
  int64_t last_step = 0;
  bool started = false;
  int64_t computed_tokens = 0;
  std::vector<int64_t> selected;  // [linear layers * Hk], summed over chunks
  double selection_ns = 0, gdn_core_ns = 0;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_REQUEST_H_
