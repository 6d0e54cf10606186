#include "server/engine/prefix_entry.h"

#include "server/engine/encode.h"
#include "server/engine/frame_writer.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::engine {
namespace {

uint64_t HashOfPairs(const std::vector<Blob>& first, const std::vector<Blob>& second) {
  RunningHash hash;
  for (size_t i = 0; i < first.size(); ++i) {
    hash.Update(*first[i]);
    hash.Update(*second[i]);
  }
  return hash.Digest();
}

bool AllSound(const std::vector<Blob>& blobs, int64_t count, ExportDType dtype, int64_t elements) {
  if (std::ssize(blobs) != count) return false;
  for (const Blob& blob : blobs) {
    if (blob == nullptr || std::ssize(*blob) != elements * ElementBytes(dtype) ||
        !AllFinite(blob->data(), dtype, elements)) {
      return false;
    }
  }
  return true;
}

}  // namespace

int64_t PrefixEntry::bytes() const {
  int64_t sum = 0;
  for (const std::vector<Blob>* blobs : {&recurrent, &conv, &key, &value}) {
    for (const Blob& blob : *blobs) sum += std::ssize(*blob);
  }
  return sum;
}

int64_t StateBytes(const Layout& layout) { return layout.kept_bytes(0); }
int64_t WindowKvBytes(const Layout& layout) {
  return layout.kept_bytes(kWindow) - layout.kept_bytes(0);
}

uint64_t HashOfState(const PrefixEntry& entry) { return HashOfPairs(entry.recurrent, entry.conv); }
uint64_t HashOfKv(const PrefixEntry& entry) { return HashOfPairs(entry.key, entry.value); }

void SealEntry(PrefixEntry& entry) {
  entry.state_hash = HashOfState(entry);
  entry.kv_hash = HashOfKv(entry);
}

bool IsSound(const PrefixEntry& entry, const Layout& layout) {
  const int64_t linear = entry.has_state ? std::ssize(layout.linear_layers) : 0;
  const int64_t full = std::ssize(layout.full_layers);
  const int64_t rows = kWindow * layout.kv_row_elements();
  return AllSound(entry.recurrent, linear, ExportDType::kF32, layout.state_elements()) &&
         AllSound(entry.conv, linear, layout.compute, layout.conv_elements()) &&
         AllSound(entry.key, full, layout.compute, rows) &&
         AllSound(entry.value, full, layout.compute, rows) &&
         HashOfState(entry) == entry.state_hash && HashOfKv(entry) == entry.kv_hash;
}

}  // namespace sparsegdn::engine
