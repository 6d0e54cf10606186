#include "cli/load_plan.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/flags.h"

namespace sparsegdn::cli {
namespace {

// Uniform in [0, 1). The standard fixes mt19937_64 but not its distributions, so these are ours: a
// seed means the same load everywhere.
double Uniform(std::mt19937_64* random) { return static_cast<double>((*random)() >> 11) * 0x1p-53; }

int64_t Draw(const Mix& mix, double uniform) {
  double sum = 0;
  for (const MixEntry& entry : mix) sum += entry.weight;
  double left = uniform * sum;
  for (const MixEntry& entry : mix) {
    left -= entry.weight;
    if (left < 0) return entry.value;
  }
  return mix.back().value;
}

}  // namespace

absl::StatusOr<Mix> ParseMix(const std::string& flag, const std::string& text, int64_t min,
                             int64_t max) {
  Mix mix;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ','))) {
    const std::vector<std::string> pair = absl::StrSplit(part, ':');
    MixEntry entry;
    if (pair.size() > 2 || !absl::SimpleAtoi(pair[0], &entry.value) || entry.value < min ||
        entry.value > max) {
      return UsageError(absl::StrCat("--", flag, ": \"", part, "\", wanted VALUE:WEIGHT with ",
                                     "VALUE an integer from ", min, " to ", max));
    }
    if (pair.size() == 2 && (!absl::SimpleAtod(pair[1], &entry.weight) ||
                             !std::isfinite(entry.weight) || entry.weight <= 0)) {
      return UsageError(absl::StrCat("--", flag, ": \"", part, "\", the weight must be positive"));
    }
    if (std::any_of(mix.begin(), mix.end(),
                    [&entry](const MixEntry& e) { return e.value == entry.value; })) {
      return UsageError(absl::StrCat("--", flag, ": ", entry.value, " is given twice"));
    }
    mix.push_back(entry);
  }
  return mix;
}

std::vector<Arrival> PlanArrivals(const LoadOptions& options) {
  std::seed_seq time_seed{options.seed, int64_t{1}}, mark_seed{options.seed, int64_t{2}};
  std::mt19937_64 times(time_seed), marks(mark_seed);
  std::vector<Arrival> plan;
  double at = 0;
  while (true) {
    at -= std::log1p(-Uniform(&times)) / options.rate;
    if (at >= options.seconds) return plan;
    // Always the same number of draws: one share changed leaves the other marks as they are.
    const double length = Uniform(&marks), priority = Uniform(&marks), cancel = Uniform(&marks),
                 cancel_at = Uniform(&marks), deadline = Uniform(&marks), slow = Uniform(&marks);
    Arrival arrival;
    arrival.at = at;
    arrival.length = Draw(options.lengths, length);
    if (!options.priorities.empty()) arrival.priority = Draw(options.priorities, priority);
    if (cancel < options.cancel_share) arrival.cancel_after = cancel_at * options.cancel_seconds;
    if (deadline < options.deadline_share) arrival.deadline = options.deadline_seconds;
    if (slow < options.slow_share) arrival.bytes_per_second = options.slow_bytes_per_second;
    plan.push_back(arrival);
  }
}

}  // namespace sparsegdn::cli
