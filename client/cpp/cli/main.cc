// sparsegdn: the command line client of the SparseGDN prefill service.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/session.h"

namespace sparsegdn::cli {

std::vector<Command> AllCommands() {
  return {PrefillCommand(),   GenerateCommand(), InfoCommand(),   BenchCommand(),
          CalibrateCommand(), ImportCommand(),   ReleaseCommand()};
}

namespace {

constexpr char kExitCodes[] =
    "\nExit codes\n"
    "  0    success\n"
    "  1    any other error\n"
    "  2    the command line or the token input is wrong; nothing was sent\n"
    "  3    the server refused the request; the same request will be refused again\n"
    "  4    the server is unavailable or full; try again later\n"
    "  5    --timeout passed\n"
    "  6    what came is not a complete, verified snapshot; nothing was written\n"
    "  7    a file cannot be read or written, or is corrupt\n"
    "  8    calibrate: no measured budget meets the target\n"
    "  130  interrupted (Ctrl-C)\n";

std::string Overview() {
  std::string text =
      "sparsegdn sends token ids to a SparseGDN prefill server, which runs the prompt and streams\n"
      "back a snapshot: the recurrent state (and attention keys and values) from which decoding\n"
      "continues.\n\n"
      "usage: sparsegdn COMMAND [arguments] [flags]\n\nCommands\n";
  for (const Command& command : AllCommands()) {
    absl::StrAppend(&text, absl::StrFormat("  %-10s %s\n", command.name, command.summary));
  }
  absl::StrAppend(&text,
                  "\nFirst steps\n"
                  "  sparsegdn info --wait 30                          which model is served\n"
                  "  echo '5 17 42' | sparsegdn generate -n 8          continue three tokens\n"
                  "  sparsegdn prefill ids.txt --out s.safetensors     keep a snapshot as a file\n"
                  "  sparsegdn COMMAND --help                          all flags of a command\n");
  return text + kExitCodes;
}

std::string Help(const Command& command) {
  return absl::StrCat("usage: sparsegdn ", command.name, command.arguments.empty() ? "" : " ",
                      command.arguments, " [flags]\n\n", command.summary, "\n\n", command.text,
                      DescribeFlags(command.flags), kExitCodes);
}

int Execute(const Command& command, const std::vector<std::string>& arguments) {
  absl::StatusOr<Args> args = Args::Parse(command.flags, arguments);
  if (args.ok() && args->Has("help")) {
    std::fputs(Help(command).c_str(), stdout);
    return kOk;
  }
  const absl::Status status = args.ok() ? command.run(*args) : args.status();
  if (status.ok()) return kOk;
  PrintError(status);
  const ExitCode code = ExitCodeOf(status);
  if (code == kUsage) {
    std::fprintf(stderr, "see: sparsegdn %s --help\n", command.name.c_str());
  }
  return code;
}

int Main(const std::vector<std::string>& arguments) {
  const std::string name = arguments.empty() ? "--help" : arguments[0];
  if (name == "--help" || name == "-h" || name == "help") {
    std::fputs(Overview().c_str(), arguments.empty() ? stderr : stdout);
    return arguments.empty() ? kUsage : kOk;
  }
  for (const Command& command : AllCommands()) {
    if (command.name == name) {
      return Execute(command, std::vector<std::string>(arguments.begin() + 1, arguments.end()));
    }
  }
  std::fprintf(stderr, "error: unknown command \"%s\"\nsee: sparsegdn --help\n", name.c_str());
  return kUsage;
}

// A closed standard stream would give its number to the next file or socket, and be mistaken for
// it. What is opened here in its place fails with EBADF, as the closed one would.
void HoldClosedStreams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (syscall(SYS_fcntl, fd, F_GETFD) >= 0 || errno != EBADF) continue;
    const int mode = fd == STDIN_FILENO ? O_WRONLY : O_RDONLY;
    syscall(SYS_openat, AT_FDCWD, "/dev/null", mode);  // takes the lowest number, fd
  }
}

// Before the constructors of shared libraries: gRPC's open descriptors.
[[gnu::section(".preinit_array"),
  gnu::used]] void (*const kHoldClosedStreams)() = HoldClosedStreams;

}  // namespace
}  // namespace sparsegdn::cli

int main(int argc, char** argv) {
  sparsegdn::cli::IgnoreWriteSignals();
  int code = sparsegdn::cli::Main(std::vector<std::string>(argv + 1, argv + argc));
  // A result that could not be printed is not a success.
  if (std::fflush(stdout) != 0 && code == sparsegdn::cli::kOk) {
    std::fprintf(stderr, "error: cannot write to standard output\n");
    code = sparsegdn::cli::kFile;
  }
  return code;
}
