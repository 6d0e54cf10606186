// Input: frames (frames.h) as Redis might hold them for one entry: the header, the part of the
// state, the part of the KV; a header with the flag gets its right checksum first. Promise:
// DATA_LOSS, or an entry of the model's sizes, of which IsSound tells whether it holds what its
// hashes say.
#include <algorithm>

#include "server/engine/frame_writer.h"
#include "server/store/prefix_value.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/store/store_testing.h"

namespace sparsegdn::fuzz {
namespace {

using engine::Layout;
using engine::PrefixEntry;
using store::Section;

const Layout& SmallLayout() {
  static const Layout layout(testing::SmallHybridInfo());
  return layout;
}

engine::PrefixKey Key() { return testing::MakeKeys(1)[0]; }

bool Refused(const absl::Status& status) {
  NoteOutcome(status);
  if (status.ok()) return false;
  RequireRefusal(status, {absl::StatusCode::kDataLoss}, 256);
  return true;
}

// The header's checksum over what the header says.
std::string Mended(std::string header) {
  if (header.size() != store::kHeaderBytes) return header;
  const uint64_t hash = engine::Xxh3({header.data(), header.size() - 8});
  std::copy_n(reinterpret_cast<const char*>(&hash), 8, header.end() - 8);
  return header;
}

bool Read(const std::string& part, Section section, const store::ValueHeader& header,
          PrefixEntry& entry) {
  store::SectionReader reader(SmallLayout(), section);
  Require(reader.parts() == 1, "the fuzzed model's sections have one part");
  return !Refused(reader.Add(part)) && !Refused(reader.Finish(header, entry));
}

std::string Framed(const PrefixEntry& entry, uint8_t flags) {
  const std::string header =
      store::EncodeHeader({Key(), entry.position, engine::StateBytes(SmallLayout()),
                           engine::WindowKvBytes(SmallLayout()), entry.state_hash, entry.kv_hash});
  return JoinFrames({{flags, header},
                     {0, store::EncodePart(entry, Section::kState, 0)},
                     {0, store::EncodePart(entry, Section::kKv, 0)}});
}

}  // namespace

int FuzzPrefixValue(const uint8_t* data, size_t size) {
  const auto frames = SplitFrames({reinterpret_cast<const char*>(data), size});
  if (frames.empty()) return 0;
  const bool mend = (frames[0].flags & kMendChecksum) != 0;
  const auto header = store::DecodeHeader(mend ? Mended(frames[0].bytes) : frames[0].bytes, Key(),
                                          kWindow, SmallLayout());
  if (Refused(header.status())) return 0;
  Require(header->position == kWindow && header->key == Key(), "a header of another entry");
  PrefixEntry entry;
  entry.position = header->position;
  if (frames.size() < 3 || !Read(frames[1].bytes, Section::kState, *header, entry) ||
      !Read(frames[2].bytes, Section::kKv, *header, entry)) {
    return 0;
  }
  Require(entry.bytes() == engine::StateBytes(SmallLayout()) + engine::WindowKvBytes(SmallLayout()),
          "an entry of other sizes");
  const bool hashes = engine::HashOfState(entry) == header->state_hash &&
                      engine::HashOfKv(entry) == header->kv_hash;
  const bool sound = engine::IsSound(entry, SmallLayout());
  Require(!sound || hashes, "an entry is sound against its hashes");
  NoteOutcome(sound ? absl::OkStatus() : absl::DataLossError(hashes ? "not finite" : "hash"));
  return 0;
}

std::vector<std::string> PrefixValueSeeds() {
  const auto entry = testing::MakeEntry(SmallLayout(), 0);
  auto zeros = testing::MakeEntry(SmallLayout(), 0);
  for (auto* blobs : {&zeros->recurrent, &zeros->conv, &zeros->key, &zeros->value}) {
    for (engine::Blob& blob : *blobs) {
      blob = std::make_shared<const std::string>(blob->size(), '\0');
    }
  }
  engine::SealEntry(*zeros);
  const std::string whole = Framed(*zeros, kMendChecksum);
  return {whole, Framed(*zeros, 0), Framed(*entry, kMendChecksum),
          whole.substr(0, whole.size() / 2), ""};
}

}  // namespace sparsegdn::fuzz
