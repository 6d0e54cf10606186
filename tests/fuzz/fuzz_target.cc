#include "tests/fuzz/fuzz_target.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>

namespace sparsegdn::fuzz {
namespace {

Outcome g_outcome;

// FNV-1a over the message without what the input put into it: digits and what is quoted.
uint64_t PlaceOf(const absl::Status& status, uint64_t hash) {
  bool quoted = false;
  hash = (hash ^ static_cast<uint64_t>(status.code())) * 0x100000001b3;
  int taken = 0;
  for (const char c : status.message()) {
    if (c == '"') quoted = !quoted;
    if (quoted || std::isdigit(static_cast<unsigned char>(c)) || c == '-') continue;
    if (++taken > 160) break;
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

constexpr size_t kMiB = size_t{1} << 20;

}  // namespace

// The memory: a parsed JSON value costs at most about 100 bytes per byte of text (an empty array in
// an array), some texts are held twice; the engine's own bound is in fuzz_engine.cc.
const std::vector<Target>& Targets() {
  static const std::vector<Target> targets = {
      {"safetensors_header", Format::kPrefixedJson, FuzzSafetensorsHeader, SafetensorsHeaderSeeds,
       kMiB, 300},
      {"model_config", Format::kJson, FuzzModelConfig, ModelConfigSeeds, kMiB, 300},
      {"checkpoint_folder", Format::kJsonFrames, FuzzCheckpointFolder, CheckpointFolderSeeds,
       4 * kMiB, 600},
      {"server_config", Format::kJson, FuzzServerConfig, ServerConfigSeeds, kMiB, 300},
      {"prefill_request", Format::kWire, FuzzPrefillRequest, PrefillRequestSeeds, 64 * kMiB, 300},
      {"snapshot_import", Format::kFrames, FuzzSnapshotImport, SnapshotImportSeeds, 32 * kMiB, 300},
      {"snapshot_file", Format::kPrefixedJson, FuzzSnapshotFile, SnapshotFileSeeds, 4 * kMiB, 600},
      {"response_stream", Format::kFrames, FuzzResponseStream, ResponseStreamSeeds, 4 * kMiB, 300},
      {"budget_profile", Format::kJson, FuzzBudgetProfile, BudgetProfileSeeds, kMiB, 300},
      {"bearer_tokens", Format::kText, FuzzBearerTokens, BearerTokensSeeds, kMiB, 300},
      {"prefix_value", Format::kText, FuzzPrefixValue, PrefixValueSeeds, 4 * kMiB, 300},
      {"tokens", Format::kJson, FuzzTokens, TokensSeeds, kMiB, 300},
  };
  return targets;
}

void Require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz: broken promise: %s\n", what.c_str());
  std::abort();
}

void RequireRefusal(const absl::Status& status, std::initializer_list<absl::StatusCode> codes,
                    size_t message_bytes_max) {
  Require(std::find(codes.begin(), codes.end(), status.code()) != codes.end(),
          "refused with another code: " + status.ToString().substr(0, 400));
  Require(!status.message().empty(), "refused without a message");
  Require(status.message().size() <= message_bytes_max,
          "a message of " + std::to_string(status.message().size()) + " bytes");
}

void NoteOutcome(const absl::Status& status) {
  g_outcome.place = PlaceOf(status, g_outcome.place);
  g_outcome.accepted = g_outcome.accepted || status.ok();
}

Outcome TakeOutcome() {
  const Outcome outcome = g_outcome;
  g_outcome = {};
  return outcome;
}

}  // namespace sparsegdn::fuzz
