// Names of stored prefixes. Entry i belongs to window boundary i + 1; its key is a hash chained
// over the windows before it, so that equal keys mean an equal prefix under equal conditions, and
// no key says anything about the tokens or the tenant (docs/snapshot_format.md, section 5).
#ifndef SPARSEGDN_SERVER_ENGINE_PREFIX_KEY_H_
#define SPARSEGDN_SERVER_ENGINE_PREFIX_KEY_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "server/model/model_runner.h"
#include "sparsegdn/types.h"

namespace sparsegdn::engine {

using PrefixKey = std::array<uint8_t, 32>;

struct PrefixKeyHash {
  size_t operator()(const PrefixKey& key) const {
    size_t hash;
    std::memcpy(&hash, key.data(), sizeof(hash));
    return hash;
  }
};

std::string HexOf(const PrefixKey& key);

// SHA-256 over all that a stored state depends on besides its tokens: the model's identity, the
// backend and dtype it runs in, how requests are cut, the tenant, and the fields of the budget that
// choose updates before the last keep_last tokens. keep_last itself is left out: a boundary is
// stored and reused only where no token before it is forced by it (PrefixLimit), so it changes
// nothing there.
PrefixKey PrefixSeed(const model::ModelInfo& model, int64_t chunk_windows, const Budget& budget,
                     const std::string& tenant);

// The keys of the first `windows` boundaries: key_i = SHA-256(key_{i-1}, tokens of window i).
// `tokens` holds at least windows * kWindow.
std::vector<PrefixKey> PrefixChain(const PrefixKey& seed, std::span<const int32_t> tokens,
                                   int64_t windows);

// The last position whose state is a function of the tokens before it, for a prompt of
// `prompt_tokens` whose snapshot stands at `snapshot_position`.
int64_t PrefixLimit(const Budget& budget, int64_t prompt_tokens, int64_t snapshot_position);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PREFIX_KEY_H_
