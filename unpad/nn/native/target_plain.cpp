/* Any processor: vectors of four floats, which the compiler maps to what its baseline has (SSE2, NEON). */
#include "std.h"

#define UNPAD_FLOATS 4
#include "all.h"

extern "C" const unpad_kernels* unpad_kernels_plain() { return &unpad::table; }
