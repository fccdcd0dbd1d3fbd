/* x86-64 with AVX-512. */
#include "std.h"

#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define UNPAD_FLOATS 16
#include "all.h"

extern "C" const unpad_kernels* unpad_kernels_avx512() { return &unpad::table; }
#endif
