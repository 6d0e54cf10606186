// Full attention over a paged cache.
//
// A block holds, for each key/value head, the keys as panels [block / 32][head_dim][32] (32
// positions side by side) and then the values as panels [head_dim / 32][block][32], so that both
// products of attention read panels in order. Queries of one key/value head, `kQueryRows` rows of
// (token, query head), share each tile of 64 positions: scores = Q K^T, online softmax, out += P V.
// Tiles start at multiples of 64 whatever the chunk, so a row's result is a function of its
// position alone. Memory: one tile of scores per thread.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/ops/cpu_ops_impl.h"
#include "kernels/cpu/ops/ops_kernels.h"

namespace sparsegdn {

using cpu_ops::kPanel;
using cpu_ops::RowOf;
using cpu_ops::Segment;

namespace {

constexpr int64_t kQueryRows = 96;
static_assert(kQueryRows >= kMaxQueryGroup);
constexpr int64_t kFrontTokens = 16;  // tokens of one task in front of attention

int64_t PaddedDim(const AttentionShape& shape) {
  return (shape.head_dim + kPanel - 1) / kPanel * kPanel;
}

// Elements of one key/value head in a block.
int64_t HeadElements(const AttentionShape& shape, int32_t block_tokens) {
  return block_tokens * (shape.head_dim + PaddedDim(shape));
}

float* HeadOf(const KvCacheRef& cache, const AttentionShape& shape, int64_t seq, int64_t position,
              int64_t head) {
  const int64_t block = cache.block_tables[seq * cache.max_blocks + position / cache.block_tokens];
  return static_cast<float*>(cache.data) +
         (block * shape.num_kv_heads + head) * HeadElements(shape, cache.block_tokens);
}

void Append(const KvCacheRef& cache, const AttentionShape& shape, int64_t seq, int64_t position,
            const float* k, const float* v) {
  const int64_t dim = shape.head_dim, within = position % cache.block_tokens;
  for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
    float* base = HeadOf(cache, shape, seq, position, h);
    float* keys = base + within / kPanel * dim * kPanel + within % kPanel;
    for (int64_t d = 0; d < dim; ++d) keys[d * kPanel] = k[h * dim + d];
    float* values = base + cache.block_tokens * dim;
    for (int64_t d = 0; d < PaddedDim(shape); ++d) {
      values[(d / kPanel * cache.block_tokens + within) * kPanel + d % kPanel] =
          d < dim ? v[h * dim + d] : 0.0f;
    }
  }
}

// Everything one task works on; pointers into the thread's scratch.
struct QueryTile {
  int64_t rows;
  int64_t last_position;
  float* q;                  // [rows][head_dim], scaled
  float* scores;             // [rows][kKvTile]
  float* out;                // [rows][padded dim]
  float* max;                // [rows]
  float* sum;                // [rows]
  const int64_t* positions;  // [rows]
};

void AttendTile(const AttentionArgs& a, const Segment& segment, int64_t head, int64_t start,
                const QueryTile& tile) {
  const int64_t dim = a.shape.head_dim, padded = PaddedDim(a.shape);
  const int64_t within = start % a.cache.block_tokens;
  const float* base = HeadOf(a.cache, a.shape, segment.seq, start, head);
  for (int64_t p = 0; p < kKvTile / kPanel; ++p) {
    cpu_ops::GemmTileF32({tile.q, dim, tile.rows, dim, base + (within / kPanel + p) * dim * kPanel,
                          tile.scores + p * kPanel, kKvTile, false});
  }
  int32_t visible[kQueryRows];
  for (int64_t r = 0; r < tile.rows; ++r) {
    visible[r] =
        static_cast<int32_t>(std::clamp<int64_t>(tile.positions[r] - start + 1, 0, kKvTile));
  }
  cpu_ops::SoftmaxTile({tile.scores, tile.rows, visible, tile.max, tile.sum, tile.out, padded});
  // Positions past the last query hold nothing yet, and 0 times it need not be 0.
  const int64_t depth = std::min<int64_t>(kKvTile, tile.last_position + 1 - start);
  const float* values = base + a.cache.block_tokens * dim;
  for (int64_t d = 0; d < padded; d += kPanel) {
    cpu_ops::GemmTileF32({tile.scores, kKvTile, tile.rows, depth,
                          values + (d / kPanel * a.cache.block_tokens + within) * kPanel,
                          tile.out + d, padded, true});
  }
}

void AttendSegment(const AttentionArgs& a, const Segment& segment, int64_t head, float* scratch) {
  const int64_t dim = a.shape.head_dim, padded = PaddedDim(a.shape);
  const int64_t group = a.shape.num_q_heads / a.shape.num_kv_heads;
  const int64_t first_row = a.pack.cu_seqlens[segment.seq];
  const int64_t first_position = a.pack.first_positions[segment.seq];
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int64_t tokens = segment.end - segment.begin;
  int64_t positions[kQueryRows];
  QueryTile tile{
      tokens * group, first_position + segment.end - 1, scratch, nullptr, nullptr, nullptr, nullptr,
      positions};
  tile.scores = tile.q + tile.rows * dim;
  tile.out = tile.scores + tile.rows * kKvTile;
  tile.max = tile.out + tile.rows * padded;
  tile.sum = tile.max + tile.rows;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t token = segment.begin + r / group, query_head = head * group + r % group;
    const float* from = RowOf(a.q, first_row + token) + query_head * dim;
    for (int64_t d = 0; d < dim; ++d) tile.q[r * dim + d] = from[d] * scale;
    positions[r] = first_position + token;
    tile.max[r] = -std::numeric_limits<float>::infinity();
    tile.sum[r] = 0.0f;
  }
  std::memset(tile.out, 0, tile.rows * padded * sizeof(float));
  for (int64_t start = 0; start <= tile.last_position; start += kKvTile) {
    AttendTile(a, segment, head, start, tile);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = first_row + segment.begin + r / group;
    const int64_t query_head = head * group + r % group;
    float* to = RowOf(a.out, row) + query_head * dim;
    std::memcpy(to, tile.out + r * padded, dim * sizeof(float));
    cpu_ops::SigmoidGateRow(RowOf(a.q_gate, row) + (2 * query_head + 1) * dim, 1.0f / tile.sum[r],
                            dim, to);
  }
}

}  // namespace

size_t CpuKvBlockBytes(const AttentionShape& shape, int32_t block_tokens) {
  return static_cast<size_t>(shape.num_kv_heads * HeadElements(shape, block_tokens)) *
         sizeof(float);
}

void CpuOps::RopeTable(const RopeTableArgs& a) {
  const std::vector<Segment> segments = cpu_ops::SegmentsOf(a.pack, kFrontTokens);
  impl_->pool.Run(segments.size(), [&](int64_t i, int) {
    const Segment& segment = segments[i];
    for (int64_t t = segment.begin; t < segment.end; ++t) {
      const int64_t row = a.pack.cu_seqlens[segment.seq] + t;
      const float position = static_cast<float>(a.pack.first_positions[segment.seq] + t);
      for (int32_t f = 0; f < a.half; ++f) {
        const double theta = position * a.inv_freq[f];  // rounded to FP32 first
        a.cos[row * a.half + f] = static_cast<float>(std::cos(theta));
        a.sin[row * a.half + f] = static_cast<float>(std::sin(theta));
      }
    }
  });
}

void CpuOps::AttentionFront(const AttentionFrontArgs& a) {
  const int64_t dim = a.shape.head_dim, half = a.shape.rotary_dim / 2;
  const int64_t kv_width = a.shape.num_kv_heads * dim;
  const std::vector<Segment> segments = cpu_ops::SegmentsOf(a.pack, kFrontTokens);
  impl_->pool.Run(segments.size(), [&](int64_t i, int) {
    const Segment& segment = segments[i];
    for (int64_t t = segment.begin; t < segment.end; ++t) {
      const int64_t row = a.pack.cu_seqlens[segment.seq] + t;
      const float* cos = a.cos + row * half;
      const float* sin = a.sin + row * half;
      float* q = RowOf(a.q_out, row);
      for (int64_t h = 0; h < a.shape.num_q_heads; ++h) {
        cpu_ops::RmsNormRow(RowOf(a.q_gate, row) + 2 * h * dim, a.q_norm, a.eps, dim, q + h * dim);
        cpu_ops::RotateRow(cos, sin, half, q + h * dim);
      }
      float* k = static_cast<float*>(a.k_out) + row * kv_width;
      float* v = static_cast<float*>(a.v_out) + row * kv_width;
      for (int64_t h = 0; h < a.shape.num_kv_heads; ++h) {
        cpu_ops::RmsNormRow(RowOf(a.k, row) + h * dim, a.k_norm, a.eps, dim, k + h * dim);
        cpu_ops::RotateRow(cos, sin, half, k + h * dim);
      }
      std::memcpy(v, RowOf(a.v, row), kv_width * sizeof(float));
      Append(a.cache, a.shape, segment.seq, a.pack.first_positions[segment.seq] + t, k, v);
    }
  });
}

void CpuOps::KvLoad(const KvLoadArgs& a) {
  const int64_t width = int64_t{a.shape.num_kv_heads} * a.shape.head_dim;
  impl_->ForRanges(a.rows, kKvTile, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      Append(a.cache, a.shape, 0, a.first_position + r, static_cast<const float*>(a.k) + r * width,
             static_cast<const float*>(a.v) + r * width);
    }
  });
}

void CpuOps::Attention(const AttentionArgs& a) {
  const int64_t group = a.shape.num_q_heads / a.shape.num_kv_heads;
  const int64_t tokens = kQueryRows / group;
  std::vector<Segment> segments = cpu_ops::SegmentsOf(a.pack, tokens);
  // Longest first, so that no thread starts a long one last.
  std::stable_sort(segments.begin(), segments.end(), [&](const Segment& x, const Segment& y) {
    return a.pack.first_positions[x.seq] + x.end > a.pack.first_positions[y.seq] + y.end;
  });
  const int64_t per_row = a.shape.head_dim + kKvTile + PaddedDim(a.shape) + 2;
  impl_->pool.Run(segments.size() * a.shape.num_kv_heads, [&](int64_t task, int thread) {
    AttendSegment(a, segments[task / a.shape.num_kv_heads], task % a.shape.num_kv_heads,
                  impl_->Scratch(thread, kQueryRows * per_row));
  });
}

}  // namespace sparsegdn
