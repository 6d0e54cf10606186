// XXH3, in the widest vectors that the processor has where the library chooses at run time (Debian
// and Ubuntu on x86); the plain functions, at a third of the speed, elsewhere. Same values.
#ifndef SPARSEGDN_CLIENT_SRC_XXH_H_
#define SPARSEGDN_CLIENT_SRC_XXH_H_

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#endif  // SPARSEGDN_CLIENT_SRC_XXH_H_
