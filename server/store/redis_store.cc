#include "server/store/redis_store.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sparsegdn::store {
namespace {

using engine::PrefixEntries;
using engine::PrefixEntry;
using engine::PrefixEntryPtr;
using engine::PrefixKey;

constexpr int64_t kNsPerWrite = 30'000'000'000;  // of one entry in all

std::string HeaderName(const PrefixKey& key) {
  return absl::StrCat("sparsegdn:1:", engine::HexOf(key));
}

// Named by their content, so that parts of two writers never mix.
std::string PartName(const PrefixKey& key, Section section, uint64_t hash, int64_t part) {
  return absl::StrCat(HeaderName(key), ":", absl::Hex(hash, absl::kZeroPad16),
                      section == Section::kState ? ":s" : ":k", part);
}

// A read whose value turned out wrong, as against a server that failed.
bool IsCorrupt(const absl::Status& status) { return status.code() == absl::StatusCode::kDataLoss; }

}  // namespace

struct RedisStore::Found {
  size_t first = 0;                                 // index of the first header asked for
  std::vector<std::optional<ValueHeader>> headers;  // from there on
  std::map<size_t, std::shared_ptr<PrefixEntry>> entries;
};

RedisStore::RedisStore(RedisOptions options, const engine::Layout& layout,
                       const engine::Clock* clock)
    : options_(std::move(options)),
      ttl_(absl::StrCat(options_.ttl_seconds)),
      layout_(layout),
      clock_(clock),
      read_(options_.address),
      write_(options_.address) {}

absl::StatusOr<std::vector<RedisAnswer>> RedisStore::Run(
    Line& line, const std::vector<RedisConnection::Command>& commands, int64_t deadline_ns) {
  const int64_t left = deadline_ns - clock_->NowNs();
  if (left <= 0) return absl::DeadlineExceededError("redis: no time left");
  absl::StatusOr<std::vector<RedisAnswer>> answers =
      line.connection.Run(commands, std::min(left, options_.timeout_ns));
  absl::Status status = answers.status();
  if (answers.ok()) {
    for (const RedisAnswer& answer : *answers) {
      if (answer.is_error()) status = absl::ResourceExhaustedError("redis: refused");
    }
  }
  if (status.ok()) return answers;
  ++line.errors;
  return status;
}

absl::Status RedisStore::ReadHeaders(const Query& query, Found& found) {
  found.first = query.have.size();
  std::vector<std::string> names;
  for (size_t i = found.first; i < query.keys.size(); ++i) {
    names.push_back(HeaderName(query.keys[i]));
  }
  const std::string end = absl::StrCat(kHeaderBytes);  // one more than a header has
  std::vector<RedisConnection::Command> commands;
  for (const std::string& name : names) commands.push_back({"GETRANGE", name, "0", end});
  const auto answers = Run(read_, commands, query.deadline_ns);
  if (!answers.ok()) return answers.status();
  for (size_t i = 0; i < answers->size(); ++i) {
    const std::string_view bytes = (*answers)[i].text();
    std::optional<ValueHeader>& header = found.headers.emplace_back();
    if (bytes.empty()) continue;
    const PrefixKey& key = query.keys[found.first + i];
    const int64_t position = static_cast<int64_t>(found.first + i + 1) * kWindow;
    absl::StatusOr<ValueHeader> read = DecodeHeader(bytes, key, position, layout_);
    if (read.ok()) {
      header = *read;
    } else {
      Drop(key);
    }
  }
  return absl::OkStatus();
}

// The number of entries of the longest prefix that the headers promise and the room allows.
size_t RedisStore::Usable(const Query& query, const Found& found) const {
  const int64_t state = engine::StateBytes(layout_), kv = engine::WindowKvBytes(layout_);
  if (layout_.full_layers.empty()) {
    for (size_t i = found.headers.size(); i > 0; --i) {
      if (found.headers[i - 1] && state <= query.max_bytes) return found.first + i;
    }
    return found.first;
  }
  size_t n = 0;
  while (n < found.headers.size() && found.headers[n] &&
         static_cast<int64_t>(n + 1) * kv + state <= query.max_bytes) {
    ++n;
  }
  return found.first + n;
}

absl::Status RedisStore::ReadSection(const Query& query, Found& found, size_t index,
                                     Section section) {
  const PrefixKey& key = query.keys[index];
  const ValueHeader& header = *found.headers[index - found.first];
  std::shared_ptr<PrefixEntry>& entry = found.entries[index];
  if (entry == nullptr) {
    entry = std::make_shared<PrefixEntry>();
    entry->position = header.position;
    entry->kv_hash = engine::HashOfKv(*entry);  // of nothing, until they are read
    entry->state_hash = engine::HashOfState(*entry);
  }
  SectionReader reader(layout_, section);
  const uint64_t hash = section == Section::kState ? header.state_hash : header.kv_hash;
  const std::string end = absl::StrCat(kMaxPartBytes);
  for (int64_t part = 0; part < reader.parts(); ++part) {
    const std::string name = PartName(key, section, hash, part);
    const auto answers = Run(read_, {{"GETRANGE", name, "0", end}}, query.deadline_ns);
    if (!answers.ok()) return answers.status();
    const std::string_view bytes = answers->front().text();
    if (bytes.empty()) return absl::NotFoundError("redis: a part is gone");
    read_.bytes += std::ssize(bytes);
    if (absl::Status s = reader.Add(bytes); !s.ok()) return s;
  }
  return reader.Finish(header, *entry);
}

// The KV of entries found.first to count - 1 and the state of the last, each checked.
absl::Status RedisStore::ReadEntries(const Query& query, Found& found, size_t count) {
  const size_t from = layout_.full_layers.empty() ? count - 1 : found.first;
  for (size_t i = from; i < count; ++i) {
    std::optional<ValueHeader>& header = found.headers[i - found.first];
    absl::Status status;
    if (found.entries.count(i) == 0) status = ReadSection(query, found, i, Section::kKv);
    if (status.ok() && i + 1 == count) status = ReadSection(query, found, i, Section::kState);
    if (status.ok() && !engine::IsSound(*found.entries[i], layout_)) {
      status = absl::DataLossError("redis: the entry fails its check");
    }
    if (status.ok()) continue;
    found.entries.erase(i);
    if (IsCorrupt(status)) Drop(query.keys[i]);
    // Gone or bad: what is before it may still do. A server that fails: nothing more is asked of
    // it.
    if (!IsCorrupt(status) && status.code() != absl::StatusCode::kNotFound) return status;
    header.reset();
    return absl::NotFoundError("redis: fewer entries than promised");
  }
  return absl::OkStatus();
}

PrefixEntries RedisStore::Load(const Query& query) {
  if (!read_.breaker.Allow(clock_->NowNs())) return query.have;
  std::lock_guard lock(read_.mutex);
  if (query.deadline_ns <= clock_->NowNs()) return query.have;
  absl::StatusOr<PrefixEntries> entries = Read(query);
  if (entries.ok()) {
    read_.breaker.Success();
    return *std::move(entries);
  }
  read_.breaker.Failure(clock_->NowNs());  // too slow for the deadline is as good as away
  return query.have;
}

absl::StatusOr<PrefixEntries> RedisStore::Read(const Query& query) {
  Found found;
  if (absl::Status s = ReadHeaders(query, found); !s.ok()) return s;
  while (true) {
    const size_t count = Usable(query, found);
    if (count <= query.have.size()) return query.have;
    const absl::Status status = ReadEntries(query, found, count);
    if (status.ok()) {
      PrefixEntries entries = query.have;
      entries.resize(count);
      for (auto& [index, entry] : found.entries) {
        if (index < count) entries[index] = std::move(entry);
      }
      Refresh(query, found, count);
      return entries;
    }
    if (status.code() != absl::StatusCode::kNotFound) return status;
  }
}

void RedisStore::Drop(const PrefixKey& key) {
  ++corrupt_;
  const std::string name = HeaderName(key);
  Run(read_, {{"DEL", name}}, clock_->NowNs() + options_.timeout_ns).status().IgnoreError();
}

// What was used lives on.
void RedisStore::Refresh(const Query& query, const Found& found, size_t count) {
  std::vector<std::string> names;
  for (size_t i = found.first; i < count; ++i) {
    const std::optional<ValueHeader>& header = found.headers[i - found.first];
    if (!header) continue;
    names.push_back(HeaderName(query.keys[i]));
    for (const Section section : {Section::kState, Section::kKv}) {
      const bool state = section == Section::kState;
      const int64_t parts = PartCount(state ? header->state_bytes : header->kv_bytes);
      for (int64_t part = 0; part < parts; ++part) {
        names.push_back(
            PartName(query.keys[i], section, state ? header->state_hash : header->kv_hash, part));
      }
    }
  }
  std::vector<RedisConnection::Command> commands;
  for (const std::string& name : names) commands.push_back({"EXPIRE", name, ttl_});
  Run(read_, commands, clock_->NowNs() + options_.timeout_ns).status().IgnoreError();
}

absl::Status RedisStore::WriteSection(const PrefixKey& key, const PrefixEntry& entry,
                                      Section section) {
  const bool state = section == Section::kState;
  const int64_t bytes = state ? engine::StateBytes(layout_) : engine::WindowKvBytes(layout_);
  for (int64_t part = 0; part < PartCount(bytes); ++part) {
    const std::string name = PartName(key, section, state ? entry.state_hash : entry.kv_hash, part);
    const std::string value = EncodePart(entry, section, part);
    const auto answers =
        Run(write_, {{"SET", name, value, "EX", ttl_}}, clock_->NowNs() + options_.timeout_ns);
    if (!answers.ok()) return answers.status();
    write_.bytes += std::ssize(value);
  }
  return absl::OkStatus();
}

absl::Status RedisStore::Write(const PrefixKey& key, const PrefixEntry& entry) {
  const std::string name = HeaderName(key);
  const int64_t deadline = clock_->NowNs() + kNsPerWrite;
  const auto there = Run(write_, {{"EXISTS", name}}, deadline);
  if (!there.ok()) return there.status();
  if (there->front().integer() == 1) return absl::OkStatus();
  for (const Section section : {Section::kState, Section::kKv}) {
    if (absl::Status s = WriteSection(key, entry, section); !s.ok()) return s;
  }
  const std::string header =
      EncodeHeader({key, entry.position, engine::StateBytes(layout_),
                    engine::WindowKvBytes(layout_), entry.state_hash, entry.kv_hash});
  return Run(write_, {{"SET", name, header, "EX", ttl_, "NX"}}, deadline).status();
}

bool RedisStore::Put(std::span<const PrefixKey> chain, PrefixEntryPtr entry) {
  const bool fits = entry->has_state && entry->bytes() <= options_.max_entry_bytes;
  if (fits && write_.breaker.Allow(clock_->NowNs())) {
    std::lock_guard lock(write_.mutex);
    if (Write(chain.back(), *entry).ok()) {
      write_.breaker.Success();
      return true;
    }
    write_.breaker.Failure(clock_->NowNs());
  }
  ++not_stored_;
  return false;
}

void RedisStore::Remove(const PrefixKey& key) {
  if (!write_.breaker.Allow(clock_->NowNs())) return;
  std::lock_guard lock(write_.mutex);
  const std::string name = HeaderName(key);
  Run(write_, {{"DEL", name}}, clock_->NowNs() + options_.timeout_ns).status().IgnoreError();
}

engine::PrefixStoreStats RedisStore::stats() const {
  engine::PrefixStoreStats stats;
  stats.corrupt = corrupt_;
  stats.not_stored = not_stored_;
  stats.read_bytes = read_.bytes;
  stats.written_bytes = write_.bytes;
  stats.read_errors = read_.errors;
  stats.write_errors = write_.errors;
  stats.available = !read_.breaker.open() && !write_.breaker.open();
  return stats;
}

}  // namespace sparsegdn::store
