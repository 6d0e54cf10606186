// The memory that a process may use, by fake /proc and /sys of hosts and containers.
#include "server/service/memory_limit.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "gtest/gtest.h"

namespace sparsegdn::service {
namespace {

constexpr int64_t kPhysical = int64_t{64} << 30;

TEST(MemoryLimit, IsTheLeastOfTheMachinesAndTheControlGroups) {
  const std::string unlimited = "9223372036854771712\n";  // what version 1 says without a limit
  const struct {
    const char* name;
    std::map<std::string, std::string> files;
    int64_t want;
  } rows[] = {
      {"no files", {}, kPhysical},
      {"v2, container with a namespace",
       {{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/memory.max", "4294967296\n"}},
       int64_t{4} << 30},
      {"v2, no limit",
       {{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/memory.max", "max\n"}},
       kPhysical},
      {"v2, more than there is",
       {{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/memory.max", "1099511627776\n"}},
       kPhysical},
      {"v2, a unit of the host",
       {{"proc/self/cgroup", "0::/system.slice/a:b.service\n"},
        {"sys/fs/cgroup/system.slice/a:b.service/memory.max", "1073741824\n"}},
       int64_t{1} << 30},
      {"v2, the group above is the narrower one",
       {{"proc/self/cgroup", "0::/pod/one\n"},
        {"sys/fs/cgroup/pod/one/memory.max", "8589934592\n"},
        {"sys/fs/cgroup/pod/memory.max", "2147483648\n"}},
       int64_t{2} << 30},
      {"v2, another group's limit",
       {{"proc/self/cgroup", "0::/pod/one\n"}, {"sys/fs/cgroup/pod/two/memory.max", "1\n"}},
       kPhysical},
      {"v2, above the namespace's root",
       {{"proc/self/cgroup", "0::/../other\n"},
        {"sys/fs/cgroup/memory.max", "3221225472\n"},
        {"sys/fs/other/memory.max", "1\n"}},
       int64_t{3} << 30},
      {"v1, a container that sees the host's path",
       {{"proc/self/cgroup", "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/docker/ab\n"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n"}},
       int64_t{512} << 20},
      {"v1, by its path, with another controller",
       {{"proc/self/cgroup", "4:hugetlb,memory:/a/b\n"},
        {"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "268435456\n"},
        {"sys/fs/cgroup/memory/a/memory.limit_in_bytes", unlimited},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited}},
       int64_t{256} << 20},
      {"v1, no limit",
       {{"proc/self/cgroup", "4:memory:/\n"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited}},
       kPhysical},
      {"not the memory controller",
       {{"proc/self/cgroup", "4:memory_else:/\n"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes", "1\n"}},
       kPhysical},
      {"no sense",
       {{"proc/self/cgroup", "\n:\n0:\n0::\n0::no\n0::/\n"},
        {"sys/fs/cgroup/memory.max", "-5 lots\n"}},
       kPhysical}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    std::string root = (std::filesystem::temp_directory_path() / "memory_limit_XXXXXX").string();
    ASSERT_NE(mkdtemp(root.data()), nullptr);
    for (const auto& [name, text] : row.files) {
      const std::filesystem::path path = std::filesystem::path(root) / name;
      std::filesystem::create_directories(path.parent_path());
      std::ofstream(path) << text;
    }
    EXPECT_EQ(UsableMemoryBytes(kPhysical, root), row.want);
    std::filesystem::remove_all(root);
  }
}

TEST(MemoryLimit, OfThisMachineIsSomething) {
  const int64_t physical = PhysicalMemoryBytes();
  EXPECT_GT(physical, 64 << 20);
  const int64_t usable = UsableMemoryBytes(physical);
  EXPECT_GT(usable, 16 << 20);
  EXPECT_LE(usable, physical);
}

}  // namespace
}  // namespace sparsegdn::service
