// One contiguous pack of more than 2^31 elements of v and of o. Takes 10 GB, so that it is a
// program of its own, which ctest runs under the label `long`.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/common/float_convert.h"
#include "tests/unit/kernels/test_device.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

constexpr GdnShape kShape{8, 32, 64, 128};
constexpr int64_t kLength = 8256;  // four windows and one group more
constexpr int32_t kSeqs = 65;
constexpr int64_t kTokens = kSeqs * kLength;
constexpr int64_t kKeyRow = int64_t{kShape.num_k_heads} * kShape.head_dim_k;
constexpr int64_t kValueRow = int64_t{kShape.num_v_heads} * kShape.head_dim_v;
constexpr int64_t kStateSize = int64_t{kShape.num_v_heads} * kShape.head_dim_k * kShape.head_dim_v;
static_assert(kTokens > 524288 && (kTokens - kLength) * kValueRow > int64_t{1} << 31,
              "the whole last sequence must lie past 2^31 elements");

// Pages that are only committed when they are written; `data` is null if the space is refused.
template <typename T>
struct Pages {
  explicit Pages(int64_t n) : count(n) {
    void* p = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data = p == MAP_FAILED ? nullptr : static_cast<T*>(p);
  }
  ~Pages() {
    if (data != nullptr) munmap(data, bytes());
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  size_t bytes() const { return static_cast<size_t>(count) * sizeof(T); }

  int64_t count;
  T* data;
};

// Memory that can be had without pushing others out, or -1 where the system does not say.
int64_t AvailableBytes() {
  std::ifstream info("/proc/meminfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("MemAvailable:", 0) == 0) return std::stoll(line.substr(13)) * 1024;
  }
  return -1;
}

// Values in [low, low + range) from a counter: a generator with state would take minutes.
float Value(uint64_t index, uint64_t seed, float low, float range) {
  uint64_t x = (index + seed * 0x632be59bd9b4e019u) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  return low + range * static_cast<float>(x >> 40) * 0x1p-24f;
}

void Fill(Pages<uint16_t>* x, uint64_t seed) {
  for (int64_t i = 0; i < x->count; ++i) {
    x->data[i] = FloatToBf16(Value(static_cast<uint64_t>(i), seed, -1.0f, 2.0f));
  }
}

void Fill(Pages<float>* x, uint64_t seed, float low, float range) {
  for (int64_t i = 0; i < x->count; ++i) {
    x->data[i] = Value(static_cast<uint64_t>(i), seed, low, range);
  }
}

struct Inputs {
  Pages<uint16_t> q{kTokens * kKeyRow}, k{kTokens * kKeyRow}, v{kTokens * kValueRow};
  Pages<float> log_gate{kTokens * kShape.num_v_heads}, beta{kTokens * kShape.num_v_heads};

  bool ok() const { return q.data && k.data && v.data && log_gate.data && beta.data; }
  void FillAll() {
    Fill(&q, 1);
    Fill(&k, 2);
    Fill(&v, 3);
    Fill(&log_gate, 4, -0.1f, 0.1f);
    Fill(&beta, 5, 0.0f, 1.0f);
  }
};

// `tokens` rows of the inputs from row `first` on; everything else is the caller's.
GdnForwardArgs ArgsFor(const Inputs& in, int64_t first, int64_t tokens, uint16_t* o) {
  GdnForwardArgs a;
  a.shape = kShape;
  a.num_tokens = tokens;
  const int64_t gate_at = first * kShape.num_v_heads;
  a.q = {in.q.data + first * kKeyRow, DType::kBF16, kKeyRow, kShape.head_dim_k};
  a.k = {in.k.data + first * kKeyRow, DType::kBF16, kKeyRow, kShape.head_dim_k};
  a.v = {in.v.data + first * kValueRow, DType::kBF16, kValueRow, kShape.head_dim_v};
  a.log_gate = {in.log_gate.data + gate_at, DType::kF32, kShape.num_v_heads, 1};
  a.beta = {in.beta.data + gate_at, DType::kF32, kShape.num_v_heads, 1};
  a.normalize_qk = true;  // or the states would grow without bound
  a.o = {o, DType::kBF16, kValueRow, kShape.head_dim_v};
  return a;
}

// Mostly sparse, which is quicker; the first and the last sequence of eight are dense.
std::vector<SequenceParams> Sequences() {
  std::vector<SequenceParams> out(kSeqs);
  for (int32_t i = 0; i < kSeqs; ++i) {
    out[i].prompt_tokens = kLength;
    out[i].budget = i % 8 == 0 || i % 8 == 7 ? DenseBudget() : RetentionBudget(0.1);
    out[i].final_slot = i;
  }
  return out;
}

TEST(LargePack, EqualsItsSequencesOneByOne) {
  Inputs in;
  Pages<uint16_t> packed(kTokens * kValueRow);
  auto backend = CreateCpuBackend({});
  ASSERT_TRUE(backend.ok());
  const size_t workspace_bytes =
      *(*backend)->WorkspaceBytes({kShape, kTokens, kSeqs, 1.0, DType::kBF16});
  const int64_t need =
      static_cast<int64_t>(in.q.bytes() + in.k.bytes() + in.v.bytes() + in.log_gate.bytes() +
                           in.beta.bytes() + packed.bytes() + workspace_bytes) +
      (int64_t{1} << 30);
  const int64_t available = AvailableBytes();
  if (available < need || !in.ok() || packed.data == nullptr) {
    GTEST_SKIP() << "needs " << (need >> 20) << " MiB of memory, available are "
                 << (available >> 20) << " MiB";
  }
  in.FillAll();

  std::vector<SequenceParams> sequences = Sequences();
  std::vector<int32_t> cu(kSeqs + 1);
  for (int32_t i = 0; i <= kSeqs; ++i) cu[i] = static_cast<int32_t>(i * kLength);
  std::vector<float> states(kSeqs * kStateSize), state(kStateSize);
  DeviceBuffer workspace(TestDevices()[0], workspace_bytes);
  const auto run = [&](GdnForwardArgs a, int32_t seqs, const SequenceParams* params, float* pool) {
    a.num_seqs = seqs;
    a.cu_seqlens = cu.data();
    a.sequences = params;
    a.final_state = {pool, seqs, StateLayout::kKeyMajor};
    a.workspace = workspace.data();
    a.workspace_bytes = workspace_bytes;
    return (*backend)->Forward(a, nullptr);
  };
  absl::Status s =
      run(ArgsFor(in, 0, kTokens, packed.data), kSeqs, sequences.data(), states.data());
  ASSERT_TRUE(s.ok()) << s;

  std::vector<uint16_t> alone(kLength * kValueRow);
  for (int32_t i = 0; i < kSeqs; ++i) {
    SequenceParams params = sequences[i];
    params.final_slot = 0;
    std::fill(alone.begin(), alone.end(), uint16_t{0xffff});
    s = run(ArgsFor(in, i * kLength, kLength, alone.data()), 1, &params, state.data());
    ASSERT_TRUE(s.ok()) << s;
    const uint16_t* part = packed.data + i * kLength * kValueRow;
    EXPECT_EQ(0, std::memcmp(part, alone.data(), alone.size() * sizeof(uint16_t))) << "o of " << i;
    EXPECT_TRUE(std::all_of(state.begin(), state.end(), [](float x) { return std::isfinite(x); }));
    EXPECT_EQ(
        0, std::memcmp(states.data() + i * kStateSize, state.data(), state.size() * sizeof(float)))
        << "state of " << i;
  }
}

}  // namespace
}  // namespace sparsegdn::test
