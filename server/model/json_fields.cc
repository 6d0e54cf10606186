#include "server/model/json_fields.h"

#include "absl/strings/str_cat.h"

namespace sparsegdn::model {
namespace {

constexpr size_t kShownMax = 80;

}  // namespace

std::string Shown(const nlohmann::json& value) {
  // A large container would be printed whole before it is cut, so it is described instead.
  if (value.is_array()) return absl::StrCat("an array of ", value.size());
  if (value.is_object()) return absl::StrCat("an object of ", value.size());
  std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kShownMax) text = text.substr(0, kShownMax) + "...";
  return text;
}

bool JsonFields::Has(const char* key) const {
  auto it = object_.find(key);
  return it != object_.end() && !it->is_null();
}

std::string JsonFields::Got(const char* key) const {
  auto it = object_.find(key);
  return it == object_.end() ? "nothing" : Shown(*it);
}

absl::Status JsonFields::Wrong(const char* key, const std::string& wanted) const {
  return absl::InvalidArgumentError(absl::StrCat(Name(key), " = ", Got(key), ", wanted ", wanted));
}

absl::StatusOr<int64_t> JsonFields::Int(const char* key, int64_t low, int64_t high,
                                        std::optional<int64_t> fallback) const {
  if (!Has(key) && fallback.has_value()) return *fallback;
  const std::string wanted = absl::StrCat("an integer in [", low, ", ", high, "]");
  if (!Has(key)) return Wrong(key, wanted);
  const nlohmann::json& value = object_[key];
  if (value.is_number_unsigned()) {
    const uint64_t v = value.get<uint64_t>();
    if (v <= static_cast<uint64_t>(INT64_MAX) && static_cast<int64_t>(v) >= low &&
        static_cast<int64_t>(v) <= high) {
      return static_cast<int64_t>(v);
    }
  } else if (value.is_number_integer()) {
    const int64_t v = value.get<int64_t>();
    if (v >= low && v <= high) return v;
  }
  return Wrong(key, wanted);
}

absl::StatusOr<double> JsonFields::Number(const char* key, double low, double high,
                                          std::optional<double> fallback) const {
  if (!Has(key) && fallback.has_value()) return *fallback;
  if (Has(key) && object_[key].is_number()) {
    const double v = object_[key].get<double>();
    if (v >= low && v <= high) return v;
  }
  return Wrong(key, absl::StrCat("a number in [", low, ", ", high, "]"));
}

absl::StatusOr<bool> JsonFields::Bool(const char* key, bool fallback) const {
  if (!Has(key)) return fallback;
  if (!object_[key].is_boolean()) return Wrong(key, "true or false");
  return object_[key].get<bool>();
}

absl::StatusOr<std::string> JsonFields::String(const char* key, const std::string& fallback) const {
  if (!Has(key)) return fallback;
  if (!object_[key].is_string()) return Wrong(key, "a string");
  return object_[key].get<std::string>();
}

}  // namespace sparsegdn::model
