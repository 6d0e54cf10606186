// Turns what the model gives layer by layer into the call's frames and, when asked, into the kept
// snapshot. One per running request; called from the step's thread.
#ifndef SPARSEGDN_SERVER_ENGINE_SNAPSHOT_BUILDER_H_
#define SPARSEGDN_SERVER_ENGINE_SNAPSHOT_BUILDER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/event_stream.h"
#include "server/engine/frame_writer.h"
#include "server/engine/layout.h"
#include "server/engine/plan.h"
#include "server/engine/snapshot.h"

namespace sparsegdn::engine {

class SnapshotBuilder {
 public:
  // All references outlive the builder. `emit` receives every frame.
  SnapshotBuilder(const RequestPlan& plan, const Layout& layout, int64_t frame_bytes,
                  FrameWriter::Emit emit);

  // As StepSink. A second state for the same layer and position is ignored, so that a runner may
  // report the snapshot's position once as state and once as checkpoint.
  void AddState(int32_t layer, int64_t position, model::BufferView recurrent,
                model::BufferView conv);
  void AddKv(int32_t layer, int64_t first_position, model::BufferView key, model::BufferView value);
  void AddLogits(int64_t position, std::span<const float> logits);
  void AddLogprobs(int64_t first_position, std::span<const float> values);
  // Sends partly filled frames, so that nothing computed waits for the next step.
  void EndStep();

  // The snapshot is where the call starts: emits the base's states (or zeros) without the model.
  void EmitUnchanged(const Snapshot& base);
  // Kept snapshots begin with the base's KV.
  void StartFrom(const Snapshot& base);

  std::optional<int32_t> next_token() const { return next_token_; }
  // The first thing that did not fit the plan: a bug of the runner or ours.
  const absl::Status& status() const { return status_; }
  // The digest, when every tensor is complete; INTERNAL otherwise.
  absl::StatusOr<uint64_t> Finish();
  // What the server keeps, after Finish.
  std::shared_ptr<const Snapshot> TakeKept();

 private:
  void Fail(std::string message);
  bool CheckElements(const char* what, int32_t layer, const model::BufferView& view, DType dtype,
                     int64_t elements);
  void EmitRecurrent(const LayerTensors& ids, const float* state);
  void EmitConv(const LayerTensors& ids, const char* conv);
  void EmitRows(int32_t tensor, std::vector<Blob>* kept, const model::BufferView& rows);

  const RequestPlan& plan_;
  const Layout& layout_;
  const int64_t frame_bytes_;
  FrameWriter writer_;
  std::optional<Snapshot> kept_;
  std::vector<std::vector<bool>> have_state_;  // [checkpoints + 1][layer]; the last is the snapshot
  std::vector<float> transposed_;              // one head
  std::string encoded_;                        // one head, or the conv state
  std::vector<float> scales_;
  size_t logits_rows_ = 0;
  std::optional<int32_t> next_token_;
  absl::Status status_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SNAPSHOT_BUILDER_H_
