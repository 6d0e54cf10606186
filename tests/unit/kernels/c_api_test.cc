// The C ABI through libsparsegdn.so: equal results, codes, messages, struct versions.
#include "sparsegdn/c_api.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/kernels/test_pack.h"

extern "C" int sparsegdn_c99_smoke(void);

namespace sparsegdn::test {
namespace {

TEST(CApi, PlainC) { EXPECT_EQ(sparsegdn_c99_smoke(), 0); }

TEST(CApi, Version) {
  EXPECT_EQ(sparsegdn_abi_version(), SPARSEGDN_ABI_VERSION);
  EXPECT_EQ(std::string(sparsegdn_version()).substr(0, 2), "0.");
}

sparsegdn_tensor Tensor(const void* data, int64_t heads, int64_t dim) {
  return {data, SPARSEGDN_F32, 0, heads * dim, dim};
}

struct CCall {
  Pack pack;
  std::vector<float> o, state;
  std::vector<uint8_t> mask;
  std::vector<char> memory;
  sparsegdn_backend* backend = nullptr;
  sparsegdn_forward_args args;

  CCall() {
    pack.Add(500, RetentionBudget(0.29));
    FillRandom(&pack, 71);
    o.resize(pack.v.size());
    state.resize(pack.state_size());
    mask.resize(pack.tokens() * pack.shape.num_k_heads);
    EXPECT_EQ(sparsegdn_create("cpu", 2, &backend), SPARSEGDN_OK);
    const GdnShape& s = pack.shape;
    sparsegdn_forward_args_init(&args, sizeof(args));
    args.shape = {s.num_k_heads, s.num_v_heads, s.head_dim_k, s.head_dim_v};
    args.num_tokens = pack.tokens();
    args.num_seqs = 1;
    args.cu_seqlens = pack.cu_seqlens.data();
    args.sequences = reinterpret_cast<const sparsegdn_sequence*>(pack.sequences.data());
    args.q = Tensor(pack.q.data(), s.num_k_heads, s.head_dim_k);
    args.k = Tensor(pack.k.data(), s.num_k_heads, s.head_dim_k);
    args.v = Tensor(pack.v.data(), s.num_v_heads, s.head_dim_v);
    args.log_gate = Tensor(pack.log_gate.data(), s.num_v_heads, 1);
    args.beta = Tensor(pack.beta.data(), s.num_v_heads, 1);
    args.o = Tensor(o.data(), s.num_v_heads, s.head_dim_v);
    args.final_state = state.data();
    args.final_slots = 1;
    args.mask_out = mask.data();
    sparsegdn_limits limits;
    sparsegdn_limits_init(&limits, sizeof(limits));
    limits.shape = args.shape;
    limits.max_tokens = args.num_tokens;
    limits.max_seqs = 1;
    limits.dtype = SPARSEGDN_F32;
    EXPECT_EQ(sparsegdn_workspace_bytes(backend, &limits, &args.workspace_bytes), SPARSEGDN_OK);
    memory.resize(args.workspace_bytes + 256);
    const auto base = reinterpret_cast<uintptr_t>(memory.data());
    args.workspace = reinterpret_cast<void*>((base + 255) / 256 * 256);
  }
  ~CCall() { sparsegdn_destroy(backend); }
};

TEST(CApi, ForwardEqualsCpp) {
  CCall c;
  int64_t timings[2] = {-1, -1};
  c.args.timings_ns = timings;
  ASSERT_EQ(sparsegdn_forward(c.backend, &c.args, nullptr), SPARSEGDN_OK) << sparsegdn_last_error();
  EXPECT_STREQ(sparsegdn_last_error(), "");
  EXPECT_GT(timings[1], 0);
  const PackResult want = RunPack(TestDevices()[0], c.pack);
  EXPECT_EQ(c.o, want.o);
  EXPECT_EQ(c.state, want.states);
  EXPECT_EQ(c.mask, want.mask);
  std::fill(c.mask.begin(), c.mask.end(), uint8_t{9});
  ASSERT_EQ(sparsegdn_select(c.backend, &c.args, nullptr), SPARSEGDN_OK);
  EXPECT_EQ(c.mask, want.mask);
}

TEST(CApi, SequenceDefaultsAreTheHeader) {
  sparsegdn_sequence s;
  std::memset(&s, 0x55, sizeof(s));
  sparsegdn_sequence_init(&s);
  EXPECT_EQ(s.mode, SPARSEGDN_RETENTION);
  EXPECT_EQ(s.selector, SPARSEGDN_BETA);
  EXPECT_EQ(s.solver, SPARSEGDN_AUTO);
  EXPECT_EQ(s.local, SPARSEGDN_SELF);
  EXPECT_EQ(s.retention, 0.29);
  EXPECT_EQ(s.coverage, 0.9);
  EXPECT_EQ(s.min_retention, -1.0);
  EXPECT_EQ(s.max_retention, -1.0);
  EXPECT_EQ(s.keep_last, 64);
  EXPECT_EQ(s.initial_slot, -1);
  EXPECT_EQ(s.final_slot, -1);
}

TEST(CApi, InitOfNothingDoesNothing) {
  sparsegdn_sequence_init(nullptr);
  sparsegdn_forward_args_init(nullptr, sizeof(sparsegdn_forward_args));
  sparsegdn_limits_init(nullptr, sizeof(sparsegdn_limits));
}

TEST(CApi, ReservedFieldsMustBeZero) {
  CCall c;
  sparsegdn_forward_args& a = c.args;
  const std::pair<const char*, int32_t*> fields[] = {
      {"q.reserved", &a.q.reserved},       {"k.reserved", &a.k.reserved},
      {"v.reserved", &a.v.reserved},       {"log_gate.reserved", &a.log_gate.reserved},
      {"beta.reserved", &a.beta.reserved}, {"o.reserved", &a.o.reserved},
      {"reserved0", &a.reserved0},
  };
  for (const auto& [name, field] : fields) {
    *field = 7;
    EXPECT_EQ(sparsegdn_forward(c.backend, &a, nullptr), SPARSEGDN_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(sparsegdn_last_error()), std::string("args.") + name + " = 7, must be 0");
    EXPECT_EQ(sparsegdn_select(c.backend, &a, nullptr), SPARSEGDN_INVALID_ARGUMENT);
    *field = 0;
  }
  EXPECT_EQ(sparsegdn_forward(c.backend, &a, nullptr), SPARSEGDN_OK) << sparsegdn_last_error();
}

TEST(CApi, CodesAndMessages) {
  CCall c;
  const auto expect = [](sparsegdn_code got, sparsegdn_code want, const char* message) {
    EXPECT_EQ(got, want);
    EXPECT_NE(std::string(sparsegdn_last_error()).find(message), std::string::npos)
        << sparsegdn_last_error();
  };
  sparsegdn_backend* none = c.backend;
  expect(sparsegdn_create("tpu", 0, &none), SPARSEGDN_INVALID_ARGUMENT, "name = \"tpu\"");
  EXPECT_EQ(none, nullptr);
  expect(sparsegdn_create(nullptr, 0, &none), SPARSEGDN_INVALID_ARGUMENT, "name = null");
  expect(sparsegdn_create("cpu", 0, nullptr), SPARSEGDN_INVALID_ARGUMENT, "backend = null");
  expect(sparsegdn_create("cpu", -1, &none), SPARSEGDN_INVALID_ARGUMENT, "num_threads = -1");
  expect(sparsegdn_forward(nullptr, &c.args, nullptr), SPARSEGDN_INVALID_ARGUMENT,
         "backend = null");
  expect(sparsegdn_forward(c.backend, nullptr, nullptr), SPARSEGDN_INVALID_ARGUMENT, "args = null");
  c.args.workspace_bytes -= 1;
  expect(sparsegdn_forward(c.backend, &c.args, nullptr), SPARSEGDN_RESOURCE_EXHAUSTED,
         "workspace_bytes = ");
  c.args.workspace_bytes += 1;
  c.args.shape.num_v_heads = 3;
  expect(sparsegdn_forward(c.backend, &c.args, nullptr), SPARSEGDN_INVALID_ARGUMENT,
         "shape.num_v_heads = 3");
  sparsegdn_destroy(nullptr);
}

TEST(CApi, StructSizes) {
  CCall c;
  for (const size_t size : {size_t{0}, sizeof(c.args) - 8, sizeof(c.args) + 8}) {
    c.args.struct_size = size;
    EXPECT_EQ(sparsegdn_forward(c.backend, &c.args, nullptr), SPARSEGDN_INVALID_ARGUMENT) << size;
    EXPECT_NE(std::string(sparsegdn_last_error()).find("args.struct_size = "), std::string::npos);
  }
  // A caller with a smaller struct gets no more than that written.
  unsigned char small[64];
  std::memset(small, 0xab, sizeof(small));
  sparsegdn_forward_args_init(reinterpret_cast<sparsegdn_forward_args*>(small), 32);
  EXPECT_EQ(small[31], 0);
  EXPECT_EQ(small[32], 0xab);
}

TEST(CApi, ErrorsBelongToTheirThread) {
  sparsegdn_backend* none = nullptr;
  sparsegdn_create("tpu", 0, &none);
  std::thread([] { EXPECT_STREQ(sparsegdn_last_error(), ""); }).join();
  EXPECT_NE(std::string(sparsegdn_last_error()), "");
}

}  // namespace
}  // namespace sparsegdn::test
