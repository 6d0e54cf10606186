// Entries made of a fake model's layout, for the tests of server/store.
#ifndef SPARSEGDN_TESTS_UNIT_STORE_STORE_TESTING_H_
#define SPARSEGDN_TESTS_UNIT_STORE_STORE_TESTING_H_

#include <memory>
#include <string>
#include <vector>

#include "server/engine/prefix_entry.h"
#include "tests/unit/engine/fake_model.h"

namespace sparsegdn::testing {

inline engine::Blob FilledBlob(int64_t bytes, int64_t element, uint32_t& state) {
  std::string out(static_cast<size_t>(bytes), '\0');
  for (int64_t i = 0; i + element <= bytes; i += element) {
    state = state * 1664525 + 1013904223;
    // Finite in either dtype: a small exponent.
    const uint32_t bits = 0x3f000000u | (state >> 9);
    for (int64_t b = 0; b < element; ++b) {
      out[static_cast<size_t>(i + b)] = static_cast<char>(bits >> (8 * (4 - element + b)));
    }
  }
  return std::make_shared<const std::string>(std::move(out));
}

// The sealed entry of boundary `window` + 1.
inline std::shared_ptr<engine::PrefixEntry> MakeEntry(const engine::Layout& layout, int64_t window,
                                                      uint32_t seed = 1) {
  auto entry = std::make_shared<engine::PrefixEntry>();
  entry->position = (window + 1) * kWindow;
  entry->has_state = true;
  uint32_t state = seed * 7919 + static_cast<uint32_t>(window);
  const int64_t compute = engine::ElementBytes(layout.compute);
  for (size_t i = 0; i < layout.linear_layers.size(); ++i) {
    entry->recurrent.push_back(FilledBlob(layout.state_elements() * 4, 4, state));
    entry->conv.push_back(FilledBlob(layout.conv_elements() * compute, compute, state));
  }
  for (size_t i = 0; i < layout.full_layers.size(); ++i) {
    entry->key.push_back(FilledBlob(kWindow * layout.kv_row_bytes(), compute, state));
    entry->value.push_back(FilledBlob(kWindow * layout.kv_row_bytes(), compute, state));
  }
  engine::SealEntry(*entry);
  return entry;
}

// Keys of `windows` boundaries; other seeds give other chains.
inline std::vector<engine::PrefixKey> MakeKeys(int64_t windows, uint8_t seed = 1) {
  std::vector<engine::PrefixKey> keys(static_cast<size_t>(windows));
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i].fill(seed);
    keys[i][0] = static_cast<uint8_t>(i);
  }
  return keys;
}

// All bytes of an entry, for comparison.
inline std::string BytesOf(const engine::PrefixEntry& entry) {
  std::string out;
  for (const auto* blobs : {&entry.recurrent, &entry.conv, &entry.key, &entry.value}) {
    for (const engine::Blob& blob : *blobs) out += *blob;
  }
  return out;
}

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_STORE_STORE_TESTING_H_
