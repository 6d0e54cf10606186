// Goal: the promises of ModelRunner on the bundled models: chunks equal the whole, packs equal
// single runs, slots and blocks are accounted for, bad calls are refused by name.
//
// Tolerance between two ways to cut a prompt: 1e-4 on activations and states of order one, as
// against the reference (golden_test.cc); bitwise where qwen35_runner.h says so.
#include <gtest/gtest.h>

#include <cmath>

#include "server/model/qwen35_runner.h"
#include "tests/unit/model/model_testing.h"

namespace sparsegdn::model::testing {
namespace {

constexpr double kTolerance = 1e-4;

Budget SparseBudget() {
  Budget budget;  // retention 0.29
  budget.keep_last = 8;
  return budget;
}

// Compares everything about a sequence's end: states, and the logits of its last positions.
void ExpectSameEnd(const ModelInfo& info, const KeepingSink& a, size_t chunk_a,
                   const KeepingSink& b, size_t chunk_b, int64_t end, double tolerance) {
  for (size_t i = 0; i < info.layers.size(); ++i) {
    if (info.layers[i] != LayerKind::kLinear) continue;
    const int32_t layer = static_cast<int32_t>(i);
    const StateCopy& x = a.states.at({chunk_a, layer, end});
    const StateCopy& y = b.states.at({chunk_b, layer, end});
    EXPECT_LE(MaxDifference(x.recurrent, y.recurrent), tolerance) << "layer " << i;
    EXPECT_LE(MaxDifference(x.conv, y.conv), tolerance) << "layer " << i;
  }
  EXPECT_LE(MaxDifference(a.logits.at({chunk_a, end - 1}), b.logits.at({chunk_b, end - 1})),
            tolerance);
}

class RunnerTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    runner_ = LoadRunner(ModelDir(GetParam()), SmallLimits());
    ASSERT_NE(runner_, nullptr);
  }
  std::vector<int32_t> Ids(int64_t count, int64_t seed = 3) const {
    return TokenIds(count, runner_->info().vocab_size, seed);
  }
  std::unique_ptr<Qwen35Runner> runner_;
};

INSTANTIATE_TEST_SUITE_P(Models, RunnerTest, ::testing::Values("tiny-hybrid", "tiny-gdn"),
                         [](const auto& info) {
                           return std::string(info.param) == "tiny-gdn" ? "gdn" : "hybrid";
                         });

TEST_P(RunnerTest, PrefillThenDecodeEqualsPrefill) {
  for (const int64_t n : {1, 3, 4, 63, 64, 65}) {
    const int64_t m = 6;
    Sequence whole(*runner_, Ids(n + m)), parts(*runner_, Ids(n + m));
    KeepingSink at_once, resumed;
    whole.Run(n + m, at_once);
    parts.Run(n, resumed);
    for (int64_t i = 0; i < m; ++i) parts.Run(1, resumed);
    SCOPED_TRACE(n);
    ExpectSameEnd(runner_->info(), at_once, 0, resumed, 0, n + m, kTolerance);
    for (int64_t p = 0; p < n + m; ++p) {
      EXPECT_LE(MaxDifference(at_once.logits.at({0, p}), resumed.logits.at({0, p})), kTolerance);
    }
  }
}

TEST_P(RunnerTest, CutAtTheWindowIsBitwiseTheWhole) {
  for (const Budget& budget : {DenseBudget(), SparseBudget()}) {
    const int64_t n = kWindow + 100;
    const std::vector<int64_t> shown = {0, kWindow - 1, kWindow, n - 1};
    Sequence whole(*runner_, Ids(n), budget), parts(*runner_, Ids(n), budget);
    whole.LimitLogits(shown);
    parts.LimitLogits(shown);
    KeepingSink at_once, resumed;
    whole.Run(n, at_once);
    parts.Run(kWindow, resumed);
    parts.Run(n - kWindow, resumed);
    ExpectSameEnd(runner_->info(), at_once, 0, resumed, 0, n, 0.0);
    for (const int64_t p : shown) {
      EXPECT_EQ(at_once.logits.at({0, p}), resumed.logits.at({0, p})) << p;
    }
  }
}

TEST_P(RunnerTest, PackedWithOthersIsBitwiseAlone) {
  for (const Budget& budget : {DenseBudget(), SparseBudget()}) {
    const int64_t lengths[] = {300, 1, 65};
    KeepingSink packed;
    StepStats stats;
    {
      std::vector<std::unique_ptr<Sequence>> sequences;
      std::vector<Chunk> chunks;
      for (int64_t i = 0; i < 3; ++i) {
        sequences.push_back(std::make_unique<Sequence>(*runner_, Ids(lengths[i], i), budget));
        chunks.push_back(sequences.back()->Next(lengths[i]));
      }
      const absl::Status status = runner_->Step(chunks, packed, stats);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_EQ(stats.chunks.size(), 3u);
    for (int64_t i = 0; i < 3; ++i) {
      Sequence alone(*runner_, Ids(lengths[i], i), budget);
      KeepingSink sink;
      alone.Run(lengths[i], sink);
      SCOPED_TRACE(i);
      ExpectSameEnd(runner_->info(), packed, static_cast<size_t>(i), sink, 0, lengths[i], 0.0);
      EXPECT_EQ(stats.chunks[static_cast<size_t>(i)].selected, alone.stats.chunks[0].selected);
    }
  }
}

// The last layer ends with the rows that somebody reads: none, one, a few, to the end, next to
// those of another chunk.
TEST_P(RunnerTest, RowsThatNobodyReadsChangeNothing) {
  const int64_t lengths[] = {70, 65, 130, 64};
  const std::vector<int64_t> shown[] = {{69}, {0, 31, 64}, {}, {5, 60}};
  const int64_t logprobs_from[] = {-1, -1, -1, 20};
  KeepingSink packed, every_row;
  const auto run = [&](bool whole, KeepingSink& sink) {
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<Chunk> chunks;
    for (size_t i = 0; i < 4; ++i) {
      sequences.push_back(
          std::make_unique<Sequence>(*runner_, Ids(lengths[i], static_cast<int64_t>(i))));
      chunks.push_back(sequences.back()->Next(lengths[i]));
      if (!whole) chunks.back().logits_positions = shown[i];
      chunks.back().logprobs_from = logprobs_from[i];
    }
    StepStats stats;
    const absl::Status status = runner_->Step(chunks, sink, stats);
    ASSERT_TRUE(status.ok()) << status;
  };
  run(false, packed);
  run(true, every_row);
  EXPECT_EQ(packed.states, every_row.states);
  ASSERT_EQ(packed.kv.size(), every_row.kv.size());
  for (const auto& [key, rows] : packed.kv) {
    EXPECT_EQ(rows.key, every_row.kv.at(key).key);
    EXPECT_EQ(rows.value, every_row.kv.at(key).value);
  }
  ASSERT_EQ(packed.logits.size(), 6u);
  for (const auto& [key, logits] : packed.logits) EXPECT_EQ(logits, every_row.logits.at(key));
  ASSERT_EQ(packed.logprobs.size(), 1u);
  EXPECT_EQ(packed.logprobs, every_row.logprobs);
}

TEST_P(RunnerTest, ReleasedSlotsStartFromZero) {
  KeepingSink first, again;
  const int64_t n = 40;
  {
    Sequence sequence(*runner_, Ids(n));
    sequence.Run(n, first);
  }
  {
    Sequence other(*runner_, Ids(500, 77));  // dirties the slot and its blocks
    KeepingSink sink;
    other.Run(500, sink);
  }
  Sequence sequence(*runner_, Ids(n));
  sequence.Run(n, again);
  ExpectSameEnd(runner_->info(), first, 0, again, 0, n, 0.0);
}

TEST_P(RunnerTest, LoadedImageContinuesBitwise) {
  const int64_t n = 2 * kGroup;
  KeepingSink before, straight, resumed;
  Sequence whole(*runner_, Ids(n + 5));
  whole.Run(n, before);
  whole.Run(5, straight);
  SlotImage image;
  image.position = n;
  const auto view = [](const float* data, size_t count) {
    return BufferView{data, DType::kF32, static_cast<int64_t>(count)};
  };
  for (size_t i = 0; i < runner_->info().layers.size(); ++i) {
    SlotImage::Layer layer;
    if (runner_->info().layers[i] == LayerKind::kLinear) {
      const StateCopy& state = before.states.at({0, static_cast<int32_t>(i), n});
      layer.recurrent = view(state.recurrent.data(), state.recurrent.size());
      layer.conv = view(state.conv.data(), state.conv.size());
    } else {
      const KvCopy& kv = before.kv.at({0, static_cast<int32_t>(i), 0});
      const size_t cut = kv.key.size() / static_cast<size_t>(n) * 50;  // segments of 50 and n - 50
      layer.key_segments = {view(kv.key.data(), cut), view(kv.key.data() + cut, 0),
                            view(kv.key.data() + cut, kv.key.size() - cut)};
      layer.value_segments = {view(kv.value.data(), kv.value.size())};
    }
    image.layers.push_back(layer);
  }
  Sequence other(*runner_, Ids(n + 5));
  const absl::Status loaded = runner_->Load(other.slot(), image);
  ASSERT_TRUE(loaded.ok()) << loaded;
  other.Advance(n);
  other.Run(5, resumed);
  ExpectSameEnd(runner_->info(), straight, 0, resumed, 0, n + 5, 0.0);
}

TEST_P(RunnerTest, CheckpointsEqualTheStatesOfPrefixes) {
  const int64_t n = 300;
  Sequence sequence(*runner_, Ids(n));
  KeepingSink sink;
  Chunk chunk = sequence.Next(n);
  chunk.checkpoint_every = 128;
  StepStats stats;
  ASSERT_TRUE(runner_->Step({&chunk, 1}, sink, stats).ok());
  for (const int64_t position : {128, 256}) {
    Sequence prefix(*runner_, Ids(n));
    KeepingSink wanted;
    prefix.Run(position, wanted);
    for (size_t i = 0; i < runner_->info().layers.size(); ++i) {
      if (runner_->info().layers[i] != LayerKind::kLinear) continue;
      const auto key = std::tuple{size_t{0}, static_cast<int32_t>(i), position};
      ASSERT_TRUE(sink.states.contains(key));
      EXPECT_LE(MaxDifference(sink.states[key].recurrent, wanted.states[key].recurrent),
                kTolerance);
      EXPECT_EQ(sink.states[key].conv, wanted.states[key].conv);
    }
  }
  EXPECT_TRUE(sink.states.contains({0, 0, n}));
}

TEST_P(RunnerTest, LogprobsAreThoseOfTheLogits) {
  const std::vector<int32_t> ids = Ids(90);
  Sequence sequence(*runner_, ids);
  KeepingSink sink;
  Chunk chunk = sequence.Next(80);
  chunk.logprobs_from = 3;
  chunk.next_token = ids[80];
  StepStats stats;
  ASSERT_TRUE(runner_->Step({&chunk, 1}, sink, stats).ok());
  ASSERT_EQ(sink.logprobs.size(), 1u);
  const std::vector<float>& got = sink.logprobs.at({0, 3});
  ASSERT_EQ(got.size(), 78u);  // tokens 3 .. 80
  for (int64_t t = 3; t <= 80; ++t) {
    const std::vector<float>& logits = sink.logits.at({0, t - 1});
    double sum = 0.0;
    for (const float value : logits) sum += std::exp(double{value});
    const double wanted = logits[static_cast<size_t>(ids[static_cast<size_t>(t)])] - std::log(sum);
    EXPECT_NEAR(got[static_cast<size_t>(t - 3)], wanted, 1e-5) << t;
  }
  // The next chunk's own first token was reported by this one; without next_token its last is not.
  sequence.Advance(80);
  Chunk last = sequence.Next(10);
  last.logprobs_from = 3;
  ASSERT_TRUE(runner_->Step({&last, 1}, sink, stats).ok());
  EXPECT_EQ(sink.logprobs.at({0, 81}).size(), 9u);
}

TEST_P(RunnerTest, StatsCountEventsPerLayerAndPair) {
  const ModelInfo& info = runner_->info();
  const auto linear =
      static_cast<size_t>(std::count(info.layers.begin(), info.layers.end(), LayerKind::kLinear));
  const size_t pairs = static_cast<size_t>(info.gdn.num_k_heads);
  KeepingSink sink;
  Sequence dense(*runner_, Ids(100));
  dense.Run(100, sink);
  EXPECT_EQ(dense.stats.chunks[0].selected, std::vector<int32_t>(linear * pairs, 100));
  EXPECT_GT(dense.stats.total_ns, 0);
  EXPECT_GT(dense.stats.gdn_core_ns, 0);
  EXPECT_LE(dense.stats.gdn_core_ns, dense.stats.total_ns);
  Sequence sparse(*runner_, Ids(1008), SparseBudget());
  sparse.Run(1008, sink);
  const std::vector<int32_t>& selected = sparse.stats.chunks[0].selected;
  ASSERT_EQ(selected.size(), linear * pairs);
  for (size_t l = 0; l < linear; ++l) {
    int64_t sum = 0;
    for (size_t p = 0; p < pairs; ++p) sum += selected[l * pairs + p];
    // K = rint(0.29 * n * Hk) of the n = 1000 tokens that are not forced, and 8 forced for each.
    EXPECT_EQ(sum, std::llrint(0.29 * 1000 * static_cast<double>(pairs)) +
                       8 * static_cast<int64_t>(pairs));
  }
}

}  // namespace
}  // namespace sparsegdn::model::testing
