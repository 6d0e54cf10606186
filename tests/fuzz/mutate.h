// Mutations of an input, seeded and so repeatable: bit flips, truncation, splices, duplicated
// ranges, edited lengths, and edits that keep the structure of JSON, protobuf and framed streams.
#ifndef SPARSEGDN_TESTS_FUZZ_MUTATE_H_
#define SPARSEGDN_TESTS_FUZZ_MUTATE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sparsegdn::fuzz {

enum class Format {
  kText,
  kJson,
  kPrefixedJson,  // u64 little-endian length, JSON of that length, data (safetensors)
  kWire,          // one protobuf message
  kFrames,        // frames.h, each of one protobuf message
  kJsonFrames     // frames.h, each of JSON
};

inline constexpr size_t kMaxInputBytes = size_t{1} << 20;

// splitmix64: the same numbers on every platform.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  // In [0, n); 0 when n is 0.
  uint64_t Below(uint64_t n) { return n == 0 ? 0 : Next() % n; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }

 private:
  uint64_t state_;
};

// `input` changed once to a few times; `other` gives the material of splices. At most
// kMaxInputBytes long.
std::string Mutate(Format format, const std::string& input, const std::string& other, Rng& rng);

// One change each.
std::string MutateBytes(std::string input, const std::string& other, Rng& rng);
std::string MutateJson(const std::string& input, Rng& rng);
std::string MutateWire(const std::string& input, Rng& rng, int depth = 0);

// `depth` opening brackets, `middle`, and the closing ones.
std::string Nested(size_t depth, std::string_view middle = "");

// A whole number that is special to some field: a bound of a type, a power of two, or one beside.
uint64_t SpecialNumber(Rng& rng);

}  // namespace sparsegdn::fuzz

#endif  // SPARSEGDN_TESTS_FUZZ_MUTATE_H_
