#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/render.h"
#include "cli/request.h"
#include "cli/session.h"
#include "cli/token_flags.h"
#include "sparsegdn/client/snapshot_file.h"

namespace sparsegdn::cli {
namespace {

absl::StatusOr<v1::PrefillRequest> BuildRequest(const Args& args) {
  absl::StatusOr<std::vector<int32_t>> tokens = TokensOf(args);
  if (!tokens.ok()) return tokens.status();
  v1::PrefillRequest request;
  request.mutable_token_ids()->Add(tokens->begin(), tokens->end());
  absl::Status status = ApplyBudget(args, request.mutable_budget());
  if (status.ok()) status = ApplyCall(args, &request);
  const int64_t last = request.first_position() + static_cast<int64_t>(tokens->size()) - 1;
  if (status.ok()) status = ApplyOutputs(args, last, request.mutable_outputs());
  if (!status.ok()) return status;
  request.set_tenant(args.Text("tenant"));
  return request;
}

absl::Status Run(const Args& args) {
  absl::StatusOr<v1::PrefillRequest> request = BuildRequest(args);
  if (!request.ok()) return request.status();
  absl::StatusOr<Session> session = Session::Open(args);
  if (!session.ok()) return session.status();
  absl::StatusOr<client::PrefillOutcome> outcome = absl::UnknownError("");
  {
    ProgressBar bar(!session->quiet);
    client::CallOptions call = session->call;
    call.progress = [&bar](const client::PrefillProgress& p) { bar.Update(p); };
    outcome = session->client->Prefill(*request, call);
  }
  if (!outcome.ok()) return outcome.status();
  const std::string path = args.Text("out");
  if (!path.empty()) {
    absl::Status status = client::WriteSnapshotFile(path, outcome->snapshot, &outcome->result);
    if (!status.ok()) return status;
  }
  const std::string text =
      session->json ? PrefillJson(*outcome, path).dump(2) + "\n" : PrefillTable(*outcome, path);
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

Command PrefillCommand() {
  return {"prefill",
          "[TOKENS]",
          "run a prompt and fetch the snapshot from which a decoder continues",
          "TOKENS is a file with the prompt's token ids, or - for standard input (the default):\n"
          "integers separated by white space or commas, or a JSON list.\n\n"
          "  sparsegdn prefill prompt.txt --out prompt.safetensors\n"
          "  echo '1 2 3' | sparsegdn prefill --dense --snapshot-at after_last --json\n",
          {{"Input and output",
            {TokenFormatFlag(),
             {"out", "FILE", "Write the snapshot as a safetensors file, atomically."}}},
           BudgetFlags(),
           OutputFlags(),
           CallFlags(),
           SessionFlags()},
          Run};
}

}  // namespace sparsegdn::cli
