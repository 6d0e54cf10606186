// Subcommands of sparsegdn-bench. Each lives in a file of its own and is listed in main.cc.
#ifndef SPARSEGDN_TESTS_BENCH_BENCH_COMMAND_H_
#define SPARSEGDN_TESTS_BENCH_BENCH_COMMAND_H_

#include <map>
#include <string>
#include <vector>

namespace sparsegdn::bench {

// "--name value" pairs; a name without a value is "1".
class Flags {
 public:
  explicit Flags(const std::vector<std::string>& args);
  std::string Get(const std::string& name, const std::string& fallback);
  long GetInt(const std::string& name, long fallback);
  double GetDouble(const std::string& name, double fallback);
  // Names given but never asked for: a misspelt flag must not pass.
  std::vector<std::string> Unknown() const;

 private:
  std::map<std::string, std::string> values_;
  std::map<std::string, bool> used_;
};

struct Summary {
  double median_ms = 0.0;
  double p90_ms = 0.0;
};
Summary Summarize(std::vector<double> times_ms);

struct Command {
  const char* name;
  const char* usage;
  int (*run)(Flags* flags);  // exit status
};

int RunGdn(Flags* flags);
int RunModel(Flags* flags);

}  // namespace sparsegdn::bench

#endif  // SPARSEGDN_TESTS_BENCH_BENCH_COMMAND_H_
