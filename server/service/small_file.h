// Reads what an operator names: configuration, tokens, certificates, passwords.
#ifndef SPARSEGDN_SERVER_SERVICE_SMALL_FILE_H_
#define SPARSEGDN_SERVER_SERVICE_SMALL_FILE_H_

#include <sys/stat.h>

#include <string>

#include "absl/status/statusor.h"

namespace sparsegdn::service {

inline constexpr size_t kMaxSmallFileBytes = 1 << 20;

// The bytes of a regular file. A pipe without a writer would hang the start, or the thread that
// takes signals on a reload; a device need never end. NOT_FOUND or INVALID_ARGUMENT says why,
// without the path. `info`, if given, is the file's.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t max_bytes = kMaxSmallFileBytes,
                                          struct stat* info = nullptr);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_SMALL_FILE_H_
