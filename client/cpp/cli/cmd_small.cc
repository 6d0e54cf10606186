// info, import and release.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "cli/commands.h"
#include "cli/render.h"
#include "cli/session.h"
#include "sparsegdn/client/snapshot_file.h"

namespace sparsegdn::cli {
namespace {

absl::StatusOr<std::string> OneArgument(const Args& args, const std::string& name) {
  if (args.positional().size() != 1) return UsageError(absl::StrCat("needs exactly one ", name));
  return args.positional()[0];
}

absl::Status RunInfo(const Args& args) {
  if (!args.positional().empty()) return UsageError("info takes no arguments");
  absl::StatusOr<Session> session = Session::Open(args);
  if (!session.ok()) return session.status();
  absl::StatusOr<v1::ModelInfo> info = session->client->Info(session->call);
  if (!info.ok()) return info.status();
  const std::string text = session->json ? InfoJson(*info).dump(2) + "\n" : InfoTable(*info);
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

absl::Status RunImport(const Args& args) {
  absl::StatusOr<std::string> path = OneArgument(args, "FILE");
  if (!path.ok()) return path.status();
  int64_t ttl = 0;
  absl::Status status = args.Read("ttl", 1, UINT32_MAX, &ttl);
  if (!status.ok()) return status;
  absl::StatusOr<client::SnapshotFile> file = client::ReadSnapshotFile(*path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Session> session = Session::Open(args);
  if (!session.ok()) return session.status();
  v1::Keep keep;
  keep.set_ttl_seconds(static_cast<uint32_t>(ttl));
  absl::StatusOr<v1::SnapshotRef> ref =
      session->client->Import(file->snapshot, keep, session->tenant, session->call);
  if (!ref.ok()) return ref.status();
  if (session->json) {
    const Json json = {{"snapshot_id", ref->snapshot_id()},
                       {"position", ref->position()},
                       {"bytes", ref->bytes()},
                       {"ttl_seconds", ref->ttl_seconds()}};
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    std::printf(
        "kept as          %s\nposition         %s tokens\nsize             %s\n"
        "for              %u s\n",
        ref->snapshot_id().c_str(), Grouped(ref->position()).c_str(), Bytes(ref->bytes()).c_str(),
        ref->ttl_seconds());
  }
  return absl::OkStatus();
}

absl::Status RunRelease(const Args& args) {
  absl::StatusOr<std::string> id = OneArgument(args, "ID");
  if (!id.ok()) return id.status();
  absl::StatusOr<Session> session = Session::Open(args);
  if (!session.ok()) return session.status();
  absl::Status status = session->client->Release(*id, session->tenant, session->call);
  if (!status.ok()) return status;
  std::printf(session->json ? "{\"released\": true}\n" : "released\n");
  return absl::OkStatus();
}

}  // namespace

Command InfoCommand() {
  return {"info",
          "",
          "show the server's model, limits and default budget",
          "  sparsegdn info --server 127.0.0.1:50051 --wait 60\n",
          {SessionFlags()},
          RunInfo};
}

Command ImportCommand() {
  return {"import",
          "FILE",
          "upload a snapshot file, so that a prefill can resume from it",
          "FILE was written by prefill --out. Prints the id for --resume-from.\n\n"
          "  sparsegdn import prompt.safetensors --ttl 600\n",
          {{"Upload", {{"ttl", "SECONDS", "How long the server keeps it (default: its own)."}}},
           SessionFlags()},
          RunImport};
}

Command ReleaseCommand() {
  return {"release",
          "ID",
          "drop a snapshot that the server keeps",
          "  sparsegdn release 0f3a...\n",
          {SessionFlags()},
          RunRelease};
}

}  // namespace sparsegdn::cli
