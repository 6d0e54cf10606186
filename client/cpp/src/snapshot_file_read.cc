#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "sparsegdn/client/snapshot_file.h"
#include "src/errors.h"
#include "src/metadata_checksum.h"
#include "src/snapshot_names.h"

namespace sparsegdn::client {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // as the safetensors reference reader

absl::Status NotSnapshot(const std::string& path, const std::string& why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "FILE_FORMAT", "path",
                   absl::StrCat(path, " is not a snapshot file: ", why));
}

absl::Status Corrupt(const std::string& path, const std::string& why) {
  return DataLoss("FILE_CORRUPT", "path", absl::StrCat(path, " is corrupt: ", why));
}

class File {
 public:
  // Not blocking: of a pipe without a writer the open alone would wait for ever.
  explicit File(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  absl::StatusOr<uint64_t> Size() const {
    struct stat info;
    if (fd_ < 0 || fstat(fd_, &info) != 0) return FileError("read", path_, errno);
    if (!S_ISREG(info.st_mode)) return NotSnapshot(path_, "not a regular file");
    return static_cast<uint64_t>(info.st_size);
  }

  absl::Status Read(uint64_t offset, void* out, uint64_t size) const {
    char* bytes = static_cast<char*>(out);
    while (size > 0) {
      const ssize_t got =
          pread(fd_, bytes, std::min<uint64_t>(size, 1 << 30), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return FileError("read", path_, errno);
      if (got == 0) return Corrupt(path_, "it ends early");
      bytes += got;
      offset += static_cast<uint64_t>(got);
      size -= static_cast<uint64_t>(got);
    }
    return absl::OkStatus();
  }

 private:
  std::string path_;
  int fd_;
};

struct Header {
  Json json;
  uint64_t data_begin = 0;
  uint64_t data_bytes = 0;
};

absl::StatusOr<Header> ReadHeader(const File& file, const std::string& path) {
  absl::StatusOr<uint64_t> file_bytes = file.Size();
  if (!file_bytes.ok()) return file_bytes.status();
  if (*file_bytes < 8) return NotSnapshot(path, "shorter than 8 bytes");
  unsigned char prefix[8];
  absl::Status status = file.Read(0, prefix, 8);
  if (!status.ok()) return status;
  uint64_t size = 0;
  for (int i = 0; i < 8; ++i) size |= uint64_t{prefix[i]} << (8 * i);
  if (size > kMaxHeaderBytes || size > *file_bytes - 8) {
    return NotSnapshot(path, absl::StrCat("its header length, ", size, ", is out of bounds"));
  }
  std::string text(size, '\0');
  status = file.Read(8, text.data(), size);
  if (!status.ok()) return status;
  Header header{Json::parse(text, nullptr, /*allow_exceptions=*/false), 8 + size,
                *file_bytes - 8 - size};
  if (!header.json.is_object()) return NotSnapshot(path, "its header is not a JSON object");
  return header;
}

std::string Text(const Json& object, const std::string& key) {
  auto value = object.find(key);
  return value != object.end() && value->is_string() ? value->get<std::string>() : "";
}

bool Integer(const Json& object, const std::string& key, int64_t* out) {
  auto value = object.find(key);
  if (value == object.end() || !value->is_number_integer()) return false;
  *out = value->get<int64_t>();
  return true;
}

// One tensor: its entry in sparsegdn.tensors and its entry in the safetensors header.
bool ParseTensor(const Json& meta, const Json& header, v1::TensorInfo* info, uint64_t* begin,
                 uint64_t* hash) {
  int64_t layer = 0, position = 0;
  if (!meta.is_object() || !Integer(meta, "layer", &layer) ||
      !Integer(meta, "position", &position) || layer != static_cast<int32_t>(layer)) {
    return false;
  }
  info->set_name(Text(meta, "name"));
  info->set_kind(KindOf(Text(meta, "kind")));
  info->set_layer(static_cast<int32_t>(layer));
  info->set_position(position);
  info->set_state_layout(StateLayoutOf(Text(meta, "state_layout")));
  info->set_conv_layout(ConvLayoutOf(Text(meta, "conv_layout")));
  if (!absl::SimpleHexAtoi(Text(meta, "xxh3_64"), hash)) return false;
  auto entry = header.find(info->name());
  if (entry == header.end() || !entry->is_object()) return false;
  info->set_dtype(FileDTypeOf(Text(*entry, "dtype")));
  auto shape = entry->find("shape");
  auto offsets = entry->find("data_offsets");
  if (shape == entry->end() || !shape->is_array() || offsets == entry->end() ||
      !offsets->is_array() || offsets->size() != 2) {
    return false;
  }
  // The copies in the metadata are under its checksum.
  auto copy = meta.find("shape");
  if (Text(meta, "dtype") != Text(*entry, "dtype") || copy == meta.end() || !copy->is_array() ||
      copy->size() != shape->size()) {
    return false;
  }
  for (size_t i = 0; i < shape->size(); ++i) {
    // Number by number: to copy or compare what is nested deep would use up the stack.
    const Json& dim = (*shape)[i];
    if (!dim.is_number_unsigned() || (*copy)[i] != dim) return false;
    info->add_shape(dim.get<int64_t>());
  }
  if (!(*offsets)[0].is_number_unsigned() || !(*offsets)[1].is_number_unsigned()) return false;
  *begin = (*offsets)[0].get<uint64_t>();
  const uint64_t end = (*offsets)[1].get<uint64_t>();
  if (end < *begin) return false;
  info->set_bytes(end - *begin);
  return true;
}

struct Parsed {
  v1::Manifest manifest;
  std::vector<uint64_t> begins;
  std::vector<uint64_t> hashes;
  uint64_t digest = 0;
};

absl::StatusOr<Parsed> ParseHeader(const Header& header, const std::string& path) {
  auto metadata = header.json.find("__metadata__");
  if (metadata == header.json.end() || !metadata->is_object()) {
    return NotSnapshot(path, "it has no metadata");
  }
  Parsed out;
  uint32_t version = 0;
  int64_t position = 0;
  if (!absl::SimpleAtoi(Text(*metadata, "sparsegdn.format_version"), &version) ||
      !absl::SimpleAtoi(Text(*metadata, "sparsegdn.position"), &position) ||
      !absl::SimpleHexAtoi(Text(*metadata, "sparsegdn.digest"), &out.digest)) {
    return NotSnapshot(path, "its sparsegdn.* metadata is missing or malformed");
  }
  out.manifest.set_format_version(version);
  out.manifest.set_position(position);
  out.manifest.set_model_identity(Text(*metadata, "sparsegdn.model_identity"));
  std::vector<std::string> values;
  for (const char* key : kChecksummedKeys) values.push_back(Text(*metadata, key));
  uint64_t checksum = 0;
  if (!absl::SimpleHexAtoi(Text(*metadata, "sparsegdn.metadata_xxh3_64"), &checksum) ||
      checksum != MetadataChecksum(values)) {
    return Corrupt(path, "its metadata does not match its checksum");
  }
  const Json tensors = Json::parse(Text(*metadata, "sparsegdn.tensors"), nullptr, false);
  if (!tensors.is_array() || tensors.size() + 1 != header.json.size()) {
    return NotSnapshot(path, "sparsegdn.tensors does not list the tensors of the file");
  }
  uint64_t total = 0;
  for (const Json& tensor : tensors) {
    v1::TensorInfo* info = out.manifest.add_tensors();
    out.begins.push_back(0);
    out.hashes.push_back(0);
    if (!ParseTensor(tensor, header.json, info, &out.begins.back(), &out.hashes.back())) {
      return NotSnapshot(path, absl::StrCat("entry ", out.begins.size() - 1,
                                            " of sparsegdn.tensors is malformed"));
    }
    if (__builtin_add_overflow(total, info->bytes(), &total)) {
      return Corrupt(path, "tensor sizes overflow");
    }
  }
  out.manifest.set_total_bytes(total);
  return out;
}

// Every byte of the data section belongs to exactly one tensor.
absl::Status CheckTiling(const Parsed& parsed, uint64_t data_bytes, const std::string& path) {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (size_t i = 0; i < parsed.begins.size(); ++i) {
    const uint64_t bytes = parsed.manifest.tensors(static_cast<int>(i)).bytes();
    ranges.emplace_back(parsed.begins[i], parsed.begins[i] + bytes);
  }
  std::sort(ranges.begin(), ranges.end());
  uint64_t end = 0;
  for (const auto& [begin, stop] : ranges) {
    if (begin != end) return Corrupt(path, absl::StrCat("gap or overlap at data byte ", end));
    end = stop;
  }
  if (end != data_bytes) {
    return Corrupt(path, absl::StrCat("the data section has ", data_bytes,
                                      " bytes, the header "
                                      "says ",
                                      end));
  }
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> ReadTensors(const File& file, const Header& header, const Parsed& parsed,
                                     const std::string& path) {
  std::vector<Buffer> data;
  for (int i = 0; i < parsed.manifest.tensors_size(); ++i) {
    absl::StatusOr<Buffer> buffer = Buffer::Allocate(parsed.manifest.tensors(i).bytes());
    if (!buffer.ok()) return buffer.status();
    absl::Status status =
        file.Read(header.data_begin + parsed.begins[i], buffer->data(), buffer->size());
    if (!status.ok()) return status;
    data.push_back(*std::move(buffer));
  }
  absl::StatusOr<Snapshot> snapshot = Snapshot::Create(parsed.manifest, std::move(data));
  if (!snapshot.ok()) return snapshot.status();
  for (int i = 0; i < snapshot->size(); ++i) {
    if (snapshot->hash(i) != parsed.hashes[i]) {
      return Corrupt(
          path, absl::StrCat("tensor ", snapshot->info(i).name(), " does not match its checksum"));
    }
  }
  if (snapshot->digest() != parsed.digest) return Corrupt(path, "its digest does not match");
  return snapshot;
}

}  // namespace

absl::StatusOr<SnapshotFile> ReadSnapshotFile(const std::string& path, uint64_t max_bytes) {
  const File file(path);
  absl::StatusOr<Header> header = ReadHeader(file, path);
  if (!header.ok()) return header.status();
  absl::StatusOr<Parsed> parsed = ParseHeader(*header, path);
  if (!parsed.ok()) return parsed.status();
  absl::Status status = ValidateManifest(parsed->manifest, max_bytes);
  if (absl::IsResourceExhausted(status)) return status;
  if (!status.ok()) return Corrupt(path, std::string(status.message()));
  status = CheckTiling(*parsed, header->data_bytes, path);
  if (!status.ok()) return status;
  absl::StatusOr<Snapshot> snapshot = ReadTensors(file, *header, *parsed, path);
  if (!snapshot.ok()) return snapshot.status();
  SnapshotFile out{*std::move(snapshot), std::nullopt};
  const std::string json = Text(header->json["__metadata__"], "sparsegdn.result");
  if (!json.empty()) {
    v1::Result result;
    google::protobuf::util::JsonParseOptions options;
    options.ignore_unknown_fields = true;
    if (!google::protobuf::util::JsonStringToMessage(json, &result, options).ok()) {
      return Corrupt(path, "sparsegdn.result cannot be read");
    }
    out.result = std::move(result);
  }
  return out;
}

}  // namespace sparsegdn::client
