// Shared-memory segments: permissions, names, bounds, when a name goes, and what is a leftover.
#include "server/service/shared_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {
namespace {

using std::chrono::milliseconds;
namespace fs = std::filesystem;

// A folder instead of /dev/shm, so that nothing but the test's own files is counted.
class SegmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/shm-" + std::to_string(getpid());
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.insert(absl::StrCat("/", entry.path().filename().string()));
    }
    return names;
  }
  std::string folder_;
};

TEST_F(SegmentTest, IsPrivateAndHoldsWhatIsWritten) {
  SegmentPool pool(1 << 20, milliseconds(0), folder_);
  for (const bool spare : {false, true}) {
    ASSERT_TRUE(!spare || Eventually([&] { return pool.has_spare(); }));
    auto segment = pool.Create(1000);
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_GE((*segment)->bytes(), 1000u);
    const std::string path = folder_ + (*segment)->name();
    struct stat info {};
    ASSERT_EQ(lstat(path.c_str(), &info), 0);
    EXPECT_TRUE(S_ISREG(info.st_mode));
    EXPECT_EQ(info.st_mode & 07777, 0600u);
    EXPECT_GE(info.st_size, 1000);
    EXPECT_TRUE((*segment)->Write(990, "0123456789").ok());
    EXPECT_TRUE((*segment)->Write(0, "ab").ok());
    EXPECT_TRUE((*segment)->Write((*segment)->bytes(), "").ok());
    EXPECT_EQ((*segment)->Write((*segment)->bytes() - 1, "xy").code(), absl::StatusCode::kInternal);
    EXPECT_FALSE((*segment)->Write(UINT64_MAX, "x").ok());
    std::ifstream file(path);
    std::string got(1000, '?');
    file.read(got.data(), 1000);
    std::string wanted(1000, '\0');
    wanted.replace(0, 2, "ab").replace(990, 10, "0123456789");
    EXPECT_EQ(got, wanted);
  }
}

TEST_F(SegmentTest, NamesAreRandomAndEndWithTheirSegment) {
  SegmentPool pool(1 << 20, milliseconds(0), folder_);
  std::set<std::string> seen;
  for (int i = 0; i < 50; ++i) {
    auto segment = pool.Create(10);
    ASSERT_TRUE(segment.ok());
    EXPECT_EQ((*segment)->name().size(), 11u + 32u);
    EXPECT_EQ(Names().count((*segment)->name()), 1u);
    EXPECT_TRUE(seen.insert((*segment)->name()).second);
    const std::string name = (*segment)->name();
    segment->reset();
    EXPECT_EQ(Names().count(name), 0u);
  }
  pool.Close();
  EXPECT_TRUE(Names().empty());
  EXPECT_EQ(pool.live_bytes(), 0u);
}

TEST_F(SegmentTest, TheBytesOfAllSegmentsAreBounded) {
  SegmentPool pool(1000, milliseconds(0), folder_);
  EXPECT_TRUE(absl::IsResourceExhausted(pool.Create(1001).status()));
  auto first = pool.Create(600);
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(pool.Create(401).status()));
  auto second = pool.Create(400);  // no spare stands in its way
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(pool.live_bytes(), 1000u);
  first->reset();
  EXPECT_TRUE(pool.Create(600).ok());
  EXPECT_EQ(pool.created(), 3);
  EXPECT_EQ(pool.refused(), 2);
  SegmentPool none(0, milliseconds(0), folder_);
  EXPECT_TRUE(absl::IsResourceExhausted(none.Create(1).status()));
}

TEST_F(SegmentTest, ANameLingersForTheDelayAndCounts) {
  SegmentPool pool(1000, milliseconds(300), folder_);
  auto segment = pool.Create(800);
  ASSERT_TRUE(segment.ok());
  const std::string name = (*segment)->name();
  const auto start = std::chrono::steady_clock::now();
  pool.Linger(*std::move(segment));
  EXPECT_EQ(Names().count(name), 1u);
  EXPECT_GE(pool.live_bytes(), 800u);
  EXPECT_FALSE(pool.Create(800).ok());
  EXPECT_TRUE(Eventually([&] { return Names().count(name) == 0; }));
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(300));
}

TEST_F(SegmentTest, ClosingEndsWhatLingers) {
  SegmentPool pool(1000, std::chrono::seconds(100), folder_);
  auto segment = pool.Create(800);
  ASSERT_TRUE(segment.ok());
  pool.Linger(*std::move(segment));
  pool.Close();
  EXPECT_TRUE(Names().empty());
  auto late = pool.Create(800);
  ASSERT_TRUE(late.ok());
  pool.Linger(*std::move(late));
  EXPECT_TRUE(Names().empty());
}

TEST_F(SegmentTest, NoFileSystemIsAnErrorAndCostsNothing) {
  SegmentPool pool(1000, milliseconds(0), folder_ + "/nothing");
  EXPECT_TRUE(absl::IsUnavailable(pool.Create(10).status()));
  EXPECT_TRUE(Eventually([&] { return pool.live_bytes() == 0; }));  // a spare was tried, too
}

TEST_F(SegmentTest, OnlyLeftoversOfDeadServersAreRemoved) {
  const std::string hex(31, 'a');
  const auto make = [&](const std::string& name, mode_t mode) {
    const std::string path = absl::StrCat(folder_, "/", name);
    std::ofstream(path) << "x";
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  };
  make(absl::StrCat("sparsegdn-", hex, "0"), 0600);
  make(absl::StrCat("sparsegdn-", hex, "1"), 0644);  // not made by us
  make(absl::StrCat("sparsegdn-", hex, "g"), 0600);  // no name of ours
  make(absl::StrCat("sparsegdn-", hex), 0600);       // too short
  make("other", 0600);
  const int locked = open(make(absl::StrCat("sparsegdn-", hex, "2"), 0600).c_str(), O_RDWR);
  ASSERT_EQ(flock(locked, LOCK_EX), 0);  // a server that lives
  fs::create_symlink(folder_ + "/other", folder_ + absl::StrCat("/sparsegdn-", hex, "3"));
  SegmentPool mine(1000, milliseconds(0), folder_), other(1000, milliseconds(0), folder_);
  auto segment = other.Create(10);
  ASSERT_TRUE(segment.ok());
  EXPECT_EQ(mine.RemoveLeftovers(), 1);
  const std::set<std::string> names = Names();
  EXPECT_EQ(names.count(absl::StrCat("/sparsegdn-", hex, "0")), 0u);
  for (const std::string& kept :
       {std::string("/other"), absl::StrCat("/sparsegdn-", hex, "1"),
        absl::StrCat("/sparsegdn-", hex, "g"), absl::StrCat("/sparsegdn-", hex),
        absl::StrCat("/sparsegdn-", hex, "2"), absl::StrCat("/sparsegdn-", hex, "3"),
        (*segment)->name()}) {
    EXPECT_EQ(names.count(kept), 1u) << kept;
  }
  close(locked);
  EXPECT_EQ(mine.RemoveLeftovers(), 1);
}

TEST(SegmentOffsets, AreAlignedAndApart) {
  EXPECT_EQ(SegmentOffsets({}), std::vector<uint64_t>{0});
  EXPECT_EQ(SegmentOffsets({1, 0, 64, 65}), (std::vector<uint64_t>{0, 64, 64, 128, 256}));
}

}  // namespace
}  // namespace sparsegdn::service
