// One connection to Redis with a bound on every wait.
#ifndef SPARSEGDN_SERVER_STORE_REDIS_CONNECTION_H_
#define SPARSEGDN_SERVER_STORE_REDIS_CONNECTION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct redisContext;
struct redisReply;

namespace sparsegdn::store {

struct RedisAddress {
  std::string host;  // or unix_path
  int port = 6379;
  std::string unix_path;
  std::string user;  // of an ACL; empty: the default one
  std::string password;
  int database = 0;
};

// redis://[user@]host[:port][/database] or unix:///path. INVALID_ARGUMENT says what is wrong; a
// password in the URL is refused, because command lines are no place for one.
absl::StatusOr<RedisAddress> ParseRedisUrl(const std::string& url);

// What Redis answered. Owns its bytes.
class RedisAnswer {
 public:
  explicit RedisAnswer(redisReply* reply);
  bool is_nil() const;
  // Refusals are answers, e.g. "OOM command not allowed when used memory > 'maxmemory'.".
  bool is_error() const;
  std::string_view text() const;  // of a string, a status or an error
  int64_t integer() const;        // 0 for others

 private:
  std::shared_ptr<redisReply> reply_;
};

// Not thread-safe. After an error it is closed, and the next Run connects again; a connection that
// was lost while nobody used it (Redis restarted, an idle timeout) is replaced at once.
class RedisConnection {
 public:
  explicit RedisConnection(RedisAddress address) : address_(std::move(address)) {}
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  using Command = std::vector<std::string_view>;
  // Sends all commands and waits for all answers, at most `timeout_ns` for the connection and for
  // each. UNAVAILABLE when Redis cannot be reached, does not answer in time or breaks the protocol.
  absl::StatusOr<std::vector<RedisAnswer>> Run(const std::vector<Command>& commands,
                                               int64_t timeout_ns);

 private:
  absl::Status Open(int64_t timeout_ns);
  absl::Status Greet();
  absl::StatusOr<std::vector<RedisAnswer>> Exchange(const std::vector<Command>& commands,
                                                    int64_t timeout_ns);
  absl::StatusOr<RedisAnswer> Next();
  absl::Status Broken(const std::string& what);
  void Close();

  const RedisAddress address_;
  redisContext* context_ = nullptr;
  bool lost_ = false;  // the last error was the other side closing
};

}  // namespace sparsegdn::store

#endif  // SPARSEGDN_SERVER_STORE_REDIS_CONNECTION_H_
