// The input families of the case table: each row broke some other implementation.
#ifndef SPARSEGDN_TESTS_UNIT_KERNELS_CASE_FAMILIES_H_
#define SPARSEGDN_TESTS_UNIT_KERNELS_CASE_FAMILIES_H_

#include <ostream>
#include <vector>

#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {

// Fills the inputs of a pack whose sequences are set up for `budget`.
struct CaseFamily {
  const char* name;
  Pack (*build)(DType dtype, const Budget& budget);
  // Factor on the device's tolerance for 16-bit products, with the reason beside the row.
  double bf16_slack = 1.0;
};

const std::vector<CaseFamily>& CaseFamilies();

inline void PrintTo(const CaseFamily& family, std::ostream* os) { *os << family.name; }

}  // namespace sparsegdn::test

#endif  // SPARSEGDN_TESTS_UNIT_KERNELS_CASE_FAMILIES_H_
