#include "cli/bench_common.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "cli/request.h"

namespace sparsegdn::cli {

absl::StatusOr<BenchTarget> OpenBench(const Args& args) {
  BenchTarget target;
  absl::Status status = ApplyBudget(args, target.base.mutable_budget());
  if (status.ok()) status = ApplyCall(args, &target.base);
  if (status.ok()) status = ApplyOutputs(args, 0, target.base.mutable_outputs());
  if (!status.ok()) return status;
  absl::StatusOr<Session> session = Session::Open(args);
  if (!session.ok()) return session.status();
  target.session = *std::move(session);
  target.base.set_tenant(target.session.tenant);
  absl::StatusOr<v1::ModelInfo> info = target.session.client->Info(target.session.call);
  if (!info.ok()) return info.status();
  if (info->vocab_size() == 0) return absl::InternalError("the server names no vocab_size");
  target.info = *std::move(info);
  return target;
}

v1::PrefillRequest BenchRequest(const v1::PrefillRequest& base, int64_t length, int64_t index,
                                uint32_t vocab_size, int64_t seed) {
  v1::PrefillRequest request = base;
  request.set_prefix_reuse(v1::PREFIX_REUSE_OFF);  // a second run has the same tokens
  std::seed_seq sequence{seed, length, index};
  std::mt19937_64 random(sequence);
  request.mutable_token_ids()->Reserve(static_cast<int>(length));
  for (int64_t i = 0; i < length; ++i) {
    request.add_token_ids(static_cast<int32_t>(random() % vocab_size));
  }
  return request;
}

double Percentile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  // Without the margin 0.9 * 10 would ask for the tenth of ten.
  const double exact = q * static_cast<double>(values.size());
  const auto rank = static_cast<size_t>(std::ceil(exact - 1e-9));
  const size_t at = std::clamp<size_t>(rank, 1, values.size()) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

}  // namespace sparsegdn::cli
