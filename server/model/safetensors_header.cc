#include "server/model/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/model/json_fields.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

using nlohmann::json;

// A header's tensor name made fit for a message.
std::string Quoted(const std::string& name) {
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, 200)), "\"");
}

absl::Status Bad(const std::string& what, const std::string& got, const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("safetensors ", what, ": got ", got, ", wanted ", wanted));
}

// Parses with two guards that plain parsing lacks: values nested deeper than an entry's arrays are
// dropped instead of built, and a name that comes twice is seen.
absl::StatusOr<json> ParseObject(std::span<const uint8_t> text) {
  constexpr int kEntryDepth = 3;
  std::unordered_set<std::string> names;
  std::string duplicate;
  bool is_duplicate = false;
  const auto guard = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && !is_duplicate) {
      const std::string& name = parsed.get_ref<const std::string&>();
      if (!names.insert(name).second) {
        is_duplicate = true;
        duplicate = name;
      }
    }
    return depth <= kEntryDepth;
  };
  json parsed = json::parse(text.begin(), text.end(), guard, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return Bad("header", "no JSON object", "one");
  if (is_duplicate) return Bad("tensor " + Quoted(duplicate), "it twice", "it once");
  if (parsed.size() > kMaxHeaderTensors) {
    return Bad("header", absl::StrCat(parsed.size(), " tensors"),
               absl::StrCat("at most ", kMaxHeaderTensors));
  }
  return parsed;
}

// A JSON array of at most `max_count` integers >= 0.
absl::StatusOr<std::vector<int64_t>> ParseCounts(const json& entry, const char* key,
                                                 size_t max_count, const std::string& tensor) {
  const std::string wanted = absl::StrCat("at most ", max_count, " integers >= 0");
  auto it = entry.find(key);
  if (it == entry.end()) return Bad(tensor + " " + key, "nothing", wanted);
  if (!it->is_array() || it->size() > max_count) return Bad(tensor + " " + key, Shown(*it), wanted);
  std::vector<int64_t> counts;
  for (const json& item : *it) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      // What is nested deeper was dropped, so its size is not known.
      return Bad(tensor + " " + key, item.is_structured() ? "a nested value" : Shown(item), wanted);
    }
    counts.push_back(item.get<int64_t>());
  }
  return counts;
}

// Product of the shape times the element size; -1 when it does not fit.
int64_t BytesOf(const std::vector<int64_t>& shape, size_t element_bytes) {
  int64_t bytes = static_cast<int64_t>(element_bytes);
  for (int64_t d : shape) {
    if (__builtin_mul_overflow(bytes, d, &bytes)) return -1;
  }
  return bytes;
}

absl::StatusOr<SafetensorsEntry> ParseEntry(const std::string& name, const json& value,
                                            uint64_t data_start, uint64_t data_bytes) {
  const std::string tensor = "tensor " + Quoted(name);
  if (name.size() > kMaxTensorNameBytes) {
    return Bad(tensor, absl::StrCat("a name of ", name.size(), " bytes"),
               absl::StrCat("at most ", kMaxTensorNameBytes));
  }
  if (!value.is_object()) return Bad(tensor, Shown(value), "an object");
  SafetensorsEntry entry;
  entry.name = name;
  auto dtype = value.find("dtype");
  if (dtype == value.end() || !dtype->is_string()) {
    return Bad(tensor + " dtype", dtype == value.end() ? "nothing" : Shown(*dtype), "a string");
  }
  entry.dtype = dtype->get<std::string>();
  SPARSEGDN_ASSIGN_OR_RETURN(entry.shape, ParseCounts(value, "shape", kMaxTensorRank, tensor));
  SPARSEGDN_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                             ParseCounts(value, "data_offsets", 2, tensor));
  if (offsets.size() != 2 || offsets[0] > offsets[1] ||
      static_cast<uint64_t>(offsets[1]) > data_bytes) {
    return Bad(
        tensor + " data_offsets", ShapeText(offsets),
        absl::StrCat("[begin, end] with begin <= end <= ", data_bytes, " (the file's data)"));
  }
  const int64_t bytes = offsets[1] - offsets[0];
  if (const size_t size = SafetensorsDTypeBytes(entry.dtype); size != 0) {
    const int64_t wanted = BytesOf(entry.shape, size);
    if (wanted != bytes) {
      return Bad(tensor + " data_offsets", absl::StrCat(bytes, " bytes"),
                 wanted < 0
                     ? "a shape whose size fits 63 bits"
                     : absl::StrCat(wanted, " for ", entry.dtype, " ", ShapeText(entry.shape)));
    }
  }
  entry.begin = data_start + static_cast<uint64_t>(offsets[0]);
  entry.end = data_start + static_cast<uint64_t>(offsets[1]);
  return entry;
}

}  // namespace

size_t SafetensorsDTypeBytes(const std::string& dtype) {
  struct Known {
    const char* name;
    size_t bytes;
  };
  static constexpr Known kKnown[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1},
                                     {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
                                     {"BF16", 2},    {"I32", 4}, {"U32", 4}, {"F32", 4},
                                     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  for (const Known& known : kKnown) {
    if (dtype == known.name) return known.bytes;
  }
  return 0;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::span<const uint8_t> file,
                                                                     uint64_t file_bytes) {
  constexpr uint64_t kLengthBytes = 8;
  if (file.size() < kLengthBytes || file_bytes < kLengthBytes) {
    return Bad("file", absl::StrCat(std::min<uint64_t>(file.size(), file_bytes), " bytes"),
               "at least 8");
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{file[i]} << (8 * i);
  if (length > kMaxHeaderBytes) {
    return Bad("header length", absl::StrCat(length), absl::StrCat("at most ", kMaxHeaderBytes));
  }
  if (length > file_bytes - kLengthBytes || length > file.size() - kLengthBytes) {
    return Bad("header length", absl::StrCat(length),
               absl::StrCat("at most ", file_bytes - kLengthBytes, " (the file's rest)"));
  }
  SPARSEGDN_ASSIGN_OR_RETURN(const json header, ParseObject(file.subspan(kLengthBytes, length)));
  const uint64_t data_start = kLengthBytes + length;
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    SPARSEGDN_ASSIGN_OR_RETURN(SafetensorsEntry entry,
                               ParseEntry(name, value, data_start, file_bytes - data_start));
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  for (size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].begin < entries[i - 1].end) {
      return Bad("tensor " + Quoted(entries[i].name) + " data_offsets",
                 absl::StrCat("begin ", entries[i].begin - data_start),
                 absl::StrCat(">= ", entries[i - 1].end - data_start, ", the end of ",
                              Quoted(entries[i - 1].name)));
    }
  }
  // As the format's own library: the tensors cover the data, so that nothing hides in a shard.
  uint64_t covered = data_start;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered) {
      return Bad("tensor " + Quoted(entry.name) + " data_offsets",
                 absl::StrCat("begin ", entry.begin - data_start),
                 absl::StrCat(covered - data_start, ", no bytes between tensors"));
    }
    covered = entry.end;
  }
  if (covered != file_bytes) {
    return Bad("file", absl::StrCat(file_bytes - data_start, " bytes of data"),
               absl::StrCat(covered - data_start, ", the end of its last tensor"));
  }
  return entries;
}

}  // namespace sparsegdn::model
