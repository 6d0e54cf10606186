// What the model's tests share: fixtures, loaded models, a sink that keeps everything.
#ifndef SPARSEGDN_TESTS_UNIT_MODEL_MODEL_TESTING_H_
#define SPARSEGDN_TESTS_UNIT_MODEL_MODEL_TESTING_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/model/model_runner.h"
#include "server/model/qwen35_runner.h"

namespace sparsegdn::model::testing {

// tests/data/models/NAME
std::string ModelDir(const std::string& name);

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> values;  // integers widened too
};

// A golden fixture (tests/golden/make_golden.py), or any safetensors file of F32 and I32.
class Fixture {
 public:
  explicit Fixture(const std::string& name);
  const Tensor& at(const std::string& name) const;
  bool Has(const std::string& name) const { return tensors_.contains(name); }
  std::vector<int32_t> Ints(const std::string& name) const;
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }

 private:
  std::map<std::string, Tensor> tensors_;
};

struct StateCopy {
  std::vector<float> recurrent, conv;
  bool operator==(const StateCopy&) const = default;
};
struct KvCopy {
  std::vector<float> key, value;
};

// Copies what a step shows. Keys: chunk, layer, position.
class KeepingSink : public StepSink {
 public:
  void OnState(size_t chunk, int32_t layer, int64_t position, BufferView recurrent,
               BufferView conv) override;
  void OnKv(size_t chunk, int32_t layer, int64_t first_position, BufferView key,
            BufferView value) override;
  void OnLogits(size_t chunk, int64_t position, std::span<const float> logits) override;
  void OnLogprobs(size_t chunk, int64_t first_position, std::span<const float> values) override;

  std::map<std::tuple<size_t, int32_t, int64_t>, StateCopy> states;
  std::map<std::tuple<size_t, int32_t, int64_t>, KvCopy> kv;
  std::map<std::pair<size_t, int64_t>, std::vector<float>> logits;
  std::map<std::pair<size_t, int64_t>, std::vector<float>> logprobs;
};

RunnerLimits SmallLimits();
std::unique_ptr<Qwen35Runner> LoadRunner(const std::string& dir, const RunnerLimits& limits,
                                         bool round_a_log = false, int num_threads = 2);

// On an op table that the caller chose.
std::unique_ptr<Qwen35Runner> LoadRunnerOn(std::unique_ptr<OpTable> ops, const std::string& dir,
                                           const RunnerLimits& limits, bool round_a_log = false);

Budget DenseBudget();

// One sequence driven chunk by chunk on a runner; checks that every call succeeds.
class Sequence {
 public:
  Sequence(Qwen35Runner& runner, std::vector<int32_t> tokens, Budget budget = DenseBudget());
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // The next `count` tokens as a chunk that shows states, KV and the logits of every position.
  Chunk Next(int64_t count);
  void Run(int64_t count, KeepingSink& sink);
  // Shows logits at these positions only.
  void LimitLogits(std::vector<int64_t> positions) { only_ = std::move(positions); }
  // Counts tokens of a chunk that ran in a step of several.
  void Advance(int64_t count) { position_ += count; }
  int64_t position() const { return position_; }
  int32_t slot() const { return slot_; }
  StepStats stats;

 private:
  Qwen35Runner& runner_;
  std::vector<int32_t> tokens_;
  Budget budget_;
  int32_t slot_;
  int64_t position_ = 0;
  std::vector<int64_t> positions_, only_;
};

// The generator of make_golden.py.
std::vector<int32_t> TokenIds(int64_t count, int32_t vocab, int64_t seed);

// Largest |a - b|; infinite for different sizes or a NaN on one side only.
double MaxDifference(std::span<const float> a, std::span<const float> b);

}  // namespace sparsegdn::model::testing

#endif  // SPARSEGDN_TESTS_UNIT_MODEL_MODEL_TESTING_H_
