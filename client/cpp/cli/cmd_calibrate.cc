// calibrate: how small a budget may be on the user's own prompts.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cli/calibration.h"
#include "cli/commands.h"
#include "cli/local_server.h"
#include "cli/session.h"
#include "cli/tokens.h"
#include "src/atomic_file.h"
#include "src/errors.h"

namespace sparsegdn::cli {
namespace {

constexpr char kRetentions[] = "0.5,0.35,0.29,0.2,0.15,0.1,0.08,0.05";

struct Options {
  std::vector<Prompt> prompts;
  std::vector<double> retentions;  // falling
  double target_kl = 0;
  std::string out;
  bool profiles = true;
  LocalServerOptions server;
};

absl::StatusOr<std::vector<double>> Retentions(const Args& args) {
  std::vector<double> found;
  for (absl::string_view part : absl::StrSplit(args.Text("retentions", kRetentions), ',')) {
    double share = 0;
    if (!absl::SimpleAtod(part, &share) || !(share > 0) || !(share <= 1)) {
      return UsageError(absl::StrCat("--retentions: \"", part, "\" must be above 0 and at most 1"));
    }
    found.push_back(share);
  }
  std::sort(found.rbegin(), found.rend());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

absl::Status ReadPrompts(const Args& args, std::vector<Prompt>* prompts) {
  const std::string path = args.Text("prompts");
  if (path.empty()) return UsageError("--prompts is needed");
  absl::StatusOr<std::string> text = ReadInput(path);
  if (!text.ok()) return text.status();
  absl::StatusOr<std::vector<Prompt>> found = ParsePrompts(path, *text);
  if (found.ok()) *prompts = *std::move(found);
  return found.status();
}

absl::StatusOr<Options> Parse(const Args& args) {
  if (!args.positional().empty()) return UsageError("calibrate takes no arguments");
  Options options;
  std::optional<double> target;
  if (absl::Status s = args.Read("target-kl", &target); !s.ok()) return s;
  if (!target || !(*target > 0)) return UsageError("--target-kl is needed, and must be above 0");
  options.target_kl = *target;
  if (args.Has("model") == args.Has("server")) {
    return UsageError("needs one of --model, which starts a server, and --server, which uses one");
  }
  for (const char* name : {"server-binary", "server-flags", "no-profile"}) {
    if (args.Has(name) && !args.Has("model")) {
      return UsageError(absl::StrCat("--", name, " needs --model"));
    }
  }
  auto retentions = Retentions(args);
  if (!retentions.ok()) return retentions.status();
  options.retentions = *std::move(retentions);
  options.out = args.Text("out", "calibration");
  options.profiles = args.Has("model") && !args.Has("no-profile");
  options.server.model = args.Text("model");
  options.server.binary = args.Text("server-binary", DefaultServerBinary());
  options.server.flags =
      absl::StrSplit(args.Text("server-flags"), absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (absl::Status s = ReadPrompts(args, &options.prompts); !s.ok()) return s;
  return options;
}

std::string ProfileText(const Profile& profile) {
  return profile.empty() ? "" : Json{{"relative_retention", profile}}.dump();
}

class Run {
 public:
  Run(const Options& options, const client::CallOptions& call, std::string tenant, bool quiet)
      : options_(options), quiet_(quiet), comparison_(&options.prompts, call, std::move(tenant)) {
    result_.prompts = static_cast<int64_t>(options.prompts.size());
    for (const Prompt& prompt : options.prompts) {
      result_.tokens += static_cast<int64_t>(prompt.size());
    }
    result_.target_kl = options.target_kl;
  }

  // Dense, then every retention, with whatever profile the server has.
  absl::Status Baseline(client::Client& client) {
    absl::StatusOr<v1::ModelInfo> info = client.Info();
    if (!info.ok()) return info.status();
    result_.info = *std::move(info);
    for (int i = 0; i < result_.info.layers_size(); ++i) {
      if (result_.info.layers(i) == v1::LAYER_KIND_LINEAR_ATTENTION) result_.layers.push_back(i);
    }
    Say(absl::StrFormat("dense: %d prompts, %d tokens", result_.prompts, result_.tokens));
    if (absl::Status s = comparison_.RunDense(client); !s.ok()) return s;
    absl::Status status = Rows(client, &result_.alike);
    result_.shared = result_.alike;
    return status;
  }

  absl::Status TryProfiles() {
    const size_t count = result_.layers.size();
    if (count < 2) return absl::OkStatus();
    const double middle = options_.retentions[options_.retentions.size() / 2];
    result_.layer_retention = middle;
    for (size_t i = 0; i < count; ++i) {
      absl::StatusOr<std::unique_ptr<LocalServer>> server = Serve(OneLayerProfile(count, i));
      if (!server.ok()) return server.status();
      auto found = comparison_.Run((*server)->client(), OneLayerRetention(count, middle));
      if (!found.ok()) return found.status();
      result_.layer_kl.push_back(found->mean.kl);
      Say(absl::StrFormat("layer %d alone at %g: KL %.5f", result_.layers[i], middle,
                          found->mean.kl));
    }
    // The smaller budget under the target wins, then the smaller KL over all retentions.
    const auto rank = [&](const std::vector<Measured>& rows) {
      return std::pair(Recommend(rows, options_.target_kl).value_or(2),
                       LogGain(rows, result_.alike));
    };
    auto best = rank(result_.alike);
    for (const Profile& profile : CandidateProfiles(result_.layer_kl)) {
      if (profile.empty()) continue;  // that is result_.alike
      absl::StatusOr<std::unique_ptr<LocalServer>> server = Serve(profile);
      if (!server.ok()) return server.status();
      std::vector<Measured> rows;
      Say("profile " + Json(profile).dump());
      if (absl::Status s = Rows((*server)->client(), &rows); !s.ok()) return s;
      if (rank(rows) >= best) continue;
      best = rank(rows);
      result_.profile = profile;
      result_.shared = std::move(rows);
    }
    return absl::OkStatus();
  }

  Calibration& Finish() {
    result_.recommended = Recommend(result_.shared, options_.target_kl);
    return result_;
  }

  absl::StatusOr<std::unique_ptr<LocalServer>> Serve(const Profile& profile) {
    LocalServerOptions server = options_.server;
    server.profile = ProfileText(profile);
    return LocalServer::Start(server, &Interrupt());
  }

 private:
  absl::Status Rows(client::Client& client, std::vector<Measured>* rows) {
    for (const double retention : options_.retentions) {
      absl::StatusOr<Measured> found = comparison_.Run(client, retention);
      if (!found.ok()) return found.status();
      Say(absl::StrFormat("  retention %g: KL %.5f, top-1 %.2f %%", retention, found->mean.kl,
                          100 * found->mean.top1));
      rows->push_back(*found);
    }
    return absl::OkStatus();
  }
  void Say(const std::string& line) {
    if (!quiet_) std::fprintf(stderr, "%s\n", line.c_str());
  }

  const Options& options_;
  bool quiet_;
  Comparison comparison_;
  Calibration result_;
};

absl::Status WriteFile(const std::string& path, const std::string& text) {
  auto file = client::AtomicFile::Create(path);
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Write(text.data(), text.size());
  return status.ok() ? (*file)->Commit() : status;
}

absl::Status WriteFolder(const std::string& folder, const Calibration& calibration,
                         std::vector<std::string>* names) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return client::FileError("create", folder, error.value());
  std::vector<std::pair<std::string, std::string>> files = {
      {"report.html", CalibrationPage(calibration)},
      {"calibration.json", CalibrationJson(calibration).dump(1) + "\n"}};
  const std::string profile = folder + "/budget_profile.json";
  if (!calibration.profile.empty()) {
    files.emplace_back("budget_profile.json", ProfileJson(calibration).dump() + "\n");
  } else {
    std::filesystem::remove(profile, error);  // of an earlier run: it would not belong here
  }
  for (const auto& [name, text] : files) {
    absl::Status status = WriteFile(folder + "/" + name, text);
    if (!status.ok()) return status;
    names->push_back(folder + "/" + name);
  }
  return absl::OkStatus();
}

absl::StatusOr<Calibration> Measure(const Args& args, const Options& options) {
  if (args.Has("server")) {
    absl::StatusOr<Session> session = Session::Open(args);
    if (!session.ok()) return session.status();
    Run run(options, session->call, session->tenant, session->quiet);
    absl::Status status = run.Baseline(*session->client);
    if (!status.ok()) return status;
    return run.Finish();
  }
  std::optional<double> timeout;
  if (absl::Status s = args.Read("timeout", &timeout); !s.ok()) return s;
  WatchSignals();
  client::CallOptions call;
  if (timeout) call.timeout = absl::Seconds(*timeout);
  call.cancellation = &Interrupt();
  Run run(options, call, "", args.Has("quiet"));
  {
    absl::StatusOr<std::unique_ptr<LocalServer>> server = run.Serve({});
    if (!server.ok()) return server.status();
    absl::Status status = run.Baseline((*server)->client());
    if (!status.ok()) return status;
  }
  if (options.profiles) {
    absl::Status status = run.TryProfiles();
    if (!status.ok()) return status;
  }
  return run.Finish();
}

absl::Status RunCalibrate(const Args& args) {
  absl::StatusOr<Options> options = Parse(args);
  if (!options.ok()) return options.status();
  absl::StatusOr<Calibration> found = Measure(args, *options);
  if (!found.ok()) return found.status();
  std::vector<std::string> names;
  absl::Status status = WriteFolder(options->out, *found, &names);
  if (!status.ok()) return status;
  if (args.Has("json")) {
    std::printf("%s\n", CalibrationJson(*found).dump(2).c_str());
  } else {
    std::fputs(CalibrationTable(*found).c_str(), stdout);
    for (const std::string& name : names) std::printf("written to       %s\n", name.c_str());
  }
  if (found->recommended) return absl::OkStatus();
  return client::MakeError(absl::StatusCode::kOutOfRange, "NO_BUDGET", "",
                           absl::StrFormat("no measured retention has KL <= %g; what was measured "
                                           "is in %s",
                                           options->target_kl, options->out));
}

}  // namespace

Command CalibrateCommand() {
  return {
      "calibrate",
      "--model DIR --prompts FILE --target-kl X",
      "find out on your own prompts how small a budget may be",
      "Runs the prompts dense and at several retentions on a server that it starts, and compares "
      "the\n"
      "distributions of the next token at up to 1024 places of each. Makes each recurrent layer\n"
      "sparse alone, tries profiles that give more to the layers that need it, and keeps the "
      "best:\n"
      "one start of the server a layer, and four more. The folder of --out gets report.html,\n"
      "calibration.json, and budget_profile.json where a profile beats equal shares.\n\n"
      "FILE holds one prompt a line, each a JSON list of token ids.\n\n"
      "  sparsegdn calibrate --model /models/Qwen3.5-4B --prompts prompts.jsonl --target-kl 0.02\n"
      "  sparsegdn calibrate --server 10.0.0.7:50051 --prompts prompts.jsonl --target-kl 0.02\n\n"
      "With --server the profile of that server stays as it is and only retentions are compared.\n",
      {{"What to measure",
        {{"model", "DIR", "Start servers of this model on free loopback ports."},
         {"prompts", "FILE", "The prompts: JSON lists of token ids, one a line."},
         {"target-kl", "X", "Largest mean KL from dense that is acceptable, nats a token."},
         {"retentions", "SHARE,...",
          absl::StrCat("Budgets to measure (default: ", kRetentions, ").")},
         {"no-profile", "", "Only equal shares for all layers; one start of the server."},
         {"out", "FOLDER", "Where the report goes (default: calibration)."},
         {"server-binary", "FILE", "The server to start (default: sparsegdn-server beside this)."},
         {"server-flags", "TEXT", "More flags for it, separated by spaces."}}},
       SessionFlags()},
      RunCalibrate};
}

}  // namespace sparsegdn::cli
