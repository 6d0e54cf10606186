// One table of Highway kernels per instruction set, chosen at run time.
//
// SVE and RVV are left out: their vectors cannot form arrays, which the register tiles need.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/vector_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/product_f32-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsegdn::cpu::HWY_NAMESPACE {

const VectorKernels* Table() {
  static const VectorKernels table = {
      hwy::TargetName(HWY_TARGET),
      {hwy::TargetName(HWY_TARGET), Multiply, Output, Update, PackState, PackKeys, PackUpdates},
      ExpInplace,
      LoadRows,
      RowDots,
      Rhs,
      Store,
      Probs,
      System,
      InvertBlocks,
      Solve,
      RowNorm,
  };
  return &table;
}

}  // namespace sparsegdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsegdn::cpu {

HWY_EXPORT(Table);

const VectorKernels& GetVectorKernels() { return *HWY_DYNAMIC_DISPATCH(Table)(); }

}  // namespace sparsegdn::cpu
#endif  // HWY_ONCE
