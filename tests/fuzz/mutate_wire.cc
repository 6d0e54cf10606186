// Mutations of a protobuf message field by field, with all lengths kept right.
#include <optional>
#include <utility>

#include "tests/fuzz/mutate.h"

namespace sparsegdn::fuzz {
namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

struct Field {
  uint64_t number = 0;
  int type = kVarint;
  uint64_t value = 0;  // kVarint
  std::string bytes;   // the others
};

std::optional<uint64_t> TakeVarint(std::string_view& in) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && !in.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(in[0]);
    in.remove_prefix(1);
    value |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return value;
  }
  return std::nullopt;
}

void PutVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

std::optional<std::vector<Field>> Parse(std::string_view in) {
  std::vector<Field> fields;
  while (!in.empty()) {
    const std::optional<uint64_t> tag = TakeVarint(in);
    if (!tag || *tag >> 3 == 0) return std::nullopt;
    Field field{*tag >> 3, static_cast<int>(*tag & 7), 0, ""};
    uint64_t size = field.type == kFixed64 ? 8 : 4;
    if (field.type == kVarint || field.type == kLength) {
      const std::optional<uint64_t> value = TakeVarint(in);
      if (!value) return std::nullopt;
      (field.type == kVarint ? field.value : size) = *value;
    } else if (field.type != kFixed64 && field.type != kFixed32) {
      return std::nullopt;
    }
    if (field.type != kVarint) {
      if (size > in.size()) return std::nullopt;
      field.bytes = in.substr(0, size);
      in.remove_prefix(size);
    }
    fields.push_back(std::move(field));
  }
  return fields;
}

std::string Serialize(const std::vector<Field>& fields) {
  std::string out;
  for (const Field& field : fields) {
    PutVarint(field.number << 3 | static_cast<uint64_t>(field.type), out);
    if (field.type == kVarint) PutVarint(field.value, out);
    if (field.type == kLength) PutVarint(field.bytes.size(), out);
    out += field.bytes;
  }
  return out;
}

void EditValue(Field& field, Rng& rng, int depth) {
  if (field.type == kVarint) {
    field.value = rng.OneIn(2) ? SpecialNumber(rng) : field.value + rng.Below(5) - 2;
  } else if (field.type == kLength) {
    const bool is_message = !field.bytes.empty() && Parse(field.bytes).has_value();
    if (is_message && depth < 8 && !rng.OneIn(4)) {
      field.bytes = MutateWire(field.bytes, rng, depth + 1);
    } else {
      field.bytes = MutateBytes(field.bytes, field.bytes, rng);
    }
  } else {
    const uint64_t bits = rng.OneIn(2) ? SpecialNumber(rng) : rng.Next();
    // The top bytes of a double that is 0, 1, -1, infinite or NaN.
    static constexpr uint64_t kDoubles[] = {0, 0x3ff0ull << 48, 0xbff0ull << 48, 0x7ff0ull << 48,
                                            0x7ff8ull << 48};
    const uint64_t value = rng.OneIn(2) ? kDoubles[rng.Below(5)] : bits;
    for (size_t i = 0; i < field.bytes.size(); ++i) {
      field.bytes[i] = static_cast<char>(value >> (8 * i));
    }
  }
}

}  // namespace

std::string MutateWire(const std::string& input, Rng& rng, int depth) {
  std::optional<std::vector<Field>> parsed = Parse(input);
  if (!parsed || rng.OneIn(20)) return MutateBytes(input, input, rng);
  std::vector<Field>& fields = *parsed;
  const size_t at = rng.Below(fields.size());
  const auto place = fields.begin() + static_cast<std::ptrdiff_t>(at);
  const uint64_t choice = fields.empty() ? 0 : rng.Below(10);
  switch (choice) {
    case 0: {  // a field that may be absent, at its place in the list or not
      Field field{1 + rng.Below(12), kVarint, SpecialNumber(rng), ""};
      if (rng.OneIn(3)) field = {field.number, kLength, 0, std::string(rng.Below(4), '\x08')};
      if (rng.OneIn(4)) field = {field.number, kFixed64, 0, std::string(8, '\x3f')};
      fields.insert(place, std::move(field));
      break;
    }
    case 1:
      fields.erase(place);
      break;
    case 2: {
      Field copy = fields[rng.Below(fields.size())];
      fields.insert(place, std::move(copy));
      break;
    }
    case 3:
      std::swap(fields[at], fields[rng.Below(fields.size())]);
      break;
    case 4:
      fields[at].number = 1 + rng.Below(12);
      break;
    default:
      EditValue(fields[at], rng, depth);
  }
  return Serialize(fields);
}

}  // namespace sparsegdn::fuzz
