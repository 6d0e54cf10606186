#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/commands.h"
#include "cli/decoder.h"
#include "cli/progress.h"
#include "cli/render.h"
#include "cli/request.h"
#include "cli/session.h"
#include "cli/token_flags.h"
#include "sparsegdn/client/snapshot_file.h"

namespace sparsegdn::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 16;
  std::vector<int64_t> stop;
  bool before_last = true;
  v1::Budget budget;
  v1::Keep keep;
};

absl::StatusOr<Options> ReadOptions(const Args& args) {
  Options options;
  int at = 0;
  int64_t ttl = 0;
  for (absl::Status status :
       {args.Read("n", 0, 1 << 20, &options.max_tokens), args.ReadList("stop", &options.stop),
        args.ReadChoice("snapshot-at", {"before_last", "after_last"}, &at),
        args.Read("ttl", 1, UINT32_MAX, &ttl), ApplyBudget(args, &options.budget)}) {
    if (!status.ok()) return status;
  }
  options.before_last = at == 0;
  options.keep.set_ttl_seconds(static_cast<uint32_t>(ttl));
  // After a snapshot file the tokens are optional, so standard input must be asked for.
  if (args.Has("from") && args.positional().empty()) return options;
  absl::StatusOr<std::vector<int32_t>> tokens = TokensOf(args);
  if (!tokens.ok()) return tokens.status();
  if (tokens->empty()) return UsageError("the prompt is empty");
  options.prompt = *std::move(tokens);
  return options;
}

// What has been done so far, for the report.
struct Report {
  std::vector<int32_t> tokens;
  std::optional<v1::Result> prefill;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  int64_t steps = 0;
};

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Uploads --from and returns the next token that the file knows, if any.
absl::StatusOr<std::optional<int32_t>> StartFromFile(const std::string& path, Session* session,
                                                     const Options& options, Decoder* decoder) {
  absl::StatusOr<client::SnapshotFile> file = client::ReadSnapshotFile(path);
  if (!file.ok()) return file.status();
  const bool knows = file->result.has_value() && file->result->has_next_token();
  if (options.prompt.empty() && !knows) {
    return UsageError(absl::StrCat(path,
                                   " was taken before the last token: pass the tokens that "
                                   "follow it, or write it with --snapshot-at after_last"));
  }
  absl::StatusOr<v1::SnapshotRef> ref =
      session->client->Import(file->snapshot, options.keep, session->tenant, session->call);
  if (!ref.ok()) return ref.status();
  decoder->Adopt(ref->snapshot_id());
  return knows ? std::optional<int32_t>(file->result->next_token()) : std::nullopt;
}

// Runs the prompt; returns the first generated token.
absl::StatusOr<int32_t> RunPrompt(const Options& options, Session* session, Decoder* decoder,
                                  Report* report) {
  // A single token after a snapshot is a decode step already.
  if (options.prompt.size() == 1 && !decoder->snapshot_id().empty()) {
    return decoder->Step(options.prompt[0]);
  }
  v1::PrefillRequest request;
  request.mutable_token_ids()->Add(options.prompt.begin(), options.prompt.end());
  *request.mutable_budget() = options.budget;
  request.set_snapshot_at(options.before_last ? v1::SNAPSHOT_AT_BEFORE_LAST
                                              : v1::SNAPSHOT_AT_AFTER_LAST);
  ProgressBar bar(!session->quiet);
  client::CallOptions call = session->call;
  call.progress = [&bar](const client::PrefillProgress& p) { bar.Update(p); };
  const Clock::time_point start = Clock::now();
  absl::StatusOr<v1::Result> result = decoder->Prefill(std::move(request), call);
  if (!result.ok()) return result.status();
  report->prefill_seconds = Since(start);
  report->prefill = *result;
  if (options.before_last) return decoder->Step(options.prompt.back());
  if (!result->has_next_token()) return absl::InternalError("the server named no next token");
  return result->next_token();
}

absl::Status Decode(const Options& options, bool print, int32_t token, Decoder* decoder,
                    Report* report) {
  const Clock::time_point start = Clock::now();
  while (static_cast<int64_t>(report->tokens.size()) < options.max_tokens) {
    report->tokens.push_back(token);
    if (print) {
      std::printf("%s%d", report->tokens.size() > 1 ? " " : "", token);
      std::fflush(stdout);
    }
    const bool stop =
        std::find(options.stop.begin(), options.stop.end(), token) != options.stop.end();
    if (stop || static_cast<int64_t>(report->tokens.size()) == options.max_tokens) break;
    absl::StatusOr<int32_t> next = decoder->Step(token);
    if (!next.ok()) return next.status();
    token = *next;
    ++report->steps;
  }
  report->decode_seconds = Since(start);
  if (print) std::printf("\n");
  return absl::OkStatus();
}

void Print(const Report& report, const Session& session, const std::string& kept) {
  const double rate = report.decode_seconds > 0 ? report.steps / report.decode_seconds : 0;
  if (session.json) {
    Json json = {{"tokens", report.tokens},
                 {"snapshot_id", kept.empty() ? Json(nullptr) : Json(kept)},
                 {"decode",
                  {{"steps", report.steps},
                   {"seconds", report.decode_seconds},
                   {"tokens_per_second", rate}}}};
    if (report.prefill) {
      const v1::Usage& usage = report.prefill->usage();
      json["prefill"] = {{"seconds", report.prefill_seconds},
                         {"prompt_tokens", usage.prompt_tokens()},
                         {"computed_tokens", usage.computed_tokens()},
                         {"events_total", usage.events_total()},
                         {"events_selected", usage.events_selected()},
                         {"budget", BudgetText(report.prefill->effective_budget())}};
    }
    std::printf("%s\n", json.dump(2).c_str());
    return;
  }
  if (report.prefill) {
    const v1::Usage& usage = report.prefill->usage();
    std::printf("\nprefill          %s tokens in %.4f s, %s of %s updates, budget %s\n",
                Grouped(usage.computed_tokens()).c_str(), report.prefill_seconds,
                Grouped(usage.events_selected()).c_str(), Grouped(usage.events_total()).c_str(),
                BudgetText(report.prefill->effective_budget()).c_str());
  }
  std::printf("decode           %lld steps in %.4f s, %.1f tokens/s\n",
              static_cast<long long>(report.steps), report.decode_seconds, rate);
  if (!kept.empty()) std::printf("kept as          %s\n", kept.c_str());
}

absl::Status Run(const Args& args) {
  absl::StatusOr<Options> options = ReadOptions(args);
  if (!options.ok()) return options.status();
  absl::StatusOr<Session> session = Session::Open(args);
  if (!session.ok()) return session.status();
  Decoder decoder(session->client.get(), session->call, options->keep, session->tenant);
  Report report;
  std::optional<int32_t> first;
  if (args.Has("from")) {
    auto known = StartFromFile(args.Text("from"), &*session, *options, &decoder);
    if (!known.ok()) return known.status();
    first = *known;
  }
  if (!options->prompt.empty()) {
    absl::StatusOr<int32_t> token = RunPrompt(*options, &*session, &decoder, &report);
    if (!token.ok()) return token.status();
    first = *token;
  }
  absl::Status status = Decode(*options, !session->json, *first, &decoder, &report);
  if (!status.ok()) return status;
  if (args.Has("keep")) decoder.Keep();
  Print(report, *session, args.Has("keep") ? decoder.snapshot_id() : "");
  return absl::OkStatus();
}

}  // namespace

Command GenerateCommand() {
  return {"generate",
          "[TOKENS]",
          "prefill a prompt, then decode greedily through the service",
          "Each new token is a one-token call that resumes from the snapshot of the call before, "
          "with\na dense budget: the server decodes, so no model code is needed here. The budget "
          "flags\ngovern the prompt alone.\n\n"
          "  sparsegdn generate prompt.txt -n 32\n"
          "  sparsegdn generate --from prompt.safetensors last_token.txt -n 32\n",
          {{"Input and output",
            {TokenFormatFlag(),
             {"n", "N", "Tokens to generate (default 16)."},
             {"stop", "ID,...", "Stop after any of these tokens."},
             {"from", "FILE",
              "Start from a snapshot file; TOKENS (needed unless the file was taken after_last) "
              "follow it."},
             {"snapshot-at", "WHEN",
              "before_last (default: the last prompt token is the first decode step) or "
              "after_last."},
             {"keep", "", "Leave the last snapshot on the server and print its id."},
             {"ttl", "SECONDS", "How long the server keeps snapshots (default: its own)."}}},
           BudgetFlags(),
           SessionFlags()},
          Run};
}

}  // namespace sparsegdn::cli
