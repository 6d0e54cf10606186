// From the fields a request gives and the configured default to one effective budget.
#ifndef SPARSEGDN_SERVER_ENGINE_BUDGET_H_
#define SPARSEGDN_SERVER_ENGINE_BUDGET_H_

#include "absl/status/statusor.h"
#include "server/engine/types.h"

namespace sparsegdn::engine {

// The effective budget, bounds resolved. The mode is the given one, else that of the only one of
// retention and coverage that is given, else the default's. A number that the mode does not use is
// refused. The default's explicit bounds apply only where the request keeps both its mode and its
// target, because they were chosen for that target. INVALID_ARGUMENT names the field, e.g.
// "budget.retention".
absl::StatusOr<Budget> ResolveBudget(const BudgetOverrides& overrides, const Budget& defaults);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_BUDGET_H_
