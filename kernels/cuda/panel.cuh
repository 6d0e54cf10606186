// Shared-memory panels, asynchronous copies and barriers of the fused kernel.
//
// A panel is R rows of 64 16-bit elements, 128 bytes a row; the 16-byte piece c of row r stands at
// piece c ^ (r % 8), and a panel starts at a multiple of 1024 bytes. One layout serves both operand
// orders of wgmma: rows as M or N with the 64 elements along K, or ("transposed") rows along K with
// the 64 elements along M or N.
#ifndef SPARSEGDN_KERNELS_CUDA_PANEL_CUH_
#define SPARSEGDN_KERNELS_CUDA_PANEL_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace sparsegdn::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// An address behind the optimiser's back: what is computed from it is not kept in registers across
// the loop around it.
__device__ __forceinline__ uint32_t HiddenAddress(const void* p) {
  uint32_t address = SharedAddress(p);
  asm volatile("" : "+r"(address));
  return address;
}
// The same for operands: equal in all lanes, so that descriptors are made in uniform registers.
__device__ __forceinline__ uint32_t UniformAddress(const void* p) {
  return __shfl_sync(0xffffffffu, HiddenAddress(p), 0);
}

// Byte offset of element `column` of row `row` in a panel.
__device__ __forceinline__ uint32_t PanelOffset(int row, int column) {
  return static_cast<uint32_t>(row * 128 + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2);
}

// Accumulators (m64nN) hand a thread the cells (row, 8 j + column), whose addresses are
// base ^ (j << 4) with base = panel + PanelOffset(row, column), column < 8. The base is hidden from
// the optimiser, which would otherwise keep dozens of loop-invariant addresses in registers.
__device__ __forceinline__ uint32_t CellBase(const void* panel, int row, int column) {
  uint32_t base = SharedAddress(panel) + PanelOffset(row, column);
  asm volatile("" : "+r"(base));
  return base;
}
__device__ __forceinline__ uint32_t LoadCell(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
// Two floats, where they stand in the program: the optimiser would load whole tables ahead.
__device__ __forceinline__ float2 LoadPair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint4 LoadPiece(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
// 16 bytes of an input that no kernel writes; issued here, awaited at their first use.
__device__ __forceinline__ uint4 LoadInput(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}
__device__ __forceinline__ void StoreCell(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Descriptor of an operand that starts at `address`: 128-byte swizzle, 1024 bytes between groups of
// eight rows; `panel_stride` is the distance of the next 64 elements along M or N of a transposed
// operand wider than one panel.
__device__ __forceinline__ uint64_t PanelDescriptor(uint32_t address, uint32_t panel_stride = 16) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) |
         static_cast<uint64_t>(panel_stride >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 |
         uint64_t{1} << 62;
}
// The same in two parts, for a walk: only the lower half changes, by a constant a step. Addresses
// of shared memory are below 2^18.
__device__ __forceinline__ uint32_t PanelOperand(uint32_t address, uint32_t panel_stride = 16) {
  return address >> 4 | panel_stride >> 4 << 16;
}
__device__ __forceinline__ uint64_t OperandAt(uint32_t operand, uint32_t offset) {
  constexpr uint32_t kUpper = uint32_t{1} << 30 | 1024 >> 4;
  uint64_t x;
  asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(operand + (offset >> 4)), "n"(kUpper));
  return x;
}
// Step of 16 along K: 32 bytes within a row, or 16 rows of a transposed operand.
inline constexpr uint32_t kStepK = 32;
inline constexpr uint32_t kStepKTransposed = 16 * 128;

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Orders this thread's shared-memory writes before later reads by wgmma (after a barrier).
__device__ __forceinline__ void ProxyFence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Keeps the compiler from moving uses of accumulators across the asynchronous products.
template <int kCount>
__device__ __forceinline__ void FenceRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Has (part of) an A operand packed here: the optimiser would keep its fp32 halves, twice the
// registers, until the product. A use that it cannot move is all it takes; the sleep is one of
// zero, if ever.
template <int kCount>
__device__ __forceinline__ void PinOperand(const uint32_t (&a)[kCount]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) any |= a[i];
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xfffffff1;\n@p nanosleep.u32 0;\n}\n" ::"r"(any));
}

// 16 bytes to shared memory, zeros where `valid` is false (then `from` is not read).
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void CopyCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting for the others; one of them waits by NamedBarrier.
__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void BarrierInit(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}
// One lane of the warp, the same in all of it: the compiler then knows that the others are idle.
__device__ __forceinline__ bool ElectLane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}\n"
               : "=r"(elected));
  return elected != 0;
}

// One arrival a warp, after all of its lanes.
__device__ __forceinline__ void BarrierArriveWarp(uint64_t* barrier) {
  __syncwarp();
  if (ElectLane()) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier))
                 : "memory");
  }
}
__device__ __forceinline__ void BarrierWait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void BarrierExpect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// `bytes` (a multiple of 16) in a row by the copy engine (one thread).
__device__ __forceinline__ void CopyBytes(uint32_t to, const void* from, int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
// Tokens of one head, 128 elements each, to panels: the first 64 elements of all tokens, then the
// others, by the copy engine (one thread).
__device__ __forceinline__ void CopyBox(uint32_t to, const void* map, uint64_t* barrier, int head,
                                        int token) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {0, %3, %4, 0}], [%2];" ::"r"(to),
      "l"(map), "r"(SharedAddress(barrier)), "r"(head), "r"(token)
      : "memory");
}

// The same boxes or bytes towards L2 only, so that a later copy finds them near.
__device__ __forceinline__ void PrefetchBox(const void* map, int head, int token) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {0, %1, %2, 0}];" ::"l"(map),
               "r"(head), "r"(token)
               : "memory");
}
__device__ __forceinline__ void PrefetchBytes(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The way back; completion by bulk groups of the issuing thread.
__device__ __forceinline__ void StoreBytes(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void StoreBoxFrom(uint32_t from, const void* map, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {0, %2, %3, 0}], [%1];" ::
          "l"(map),
      "r"(from), "r"(head), "r"(token)
      : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, row addresses from lanes 8 i .. 8 i + 7: r[i] is the
// thread's pair of cells of matrix i, as accumulators have them.
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// LoadMatrices, each matrix transposed.
__device__ __forceinline__ void LoadTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Their way back to shared memory, each matrix transposed if `kTransposed` (Hopper).
template <bool kTransposed>
__device__ __forceinline__ void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

// Two fp32 to two 16-bit elements, the first in the low half, and back.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float a, float b) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  }
  return r;
}
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
}
__device__ __forceinline__ float Exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// e^(a - b) for sums kept as high + low parts in log2 units.
__device__ __forceinline__ float Decay(float a_high, float a_low, float b_high, float b_low) {
  return Exp2((a_high - b_high) + (a_low - b_low));
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_PANEL_CUH_
