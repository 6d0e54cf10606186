#include "server/model/model_identity.h"

#include <openssl/evp.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/model/files.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

constexpr size_t kMaxCacheBytes = size_t{1} << 20;
constexpr size_t kSliceBytes = size_t{64} << 20;  // between two reports of progress

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

class Sha256 {
 public:
  static absl::StatusOr<Sha256> Create() {
    Sha256 sha;
    sha.context_.reset(EVP_MD_CTX_new());
    if (sha.context_ == nullptr ||
        EVP_DigestInit_ex(sha.context_.get(), EVP_sha256(), nullptr) != 1) {
      return absl::InternalError("SHA-256 is not available");
    }
    return sha;
  }
  void Add(const void* data, size_t bytes) { EVP_DigestUpdate(context_.get(), data, bytes); }
  void Add(std::string_view text) { Add(text.data(), text.size()); }
  std::string Hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int length = 0;
    EVP_DigestFinal_ex(context_.get(), digest, &length);
    return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), length));
  }

 private:
  std::unique_ptr<EVP_MD_CTX, FreeContext> context_;
};

// One entry of the cache's "files".
absl::StatusOr<nlohmann::json> FileList(const std::string& dir, const Checkpoint& checkpoint) {
  std::vector<std::string> names = checkpoint.files();
  names.push_back("config.json");
  std::sort(names.begin(), names.end());
  nlohmann::json list = nlohmann::json::array();
  for (const std::string& name : names) {
    SPARSEGDN_ASSIGN_OR_RETURN(FileStamp stamp, StatFile(dir + "/" + name));
    list.push_back({{"name", name}, {"size", stamp.bytes}, {"mtime_ns", stamp.mtime_ns}});
  }
  return list;
}

bool IsIdentity(const nlohmann::json& value) {
  if (!value.is_string()) return false;
  const std::string text = value.get<std::string>();
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

std::string IdentityConfig(const ModelConfig& c) {
  const auto layer = [](std::string* out, LayerKind kind) { out->append(LayerKindName(kind)); };
  const auto number = [](double value) { return absl::StrFormat("%.17g", value); };
  return absl::StrCat("attention_head_dim=", c.head_dim, "\nconv_kernel=", c.conv_kernel,
                      "\neps=", number(c.rms_norm_eps), "\nhead_dim_k=", c.gdn.head_dim_k,
                      "\nhead_dim_v=", c.gdn.head_dim_v, "\nhidden_size=", c.hidden_size,
                      "\nintermediate_size=", c.intermediate_size,
                      "\nlayer_types=", absl::StrJoin(c.layers, ",", layer),
                      "\nnum_k_heads=", c.gdn.num_k_heads, "\nnum_kv_heads=", c.num_kv_heads,
                      "\nnum_q_heads=", c.num_q_heads, "\nnum_v_heads=", c.gdn.num_v_heads,
                      "\npartial_rotary_factor=", number(c.partial_rotary_factor),
                      "\nrope_theta=", number(c.rope_theta),
                      "\ntie_word_embeddings=", c.tie_word_embeddings ? "true" : "false",
                      "\nvocab_size=", c.vocab_size, "\n");
}

absl::StatusOr<std::string> ComputeModelIdentity(
    const ModelConfig& config, const Checkpoint& checkpoint, bool round_a_log,
    const std::function<void(int64_t, int64_t)>& progress) {
  SPARSEGDN_ASSIGN_OR_RETURN(Sha256 sha, Sha256::Create());
  sha.Add("sparsegdn-model-identity-1\n");
  sha.Add(IdentityConfig(config));
  sha.Add(round_a_log ? "round_a_log=true\n" : "round_a_log=false\n");
  int64_t total = 0, done = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    total += static_cast<int64_t>(tensor.bytes.size());
  }
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    const char zero = '\0';
    for (const std::string& text : {name, std::string(SafetensorsDTypeName(tensor.dtype)),
                                    absl::StrJoin(tensor.shape, ",")}) {
      sha.Add(text);
      sha.Add(&zero, 1);
    }
    unsigned char count[8];
    for (int i = 0; i < 8; ++i) count[i] = (uint64_t{tensor.bytes.size()} >> (8 * i)) & 0xff;
    sha.Add(count, sizeof(count));
    for (size_t at = 0; at < tensor.bytes.size(); at += kSliceBytes) {
      const size_t bytes = std::min(kSliceBytes, tensor.bytes.size() - at);
      sha.Add(tensor.bytes.data() + at, bytes);
      done += static_cast<int64_t>(bytes);
      if (progress) progress(done, total);
    }
  }
  return sha.Hex();
}

absl::StatusOr<std::string> ModelIdentity(const std::string& dir, const ModelConfig& config,
                                          const Checkpoint& checkpoint, bool round_a_log,
                                          const std::function<void(int64_t, int64_t)>& progress) {
  const std::string path = dir + "/" + kIdentityCacheName;
  SPARSEGDN_ASSIGN_OR_RETURN(const nlohmann::json files, FileList(dir, checkpoint));
  if (absl::StatusOr<std::string> text = ReadFile(path, kMaxCacheBytes); text.ok()) {
    const nlohmann::json cache = nlohmann::json::parse(*text, nullptr, false);
    // Compared in place: to copy what is nested deep would use up the stack.
    if (cache.is_object() && cache.contains("identity") && IsIdentity(cache["identity"]) &&
        cache.contains("round_a_log") && cache["round_a_log"] == round_a_log &&
        cache.contains("files") && cache["files"] == files) {
      return cache["identity"].get<std::string>();
    }
  }
  SPARSEGDN_ASSIGN_OR_RETURN(const std::string identity,
                             ComputeModelIdentity(config, checkpoint, round_a_log, progress));
  const nlohmann::json cache = {
      {"identity", identity}, {"round_a_log", round_a_log}, {"files", files}};
  // Only a saving of time: a read-only folder is normal.
  WriteFileAtomically(path, cache.dump() + "\n").IgnoreError();
  return identity;
}

}  // namespace sparsegdn::model
