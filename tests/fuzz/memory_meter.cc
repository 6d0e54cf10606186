#include "tests/fuzz/memory_meter.h"

#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace sparsegdn::fuzz {
namespace {

std::atomic<int64_t> g_held{0}, g_base{0}, g_peak{0};

void Raise(int64_t held) {
  int64_t peak = g_peak.load(std::memory_order_relaxed);
  while (held > peak && !g_peak.compare_exchange_weak(peak, held)) {
  }
}

void* Take(std::size_t size, std::size_t alignment) {
  void* memory = alignment == 0 ? std::malloc(size == 0 ? 1 : size)
                                : std::aligned_alloc(
                                      alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) {
    Raise(INT64_MAX);
    return nullptr;
  }
  Raise(g_held += static_cast<int64_t>(malloc_usable_size(memory)));
  return memory;
}

void* TakeOrThrow(std::size_t size, std::size_t alignment) {
  void* memory = Take(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void Give(void* memory) {
  if (memory == nullptr) return;
  g_held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

void ResetPeak() {
  g_base = g_held.load();
  g_peak = g_held.load();
}

size_t PeakBytes() { return static_cast<size_t>(g_peak - g_base); }

}  // namespace sparsegdn::fuzz

using sparsegdn::fuzz::Give;
using sparsegdn::fuzz::Take;
using sparsegdn::fuzz::TakeOrThrow;
using std::align_val_t;
using std::nothrow_t;

void* operator new(std::size_t n) { return TakeOrThrow(n, 0); }
void* operator new[](std::size_t n) { return TakeOrThrow(n, 0); }
void* operator new(std::size_t n, const nothrow_t&) noexcept { return Take(n, 0); }
void* operator new[](std::size_t n, const nothrow_t&) noexcept { return Take(n, 0); }
void* operator new(std::size_t n, align_val_t a) { return TakeOrThrow(n, std::size_t(a)); }
void* operator new[](std::size_t n, align_val_t a) { return TakeOrThrow(n, std::size_t(a)); }
void operator delete(void* p) noexcept { Give(p); }
void operator delete[](void* p) noexcept { Give(p); }
void operator delete(void* p, std::size_t) noexcept { Give(p); }
void operator delete[](void* p, std::size_t) noexcept { Give(p); }
void operator delete(void* p, const nothrow_t&) noexcept { Give(p); }
void operator delete[](void* p, const nothrow_t&) noexcept { Give(p); }
void operator delete(void* p, align_val_t) noexcept { Give(p); }
void operator delete[](void* p, align_val_t) noexcept { Give(p); }
void operator delete(void* p, std::size_t, align_val_t) noexcept { Give(p); }
void operator delete[](void* p, std::size_t, align_val_t) noexcept { Give(p); }
