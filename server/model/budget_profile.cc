#include "server/model/budget_profile.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/model/files.h"
#include "server/model/json_fields.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr double kMinWeight = 1e-6, kMaxWeight = 1e9;
constexpr char kField[] = "relative_retention";

absl::Status Bad(const std::string& path, const std::string& field, const std::string& got,
                 const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", field, " = ", got, ", wanted ", wanted));
}

}  // namespace

absl::StatusOr<BudgetProfile> ParseBudgetProfile(const std::string& text, const std::string& path,
                                                 int64_t linear_layers) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad(path, "content", Shown(json), "a JSON object");
  for (const auto& [key, value] : json.items()) {
    if (key != kField && key != "about") {
      return Bad(path, Shown(nlohmann::json(key)), Shown(value),
                 absl::StrCat("only ", kField, " and about"));
    }
  }
  // By reference: a copy of a deeply nested value would recurse.
  const nlohmann::json absent;
  const auto found = json.find(kField);
  const nlohmann::json& weights = found == json.end() ? absent : *found;
  if (!weights.is_array() || std::ssize(weights) != linear_layers) {
    return Bad(path, kField, Shown(weights),
               absl::StrCat("an array of ", linear_layers, " numbers, one per GDN layer"));
  }
  BudgetProfile profile;
  for (size_t i = 0; i < weights.size(); ++i) {
    const double weight = weights[i].is_number() ? weights[i].get<double>() : -1.0;
    if (!(weight >= kMinWeight && weight <= kMaxWeight)) {
      return Bad(path, absl::StrCat(kField, "[", i, "]"), Shown(weights[i]),
                 absl::StrCat("a number in [", kMinWeight, ", ", kMaxWeight, "]"));
    }
    profile.push_back(weight);
  }
  return profile;
}

absl::StatusOr<BudgetProfile> LoadBudgetProfile(const std::string& path, int64_t linear_layers) {
  SPARSEGDN_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxBytes));
  return ParseBudgetProfile(text, path, linear_layers);
}

absl::StatusOr<BudgetProfile> FindBudgetProfile(const std::string& option,
                                                const std::string& model_dir,
                                                int64_t linear_layers) {
  if (option == "none") return BudgetProfile();
  if (!option.empty()) return LoadBudgetProfile(option, linear_layers);
  const std::string beside = (std::filesystem::path(model_dir) / "budget_profile.json").string();
  std::error_code error;
  if (!std::filesystem::exists(beside, error)) return BudgetProfile();
  return LoadBudgetProfile(beside, linear_layers);
}

std::vector<double> LayerRetentions(double retention, std::span<const double> profile) {
  std::vector<double> shares(profile.size(), 1.0);
  if (retention >= 1.0) return shares;
  // Layers that would pass 1 stop there and leave the rest to the others: at most a round a layer.
  std::vector<bool> full(profile.size(), false);
  double left = retention * static_cast<double>(profile.size());
  for (bool changed = true; changed;) {
    changed = false;
    double weight = 0.0;
    for (size_t i = 0; i < profile.size(); ++i) weight += full[i] ? 0.0 : profile[i];
    for (size_t i = 0; i < profile.size(); ++i) {
      if (full[i]) continue;
      // Positive: while a layer is not full, something is left, since retention < 1.
      shares[i] = std::clamp(left / weight * profile[i], 1e-12, 1.0);
    }
    for (size_t i = 0; i < profile.size(); ++i) {
      if (full[i] || shares[i] < 1.0) continue;
      full[i] = changed = true;
      left -= 1.0;
    }
  }
  return shares;
}

std::vector<Budget> LayerBudgets(const Budget& budget, std::span<const double> profile,
                                 int64_t linear_layers) {
  std::vector<Budget> budgets(static_cast<size_t>(linear_layers), budget);
  if (profile.empty() || budget.mode != BudgetMode::kRetention) return budgets;
  const std::vector<double> shares = LayerRetentions(budget.retention, profile);
  for (size_t i = 0; i < budgets.size() && i < shares.size(); ++i) {
    const double ratio = shares[i] / budget.retention;
    budgets[i].retention = shares[i];
    if (budget.min_retention >= 0.0) {
      budgets[i].min_retention = std::min(shares[i], budget.min_retention * ratio);
    }
    if (budget.max_retention >= 0.0) {
      budgets[i].max_retention = std::clamp(budget.max_retention * ratio, shares[i], 1.0);
    }
  }
  return budgets;
}

}  // namespace sparsegdn::model
