#include "server/service/log.h"

#include <spdlog/async.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

namespace sparsegdn::service {
namespace {

constexpr size_t kQueueLines = 8192;
constexpr auto kStopWait = std::chrono::seconds(2);

struct Writer {
  std::shared_ptr<spdlog::details::thread_pool> pool;
  std::shared_ptr<spdlog::async_logger> logger;
};

// Logging threads may outlive StopLog (the process ends with _exit), so the writer is shared.
std::atomic<std::shared_ptr<Writer>> g_writer;
std::atomic<LogLevel> g_level{LogLevel::kError};
std::atomic<bool> g_json{true};

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "error";
}

std::string NowText() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[64];
  const size_t n = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text + n, sizeof(text) - n, ".%03dZ", static_cast<int>(ms));
  return text;
}

nlohmann::ordered_json ToJson(const LogField& field) {
  return std::visit([](const auto& value) { return nlohmann::ordered_json(value); }, field.value);
}

// Invalid UTF-8 is replaced and control characters escaped, so that a line stays a line.
std::string Dump(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string FormatLine(bool as_json, LogLevel level, std::string_view time, std::string_view event,
                       std::initializer_list<LogField> fields) {
  if (as_json) {
    nlohmann::ordered_json line;
    line["time"] = time;
    line["level"] = Name(level);
    line["event"] = event;
    for (const LogField& field : fields) line[std::string(field.key)] = ToJson(field);
    return Dump(line);
  }
  std::string line(time);
  line.append(" ").append(Name(level)).append(" ").append(event);
  for (const LogField& field : fields) {
    line.append(" ").append(field.key).append("=").append(Dump(ToJson(field)));
  }
  return line;
}

void StartLog(std::string_view level, std::string_view format) {
  g_level = level == "debug"     ? LogLevel::kDebug
            : level == "warning" ? LogLevel::kWarning
            : level == "error"   ? LogLevel::kError
                                 : LogLevel::kInfo;
  g_json = format != "text";
  auto writer = std::make_shared<Writer>();
  writer->pool = std::make_shared<spdlog::details::thread_pool>(kQueueLines, 1);
  auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  writer->logger = std::make_shared<spdlog::async_logger>(
      "sparsegdn", sink, writer->pool, spdlog::async_overflow_policy::overrun_oldest);
  writer->logger->set_pattern("%v");
  writer->logger->set_level(spdlog::level::trace);
  writer->logger->flush_on(spdlog::level::trace);
  g_writer = writer;
}

void StopLog() {
  std::shared_ptr<Writer> writer = g_writer.exchange(nullptr);
  if (writer == nullptr) return;
  // The pool's destructor writes what is queued. It must not keep the process alive when nobody
  // reads standard error any more.
  std::promise<void> written;
  std::future<void> done = written.get_future();
  std::thread([writer = std::move(writer), written = std::move(written)]() mutable {
    writer.reset();
    written.set_value();
  }).detach();
  done.wait_for(kStopWait);
}

bool LogEnabled(LogLevel level) { return level >= g_level.load(std::memory_order_relaxed); }

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  if (!LogEnabled(level)) return;
  const std::shared_ptr<Writer> writer = g_writer.load();
  if (writer == nullptr) return;
  writer->logger->log(spdlog::level::info,
                      spdlog::string_view_t(FormatLine(g_json, level, NowText(), event, fields)));
}

}  // namespace sparsegdn::service
