#include "server/service/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/stat.h>

#include <chrono>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/types.h"
#include "server/service/log.h"
#include "server/service/small_file.h"

namespace sparsegdn::service {
namespace {

constexpr std::string_view kHashPrefix = "sha256:";

bool IsTokenChar(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c != '\0' && std::strchr("-._~+/=", c) != nullptr);
}

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string_view Trim(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

absl::Status Wrong(const char* what) { return absl::InvalidArgumentError(what); }

// The file's bytes leave memory with this.
struct Wiped {
  std::string text;
  ~Wiped() { OPENSSL_cleanse(text.data(), text.size()); }
};

}  // namespace

absl::StatusOr<TokenTable::Entry> TokenTable::ParseLine(std::string_view line) {
  const size_t space = line.find_first_of(" \t");
  if (space == line.npos) return Wrong("one word, wanted TENANT TOKEN");
  const std::string_view tenant = line.substr(0, space), token = Trim(line.substr(space));
  if (tenant.size() > engine::kMaxTenantBytes) return Wrong("the tenant has more than 256 bytes");
  for (const char c : tenant) {
    if (c < 0x21 || c > 0x7e) return Wrong("the tenant has a character that is not printable");
  }
  Entry entry;
  entry.tenant = std::string(tenant);
  if (token.substr(0, kHashPrefix.size()) == kHashPrefix) {
    const std::string_view hex = token.substr(kHashPrefix.size());
    if (hex.size() != 2 * entry.hash.size()) return Wrong("sha256: wants 64 hex digits");
    for (size_t i = 0; i < entry.hash.size(); ++i) {
      const int high = HexValue(hex[2 * i]), low = HexValue(hex[2 * i + 1]);
      if (high < 0 || low < 0) return Wrong("sha256: wants 64 hex digits");
      entry.hash[i] = static_cast<unsigned char>(high * 16 + low);
    }
    return entry;
  }
  if (token.size() < kMinTokenBytes || token.size() > kMaxTokenBytes) {
    return Wrong("the token's length is outside 16 .. 512");
  }
  for (const char c : token) {
    if (!IsTokenChar(c)) return Wrong("the token has a character outside A-Za-z0-9-._~+/=");
  }
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), entry.hash.data());
  return entry;
}

absl::StatusOr<TokenTable> TokenTable::Parse(std::string_view text) {
  TokenTable table;
  std::unordered_map<std::string, size_t> lines;  // by hash
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = Trim(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    ++number;
    if (line.empty() || line.front() == '#') continue;
    absl::StatusOr<Entry> entry = ParseLine(line);
    if (!entry.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": ", std::string(entry.status().message())));
    }
    const std::string key(entry->hash.begin(), entry->hash.end());
    const auto [known, is_new] = lines.emplace(key, number);
    if (!is_new) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": the token of line ", known->second, " again"));
    }
    if (table.entries_.size() == kMaxTokens) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxTokens, " tokens"));
    }
    table.entries_.push_back(*std::move(entry));
  }
  if (table.entries_.empty()) return Wrong("no token in it, wanted lines of TENANT TOKEN");
  return table;
}

std::optional<std::string> TokenTable::TenantOf(std::string_view token) const {
  Hash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  const Entry* found = nullptr;
  for (const Entry& entry : entries_) {
    const bool same = CRYPTO_memcmp(entry.hash.data(), hash.data(), hash.size()) == 0;
    found = same ? &entry : found;  // no early end
  }
  if (found == nullptr || token.size() < kMinTokenBytes || token.size() > kMaxTokenBytes) {
    return std::nullopt;
  }
  return found->tenant;
}

absl::StatusOr<TokenTable> TokenFile::Read(Version& version) const {
  const auto named = [this](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat(flag_, " = ", path_, ": ", std::string(status.message())));
  };
  struct stat info {};
  Wiped file;
  absl::StatusOr<std::string> text = ReadSmallFile(path_, kMaxTokenFileBytes, &info);
  version = {info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
             info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec};
  if (!text.ok()) return named(text.status());
  file.text = *std::move(text);
  // Group read is how a Kubernetes secret reaches a pod that is not root.
  if ((info.st_mode & (S_IWGRP | S_IRWXO)) != 0) {
    Log(LogLevel::kWarning, "token file: others may read or change it, wanted mode 0600 or 0440",
        {{"path", path_}});
  }
  absl::StatusOr<TokenTable> table = TokenTable::Parse(file.text);
  if (!table.ok()) return named(table.status());
  return table;
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path,
                                                           const std::string& flag,
                                                           int64_t refresh_seconds) {
  std::unique_ptr<TokenFile> file(new TokenFile(path, flag));
  if (absl::Status status = file->Reload(); !status.ok()) return status;
  file->thread_ = std::thread([raw = file.get(), refresh_seconds] { raw->Watch(refresh_seconds); });
  return file;
}

TokenFile::~TokenFile() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<const TokenTable> TokenFile::table() const {
  std::lock_guard lock(mutex_);
  return table_;
}

absl::Status TokenFile::Reload() {
  Version version;
  absl::StatusOr<TokenTable> table = Read(version);
  std::lock_guard lock(mutex_);
  version_ = version;  // also of a wrong file: it is told once, not every round
  if (!table.ok()) return table.status();
  Log(LogLevel::kInfo, "tokens loaded", {{"tokens", static_cast<int64_t>(table->size())}});
  table_ = std::make_shared<const TokenTable>(*std::move(table));
  return absl::OkStatus();
}

void TokenFile::ReloadIfChanged() {
  struct stat info {};
  Version now;
  if (stat(path_.c_str(), &info) == 0) {
    now = {info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
           info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec};
  }
  {
    std::lock_guard lock(mutex_);
    if (now == version_) return;
  }
  if (absl::Status status = Reload(); !status.ok()) {
    Log(LogLevel::kError, "tokens not reloaded, the old ones stay",
        {{"error", std::string(status.message())}});
  }
}

void TokenFile::Watch(int64_t refresh_seconds) {
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, std::chrono::seconds(refresh_seconds),
                                 [this] { return stop_; })) {
    lock.unlock();
    ReloadIfChanged();
    lock.lock();
  }
}

}  // namespace sparsegdn::service
