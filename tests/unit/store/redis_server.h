// A real redis-server as a child process on a loopback port, and a TCP server that accepts and
// never answers.
#ifndef SPARSEGDN_TESTS_UNIT_STORE_REDIS_SERVER_H_
#define SPARSEGDN_TESTS_UNIT_STORE_REDIS_SERVER_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "server/store/redis_connection.h"

namespace sparsegdn::testing {

class RedisServer {
 public:
  // Waits until it answers; fails the test when it does not within ten seconds.
  explicit RedisServer(std::vector<std::string> flags = {});
  ~RedisServer() { Kill(); }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  store::RedisAddress address() const;
  void Kill();   // SIGKILL; idempotent
  void Start();  // again, on the same port
  void Signal(int number) const;
  // Runs one command as an operator would; "" for nil, "(error) ..." for an error.
  std::string Command(const std::vector<std::string>& words) const;
  std::vector<std::string> Keys() const;

 private:
  const std::vector<std::string> flags_;
  int port_ = 0;
  pid_t process_ = -1;
};

class SilentServer {
 public:
  SilentServer();
  ~SilentServer();
  store::RedisAddress address() const;

 private:
  int socket_ = -1;
  int port_ = 0;
};

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_STORE_REDIS_SERVER_H_
