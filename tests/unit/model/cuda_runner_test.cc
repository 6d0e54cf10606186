// Goal: the model on a CUDA device computes what transformers computes in fp32 and what the CPU
// backend computes, within BF16; packs, chunks, snapshots and faults behave as on the CPU.
//
// Tolerances: weights, activations and residual stream carry 8 bits, 2^-9 = 2e-3 each rounding; a
// few tens of roundings over four layers add up to 1e-2 at most, so 2e-2 relative L2 on logits and
// 3e-2 on states, whose entries are sums of products of rounded values. Skipped, with the reason,
// without a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "server/model/cuda_op_table.h"
#include "tests/unit/model/model_testing.h"

namespace sparsegdn::model::testing {
namespace {

constexpr double kLogits = 2e-2, kStates = 3e-2;

double RelativeError(std::span<const float> got, std::span<const float> wanted) {
  if (got.size() != wanted.size()) return std::numeric_limits<double>::infinity();
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double{got[i]} - wanted[i], 2);
    norm += std::pow(double{wanted[i]}, 2);
  }
  return std::isnan(error) ? std::numeric_limits<double>::infinity()
                           : std::sqrt(error) / std::max(std::sqrt(norm), 1e-12);
}

int64_t Greedy(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

class CudaRunnerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto ops = CreateCudaOpTable(0);
    if (!ops.ok()) GTEST_SKIP() << "no CUDA device for the model: " << ops.status().message();
  }
  static std::unique_ptr<Qwen35Runner> Load(const std::string& model) {
    auto ops = CreateCudaOpTable(0);
    EXPECT_TRUE(ops.ok()) << ops.status();
    if (!ops.ok()) return nullptr;
    auto runner = LoadRunnerOn(*std::move(ops), ModelDir(model), SmallLimits());
    if (runner != nullptr) std::printf("attention: %s\n", runner->info().attention.c_str());
    return runner;
  }
};

// Logits over all positions of the fixture; a single position, whose errors do not average, has
// half as much again.
void ExpectGoldenLogits(const Fixture& fixture, const KeepingSink& sink, size_t vocab) {
  const std::vector<int32_t> rows = fixture.Ints("rows");
  const std::vector<float>& logits = fixture.at("logits").values;
  std::vector<float> all;
  size_t same = 0;
  double worst = 0.0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto wanted = std::span(logits).subspan(r * vocab, vocab);
    const std::vector<float>& got = sink.logits.at({0, rows[r]});
    all.insert(all.end(), got.begin(), got.end());
    worst = std::max(worst, RelativeError(got, wanted));
    same += Greedy(got) == Greedy(wanted);
  }
  const double error = RelativeError(all, logits);
  std::printf(
      "relative error of logits %.4f, of the worst position %.4f; greedy tokens equal at "
      "%zu of %zu positions\n",
      error, worst, same, rows.size());
  EXPECT_LE(error, kLogits);
  EXPECT_LE(worst, 1.5 * kLogits);
  EXPECT_GE(static_cast<double>(same), 0.99 * static_cast<double>(rows.size()));
}

TEST_F(CudaRunnerTest, GoldenLogitsStatesAndKv) {
  for (const char* name : {"tiny-hybrid-70", "tiny-hybrid-300", "tiny-gdn-70", "tiny-gdn-300"}) {
    SCOPED_TRACE(name);
    const Fixture fixture(name);
    const std::string model = std::string(name).substr(0, std::string(name).rfind('-'));
    auto runner = Load(model);
    ASSERT_NE(runner, nullptr);
    EXPECT_EQ(runner->info().backend, "cuda");
    const std::vector<int32_t> ids = fixture.Ints("ids");
    Sequence sequence(*runner, ids);
    KeepingSink sink;
    sequence.Run(std::ssize(ids), sink);
    for (size_t i = 0; i < runner->info().layers.size(); ++i) {
      const int32_t layer = static_cast<int32_t>(i);
      const std::string state = "states." + std::to_string(i), kv = "kv." + std::to_string(i);
      if (runner->info().layers[i] == LayerKind::kLinear) {
        const StateCopy& got = sink.states.at({0, layer, std::ssize(ids)});
        EXPECT_LE(RelativeError(got.conv, fixture.at(state + ".conv").values), kStates) << i;
        if (!fixture.Has(state + ".recurrent")) continue;
        EXPECT_LE(RelativeError(got.recurrent, fixture.at(state + ".recurrent").values), kStates)
            << i;
      } else {
        const KvCopy& got = sink.kv.at({0, layer, 0});
        EXPECT_LE(RelativeError(got.key, fixture.at(kv + ".key").values), kStates) << i;
        EXPECT_LE(RelativeError(got.value, fixture.at(kv + ".value").values), kStates) << i;
      }
    }
    ExpectGoldenLogits(fixture, sink, static_cast<size_t>(runner->info().vocab_size));
  }
}

TEST_F(CudaRunnerTest, SparseStatesAndCountsAgreeWithTheCpu) {
  for (const char* model : {"tiny-hybrid", "tiny-gdn"}) {
    SCOPED_TRACE(model);
    auto cuda = Load(model);
    auto cpu = LoadRunner(ModelDir(model), SmallLimits());
    ASSERT_TRUE(cuda != nullptr && cpu != nullptr);
    const int64_t n = kWindow + 300;
    const std::vector<int32_t> ids = TokenIds(n, cpu->info().vocab_size, 3);
    Sequence on_cuda(*cuda, ids, Budget{}), on_cpu(*cpu, ids, Budget{});
    KeepingSink a, b;
    on_cuda.LimitLogits({n - 1});
    on_cpu.LimitLogits({n - 1});
    on_cuda.Run(kWindow, a);
    on_cpu.Run(kWindow, b);
    // Budgets fix how many events a window has over all pairs, whatever the rounding of the gates;
    // how they are shared among pairs follows the scores.
    const auto total = [](const StepStats& stats) {
      int64_t sum = 0;
      for (const int32_t s : stats.chunks[0].selected) sum += s;
      return sum;
    };
    EXPECT_EQ(total(on_cuda.stats), total(on_cpu.stats));
    int64_t moved = 0;
    for (size_t i = 0; i < on_cpu.stats.chunks[0].selected.size(); ++i) {
      moved += std::abs(on_cuda.stats.chunks[0].selected[i] - on_cpu.stats.chunks[0].selected[i]);
    }
    std::printf("%s: %lld of %lld events moved between pairs\n", model,
                static_cast<long long>(moved / 2), static_cast<long long>(total(on_cpu.stats)));
    EXPECT_LE(static_cast<double>(moved), 0.05 * static_cast<double>(total(on_cpu.stats)));
    on_cuda.Run(300, a);
    on_cpu.Run(300, b);
    const auto& got = a.logits.at({0, n - 1});
    const auto& wanted = b.logits.at({0, n - 1});
    std::printf("%s: relative error of logits against the CPU %.4f\n", model,
                RelativeError(got, wanted));
    // Events at the threshold may differ, which is a change of the function, not of its rounding.
    EXPECT_LE(RelativeError(got, wanted), 5e-2);
  }
}

TEST_F(CudaRunnerTest, ChunksPacksAndLoadedSnapshotsEqualTheWhole) {
  auto runner = Load("tiny-hybrid");
  ASSERT_NE(runner, nullptr);
  const std::vector<int32_t> ids = TokenIds(200, runner->info().vocab_size, 5);
  KeepingSink at_once, parts;
  Sequence whole(*runner, ids), first(*runner, ids), other(*runner, TokenIds(90, 512, 6));
  whole.Run(200, at_once);
  first.Run(64, parts);
  {
    const Chunk chunks[] = {first.Next(100), other.Next(90)};
    StepStats stats;
    const absl::Status status = runner->Step(chunks, parts, stats);
    ASSERT_TRUE(status.ok()) << status;
    first.Advance(100);
    other.Advance(90);
    EXPECT_GT(stats.gdn_core_ns, 0);
  }
  // A snapshot of the packed sequence continues in another slot.
  SlotImage image;
  image.position = first.position();
  std::vector<std::vector<float>> kept;
  kept.reserve(16);
  const auto view = [&](std::vector<float> values) {
    kept.push_back(std::move(values));
    return BufferView{kept.back().data(), DType::kF32, std::ssize(kept.back())};
  };
  for (size_t i = 0; i < runner->info().layers.size(); ++i) {
    const int32_t l = static_cast<int32_t>(i);
    SlotImage::Layer layer;
    if (runner->info().layers[i] == LayerKind::kLinear) {
      const StateCopy& state = parts.states.at({0, l, 164});
      layer.recurrent = view(state.recurrent);
      layer.conv = view(state.conv);
    } else {
      for (const int64_t at : {0, 64}) {
        layer.key_segments.push_back(view(parts.kv.at({0, l, at}).key));
        layer.value_segments.push_back(view(parts.kv.at({0, l, at}).value));
      }
    }
    image.layers.push_back(std::move(layer));
  }
  Sequence loaded(*runner, ids);
  const absl::Status status = runner->Load(loaded.slot(), image);
  ASSERT_TRUE(status.ok()) << status;
  loaded.Advance(image.position);
  KeepingSink continued;
  first.Run(36, parts);
  loaded.Run(36, continued);
  for (const KeepingSink* sink : {&parts, &continued}) {
    EXPECT_LE(RelativeError(sink->logits.at({0, 199}), at_once.logits.at({0, 199})), kLogits);
    EXPECT_LE(RelativeError(sink->states.at({0, 0, 200}).recurrent,
                            at_once.states.at({0, 0, 200}).recurrent),
              kStates);
  }
}

TEST_F(CudaRunnerTest, StatesInsideAStepAndLogProbabilities) {
  auto cuda = Load("tiny-hybrid");
  auto cpu = LoadRunner(ModelDir("tiny-hybrid"), SmallLimits());
  ASSERT_TRUE(cuda != nullptr && cpu != nullptr);
  const std::vector<int32_t> ids = TokenIds(300, cpu->info().vocab_size, 9);
  KeepingSink sinks[2];
  int which = 0;
  for (Qwen35Runner* runner : {cuda.get(), cpu.get()}) {
    Sequence sequence(*runner, ids);
    Chunk chunk = sequence.Next(300);
    chunk.checkpoint_every = 64;
    chunk.logprobs_from = 1;
    StepStats stats;
    const absl::Status status = runner->Step({&chunk, 1}, sinks[which++], stats);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_FALSE(stats.chunks[0].nonfinite);
  }
  ASSERT_EQ(sinks[0].states.size(), sinks[1].states.size());
  for (const auto& [key, state] : sinks[1].states) {
    EXPECT_LE(RelativeError(sinks[0].states.at(key).recurrent, state.recurrent), kStates);
    EXPECT_LE(RelativeError(sinks[0].states.at(key).conv, state.conv), kStates);
  }
  EXPECT_LE(RelativeError(sinks[0].logprobs.at({0, 1}), sinks[1].logprobs.at({0, 1})), kLogits);
}

TEST_F(CudaRunnerTest, TwoRunsAreBitwiseEqual) {
  auto runner = Load("tiny-hybrid");
  ASSERT_NE(runner, nullptr);
  const std::vector<int32_t> ids = TokenIds(kWindow + 70, runner->info().vocab_size, 4);
  KeepingSink a, b;
  for (KeepingSink* sink : {&a, &b}) {
    Sequence sequence(*runner, ids, Budget{});
    sequence.LimitLogits({std::ssize(ids) - 1});
    sequence.Run(std::ssize(ids), *sink);
  }
  EXPECT_EQ(a.states, b.states);
  EXPECT_EQ(a.logits, b.logits);
}

TEST_F(CudaRunnerTest, ANanStateFailsItsOwnChunk) {
  auto runner = Load("tiny-gdn");
  ASSERT_NE(runner, nullptr);
  const std::vector<int32_t> ids = TokenIds(40, runner->info().vocab_size, 8);
  Sequence good(*runner, ids), bad(*runner, ids);
  const ModelInfo& info = runner->info();
  const std::vector<float> state(
      static_cast<size_t>(info.gdn.num_v_heads * info.gdn.head_dim_k * info.gdn.head_dim_v), NAN);
  const std::vector<float> conv(static_cast<size_t>(info.conv_channels) * 4, 0.0f);
  SlotImage image;
  for (size_t i = 0; i < info.layers.size(); ++i) {
    image.layers.push_back({{state.data(), DType::kF32, std::ssize(state)},
                            {conv.data(), DType::kF32, std::ssize(conv)},
                            {},
                            {}});
  }
  ASSERT_TRUE(runner->Load(bad.slot(), image).ok());
  KeepingSink sink;
  const Chunk chunks[] = {good.Next(40), bad.Next(40)};
  StepStats stats;
  const absl::Status status = runner->Step(chunks, sink, stats);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_FALSE(stats.chunks[0].nonfinite);
  EXPECT_TRUE(stats.chunks[1].nonfinite);
  EXPECT_TRUE(runner->healthy());
}

TEST_F(CudaRunnerTest, ADeviceThatIsTooSmallIsNamedBeforeAnythingIsAllocated) {
  auto ops = CreateCudaOpTable(0);
  ASSERT_TRUE(ops.ok()) << ops.status();
  const absl::Status status = (*ops)->Reserve(size_t{1} << 50, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("--kv-tokens"), std::string::npos) << status;
  EXPECT_TRUE((*ops)->healthy());
}

TEST(CudaOpTableTest, ADeviceThatIsNotThereIsRefused) {
  EXPECT_FALSE(CudaDevicePresent(4096));
  const auto ops = CreateCudaOpTable(4096);
  EXPECT_TRUE(absl::IsFailedPrecondition(ops.status()) || absl::IsUnimplemented(ops.status()))
      << ops.status();
}

}  // namespace
}  // namespace sparsegdn::model::testing
