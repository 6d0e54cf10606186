// The command line's own rules: token inputs, flags, exit codes, what is printed.
#include <gtest/gtest.h>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "cli/render.h"
#include "cli/request.h"
#include "cli/tokens.h"
#include "sparsegdn/client/status.h"

namespace sparsegdn::cli {
namespace {

using Tokens = std::vector<int32_t>;

struct TokenRow {
  const char* name;
  TokenFormat format;
  std::string input;
  Tokens expected;
};

TEST(TokensTest, Accepted) {
  const TokenRow rows[] = {
      {"spaces", TokenFormat::kAuto, " 1 2\n3\t", {1, 2, 3}},
      {"commas", TokenFormat::kText, "1,2, 3,", {1, 2, 3}},
      {"windows", TokenFormat::kText, "1\r\n2\r\n", {1, 2}},
      {"negative", TokenFormat::kText, "-1", {-1}},
      {"json", TokenFormat::kAuto, "  [1, 2,\n3]", {1, 2, 3}},
      {"json_empty", TokenFormat::kJson, "[]", {}},
      {"nothing", TokenFormat::kAuto, "", {}},
      {"int32", TokenFormat::kInt32, std::string("\x01\0\0\0\xff\xff\xff\xff", 8), {1, -1}},
      {"limits", TokenFormat::kText, "2147483647 -2147483648", {INT32_MAX, INT32_MIN}},
  };
  for (const TokenRow& row : rows) {
    const auto tokens = ParseTokens(row.input, row.format);
    ASSERT_TRUE(tokens.ok()) << row.name << tokens.status();
    EXPECT_EQ(*tokens, row.expected) << row.name;
  }
}

TEST(TokensTest, Refused) {
  const std::pair<TokenFormat, std::string> rows[] = {
      {TokenFormat::kText, "1 x 2"},
      {TokenFormat::kText, "2147483648"},
      {TokenFormat::kText, "1.5"},
      {TokenFormat::kJson, "{\"a\": 1}"},
      {TokenFormat::kJson, "[1, 2"},
      {TokenFormat::kJson, "[1, [2]]"},
      {TokenFormat::kJson, "[1, 4294967296]"},
      {TokenFormat::kJson, "[18446744073709551615]"},
      {TokenFormat::kJson, "[1.0]"},
      {TokenFormat::kInt32, "abcde"},
  };
  for (const auto& [format, input] : rows) {
    EXPECT_EQ(ExitCodeOf(ParseTokens(input, format).status()), kUsage) << input;
  }
  EXPECT_NE(ParseTokens("1 2 x", TokenFormat::kText).status().message().find("token 2 is \"x\""),
            std::string::npos);
  EXPECT_EQ(ExitCodeOf(ReadTokens("/no/such/file", TokenFormat::kAuto).status()), kFile);
  EXPECT_NE(ParseTokens("\xff\x1b", TokenFormat::kText).status().message().find("\"\\xff\\x1b\""),
            std::string::npos);
  // So deep that whoever walks it recursively, to print it for example, runs out of stack.
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_EQ(ParseTokens(deep, TokenFormat::kJson).status().message(),
            "token 0 is array, must be a 32-bit integer");
}

const std::vector<FlagGroup> kGroups = {
    {"Group", {{"name", "VALUE", "A value."}, {"switch", "", "A switch."}, {"n", "N", "Short."}}}};

TEST(FlagsTest, Forms) {
  const auto args = Args::Parse(kGroups, {"--name=1", "--switch", "-n", "2", "-", "--", "--x"});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(args->Text("name"), "1");
  EXPECT_EQ(args->Text("n"), "2");
  EXPECT_TRUE(args->Has("switch"));
  EXPECT_EQ(args->positional(), (std::vector<std::string>{"-", "--x"}));
}

TEST(FlagsTest, Errors) {
  const std::pair<std::vector<std::string>, const char*> rows[] = {
      {{"--nam", "1"}, "unknown flag --nam; is --name meant?"},
      {{"--name"}, "--name needs a value"},
      {{"--switch=1"}, "--switch takes no value"},
      {{"--name", "1", "--name", "2"}, "--name is given twice"},
  };
  for (const auto& [arguments, message] : rows) {
    const absl::Status status = Args::Parse(kGroups, arguments).status();
    EXPECT_EQ(ExitCodeOf(status), kUsage) << message;
    EXPECT_NE(status.message().find(message), std::string::npos) << status;
  }
  const auto args = *Args::Parse(kGroups, {"--name", "x"});
  int64_t number = 0;
  std::optional<double> real;
  std::vector<int64_t> list;
  int choice = 0;
  EXPECT_EQ(ExitCodeOf(args.Read("name", 0, 9, &number)), kUsage);
  EXPECT_EQ(ExitCodeOf(args.Read("name", &real)), kUsage);
  EXPECT_EQ(ExitCodeOf(args.ReadList("name", &list)), kUsage);
  EXPECT_EQ(ExitCodeOf(args.ReadChoice("name", {"a", "b"}, &choice)), kUsage);
}

TEST(FlagsTest, EveryCommandIsDescribed) {
  for (const Command& command : {PrefillCommand(), GenerateCommand(), InfoCommand(), BenchCommand(),
                                 ImportCommand(), ReleaseCommand()}) {
    const std::string help = DescribeFlags(command.flags);
    EXPECT_NE(help.find("--server"), std::string::npos) << command.name;
    size_t begin = 0;
    while (begin < help.size()) {
      const size_t end = help.find('\n', begin);
      EXPECT_LE(end - begin, 100u) << help.substr(begin, end - begin);
      begin = end + 1;
    }
  }
}

Args Parse(const std::vector<std::string>& arguments) {
  return *Args::Parse({BudgetFlags(), OutputFlags(), CallFlags()}, arguments);
}

TEST(RequestTest, BudgetFlagsFillOnlyWhatIsGiven) {
  v1::Budget budget;
  ASSERT_TRUE(ApplyBudget(Parse({}), &budget).ok());
  EXPECT_EQ(budget.ByteSizeLong(), 0u);
  ASSERT_TRUE(ApplyBudget(Parse({"--retention", "0.29", "--keep-last", "0", "--selector",
                                 "write_norm", "--solver", "block_adjacent", "--local", "none"}),
                          &budget)
                  .ok());
  EXPECT_EQ(budget.mode(), v1::BUDGET_MODE_UNSPECIFIED);
  EXPECT_EQ(budget.retention(), 0.29);
  EXPECT_TRUE(budget.has_keep_last());
  EXPECT_FALSE(budget.has_keep_first());
  EXPECT_EQ(budget.selector(), v1::SELECTOR_WRITE_NORM);
  EXPECT_EQ(budget.solver(), v1::SOLVER_BLOCK_ADJACENT);
  EXPECT_EQ(budget.local(), v1::LOCAL_TERM_NONE);
  v1::Budget dense;
  ASSERT_TRUE(ApplyBudget(Parse({"--dense"}), &dense).ok());
  EXPECT_EQ(dense.mode(), v1::BUDGET_MODE_DENSE);
}

TEST(RequestTest, OutputFlags) {
  v1::Outputs outputs;
  ASSERT_TRUE(ApplyOutputs(Parse({"--no-kv", "--state-dtype", "fp8", "--kv-dtype", "bf16",
                                  "--state-layout", "value_major", "--conv-columns", "3",
                                  "--logits", "0,last", "--top-k", "5"}),
                           99, &outputs)
                  .ok());
  EXPECT_FALSE(outputs.kv());
  EXPECT_FALSE(outputs.has_state());
  EXPECT_EQ(outputs.state_dtype(), v1::DTYPE_FP8_E4M3);
  EXPECT_EQ(outputs.kv_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(outputs.state_layout(), v1::STATE_LAYOUT_VALUE_MAJOR);
  EXPECT_EQ(outputs.conv_layout(), v1::CONV_LAYOUT_THREE_COLUMNS);
  EXPECT_EQ(outputs.logits().positions(1), 99);
  EXPECT_EQ(outputs.logits().top_k(), 5u);
  EXPECT_EQ(ExitCodeOf(ApplyOutputs(Parse({"--top-k", "5"}), 99, &outputs)), kUsage);
  EXPECT_EQ(ExitCodeOf(ApplyOutputs(Parse({"--logits", "x"}), 99, &outputs)), kUsage);
}

TEST(RequestTest, CallFlags) {
  v1::PrefillRequest request;
  ASSERT_TRUE(
      ApplyCall(Parse({"--snapshot-at", "after_last", "--keep", "--ttl", "9"}), &request).ok());
  EXPECT_EQ(request.snapshot_at(), v1::SNAPSHOT_AT_AFTER_LAST);
  EXPECT_EQ(request.keep_snapshot().ttl_seconds(), 9u);
  EXPECT_EQ(request.worker().format_version(), 1u);
  EXPECT_EQ(ExitCodeOf(ApplyCall(Parse({"--ttl", "9"}), &request)), kUsage);
  EXPECT_EQ(ExitCodeOf(ApplyCall(Parse({"--priority", "9"}), &request)), kUsage);
}

TEST(ExitCodeTest, EveryCodeHasOne) {
  using absl::StatusCode;
  const std::pair<StatusCode, ExitCode> rows[] = {
      {StatusCode::kOk, kOk},
      {StatusCode::kInvalidArgument, kRefused},
      {StatusCode::kOutOfRange, kRefused},
      {StatusCode::kFailedPrecondition, kRefused},
      {StatusCode::kNotFound, kRefused},
      {StatusCode::kUnauthenticated, kRefused},
      {StatusCode::kUnavailable, kTryLater},
      {StatusCode::kResourceExhausted, kTryLater},
      {StatusCode::kDeadlineExceeded, kDeadline},
      {StatusCode::kDataLoss, kIntegrity},
      {StatusCode::kCancelled, kInterrupted},
      {StatusCode::kInternal, kOther},
      {StatusCode::kUnknown, kOther},
  };
  for (const auto& [code, exit_code] : rows) {
    EXPECT_EQ(ExitCodeOf(absl::Status(code, "x")), exit_code) << absl::StatusCodeToString(code);
  }
}

TEST(RenderTest, Numbers) {
  EXPECT_EQ(Grouped(0), "0");
  EXPECT_EQ(Grouped(999), "999");
  EXPECT_EQ(Grouped(-1234567), "-1,234,567");
  EXPECT_EQ(Grouped(-123), "-123");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
}

TEST(RenderTest, ProgressLineFitsATerminal) {
  client::PrefillProgress progress;
  EXPECT_NE(ProgressLine(progress).find("queued"), std::string::npos);
  progress.stage = client::PrefillProgress::Stage::kStreaming;
  progress.tokens_done = 131072;
  progress.tokens_total = 131072;
  progress.bytes_done = progress.bytes_total = uint64_t{5} << 30;
  EXPECT_NE(ProgressLine(progress).find("100 %"), std::string::npos) << ProgressLine(progress);
  EXPECT_LE(ProgressLine(progress).size(), 79u);
}

}  // namespace
}  // namespace sparsegdn::cli
