// What the closed and the open loop of `sparsegdn bench` share.
#ifndef SPARSEGDN_CLIENT_CLI_BENCH_COMMON_H_
#define SPARSEGDN_CLIENT_CLI_BENCH_COMMON_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/flags.h"
#include "cli/session.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::cli {

struct BenchTarget {
  Session session;
  v1::PrefillRequest base;  // everything but the tokens
  v1::ModelInfo info;
};

// Reads the flags of budget, outputs and call, connects and asks for the model.
absl::StatusOr<BenchTarget> OpenBench(const Args& args);

// Every request has its own tokens, a function of seed, length and index alone.
v1::PrefillRequest BenchRequest(const v1::PrefillRequest& base, int64_t length, int64_t index,
                                uint32_t vocab_size, int64_t seed);

// Nearest rank: always a value that was measured. 0 of no values; 0 < q <= 1.
double Percentile(std::vector<double> values, double q);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_BENCH_COMMON_H_
