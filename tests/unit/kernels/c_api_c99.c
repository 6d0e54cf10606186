/* Compiled as C99 with -Wpedantic: the header must be plain C, and its constants usable there. */
#include "sparsegdn/c_api.h"

int sparsegdn_c99_smoke(void);

int sparsegdn_c99_smoke(void) {
  sparsegdn_backend* backend = NULL;
  sparsegdn_forward_args args;
  sparsegdn_sequence sequence;
  sparsegdn_code code;
  sparsegdn_forward_args_init(&args, sizeof(args));
  sparsegdn_sequence_init(&sequence);
  if (args.struct_size != sizeof(args)) return 1;
  if (sequence.mode != SPARSEGDN_RETENTION || sequence.keep_last != 64) return 2;
  if (sparsegdn_create("cpu", 1, &backend) != SPARSEGDN_OK) return 3;
  code = sparsegdn_forward(backend, &args, NULL);
  sparsegdn_destroy(backend);
  return code == SPARSEGDN_INVALID_ARGUMENT ? 0 : 4;
}
