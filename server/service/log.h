// Structured logs on standard error: one line per event, JSON or text. Never holds prompt content.
// Writing never blocks the caller: lines go through a bounded ring that drops its oldest.
#ifndef SPARSEGDN_SERVER_SERVICE_LOG_H_
#define SPARSEGDN_SERVER_SERVICE_LOG_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

namespace sparsegdn::service {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogField {
  std::string_view key;
  std::variant<std::string, int64_t, double, bool> value;
};

// Starts the writer; without it lines are dropped, which is what unit tests want. `level` and
// `format` are option values (config.h). Not thread-safe.
void StartLog(std::string_view level, std::string_view format);
// Writes what is pending, for at most two seconds, and stops the writer.
void StopLog();

bool LogEnabled(LogLevel level);
void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

// The line itself, for tests. `time` is ISO 8601.
std::string FormatLine(bool as_json, LogLevel level, std::string_view time, std::string_view event,
                       std::initializer_list<LogField> fields);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_LOG_H_
