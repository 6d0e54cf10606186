// The row-wise operations and the matrix product.
#include <cmath>
#include <cstring>

#include "kernels/cpu/ops/cpu_ops_impl.h"
#include "kernels/cpu/ops/ops_kernels.h"

namespace sparsegdn {

using cpu_ops::kPanel;
using cpu_ops::RowOf;

namespace {

constexpr int64_t kRowGrain = 16;     // rows of one task of a row-wise operation
constexpr int64_t kTileRows = 96;     // rows of x that share one pass over a panel
constexpr int64_t kDepthBlock = 256;  // 16 KiB of a BF16 panel, 1 KiB of a row of x

// x's rows [first, first + rows) as blocks of depth, [depth / kDepthBlock][rows][block]: the
// micro-tile then walks short strides whatever x's own stride is.
void CopyBlocks(ConstRows x, int64_t first, int64_t rows, int64_t depth, float* out) {
  for (int64_t d = 0; d < depth; d += kDepthBlock) {
    const int64_t width = std::min(kDepthBlock, depth - d);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out, RowOf(x, first + r) + d, width * sizeof(float));
      out += width;
    }
  }
}

void MultiplyPanel(const PackedMatrix& weight, int64_t panel, const float* blocks, int64_t rows,
                   float* c) {
  const int64_t depth = weight.in();
  const bool narrow = weight.dtype() == DType::kBF16;
  const auto* b = static_cast<const uint8_t*>(weight.panel(panel));
  for (int64_t d = 0; d < depth; d += kDepthBlock) {
    const int64_t width = std::min(kDepthBlock, depth - d);
    const cpu_ops::TileArgs tile{blocks, width, rows, width, b, c, kPanel, d > 0};
    narrow ? cpu_ops::GemmTileBf16(tile) : cpu_ops::GemmTileF32(tile);
    blocks += rows * width;
    b += width * kPanel * (narrow ? 2 : 4);
  }
}

void StorePanel(const float* c, int64_t first_row, int64_t rows, int64_t column, int64_t columns,
                ConstRows residual, Rows y) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = c + r * kPanel;
    float* to = RowOf(y, first_row + r) + column;
    if (residual.data == nullptr) {
      std::memcpy(to, from, columns * sizeof(float));
      continue;
    }
    const float* add = RowOf(residual, first_row + r) + column;
    for (int64_t i = 0; i < columns; ++i) to[i] = add[i] + from[i];
  }
}

}  // namespace

CpuOps::CpuOps(int num_threads)
    : impl_(std::make_unique<Impl>(num_threads > 0 ? num_threads : cpu::UsableCores())) {}
CpuOps::~CpuOps() = default;

int CpuOps::num_threads() const { return impl_->pool.num_threads(); }
const char* CpuOps::target() const { return cpu_ops::TargetName(); }

void CpuOps::Pack(PackedMatrix& weight, int64_t first, int64_t rows, const uint8_t* elements,
                  DType source) {
  const int64_t row_bytes = weight.in() * (source == DType::kF32 ? 4 : 2);
  impl_->ForRanges(rows, 4 * kPanel, [&](int64_t begin, int64_t end, int) {
    weight.SetRows(first + begin, end - begin, elements + begin * row_bytes, source);
  });
}

void CpuOps::Gemm(int64_t rows, ConstRows x, const PackedMatrix& weight, ConstRows residual,
                  Rows y) {
  if (rows == 0) return;
  const int64_t panels = (weight.out() + kPanel - 1) / kPanel;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  // Few rows: several tasks share a row tile, each with panels of its own.
  const int64_t wanted = std::clamp<int64_t>((4 * num_threads() + tiles - 1) / tiles, 1, panels);
  const int64_t panels_each = (panels + wanted - 1) / wanted;
  const int64_t groups = (panels + panels_each - 1) / panels_each;
  impl_->pool.Run(groups * tiles, [&](int64_t task, int thread) {
    const int64_t first = task % tiles * kTileRows;
    const int64_t count = std::min(kTileRows, rows - first);
    float* c = impl_->Scratch(thread, kTileRows * kPanel + count * weight.in());
    float* blocks = c + kTileRows * kPanel;
    CopyBlocks(x, first, count, weight.in(), blocks);
    const int64_t first_panel = task / tiles * panels_each;
    const int64_t last_panel = std::min(panels, first_panel + panels_each);
    for (int64_t p = first_panel; p < last_panel; ++p) {
      MultiplyPanel(weight, p, blocks, count, c);
      StorePanel(c, first, count, p * kPanel, std::min<int64_t>(kPanel, weight.out() - p * kPanel),
                 residual, y);
    }
  });
}

void CpuOps::Embed(int64_t rows, const int32_t* tokens, const PackedMatrix& table, Rows y) {
  impl_->ForRanges(rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) table.GetRow(tokens[r], RowOf(y, r));
  });
}

void CpuOps::GatherRows(int64_t rows, int64_t cols, const int32_t* index, ConstRows x, Rows y) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(RowOf(y, r), RowOf(x, index[r]), cols * sizeof(float));
  }
}

void CpuOps::RmsNorm(const RmsNormArgs& a) {
  impl_->ForRanges(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      cpu_ops::RmsNormRow(RowOf(a.x, r), a.weight, a.eps, a.cols, RowOf(a.y, r));
    }
  });
}

void CpuOps::GatedNorm(const GatedNormArgs& a) {
  impl_->ForRanges(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t at = h * a.dim;
        cpu_ops::GatedNormRow(RowOf(a.o, r) + at, RowOf(a.z, r) + at, a.weight, a.eps, a.dim,
                              RowOf(a.y, r) + at);
      }
    }
  });
}

void CpuOps::SwiGlu(const SwiGluArgs& a) {
  impl_->ForRanges(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = RowOf(a.gate_up, r);
      cpu_ops::SwiGluRow(row, row + a.inner, a.inner, RowOf(a.y, r));
    }
  });
}

void CpuOps::LogProb(const LogProbArgs& a) {
  impl_->ForRanges(a.rows, 1, [&](int64_t r, int64_t, int) {
    const float* row = a.logits + r * a.vocab;
    float max = 0.0f;
    double sum = 0.0;
    cpu_ops::ExpSumRow(row, a.vocab, &max, &sum);
    a.out[r] = static_cast<float>(double{row[a.targets[r]]} - max - std::log(sum));
  });
}

void CpuOps::CheckFinite(const PackArgs& pack, int64_t cols, ConstRows x, int32_t* flags) {
  impl_->pool.Run(pack.num_seqs, [&](int64_t s, int) {
    for (int64_t r = pack.cu_seqlens[s]; r < pack.cu_seqlens[s + 1]; ++r) {
      if (!cpu_ops::AllFinite(RowOf(x, r), cols)) {
        flags[s] = 1;
        return;
      }
    }
  });
}

}  // namespace sparsegdn
