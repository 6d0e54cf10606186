#include "server/store/redis_connection.h"

#include <hiredis/hiredis.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sparsegdn::store {
namespace {

timeval ToTimeval(int64_t ns) {
  ns = std::max<int64_t>(ns, 1'000'000);  // zero would mean no bound
  return {static_cast<time_t>(ns / 1'000'000'000),
          static_cast<suseconds_t>(ns % 1'000'000'000 / 1000)};
}

absl::Status BadUrl(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "got a URL ", why, ", wanted redis://[user@]host[:port][/database] or unix:///path"));
}

bool TakePrefix(std::string& text, const std::string& prefix) {
  if (text.compare(0, prefix.size(), prefix) != 0) return false;
  text.erase(0, prefix.size());
  return true;
}

// Splits the number after the last `mark` off, when there is one.
absl::Status TakeNumber(std::string& text, char mark, int most, const char* what, int& out) {
  const size_t at = text.rfind(mark);
  if (at == std::string::npos) return absl::OkStatus();
  const std::string digits = text.substr(at + 1);
  text.erase(at);
  if (!absl::SimpleAtoi(digits, &out) || out < 0 || out > most) {
    return BadUrl(absl::StrCat("whose ", what, " is no number up to ", most));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RedisAddress> ParseRedisUrl(const std::string& url) {
  RedisAddress address;
  std::string rest = url;
  if (TakePrefix(rest, "unix://")) {
    if (rest.empty() || rest[0] != '/') return BadUrl("without an absolute path");
    address.unix_path = rest;
    return address;
  }
  if (!TakePrefix(rest, "redis://")) return BadUrl("of another scheme");
  if (const size_t at = rest.find('@'); at != std::string::npos) {
    address.user = rest.substr(0, at);
    rest.erase(0, at + 1);
    if (address.user.find(':') != std::string::npos) {
      return BadUrl("with a password (use --redis-password-file)");
    }
  }
  absl::Status status = TakeNumber(rest, '/', 1 << 20, "database", address.database);
  if (!status.ok()) return status;
  if (!rest.empty() && rest[0] == '[') {  // an IPv6 literal
    const size_t end = rest.find(']');
    if (end == std::string::npos) return BadUrl("without the closing ]");
    address.host = rest.substr(1, end - 1);
    rest.erase(0, end + 1);
    status = TakeNumber(rest, ':', 65535, "port", address.port);
    if (status.ok() && !rest.empty()) status = BadUrl("with text after ]");
  } else {
    status = TakeNumber(rest, ':', 65535, "port", address.port);
    address.host = rest;
  }
  if (!status.ok()) return status;
  if (address.host.empty() || address.port == 0) return BadUrl("without a host or a port");
  return address;
}

RedisAnswer::RedisAnswer(redisReply* reply) : reply_(reply, freeReplyObject) {}
bool RedisAnswer::is_nil() const { return reply_->type == REDIS_REPLY_NIL; }
bool RedisAnswer::is_error() const { return reply_->type == REDIS_REPLY_ERROR; }
int64_t RedisAnswer::integer() const {
  return reply_->type == REDIS_REPLY_INTEGER ? reply_->integer : 0;
}
std::string_view RedisAnswer::text() const {
  const int type = reply_->type;
  if (type != REDIS_REPLY_STRING && type != REDIS_REPLY_STATUS && type != REDIS_REPLY_ERROR) {
    return {};
  }
  return {reply_->str, static_cast<size_t>(reply_->len)};
}

RedisConnection::~RedisConnection() { Close(); }

void RedisConnection::Close() {
  if (context_ != nullptr) redisFree(std::exchange(context_, nullptr));
}

absl::Status RedisConnection::Broken(const std::string& what) {
  std::string why = what;
  if (context_ != nullptr && context_->err != 0) absl::StrAppend(&why, ": ", context_->errstr);
  lost_ = context_ != nullptr &&
          (context_->err == REDIS_ERR_EOF ||
           (context_->err == REDIS_ERR_IO && (errno == ECONNRESET || errno == EPIPE)));
  Close();
  return absl::UnavailableError("redis: " + why);
}

absl::Status RedisConnection::Open(int64_t timeout_ns) {
  const timeval timeout = ToTimeval(timeout_ns);
  if (context_ == nullptr) {
    context_ = address_.unix_path.empty()
                   ? redisConnectWithTimeout(address_.host.c_str(), address_.port, timeout)
                   : redisConnectUnixWithTimeout(address_.unix_path.c_str(), timeout);
    if (context_ == nullptr || context_->err != 0) return Broken("cannot connect");
    if (redisSetTimeout(context_, timeout) != REDIS_OK) return Broken("cannot set a timeout");
    return Greet();
  }
  if (redisSetTimeout(context_, timeout) != REDIS_OK) return Broken("cannot set a timeout");
  return absl::OkStatus();
}

// AUTH and SELECT of a new connection.
absl::Status RedisConnection::Greet() {
  const auto send = [this](const std::vector<std::string>& words) -> absl::Status {
    std::vector<const char*> arguments;
    std::vector<size_t> sizes;
    for (const std::string& word : words) {
      arguments.push_back(word.data());
      sizes.push_back(word.size());
    }
    redisAppendCommandArgv(context_, static_cast<int>(words.size()), arguments.data(),
                           sizes.data());
    absl::StatusOr<RedisAnswer> answer = Next();
    if (!answer.ok()) return answer.status();
    return answer->is_error() ? Broken(absl::StrCat(words[0], " is refused")) : absl::OkStatus();
  };
  absl::Status status;
  if (!address_.password.empty()) {
    status = address_.user.empty() ? send({"AUTH", address_.password})
                                   : send({"AUTH", address_.user, address_.password});
  }
  if (status.ok() && address_.database != 0) {
    status = send({"SELECT", absl::StrCat(address_.database)});
  }
  return status;
}

absl::StatusOr<RedisAnswer> RedisConnection::Next() {
  void* reply = nullptr;
  if (redisGetReply(context_, &reply) != REDIS_OK || reply == nullptr) {
    return Broken("no answer in time, or the connection was lost");
  }
  return RedisAnswer(static_cast<redisReply*>(reply));
}

absl::StatusOr<std::vector<RedisAnswer>> RedisConnection::Run(const std::vector<Command>& commands,
                                                              int64_t timeout_ns) {
  const bool reused = context_ != nullptr;
  absl::StatusOr<std::vector<RedisAnswer>> answers = Exchange(commands, timeout_ns);
  if (answers.ok() || !reused || !lost_) return answers;
  return Exchange(commands, timeout_ns);
}

absl::StatusOr<std::vector<RedisAnswer>> RedisConnection::Exchange(
    const std::vector<Command>& commands, int64_t timeout_ns) {
  if (absl::Status s = Open(timeout_ns); !s.ok()) return s;
  for (const Command& command : commands) {
    std::vector<const char*> arguments;
    std::vector<size_t> sizes;
    for (const std::string_view word : command) {
      arguments.push_back(word.data());
      sizes.push_back(word.size());
    }
    if (redisAppendCommandArgv(context_, static_cast<int>(command.size()), arguments.data(),
                               sizes.data()) != REDIS_OK) {
      return Broken("a command does not fit in memory");
    }
  }
  std::vector<RedisAnswer> answers;
  for (size_t i = 0; i < commands.size(); ++i) {
    absl::StatusOr<RedisAnswer> answer = Next();
    if (!answer.ok()) return answer.status();
    answers.push_back(*std::move(answer));
  }
  return answers;
}

}  // namespace sparsegdn::store
