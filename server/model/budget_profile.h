// How a request's retention is shared out over the GDN layers of a model.
#ifndef SPARSEGDN_SERVER_MODEL_BUDGET_PROFILE_H_
#define SPARSEGDN_SERVER_MODEL_BUDGET_PROFILE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sparsegdn/types.h"

namespace sparsegdn::model {

// Relative retention of each GDN layer, in the model's order; empty: the same for all.
using BudgetProfile = std::vector<double>;

// The text {"relative_retention": [w, ...], "about": anything}. `linear_layers` weights in
// [1e-6, 1e9] are wanted; only their ratios matter. INVALID_ARGUMENT names `path` and field, got,
// wanted.
absl::StatusOr<BudgetProfile> ParseBudgetProfile(const std::string& text, const std::string& path,
                                                 int64_t linear_layers);

// The same from a file of at most 1 MiB; NOT_FOUND too.
absl::StatusOr<BudgetProfile> LoadBudgetProfile(const std::string& path, int64_t linear_layers);

// The profile named by `option`: a path; "none" for no profile; "" for budget_profile.json in
// `model_dir`, if there is one.
absl::StatusOr<BudgetProfile> FindBudgetProfile(const std::string& option,
                                                const std::string& model_dir,
                                                int64_t linear_layers);

// Retention of each layer: min(1, c w_l), with c such that their mean is `retention` in (0, 1].
// Sets all of them to 1 when retention is 1.
std::vector<double> LayerRetentions(double retention, std::span<const double> profile);

// `budget` as each layer runs it. Bounds keep their ratio to the retention, up to 1. Only
// BudgetMode::kRetention is shared out; with other modes or no profile every layer runs `budget`.
std::vector<Budget> LayerBudgets(const Budget& budget, std::span<const double> profile,
                                 int64_t linear_layers);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_BUDGET_PROFILE_H_
