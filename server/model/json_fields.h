// Typed reads from a JSON object, with errors that name field, got, wanted.
#ifndef SPARSEGDN_SERVER_MODEL_JSON_FIELDS_H_
#define SPARSEGDN_SERVER_MODEL_JSON_FIELDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::model {

// A JSON object and what it is called in messages, e.g. "config.json: text_config.". A field that
// is null counts as absent, as in files that Python writes. Borrows the object.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  bool Has(const char* key) const;
  std::string Name(const char* key) const { return prefix_ + key; }

  // INVALID_ARGUMENT when absent without a fallback, of another type, or outside [low, high].
  absl::StatusOr<int64_t> Int(const char* key, int64_t low, int64_t high,
                              std::optional<int64_t> fallback = std::nullopt) const;
  // As Int; NaN is never in range, and integers count as numbers.
  absl::StatusOr<double> Number(const char* key, double low, double high,
                                std::optional<double> fallback = std::nullopt) const;
  absl::StatusOr<bool> Bool(const char* key, bool fallback) const;
  absl::StatusOr<std::string> String(const char* key, const std::string& fallback) const;

  // The value as text for messages, cut to a sane length.
  std::string Got(const char* key) const;

  const nlohmann::json& object() const { return object_; }

 private:
  absl::Status Wrong(const char* key, const std::string& wanted) const;

  const nlohmann::json& object_;
  std::string prefix_;
};

// `value` printed for a message, at most about 80 characters, control bytes escaped.
std::string Shown(const nlohmann::json& value);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_JSON_FIELDS_H_
