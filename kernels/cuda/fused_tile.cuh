// A tile of 64 tokens of the output side: how q, v, its gates and its share of k come in, and how o
// leaves.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_TILE_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_TILE_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

// kSelf: with the self term; kNorm: q and k are normalised here.
template <typename T, bool kSelf, bool kNorm>
class OutputTile {
 protected:
  __device__ __forceinline__ OutputTile(const Params& p, const TileMaps& maps, Shared& sm)
      : p_(p), maps_(maps), sm_(sm), job_(sm.job), wg_(threadIdx.x / 128 - 2) {}

  // Read anew where they are needed: what the optimiser derives from them would fill the registers.
  static __device__ __forceinline__ int Thread() {  // of the warpgroup
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % 128;
  }
  // This thread's first cell of a 64-row accumulator; it has those eight rows further, too.
  static __device__ __forceinline__ int OwnRow(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int OwnColumn(int thread) { return 2 * (thread % 4); }
  // The warpgroup's tile in shared memory: q, then v or o.
  __device__ __forceinline__ uint32_t TileAddress() const { return HiddenAddress(sm_.tile[wg_]); }
  // o is not of the inputs' dtype.
  __device__ __forceinline__ bool Direct() const { return p_.o.dtype != p_.q.dtype; }

  __device__ __forceinline__ void WarpgroupBarrier() {
    NamedBarrier(kBarrierGroup0 + 2 + wg_, 128);
  }

  // Starts the copy of the tile at `row`, q or v. Rows past the group may hold anything: a row of q
  // or v only ever reaches the same row of o. k and v of the self term are called into L2.
  __device__ __forceinline__ void FetchQueries(int row) {
    const int tid = Thread();
    const uint32_t tile = TileAddress();
    in_flight_ = row < job_.end_row;
    if (!in_flight_ || tid != 0) return;
    uint64_t* full = &sm_.queries_full[wg_];
    BarrierExpect(full, 2 * kPanel + sizeof(TileGates::gate) + sizeof(TileGates::beta));
    for (int half = 0; half < 2; ++half) {
      CopyBox(tile + half * kPanel, &maps_.q, full, 64 * half, job_.pair, row);
    }
    TileGates& gates = sm_.gates[wg_][parities_ & 1];
    CopyAligned(gates.gate, job_.gate_sum + row, full);
    CopyAligned(gates.beta, job_.beta + row, full);
    for (int half = 0; kSelf && half < 2; ++half) {
      PrefetchBox(&maps_.k, 64 * half, job_.pair, row);
      PrefetchBox(&maps_.v, 64 * half, job_.head, row);
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
  __device__ __forceinline__ void FetchValues(int row) {
    const int tid = Thread();
    const uint32_t tile = TileAddress();
    if (!kSelf || tid != 0) return;
    uint64_t* full = &sm_.values_full[wg_];
    BarrierExpect(full, 2 * kPanel);
    for (int half = 0; half < 2; ++half) {
      CopyBox(tile + (2 + half) * kPanel, &maps_.v, full, 64 * half, job_.head, row);
    }
  }
  __device__ __forceinline__ void AwaitQueries() {
    BarrierWait(&sm_.queries_full[wg_], parities_ & 1);
    parities_ ^= 1;
  }
  __device__ __forceinline__ void AwaitValues() {
    if (!kSelf) return;
    BarrierWait(&sm_.values_full[wg_], parities_ >> 1);
    parities_ ^= 2;
  }
  // The copy engine has read the last tile of o out of the v panels.
  __device__ __forceinline__ void AwaitStore() {
    const int tid = Thread();
    const int own_row = OwnRow(tid);
    if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  // q_t . k_t of this thread's two rows: the diagonals of the warp's two 16 x 8 products. A thread
  // brings a quarter of either row, k straight to registers a tile ahead, in an order that lets
  // eight lanes read q without bank conflicts; it differs from row to row, which a diagonal does
  // not see.
  static __device__ __forceinline__ int OwnPiece(int tid) {  // of 16 bytes; then ^ 4, + 8, + 8 ^ 4
    return 4 * (OwnRow(tid) & 1) + tid % 4;
  }
  __device__ __forceinline__ void LoadOwnKeys(int row) {
    if constexpr (!kSelf) return;
    const int tid = Thread(), piece = OwnPiece(tid);
    const T* from = static_cast<const T*>(p_.k.data) + job_.pair * p_.k.head_stride + 8 * piece;
    const int other = piece < 4 ? 32 : -32;  // elements to piece ^ 4
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + OwnRow(tid) + 8 * half;
      const T* at = from + (r < job_.end_row ? r : job_.end_row - 1) * p_.k.token_stride;
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
    const TileGates& gates = sm_.gates[wg_][(parities_ & 1) ^ 1];
    return Aligned(gates.gate, job_.gate_sum + row, OwnIndex(row, end, half));
  }
  // What the self term needs besides q . k and v: beta, and 1 / |q| |k| where that is asked for.
  __device__ __forceinline__ float OwnSelf(int row, int end, int half) const {
    if constexpr (!kSelf) return 0.0f;
    const int i = OwnIndex(row, end, half);
    const TileGates& gates = sm_.gates[wg_][(parities_ & 1) ^ 1];
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
  __device__ __forceinline__ void StoreDirect(int row, int end, const float (&o)[64]) {
    const int tid = Thread();
    const int own_row = OwnRow(tid);
    const int column = OwnColumn(tid);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + own_row + 8 * half;
      const int64_t at = r * p_.o.token_stride + job_.head * p_.o.head_stride + column;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (r >= end) break;
        StoreAs(p_.o.data, p_.o.dtype, at + 8 * j, o[4 * j + 2 * half]);
        StoreAs(p_.o.data, p_.o.dtype, at + 8 * j + 1, o[4 * j + 2 * half + 1]);
      }
    }
  }
  __device__ __forceinline__ void StoreTile(int row, int end) {
    const int tid = Thread();
    if (Direct()) return;
    const int piece = tid % 16, first = tid / 16;
    const uint32_t from =
        SharedAddress(sm_.tile[wg_][1][piece / 8]) + PanelOffset(first, piece % 8 * 8);
    uint16_t* to = static_cast<uint16_t*>(p_.o.data) + job_.head * p_.o.head_stride +
                   (row + first) * p_.o.token_stride + piece * 8;
    const int64_t step = 8 * p_.o.token_stride;
    const int rows = end - row - first;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = LoadPiece(from + (4 * part + i) * 1024);
#pragma unroll
      for (int i = 0; i < 4; ++i, to += step) {
        if (8 * (4 * part + i) < rows) *reinterpret_cast<uint4*>(to) = x[i];
      }
    }
  }

  // A full tile through the copy engine, which may still be reading when this returns.
  __device__ __forceinline__ void StoreBox(int row) {
    const int tid = Thread();
    const uint32_t tile = TileAddress();
    if (tid != 0) return;
    for (int half = 0; half < 2; ++half) {
      StoreBoxFrom(tile + (2 + half) * kPanel, &maps_.o, 64 * half, job_.head, row);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  const Params& p_;
  const TileMaps& maps_;
  Shared& sm_;
  const Job& job_;
  int wg_;
  int fetched_ = -1;  // first row of the tile that is under way
  bool in_flight_ = false;
  uint4 own_[2][4];   // this thread's share of k of that tile
  int parities_ = 0;  // of the next waits: bit 0 for q and k, bit 1 for v
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_TILE_CUH_
