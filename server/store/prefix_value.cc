#include "server/store/prefix_value.h"

#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/frame_writer.h"

namespace sparsegdn::store {
namespace {

using engine::Blob;
using engine::Layout;
using engine::PrefixEntry;

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[] = "SGDNPFX1";
constexpr int kZstdLevel = 1;  // states hardly shrink at any level

void AppendU64(uint64_t value, std::string& out) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

uint64_t ReadU64(std::string_view bytes, size_t offset) {
  uint64_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

absl::Status Broken(const std::string& what) { return absl::DataLossError(what); }

// The blobs of a section in order, each with the other of its layer.
std::vector<const Blob*> BlobsOf(const PrefixEntry& entry, Section section) {
  const bool state = section == Section::kState;
  const std::vector<Blob>& first = state ? entry.recurrent : entry.key;
  const std::vector<Blob>& second = state ? entry.conv : entry.value;
  std::vector<const Blob*> blobs;
  for (size_t i = 0; i < first.size(); ++i) blobs.insert(blobs.end(), {&first[i], &second[i]});
  return blobs;
}

int64_t SectionBytes(const Layout& layout, Section section) {
  return section == Section::kState ? engine::StateBytes(layout) : engine::WindowKvBytes(layout);
}

}  // namespace

std::string EncodeHeader(const ValueHeader& header) {
  std::string out(kMagic, 8);
  out.append(reinterpret_cast<const char*>(header.key.data()), header.key.size());
  AppendU64(static_cast<uint64_t>(header.position), out);
  AppendU64(static_cast<uint64_t>(header.state_bytes), out);
  AppendU64(static_cast<uint64_t>(header.kv_bytes), out);
  AppendU64(header.state_hash, out);
  AppendU64(header.kv_hash, out);
  AppendU64(engine::Xxh3(out), out);
  return out;
}

absl::StatusOr<ValueHeader> DecodeHeader(std::string_view bytes, const engine::PrefixKey& key,
                                         int64_t position, const Layout& layout) {
  if (bytes.size() != kHeaderBytes) {
    return Broken(absl::StrCat("header: got ", bytes.size(), " bytes, wanted ", kHeaderBytes));
  }
  if (std::memcmp(bytes.data(), kMagic, 8) != 0) return Broken("header: not of this format");
  const size_t end = kHeaderBytes - 8;
  if (engine::Xxh3({bytes.data(), end}) != ReadU64(bytes, end)) {
    return Broken("header: the checksum does not match");
  }
  ValueHeader header;
  std::memcpy(header.key.data(), bytes.data() + 8, header.key.size());
  header.position = static_cast<int64_t>(ReadU64(bytes, 40));
  header.state_bytes = static_cast<int64_t>(ReadU64(bytes, 48));
  header.kv_bytes = static_cast<int64_t>(ReadU64(bytes, 56));
  header.state_hash = ReadU64(bytes, 64);
  header.kv_hash = ReadU64(bytes, 72);
  if (header.key != key || header.position != position) return Broken("header: of another entry");
  if (header.state_bytes != SectionBytes(layout, Section::kState) ||
      header.kv_bytes != SectionBytes(layout, Section::kKv)) {
    return Broken("header: of a model of other sizes");
  }
  return header;
}

int64_t PartCount(int64_t bytes) { return (bytes + kPartRawBytes - 1) / kPartRawBytes; }

std::string EncodePart(const PrefixEntry& entry, Section section, int64_t part) {
  const int64_t begin = part * kPartRawBytes, end = begin + kPartRawBytes;
  std::string raw;
  int64_t offset = 0;
  for (const Blob* blob : BlobsOf(entry, section)) {
    const int64_t size = std::ssize(**blob);
    const int64_t from = std::max<int64_t>(begin - offset, 0);
    const int64_t to = std::min(end - offset, size);
    if (from < to) raw.append(**blob, static_cast<size_t>(from), static_cast<size_t>(to - from));
    offset += size;
  }
  std::string out(ZSTD_compressBound(raw.size()), '\0');
  const size_t size = ZSTD_compress(out.data(), out.size(), raw.data(), raw.size(), kZstdLevel);
  if (ZSTD_isError(size)) return "";  // only without memory; a part that no reader takes
  out.resize(size);
  return out;
}

SectionReader::SectionReader(const Layout& layout, Section section)
    : layout_(layout), section_(section), bytes_(SectionBytes(layout, section)) {}

absl::Status SectionReader::Add(std::string_view part) {
  const int64_t have = std::ssize(raw_);
  const int64_t wanted = std::min(kPartRawBytes, bytes_ - have);
  if (wanted <= 0) return Broken("part: more than the section has");
  if (std::ssize(part) > kMaxPartBytes) return Broken("part: too large");
  raw_.resize(static_cast<size_t>(have + wanted));
  // Never writes beyond the room, and fails when the frame holds more.
  const size_t got =
      ZSTD_decompress(raw_.data() + have, static_cast<size_t>(wanted), part.data(), part.size());
  if (ZSTD_isError(got) || static_cast<int64_t>(got) != wanted) {
    return Broken("part: no zstd frame of the size that it must have");
  }
  return absl::OkStatus();
}

absl::Status SectionReader::Finish(const ValueHeader& header, PrefixEntry& entry) {
  if (std::ssize(raw_) != bytes_) return Broken("section: parts are missing");
  const bool state = section_ == Section::kState;
  const size_t layers = (state ? layout_.linear_layers : layout_.full_layers).size();
  const int64_t compute = engine::ElementBytes(layout_.compute);
  const int64_t first = state ? layout_.state_elements() * 4 : kWindow * layout_.kv_row_bytes();
  const int64_t second = state ? layout_.conv_elements() * compute : first;
  size_t offset = 0;
  const auto take = [&](int64_t bytes) {
    Blob blob = std::make_shared<const std::string>(raw_, offset, static_cast<size_t>(bytes));
    offset += static_cast<size_t>(bytes);
    return blob;
  };
  for (size_t i = 0; i < layers; ++i) {
    (state ? entry.recurrent : entry.key).push_back(take(first));
    (state ? entry.conv : entry.value).push_back(take(second));
  }
  (state ? entry.state_hash : entry.kv_hash) = state ? header.state_hash : header.kv_hash;
  if (state) entry.has_state = true;
  raw_ = std::string();
  return absl::OkStatus();
}

}  // namespace sparsegdn::store
