// Options: precedence, unknown names, types and ranges, the table itself, the default budget.
#include "server/service/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace sparsegdn::service {
namespace {

std::string WriteFile(const std::string& text) {
  static int count = 0;
  const std::string path = ::testing::TempDir() + "/config-" + std::to_string(getpid()) + "-" +
                           std::to_string(++count) + ".json";
  std::ofstream(path) << text;
  return path;
}

absl::StatusOr<Invocation> Parse(std::vector<std::string> args, std::vector<std::string> env = {}) {
  args.insert(args.begin(), {"--model", "/m"});
  return ParseConfig(args, env);
}

TEST(Config, FlagOverVariableOverFileOverDefault) {
  const std::string file = WriteFile(
      R"({"limits": {"max_queue_requests": 10, "max_queue_tokens": 1000, "max_ttl_seconds": 400},
          "log": {"level": "debug"}, "model": {"round_a_log": true}})");
  const auto got = Parse({"--config", file, "--max-queue-requests=30"},
                         {"SPARSEGDN_MAX_QUEUE_REQUESTS=20", "SPARSEGDN_MAX_QUEUE_TOKENS=2000"});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->config.max_queue_requests, 30);
  EXPECT_EQ(got->config.max_queue_tokens, 2000);
  EXPECT_EQ(got->config.max_ttl_seconds, 400);
  EXPECT_EQ(got->config.log_level, "debug");
  EXPECT_TRUE(got->config.round_a_log);
  EXPECT_EQ(got->config.model_dir, "/m");
  EXPECT_EQ(got->config.default_ttl_seconds, 300);
}

TEST(Config, TheFileMayBeNamedByAVariable) {
  const std::string file = WriteFile(R"({"model": {"dir": "/from-file"}})");
  const auto got = ParseConfig({}, {"SPARSEGDN_CONFIG=" + file});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->config.model_dir, "/from-file");
}

TEST(Config, FaultsNameWhatIsWrong) {
  const struct {
    std::vector<std::string> args, env;
    const char* message;
  } rows[] = {
      {{"--no-such-flag", "1"}, {}, "unknown flag --no-such-flag"},
      {{"stray"}, {}, "unknown argument stray"},
      {{"--threads"}, {}, "--threads needs a value"},
      {{"--threads", "many"}, {}, "--threads = \"many\", wanted a whole number"},
      {{"--threads", "-1"}, {}, "--threads = -1, wanted a number in [0, 1024]"},
      {{"--backend", "tpu"}, {}, "--backend = \"tpu\", wanted auto|cpu|cuda"},
      {{"--round-a-log=yes"}, {}, "--round-a-log = \"yes\", wanted true or false"},
      {{"--default-retention", "1.5"}, {}, "--default-retention = 1.5, wanted a number in [0, 1]"},
      {{"--default-retention", "nan"}, {}, "--default-retention = nan"},
      {{"--default-retention", "0"}, {}, "retention"},
      {{"--default-retention", "0.5", "--default-coverage", "0.5"}, {}, "both set"},
      {{"--default-budget", "dense", "--default-retention", "0.5"}, {}, "is not used"},
      {{"--default-budget", "dense", "--default-min-retention", "0.5"}, {}, "is not used"},
      {{"--default-budget", "retention", "--default-coverage", "0.5"}, {}, "is not used"},
      {{"--default-retention", "0.2", "--default-min-retention", "0.3"}, {}, "retention"},
      {{"--default-ttl-seconds", "4000"}, {}, "--default-ttl-seconds = 4000, wanted at most"},
      {{"--max-batch-tokens", "4000", "--chunk-windows", "2"},
       {},
       "--max-batch-tokens = 4000, wanted at least 4096, one chunk of --chunk-windows = 2"},
      {{"--tls-cert", "c"}, {}, "--tls-cert and --tls-key"},
      {{"--tls-client-ca", "c"}, {}, "--tls-client-ca needs"},
      {{}, {"SPARSEGDN_THREDS=2"}, "unknown variable SPARSEGDN_THREDS"},
      {{}, {"SPARSEGDN_THREADS=x"}, "SPARSEGDN_THREADS = \"x\""},
      {{"--config", "/nonexistent.json"}, {}, "/nonexistent.json: No such file"},
      {{"--config", "/tmp"}, {}, "wanted a regular file"},
  };
  for (const auto& row : rows) {
    const auto got = Parse(row.args, row.env);
    ASSERT_FALSE(got.ok()) << row.message;
    EXPECT_NE(got.status().ToString().find(row.message), std::string::npos) << got.status();
  }
  EXPECT_NE(ParseConfig({}, {}).status().ToString().find("--model is required"), std::string::npos);
}

TEST(Config, FaultsInTheFileNameTheKey) {
  const struct {
    const char* text;
    const char* message;
  } rows[] = {
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"[1]", "wanted an object"},
      {R"({"lmits": {}})", "unknown key lmits"},
      {R"({"limits": {"max_queue": 1}})", "unknown key limits.max_queue"},
      {R"({"limits": 3})", "limits = number, wanted an object"},
      {R"({"limits": {"max_queue_requests": "7"}})", "wanted a number"},
      {R"({"limits": {"max_queue_requests": 1.5}})", "wanted a whole number"},
      {R"({"limits": {"max_queue_requests": 0}})", "limits.max_queue_requests = 0, wanted"},
      {R"({"model": {"dir": 3}})", "model.dir = 3, wanted a string"},
      {R"({"model": {"round_a_log": 1}})", "wanted true or false"},
      {R"({"log": {"level": "loud"}})", "debug|info|warning|error"},
      {R"({"config": "other.json"})", "unknown key config"},
  };
  for (const auto& row : rows) {
    ServerConfig config;
    const absl::Status status = ApplyJson(row.text, config);
    ASSERT_TRUE(absl::IsInvalidArgument(status)) << row.text;
    EXPECT_NE(status.ToString().find(row.message), std::string::npos) << status;
  }
}

// Kubernetes injects the first six into every pod beside a Service named sparsegdn; the seventh is
// the command line client's.
TEST(Config, VariablesThatAreNotOurs) {
  const auto got =
      Parse({}, {"SPARSEGDN_PORT=tcp://10.0.0.1:50051", "SPARSEGDN_SERVICE_HOST=10.0.0.1",
                 "SPARSEGDN_SERVICE_PORT=50051", "SPARSEGDN_SERVICE_PORT_GRPC=50051",
                 "SPARSEGDN_PORT_50051_TCP=tcp://10.0.0.1:50051",
                 "SPARSEGDN_PORT_50051_TCP_ADDR=10.0.0.1", "SPARSEGDN_SERVER=h:1", "OTHER=1"});
  EXPECT_TRUE(got.ok()) << got.status();
}

TEST(Config, TheTableHasNoDoubleNamesAndIsInTheHelp) {
  std::set<std::string> flags, paths;
  const std::string help = HelpText();
  for (const Option& option : Options()) {
    EXPECT_TRUE(flags.insert(option.flag).second) << option.flag;
    if (option.json[0] != '\0') {
      EXPECT_TRUE(paths.insert(option.json).second) << option.json;
    }
    EXPECT_NE(help.find(std::string("  --") + option.flag), std::string::npos);
    EXPECT_FALSE(std::string(option.help).empty());
  }
  EXPECT_TRUE(ParseConfig({"--help"}, {})->help);
  EXPECT_TRUE(ParseConfig({"--version"}, {})->version);
}

TEST(Config, TheDocumentationListsEveryOption) {
  std::ifstream file(SPARSEGDN_SOURCE_DIR "/docs/operations.md");
  std::stringstream text;
  text << file.rdbuf();
  for (const Option& option : Options()) {
    const std::string row = "| `--" + std::string(option.flag) + "`";
    EXPECT_NE(text.str().find(row), std::string::npos) << row;
    if (option.json[0] == '\0') continue;
    EXPECT_NE(text.str().find("| `" + std::string(option.json) + "` |"), std::string::npos)
        << option.json;
  }
}

// Every default is itself a legal value: no row's range contradicts the struct.
TEST(Config, DefaultsPassTheirOwnChecks) {
  for (const Option& option : Options()) {
    const std::string text = DefaultText(option);
    if (text.empty()) continue;
    const auto got = Parse({std::string("--") + option.flag + "=" + text});
    EXPECT_TRUE(got.ok()) << option.flag << ": " << got.status();
  }
}

TEST(Config, DefaultBudget) {
  Budget budget = *DefaultBudget(Parse({})->config);
  EXPECT_EQ(budget.mode, BudgetMode::kRetention);
  EXPECT_EQ(budget.retention, 0.29);
  EXPECT_EQ(budget.solver, Solver::kAuto);
  EXPECT_EQ(budget.local, LocalTerm::kSelf);
  EXPECT_EQ(budget.keep_last, 64);
  budget = *DefaultBudget(Parse({"--default-coverage", "0.8"})->config);
  EXPECT_EQ(budget.mode, BudgetMode::kCoverage);
  EXPECT_EQ(budget.coverage, 0.8);
  budget = *DefaultBudget(Parse({"--default-budget", "dense", "--default-solver", "exact",
                                 "--default-local", "none", "--default-selector", "write_norm"})
                              ->config);
  EXPECT_EQ(budget.mode, BudgetMode::kDense);
  EXPECT_EQ(budget.solver, Solver::kExact);
  EXPECT_EQ(budget.local, LocalTerm::kNone);
  EXPECT_EQ(budget.selector, Selector::kWriteNorm);
}

TEST(Config, AStuckStepIsAFaultOnAGpuOnly) {
  EXPECT_EQ(StuckStepSeconds(Parse({})->config, "cpu"), 0);
  EXPECT_EQ(StuckStepSeconds(Parse({})->config, "cuda"), 600);
  const ServerConfig never = Parse({"--stuck-step-seconds", "0"})->config;
  EXPECT_EQ(StuckStepSeconds(never, "cuda"), 0);
  const ServerConfig soon = Parse({"--stuck-step-seconds", "2.5"})->config;
  EXPECT_EQ(StuckStepSeconds(soon, "cpu"), 2.5);
}

TEST(Config, AStepHoldsAChunkWhateverItsSize) {
  EXPECT_EQ(Parse({})->config.chunk_windows, 0);  // by the device, which only the start looks at
  EXPECT_EQ(BatchTokens(Parse({})->config), 4 * 2048);
  EXPECT_EQ(ToEngineConfig(Parse({})->config)->chunk_windows, 1);
  EXPECT_EQ(BatchTokens(Parse({"--chunk-windows", "256"})->config), 1 << 21);
  EXPECT_EQ(BatchTokens(Parse({"--chunk-windows", "512"})->config), 1 << 21);
  EXPECT_EQ(BatchTokens(Parse({"--max-batch-tokens", "5000"})->config), 5000);
}

TEST(Config, EveryLimitReachesTheEngine) {
  const ServerConfig config = Parse({"--max-queue-bytes", "12345"})->config;
  EXPECT_EQ(ToEngineLimits(config).max_queue_bytes, 12345);
}

TEST(Config, TheReceiveLimitHoldsTheLongestPrompt) {
  EXPECT_GT(ReceiveLimitBytes(Parse({})->config), int64_t{4} << 20);
  const auto got = Parse({"--max-prompt-tokens", "2000000"});
  EXPECT_GE(ReceiveLimitBytes(got->config), 8000000);
}

}  // namespace
}  // namespace sparsegdn::service
