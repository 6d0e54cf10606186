#include "cli/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/flags.h"
#include "cli/tokens.h"
#include "src/errors.h"

namespace sparsegdn::cli {
namespace {

constexpr int64_t kPositions = 1024;
constexpr int64_t kLogitsBytes = 64 << 20;
constexpr double kHeavy = 1e9;   // beside it, a layer of weight 1 is the only one that is not full
constexpr double kFloor = 0.05;  // of a weight, relative to the mean
constexpr double kLeastKl = 1e-9;

double LogSumExp(absl::Span<const float> row) {
  const double largest = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float x : row) sum += std::exp(x - largest);
  return largest + std::log(sum);
}

}  // namespace

absl::StatusOr<std::vector<Prompt>> ParsePrompts(const std::string& name, const std::string& text) {
  std::vector<Prompt> prompts;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    if (line.find_first_not_of(" \t\r") == absl::string_view::npos) continue;
    absl::StatusOr<Prompt> ids = ParseTokens(std::string(line), TokenFormat::kJson);
    if (ids.ok() && ids->empty()) ids = UsageError("the list is empty");
    if (!ids.ok()) {
      return UsageError(absl::StrCat(
          name, ":", line_number, ": must be a JSON list of token ids: ", ids.status().message()));
    }
    prompts.push_back(*std::move(ids));
  }
  if (prompts.empty()) return UsageError(absl::StrCat(name, ": no prompt in it"));
  return prompts;
}

std::vector<int64_t> ComparedPositions(int64_t count, int64_t vocab_size) {
  const int64_t most = std::max<int64_t>(
      1, std::min({kPositions, count, kLogitsBytes / (4 * std::max<int64_t>(1, vocab_size))}));
  std::vector<int64_t> places = {count - 1};
  if (most == 1) return places;
  places.clear();
  for (int64_t i = 0; i < most; ++i) places.push_back(i * (count - 1) / (most - 1));
  return places;
}

Distance Compare(absl::Span<const float> dense, absl::Span<const float> sparse,
                 int64_t vocab_size) {
  const int64_t rows = static_cast<int64_t>(dense.size()) / vocab_size;
  double kl = 0;
  int64_t same = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const auto a = dense.subspan(row * vocab_size, vocab_size);
    const auto b = sparse.subspan(row * vocab_size, vocab_size);
    const double sum_a = LogSumExp(a), sum_b = LogSumExp(b);
    for (int64_t i = 0; i < vocab_size; ++i) {
      const double log_p = a[i] - sum_a;
      kl += std::exp(log_p) * (log_p - (b[i] - sum_b));
    }
    same += std::max_element(a.begin(), a.end()) - a.begin() ==
            std::max_element(b.begin(), b.end()) - b.begin();
  }
  return {std::max(0.0, kl / rows), static_cast<double>(same) / rows};
}

absl::StatusOr<std::vector<float>> Comparison::Logits(client::Client& client, const Prompt& prompt,
                                                      const v1::Budget& budget, double* kept) {
  v1::PrefillRequest request;
  request.mutable_token_ids()->Add(prompt.begin(), prompt.end());
  *request.mutable_budget() = budget;
  request.set_tenant(tenant_);
  request.set_prefix_reuse(v1::PREFIX_REUSE_OFF);  // nothing of a calibration stays in a cache
  v1::Outputs& outputs = *request.mutable_outputs();
  outputs.set_state(false);
  outputs.set_conv_state(false);
  outputs.set_kv(false);
  const std::vector<int64_t> places =
      ComparedPositions(static_cast<int64_t>(prompt.size()), vocab_size_);
  outputs.mutable_logits()->mutable_positions()->Add(places.begin(), places.end());
  absl::StatusOr<client::PrefillOutcome> outcome = client.Prefill(request, call_);
  if (!outcome.ok()) return outcome.status();
  const int tensor = outcome->snapshot.Find("logits");
  const size_t size = places.size() * vocab_size_;
  if (tensor < 0 || outcome->snapshot.info(tensor).dtype() != v1::DTYPE_FP32 ||
      outcome->snapshot.data(tensor).size() != size * sizeof(float)) {
    return client::DataLoss("MANIFEST_INVALID", "logits", "logits: not those that were asked for");
  }
  std::vector<float> logits(size);
  std::memcpy(logits.data(), outcome->snapshot.data(tensor).data(), size * sizeof(float));
  const v1::Usage& usage = outcome->result.usage();
  *kept = usage.events_total() > 0
              ? static_cast<double>(usage.events_selected()) / usage.events_total()
              : 1.0;
  return logits;
}

absl::Status Comparison::RunDense(client::Client& client) {
  absl::StatusOr<v1::ModelInfo> info = client.Info(call_);
  if (!info.ok()) return info.status();
  vocab_size_ = info->vocab_size();
  v1::Budget budget;
  budget.set_mode(v1::BUDGET_MODE_DENSE);
  dense_.clear();
  for (const Prompt& prompt : *prompts_) {
    double kept = 0;
    absl::StatusOr<std::vector<float>> logits = Logits(client, prompt, budget, &kept);
    if (!logits.ok()) return logits.status();
    dense_.push_back(*std::move(logits));
  }
  return absl::OkStatus();
}

absl::StatusOr<Measured> Comparison::Run(client::Client& client, double retention) {
  v1::Budget budget;
  budget.set_retention(retention);
  Measured found;
  found.retention = retention;
  const double share = 1.0 / prompts_->size();
  for (size_t i = 0; i < prompts_->size(); ++i) {
    double kept = 0;
    absl::StatusOr<std::vector<float>> logits = Logits(client, (*prompts_)[i], budget, &kept);
    if (!logits.ok()) return logits.status();
    const Distance distance = Compare(dense_[i], *logits, vocab_size_);
    found.mean.kl += share * distance.kl;
    found.mean.top1 += share * distance.top1;
    found.worst_kl = std::max(found.worst_kl, distance.kl);
    found.kept += share * kept;
  }
  return found;
}

std::vector<Profile> CandidateProfiles(const std::vector<double>& layer_kl) {
  std::vector<Profile> found = {Profile()};
  if (layer_kl.size() < 2) return found;
  const auto divide_by_mean = [](Profile& weights) {
    double sum = 0;
    for (const double w : weights) sum += w;
    for (double& w : weights) w *= weights.size() / sum;
  };
  for (const double exponent : {0.25, 0.5, 1.0}) {
    Profile weights;
    for (const double kl : layer_kl) weights.push_back(std::pow(std::max(kl, kLeastKl), exponent));
    divide_by_mean(weights);
    for (double& w : weights) w = std::max(w, kFloor);
    divide_by_mean(weights);
    for (double& w : weights) w = std::round(w * 1e4) / 1e4;
    found.push_back(std::move(weights));
  }
  return found;
}

Profile OneLayerProfile(size_t layers, size_t sparse) {
  Profile weights(layers, kHeavy);
  weights[sparse] = 1;
  return weights;
}

double OneLayerRetention(size_t layers, double retention) {
  return (static_cast<double>(layers) - 1 + retention) / static_cast<double>(layers);
}

double LogGain(const std::vector<Measured>& rows, const std::vector<Measured>& alike) {
  double sum = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    sum += std::log(std::max(rows[i].mean.kl, kLeastKl) / std::max(alike[i].mean.kl, kLeastKl));
  }
  return sum / static_cast<double>(rows.size());
}

std::optional<double> Recommend(const std::vector<Measured>& rows, double target_kl) {
  std::optional<double> found;
  for (const Measured& row : rows) {  // falling retention
    if (row.mean.kl > target_kl) break;
    found = row.retention;
  }
  return found;
}

}  // namespace sparsegdn::cli
