// Mutations of bytes and of framed streams, and the choice between kinds.
#include "tests/fuzz/mutate.h"

#include <algorithm>
#include <utility>

#include "tests/fuzz/frames.h"

namespace sparsegdn::fuzz {
namespace {

// A little-endian integer of 1, 2, 4 or 8 bytes somewhere: lengths, offsets and counts look so.
void EditInteger(std::string& bytes, Rng& rng) {
  const size_t width = size_t{1} << rng.Below(4);
  if (bytes.size() < width) return;
  const size_t at = rng.OneIn(3) ? 0 : rng.Below(bytes.size() - width + 1);
  uint64_t value = 0;
  for (size_t i = width; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  value = rng.OneIn(2) ? SpecialNumber(rng) : value + rng.Below(33) - 16;
  for (size_t i = 0; i < width; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
}

struct Range {
  size_t begin, size;
};

Range SomeRange(const std::string& bytes, Rng& rng) {
  const size_t begin = rng.Below(bytes.size() + 1);
  const size_t most = bytes.size() - begin;
  return {begin, rng.Below(1 + (rng.OneIn(2) ? std::min<size_t>(most, 16) : most))};
}

std::string MutateFrames(const std::string& input, const std::string& other, Format format,
                         Rng& rng) {
  std::vector<Frame> frames = SplitFrames(input);
  if (frames.empty()) return input;
  const size_t at = rng.Below(frames.size());
  switch (rng.Below(9)) {
    case 0:
      frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1: {
      Frame copy = frames[rng.Below(frames.size())];
      frames.insert(frames.begin() + static_cast<std::ptrdiff_t>(at), std::move(copy));
      break;
    }
    case 2:
      std::swap(frames[at], frames[rng.Below(frames.size())]);
      break;
    case 3:
      frames[at].flags ^= kMendChecksum;
      break;
    case 4: {
      const std::vector<Frame> more = SplitFrames(other);
      if (!more.empty()) frames[at] = more[rng.Below(more.size())];
      break;
    }
    default:
      frames[at].bytes = format == Format::kFrames ? MutateWire(frames[at].bytes, rng)
                                                   : MutateJson(frames[at].bytes, rng);
  }
  return JoinFrames(frames);
}

std::string MutatePrefixedJson(const std::string& input, Rng& rng) {
  if (input.size() < 8) return input;
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(input[i]);
  length = std::min<uint64_t>(length, input.size() - 8);
  const std::string json = MutateJson(input.substr(8, length), rng);
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(uint64_t{json.size()} >> (8 * i)));
  return out + json + input.substr(8 + length);
}

std::string MutateOnce(Format format, const std::string& input, const std::string& other,
                       Rng& rng) {
  // Bytes that no structure explains are tried too, but mostly end at the first check.
  if (rng.OneIn(6)) return MutateBytes(input, other, rng);
  switch (format) {
    case Format::kText:
      return MutateBytes(input, other, rng);
    case Format::kJson:
      return MutateJson(input, rng);
    case Format::kPrefixedJson:
      return MutatePrefixedJson(input, rng);
    case Format::kWire:
      return MutateWire(input, rng);
    case Format::kFrames:
    case Format::kJsonFrames:
      return MutateFrames(input, other, format, rng);
  }
  return input;
}

}  // namespace

uint64_t Rng::Next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t SpecialNumber(Rng& rng) {
  const uint64_t power = uint64_t{1} << rng.Below(64);
  switch (rng.Below(5)) {
    case 0:
      return rng.Below(20);
    case 1:
      return ~rng.Below(20);
    default:
      return power + rng.Below(3) - 1;
  }
}

std::string Nested(size_t depth, std::string_view middle) {
  return std::string(depth, '[') + std::string(middle) + std::string(depth, ']');
}

std::string MutateBytes(std::string bytes, const std::string& other, Rng& rng) {
  const Range range = SomeRange(bytes, rng);
  switch (rng.Below(8)) {
    case 0:
      if (!bytes.empty()) bytes[rng.Below(bytes.size())] ^= static_cast<char>(1 << rng.Below(8));
      break;
    case 1:
      if (!bytes.empty()) bytes[rng.Below(bytes.size())] = static_cast<char>(rng.Next());
      break;
    case 2:
      bytes.resize(range.begin);
      break;
    case 3:
      bytes.erase(range.begin, range.size);
      break;
    case 4:
      bytes.insert(rng.Below(bytes.size() + 1), bytes.substr(range.begin, range.size));
      break;
    case 5: {
      const Range from = SomeRange(other, rng);
      bytes.replace(range.begin, range.size, other, from.begin, from.size);
      break;
    }
    case 6:
      bytes.insert(range.begin, 1 + rng.Below(8), static_cast<char>(rng.Next()));
      break;
    default:
      EditInteger(bytes, rng);
  }
  return bytes;
}

std::string Mutate(Format format, const std::string& input, const std::string& other, Rng& rng) {
  std::string out = input;
  do {
    out = MutateOnce(format, out, other, rng);
  } while (rng.OneIn(2));
  if (out.size() > kMaxInputBytes) out.resize(kMaxInputBytes);
  return out;
}

}  // namespace sparsegdn::fuzz
