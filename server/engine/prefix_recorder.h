// Collects, from what the model gives in a step, the entries of the window boundaries that the step
// crosses. Entries exist whole or not at all: they are taken after the step, when it has succeeded.
#ifndef SPARSEGDN_SERVER_ENGINE_PREFIX_RECORDER_H_
#define SPARSEGDN_SERVER_ENGINE_PREFIX_RECORDER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/layout.h"
#include "server/engine/prefix_entry.h"
#include "server/model/model_runner.h"

namespace sparsegdn::engine {

// One per running request; called from the step's thread.
class PrefixRecorder {
 public:
  // `layout` outlives it.
  explicit PrefixRecorder(const Layout& layout) : layout_(layout) {}

  // Positions, multiples of kWindow within the coming chunk, whose entries are wanted. The chunk
  // starts at a window boundary.
  void Begin(const std::vector<int64_t>& positions);
  bool active() const { return !parts_.empty(); }

  // As StepSink; what belongs to no wanted entry, or comes a second time, is ignored.
  void AddState(int32_t layer, int64_t position, const model::BufferView& recurrent,
                const model::BufferView& conv);
  void AddKv(int32_t layer, int64_t first_position, const model::BufferView& key,
             const model::BufferView& value);

  // The complete entries of the step, not sealed; forgets the rest.
  std::vector<std::shared_ptr<PrefixEntry>> Take();

 private:
  std::vector<std::shared_ptr<PrefixEntry>> parts_;
  const Layout& layout_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PREFIX_RECORDER_H_
