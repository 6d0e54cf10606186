// The store over a real Redis: round trips, and every way in which Redis disappoints.
#include "server/store/redis_store.h"

#include <signal.h>

#include <chrono>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "gtest/gtest.h"
#include "tests/unit/store/redis_server.h"
#include "tests/unit/store/store_testing.h"

namespace sparsegdn::testing {
namespace {

using engine::Layout;
using engine::PrefixEntries;
using engine::PrefixKey;
using engine::PrefixStore;
using store::RedisOptions;
using store::RedisStore;

constexpr int64_t kMs = 1'000'000;

RedisOptions OptionsFor(const store::RedisAddress& address) {
  RedisOptions options;
  options.address = address;
  options.timeout_ns = 300 * kMs;
  return options;
}

struct Fixture {
  explicit Fixture(const store::RedisAddress& address,
                   const model::ModelInfo& info = SmallHybridInfo())
      : layout(info), store(OptionsFor(address), layout, engine::Clock::Real()) {}

  PrefixEntries Load(const std::vector<PrefixKey>& keys, PrefixEntries have = {},
                     int64_t max_bytes = 1 << 30, int64_t wait_ns = 2000 * kMs) {
    PrefixStore::Query query;
    query.keys = keys;
    query.have = std::move(have);
    query.max_bytes = max_bytes;
    query.deadline_ns = engine::Clock::Real()->NowNs() + wait_ns;
    return store.Load(query);
  }
  void PutAll(const std::vector<PrefixKey>& keys, uint32_t seed = 1) {
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_TRUE(store.Put(std::span(keys).first(i + 1),
                            MakeEntry(layout, static_cast<int64_t>(i), seed)));
    }
  }

  const Layout layout;
  RedisStore store;
};

int64_t MsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                               start)
      .count();
}

TEST(RedisStore, AnotherReplicaLoadsTheSameBits) {
  RedisServer redis;
  Fixture writer(redis.address()), reader(redis.address());
  const auto keys = MakeKeys(4);
  writer.PutAll(keys);
  for (const size_t n : {1, 2, 4}) {
    const PrefixEntries got = reader.Load({keys.begin(), keys.begin() + n});
    ASSERT_EQ(got.size(), n);
    EXPECT_TRUE(got.back()->has_state);
    EXPECT_EQ(BytesOf(*got.back()), BytesOf(*MakeEntry(writer.layout, n - 1)));
    for (size_t i = 0; i + 1 < n; ++i) EXPECT_FALSE(got[i]->has_state) << "not needed, not read";
  }
  // What is already there is not read again.
  const int64_t before = reader.store.stats().read_bytes;
  EXPECT_EQ(reader.Load(keys, reader.Load({keys.begin(), keys.begin() + 2})).size(), 4u);
  EXPECT_GT(reader.store.stats().read_bytes, before);
  EXPECT_EQ(reader.Load(MakeKeys(4, 9)).size(), 0u) << "other keys";
  for (const std::string& key : redis.Keys()) {
    EXPECT_TRUE(absl::StartsWith(key, "sparsegdn:1:")) << key;
    int ttl = 0;
    EXPECT_TRUE(absl::SimpleAtoi(redis.Command({"TTL", key}), &ttl));
    EXPECT_GT(ttl, 3500) << key;
  }
}

TEST(RedisStore, ModelsWithoutFullAttentionReadOneState) {
  RedisServer redis;
  model::ModelInfo info = SmallHybridInfo();
  info.layers = {model::LayerKind::kLinear};
  Fixture f(redis.address(), info);
  const auto keys = MakeKeys(4);
  f.PutAll({keys.begin(), keys.begin() + 3});
  const PrefixEntries got = f.Load(keys);
  ASSERT_EQ(got.size(), 3u);
  EXPECT_EQ(got[0], nullptr);
  EXPECT_EQ(BytesOf(*got[2]), BytesOf(*MakeEntry(f.layout, 2)));
}

TEST(RedisStore, TheFirstWriterStays) {
  RedisServer redis;
  Fixture a(redis.address()), b(redis.address());
  const auto keys = MakeKeys(1);
  a.PutAll(keys, 1);
  b.PutAll(keys, 2);
  EXPECT_EQ(BytesOf(*b.Load(keys).back()), BytesOf(*MakeEntry(a.layout, 0, 1)));
}

TEST(RedisStore, WhatIsUsedLivesOn) {
  RedisServer redis;
  Fixture f(redis.address());
  const auto keys = MakeKeys(1);
  f.PutAll(keys);
  for (const std::string& key : redis.Keys()) redis.Command({"EXPIRE", key, "50"});
  EXPECT_EQ(f.Load(keys).size(), 1u);
  for (const std::string& key : redis.Keys()) {
    int ttl = 0;
    EXPECT_TRUE(absl::SimpleAtoi(redis.Command({"TTL", key}), &ttl));
    EXPECT_GT(ttl, 3500) << key;
  }
}

TEST(RedisStore, APartThatIsGoneOrBadCostsItsEntry) {
  const struct {
    const char* name;
    std::vector<std::string> command;  // the key goes second
    int64_t corrupt;
  } rows[] = {{"gone", {"DEL"}, 0},
              {"cut", {"SETRANGE", "0", "xxxxxxxx"}, 1},
              {"other bytes", {"SET", "zstd it is not"}, 1}};
  for (const auto& row : rows) {
    for (const char* section : {":s0", ":k0", ""}) {
      SCOPED_TRACE(absl::StrCat(row.name, section));
      RedisServer redis;
      Fixture f(redis.address());
      const auto keys = MakeKeys(3);
      f.PutAll(keys);
      for (const std::string& key : redis.Keys()) {
        const bool header = key.size() == std::string("sparsegdn:1:").size() + 64;
        if (!absl::StrContains(key, engine::HexOf(keys[2])) ||
            (section[0] == '\0' ? !header : !absl::EndsWith(key, section))) {
          continue;
        }
        std::vector<std::string> words = row.command;
        words.insert(words.begin() + 1, key);
        EXPECT_FALSE(absl::StartsWith(redis.Command(words), "(error)"));
      }
      const PrefixEntries got = f.Load(keys);
      ASSERT_EQ(got.size(), 2u);
      EXPECT_EQ(BytesOf(*got[1]), BytesOf(*MakeEntry(f.layout, 1)));
      EXPECT_EQ(f.store.stats().corrupt, row.corrupt);
      // A bad entry is gone, so that it can be written anew.
      if (row.corrupt > 0) {
        EXPECT_TRUE(f.store.Put(keys, MakeEntry(f.layout, 2)));
        EXPECT_EQ(f.Load(keys).size(), 3u);
      }
    }
  }
}

TEST(RedisStore, AWholeEntryThatIsNotFiniteIsRefused) {
  RedisServer redis;
  Fixture f(redis.address());
  const auto keys = MakeKeys(1);
  auto entry = MakeEntry(f.layout, 0);
  std::string& bytes = const_cast<std::string&>(*entry->recurrent[0]);
  bytes[2] = '\x80', bytes[3] = '\x7f';
  engine::SealEntry(*entry);
  EXPECT_TRUE(f.store.Put(keys, entry));
  EXPECT_EQ(f.Load(keys).size(), 0u);
  EXPECT_EQ(f.store.stats().corrupt, 1);
}

TEST(RedisStore, SizeCaps) {
  RedisServer redis;
  Fixture f(redis.address());
  const auto keys = MakeKeys(3);
  f.PutAll(keys);
  const int64_t kv = engine::WindowKvBytes(f.layout), state = engine::StateBytes(f.layout);
  EXPECT_EQ(f.Load(keys, {}, 2 * kv + state).size(), 2u);
  EXPECT_EQ(f.Load(keys, {}, kv + state - 1).size(), 0u);
  RedisOptions options = OptionsFor(redis.address());
  options.max_entry_bytes = kv;
  RedisStore small(options, f.layout, engine::Clock::Real());
  EXPECT_FALSE(small.Put(MakeKeys(1, 7), MakeEntry(f.layout, 0)));
  EXPECT_EQ(small.stats().not_stored, 1);
  EXPECT_EQ(small.stats().write_errors, 0);
}

TEST(RedisStore, RedisAtMaxmemoryStillReads) {
  RedisServer redis;
  Fixture f(redis.address());
  const auto keys = MakeKeys(1);
  f.PutAll(keys);
  redis.Command({"CONFIG", "SET", "maxmemory", "1000000"});
  const auto more = MakeKeys(2, 5);
  EXPECT_FALSE(f.store.Put(std::span(more).first(1), MakeEntry(f.layout, 0)));
  EXPECT_GE(f.store.stats().write_errors, 1);
  EXPECT_EQ(f.Load(keys).size(), 1u);
  EXPECT_EQ(f.Load({more.begin(), more.begin() + 1}).size(), 0u) << "no torn entry";
  EXPECT_EQ(f.store.stats().read_errors, 0);
  // Refused three times in a row, it is left alone for a while, but read as before.
  for (int i = 0; i < 5; ++i) f.store.Put(std::span(more).first(1), MakeEntry(f.layout, 0));
  EXPECT_EQ(f.store.stats().write_errors, 3);
  EXPECT_FALSE(f.store.stats().available);
  EXPECT_EQ(f.Load(keys).size(), 1u);
}

TEST(RedisStore, RedisThatDiesAndComesBack) {
  RedisServer redis;
  Fixture f(redis.address());
  const auto keys = MakeKeys(1);
  f.PutAll(keys);
  redis.Kill();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(f.Load(keys).size(), 0u);
  EXPECT_LT(MsSince(start), 1500);
  EXPECT_EQ(f.store.stats().read_errors, 3) << "then the breaker is open";
  EXPECT_FALSE(f.store.stats().available);
  redis.Start();
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_EQ(f.Load(keys).size(), 0u) << "it forgot";
  EXPECT_TRUE(f.store.stats().available);
  f.PutAll(keys);
  EXPECT_EQ(f.Load(keys).size(), 1u);
}

TEST(RedisStore, RedisThatHangsCostsItsTimeoutsOnly) {
  RedisServer redis;
  Fixture f(redis.address());
  const auto keys = MakeKeys(1);
  f.PutAll(keys);
  EXPECT_EQ(f.Load(keys).size(), 1u);
  redis.Signal(SIGSTOP);
  auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(f.Load(keys).size(), 0u);
  EXPECT_GE(MsSince(start), 250);
  EXPECT_LT(MsSince(start), 1500);
  // A shorter deadline than the timeout holds.
  start = std::chrono::steady_clock::now();
  EXPECT_EQ(f.Load(keys, {}, 1 << 30, 50 * kMs).size(), 0u);
  EXPECT_LT(MsSince(start), 250);
  EXPECT_EQ(f.Load(keys).size(), 0u);
  start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(f.Load(keys).size(), 0u);
  EXPECT_LT(MsSince(start), 100) << "the breaker is open";
  redis.Signal(SIGCONT);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_EQ(f.Load(keys).size(), 1u);
}

TEST(RedisStore, AServerThatNeverAnswers) {
  SilentServer silent;
  Fixture f(silent.address());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(f.Load(MakeKeys(1)).size(), 0u);
  EXPECT_FALSE(f.store.Put(MakeKeys(1), MakeEntry(f.layout, 0)));
  EXPECT_LT(MsSince(start), 2000);
}

TEST(RedisStore, PasswordUserAndDatabase) {
  RedisServer redis;
  redis.Command({"ACL", "SETUSER", "worker", "on", ">secret", "~sparsegdn:*", "+@all"});
  store::RedisAddress address = redis.address();
  address.user = "worker";
  address.password = "secret";
  address.database = 3;
  Fixture f(address);
  const auto keys = MakeKeys(1);
  f.PutAll(keys);
  EXPECT_EQ(f.Load(keys).size(), 1u);
  EXPECT_EQ(Fixture(redis.address()).Load(keys).size(), 0u) << "another database";
  address.password = "wrong";
  Fixture wrong(address);
  EXPECT_EQ(wrong.Load(keys).size(), 0u);
  EXPECT_EQ(wrong.store.stats().read_errors, 1);
}

TEST(RedisUrl, Rows) {
  const auto parse = [](const std::string& url) {
    const auto address = store::ParseRedisUrl(url);
    if (!address.ok()) return std::string("error");
    return absl::StrCat(address->host, "|", address->port, "|", address->unix_path, "|",
                        address->user, "|", address->database);
  };
  EXPECT_EQ(parse("redis://cache"), "cache|6379|||0");
  EXPECT_EQ(parse("redis://cache:7000/2"), "cache|7000|||2");
  EXPECT_EQ(parse("redis://me@cache:7000"), "cache|7000||me|0");
  EXPECT_EQ(parse("redis://[::1]:7000/1"), "::1|7000|||1");
  EXPECT_EQ(parse("redis://[::1]"), "::1|6379|||0");
  EXPECT_EQ(parse("unix:///run/redis.sock"), "|6379|/run/redis.sock||0");
  for (const char* bad :
       {"", "cache:6379", "rediss://cache", "redis://", "redis://:7000", "redis://me:word@cache",
        "redis://cache:port", "redis://cache:70000", "redis://cache/x", "redis://[::1",
        "redis://[::1]x", "unix://run/s", "redis://cache:0"}) {
    EXPECT_EQ(parse(bad), "error") << bad;
  }
}

TEST(CircuitBreaker, OpensProbesAndCloses) {
  constexpr int64_t kSecond = 1'000'000'000;
  store::CircuitBreaker breaker;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(breaker.Allow(0));
    EXPECT_FALSE(breaker.open());
    breaker.Failure(0);
  }
  EXPECT_TRUE(breaker.open());
  EXPECT_FALSE(breaker.Allow(kSecond - 1));
  EXPECT_TRUE(breaker.Allow(kSecond));
  EXPECT_FALSE(breaker.Allow(kSecond)) << "one at a time";
  breaker.Failure(kSecond);
  EXPECT_FALSE(breaker.Allow(3 * kSecond - 1)) << "twice as long";
  EXPECT_TRUE(breaker.Allow(3 * kSecond));
  for (int i = 0; i < 10; ++i) breaker.Failure(3 * kSecond);
  EXPECT_TRUE(breaker.Allow(33 * kSecond)) << "never longer than half a minute";
  breaker.Success();
  EXPECT_FALSE(breaker.open());
  EXPECT_TRUE(breaker.Allow(33 * kSecond));
}

}  // namespace
}  // namespace sparsegdn::testing
