// The calibration's arithmetic and its page. The command on real servers: quality.calibrate.
#include "cli/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cli/exit_codes.h"
#include "cli/local_server.h"
#include "sparsegdn/client/status.h"

namespace sparsegdn::cli {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Measured Row(double retention, double kl, double top1 = 1) {
  Measured row;
  row.retention = retention;
  row.mean = {kl, top1};
  row.worst_kl = 2 * kl;
  return row;
}

TEST(Calibration, PromptsAreListsAndErrorsNameTheLine) {
  auto prompts = ParsePrompts("p", "[1, 2]\n\n  \r\n[7]\n");
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  EXPECT_THAT(*prompts, ElementsAre(ElementsAre(1, 2), ElementsAre(7)));
  const struct {
    const char* text;
    const char* message;
  } rows[] = {{"[1]\n\"x\"\n", "p:2: must be a JSON list"},
              {"[1]\n[]\n", "p:2: must be a JSON list"},
              {"[1, -2, 99999999999]\n", "p:1: must be a JSON list"},
              {"1 2 3\n", "p:1: must be a JSON list"},
              {"\n\n", "p: no prompt"}};
  for (const auto& row : rows) {
    const auto found = ParsePrompts("p", row.text);
    EXPECT_EQ(ExitCodeOf(found.status()), kUsage) << row.text;
    EXPECT_THAT(std::string(found.status().message()), HasSubstr(row.message));
  }
}

TEST(Calibration, PositionsSpreadOverThePrompt) {
  EXPECT_THAT(ComparedPositions(1, 512), ElementsAre(0));
  EXPECT_THAT(ComparedPositions(3, 512), ElementsAre(0, 1, 2));
  const auto many = ComparedPositions(100000, 512);
  EXPECT_EQ(many.size(), 1024u);
  EXPECT_EQ(many.front(), 0);
  EXPECT_EQ(many.back(), 99999);
  for (size_t i = 1; i < many.size(); ++i) EXPECT_GT(many[i], many[i - 1]);
  // 64 MiB of fp32 rows of a vocabulary of 248,320.
  EXPECT_EQ(ComparedPositions(100000, 248320).size(), (64u << 20) / (4 * 248320u));
  EXPECT_THAT(ComparedPositions(100000, int64_t{1} << 40), ElementsAre(99999));
}

TEST(Calibration, DistanceIsTheKlOfTheDefinition) {
  // p = (1/2, 1/2), q = (1/4, 3/4): KL = 1/2 ln 2 + 1/2 ln 2/3; a shift of logits changes nothing.
  const std::vector<float> dense = {0, 0, 5, 1};
  const std::vector<float> sparse = {100 + std::log(0.25f), 100 + std::log(0.75f), 5, 1};
  const Distance found = Compare(dense, sparse, 2);
  EXPECT_THAT(found.kl, DoubleNear(0.5 * (0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3)), 1e-5));
  EXPECT_EQ(found.top1, 0.5);  // the first row's largest is another
  EXPECT_EQ(Compare(dense, dense, 2).kl, 0);
}

TEST(Calibration, ProfilesFollowTheLayersAndHaveMeanOne) {
  EXPECT_THAT(CandidateProfiles({0.5}), ElementsAre(Profile()));
  const auto found = CandidateProfiles({1e-6, 0.1, 0.3});
  ASSERT_EQ(found.size(), 4u);
  for (size_t i = 1; i < found.size(); ++i) {
    const Profile& weights = found[i];
    EXPECT_THAT((weights[0] + weights[1] + weights[2]) / 3, DoubleNear(1, 1e-3));
    EXPECT_LT(weights[0], weights[1]);
    EXPECT_LT(weights[1], weights[2]);
    EXPECT_GT(weights[0], 0.04);
  }
  EXPECT_GT(found[3][2], found[1][2]);
  for (const Profile& equal : CandidateProfiles({2, 2})) {
    for (const double weight : equal) EXPECT_EQ(weight, 1);
  }
  // c w = 1 for the heavy layers, so that the rest of 1 + 1 + r is the sparse one's.
  EXPECT_EQ(OneLayerProfile(3, 1)[1], 1);
  EXPECT_GT(OneLayerProfile(3, 1)[2], 1e6);
  EXPECT_THAT(OneLayerRetention(3, 0.25), DoubleNear(0.75, 1e-12));
}

TEST(Calibration, TheSmallestBudgetBelowWhichNothingFails) {
  EXPECT_EQ(Recommend({Row(0.5, 0.01), Row(0.3, 0.02), Row(0.1, 0.05)}, 0.02), 0.3);
  EXPECT_EQ(Recommend({Row(0.5, 0.01), Row(0.3, 0.03), Row(0.1, 0.02)}, 0.02), 0.5);
  EXPECT_EQ(Recommend({Row(0.5, 0.03), Row(0.3, 0.01)}, 0.02), std::nullopt);
  EXPECT_LT(LogGain({Row(0.5, 0.01)}, {Row(0.5, 0.02)}), 0);
}

TEST(Calibration, ReportEscapesAndMarksTheBudget) {
  Calibration c;
  c.info.set_model_name("<script>");
  c.prompts = 2;
  c.tokens = 4096;
  c.target_kl = 0.02;
  c.layers = {0, 2};
  c.layer_kl = {0.001, 0.01};
  c.layer_retention = 0.3;
  c.alike = {Row(0.5, 0.01, 0.99), Row(0.3, 0.03, 0.9)};
  c.shared = {Row(0.5, 0.005, 0.99), Row(0.3, 0.015, 0.95)};
  c.profile = {0.5, 1.5};
  c.recommended = 0.3;
  const std::string page = CalibrationPage(c);
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;"));
  EXPECT_THAT(page, Not(HasSubstr("<script>")));
  EXPECT_THAT(page, HasSubstr("Retention 0.3 is the smallest measured with KL &lt;= 0.02"));
  EXPECT_THAT(page, HasSubstr("<tr class=chosen><td>30 %"));
  EXPECT_THAT(page, HasSubstr("--budget-profile budget_profile.json --default-retention 0.3"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
  EXPECT_EQ(ProfileJson(c)["relative_retention"], Json({0.5, 1.5}));
  EXPECT_EQ(CalibrationJson(c)["shared"][1]["worst_prompt_kl"], 0.03);
  c.recommended.reset();
  EXPECT_THAT(CalibrationPage(c), HasSubstr("No measured retention"));
  EXPECT_TRUE(CalibrationJson(c)["recommended_retention"].is_null());
}

TEST(LocalServer, AnEndBeforeItIsReadyTellsTheLog) {
  client::Cancellation cancellation;
  LocalServerOptions options{"/bin/sh", "/nowhere", {}, ""};
  auto found = LocalServer::Start(options, &cancellation);  // sh refuses --model
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(client::DetailsOf(found.status()).reason, "SERVER_ENDED");
  options.binary = "/nowhere/sparsegdn-server";
  found = LocalServer::Start(options, &cancellation);
  EXPECT_THAT(std::string(found.status().message()), HasSubstr("binary cannot be run"));
}

}  // namespace
}  // namespace sparsegdn::cli
