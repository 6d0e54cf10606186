// The operations of ops.h on the CPU: FP32 activations, FP32 or BF16 weights, FP32 products.
#ifndef SPARSEGDN_CPU_OPS_H_
#define SPARSEGDN_CPU_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sparsegdn/ops.h"
#include "sparsegdn/types.h"

namespace sparsegdn {

// A weight [out, in] of y = x W^T in panels of 32 outputs, [out / 32][in][32], zero padded.
// FP16 sources are stored as FP32, which is exact. Move-only; filled once, then read-only.
class PackedMatrix {
 public:
  // `source` is the dtype it will be filled from. Check allocated() before anything else.
  PackedMatrix(DType source, int64_t out, int64_t in);
  bool allocated() const { return data_ != nullptr; }

  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  DType dtype() const { return dtype_; }  // kF32 or kBF16
  const void* panel(int64_t index) const;
  size_t bytes() const;

  // Writes rows [first, first + rows) from row-major elements of any alignment. Calls on disjoint
  // ranges may run concurrently.
  void SetRows(int64_t first, int64_t rows, const uint8_t* elements, DType source);
  // One row widened to FP32.
  void GetRow(int64_t row, float* out) const;

 private:
  struct Free {
    void operator()(void* data) const;
  };
  int64_t out_, in_;
  DType dtype_;
  std::unique_ptr<void, Free> data_;
};

// Bytes of one block of the attention cache.
size_t CpuKvBlockBytes(const AttentionShape& shape, int32_t block_tokens);

// Thread-compatible: one call at a time. num_threads 0 stands for the cores this process may use.
// Every function is defined by the argument struct's comment in ops.h.
class CpuOps {
 public:
  explicit CpuOps(int num_threads);
  ~CpuOps();
  CpuOps(const CpuOps&) = delete;
  CpuOps& operator=(const CpuOps&) = delete;

  int num_threads() const;
  const char* target() const;  // instruction set in use

  // Fills rows of a weight on all threads; see PackedMatrix::SetRows.
  void Pack(PackedMatrix& weight, int64_t first, int64_t rows, const uint8_t* elements,
            DType source);

  // y = x W^T (+ residual): x [rows, in], y and residual [rows, out] FP32. residual may be y, or
  // have null data.
  void Gemm(int64_t rows, ConstRows x, const PackedMatrix& weight, ConstRows residual, Rows y);
  // y[i] = row tokens[i] of the table.
  void Embed(int64_t rows, const int32_t* tokens, const PackedMatrix& table, Rows y);
  // y[i] = x[index[i]]
  void GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x, Rows y);
  void RmsNorm(const RmsNormArgs& args);
  void GatedNorm(const GatedNormArgs& args);
  void GdnFront(const GdnFrontArgs& args);
  void ConvStateAt(const ConvStateAtArgs& args);
  void RopeTable(const RopeTableArgs& args);
  void AttentionFront(const AttentionFrontArgs& args);
  void KvLoad(const KvLoadArgs& args);
  void Attention(const AttentionArgs& args);
  void SwiGlu(const SwiGluArgs& args);
  void LogProb(const LogProbArgs& args);
  // flags[s] |= 1 where a row of sequence s holds NaN or Inf.
  void CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x, int32_t* flags);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparsegdn

#endif  // SPARSEGDN_CPU_OPS_H_
