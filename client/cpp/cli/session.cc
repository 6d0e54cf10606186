#include "cli/session.h"

#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sparsegdn::cli {

FlagGroup SessionFlags() {
  return {"Connection and output",
          {{"server", "ADDRESS",
            "host:port or unix:/path of the server, or a list address:port,address:port (default: "
            "$SPARSEGDN_SERVER, or 127.0.0.1:50051)."},
           {"tls", "", "Use TLS with the system's authorities (also set by the flags below)."},
           {"tls-ca", "FILE", "PEM authorities of the server's certificate."},
           {"tls-cert", "FILE", "PEM certificate of this client."},
           {"tls-key", "FILE", "PEM key of --tls-cert."},
           {"tls-server-name", "NAME", "Name in the server's certificate, if not ADDRESS's."},
           {"token-file", "FILE", "Bearer token that every call brings; read for each call."},
           {"plain-text-token", "", "Allow the token on a connection without TLS."},
           {"shared-memory", "",
            "On a unix: ADDRESS, take snapshots through shared memory instead of the socket."},
           {"timeout", "SECONDS", "Give up a call after this long (exit code 5)."},
           {"restarts", "N", "Run a prefill again when its server is gone, so often at most."},
           {"wait", "SECONDS", "Wait this long for a server that is still starting."},
           {"tenant", "NAME", "Counts only where the server runs without authentication."},
           {"json", "", "Print one JSON object instead of the table."},
           {"quiet", "", "No progress bar."},
           {"help", "", "Print this text."}}};
}

client::Cancellation& Interrupt() {
  // Never destroyed: the signal thread may still use it while the process ends.
  static auto* const cancellation = new client::Cancellation;
  return *cancellation;
}

void IgnoreWriteSignals() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

void WatchSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::thread([set] {
    int number = 0;
    sigwait(&set, &number);
    Interrupt().Cancel();
    sigset_t rest = set;
    pthread_sigmask(SIG_UNBLOCK, &rest, nullptr);  // a second signal kills, as by default
    while (true) pause();
  }).detach();
}

absl::StatusOr<Session> Session::Open(const Args& args) {
  Session session;
  const char* from_environment = std::getenv("SPARSEGDN_SERVER");
  client::ConnectOptions options;
  options.target = args.Text("server", from_environment != nullptr && *from_environment != '\0'
                                           ? from_environment
                                           : "127.0.0.1:50051");
  std::optional<double> timeout, wait;
  for (absl::Status status : {args.Read("timeout", &timeout), args.Read("wait", &wait)}) {
    if (!status.ok()) return status;
  }
  int64_t restarts = 0;
  if (absl::Status s = args.Read("restarts", 0, 100, &restarts); !s.ok()) return s;
  session.call.restarts = static_cast<int>(restarts);
  if ((timeout && !(*timeout > 0)) || (wait && !(*wait >= 0))) {
    return UsageError("--timeout and --wait must be positive numbers of seconds");
  }
  options.tls = {args.Has("tls"), args.Text("tls-ca"), args.Text("tls-cert"), args.Text("tls-key"),
                 args.Text("tls-server-name")};
  options.token_file = args.Text("token-file");
  options.allow_plain_text_token = args.Has("plain-text-token");
  options.shared_memory = args.Has("shared-memory");
  if (timeout) session.call.timeout = absl::Seconds(*timeout);
  session.call.cancellation = &Interrupt();
  session.tenant = args.Text("tenant");
  session.json = args.Has("json");
  session.quiet = args.Has("quiet");
  WatchSignals();  // not before: until here, Ctrl-C may end a read of standard input
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
  if (!client.ok()) return client.status();
  session.client = *std::move(client);
  if (wait) {
    auto info = session.client->WaitUntilReady(absl::Seconds(*wait), session.call);
    if (!info.ok()) return info.status();
  }
  return session;
}

void PrintError(const absl::Status& status) {
  const client::ErrorDetails details = client::DetailsOf(status);
  std::string text = absl::StrCat("error: ", std::string(status.message()));
  if (details.reason != "USAGE") {
    absl::StrAppend(&text, " [", absl::StatusCodeToString(status.code()));
    if (!details.reason.empty()) absl::StrAppend(&text, ", ", details.reason);
    if (!details.field.empty()) absl::StrAppend(&text, ", field ", details.field);
    absl::StrAppend(&text, "]");
  }
  if (details.retry_after) {
    absl::StrAppend(&text, " retry after ", absl::FormatDuration(*details.retry_after));
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace sparsegdn::cli
