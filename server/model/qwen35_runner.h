// The resident Qwen3.5 model as the engine drives it.
#ifndef SPARSEGDN_SERVER_MODEL_QWEN35_RUNNER_H_
#define SPARSEGDN_SERVER_MODEL_QWEN35_RUNNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/budget_profile.h"
#include "server/model/checkpoint.h"
#include "server/model/config.h"
#include "server/model/model_runner.h"
#include "server/model/op_table.h"
#include "server/model/qwen35_graph.h"
#include "server/model/qwen35_memory.h"
#include "server/model/qwen35_weights.h"
#include "server/model/slot_pool.h"

namespace sparsegdn::model {

struct Qwen35Options {
  ModelConfig config;
  RunnerLimits limits;
  bool round_a_log = false;
  BudgetProfile profile;  // one weight per GDN layer, or none
  std::string name;       // of the model
  std::string identity;   // 64 hex digits
  std::function<void(int64_t done_layers, int64_t total_layers)> progress;  // may be empty
};

// What holds bit for bit on the CPU: a chunk packed with others equals the chunk alone, and a
// prompt cut at multiples of the window equals the whole, because every operation is independent
// of its neighbours and the GDN core resumes exactly at window boundaries. Other cuts agree within
// rounding (1e-4 on FP32 activations of order one).
class Qwen35Runner : public ModelRunner {
 public:
  // Uploads the checkpoint's tensors and reserves all memory. INVALID_ARGUMENT names a limit;
  // RESOURCE_EXHAUSTED what did not fit.
  static absl::StatusOr<std::unique_ptr<Qwen35Runner>> Create(Qwen35Options options,
                                                              Checkpoint checkpoint,
                                                              std::unique_ptr<OpTable> ops);

  const ModelInfo& info() const override { return info_; }
  const RunnerLimits& limits() const override { return options_.limits; }
  absl::StatusOr<int32_t> Acquire(int64_t max_tokens) override;
  void Release(int32_t slot) override { slots_.Release(slot); }
  int32_t free_slots() const override { return slots_.free_slots(); }
  int64_t free_kv_tokens() const override { return slots_.free_kv_tokens(); }
  absl::Status Load(int32_t slot, const SlotImage& image) override;
  absl::Status Step(std::span<const Chunk> chunks, StepSink& sink, StepStats& stats) override;
  bool healthy() const override { return ops_->healthy(); }

  void set_probe(Probe probe) { graph_->set_probe(std::move(probe)); }

 private:
  Qwen35Runner(Qwen35Options options, std::unique_ptr<OpTable> ops, SlotPool slots);
  void PrepareAttention();
  absl::Status TuneProducts();
  absl::Status LoadLinear(int32_t slot, size_t layer, const SlotImage::Layer& image);
  absl::Status LoadFull(const SlotPool::Slot& slot, size_t layer, int64_t position,
                        const SlotImage::Layer& image);

  Qwen35Options options_;
  ModelInfo info_;
  std::unique_ptr<OpTable> ops_;
  SlotPool slots_;
  ModelWeights weights_;
  Qwen35Memory memory_;
  std::unique_ptr<Qwen35Graph> graph_;
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_QWEN35_RUNNER_H_
