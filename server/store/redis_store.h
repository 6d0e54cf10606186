// Prefix entries in Redis, so that replicas share them. Redis away, slow, full or holding rubbish
// costs a hit, never a request: errors are counted, a circuit breaker keeps off a server that
// fails, every wait is bounded.
#ifndef SPARSEGDN_SERVER_STORE_REDIS_STORE_H_
#define SPARSEGDN_SERVER_STORE_REDIS_STORE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "server/engine/engine.h"
#include "server/engine/prefix_store.h"
#include "server/store/circuit_breaker.h"
#include "server/store/prefix_value.h"
#include "server/store/redis_connection.h"

namespace sparsegdn::store {

struct RedisOptions {
  RedisAddress address;
  int64_t timeout_ns = 500'000'000;  // of a connection, and of one answer
  int64_t ttl_seconds = 3600;        // since the last use
  int64_t max_entry_bytes = 256 << 20;
};

// Reads and writes have a connection and a breaker each, so that neither waits for the other.
class RedisStore final : public engine::PrefixStore {
 public:
  // `clock` outlives it.
  RedisStore(RedisOptions options, const engine::Layout& layout, const engine::Clock* clock);

  engine::PrefixEntries Load(const Query& query) override;
  // Needs an entry with its state. Parts first, the header last and only where there is none: an
  // entry is seen whole or not at all, and the first writer's stays.
  bool Put(std::span<const engine::PrefixKey> chain, engine::PrefixEntryPtr entry) override;
  void Remove(const engine::PrefixKey& key) override;
  engine::PrefixStoreStats stats() const override;

 private:
  struct Line {
    explicit Line(const RedisAddress& address) : connection(address) {}
    std::mutex mutex;  // one user at a time
    RedisConnection connection;
    CircuitBreaker breaker;
    std::atomic<int64_t> bytes{0}, errors{0};
  };
  struct Found;  // headers, and what has been read of them

  // An answer that is an error is a failure too.
  absl::StatusOr<std::vector<RedisAnswer>> Run(
      Line& line, const std::vector<RedisConnection::Command>& commands, int64_t deadline_ns);
  absl::StatusOr<engine::PrefixEntries> Read(const Query& query);
  absl::Status ReadHeaders(const Query& query, Found& found);
  absl::Status ReadSection(const Query& query, Found& found, size_t index, Section section);
  absl::Status ReadEntries(const Query& query, Found& found, size_t count);
  size_t Usable(const Query& query, const Found& found) const;
  void Drop(const engine::PrefixKey& key);
  void Refresh(const Query& query, const Found& found, size_t count);
  absl::Status WriteSection(const engine::PrefixKey& key, const engine::PrefixEntry& entry,
                            Section section);
  absl::Status Write(const engine::PrefixKey& key, const engine::PrefixEntry& entry);

  const RedisOptions options_;
  const std::string ttl_;
  const engine::Layout layout_;
  const engine::Clock* const clock_;
  Line read_, write_;
  std::atomic<int64_t> corrupt_{0}, not_stored_{0};
};

}  // namespace sparsegdn::store

#endif  // SPARSEGDN_SERVER_STORE_REDIS_STORE_H_
