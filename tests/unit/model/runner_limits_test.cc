// Goal: slots, blocks and limits are accounted for; every refused call names the field, got and
// wanted, and changes nothing; a non-finite sequence fails alone.
#include <gtest/gtest.h>

#include <filesystem>

#include "server/model/load_model.h"
#include "server/model/narrow.h"
#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

constexpr char kShard[] = "model.safetensors-00001-of-00001.safetensors";

class LimitsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    runner_ = LoadRunner(ModelDir("tiny-hybrid"), SmallLimits());
    ASSERT_NE(runner_, nullptr);
  }
  std::unique_ptr<Qwen35Runner> runner_;
};

TEST_F(LimitsTest, SlotsAndBlocksAreCounted) {
  EXPECT_EQ(runner_->free_slots(), 4);
  EXPECT_EQ(runner_->free_kv_tokens(), 8192);
  const int32_t a = runner_->Acquire(129).value();
  EXPECT_EQ(runner_->free_slots(), 3);
  EXPECT_EQ(runner_->free_kv_tokens(), 8192 - 256);
  const auto too_many = runner_->Acquire(8192);
  EXPECT_EQ(too_many.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(too_many.status().message()),
            "attention cache: 7936 tokens are free, wanted 8192");
  const auto never = runner_->Acquire(8193);
  EXPECT_EQ(never.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(runner_->Acquire(0).status().code(), absl::StatusCode::kInvalidArgument);
  std::vector<int32_t> rest;
  for (int i = 0; i < 3; ++i) rest.push_back(runner_->Acquire(1).value());
  const auto no_slot = runner_->Acquire(1);
  EXPECT_EQ(no_slot.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(no_slot.status().message()), "state slots: all 4 are in use, wanted one");
  for (const int32_t slot : rest) runner_->Release(slot);
  runner_->Release(a);
  runner_->Release(a);  // twice, and a slot that never was: nothing happens
  runner_->Release(99);
  EXPECT_EQ(runner_->free_slots(), 4);
  EXPECT_EQ(runner_->free_kv_tokens(), 8192);
}

TEST_F(LimitsTest, BadChunksAreRefusedByName) {
  Sequence sequence(*runner_, TokenIds(100, 512, 1)), other(*runner_, TokenIds(100, 512, 2));
  KeepingSink sink;
  StepStats stats;
  const Chunk good = sequence.Next(10);
  const auto message = [&](const std::function<void(Chunk&)>& edit) {
    Chunk chunk = good;
    edit(chunk);
    const absl::Status status = runner_->Step({&chunk, 1}, sink, stats);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const std::vector<int32_t> bad_ids = {1, 512}, negative = {-1};
  const std::vector<int64_t> unsorted = {3, 3}, outside = {10};
  EXPECT_EQ(message([](Chunk& c) { c.slot = 3; }), "chunks[0].slot = 3, wanted a slot in use");
  EXPECT_EQ(message([](Chunk& c) { c.slot = -1; }), "chunks[0].slot = -1, wanted a slot in use");
  EXPECT_EQ(message([](Chunk& c) { c.tokens = {}; }),
            "chunks[0].tokens.size = 0, wanted at least 1");
  EXPECT_EQ(message([](Chunk& c) { c.first_position = 1; }),
            "chunks[0].first_position = 1, wanted 0, the tokens its slot has seen");
  EXPECT_EQ(message([&](Chunk& c) { c.tokens = bad_ids; }),
            "chunks[0].tokens[1] = 512, wanted [0, 512)");
  EXPECT_EQ(message([&](Chunk& c) { c.tokens = negative; }),
            "chunks[0].tokens[0] = -1, wanted [0, 512)");
  EXPECT_EQ(message([](Chunk& c) { c.next_token = 512; }),
            "chunks[0].next_token = 512, wanted [-1, 512)");
  EXPECT_EQ(message([](Chunk& c) { c.prompt_tokens = 9; }),
            "chunks[0].prompt_tokens = 9, wanted at least 10");
  EXPECT_EQ(message([&](Chunk& c) { c.logits_positions = unsorted; }),
            "chunks[0].logits_positions = 3, wanted ascending in [0, 10)");
  EXPECT_EQ(message([&](Chunk& c) { c.logits_positions = outside; }),
            "chunks[0].logits_positions = 10, wanted ascending in [0, 10)");
  EXPECT_EQ(message([](Chunk& c) { c.checkpoint_every = 65; }),
            "chunks[0].checkpoint_every = 65, wanted a multiple of 64");
  EXPECT_NE(message([](Chunk& c) {
              c.budget = Budget();
              c.budget.retention = 1.5;
            }).find("1.5"),
            std::string::npos);
  const std::vector<int32_t> long_ids(129, 1);
  EXPECT_EQ(message([&](Chunk& c) { c.tokens = long_ids; }),
            "chunks[0].tokens.size = 129, wanted at most 128, the room left in its slot");
  const Chunk twice[] = {good, good};
  EXPECT_EQ(std::string(runner_->Step(twice, sink, stats).message()),
            "chunks[1].slot = 0, wanted a slot that no other chunk has");
  EXPECT_TRUE(sink.states.empty() && sink.logits.empty());
  sequence.Run(10, sink);  // nothing has moved
}

TEST_F(LimitsTest, StepsBeyondTheLimitsAreRefused) {
  RunnerLimits limits = SmallLimits();
  limits.max_batch_tokens = 50;
  limits.max_batch_seqs = 1;
  auto small = LoadRunner(ModelDir("tiny-gdn"), limits);
  Sequence a(*small, TokenIds(60, 512, 1)), b(*small, TokenIds(60, 512, 1));
  KeepingSink sink;
  StepStats stats;
  const Chunk longer = a.Next(51);
  EXPECT_EQ(std::string(small->Step({&longer, 1}, sink, stats).message()),
            "tokens of the step = 51, wanted at most 50");
  const Chunk two[] = {a.Next(1), b.Next(1)};
  EXPECT_EQ(std::string(small->Step(two, sink, stats).message()),
            "chunks.size = 2, wanted at most 1");
  EXPECT_TRUE(small->Step({}, sink, stats).ok());
  a.Run(50, sink);
}

TEST_F(LimitsTest, BadImagesAreRefusedBeforeAnythingIsWritten) {
  const int64_t n = 3;
  const std::vector<float> recurrent(4 * 128 * 128, 0.5f), conv(1024 * 4, 0.5f),
      rows(n * 2 * 64, 0.5f);
  const auto view = [](const std::vector<float>& v) {
    return BufferView{v.data(), DType::kF32, std::ssize(v)};
  };
  SlotImage good;
  good.position = n;
  for (const LayerKind kind : runner_->info().layers) {
    SlotImage::Layer layer;
    if (kind == LayerKind::kLinear) {
      layer.recurrent = view(recurrent);
      layer.conv = view(conv);
    } else {
      layer.key_segments = layer.value_segments = {view(rows)};
    }
    good.layers.push_back(layer);
  }
  Sequence sequence(*runner_, TokenIds(10, 512, 1));
  const auto message = [&](const std::function<void(SlotImage&)>& edit) {
    SlotImage image = good;
    edit(image);
    const absl::Status status = runner_->Load(sequence.slot(), image);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(message([](SlotImage& i) { i.layers.pop_back(); }), "layers.size = 3, wanted 4");
  EXPECT_EQ(message([](SlotImage& i) { i.position = 129; }), "position = 129, wanted [0, 128]");
  EXPECT_EQ(message([](SlotImage& i) { i.position = 4; }), "layers[3].key: got 3 rows, wanted 4");
  EXPECT_EQ(message([](SlotImage& i) { i.layers[1].recurrent.elements -= 1; }),
            "layers[1].recurrent: got 65535 elements, wanted 65536");
  EXPECT_EQ(message([](SlotImage& i) { i.layers[1].recurrent.dtype = DType::kBF16; }),
            "layers[1].recurrent: got BF16, wanted F32");
  EXPECT_EQ(message([](SlotImage& i) { i.layers[2].conv.dtype = DType::kF16; }),
            "layers[2].conv: got F16, wanted F32 or BF16");
  EXPECT_EQ(message([](SlotImage& i) { i.layers[0].conv = {}; }),
            "layers[0].conv: got 0 elements, wanted 4096");
  EXPECT_EQ(message([](SlotImage& i) { i.layers[3].value_segments[0].elements -= 1; }),
            "layers[3].value: got a segment of 383 elements, wanted a multiple of 128");
  KeepingSink sink, fresh;
  sequence.Run(2, sink);  // still the zero state at position 0
  Sequence untouched(*runner_, TokenIds(10, 512, 1));
  untouched.Run(2, fresh);
  EXPECT_EQ(sink.states, fresh.states);
  EXPECT_EQ(message([](SlotImage&) {}), "slot = 0, wanted a freshly acquired one");
}

TEST_F(LimitsTest, HalfWidthImagesAreWidened) {
  KeepingSink before, wide, narrow;
  Sequence first(*runner_, TokenIds(20, 512, 4));
  first.Run(15, before);
  for (KeepingSink* sink : {&wide, &narrow}) {
    std::vector<std::vector<uint16_t>> halves;
    SlotImage image;
    image.position = 15;
    const auto view = [&](const std::vector<float>& values) {
      std::vector<uint16_t> half(values.size());
      std::transform(values.begin(), values.end(), half.begin(), NarrowBf16);
      halves.push_back(std::move(half));
      if (sink == &wide) return BufferView{values.data(), DType::kF32, std::ssize(values)};
      return BufferView{halves.back().data(), DType::kBF16, std::ssize(values)};
    };
    for (int32_t i = 0; i < 4; ++i) {
      SlotImage::Layer layer;
      if (i < 3) {
        StateCopy& state = before.states.at({0, i, 15});
        layer.recurrent = {state.recurrent.data(), DType::kF32, std::ssize(state.recurrent)};
        layer.conv = view(state.conv);
      } else {
        layer.key_segments = {view(before.kv.at({0, i, 0}).key)};
        layer.value_segments = {view(before.kv.at({0, i, 0}).value)};
      }
      image.layers.push_back(layer);
    }
    Sequence resumed(*runner_, TokenIds(20, 512, 4));
    ASSERT_TRUE(runner_->Load(resumed.slot(), image).ok());
    resumed.Advance(15);
    resumed.Run(5, *sink);
  }
  const double difference = MaxDifference(wide.logits.at({0, 19}), narrow.logits.at({0, 19}));
  EXPECT_GT(difference, 0.0);   // BF16 rounds
  EXPECT_LT(difference, 0.05);  // by 2^-9 of values of order one
}

TEST_F(LimitsTest, NonFiniteSequencesFailAlone) {
  const TempDir dir;
  CopyModel("tiny-hybrid", dir);
  Editable weights(dir.Read(kShard));
  // Token 5 embeds to NaN.
  const uint16_t nan = 0x7fc0;
  std::memcpy(weights.at("model.language_model.embed_tokens.weight").bytes.data() + 5 * 128 * 2,
              &nan, 2);
  dir.Write(kShard, weights.Serialize());
  auto runner = LoadRunner(dir.path(), SmallLimits());
  std::vector<int32_t> clean = TokenIds(70, 512, 1), dirty = clean;
  std::replace(clean.begin(), clean.end(), 5, 6);
  dirty[40] = 5;
  KeepingSink packed, single;
  StepStats stats;
  {
    Sequence a(*runner, clean), b(*runner, dirty);
    Chunk chunks[] = {a.Next(70), b.Next(70)};
    for (Chunk& chunk : chunks) chunk.logits_positions = {};  // tied: column 5 is NaN for all
    const absl::Status status = runner->Step(chunks, packed, stats);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_FALSE(stats.chunks[0].nonfinite);
  EXPECT_TRUE(stats.chunks[1].nonfinite);
  Sequence alone(*runner, clean);
  Chunk chunk = alone.Next(70);
  chunk.logits_positions = {};
  ASSERT_TRUE(runner->Step({&chunk, 1}, single, stats).ok());
  EXPECT_FALSE(stats.chunks[0].nonfinite);
  for (const auto& [key, state] : single.states) EXPECT_EQ(state, packed.states.at(key));
  // Logits that are not finite count too.
  alone.Advance(70);
  Sequence logits(*runner, clean);
  KeepingSink sink;
  logits.Run(3, sink);
  EXPECT_TRUE(logits.stats.chunks[0].nonfinite);
}

// Nobody reads what attention makes of them, yet they would be handed out.
TEST_F(LimitsTest, NonFiniteKeysAndValuesOfTheLastLayerAreSeen) {
  for (const char* name : {"k_proj", "v_proj"}) {
    const TempDir dir;
    CopyModel("tiny-hybrid", dir);
    Editable weights(dir.Read(kShard));
    const uint16_t infinity = 0x7f80;
    std::memcpy(
        weights.at("model.language_model.layers.3.self_attn." + std::string(name) + ".weight")
            .bytes.data(),
        &infinity, 2);
    dir.Write(kShard, weights.Serialize());
    auto runner = LoadRunner(dir.path(), SmallLimits());
    Sequence sequence(*runner, TokenIds(70, 512, 1));
    Chunk chunk = sequence.Next(70);
    chunk.logits_positions = {};
    KeepingSink sink;
    StepStats stats;
    ASSERT_TRUE(runner->Step({&chunk, 1}, sink, stats).ok());
    EXPECT_TRUE(stats.chunks[0].nonfinite) << name;
  }
}

TEST(LoadModelTest, ReportsProgressInfoAndLimits) {
  const TempDir dir;
  CopyModel("tiny-hybrid", dir);
  LoadOptions options;
  options.dir = dir.path() + "/";
  options.limits = SmallLimits();
  std::map<std::string, int64_t> done;
  options.progress = [&](std::string_view stage, int64_t at, int64_t total) {
    EXPECT_LE(at, total);
    done[std::string(stage)] = at;
  };
  const auto runner = LoadModel(options);
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_EQ(done.at("weights"), 4);
  EXPECT_GT(done.at("identity"), 2'000'000);
  const ModelInfo& info = (*runner)->info();
  EXPECT_EQ(info.name, std::filesystem::path(dir.path()).filename());
  EXPECT_EQ(info.backend, "cpu");
  EXPECT_EQ(info.identity.size(), 64u);
  EXPECT_EQ(info.layers.size(), 4u);
  EXPECT_EQ(info.vocab_size, 512);
  EXPECT_EQ(info.conv_channels, 1024);
  EXPECT_EQ(info.max_context_tokens, 262144);
  EXPECT_EQ(info.weight_dtype, DType::kBF16);
  EXPECT_EQ(info.compute_dtype, DType::kF32);
  EXPECT_EQ((*runner)->limits().max_batch_tokens, 4096);
  EXPECT_TRUE((*runner)->healthy());
}

TEST(LoadModelTest, RefusalsNameTheField) {
  LoadOptions options;
  options.dir = ModelDir("tiny-hybrid");
  options.limits = SmallLimits();
  options.backend = "tpu";
  EXPECT_EQ(std::string(LoadModel(options).status().message()),
            "backend = \"tpu\", wanted \"auto\", \"cpu\" or \"cuda\"");
  options.backend = "cpu";
  struct Row {
    void (*edit)(RunnerLimits&);
    const char* message;
  };
  for (const Row& row : {Row{[](RunnerLimits& l) { l.state_slots = 0; },
                             "limits.state_slots = 0, wanted [1, 1048576]"},
                         Row{[](RunnerLimits& l) { l.max_batch_tokens = (1 << 21) + 1; },
                             "limits.max_batch_tokens = 2097153, wanted [1, 2097152]"},
                         Row{[](RunnerLimits& l) { l.max_batch_seqs = -1; },
                             "limits.max_batch_seqs = -1, wanted [1, 65536]"},
                         Row{[](RunnerLimits& l) { l.kv_block_tokens = 100; },
                             "limits.kv_block_tokens = 100, wanted a multiple of 64"},
                         Row{[](RunnerLimits& l) { l.kv_block_tokens = 0; },
                             "limits.kv_block_tokens = 0, wanted [64, 1048576]"},
                         Row{[](RunnerLimits& l) { l.kv_tokens = 127; },
                             "limits.kv_tokens = 127, wanted [128, 137438953408]"}}) {
    LoadOptions bad = options;
    row.edit(bad.limits);
    const auto loaded = LoadModel(bad);
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(loaded.status().message()), row.message);
  }
  options.dir = "/nonexistent";
  EXPECT_EQ(LoadModel(options).status().code(), absl::StatusCode::kNotFound);
}

TEST(LoadModelTest, UnusedTensorsAreWarnedAbout) {
  const TempDir dir;
  CopyModel("tiny-hybrid", dir);
  Editable weights(dir.Read(kShard));
  weights.entries.push_back({"lm_head.weight", "BF16", {1}, "ab"});
  std::filesystem::remove(dir.File("model.safetensors.index.json"));
  dir.Write("model.safetensors", weights.Serialize());
  LoadOptions options;
  options.dir = dir.path();
  options.limits = SmallLimits();
  std::vector<std::string> warnings;
  options.warning = [&](std::string_view message) { warnings.emplace_back(message); };
  EXPECT_TRUE(LoadModel(options).ok());
  EXPECT_EQ(warnings.size(), 1u);
}

}  // namespace
}  // namespace sparsegdn::model::testing
