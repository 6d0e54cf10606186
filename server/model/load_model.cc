#include "server/model/load_model.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/budget_profile.h"
#include "server/model/checkpoint.h"
#include "server/model/config.h"
#include "server/model/cpu_op_table.h"
#include "server/model/cuda_op_table.h"
#include "server/model/model_identity.h"
#include "server/model/qwen35_runner.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

absl::StatusOr<std::unique_ptr<OpTable>> CreateOpTable(const LoadOptions& options) {
  const bool automatic = options.backend == "auto";
  if (options.backend == "cuda") return CreateCudaOpTable(options.device);
  if (automatic && CudaDevicePresent(options.device)) {
    absl::StatusOr<std::unique_ptr<OpTable>> cuda = CreateCudaOpTable(options.device);
    if (cuda.ok()) return cuda;
    if (options.warning) {
      options.warning(
          absl::StrCat("the model runs on the CPU: ", std::string(cuda.status().message())));
    }
  }
  if (options.backend == "cpu" || automatic) return CreateCpuOpTable(options.num_threads, nullptr);
  return absl::InvalidArgumentError(
      absl::StrCat("backend = \"", options.backend, "\", wanted \"auto\", \"cpu\" or \"cuda\""));
}

// The last component of the folder, whatever slashes follow it.
std::string NameOf(const std::string& dir) {
  const std::filesystem::path path = std::filesystem::path(dir).lexically_normal();
  return (path.has_filename() ? path.filename() : path.parent_path().filename()).string();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelRunner>> LoadModel(const LoadOptions& options) {
  const auto progress = [&options](std::string_view stage) {
    return [&options, stage](int64_t done, int64_t total) {
      if (options.progress) options.progress(stage, done, total);
    };
  };
  Qwen35Options model;
  SPARSEGDN_ASSIGN_OR_RETURN(std::unique_ptr<OpTable> ops, CreateOpTable(options));
  SPARSEGDN_ASSIGN_OR_RETURN(model.config, LoadConfig(options.dir));
  if (!model.config.rope_theta_given && options.warning) {
    options.warning(absl::StrCat("config.json gives no rope_theta, taken as its class default, ",
                                 model.config.rope_theta));
  }
  SPARSEGDN_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(options.dir, model.config));
  for (const std::string& warning : checkpoint.warnings()) {
    if (options.warning) options.warning(warning);
  }
  SPARSEGDN_ASSIGN_OR_RETURN(
      model.identity, ModelIdentity(options.dir, model.config, checkpoint, options.round_a_log,
                                    progress("identity")));
  SPARSEGDN_ASSIGN_OR_RETURN(
      model.profile,
      FindBudgetProfile(options.budget_profile, options.dir,
                        std::ranges::count(model.config.layers, LayerKind::kLinear)));
  model.limits = options.limits;
  model.round_a_log = options.round_a_log;
  model.name = NameOf(options.dir);
  model.progress = progress("weights");
  SPARSEGDN_ASSIGN_OR_RETURN(
      std::unique_ptr<Qwen35Runner> runner,
      Qwen35Runner::Create(std::move(model), std::move(checkpoint), std::move(ops)));
  return std::unique_ptr<ModelRunner>(std::move(runner));
}

}  // namespace sparsegdn::model
