// sparsegdn-bench: microbenchmarks that need neither a server nor Python.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/bench/bench_command.h"

namespace sparsegdn::bench {

Flags::Flags(const std::vector<std::string>& args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string name = args[i].rfind("--", 0) == 0 ? args[i].substr(2) : args[i];
    const bool has_value = i + 1 < args.size() && args[i + 1].rfind("--", 0) != 0;
    values_[name] = has_value ? args[++i] : "1";
  }
}

std::string Flags::Get(const std::string& name, const std::string& fallback) {
  used_[name] = true;
  const auto it = values_.find(name);
  return it == values_.end() ? fallback : it->second;
}

long Flags::GetInt(const std::string& name, long fallback) {
  return std::strtol(Get(name, std::to_string(fallback)).c_str(), nullptr, 10);
}

double Flags::GetDouble(const std::string& name, double fallback) {
  return std::strtod(Get(name, std::to_string(fallback)).c_str(), nullptr);
}

std::vector<std::string> Flags::Unknown() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : values_) {
    if (used_.count(name) == 0) names.push_back(name);
  }
  return names;
}

Summary Summarize(std::vector<double> times_ms) {
  if (times_ms.empty()) return {};
  std::sort(times_ms.begin(), times_ms.end());
  const size_t n = times_ms.size();
  return {times_ms[n / 2], times_ms[std::min(n - 1, n * 9 / 10)]};
}

namespace {

constexpr Command kCommands[] = {
    {"gdn",
     "--backend cpu|cuda [--device N] [--tokens N] [--k-heads N] [--v-heads N] [--dim N] [--dtype "
     "f32|bf16]\n"
     "      [--retention X] (1: dense) [--threads N] [--repeats N] [--json FILE]",
     RunGdn},
    {"model",
     "--model DIR [--backend auto|cpu|cuda] [--device N] [--tokens N,N,...] [--batch N]\n"
     "      [--chunk N] [--retention X] (1: dense) [--kv] [--threads N] [--repeats N] [--json "
     "FILE]",
     RunModel},
};

int Usage() {
  std::fprintf(stderr, "usage: sparsegdn-bench COMMAND [--flag value ...]\n");
  for (const Command& c : kCommands) std::fprintf(stderr, "  %s %s\n", c.name, c.usage);
  return 2;
}

}  // namespace
}  // namespace sparsegdn::bench

int main(int argc, char** argv) {
  using namespace sparsegdn::bench;
  for (const Command& c : kCommands) {
    if (argc < 2 || std::strcmp(argv[1], c.name) != 0) continue;
    Flags flags(std::vector<std::string>(argv + 2, argv + argc));
    return c.run(&flags);
  }
  return Usage();
}
