// A stream of messages as one input: per frame one byte of flags, a u32 little-endian length and
// that many bytes. A length past the end takes what is there, so that every input is a stream.
#ifndef SPARSEGDN_TESTS_FUZZ_FRAMES_H_
#define SPARSEGDN_TESTS_FUZZ_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sparsegdn::fuzz {

inline constexpr size_t kMaxFrames = 512;
// The target puts the right checksum into the message, so that mutated data comes past the check.
inline constexpr uint8_t kMendChecksum = 1;

struct Frame {
  uint8_t flags = 0;
  std::string bytes;
};

inline std::vector<Frame> SplitFrames(std::string_view input) {
  std::vector<Frame> frames;
  while (input.size() >= 5 && frames.size() < kMaxFrames) {
    size_t length = 0;
    for (int i = 4; i >= 1; --i) length = length << 8 | static_cast<unsigned char>(input[i]);
    const std::string_view bytes = input.substr(5, length);
    frames.push_back({static_cast<uint8_t>(input[0]), std::string(bytes)});
    input.remove_prefix(5 + bytes.size());
  }
  return frames;
}

inline std::string JoinFrames(const std::vector<Frame>& frames) {
  std::string out;
  for (const Frame& frame : frames) {
    out.push_back(static_cast<char>(frame.flags));
    for (int i = 0; i < 4; ++i) out.push_back(static_cast<char>(frame.bytes.size() >> (8 * i)));
    out += frame.bytes;
  }
  return out;
}

}  // namespace sparsegdn::fuzz

#endif  // SPARSEGDN_TESTS_FUZZ_FRAMES_H_
