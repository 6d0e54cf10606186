// What a budget costs on given prompts: the distance of a sparse prefill from a dense one, and how
// layers should share a budget (docs/quality.md, "Calibration").
#ifndef SPARSEGDN_CLIENT_CLI_CALIBRATION_H_
#define SPARSEGDN_CLIENT_CLI_CALIBRATION_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cli/render.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

using Prompt = std::vector<int32_t>;

// One prompt a line, each a JSON list of token ids; empty lines count for nothing. A usage error
// names file and line.
absl::StatusOr<std::vector<Prompt>> ParsePrompts(const std::string& name, const std::string& text);

// Where distributions are compared: at most 1024 places spread evenly over `count` tokens, fewer
// for a large vocabulary, so that the logits of a call stay within 64 MiB.
std::vector<int64_t> ComparedPositions(int64_t count, int64_t vocab_size);

struct Distance {
  double kl = 0;    // of dense from sparse, nats a token
  double top1 = 0;  // share of places with the same most likely token
};

// Mean over the rows of two [rows, vocab_size] matrices of logits.
Distance Compare(absl::Span<const float> dense, absl::Span<const float> sparse, int64_t vocab_size);

struct Measured {
  double retention = 0;
  Distance mean;        // over the prompts
  double worst_kl = 0;  // of one prompt
  double kept = 0;      // share of the events that were computed
};

// Runs prompts on a server. The dense logits are kept: vocab_size * 4 bytes a compared place.
class Comparison {
 public:
  Comparison(const std::vector<Prompt>* prompts, client::CallOptions call, std::string tenant)
      : prompts_(prompts), call_(std::move(call)), tenant_(std::move(tenant)) {}
  absl::Status RunDense(client::Client& client);
  absl::StatusOr<Measured> Run(client::Client& client, double retention);

 private:
  absl::StatusOr<std::vector<float>> Logits(client::Client& client, const Prompt& prompt,
                                            const v1::Budget& budget, double* kept);

  const std::vector<Prompt>* prompts_;
  client::CallOptions call_;
  std::string tenant_;
  int64_t vocab_size_ = 0;
  std::vector<std::vector<float>> dense_;
};

using Profile = std::vector<double>;  // relative retention of each GDN layer; empty: alike

// Profiles worth trying, from the KL of each layer sparse alone; the empty one first.
std::vector<Profile> CandidateProfiles(const std::vector<double>& layer_kl);
// The weights under which a server leaves every layer dense but this one, and the retention to ask.
Profile OneLayerProfile(size_t layers, size_t sparse);
double OneLayerRetention(size_t layers, double retention);
// Mean logarithm of the KL ratio to `alike`: below 0 the rows are better.
double LogGain(const std::vector<Measured>& rows, const std::vector<Measured>& alike);
// The smallest retention that meets the target, as do all measured above it.
std::optional<double> Recommend(const std::vector<Measured>& rows, double target_kl);

struct Calibration {
  v1::ModelInfo info;
  int64_t prompts = 0, tokens = 0;
  double target_kl = 0;
  std::vector<int> layers;  // GDN layers; with layer_kl only where profiles were tried
  std::vector<double> layer_kl;
  double layer_retention = 0;
  Profile profile;               // the best found
  std::vector<Measured> alike;   // without a profile, falling retention
  std::vector<Measured> shared;  // with `profile`; as alike where it is empty
  std::optional<double> recommended;
};

Json CalibrationJson(const Calibration& calibration);
// budget_profile.json, as the server reads it.
Json ProfileJson(const Calibration& calibration);
std::string CalibrationTable(const Calibration& calibration);
std::string CalibrationPage(const Calibration& calibration);  // HTML, in one file

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_CALIBRATION_H_
