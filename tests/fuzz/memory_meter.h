// Counts the heap of the process, to see what one input costs. Replaces operator new and delete.
#ifndef SPARSEGDN_TESTS_FUZZ_MEMORY_METER_H_
#define SPARSEGDN_TESTS_FUZZ_MEMORY_METER_H_

#include <cstddef>

namespace sparsegdn::fuzz {

// Starts anew at what is held now.
void ResetPeak();
// The most that was held at once since ResetPeak, beyond what was held then. A request that the
// process cannot be given counts too.
size_t PeakBytes();

}  // namespace sparsegdn::fuzz

#endif  // SPARSEGDN_TESTS_FUZZ_MEMORY_METER_H_
