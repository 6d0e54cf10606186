#include "tests/unit/store/redis_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace sparsegdn::testing {
namespace {

// A listening socket on a free loopback port.
int ListenOnFreePort(int& port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener, 16), 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  port = ntohs(address.sin_port);
  return listener;
}

store::RedisAddress Loopback(int port) {
  store::RedisAddress address;
  address.host = "127.0.0.1";
  address.port = port;
  return address;
}

}  // namespace

RedisServer::RedisServer(std::vector<std::string> flags) : flags_(std::move(flags)) {
  signal(SIGPIPE, SIG_IGN);  // as main.cc
  close(ListenOnFreePort(port_));
  Start();
}

void RedisServer::Start() {
  std::vector<std::string> words = {SPARSEGDN_REDIS_SERVER,
                                    "--port",
                                    absl::StrCat(port_),
                                    "--bind",
                                    "127.0.0.1",
                                    "--save",
                                    "",
                                    "--appendonly",
                                    "no",
                                    "--dir",
                                    ::testing::TempDir()};
  words.insert(words.end(), flags_.begin(), flags_.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  process_ = fork();
  if (process_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that crashes leaves nothing behind
    const int null = open("/dev/null", O_RDWR);
    dup2(null, 1);
    dup2(null, 2);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  for (int i = 0; i < 500 && Command({"PING"}) != "PONG"; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(Command({"PING"}), "PONG") << "redis-server did not start: " << words[0];
}

void RedisServer::Kill() {
  if (process_ <= 0) return;
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
  process_ = -1;
}

void RedisServer::Signal(int number) const { kill(process_, number); }

store::RedisAddress RedisServer::address() const { return Loopback(port_); }

std::string RedisServer::Command(const std::vector<std::string>& words) const {
  store::RedisConnection connection(address());
  const auto answers = connection.Run({{words.begin(), words.end()}}, 2'000'000'000);
  if (!answers.ok()) return answers.status().ToString();
  const store::RedisAnswer& answer = answers->front();
  if (answer.is_error()) return absl::StrCat("(error) ", std::string(answer.text()));
  if (answer.integer() != 0) return absl::StrCat(answer.integer());
  return std::string(answer.text());
}

std::vector<std::string> RedisServer::Keys() const {
  const std::string all =
      Command({"EVAL", "return table.concat(redis.call('KEYS','*'),'\\n')", "0"});
  std::vector<std::string> keys;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find('\n', at), all.size());
    keys.push_back(all.substr(at, end - at));
    at = end + 1;
  }
  return keys;
}

SilentServer::SilentServer() { socket_ = ListenOnFreePort(port_); }
SilentServer::~SilentServer() { close(socket_); }
store::RedisAddress SilentServer::address() const { return Loopback(port_); }

}  // namespace sparsegdn::testing
