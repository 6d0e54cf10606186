// Input: the text of a budget profile. Promise: a weight in bounds for each layer, from which any
// retention is shared out with its mean kept, or INVALID_ARGUMENT.
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "server/model/budget_profile.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

constexpr int64_t kLayers = 4;

void CheckShares(const model::BudgetProfile& profile, double retention) {
  const std::vector<double> shares = model::LayerRetentions(retention, profile);
  Require(shares.size() == profile.size(), "a share for each layer");
  for (const double share : shares) Require(share > 0 && share <= 1, "a share out of (0, 1]");
  const double mean = std::accumulate(shares.begin(), shares.end(), 0.0) / kLayers;
  Require(std::abs(mean - retention) <= 1e-9, absl::StrCat("the mean is ", mean));
}

}  // namespace

int FuzzBudgetProfile(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto profile = model::ParseBudgetProfile(text, "profile", kLayers);
  NoteOutcome(profile.status());
  if (!profile.ok()) {
    RequireRefusal(profile.status(), {absl::StatusCode::kInvalidArgument}, 512);
    return 0;
  }
  Require(std::ssize(*profile) == kLayers, "a weight for each layer");
  for (const double weight : *profile) Require(weight >= 1e-6 && weight <= 1e9, "a weight");
  for (const double retention : {1e-6, 0.29, 0.75, 0.999, 1.0}) CheckShares(*profile, retention);
  return 0;
}

std::vector<std::string> BudgetProfileSeeds() {
  return {
      R"({"relative_retention": [1, 2, 0.5, 4]})",
      R"({"about": {"command": "x", "rows": [1, [2]]}, "relative_retention": [1e-6, 1e9, 1, 1]})",
      R"({"relative_retention": [1, 2, 3]})",
      R"({"relative_retention": [1, 2, 3, "4"]})",
      R"({"relative_retention": [1, 2, 3, -4]})",
      R"({"relative_retention": null})",
      absl::StrCat("{\"", std::string(5000, 'k'), "\": 1}"),
      absl::StrCat("{\"relative_retention\": ", std::string(kDeep, '['), "1",
                   std::string(kDeep, ']'), "}"),
      absl::StrCat("{\"about\": ", std::string(kDeep, '['), std::string(kDeep, ']'), "}"),
      "[]",
      "{}",
      ""};
}

}  // namespace sparsegdn::fuzz
