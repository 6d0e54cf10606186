#include "server/engine/budget.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::engine {
namespace {

constexpr int64_t kMaxKeep = std::numeric_limits<int32_t>::max();

absl::Status CheckShare(const char* field, const std::optional<double>& value, bool zero_allowed) {
  if (!value) return absl::OkStatus();
  // Written so that NaN fails.
  if (*value <= 1.0 && (*value > 0.0 || (zero_allowed && *value == 0.0))) return absl::OkStatus();
  return Invalid(field,
                 absl::StrCat("got ", *value, ", wanted ", zero_allowed ? "[0, 1]" : "(0, 1]"));
}

absl::Status CheckKeep(const char* field, const std::optional<int64_t>& value) {
  if (!value || (*value >= 0 && *value <= kMaxKeep)) return absl::OkStatus();
  return Invalid(field, absl::StrCat("got ", *value, ", wanted 0 to ", kMaxKeep));
}

absl::Status CheckUnused(const char* field, bool given, const char* mode) {
  if (!given) return absl::OkStatus();
  return Invalid(field, absl::StrCat("got a value, wanted none: mode ", mode, " does not use it"));
}

absl::StatusOr<BudgetMode> ResolveMode(const BudgetOverrides& o, BudgetMode fallback) {
  if (o.mode) return *o.mode;
  if (o.retention && o.coverage) {
    return Invalid("budget.mode",
                   "got both retention and coverage without a mode, wanted one of them");
  }
  if (o.retention) return BudgetMode::kRetention;
  if (o.coverage) return BudgetMode::kCoverage;
  return fallback;
}

absl::Status CheckFieldsOfMode(const BudgetOverrides& o, BudgetMode mode) {
  const char* name = mode == BudgetMode::kDense       ? "dense"
                     : mode == BudgetMode::kRetention ? "retention"
                                                      : "coverage";
  const bool dense = mode == BudgetMode::kDense;
  absl::Status status;
  status.Update(CheckUnused("budget.retention",
                            o.retention.has_value() && mode != BudgetMode::kRetention, name));
  status.Update(CheckUnused("budget.coverage",
                            o.coverage.has_value() && mode != BudgetMode::kCoverage, name));
  status.Update(CheckUnused("budget.min_retention", dense && o.min_retention.has_value(), name));
  status.Update(CheckUnused("budget.max_retention", dense && o.max_retention.has_value(), name));
  status.Update(CheckUnused("budget.keep_first", dense && o.keep_first.has_value(), name));
  status.Update(CheckUnused("budget.keep_last", dense && o.keep_last.has_value(), name));
  return status;
}

absl::Status CheckRanges(const BudgetOverrides& o) {
  absl::Status status;
  status.Update(CheckShare("budget.retention", o.retention, /*zero_allowed=*/false));
  status.Update(CheckShare("budget.coverage", o.coverage, /*zero_allowed=*/false));
  status.Update(CheckShare("budget.min_retention", o.min_retention, /*zero_allowed=*/true));
  status.Update(CheckShare("budget.max_retention", o.max_retention, /*zero_allowed=*/true));
  status.Update(CheckKeep("budget.keep_first", o.keep_first));
  status.Update(CheckKeep("budget.keep_last", o.keep_last));
  return status;
}

// A bound that the request does not give has a default; the message names one that it gives.
absl::Status CheckBounds(const Budget& budget, const BudgetOverrides& o) {
  if (budget.min_retention > budget.max_retention) {
    if (o.max_retention && !o.min_retention) {
      return Invalid("budget.max_retention",
                     absl::StrCat("got ", budget.max_retention,
                                  ", wanted at least min_retention = ", budget.min_retention));
    }
    return Invalid("budget.min_retention",
                   absl::StrCat("got ", budget.min_retention,
                                ", wanted at most max_retention = ", budget.max_retention));
  }
  if (budget.mode == BudgetMode::kRetention &&
      (budget.retention < budget.min_retention || budget.retention > budget.max_retention)) {
    return Invalid(
        "budget.retention",
        absl::StrCat("got ", budget.retention, ", wanted within [min_retention, ",
                     "max_retention] = [", budget.min_retention, ", ", budget.max_retention, "]"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Budget> ResolveBudget(const BudgetOverrides& overrides, const Budget& defaults) {
  const absl::StatusOr<BudgetMode> mode = ResolveMode(overrides, defaults.mode);
  if (!mode.ok()) return mode.status();
  if (absl::Status s = CheckFieldsOfMode(overrides, *mode); !s.ok()) return s;
  if (absl::Status s = CheckRanges(overrides); !s.ok()) return s;

  Budget budget = defaults;
  budget.mode = *mode;
  const bool same_target = *mode == defaults.mode && !overrides.retention && !overrides.coverage;
  if (!same_target) budget.min_retention = budget.max_retention = -1.0;
  budget.selector = overrides.selector.value_or(defaults.selector);
  budget.solver = overrides.solver.value_or(defaults.solver);
  budget.local = overrides.local.value_or(defaults.local);
  budget.retention = overrides.retention.value_or(defaults.retention);
  budget.coverage = overrides.coverage.value_or(defaults.coverage);
  if (overrides.min_retention) budget.min_retention = *overrides.min_retention;
  if (overrides.max_retention) budget.max_retention = *overrides.max_retention;
  budget.keep_first = overrides.keep_first.value_or(defaults.keep_first);
  budget.keep_last = overrides.keep_last.value_or(defaults.keep_last);

  if (*mode != BudgetMode::kDense) {
    const RetentionBounds bounds = ResolveBounds(budget);
    budget.min_retention = bounds.min_retention;
    budget.max_retention = bounds.max_retention;
    if (absl::Status s = CheckBounds(budget, overrides); !s.ok()) return s;
  }
  if (absl::Status s = ValidateBudget(budget); !s.ok()) {
    return Invalid("budget", std::string(s.message()));
  }
  return budget;
}

}  // namespace sparsegdn::engine
