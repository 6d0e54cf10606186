#include "cli/local_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/errors.h"

namespace sparsegdn::cli {
namespace {

namespace fs = std::filesystem;
using client::MakeError;

constexpr size_t kLogTail = 2000;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Between fork and exec: async-signal-safe calls only. The signals that this command waits for are
// blocked in it, and must not be in the server; a command that is killed takes its server along.
[[noreturn]] void RunServer(char* const* arguments, int log, pid_t parent) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execvp(arguments[0], arguments);
  constexpr char kFailed[] = "the server's binary cannot be run\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kFailed, sizeof(kFailed) - 1);
  _exit(127);
}

}  // namespace

std::string DefaultServerBinary() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path beside = self.parent_path() / "sparsegdn-server";
  return !error && fs::exists(beside, error) ? beside.string() : "sparsegdn-server";
}

absl::Status LocalServer::Launch(const LocalServerOptions& options) {
  std::error_code error;
  std::string folder = (fs::temp_directory_path(error) / "sparsegdn-calibrate-XXXXXX").string();
  if (error || mkdtemp(folder.data()) == nullptr) {
    return client::FileError("create a folder in", fs::path(folder).parent_path().string(), errno);
  }
  folder_ = folder;
  std::string profile = "none";
  if (!options.profile.empty()) {
    profile = folder_ + "/budget_profile.json";
    if (!(std::ofstream(profile) << options.profile << std::flush)) {
      return client::FileError("write", profile, errno);
    }
  }
  std::vector<std::string> words = {options.binary,
                                    "--model",
                                    options.model,
                                    "--budget-profile",
                                    profile,
                                    "--listen",
                                    "127.0.0.1:0",
                                    "--metrics-listen",
                                    "",
                                    "--port-file",
                                    folder_ + "/ports"};
  words.insert(words.end(), options.flags.begin(), options.flags.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::string path = folder_ + "/log";
  const int log = open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  if (log < 0) return client::FileError("write", path, errno);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) RunServer(arguments.data(), log, parent);
  const int failed = errno;
  close(log);
  return pid_ > 0 ? absl::OkStatus() : client::FileError("start", options.binary, failed);
}

bool LocalServer::Ended() {
  if (pid_ < 0) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  pid_ = -1;
  return true;
}

absl::Status LocalServer::EndedEarly() const {
  std::string log = ReadAll(folder_ + "/log");
  if (log.size() > kLogTail) log = "..." + log.substr(log.size() - kLogTail);
  return MakeError(absl::StatusCode::kFailedPrecondition, "SERVER_ENDED", "",
                   absl::StrCat("the server ended before it was ready; its log:\n", log));
}

absl::Status LocalServer::Connect(client::Cancellation* cancellation) {
  std::string ports;
  while (ports.find('\n') == std::string::npos) {
    if (Ended()) return EndedEarly();
    if (cancellation->cancelled()) return absl::CancelledError("interrupted");
    absl::SleepFor(absl::Milliseconds(20));
    ports = ReadAll(folder_ + "/ports");
  }
  auto client = client::Client::Connect(
      {.target = absl::StrCat("127.0.0.1:", ports.substr(0, ports.find('\n')))});
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  client::CallOptions call;
  call.cancellation = cancellation;
  while (true) {
    absl::StatusOr<v1::ModelInfo> info = client_->WaitUntilReady(absl::Seconds(1), call);
    if (info.ok()) return absl::OkStatus();
    if (cancellation->cancelled()) return absl::CancelledError("interrupted");
    if (absl::IsUnavailable(info.status()) || absl::IsDeadlineExceeded(info.status())) {
      if (Ended()) return EndedEarly();
      continue;
    }
    // A server that could not load drains, cancels this call and ends.
    for (int i = 0; i < 100; ++i) {
      if (Ended()) return EndedEarly();
      absl::SleepFor(absl::Milliseconds(50));
    }
    return info.status();
  }
}

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Start(
    const LocalServerOptions& options, client::Cancellation* cancellation) {
  std::unique_ptr<LocalServer> server(new LocalServer);
  absl::Status status = server->Launch(options);
  if (status.ok()) status = server->Connect(cancellation);
  if (!status.ok()) return status;
  return server;
}

LocalServer::~LocalServer() {
  client_.reset();
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  std::error_code error;
  if (!folder_.empty()) fs::remove_all(folder_, error);
}

}  // namespace sparsegdn::cli
