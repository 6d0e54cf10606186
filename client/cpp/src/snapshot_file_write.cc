#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "sparsegdn/client/snapshot_file.h"
#include "src/atomic_file.h"
#include "src/errors.h"
#include "src/metadata_checksum.h"
#include "src/snapshot_names.h"

namespace sparsegdn::client {
namespace {

using Json = nlohmann::ordered_json;

std::string Hex16(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

// Wide elements first, so that every tensor is aligned to its element; manifest order within.
std::vector<int> FileOrder(const v1::Manifest& manifest) {
  std::vector<int> order(manifest.tensors_size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&manifest](int a, int b) {
    return DTypeBytes(manifest.tensors(a).dtype()) > DTypeBytes(manifest.tensors(b).dtype());
  });
  return order;
}

Json TensorMetadata(const v1::TensorInfo& info, uint64_t hash) {
  Json out = {{"name", info.name()},
              {"kind", KindName(info.kind())},
              {"layer", info.layer()},
              {"position", info.position()},
              {"dtype", FileDType(info.dtype())},
              {"shape", std::vector<int64_t>(info.shape().begin(), info.shape().end())}};
  if (info.state_layout() != v1::STATE_LAYOUT_UNSPECIFIED) {
    out["state_layout"] = StateLayoutName(info.state_layout());
  }
  if (info.conv_layout() != v1::CONV_LAYOUT_UNSPECIFIED) {
    out["conv_layout"] = ConvLayoutName(info.conv_layout());
  }
  out["xxh3_64"] = Hex16(hash);
  return out;
}

Json Metadata(const Snapshot& snapshot, const v1::Result* result) {
  Json tensors = Json::array();
  for (int i = 0; i < snapshot.size(); ++i) {
    tensors.push_back(TensorMetadata(snapshot.info(i), snapshot.hash(i)));
  }
  Json out = {{"sparsegdn.format_version", absl::StrCat(snapshot.manifest().format_version())},
              {"sparsegdn.model_identity", snapshot.manifest().model_identity()},
              {"sparsegdn.position", absl::StrCat(snapshot.manifest().position())},
              {"sparsegdn.digest", Hex16(snapshot.digest())},
              {"sparsegdn.tensors", tensors.dump()}};
  if (result != nullptr) {
    std::string json;
    google::protobuf::util::JsonPrintOptions options;
    options.preserve_proto_field_names = true;
    // A Result always prints: it holds no Any and no bytes.
    if (google::protobuf::util::MessageToJsonString(*result, &json, options).ok()) {
      out["sparsegdn.result"] = json;
    }
  }
  std::vector<std::string> values;
  for (const char* key : kChecksummedKeys) values.push_back(out.value(key, ""));
  out["sparsegdn.metadata_xxh3_64"] = Hex16(MetadataChecksum(values));
  return out;
}

// Length prefix and JSON, padded with spaces so that the data section starts at a multiple of 8.
std::string Header(const Snapshot& snapshot, const std::vector<int>& order,
                   const v1::Result* result) {
  Json header;
  header["__metadata__"] = Metadata(snapshot, result);
  uint64_t offset = 0;
  for (int tensor : order) {
    const v1::TensorInfo& info = snapshot.info(tensor);
    header[info.name()] = {
        {"dtype", FileDType(info.dtype())},
        {"shape", std::vector<int64_t>(info.shape().begin(), info.shape().end())},
        {"data_offsets", {offset, offset + info.bytes()}}};
    offset += info.bytes();
  }
  // Invalid UTF-8 can only come from a Result's strings; it must not throw.
  std::string json = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string prefix(8, '\0');
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<char>(uint64_t{json.size()} >> (8 * i));
  return prefix + json;
}

}  // namespace

absl::Status WriteSnapshotFile(const std::string& path, const Snapshot& snapshot,
                               const v1::Result* result) {
  absl::StatusOr<std::unique_ptr<AtomicFile>> file = AtomicFile::Create(path);
  if (!file.ok()) return file.status();
  const std::vector<int> order = FileOrder(snapshot.manifest());
  const std::string header = Header(snapshot, order, result);
  absl::Status status = (*file)->Write(header.data(), header.size());
  for (int tensor : order) {
    if (!status.ok()) return status;
    status = (*file)->Write(snapshot.data(tensor).data(), snapshot.data(tensor).size());
  }
  if (!status.ok()) return status;
  return (*file)->Commit();
}

}  // namespace sparsegdn::client
