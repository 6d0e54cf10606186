// Goal: the header parser accepts what the format allows and refuses everything else with a message
// that names the tensor, got and wanted, without reading beyond its bytes or allocating without
// bound (ASan watches).
#include "server/model/safetensors_header.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model {
namespace {

absl::StatusOr<std::vector<SafetensorsEntry>> Parse(const std::string& file) {
  // A copy of exactly this size, so that a read past the end is seen.
  const std::vector<uint8_t> bytes(file.begin(), file.end());
  return ParseSafetensorsHeader(bytes, bytes.size());
}

std::string File(const std::string& header, size_t data_bytes) {
  return testing::SafetensorsFile(header, std::string(data_bytes, 'd'));
}

TEST(SafetensorsHeaderTest, EntriesAreSortedAndOffsetsAbsolute) {
  const std::string header =
      R"({"__metadata__": {"format": "pt"},)"
      R"( "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},)"
      R"( "a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},)"
      R"( "empty": {"dtype": "F16", "shape": [0, 3], "data_offsets": [16, 16]},)"
      R"( "scalar": {"dtype": "I64", "shape": [], "data_offsets": [16, 24]},)"
      R"( "odd": {"dtype": "F4", "shape": [3], "data_offsets": [24, 26]}}   )";
  const auto parsed = Parse(File(header, 26));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->size(), 5u);
  EXPECT_EQ((*parsed)[0].name, "a");
  EXPECT_EQ((*parsed)[0].dtype, "BF16");
  EXPECT_EQ((*parsed)[0].shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ((*parsed)[0].begin, 8 + header.size());
  EXPECT_EQ((*parsed)[1].end, 8 + header.size() + 16);
}

TEST(SafetensorsHeaderTest, EmptyObjectIsAFileWithoutTensors) {
  const auto parsed = Parse(File("{}", 0));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(parsed->empty());
}

struct Refusal {
  const char* name;
  const char* header;
  size_t data_bytes;
  const char* message;
};

class HeaderRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(HeaderRefusalTest, NamesTensorGotWanted) {
  const auto parsed = Parse(File(GetParam().header, GetParam().data_bytes));
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(parsed.status().message()), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Rows, HeaderRefusalTest,
    ::testing::Values(
        Refusal{"no_json", "{\"a\": ", 8, "safetensors header: got no JSON object, wanted one"},
        Refusal{"array", "[]", 8, "safetensors header: got no JSON object, wanted one"},
        Refusal{"empty_header", "", 8, "safetensors header: got no JSON object, wanted one"},
        Refusal{"not_an_object", R"({"a": 5})", 8,
                "safetensors tensor \"a\": got 5, wanted an object"},
        Refusal{"no_dtype", R"({"a": {"shape": [1], "data_offsets": [0, 4]}})", 4,
                "safetensors tensor \"a\" dtype: got nothing, wanted a string"},
        Refusal{"no_shape", R"({"a": {"dtype": "F32", "data_offsets": [0, 4]}})", 4,
                "safetensors tensor \"a\" shape: got nothing, wanted at most 8 integers >= 0"},
        Refusal{"negative_shape",
                R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", 4,
                "safetensors tensor \"a\" shape: got -1, wanted at most 8 integers >= 0"},
        Refusal{"float_shape", R"({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}})",
                4, "safetensors tensor \"a\" shape: got 1.5, wanted at most 8 integers >= 0"},
        Refusal{"rank",
                R"({"a": {"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 4]}})",
                4,
                "safetensors tensor \"a\" shape: got an array of 9, wanted at most 8 integers "
                ">= 0"},
        Refusal{
            "nested_shape", R"({"a": {"dtype": "F32", "shape": [[1]], "data_offsets": [0, 4]}})", 4,
            "safetensors tensor \"a\" shape: got a nested value, wanted at most 8 integers >= 0"},
        Refusal{"three_offsets",
                R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}})", 8,
                "safetensors tensor \"a\" data_offsets: got an array of 3, wanted at most 2 "
                "integers >= 0"},
        Refusal{"one_offset", R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}})", 8,
                "safetensors tensor \"a\" data_offsets: got [4], wanted [begin, end] with begin "
                "<= end <= 8 (the file's data)"},
        Refusal{"reversed", R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})", 8,
                "safetensors tensor \"a\" data_offsets: got [4, 0], wanted [begin, end] with "
                "begin <= end <= 8 (the file's data)"},
        Refusal{"past_the_end", R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})",
                8,
                "safetensors tensor \"a\" data_offsets: got [0, 12], wanted [begin, end] with "
                "begin <= end <= 8 (the file's data)"},
        Refusal{
            "huge_offset",
            R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 18446744073709551615]}})",
            8,
            "safetensors tensor \"a\" data_offsets: got 18446744073709551615, wanted at most "
            "2 integers >= 0"},
        Refusal{"wrong_size", R"({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 8]}})",
                8, "safetensors tensor \"a\" data_offsets: got 8 bytes, wanted 6 for BF16 [3]"},
        Refusal{
            "overflowing_shape",
            R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}})",
            8,
            "safetensors tensor \"a\" data_offsets: got 0 bytes, wanted a shape whose size "
            "fits 63 bits"},
        Refusal{"overlap",
                R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},)"
                R"( "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
                8,
                "safetensors tensor \"b\" data_offsets: got begin 4, wanted >= 8, the end of "
                "\"a\""},
        Refusal{"gap",
                R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},)"
                R"( "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}})",
                12,
                "safetensors tensor \"b\" data_offsets: got begin 8, wanted 4, no bytes between "
                "tensors"},
        Refusal{"late_begin", R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})", 8,
                "safetensors tensor \"a\" data_offsets: got begin 4, wanted 0, no bytes between "
                "tensors"},
        Refusal{"bytes_behind", R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})",
                9, "safetensors file: got 9 bytes of data, wanted 4, the end of its last tensor"},
        Refusal{"duplicate",
                R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},)"
                R"( "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
                8, "safetensors tensor \"a\": got it twice, wanted it once"},
        Refusal{"control_bytes_in_name", "{\"a\\u0007\\n\": 5}", 8,
                "safetensors tensor \"a\\x07\\n\": got 5, wanted an object"}),
    [](const auto& info) { return info.param.name; });

TEST(SafetensorsHeaderTest, LengthsAreChecked) {
  EXPECT_EQ(Parse("").status().message(), "safetensors file: got 0 bytes, wanted at least 8");
  EXPECT_EQ(Parse("1234567").status().message(),
            "safetensors file: got 7 bytes, wanted at least 8");
  std::string file = File("{}", 0);
  file[0] = 3;  // one byte more than there is
  EXPECT_EQ(Parse(file).status().message(),
            "safetensors header length: got 3, wanted at most 2 (the file's rest)");
  file[7] = '\x7f';
  EXPECT_EQ(Parse(file).status().message(),
            "safetensors header length: got 9151314442816847875, wanted at most 16777216");
}

TEST(SafetensorsHeaderTest, DeepAndWideHeadersAreBounded) {
  EXPECT_FALSE(Parse(File("{\"a\": " + std::string(2'000'000, '['), 0)).ok());
  const std::string deep = std::string(300'000, '[') + std::string(300'000, ']');
  EXPECT_FALSE(Parse(File("{\"a\": " + deep + "}", 0)).ok());
  std::string wide = "{";
  for (size_t i = 0; i <= kMaxHeaderTensors; ++i) absl::StrAppend(&wide, "\"", i, "\":0,");
  wide.back() = '}';
  EXPECT_EQ(Parse(File(wide, 0)).status().message(),
            "safetensors header: got 100001 tensors, wanted at most 100000");
  EXPECT_FALSE(Parse(File("{\"" + std::string(kMaxTensorNameBytes + 1, 'n') + "\": {}}", 0)).ok());
}

// Byte flips, cuts and insertions of a valid header: an error or entries inside the file, never a
// crash.
TEST(SafetensorsHeaderTest, MutatedHeadersNeverLeaveTheFile) {
  const std::string valid =
      File(R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[3,4],)"
           R"("data_offsets":[0,24]},"v":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}})",
           32);
  std::mt19937 random(17);
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string file = valid;
    for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % file.size();
      switch (random() % 4) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file.erase(at, 1 + random() % 8);
          break;
        case 2:
          file.insert(at, 1, "0123456789[]{}\",:-eE"[random() % 20]);
          break;
        default:
          file.resize(at);
      }
      if (file.empty()) break;
    }
    const auto parsed = Parse(file);
    if (!parsed.ok()) continue;
    ++accepted;
    for (const SafetensorsEntry& entry : *parsed) {
      ASSERT_LE(entry.begin, entry.end);
      ASSERT_LE(entry.end, file.size());
    }
  }
  EXPECT_GT(accepted, 100);  // the mutations reach beyond the first check
}

}  // namespace
}  // namespace sparsegdn::model
