// sparsegdn-mkmodel: writes a checkpoint with random weights, for tests and benchmarks of shapes
// that are not at hand.
#include <charconv>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/files.h"
#include "server/model/random_checkpoint.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

constexpr char kUsage[] =
    "usage: sparsegdn-mkmodel (--shape NAME | --config FILE) --out DIR [options]\n"
    "\n"
    "  --shape NAME       tiny, tiny-gdn, 0.8b, 2b, 4b, 9b or 27b\n"
    "  --config FILE      a config.json of any Qwen3.5 dense shape, hybrid or pure GDN\n"
    "  --out DIR          folder to create; must not hold a model yet\n"
    "  --seed N           default 1; the same seed gives the same bytes everywhere\n"
    "  --dtype bf16|f32   default bf16 (A_log and linear_attn.norm are always F32)\n"
    "  --shard-bytes N    largest shard, default 5368709120\n";

absl::StatusOr<uint64_t> ParseNumber(std::string_view flag, std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(flag), " = \"", std::string(text),
                                                   "\", wanted an unsigned integer"));
  }
  return value;
}

absl::StatusOr<std::map<std::string, std::string>> ParseFlags(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    std::string value;
    if (const size_t equals = flag.find('='); equals != std::string::npos) {
      value = flag.substr(equals + 1);
      flag.resize(equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": got no value, wanted one"));
    }
    if (flag != "--shape" && flag != "--config" && flag != "--out" && flag != "--seed" &&
        flag != "--dtype" && flag != "--shard-bytes") {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", flag, "\n", kUsage));
    }
    if (!flags.emplace(flag, value).second) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": got it twice, wanted it once"));
    }
  }
  return flags;
}

absl::StatusOr<RandomCheckpointOptions> ParseOptions(int argc, char** argv) {
  SPARSEGDN_ASSIGN_OR_RETURN(auto flags, ParseFlags(argc, argv));
  if (flags.contains("--shape") == flags.contains("--config") || !flags.contains("--out")) {
    return absl::InvalidArgumentError(
        absl::StrCat("wanted --out and one of --shape and --config\n", kUsage));
  }
  RandomCheckpointOptions options;
  options.out_dir = flags["--out"];
  if (flags.contains("--shape")) {
    SPARSEGDN_ASSIGN_OR_RETURN(options.config_json, ConfigJsonOfShape(flags["--shape"]));
  } else {
    SPARSEGDN_ASSIGN_OR_RETURN(options.config_json, ReadFile(flags["--config"], kMaxConfigBytes));
  }
  if (flags.contains("--seed")) {
    SPARSEGDN_ASSIGN_OR_RETURN(options.seed, ParseNumber("--seed", flags["--seed"]));
  }
  if (flags.contains("--shard-bytes")) {
    SPARSEGDN_ASSIGN_OR_RETURN(const uint64_t bytes,
                               ParseNumber("--shard-bytes", flags["--shard-bytes"]));
    options.shard_bytes = static_cast<int64_t>(std::min<uint64_t>(bytes, INT64_MAX));
  }
  if (flags.contains("--dtype")) {
    const std::string& dtype = flags["--dtype"];
    if (dtype != "bf16" && dtype != "f32") {
      return absl::InvalidArgumentError(
          absl::StrCat("--dtype = \"", dtype, "\", wanted bf16 or f32"));
    }
    options.dtype = dtype == "bf16" ? DType::kBF16 : DType::kF32;
  }
  return options;
}

absl::Status Run(int argc, char** argv) {
  SPARSEGDN_ASSIGN_OR_RETURN(RandomCheckpointOptions options, ParseOptions(argc, argv));
  int64_t shown = -1;
  options.progress = [&shown](int64_t done, int64_t total) {
    const int64_t percent = done / (total / 100 + 1);
    if (percent / 10 == shown / 10 && done < total) return;
    shown = percent;
    std::fprintf(stderr, "%lld of %lld bytes\n", static_cast<long long>(done),
                 static_cast<long long>(total));
  };
  return WriteRandomCheckpoint(options);
}

}  // namespace
}  // namespace sparsegdn::model

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--help") {
      std::fputs(sparsegdn::model::kUsage, stdout);
      return 0;
    }
  }
  const absl::Status status = sparsegdn::model::Run(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "sparsegdn-mkmodel: %s\n", std::string(status.message()).c_str());
  return 1;
}
