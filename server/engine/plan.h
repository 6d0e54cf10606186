// What one request will do, decided before it queues: where it runs to, how it is cut, which
// tensors it returns and how many bytes each part emits. A function of the request, the resolved
// budget and the model alone, never of other requests.
#ifndef SPARSEGDN_SERVER_ENGINE_PLAN_H_
#define SPARSEGDN_SERVER_ENGINE_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/layout.h"
#include "server/engine/snapshot.h"
#include "server/engine/types.h"

namespace sparsegdn::engine {

// Tensors of all checkpoints together; more would not leave the manifest within a 4 MB message.
inline constexpr int64_t kMaxCheckpointTensors = 16384;

// Tensor ids of one layer's states or KV, -1 where not returned.
struct LayerTensors {
  int32_t recurrent = -1, scale = -1, conv = -1, key = -1, value = -1;
};

struct RequestPlan {
  PrefillRequest request;
  Budget budget;                         // effective
  std::shared_ptr<const Snapshot> base;  // of resume_from, null otherwise; dropped once loaded
  int64_t first_position = 0;
  int64_t prompt_tokens = 0;      // N
  int64_t snapshot_position = 0;  // N - 1 or N
  int64_t end_position = 0;       // one more than the last token that runs
  int64_t chunk_tokens = 0;
  uint32_t ttl_seconds = 0;            // of the kept snapshot
  std::vector<int64_t> runner_logits;  // ascending: asked positions and N - 1 for next_token

  std::shared_ptr<const Manifest> manifest;
  std::vector<LayerTensors> final_tensors;                    // by model layer
  std::vector<int64_t> checkpoints;                           // ascending positions
  std::vector<std::vector<LayerTensors>> checkpoint_tensors;  // [checkpoints][model layer]
  int32_t logits = -1, top_k_ids = -1, top_k_logits = -1, prompt_logprobs = -1;

  bool wants_next_token() const { return request.snapshot_at == SnapshotAt::kAfterLast; }
  int64_t tokens_to_run() const { return end_position - first_position; }
  // The end of the chunk that starts at `position`: the next absolute multiple of chunk_tokens, the
  // snapshot's position or the end, whichever comes first.
  int64_t ChunkEnd(int64_t position) const;
  // Bytes that the chunk [begin, end) puts on the stream.
  int64_t EmittedBytes(int64_t begin, int64_t end) const;
  int64_t MaxChunkBytes() const;
  // Host memory that the request holds while it waits: tokens, lists and the manifest. The snapshot
  // to resume from counts in its table.
  int64_t QueuedBytes() const;

  int64_t state_bytes = 0;   // one set of states and conv states, as returned
  int64_t kv_row_bytes = 0;  // keys and values of one token over all layers, as returned
  int64_t logits_row_bytes = 0;
};

// Fills manifest, tensor ids and sizes from the fields above them. INVALID_ARGUMENT when the
// manifest has too many tensors.
absl::Status PlanTensors(const Layout& layout, const std::string& identity, int32_t vocab_size,
                         RequestPlan& plan);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PLAN_H_
