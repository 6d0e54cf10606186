#include "tests/unit/model/model_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "server/model/checkpoint.h"
#include "server/model/cpu_op_table.h"
#include "server/model/files.h"
#include "server/model/narrow.h"
#include "server/model/safetensors_header.h"

namespace sparsegdn::model::testing {
namespace {

std::vector<float> Widened(const BufferView& view) {
  std::vector<float> out(static_cast<size_t>(view.elements));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[i]
                                       : WidenBf16(static_cast<const uint16_t*>(view.data)[i]);
  }
  return out;
}

}  // namespace

std::string ModelDir(const std::string& name) {
  return std::string(SPARSEGDN_TESTS_DIR) + "/data/models/" + name;
}

Fixture::Fixture(const std::string& name) {
  const std::string path = std::string(SPARSEGDN_TESTS_DIR) + "/golden/" + name + ".safetensors";
  const auto content = ReadFile(path, size_t{1} << 26);
  if (!content.ok()) {
    ADD_FAILURE() << content.status();
    return;
  }
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(content->data()),
                                       content->size());
  const auto entries = ParseSafetensorsHeader(bytes, bytes.size());
  if (!entries.ok()) {
    ADD_FAILURE() << entries.status();
    return;
  }
  for (const SafetensorsEntry& entry : *entries) {
    Tensor tensor{entry.shape, std::vector<float>((entry.end - entry.begin) / 4)};
    for (size_t i = 0; i < tensor.values.size(); ++i) {
      int32_t integer;
      std::memcpy(&integer, bytes.data() + entry.begin + 4 * i, 4);
      std::memcpy(&tensor.values[i], &integer, 4);
      if (entry.dtype == "I32") tensor.values[i] = static_cast<float>(integer);
    }
    tensors_[entry.name] = std::move(tensor);
  }
}

const Tensor& Fixture::at(const std::string& name) const {
  static const Tensor kNone;
  auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    ADD_FAILURE() << "the fixture has no " << name;
    return kNone;
  }
  return it->second;
}

std::vector<int32_t> Fixture::Ints(const std::string& name) const {
  const Tensor& tensor = at(name);
  return {tensor.values.begin(), tensor.values.end()};
}

void KeepingSink::OnState(size_t chunk, int32_t layer, int64_t position, BufferView recurrent,
                          BufferView conv) {
  states[{chunk, layer, position}] = {Widened(recurrent), Widened(conv)};
}
void KeepingSink::OnKv(size_t chunk, int32_t layer, int64_t first_position, BufferView key,
                       BufferView value) {
  kv[{chunk, layer, first_position}] = {Widened(key), Widened(value)};
}
void KeepingSink::OnLogits(size_t chunk, int64_t position, std::span<const float> row) {
  logits[{chunk, position}].assign(row.begin(), row.end());
}
void KeepingSink::OnLogprobs(size_t chunk, int64_t first, std::span<const float> values) {
  logprobs[{chunk, first}].assign(values.begin(), values.end());
}

RunnerLimits SmallLimits() {
  return {.state_slots = 4,
          .kv_tokens = 8192,
          .kv_block_tokens = 128,
          .max_batch_tokens = 4096,
          .max_batch_seqs = 4};
}

std::unique_ptr<Qwen35Runner> LoadRunner(const std::string& dir, const RunnerLimits& limits,
                                         bool round_a_log, int num_threads) {
  auto ops = CreateCpuOpTable(num_threads, nullptr);
  EXPECT_TRUE(ops.ok()) << ops.status();
  return ops.ok() ? LoadRunnerOn(*std::move(ops), dir, limits, round_a_log) : nullptr;
}

std::unique_ptr<Qwen35Runner> LoadRunnerOn(std::unique_ptr<OpTable> ops, const std::string& dir,
                                           const RunnerLimits& limits, bool round_a_log) {
  Qwen35Options options;
  auto config = LoadConfig(dir);
  EXPECT_TRUE(config.ok()) << config.status();
  if (!config.ok()) return nullptr;
  auto checkpoint = Checkpoint::Open(dir, *config);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  if (!checkpoint.ok()) return nullptr;
  options.config = *config;
  options.limits = limits;
  options.round_a_log = round_a_log;
  auto runner = Qwen35Runner::Create(options, *std::move(checkpoint), std::move(ops));
  EXPECT_TRUE(runner.ok()) << runner.status();
  return runner.ok() ? *std::move(runner) : nullptr;
}

Budget DenseBudget() {
  Budget budget;
  budget.mode = BudgetMode::kDense;
  return budget;
}

Sequence::Sequence(Qwen35Runner& runner, std::vector<int32_t> tokens, Budget budget)
    : runner_(runner), tokens_(std::move(tokens)), budget_(budget), slot_(-1) {
  auto slot = runner_.Acquire(std::ssize(tokens_));
  EXPECT_TRUE(slot.ok()) << slot.status();
  if (slot.ok()) slot_ = *slot;
}

Sequence::~Sequence() { runner_.Release(slot_); }

Chunk Sequence::Next(int64_t count) {
  Chunk chunk;
  chunk.slot = slot_;
  chunk.tokens =
      std::span(tokens_).subspan(static_cast<size_t>(position_), static_cast<size_t>(count));
  chunk.first_position = position_;
  chunk.prompt_tokens = std::ssize(tokens_);
  chunk.budget = budget_;
  chunk.emit_state = chunk.emit_kv = true;
  positions_.clear();
  for (int64_t p = position_; p < position_ + count; ++p) {
    if (only_.empty() || std::binary_search(only_.begin(), only_.end(), p)) positions_.push_back(p);
  }
  chunk.logits_positions = positions_;
  return chunk;
}

void Sequence::Run(int64_t count, KeepingSink& sink) {
  const Chunk chunk = Next(count);
  const absl::Status status = runner_.Step({&chunk, 1}, sink, stats);
  ASSERT_TRUE(status.ok()) << status;
  position_ += count;
}

std::vector<int32_t> TokenIds(int64_t count, int32_t vocab, int64_t seed) {
  std::vector<int32_t> ids;
  int64_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    state = (state * 1103515245 + 12345) % (int64_t{1} << 31);
    ids.push_back(static_cast<int32_t>((state >> 8) % vocab));
  }
  return ids;
}

double MaxDifference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    const double difference = std::abs(double{a[i]} - double{b[i]});
    if (!(difference <= worst)) {
      worst = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
    }
  }
  return worst;
}

}  // namespace sparsegdn::model::testing
