// gtest's main, with the Highway kernels held to one instruction set of this build by
// SPARSEGDN_TEST_TARGET, for example AVX2: left to themselves they run only the best of this CPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "hwy/targets.h"

namespace {

// False where this CPU has no such target.
bool HoldTo(const char* name) {
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t left = supported; left != 0; left &= left - 1) {
    const int64_t target = left & -left;
    if (std::strcmp(hwy::TargetName(target), name) != 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* target = std::getenv("SPARSEGDN_TEST_TARGET");
  if (target != nullptr && !HoldTo(target)) {
    std::printf("this CPU does not have the target %s\n", target);
    return 0;
  }
  return RUN_ALL_TESTS();
}
