/* x86-64 with AVX-512 BF16; all that have it have AVX-512 VNNI. */
#include "std.h"

#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")
#define UNPAD_FLOATS 16
#define UNPAD_HAS_BF16
#define UNPAD_HAS_VNNI
#include "all.h"

extern "C" const unpad_kernels* unpad_kernels_avx512_bf16() { return &unpad::table; }
#endif
