/* C ABI of the kernel library, libsparsegdn.so. C99.
 *
 * The same call as sparsegdn/gdn.h, which defines the mathematics; this header defines layouts.
 * Every struct that may grow starts with struct_size: set it to sizeof the struct you compiled
 * against, which the *_init functions take as an argument. Fields past it take their defaults, so
 * that an older caller runs on a newer library; a struct_size larger than the library knows is
 * SPARSEGDN_INVALID_ARGUMENT.
 *
 * Pointers inside a call are the backend's own memory: host for "cpu", device for "cuda".
 * Thread-compatible: one call at a time on one backend. No function throws.
 */
#ifndef SPARSEGDN_C_API_H_
#define SPARSEGDN_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SPARSEGDN_EXPORT __attribute__((visibility("default")))
#else
#define SPARSEGDN_EXPORT
#endif

/* Raised when a function or a struct's leading fields change meaning. */
#define SPARSEGDN_ABI_VERSION 1

/* Codes of every function; the values of the matching absl and gRPC codes. */
typedef enum sparsegdn_code {
  SPARSEGDN_OK = 0,
  SPARSEGDN_INVALID_ARGUMENT = 3,
  SPARSEGDN_RESOURCE_EXHAUSTED = 8,
  SPARSEGDN_FAILED_PRECONDITION = 9,
  SPARSEGDN_UNIMPLEMENTED = 12,
  SPARSEGDN_INTERNAL = 13
} sparsegdn_code;

enum { SPARSEGDN_F32 = 0, SPARSEGDN_BF16 = 1, SPARSEGDN_F16 = 2 };
enum { SPARSEGDN_DENSE = 0, SPARSEGDN_RETENTION = 1, SPARSEGDN_COVERAGE = 2 };
enum { SPARSEGDN_BETA = 0, SPARSEGDN_WRITE_NORM = 1 };
enum { SPARSEGDN_AUTO = 0, SPARSEGDN_EXACT = 1, SPARSEGDN_BLOCK_ADJACENT = 2 };
enum { SPARSEGDN_SELF = 0, SPARSEGDN_NONE = 1 };
enum { SPARSEGDN_KEY_MAJOR = 0, SPARSEGDN_VALUE_MAJOR = 1 };

/* [tokens, heads, dim], unit stride in dim, strides in elements. */
typedef struct sparsegdn_tensor {
  const void* data;
  int32_t dtype;
  int32_t reserved; /* must be 0 */
  int64_t token_stride;
  int64_t head_stride;
} sparsegdn_tensor;

typedef struct sparsegdn_shape {
  int32_t num_k_heads;
  int32_t num_v_heads; /* 1, 2, 3 or 4 times num_k_heads */
  int32_t head_dim_k;  /* 1 .. 256 */
  int32_t head_dim_v;  /* 1 .. 256 */
} sparsegdn_shape;

/* One sequence of a pack. Of fixed layout, because arrays of it live in device memory: the layout
 * of sparsegdn::SequenceParams. Start from sparsegdn_sequence_init. */
typedef struct sparsegdn_sequence {
  int64_t first_position; /* absolute position of the first token */
  int64_t prompt_tokens;  /* full length of the request */
  int32_t mode;           /* SPARSEGDN_RETENTION */
  int32_t selector;       /* SPARSEGDN_BETA */
  int32_t solver;         /* SPARSEGDN_AUTO */
  int32_t local;          /* SPARSEGDN_SELF */
  double retention;       /* 0.29; (0, 1] */
  double coverage;        /* 0.9; (0, 1] */
  double min_retention;   /* -1: the mode's default */
  double max_retention;   /* -1: the mode's default */
  int64_t keep_first;     /* 0 */
  int64_t keep_last;      /* 64 */
  int64_t snapshot_every; /* 0: none */
  int64_t snapshot_index;
  int32_t initial_slot; /* -1: from zeros */
  int32_t final_slot;   /* -1: dropped */
} sparsegdn_sequence;

/* A call. Zero-initialise through sparsegdn_forward_args_init. Shapes as in sparsegdn/gdn.h. */
typedef struct sparsegdn_forward_args {
  size_t struct_size;
  sparsegdn_shape shape;
  int64_t num_tokens;
  int32_t num_seqs;
  int32_t normalize_qk;                /* nonzero: q and k are L2-normalised first */
  const int32_t* cu_seqlens;           /* [num_seqs + 1] */
  const sparsegdn_sequence* sequences; /* [num_seqs] */
  sparsegdn_tensor q, k, v;            /* of one dtype */
  sparsegdn_tensor log_gate, beta;     /* F32 or BF16; head_dim 1 */
  sparsegdn_tensor o;                  /* written, whatever the const says */
  float scale;                         /* 0: head_dim_k ^ -1/2 */
  int32_t reserved0;                   /* must be 0 */
  const float* initial_state;          /* [initial_slots, Hv, Dk, Dv], or [.., Dv, Dk] */
  float* final_state;                  /* [final_slots, ...]; may equal initial_state */
  int32_t initial_slots, final_slots;
  int32_t initial_layout, final_layout; /* SPARSEGDN_KEY_MAJOR */
  const uint8_t* mask;                  /* [num_tokens, Hk] or null: select */
  uint8_t* mask_out;                    /* [num_tokens, Hk] or null */
  int32_t* selected;                    /* [num_seqs, Hk] or null */
  float* snapshots;                     /* [snapshot_slots, ...] in final_layout, or null */
  int64_t snapshot_slots;
  int32_t* nonfinite; /* [num_seqs] or null */
  uint32_t* status;   /* one word or null */
  void* workspace;    /* 256-byte aligned */
  size_t workspace_bytes;
  int64_t* timings_ns; /* host, [2]: selection, core; "cpu" only; or null */
} sparsegdn_forward_args;

/* Bounds from which a workspace is sized. */
typedef struct sparsegdn_limits {
  size_t struct_size;
  sparsegdn_shape shape;
  int64_t max_tokens;
  int32_t max_seqs;
  int32_t dtype;        /* of q, k, v */
  double max_retention; /* 1 */
} sparsegdn_limits;

typedef struct sparsegdn_backend sparsegdn_backend;

/* SPARSEGDN_ABI_VERSION of the library, and its version as text. */
SPARSEGDN_EXPORT int32_t sparsegdn_abi_version(void);
SPARSEGDN_EXPORT const char* sparsegdn_version(void);

/* Message of the last error on this thread, naming field, got and wanted; "" after a success. */
SPARSEGDN_EXPORT const char* sparsegdn_last_error(void);

/* Of each init function: null is allowed, and nothing happens. */
SPARSEGDN_EXPORT void sparsegdn_sequence_init(sparsegdn_sequence* sequence);
/* struct_size: sizeof(*args), sizeof(*limits). No more than that is written. */
SPARSEGDN_EXPORT void sparsegdn_forward_args_init(sparsegdn_forward_args* args, size_t struct_size);
SPARSEGDN_EXPORT void sparsegdn_limits_init(sparsegdn_limits* limits, size_t struct_size);

/* name "cpu" (device: number of threads, 0 for the cores this process may use) or "cuda" (device:
 * its index). UNIMPLEMENTED in a build without CUDA. *backend is null on error. */
SPARSEGDN_EXPORT sparsegdn_code sparsegdn_create(const char* name, int32_t device,
                                                 sparsegdn_backend** backend);
/* Null is allowed. */
SPARSEGDN_EXPORT void sparsegdn_destroy(sparsegdn_backend* backend);

SPARSEGDN_EXPORT sparsegdn_code sparsegdn_workspace_bytes(const sparsegdn_backend* backend,
                                                          const sparsegdn_limits* limits,
                                                          size_t* bytes);

/* stream: a cudaStream_t for "cuda", ignored by "cpu". */
SPARSEGDN_EXPORT sparsegdn_code sparsegdn_forward(sparsegdn_backend* backend,
                                                  const sparsegdn_forward_args* args, void* stream);
/* Selection alone: reads beta (and v for WRITE_NORM), writes mask_out and selected. */
SPARSEGDN_EXPORT sparsegdn_code sparsegdn_select(sparsegdn_backend* backend,
                                                 const sparsegdn_forward_args* args, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SPARSEGDN_C_API_H_ */
