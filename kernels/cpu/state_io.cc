#include "kernels/cpu/state_io.h"

#include <algorithm>
#include <cmath>

namespace sparsegdn::cpu {
namespace {

int Columns(const TaskDims& dims, int panel) {
  return std::min(kPanel, dims.dim_v - panel * kPanel);
}

}  // namespace

void ZeroState(const TaskDims& dims, const StateSlice& slice, float* state) {
  std::fill(state + slice.panel_begin * dims.state_panel,
            state + slice.panel_end * dims.state_panel, 0.0f);
}

void LoadState(const float* pool, StateLayout layout, const TaskDims& dims, const StateSlice& slice,
               float* state) {
  ZeroState(dims, slice, state);
  const float* in = pool + slice.head * dims.dim_k * dims.dim_v;
  for (int p = slice.panel_begin; p < slice.panel_end; ++p) {
    float* panel = state + p * dims.state_panel;
    for (int d = 0; d < dims.dim_k; ++d) {
      for (int j = 0; j < Columns(dims, p); ++j) {
        const int64_t col = int64_t{p} * kPanel + j;
        panel[d * kPanel + j] =
            layout == StateLayout::kKeyMajor ? in[d * dims.dim_v + col] : in[col * dims.dim_k + d];
      }
    }
  }
}

void StoreState(const float* state, const TaskDims& dims, const StateSlice& slice,
                StateLayout layout, float* pool) {
  float* out = pool + slice.head * dims.dim_k * dims.dim_v;
  for (int p = slice.panel_begin; p < slice.panel_end; ++p) {
    const float* panel = state + p * dims.state_panel;
    for (int d = 0; d < dims.dim_k; ++d) {
      for (int j = 0; j < Columns(dims, p); ++j) {
        const int64_t col = int64_t{p} * kPanel + j;
        const int64_t at =
            layout == StateLayout::kKeyMajor ? d * dims.dim_v + col : col * dims.dim_k + d;
        out[at] = panel[d * kPanel + j];
      }
    }
  }
}

bool IsFinite(const float* state, const TaskDims& dims, const StateSlice& slice) {
  for (int p = slice.panel_begin; p < slice.panel_end; ++p) {
    const float* panel = state + p * dims.state_panel;
    for (int i = 0; i < dims.dim_k * kPanel; ++i) {
      if (!std::isfinite(panel[i])) return false;
    }
  }
  return true;
}

}  // namespace sparsegdn::cpu
