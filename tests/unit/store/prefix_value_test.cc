// The bytes of stored entries: what is written is read, and nothing else is believed.
#include "server/store/prefix_value.h"

#include <zstd.h>

#include <map>

#include "gtest/gtest.h"
#include "server/engine/frame_writer.h"
#include "tests/unit/store/store_testing.h"

namespace sparsegdn::testing {
namespace {

using engine::Layout;
using engine::PrefixEntry;
using store::Section;
using store::ValueHeader;

ValueHeader HeaderOf(const PrefixEntry& entry, const engine::PrefixKey& key, const Layout& layout) {
  return {key,
          entry.position,
          engine::StateBytes(layout),
          engine::WindowKvBytes(layout),
          entry.state_hash,
          entry.kv_hash};
}

// A model whose state and KV have several parts.
model::ModelInfo LargeInfo() {
  model::ModelInfo info = SmallHybridInfo();
  info.gdn = {.num_k_heads = 16, .num_v_heads = 160, .head_dim_k = 128, .head_dim_v = 128};
  info.conv_channels = 64;
  info.num_kv_heads = 4;
  info.attention_head_dim = 512;
  return info;
}

TEST(PrefixValue, AnEntryComesBackBitForBit) {
  for (const auto& [name, info] :
       std::map<std::string, model::ModelInfo>{{"small", SmallHybridInfo()},
                                               {"bf16", SmallHybridInfo(DType::kBF16)},
                                               {"several parts", LargeInfo()}}) {
    SCOPED_TRACE(name);
    const Layout layout(info);
    const auto entry = MakeEntry(layout, 2);
    const engine::PrefixKey key = MakeKeys(3)[2];
    const auto header = store::DecodeHeader(store::EncodeHeader(HeaderOf(*entry, key, layout)), key,
                                            entry->position, layout);
    ASSERT_TRUE(header.ok()) << header.status().ToString();
    PrefixEntry got;
    got.position = header->position;
    for (const Section section : {Section::kState, Section::kKv}) {
      store::SectionReader reader(layout, section);
      EXPECT_EQ(reader.parts() > 1, name == "several parts");
      for (int64_t part = 0; part < reader.parts(); ++part) {
        const std::string bytes = store::EncodePart(*entry, section, part);
        EXPECT_LE(std::ssize(bytes), store::kMaxPartBytes);
        ASSERT_TRUE(reader.Add(bytes).ok());
      }
      ASSERT_TRUE(reader.Finish(*header, got).ok());
    }
    EXPECT_EQ(BytesOf(got), BytesOf(*entry));
    EXPECT_TRUE(engine::IsSound(got, layout));
  }
}

TEST(PrefixValue, IncompressibleBytesStayWithinAPart) {
  EXPECT_LE(static_cast<int64_t>(ZSTD_compressBound(store::kPartRawBytes)), store::kMaxPartBytes);
}

TEST(PrefixValue, AHeaderOfAnythingElseIsRefused) {
  const Layout layout(SmallHybridInfo());
  const auto entry = MakeEntry(layout, 0);
  const engine::PrefixKey key = MakeKeys(1)[0];
  const ValueHeader header = HeaderOf(*entry, key, layout);
  const std::string good = store::EncodeHeader(header);
  const auto decode = [&](const std::string& bytes) {
    return store::DecodeHeader(bytes, key, kWindow, layout).status().code();
  };
  EXPECT_EQ(good.size(), store::kHeaderBytes);
  EXPECT_EQ(decode(good), absl::StatusCode::kOk);
  for (size_t i = 0; i < good.size(); ++i) {  // any byte
    std::string bad = good;
    bad[i] ^= 1;
    EXPECT_EQ(decode(bad), absl::StatusCode::kDataLoss) << i;
  }
  EXPECT_EQ(decode(good.substr(1)), absl::StatusCode::kDataLoss);
  EXPECT_EQ(decode(good + "x"), absl::StatusCode::kDataLoss);
  EXPECT_EQ(decode(""), absl::StatusCode::kDataLoss);
  // Whole and well formed, but of another entry or model.
  ValueHeader other = header;
  other.key[5] ^= 1;
  EXPECT_EQ(decode(store::EncodeHeader(other)), absl::StatusCode::kDataLoss);
  other = header;
  other.position += kWindow;
  EXPECT_EQ(decode(store::EncodeHeader(other)), absl::StatusCode::kDataLoss);
  other = header;
  other.state_bytes = int64_t{1} << 60;
  EXPECT_EQ(decode(store::EncodeHeader(other)), absl::StatusCode::kDataLoss);
  other = header;
  other.kv_bytes = -1;
  EXPECT_EQ(decode(store::EncodeHeader(other)), absl::StatusCode::kDataLoss);
}

TEST(PrefixValue, APartOfAnythingElseIsRefused) {
  const Layout layout(SmallHybridInfo());
  const auto entry = MakeEntry(layout, 0);
  const std::string good = store::EncodePart(*entry, Section::kState, 0);
  const auto add = [&](const std::string& bytes) {
    store::SectionReader reader(layout, Section::kState);
    return reader.Add(bytes).code();
  };
  EXPECT_EQ(add(good), absl::StatusCode::kOk);
  EXPECT_EQ(add(""), absl::StatusCode::kDataLoss);
  EXPECT_EQ(add(good.substr(0, good.size() / 2)), absl::StatusCode::kDataLoss);
  EXPECT_EQ(add("no frame at all"), absl::StatusCode::kDataLoss);
  // A frame that unpacks to a gigabyte takes no more than the part's room.
  const std::string zeros(64 << 20, '\0');
  std::string bomb(ZSTD_compressBound(zeros.size()), '\0');
  bomb.resize(ZSTD_compress(bomb.data(), bomb.size(), zeros.data(), zeros.size(), 1));
  EXPECT_EQ(add(bomb), absl::StatusCode::kDataLoss);
  EXPECT_EQ(add(store::EncodePart(*entry, Section::kKv, 0)), absl::StatusCode::kDataLoss);

  store::SectionReader twice(layout, Section::kState);
  EXPECT_TRUE(twice.Add(good).ok());
  EXPECT_EQ(twice.Add(good).code(), absl::StatusCode::kDataLoss);
  PrefixEntry out;
  store::SectionReader none(layout, Section::kState);
  EXPECT_EQ(none.Finish({}, out).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace sparsegdn::testing
