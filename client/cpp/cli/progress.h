// A progress bar on standard error, only on a terminal.
#ifndef SPARSEGDN_CLIENT_CLI_PROGRESS_H_
#define SPARSEGDN_CLIENT_CLI_PROGRESS_H_

#include <chrono>
#include <string>

#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

// One line of at most 79 columns: "[########......]  53 %  computing 8,704 of 16,384 tokens".
std::string ProgressLine(const client::PrefillProgress& progress);

class ProgressBar {
 public:
  explicit ProgressBar(bool enabled);  // silent unless enabled and stderr is a terminal
  ~ProgressBar();                      // clears the line
  void Update(const client::PrefillProgress& progress);

 private:
  bool visible_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_PROGRESS_H_
