// Command line flags: a table per command, from which parsing and --help both come.
#ifndef SPARSEGDN_CLIENT_CLI_FLAGS_H_
#define SPARSEGDN_CLIENT_CLI_FLAGS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::cli {

struct Flag {
  std::string name;   // without dashes
  std::string value;  // what --help calls the value; empty for a switch
  std::string help;
};

struct FlagGroup {
  std::string title;
  std::vector<Flag> flags;
};

// An error of usage: exit code 2.
absl::Status UsageError(const std::string& message);

// Parsed arguments of one command.
class Args {
 public:
  // `--name value`, `--name=value`, `-n` for the flag "n"; "-" alone and everything after "--" are
  // positional. Errors name the argument, and the nearest flag for a misspelt one.
  static absl::StatusOr<Args> Parse(const std::vector<FlagGroup>& groups,
                                    const std::vector<std::string>& arguments);

  bool Has(const std::string& name) const { return values_.count(name) > 0; }
  std::string Text(const std::string& name, const std::string& fallback = "") const;
  // Each leaves *out alone when the flag is absent.
  absl::Status Read(const std::string& name, int64_t min, int64_t max, int64_t* out) const;
  absl::Status Read(const std::string& name, std::optional<double>* out) const;
  absl::Status ReadList(const std::string& name, std::vector<int64_t>* out) const;
  // One of `choices`; *out is its index.
  absl::Status ReadChoice(const std::string& name, const std::vector<std::string>& choices,
                          int* out) const;

  const std::vector<std::string>& positional() const { return positional_; }

 private:
  std::map<std::string, std::string> values_;
  std::vector<std::string> positional_;
};

// The flags as --help prints them, wrapped at 100 columns.
std::string DescribeFlags(const std::vector<FlagGroup>& groups);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_FLAGS_H_
