// Stands before the real libcublasLt.so.13 and passes every call on, until the file named by
// BAD_CUBLASLT_TRIGGER exists: from then on products are written through a bad pointer, a fault that
// no later call on the device survives. For tests/fault/gpu_faults.py.
//
//   g++ -shared -fPIC -I CUDA/include bad_cublaslt.cc -o libcublasLt.so.13 -ldl
#include <cublasLt.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

namespace {

void* Real() {
  static void* handle = [] {
    // By full path, since this file bears the name: BAD_CUBLASLT_REAL.
    const char* path = getenv("BAD_CUBLASLT_REAL");
    void* h = dlopen(path == nullptr ? "libcublasLt.so.12" : path, RTLD_NOW | RTLD_LOCAL);
    if (h == nullptr) abort();
    return h;
  }();
  return handle;
}

bool Triggered() {
  static const char* path = getenv("BAD_CUBLASLT_TRIGGER");
  return path != nullptr && access(path, F_OK) == 0;
}

template <typename F>
F Find(const char* name) {
  return reinterpret_cast<F>(dlsym(Real(), name));
}

}  // namespace

#define PASS(name, parameters, arguments)                            \
  extern "C" cublasStatus_t name parameters {                        \
    static const auto real = Find<decltype(&name)>(#name);           \
    return real arguments;                                           \
  }

PASS(cublasLtCreate, (cublasLtHandle_t * h), (h))
PASS(cublasLtDestroy, (cublasLtHandle_t h), (h))
PASS(cublasLtMatmulAlgoGetHeuristic,
     (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
      cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
      cublasLtMatmulPreference_t p, int n, cublasLtMatmulHeuristicResult_t* r, int* found),
     (h, d, a, b, c, e, p, n, r, found))
PASS(cublasLtMatmulAlgoCheck,
     (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
      cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
      const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* r),
     (h, d, a, b, c, e, algo, r))
PASS(cublasLtMatmulDescCreate,
     (cublasLtMatmulDesc_t * d, cublasComputeType_t c, cudaDataType_t s), (d, c, s))
PASS(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t d), (d))
PASS(cublasLtMatmulDescSetAttribute,
     (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void* v, size_t n),
     (d, a, v, n))
PASS(cublasLtMatrixLayoutCreate,
     (cublasLtMatrixLayout_t * l, cudaDataType t, uint64_t r, uint64_t c, int64_t ld),
     (l, t, r, c, ld))
PASS(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t l), (l))
PASS(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * p), (p))
PASS(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t p), (p))
PASS(cublasLtMatmulPreferenceSetAttribute,
     (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void* v, size_t n),
     (p, a, v, n))

extern "C" cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void* alpha, const void* a,
    cublasLtMatrixLayout_t la, const void* b, cublasLtMatrixLayout_t lb, const void* beta,
    const void* c, cublasLtMatrixLayout_t lc, void* y, cublasLtMatrixLayout_t ly,
    const cublasLtMatmulAlgo_t* algo, void* workspace, size_t bytes, cudaStream_t stream) {
  static const auto real = Find<decltype(&cublasLtMatmul)>("cublasLtMatmul");
  if (Triggered()) y = reinterpret_cast<void*>(uintptr_t{1} << 46);
  return real(h, d, alpha, a, la, b, lb, beta, c, lc, y, ly, algo, workspace, bytes, stream);
}
