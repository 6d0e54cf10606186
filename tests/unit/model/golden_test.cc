// Goal: the graph computes what the reference implementation computes, module by module.
// Method: fixtures made by transformers in fp32 (tests/golden/make_golden.py) on the bundled
// models. Tolerance: 1e-4 absolute on activations of order one; FP32 sums of at most 2,048 terms in
// another order differ by about 1e-6, four layers amplify that some tens of times.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

constexpr double kTolerance = 1e-4;

// Activations seen by the probe, cut to the fixture's rows.
class Activations {
 public:
  explicit Activations(std::vector<int32_t> rows) : rows_(std::move(rows)) {}

  void Keep(std::string_view name, int32_t layer, const float* data, int64_t rows, int64_t cols,
            int64_t stride) {
    std::vector<float>& kept = found_["layers." + std::to_string(layer) + "." + std::string(name)];
    int64_t first = 0;
    if (name == "final_norm") {  // of the rows of the head, in slices
      first = head_rows_;
      head_rows_ += rows;
    } else {
      kept.clear();
    }
    for (const int32_t row : rows_) {
      if (row < first || row >= first + rows) continue;
      const float* at = data + (row - first) * stride;
      kept.insert(kept.end(), at, at + cols);
    }
  }
  const std::map<std::string, std::vector<float>>& found() const { return found_; }

 private:
  std::vector<int32_t> rows_;
  int64_t head_rows_ = 0;
  std::map<std::string, std::vector<float>> found_;
};

struct Case {
  const char* model;
  int tokens;
  bool f32 = false;  // a copy with every weight widened to F32, which must compute the same
};

class GoldenTest : public ::testing::TestWithParam<Case> {
 protected:
  std::string Name() const {
    return std::string(GetParam().model) + "-" + std::to_string(GetParam().tokens);
  }
  std::unique_ptr<Qwen35Runner> Load() const {
    if (!GetParam().f32) return LoadRunner(ModelDir(GetParam().model), SmallLimits());
    const TempDir dir;
    CopyModel(GetParam().model, dir);
    constexpr char kShard[] = "model.safetensors-00001-of-00001.safetensors";
    Editable weights(dir.Read(kShard));
    int widened = 0;
    for (Editable::Entry& entry : weights.entries) widened += Widen(&entry) ? 1 : 0;
    EXPECT_GT(widened, 20);
    dir.Write(kShard, weights.Serialize());
    return LoadRunner(dir.path(), SmallLimits());
  }

 private:
  static bool Widen(Editable::Entry* entry) {
    if (entry->dtype == "F32") return false;
    EXPECT_EQ(entry->dtype, "BF16");
    std::string wide;
    for (size_t i = 0; i < entry->bytes.size(); i += 2) {
      wide += std::string(2, '\0') + entry->bytes.substr(i, 2);
    }
    entry->dtype = "F32";
    entry->bytes = std::move(wide);
    return true;
  }
};

TEST_P(GoldenTest, EveryModuleMatches) {
  const Fixture fixture(Name());
  auto runner = Load();
  ASSERT_NE(runner, nullptr);
  Activations activations(fixture.Ints("rows"));
  runner->set_probe([&](auto... args) { activations.Keep(args...); });
  Sequence sequence(*runner, fixture.Ints("ids"));
  KeepingSink sink;
  sequence.Run(GetParam().tokens, sink);
  size_t compared = 0;
  for (const auto& [name, tensor] : fixture.tensors()) {
    if (!name.starts_with("layers.")) continue;
    ASSERT_TRUE(activations.found().contains(name)) << name;
    EXPECT_LE(MaxDifference(activations.found().at(name), tensor.values), kTolerance) << name;
    ++compared;
  }
  EXPECT_TRUE(fixture.Has("layers.-1.final_norm"));
  EXPECT_GE(compared, 9 * runner->info().layers.size() + 1);
}

TEST_P(GoldenTest, StatesKvAndLogitsMatch) {
  const Fixture fixture(Name());
  auto runner = Load();
  ASSERT_NE(runner, nullptr);
  Sequence sequence(*runner, fixture.Ints("ids"));
  KeepingSink sink;
  sequence.Run(GetParam().tokens, sink);
  size_t states = 0;
  for (size_t i = 0; i < runner->info().layers.size(); ++i) {
    const int32_t layer = static_cast<int32_t>(i);
    const std::string state = "states." + std::to_string(i), kv = "kv." + std::to_string(i);
    if (runner->info().layers[i] == LayerKind::kLinear) {
      const StateCopy& got = sink.states.at({0, layer, GetParam().tokens});
      EXPECT_LE(MaxDifference(got.conv, fixture.at(state + ".conv").values), kTolerance) << i;
      if (!fixture.Has(state + ".recurrent")) continue;
      EXPECT_LE(MaxDifference(got.recurrent, fixture.at(state + ".recurrent").values), kTolerance)
          << i;
      ++states;
    } else {
      const KvCopy& got = sink.kv.at({0, layer, 0});
      EXPECT_LE(MaxDifference(got.key, fixture.at(kv + ".key").values), kTolerance) << i;
      EXPECT_LE(MaxDifference(got.value, fixture.at(kv + ".value").values), kTolerance) << i;
    }
  }
  EXPECT_GE(states, 1u);
  const std::vector<int32_t> rows = fixture.Ints("rows");
  const std::vector<float>& logits = fixture.at("logits").values;
  const size_t vocab = static_cast<size_t>(runner->info().vocab_size);
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_LE(
        MaxDifference(sink.logits.at({0, rows[r]}), std::span(logits).subspan(r * vocab, vocab)),
        kTolerance)
        << "position " << rows[r];
  }
}

// The states are square, so only values tell K x V from V x K.
TEST_P(GoldenTest, TransposedStateDoesNotMatch) {
  const Fixture fixture(Name());
  auto runner = Load();
  ASSERT_NE(runner, nullptr);
  Sequence sequence(*runner, fixture.Ints("ids"));
  KeepingSink sink;
  sequence.Run(GetParam().tokens, sink);
  const GdnShape shape = runner->info().gdn;
  for (const auto& [name, tensor] : fixture.tensors()) {
    if (!name.ends_with(".recurrent")) continue;
    const int32_t layer = std::stoi(name.substr(name.find('.') + 1));
    const StateCopy& got = sink.states.at({0, layer, GetParam().tokens});
    std::vector<float> transposed(got.recurrent.size());
    const int64_t dk = shape.head_dim_k, dv = shape.head_dim_v;
    for (int64_t h = 0; h < shape.num_v_heads; ++h) {
      for (int64_t i = 0; i < dk; ++i) {
        for (int64_t j = 0; j < dv; ++j) {
          transposed[(h * dv + j) * dk + i] = got.recurrent[(h * dk + i) * dv + j];
        }
      }
    }
    EXPECT_GT(MaxDifference(transposed, tensor.values), 0.01) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest,
                         ::testing::Values(Case{"tiny-hybrid", 70}, Case{"tiny-hybrid", 300},
                                           Case{"tiny-gdn", 70}, Case{"tiny-gdn", 300},
                                           Case{"tiny-hybrid", 300, true},
                                           Case{"tiny-gdn", 300, true}),
                         [](const auto& info) {
                           std::string name = std::string(info.param.model) + "_" +
                                              std::to_string(info.param.tokens) +
                                              (info.param.f32 ? "_f32" : "");
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(RoundALogTest, SwitchMatchesTheReferenceAndMatters) {
  const Fixture fixture("tiny-hybrid-round-a-log"), plain("tiny-hybrid-70");
  auto runner = LoadRunner(ModelDir("tiny-hybrid"), SmallLimits(), /*round_a_log=*/true);
  ASSERT_NE(runner, nullptr);
  EXPECT_TRUE(runner->info().round_a_log);
  const std::vector<int32_t> rows = fixture.Ints("rows");
  Activations activations(rows);
  runner->set_probe([&](auto... args) { activations.Keep(args...); });
  Sequence sequence(*runner, fixture.Ints("ids"));
  KeepingSink sink;
  sequence.Run(70, sink);
  const std::string gates = "layers.0.log_gate";
  EXPECT_LE(MaxDifference(activations.found().at(gates), fixture.at(gates).values), 1e-6);
  EXPECT_GT(MaxDifference(activations.found().at(gates), plain.at(gates).values), 1e-4);
  const size_t vocab = static_cast<size_t>(runner->info().vocab_size);
  std::vector<float> logits;
  for (const int32_t row : rows) {
    const std::vector<float>& got = sink.logits.at({0, row});
    logits.insert(logits.end(), got.begin(), got.end());
  }
  ASSERT_EQ(logits.size(), rows.size() * vocab);
  EXPECT_LE(MaxDifference(logits, fixture.at("logits").values), kTolerance);
  EXPECT_GT(MaxDifference(logits, plain.at("logits").values), 10 * kTolerance);
}

// Decodes from the fixture's own states, as a worker does from a snapshot.
TEST(ContinuationTest, LoadedStateDecodesTheReferenceTokens) {
  const Fixture fixture("tiny-hybrid-continuation");
  auto runner = LoadRunner(ModelDir("tiny-hybrid"), SmallLimits());
  ASSERT_NE(runner, nullptr);
  const std::vector<int32_t> ids = fixture.Ints("ids"), greedy = fixture.Ints("greedy");
  SlotImage image;
  image.position = std::ssize(ids) - 1;
  const auto view = [&](const std::string& name) {
    const Tensor& tensor = fixture.at(name);
    return BufferView{tensor.values.data(), DType::kF32, std::ssize(tensor.values)};
  };
  for (size_t i = 0; i < runner->info().layers.size(); ++i) {
    SlotImage::Layer layer;
    const std::string state = "states." + std::to_string(i), kv = "kv." + std::to_string(i);
    if (runner->info().layers[i] == LayerKind::kLinear) {
      layer.recurrent = view(state + ".recurrent");
      layer.conv = view(state + ".conv");
    } else {
      layer.key_segments = {view(kv + ".key")};
      layer.value_segments = {view(kv + ".value")};
    }
    image.layers.push_back(layer);
  }
  std::vector<int32_t> tokens = ids;
  tokens.insert(tokens.end(), greedy.begin(), greedy.end());
  Sequence sequence(*runner, tokens);
  const absl::Status loaded = runner->Load(sequence.slot(), image);
  ASSERT_TRUE(loaded.ok()) << loaded;
  sequence.Advance(image.position);
  const size_t vocab = static_cast<size_t>(runner->info().vocab_size);
  KeepingSink sink;
  for (size_t i = 0; i < greedy.size(); ++i) {
    sequence.Run(1, sink);
    const std::vector<float>& got = sink.logits.at({0, image.position + static_cast<int64_t>(i)});
    EXPECT_LE(MaxDifference(got, std::span(fixture.at("logits").values).subspan(i * vocab, vocab)),
              kTolerance)
        << "token " << i;
    EXPECT_EQ(std::max_element(got.begin(), got.end()) - got.begin(), greedy[i]) << "token " << i;
  }
  EXPECT_LE(MaxDifference(sink.states.at({0, 2, sequence.position()}).recurrent,
                          fixture.at("final.2.recurrent").values),
            kTolerance);
}

}  // namespace
}  // namespace sparsegdn::model::testing
