// Bearer tokens: the file that maps them to tenants, and the comparison.
//
// One entry a line, `TENANT TOKEN` or `TENANT sha256:HEX` (the SHA-256 of the token, 64 hex
// digits); blank lines and lines that begin with # are passed over. A tenant may have several
// tokens, so that one can be replaced without a gap; a token has one tenant. Tokens are 16 to 512
// characters of A-Z a-z 0-9 - . _ ~ + / = (RFC 6750), tenants 1 to 256 printable ones. Neither is
// ever part of a message or a log line.
#ifndef SPARSEGDN_SERVER_SERVICE_TOKENS_H_
#define SPARSEGDN_SERVER_SERVICE_TOKENS_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::service {

inline constexpr size_t kMaxTokenFileBytes = size_t{1} << 20;
inline constexpr size_t kMaxTokens = 4096;
inline constexpr size_t kMinTokenBytes = 16;
inline constexpr size_t kMaxTokenBytes = 512;

// Immutable. Holds hashes only, whatever the file holds.
class TokenTable {
 public:
  // INVALID_ARGUMENT names the line and what is wrong with it, never its content. A file without an
  // entry is an error: it would shut everybody out.
  static absl::StatusOr<TokenTable> Parse(std::string_view text);

  // The tenant, or nothing. Takes as long for a right token as for a wrong one: all entries are
  // compared, each in constant time.
  std::optional<std::string> TenantOf(std::string_view token) const;
  size_t size() const { return entries_.size(); }

 private:
  using Hash = std::array<unsigned char, 32>;
  struct Entry {
    Hash hash;
    std::string tenant;
  };
  static absl::StatusOr<Entry> ParseLine(std::string_view line);

  std::vector<Entry> entries_;
};

// The table of one file, read again when the file changes and on Reload. A file that has become
// unreadable or wrong is logged, and the last good table stays. Thread-safe.
class TokenFile {
 public:
  // Reads the file; its errors and NOT_FOUND name `flag`. Warns when others may read it.
  // `refresh_seconds`: how often the file is looked at.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path,
                                                         const std::string& flag,
                                                         int64_t refresh_seconds);
  ~TokenFile();

  std::shared_ptr<const TokenTable> table() const;
  // Reads the file now, changed or not.
  absl::Status Reload();

 private:
  // What tells two versions of a file apart; a Kubernetes secret swaps a link, which changes all.
  struct Version {
    uint64_t device = 0, inode = 0, size = 0;
    int64_t mtime_ns = 0;
    bool operator==(const Version&) const = default;
  };
  TokenFile(std::string path, std::string flag) : path_(std::move(path)), flag_(std::move(flag)) {}
  absl::StatusOr<TokenTable> Read(Version& version) const;
  void Watch(int64_t refresh_seconds);
  void ReloadIfChanged();

  const std::string path_, flag_;
  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  std::shared_ptr<const TokenTable> table_;
  Version version_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_TOKENS_H_
