// The forward pass of Qwen3.5 over an op table, for hybrid and pure-GDN layer lists.
//
// Per layer: norm -> one stacked projection -> mixer -> output projection + residual -> norm ->
// gate/up projection -> SwiGLU -> down projection + residual. The mixer is conv, gates, GDN core
// and gated norm, or q/k norm, rope, cache and attention. Results leave for the sink as soon as
// their layer is done. Of the last layer only states and KV are wanted of every row: what comes
// after them runs for the rows of the head alone.
#ifndef SPARSEGDN_SERVER_MODEL_QWEN35_GRAPH_H_
#define SPARSEGDN_SERVER_MODEL_QWEN35_GRAPH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "server/model/config.h"
#include "server/model/model_runner.h"
#include "server/model/op_table.h"
#include "server/model/qwen35_memory.h"
#include "server/model/qwen35_weights.h"
#include "server/model/step_plan.h"

namespace sparsegdn::model {

// Sees named activations of a step on the host, FP32 tables only: rows [rows, cols] with a stride
// in elements. layer is -1 for what belongs to none. For tests against a reference.
using Probe = std::function<void(std::string_view name, int32_t layer, const float* data,
                                 int64_t rows, int64_t cols, int64_t stride)>;

// Borrows everything; one Run at a time.
class Qwen35Graph {
 public:
  Qwen35Graph(const ModelConfig& config, const RunnerLimits& limits, const ModelWeights& weights,
              const Qwen35Memory& memory, OpTable& ops);

  void set_probe(Probe probe) { probe_ = std::move(probe); }

  // Runs the plan's chunks; fills stats but for total_ns.
  absl::Status Run(const StepPlan& plan, StepSink& sink, StepStats& stats);

 private:
  absl::Status RunLayer(const StepPlan& plan, size_t layer, StepSink& sink);
  // States and KV of every row.
  absl::Status RunLinear(const StepPlan& plan, size_t layer, StepSink& sink);
  absl::Status RunCore(const StepPlan& plan, size_t layer, ConstRows qkv);
  absl::Status RunFull(const StepPlan& plan, size_t layer, StepSink& sink);
  // The rest of the layer, from the mixer's output on, for some rows.
  absl::Status FinishLayer(const StepPlan& plan, const StepPlan::Stretch& stretch, size_t layer);
  absl::Status FinishLinear(const StepPlan::Stretch& stretch, size_t layer);
  absl::Status FinishFull(const StepPlan& plan, const StepPlan::Stretch& stretch, size_t layer);
  // Of a layer, as sequences first_seq and later of the pack see it.
  KvCacheRef CacheOf(const StepPlan& plan, size_t layer, int32_t first_seq) const;
  absl::Status RunMlp(const StepPlan::Stretch& stretch, size_t layer);
  absl::Status CheckStream(const StepPlan& plan);
  absl::Status SaveConvCheckpoints(const StepPlan& plan, size_t layer, ConstRows raw);
  absl::Status EmitStates(const StepPlan& plan, size_t layer, StepSink& sink);
  absl::Status EmitKv(const StepPlan& plan, size_t layer, StepSink& sink);
  absl::Status RunHead(const StepPlan& plan, StepSink& sink, StepStats& stats);
  absl::Status CollectStats(const StepPlan& plan, StepStats& stats);

  absl::Status Norm(const StepPlan::Stretch& stretch, const float* weight);
  Rows From(const Rows& rows, const StepPlan::Stretch& stretch) const;
  absl::Status Show(std::string_view name, int32_t layer, ConstRows rows, int64_t count,
                    int64_t cols);
  BufferView ActivationView(const void* data, int64_t elements) const;

  const ModelConfig& config_;
  const RunnerLimits& limits_;
  const ModelWeights& weights_;
  const Qwen35Memory& memory_;
  OpTable& ops_;
  Probe probe_;
  std::vector<int32_t> linear_index_;  // of a layer among the linear ones
  int32_t num_linear_ = 0;
};

// x advanced by `elements` of activation size within its rows.
ConstRows Columns(const Rows& rows, int64_t first, size_t element_bytes);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_QWEN35_GRAPH_H_
