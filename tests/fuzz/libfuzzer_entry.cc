// libFuzzer's entry: SPARSEGDN_FUZZ_FUNCTION is the target's function (README.md).
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return sparsegdn::fuzz::SPARSEGDN_FUZZ_FUNCTION(data, size);
}
