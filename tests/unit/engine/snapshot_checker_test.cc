// Kept and imported snapshots whose bytes change in memory are found before a request uses them.
#include "server/engine/snapshot_checker.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "gtest/gtest.h"
#include "tests/unit/engine/engine_test_util.h"
#include "tests/unit/engine/upload_util.h"

namespace sparsegdn::testing {
namespace {

using engine::Blob;
using engine::PrefillRequest;
using engine::Snapshot;

// A prompt of 100 tokens whose snapshot the server keeps.
std::string Keep(Harness& h) {
  PrefillRequest request = Harness::Prompt(100);
  request.snapshot_at = engine::SnapshotAt::kAfterLast;
  request.keep_snapshot = true;
  return h.Complete(request).result->snapshot_id;
}

PrefillRequest Resume(const std::string& id) {
  PrefillRequest request = Harness::Prompt(3, 2);
  request.snapshot_at = engine::SnapshotAt::kAfterLast;
  request.resume_from = id;
  return request;
}

void Flip(const Blob& blob) { const_cast<std::string&>(*blob)[blob->size() / 2] ^= 4; }

struct Damage {
  const char* name;
  std::function<void(const Snapshot&)> apply;
};

const Damage kDamages[] = {
    {"recurrent state", [](const Snapshot& s) { Flip(s.layers[0].recurrent); }},
    {"conv state", [](const Snapshot& s) { Flip(s.layers[0].conv); }},
    {"key", [](const Snapshot& s) { Flip(s.layers[2].key.back()); }},
    {"value", [](const Snapshot& s) { Flip(s.layers[2].value.back()); }}};

TEST(SnapshotChecker, ASnapshotThatChangedInMemoryIsDataLossAndEvicted) {
  for (const Damage& damage : kDamages) {
    for (const bool imported : {false, true}) {
      SCOPED_TRACE(std::string(damage.name) + (imported ? ", imported" : ", kept"));
      Harness h;
      std::string id;
      if (imported) {
        PrefillRequest request = Harness::Prompt(100);
        request.snapshot_at = engine::SnapshotAt::kAfterLast;
        id = Send(h, UploadOf(h.Complete(request)))->snapshot_id;
      } else {
        id = Keep(h);
      }
      const std::string tenant = imported ? "t" : "";
      PrefillRequest request = Resume(id);
      request.tenant = tenant;
      ASSERT_TRUE(h.Complete(request).status->ok());
      damage.apply(*h.engine().snapshots().Find(id, tenant));
      const auto other = h.Submit(request);  // has it already when it is found to be bad
      const Collected got = h.Complete(request);
      Collected others;
      ReadAvailable(*other, others);
      EXPECT_EQ(Describe(*others.status), "DATA_LOSS resume_from SNAPSHOT_CORRUPT");
      EXPECT_EQ(Describe(*got.status), "DATA_LOSS resume_from SNAPSHOT_CORRUPT");
      EXPECT_FALSE(got.manifest) << "nothing of it was sent";
      EXPECT_EQ(h.observer.corrupt_snapshots, 1);
      EXPECT_EQ(h.engine().gauges().kept_snapshots, 0);
      EXPECT_EQ(Describe(h.SubmitError(request)), "NOT_FOUND resume_from SNAPSHOT_NOT_FOUND");
      h.RunRounds();
      EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
      h.ExpectNoLeak();
    }
  }
}

// A checksum that holds over a value that is not finite: the writer's memory was bad.
TEST(SnapshotChecker, ASealedValueThatIsNotFiniteIsFoundToo) {
  FakeClock clock;
  engine::SnapshotTable table(1 << 20, &clock);
  const engine::Layout layout(SmallHybridInfo());
  for (const bool finite : {true, false}) {
    Snapshot snapshot = engine::ZeroSnapshot(layout);
    std::string& bytes = const_cast<std::string&>(*snapshot.layers[0].recurrent);
    bytes[3] = '\x7f';
    bytes[2] = finite ? '\x7f' : '\xc0';
    auto reservation = *table.Reserve(layout.kept_bytes(0), nullptr, "");
    const std::string id = *table.Commit(
        std::move(reservation), std::make_shared<const Snapshot>(std::move(snapshot)), 100);
    EXPECT_FALSE(table.IsSound(*table.Find(id, ""), layout)) << "not sealed yet";
    table.Seal(id);
    EXPECT_EQ(table.IsSound(*table.Find(id, ""), layout), finite);
  }
}

// Nothing to run: the base's own states leave, so they are checked like those that are loaded.
TEST(SnapshotChecker, ASnapshotThatIsSentUnchangedIsCheckedToo) {
  Harness h;
  const std::string id = Keep(h);
  PrefillRequest request = Resume(id);
  request.tokens.resize(1);
  request.snapshot_at = engine::SnapshotAt::kBeforeLast;
  ASSERT_TRUE(h.Complete(request).status->ok());
  Flip(h.engine().snapshots().Find(id, "")->layers[0].recurrent);
  EXPECT_EQ(Describe(*h.Complete(request).status), "DATA_LOSS resume_from SNAPSHOT_CORRUPT");
}

// What a later snapshot shares keeps the hash that it had first, or the damage would be sealed in.
TEST(SnapshotChecker, SharedSegmentsAreNotSealedAnew) {
  Harness h;
  PrefillRequest first = Harness::Prompt(40'000);
  first.snapshot_at = engine::SnapshotAt::kAfterLast;
  first.keep_snapshot = true;
  const std::string id = h.Complete(first).result->snapshot_id;
  PrefillRequest next = Resume(id);
  next.keep_snapshot = true;
  const auto call = h.Submit(next);  // checked now, in the inline mode
  const Blob segment = h.engine().snapshots().Find(id, "")->layers[2].key.front();
  ASSERT_TRUE(engine::IsStable(segment));
  Flip(segment);
  h.RunRounds();
  Collected got;
  ReadAvailable(*call, got);
  ASSERT_TRUE(got.status->ok());
  const std::string later = got.result->snapshot_id;
  EXPECT_EQ(h.engine().snapshots().Find(later, "")->layers[2].key.front(), segment);
  EXPECT_EQ(Describe(*h.Complete(Resume(later)).status), "DATA_LOSS resume_from SNAPSHOT_CORRUPT");
}

// A request that is cancelled before its check has its turn costs no check.
TEST(SnapshotChecker, ACheckThatNobodyWaitsForIsNotMade) {
  FakeClock clock;
  engine::SnapshotTable table(1 << 20, &clock);
  const engine::Layout layout(SmallHybridInfo());
  int wakes = 0;
  std::mutex gate;
  {
    std::unique_lock hold(gate);
    engine::SnapshotChecker checker(engine::TaskThread::Mode::kThread, table, layout, [&] {
      std::lock_guard wait(gate);
      ++wakes;
    });
    const auto snapshot = std::make_shared<const Snapshot>(engine::ZeroSnapshot(layout));
    const auto first = checker.Start(snapshot);
    while (!first->done()) std::this_thread::yield();
    checker.Start(snapshot);  // dropped at once, while the thread is held
    const auto last = checker.Start(snapshot);
    hold.unlock();
    while (!last->done()) std::this_thread::yield();
  }
  EXPECT_EQ(wakes, 2);
}

}  // namespace
}  // namespace sparsegdn::testing
