#include "cli/exit_codes.h"

#include "sparsegdn/client/status.h"

namespace sparsegdn::cli {

ExitCode ExitCodeOf(const absl::Status& status) {
  const std::string reason = client::DetailsOf(status).reason;
  if (reason.rfind("FILE_", 0) == 0) return kFile;
  if (reason == "USAGE" || reason == "BAD_OPTION" || reason == "TOKEN_FILE") return kUsage;
  if (reason == "NO_BUDGET") return kNoBudget;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kUnimplemented:
      return kRefused;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kResourceExhausted:
      return kTryLater;
    case absl::StatusCode::kDeadlineExceeded:
      return kDeadline;
    case absl::StatusCode::kDataLoss:
      return kIntegrity;
    case absl::StatusCode::kCancelled:
      return kInterrupted;
    default:
      return kOther;
  }
}

}  // namespace sparsegdn::cli
