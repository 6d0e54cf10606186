// Goal: the command line of sparsegdn-mkmodel: what it writes loads, what it refuses it names.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>

#include "server/model/checkpoint.h"
#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

struct Outcome {
  int code = -1;
  std::string output;  // both streams
};

Outcome Mkmodel(const std::string& arguments) {
  Outcome outcome;
  std::FILE* pipe =
      popen((std::string(SPARSEGDN_MKMODEL) + " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), pipe)) {
    outcome.output.append(buffer, n);
  }
  outcome.code = WEXITSTATUS(pclose(pipe));
  return outcome;
}

TEST(MkmodelTest, NamedShapeGivesTheBundledModel) {
  const TempDir dir, bundled;
  CopyModel("tiny-hybrid", bundled);
  const Outcome outcome = Mkmodel("--shape tiny --seed=20 --out " + dir.path());
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  for (const auto& file : std::filesystem::directory_iterator(bundled.path())) {
    const std::string base = file.path().filename().string();
    EXPECT_EQ(dir.Read(base), bundled.Read(base)) << base;
  }
}

TEST(MkmodelTest, AnyConfigIncludingPureGdnInF32AndShards) {
  const TempDir config, dir;
  const TempDir bundled;
  CopyModel("tiny-gdn", bundled);
  nlohmann::json pure = nlohmann::json::parse(bundled.Read("config.json"))["text_config"];
  pure.erase("layer_types");
  pure["num_hidden_layers"] = 3;
  pure["full_attention_interval"] = 4;  // none of three layers
  config.Write("config.json", pure.dump());
  const Outcome outcome = Mkmodel("--config " + config.File("config.json") +
                                  " --dtype f32 --shard-bytes 1000000 --out " + dir.path());
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  const auto parsed = LoadConfig(dir.path());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->layers, std::vector<LayerKind>(3, LayerKind::kLinear));
  const auto checkpoint = Checkpoint::Open(dir.path(), *parsed);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_GT(checkpoint->files().size(), 2u);
}

TEST(MkmodelTest, RefusalsNameTheFlag) {
  const TempDir dir;
  const std::string out = " --out " + dir.File("m");
  for (const auto& [arguments, message] :
       {std::pair<std::string, std::string>{"", "wanted --out and one of --shape and --config"},
        {"--shape tiny", "wanted --out"},
        {"--shape tiny --config x" + out, "one of --shape and --config"},
        {"--shape 5b" + out, "shape = \"5b\", wanted one of tiny"},
        {"--config /nonexistent" + out, "cannot open /nonexistent"},
        {"--shape tiny --seed x" + out, "--seed = \"x\", wanted an unsigned integer"},
        {"--shape tiny --dtype f16" + out, "--dtype = \"f16\", wanted bf16 or f32"},
        {"--shape tiny --shard-bytes 0" + out, "shard_bytes = 0, wanted more than 0"},
        {"--shape tiny --sead 3" + out, "unknown flag --sead"},
        {"--shape tiny --shape tiny" + out, "--shape: got it twice"},
        {"--shape", "--shape: got no value"}}) {
    const Outcome outcome = Mkmodel(arguments);
    EXPECT_EQ(outcome.code, 1) << arguments;
    EXPECT_NE(outcome.output.find(message), std::string::npos) << outcome.output;
    EXPECT_FALSE(std::filesystem::exists(dir.File("m"))) << arguments;
  }
  const Outcome help = Mkmodel("--help");
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.output.find("usage: sparsegdn-mkmodel"), std::string::npos);
}

}  // namespace
}  // namespace sparsegdn::model::testing
