// The commands of `sparsegdn`, each one file.
#ifndef SPARSEGDN_CLIENT_CLI_COMMANDS_H_
#define SPARSEGDN_CLIENT_CLI_COMMANDS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/flags.h"

namespace sparsegdn::cli {

struct Command {
  std::string name;
  std::string arguments;  // as in "usage: sparsegdn NAME ARGUMENTS [flags]"
  std::string summary;    // one line
  std::string text;       // paragraphs and examples
  std::vector<FlagGroup> flags;
  absl::Status (*run)(const Args& args);
};

Command PrefillCommand();
Command GenerateCommand();
Command InfoCommand();
Command BenchCommand();
Command CalibrateCommand();
Command ImportCommand();
Command ReleaseCommand();

std::vector<Command> AllCommands();

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_COMMANDS_H_
