// The table of kept snapshots: named behaviours, then random operations against a plain model.
#include "server/engine/snapshot_table.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/status_payload.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::engine {
namespace {

using ::sparsegdn::testing::Describe;
using ::sparsegdn::testing::FakeClock;

std::shared_ptr<const Snapshot> OfBytes(size_t bytes) {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->layers.resize(1);
  snapshot->layers[0].recurrent = std::make_shared<const std::string>(bytes, 'x');
  return snapshot;
}

absl::StatusOr<std::string> Keep(SnapshotTable& table, std::shared_ptr<const Snapshot> snapshot,
                                 const std::string& tenant = "", uint32_t ttl = 100) {
  int64_t bytes = 0;
  snapshot->ForEachBlob([&](const Blob& b) { bytes += static_cast<int64_t>(b->size()); });
  auto reservation = table.Reserve(bytes, nullptr, tenant);
  if (!reservation.ok()) return reservation.status();
  return table.Commit(*std::move(reservation), std::move(snapshot), ttl);
}

TEST(SnapshotTable, IdsAreLongAndDiffer) {
  FakeClock clock;
  SnapshotTable table(1 << 20, &clock);
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(*Keep(table, OfBytes(1)));
  EXPECT_EQ(ids.size(), 1000u);
  std::set<char> digits;
  for (const std::string& id : ids) {
    EXPECT_EQ(id.size(), 32u);
    EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos);
    digits.insert(id[31]);
  }
  EXPECT_EQ(digits.size(), 16u);
}

TEST(SnapshotTable, TenantsDoNotSeeEachOther) {
  FakeClock clock;
  SnapshotTable table(100, &clock);
  const std::string id = *Keep(table, OfBytes(10), "red");
  EXPECT_FALSE(table.Find(id, "blue"));
  EXPECT_FALSE(table.Release(id, ""));
  EXPECT_TRUE(table.Find(id, "red"));
  EXPECT_TRUE(table.Release(id, "red"));
  EXPECT_FALSE(table.Find(id, "red"));
  EXPECT_EQ(table.bytes(), 0);
}

TEST(SnapshotTable, APinnedSnapshotStaysUntilItsTimeOrRelease) {
  FakeClock clock;
  SnapshotTable table(100, &clock);
  const auto pin = [&](size_t bytes, uint32_t ttl) -> absl::StatusOr<std::string> {
    auto reservation = table.Reserve(0, nullptr, "");
    if (absl::Status s = (*reservation)->Pin(static_cast<int64_t>(bytes)); !s.ok()) return s;
    if (absl::Status s = (*reservation)->Grow(static_cast<int64_t>(bytes)); !s.ok()) return s;
    return table.Commit(*std::move(reservation), OfBytes(bytes), ttl);
  };
  const std::string pinned = *pin(30, 5), other = *pin(20, 50);
  const std::string loose = *Keep(table, OfBytes(40));
  const std::string last = *Keep(table, OfBytes(50));
  EXPECT_TRUE(table.Find(pinned, "") && table.Find(other, "") && table.Find(last, ""));
  EXPECT_FALSE(table.Find(loose, "")) << "the pinned ones are older, but stay";
  EXPECT_EQ(Describe(Keep(table, OfBytes(60)).status()),
            "RESOURCE_EXHAUSTED keep_snapshot SNAPSHOT_TABLE_FULL");
  // Half of the table, and no more.
  EXPECT_EQ(Describe(pin(1, 50).status()), "RESOURCE_EXHAUSTED keep_snapshot.pin PIN_LIMIT");
  EXPECT_EQ(Describe(pin(51, 50).status()), "RESOURCE_EXHAUSTED keep_snapshot.pin NEVER_FITS");
  clock.AdvanceSeconds(5);
  EXPECT_FALSE(table.Find(pinned, "")) << "its time is over";
  table.Sweep();
  EXPECT_TRUE(pin(30, 50).ok());
  EXPECT_TRUE(table.Release(other, ""));
  EXPECT_TRUE(pin(20, 50).ok());
  EXPECT_FALSE(pin(1, 50).ok());
}

TEST(SnapshotTable, AReservationThatFailsPinsNothing) {
  FakeClock clock;
  SnapshotTable table(100, &clock);
  for (int i = 0; i < 3; ++i) {
    auto reservation = *table.Reserve(50, nullptr, "");
    EXPECT_TRUE(reservation->Pin(50).ok());
  }
}

TEST(SnapshotTable, TimeToLive) {
  FakeClock clock;
  SnapshotTable table(100, &clock);
  const std::string id = *Keep(table, OfBytes(10), "", 5);
  clock.AdvanceSeconds(4.9);
  const auto held = table.Find(id, "");
  EXPECT_TRUE(held);
  clock.AdvanceSeconds(0.1);
  EXPECT_FALSE(table.Find(id, "")) << "using it does not make it live longer";
  EXPECT_EQ(table.size(), 0);
  table.Sweep();
  EXPECT_EQ(table.bytes(), 10) << "in use, so its memory is still counted";
}

TEST(SnapshotTable, LeastRecentlyUsedGoesFirstButNeverOneInUse) {
  FakeClock clock;
  SnapshotTable table(30, &clock);
  const std::string a = *Keep(table, OfBytes(10));
  const std::string b = *Keep(table, OfBytes(10));
  const std::string c = *Keep(table, OfBytes(10));
  table.Find(a, "");
  auto held = table.Find(b, "");
  table.Find(a, "");
  const std::string d = *Keep(table, OfBytes(10));
  EXPECT_FALSE(table.Find(c, "")) << "b is older in use order but held";
  const std::string e = *Keep(table, OfBytes(10));
  EXPECT_FALSE(table.Find(a, ""));
  EXPECT_TRUE(table.Find(b, ""));
  const auto full = Keep(table, OfBytes(25));
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(full.status()).reason, "SNAPSHOT_TABLE_FULL");
  EXPECT_TRUE(DetailsOf(full.status()).retry_after_ms);
  held.reset();
  EXPECT_TRUE(Keep(table, OfBytes(25)).ok());
  EXPECT_FALSE(table.Find(b, ""));
}

TEST(SnapshotTable, OneLargerThanTheTableNeverFits) {
  FakeClock clock;
  SnapshotTable table(30, &clock);
  const std::string a = *Keep(table, OfBytes(10));
  const auto large = Keep(table, OfBytes(31));
  EXPECT_EQ(DetailsOf(large.status()).reason, "NEVER_FITS");
  EXPECT_FALSE(DetailsOf(large.status()).retry_after_ms);
  EXPECT_TRUE(table.Find(a, "")) << "and nothing was evicted for it";
}

TEST(SnapshotTable, AReservationHoldsRoomAndReturnsIt) {
  FakeClock clock;
  SnapshotTable table(30, &clock);
  {
    auto reservation = table.Reserve(20, nullptr, "");
    EXPECT_EQ(table.bytes(), 20);
    EXPECT_FALSE(table.Reserve(11, nullptr, "").ok());
    EXPECT_TRUE((*reservation)->Grow(10).ok());
    EXPECT_FALSE((*reservation)->Grow(1).ok());
  }
  EXPECT_EQ(table.bytes(), 0);
}

TEST(SnapshotTable, SharedPrefixCountsOnce) {
  FakeClock clock;
  SnapshotTable table(4 << 20, &clock);
  const size_t prefix = 1 << 20;
  table.SetTenantLimit((1 << 20) + 100);
  auto a = std::make_shared<Snapshot>();
  a->layers.resize(1);
  a->layers[0].key = {std::make_shared<const std::string>(prefix, 'k')};
  const Blob shared = a->layers[0].key[0];
  const std::string id = *Keep(table, a);
  a.reset();
  auto base = table.Find(id, "");
  auto reservation = table.Reserve(static_cast<int64_t>(prefix) + 100, base.get(), "");
  EXPECT_EQ(table.bytes(), static_cast<int64_t>(prefix) + 100);
  auto b = std::make_shared<Snapshot>();
  b->layers.resize(1);
  b->layers[0].key = {shared, std::make_shared<const std::string>(100, 'k')};
  ASSERT_TRUE(table.Commit(*std::move(reservation), b, 100).ok());
  EXPECT_EQ(table.bytes(), static_cast<int64_t>(prefix) + 100);
  base.reset();
  EXPECT_TRUE(table.Release(id, ""));
  EXPECT_EQ(table.bytes(), static_cast<int64_t>(prefix) + 100) << "b still holds the prefix";
}

TEST(SnapshotTable, ATenantAtItsLimitEvictsItsOwnAndNobodyElses) {
  FakeClock clock;
  SnapshotTable table(100, &clock);
  table.SetTenantLimit(40);
  const std::string blue = *Keep(table, OfBytes(30), "blue");
  const std::string first = *Keep(table, OfBytes(20), "red");
  const std::string second = *Keep(table, OfBytes(20), "red");
  const std::string third = *Keep(table, OfBytes(20), "red");
  EXPECT_FALSE(table.Find(first, "red")) << "the least recently used of its own";
  EXPECT_TRUE(table.Find(blue, "blue")) << "older, but another tenant's";
  const auto held = table.Find(second, "red");
  const std::string fourth = *Keep(table, OfBytes(20), "red");
  EXPECT_FALSE(table.Find(third, "red"));
  // What is in use, and what is being made, cannot go.
  auto reservation = table.Reserve(20, nullptr, "red");
  ASSERT_TRUE(reservation.ok());
  EXPECT_FALSE(table.Find(fourth, "red"));
  const absl::Status full = (*reservation)->Grow(1);
  EXPECT_EQ(Describe(full), "RESOURCE_EXHAUSTED keep_snapshot TENANT_SNAPSHOT_LIMIT");
  EXPECT_TRUE(DetailsOf(full).retry_after_ms);
  EXPECT_TRUE(Keep(table, OfBytes(10), "blue").ok()) << "nobody else is bounded by it";
  reservation->reset();
  EXPECT_TRUE(Keep(table, OfBytes(20), "red").ok());
  EXPECT_EQ(Describe(Keep(table, OfBytes(41), "red").status()),
            "RESOURCE_EXHAUSTED keep_snapshot NEVER_FITS");
  // A limit that is lowered takes nothing away by itself.
  table.SetTenantLimit(10);
  EXPECT_TRUE(table.Find(second, "red") && table.Find(blue, "blue"));
  EXPECT_EQ(Describe(Keep(table, OfBytes(10), "red").status()),
            "RESOURCE_EXHAUSTED keep_snapshot TENANT_SNAPSHOT_LIMIT");
  EXPECT_EQ(table.bytes(), 60) << "red's unused one went, what is held and blue's stay";
  table.SetTenantLimit(0);
  EXPECT_TRUE(Keep(table, OfBytes(40), "red").ok());
}

// Pinning alone let one tenant take half of the table for as long as it liked.
TEST(SnapshotTable, PinnedSnapshotsCountForTheirTenant) {
  FakeClock clock;
  SnapshotTable table(100, &clock);
  table.SetTenantLimit(25);
  const auto pin = [&](int64_t bytes, const char* tenant) -> absl::Status {
    auto reservation = table.Reserve(bytes, nullptr, tenant);
    if (!reservation.ok()) return reservation.status();
    if (absl::Status s = (*reservation)->Pin(bytes); !s.ok()) return s;
    return table.Commit(*std::move(reservation), OfBytes(static_cast<size_t>(bytes)), 10).status();
  };
  EXPECT_TRUE(pin(25, "red").ok());
  EXPECT_EQ(Describe(pin(1, "red")), "RESOURCE_EXHAUSTED keep_snapshot TENANT_SNAPSHOT_LIMIT");
  EXPECT_TRUE(pin(25, "blue").ok());
  clock.AdvanceSeconds(10);
  EXPECT_TRUE(pin(25, "red").ok()) << "its time is over";
}

TEST(AppendSegment, ThousandsOfOneRowStepsLeaveFewSegments) {
  std::vector<Blob> segments = {std::make_shared<const std::string>(1 << 20, 'p')};
  const Blob prefix = segments[0];
  std::string want = *prefix;
  size_t copied = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::string row(2048, static_cast<char>('a' + i % 26));
    want += row;
    AppendSegment(segments, std::make_shared<const std::string>(row));
    if (segments.back()->size() > 2048) copied += segments.back()->size();
  }
  std::string got;
  for (const Blob& b : segments) got += *b;
  EXPECT_EQ(got, want);
  EXPECT_EQ(segments[0], prefix) << "the prefix is shared, never copied";
  EXPECT_LT(segments.size(), 60u) << "10 MB in segments of 256 KiB and a logarithmic tail";
  EXPECT_LT(copied, 8 * 5000 * 2048u) << "each row is copied log2(256 KiB / 2 KiB) times";
  EXPECT_TRUE(IsStable(segments[1]));
}

// The model: a list of what can be found, in order of use, with who holds what.
struct ModelEntry {
  std::string id, tenant;
  int64_t bytes, expires_ns;
};

TEST(SnapshotTable, RandomOperationsAgreeWithAPlainModel) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    FakeClock clock;
    constexpr int64_t kMax = 100;
    SnapshotTable table(kMax, &clock);
    std::mt19937 rng(seed);
    std::vector<ModelEntry> entries;  // least recently used first
    std::map<std::string, std::shared_ptr<const Snapshot>> held;
    std::map<std::string, int64_t> zombies;  // gone from sight, but held
    const auto forget = [&](const ModelEntry& e) {
      if (held.count(e.id)) zombies[e.id] = e.bytes;
    };
    const auto expire = [&] {
      std::erase_if(entries, [&](const ModelEntry& e) {
        if (e.expires_ns > clock.NowNs()) return false;
        forget(e);
        return true;
      });
    };
    const auto bytes = [&] {
      int64_t sum = 0;
      for (const auto& e : entries) sum += e.bytes;
      for (const auto& [id, b] : zombies) sum += b;
      return sum;
    };
    for (int op = 0; op < 3000; ++op) {
      expire();
      const size_t pick = entries.empty() ? 0 : rng() % entries.size();
      switch (rng() % 6) {
        case 0:
        case 1: {
          const int64_t size = 1 + static_cast<int64_t>(rng() % 40);
          const std::string tenant(1, static_cast<char>('a' + rng() % 2));
          const uint32_t ttl = 1 + rng() % 50;
          for (auto it = entries.begin(); bytes() + size > kMax && it != entries.end();) {
            it = held.count(it->id) ? std::next(it) : entries.erase(it);
          }
          const auto id = Keep(table, OfBytes(static_cast<size_t>(size)), tenant, ttl);
          ASSERT_EQ(id.ok(), bytes() + size <= kMax);
          if (id.ok()) {
            entries.push_back({*id, tenant, size, clock.NowNs() + int64_t{ttl} * 1'000'000'000});
          }
          break;
        }
        case 2: {  // find and hold
          if (entries.empty()) break;
          const ModelEntry e = entries[pick];
          const bool right = rng() % 4 != 0;
          const auto found = table.Find(e.id, right ? e.tenant : e.tenant + "x");
          ASSERT_EQ(found != nullptr, right);
          if (!right) break;
          EXPECT_EQ(std::ssize(*found->layers[0].recurrent), e.bytes);
          held[e.id] = found;
          entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(pick));
          entries.push_back(e);
          break;
        }
        case 3:  // let go
          if (held.empty()) break;
          zombies.erase(held.begin()->first);
          held.erase(held.begin());
          break;
        case 4:
          if (entries.empty()) break;
          ASSERT_TRUE(table.Release(entries[pick].id, entries[pick].tenant));
          forget(entries[pick]);
          entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(pick));
          break;
        case 5:
          clock.AdvanceSeconds(static_cast<double>(rng() % 8));
          break;
      }
      expire();
      table.Sweep();
      ASSERT_EQ(table.bytes(), bytes());
      ASSERT_LE(table.bytes(), kMax);
      ASSERT_EQ(table.size(), std::ssize(entries));
    }
  }
}

}  // namespace
}  // namespace sparsegdn::engine
