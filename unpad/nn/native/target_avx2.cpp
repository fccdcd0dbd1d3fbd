/* x86-64 with AVX2 and FMA. */
#include "std.h"

#ifdef __x86_64__
#pragma GCC target("avx2,fma")
#define UNPAD_FLOATS 8
#include "all.h"

extern "C" const unpad_kernels* unpad_kernels_avx2() { return &unpad::table; }
#endif
