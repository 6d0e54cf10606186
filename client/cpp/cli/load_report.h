// What an open-loop run showed, as JSON and as a table.
#ifndef SPARSEGDN_CLIENT_CLI_LOAD_REPORT_H_
#define SPARSEGDN_CLIENT_CLI_LOAD_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "cli/load_plan.h"
#include "cli/load_run.h"

namespace sparsegdn::cli {

// Rates of what was offered are over the planned seconds, rates of what completed over the time
// until the last call ended, which under overload is longer. Percentiles are of completed calls;
// those of the snapshot leave out slow readers, whose time is their own.
nlohmann::ordered_json LoadJson(const LoadOptions& options, const LoadResult& result);

// For people; reads LoadJson's object with "server" (ServerWork or null) added.
std::string LoadTable(const nlohmann::ordered_json& report);

// OK when the run's calls completed or failed as calls under load do: full queue, deadline, cancel,
// unavailable. Else, or when none completed, the first error.
absl::Status LoadVerdict(const LoadResult& result);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_LOAD_REPORT_H_
