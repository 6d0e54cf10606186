// Results as tables for people and as JSON for scripts.
#ifndef SPARSEGDN_CLIENT_CLI_RENDER_H_
#define SPARSEGDN_CLIENT_CLI_RENDER_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

using Json = nlohmann::ordered_json;

std::string Grouped(int64_t value);  // 16,384
std::string Bytes(uint64_t bytes);   // 9.4 MiB
std::string BudgetText(const v1::Budget& budget);

// `path` is where the snapshot was written, or empty.
std::string PrefillTable(const client::PrefillOutcome& outcome, const std::string& path);
Json PrefillJson(const client::PrefillOutcome& outcome, const std::string& path);

std::string InfoTable(const v1::ModelInfo& info);
Json InfoJson(const v1::ModelInfo& info);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_RENDER_H_
