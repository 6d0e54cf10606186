#include "server/engine/prefix_key.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "absl/strings/str_cat.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::engine {
namespace {

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    // Without SHA-256 no key can be told from another: nothing may be stored or found.
    if (context_ == nullptr || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) {
      std::abort();
    }
  }
  void Add(const void* data, size_t bytes) { EVP_DigestUpdate(context_.get(), data, bytes); }
  void Add(const std::string& text) { Add(text.data(), text.size()); }
  PrefixKey Finish() {
    PrefixKey key;
    EVP_DigestFinal_ex(context_.get(), key.data(), nullptr);
    return key;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, FreeContext> context_;
};

uint64_t BitsOf(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Only what the mode uses: two budgets with the same text select the same updates.
std::string BudgetText(const Budget& budget) {
  std::string text = absl::StrCat("mode=", static_cast<int>(budget.mode),
                                  "\nsolver=", static_cast<int>(budget.solver), "\n");
  if (budget.mode == BudgetMode::kDense) return text;
  const double share = budget.mode == BudgetMode::kRetention ? budget.retention : budget.coverage;
  absl::StrAppend(&text, "selector=", static_cast<int>(budget.selector),
                  "\nlocal=", static_cast<int>(budget.local), "\nshare=", BitsOf(share),
                  "\nmin=", BitsOf(budget.min_retention), "\nmax=", BitsOf(budget.max_retention),
                  "\nkeep_first=", budget.keep_first, "\n");
  return text;
}

}  // namespace

std::string HexOf(const PrefixKey& key) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : key) {
    text.push_back(kHex[byte >> 4]);
    text.push_back(kHex[byte & 15]);
  }
  return text;
}

PrefixKey PrefixSeed(const model::ModelInfo& model, int64_t chunk_windows, const Budget& budget,
                     const std::string& tenant) {
  Sha256 sha;
  sha.Add(absl::StrCat("sparsegdn-prefix-1\n", "model=", model.identity, "\nbackend=",
                       model.backend, "\ncompute=", static_cast<int>(model.compute_dtype),
                       "\nchunk_windows=", chunk_windows, "\nwindow=", kWindow, "\n"));
  sha.Add(BudgetText(budget));
  if (budget.mode == BudgetMode::kRetention && !model.budget_profile.empty()) {
    sha.Add("profile=");
    for (const double weight : model.budget_profile) sha.Add(absl::StrCat(BitsOf(weight), ","));
    sha.Add("\n");
  }
  // Last and with its length, so that no tenant's name can look like another field.
  sha.Add(absl::StrCat("tenant=", tenant.size(), ":"));
  sha.Add(tenant);
  return sha.Finish();
}

std::vector<PrefixKey> PrefixChain(const PrefixKey& seed, std::span<const int32_t> tokens,
                                   int64_t windows) {
  std::vector<PrefixKey> keys;
  const PrefixKey* before = &seed;
  keys.reserve(static_cast<size_t>(windows));
  for (int64_t i = 0; i < windows; ++i) {
    Sha256 sha;
    sha.Add(before->data(), before->size());
    const std::span<const int32_t> window =
        tokens.subspan(static_cast<size_t>(i * kWindow), static_cast<size_t>(kWindow));
    sha.Add(window.data(), window.size_bytes());
    keys.push_back(sha.Finish());
    before = &keys.back();
  }
  return keys;
}

int64_t PrefixLimit(const Budget& budget, int64_t prompt_tokens, int64_t snapshot_position) {
  if (budget.mode == BudgetMode::kDense) return snapshot_position;
  return std::min(snapshot_position, prompt_tokens - budget.keep_last);
}

}  // namespace sparsegdn::engine
