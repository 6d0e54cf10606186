// A tile of 64 tokens of the output side: how q, v, its gates and its share of k come in, and how o
// leaves. q is the warpgroup's; v comes and o leaves warp by warp, 16 rows each, so that no warp
// waits for another at the end of a tile.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_TILE_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_TILE_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

// kSelf: with the self term; kNorm: q and k are normalised here; kDirect: o is not of the inputs'
// dtype.
template <typename T, bool kSelf, bool kNorm, bool kDirect>
class OutputTile {
 protected:
  __device__ __forceinline__ OutputTile(const Params& p, const TileMaps& maps, Shared& sm)
      : p_(p), maps_(maps), sm_(sm), job_(sm.job) {}

  // Read anew where they are needed: what the optimiser derives from them would fill the registers.
  static __device__ __forceinline__ unsigned BlockThread() {
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  static __device__ __forceinline__ unsigned Thread() {  // of the warpgroup
    return BlockThread() % 128;
  }
  static __device__ __forceinline__ unsigned Warpgroup() {  // of the output side
    return BlockThread() / 128 - 2;
  }
  // This thread's first cell of a 64-row accumulator; it has those eight rows further, too.
  static __device__ __forceinline__ int OwnRow(unsigned thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int OwnColumn(unsigned thread) { return 2 * (thread % 4); }
  // The warpgroup's tile in shared memory: q, then v or o.
  __device__ __forceinline__ uint32_t TileAddress() const {
    return HiddenAddress(sm_.tile[Warpgroup()]);
  }
  // This warp's rows of v or o there: kHalf bytes of the first 64 elements, then the others.
  static constexpr int kHalf = kWarpRows * 128;
  __device__ __forceinline__ uint32_t OwnRows() const {
    return TileAddress() + 2 * kPanel + OwnWarp() * (2 * kHalf);
  }
  static __device__ __forceinline__ unsigned OwnWarp() { return Thread() / 32; }

  __device__ __forceinline__ void WarpgroupBarrier() {
    NamedBarrier(kBarrierGroup0 + 2 + Warpgroup(), 128);
  }

  // Starts the copies of the tile at `row`: q by warp 0, which is past all reads of the one before,
  // gates and beta by warp 1. Rows past the group may hold anything: a row of q or v only ever
  // reaches the same row of o. v, and the tile after it, are called into L2.
  __device__ __forceinline__ void FetchQueries(int row) {
    const unsigned warp = OwnWarp();
    fetched_ = row;
    if (warp > 2 || row >= job_.end_row || !ElectLane()) return;
    uint64_t* full = &sm_.queries_full[Warpgroup()];
    if (warp == 0) {
      BarrierExpect(full, 2 * kPanel);
      CopyBox(TileAddress(), &maps_.q, full, job_.pair, row);
    } else if (warp == 1) {
      TileGates& gates = sm_.gates[Warpgroup()][parities_ & 1];
      BarrierExpect(full, sizeof(gates.gate) + sizeof(gates.beta));
      CopyAligned(gates.gate, job_.gate_sum + row, full);
      CopyAligned(gates.beta, job_.beta + row, full);
    } else {
      if constexpr (kSelf) PrefetchBox(&maps_.v_tile, job_.head, row);
      const int later = row + 2 * kTile;  // the tile after it, probably
      if (later >= job_.end_row) return;
      PrefetchBox(&maps_.q, job_.pair, later);
      if constexpr (kSelf) PrefetchBox(&maps_.k, job_.pair, later);
    }
  }
  // From the 16-byte boundary at or before `from`; what is read past the last row is never used,
  // and still inside the workspace.
  template <typename X, int kCount>
  static __device__ __forceinline__ void CopyAligned(X (&to)[kCount], const X* from,
                                                     uint64_t* full) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(from) & ~uintptr_t{15};
    CopyBytes(SharedAddress(to), reinterpret_cast<const void*>(at), sizeof(to), full);
  }
  // Element `index` of what was copied from `from` on.
  template <typename X, int kCount>
  static __device__ __forceinline__ const X& Aligned(const X (&copied)[kCount], const X* from,
                                                     int index) {
    return copied[index + reinterpret_cast<uintptr_t>(from) % 16 / sizeof(X)];
  }
  // Starts the copy of this warp's v, once the copy engine has read its last o there.
  __device__ __forceinline__ void FetchValues(int row, int end) {
    const int first = row + OwnWarp() * kWarpRows;
    const uint32_t to = OwnRows();
    if (first >= end || !ElectLane()) return;
    AwaitStore();
    if (!kSelf) return;
    uint64_t* full = &sm_.values_full[Warpgroup()][OwnWarp()];
    BarrierExpect(full, 2 * kHalf);
    CopyBox(to, &maps_.v, full, job_.head, first);
  }
  __device__ __forceinline__ bool InFlight() const { return fetched_ < job_.end_row; }
  __device__ __forceinline__ void AwaitQueries() {
    BarrierWait(&sm_.queries_full[Warpgroup()], parities_ & 1);
    parities_ ^= 1;
  }
  __device__ __forceinline__ void AwaitValues() {
    if (!kSelf) return;
    BarrierWait(&sm_.values_full[Warpgroup()][OwnWarp()], parities_ >> 1);
    parities_ ^= 2;
  }
  // What this thread sent off by the copy engine has been read out of shared memory.
  static __device__ __forceinline__ void AwaitStore() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  // q_t . k_t of this thread's two rows: the diagonals of the warp's two 16 x 8 products. A thread
  // brings a quarter of either row, k straight to registers a tile ahead, in an order that lets
  // eight lanes read q without bank conflicts; it differs from row to row, which a diagonal does
  // not see.
  static __device__ __forceinline__ int OwnPiece(
      unsigned tid) {  // of 16 bytes; then ^ 4, + 8, + 8 ^ 4
    return 4 * (OwnRow(tid) & 1) + tid % 4;
  }
  __device__ __forceinline__ void LoadOwnKeys(int row) {
    if constexpr (!kSelf) return;
    const unsigned tid = Thread();
    const int piece = OwnPiece(tid);
    const T* from = static_cast<const T*>(job_.keys) + 8 * piece;
    const int other = piece < 4 ? 32 : -32;  // elements to piece ^ 4
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + OwnRow(tid) + 8 * half;
      const T* at = RowOf(from, r < job_.end_row ? r : job_.end_row - 1, p_.k);
#pragma unroll
      for (int i = 0; i < 4; ++i) own_[half][i] = LoadInput(at + i / 2 * 64 + i % 2 * other);
    }
  }

  // Gates of this thread's row, or the one eight further, of the tile at `row`.
  __device__ __forceinline__ int OwnIndex(int row, int end, int half) const {
    const int i = OwnRow(Thread()) + 8 * half;
    return row + i < end ? i : end - 1 - row;
  }
  __device__ __forceinline__ float2 OwnGate(int row, int end, int half) const {
    const TileGates& gates = sm_.gates[Warpgroup()][(parities_ & 1) ^ 1];
    return Aligned(gates.gate, job_.gate_sum + row, OwnIndex(row, end, half));
  }
  // What the self term needs besides q . k and v: beta, and 1 / |q| |k| where that is asked for.
  __device__ __forceinline__ float OwnSelf(int row, int end, int half) const {
    if constexpr (!kSelf) return 0.0f;
    const int i = OwnIndex(row, end, half);
    const TileGates& gates = sm_.gates[Warpgroup()][(parities_ & 1) ^ 1];
    float x = p_.scale * Aligned(gates.beta, job_.beta + row, i);
    if constexpr (kNorm) {
      const int64_t at = job_.pair * p_.num_tokens + row + i;
      x *= p_.ws.q_norm[at] * p_.ws.k_norm[at];
    }
    return x;
  }
  __device__ __forceinline__ float RowScale(int row) const {
    if constexpr (!kNorm) return p_.scale;
    return p_.scale * p_.ws.q_norm[job_.pair * p_.num_tokens + row];
  }
  // The eight cells from o[first] on, element by element.
  __device__ __forceinline__ void StoreDirect(int row, int end, int first, const float (&o)[64]) {
    const unsigned tid = Thread();
#pragma unroll
    for (int cell = 0; cell < 4; ++cell) {
      const int r = row + OwnRow(tid) + 8 * (cell % 2);
      if (r >= end) continue;
      const int64_t at = r * p_.o.token_stride + job_.head * p_.o.head_stride +
                         8 * (first / 4 + cell / 2) + OwnColumn(tid);
      StoreAs(p_.o.data, p_.o.dtype, at, o[first + 2 * cell]);
      StoreAs(p_.o.data, p_.o.dtype, at + 1, o[first + 2 * cell + 1]);
    }
  }
  // Rows of o from `first` on, fewer than kWarpRows, from shared memory by this warp.
  __device__ __forceinline__ void StoreRows(int first, int end) {
    const int lane = Thread() % 32, piece = lane % 16, row = lane / 16;
    const uint32_t from = OwnRows() + piece / 8 * kHalf;
    uint16_t* to = static_cast<uint16_t*>(p_.o.data) + job_.head * p_.o.head_stride +
                   (first + row) * p_.o.token_stride + piece * 8;
    for (int i = row; i < end - first; i += 2, to += 2 * p_.o.token_stride) {
      *reinterpret_cast<uint4*>(to) = LoadPiece(from + PanelOffset(i, piece % 8 * 8));
    }
  }

  // The warp's 16 rows of o through the copy engine, which may still be reading when this returns.
  __device__ __forceinline__ void StoreBox(int first) {
    const uint32_t from = OwnRows();
    if (!ElectLane()) return;
    StoreBoxFrom(from, &maps_.o, job_.head, first);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // This warp's rows of o, from `first` on, leave shared memory.
  __device__ __forceinline__ void Store(int first, int end) {
    if constexpr (kDirect) return;
    ProxyFence();
    __syncwarp();
    if (first + kWarpRows <= end) {
      StoreBox(first);
    } else {
      StoreRows(first, end);
    }
  }

  const Params& p_;
  const TileMaps& maps_;
  Shared& sm_;
  const Job& job_;
  int fetched_ = kNoToken;  // first row of the tile that is under way, if it is a row of the job
  uint4 own_[2][4];         // this thread's share of k of that tile
  int parities_ = 0;        // of the next waits: bit 0 for q, bit 1 for v
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_TILE_CUH_
