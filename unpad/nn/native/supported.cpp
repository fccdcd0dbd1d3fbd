/* Compiled without the instructions it asks about. */
#include "kernels.h"

extern "C" int unpad_interface(void) { return UNPAD_INTERFACE; }

extern "C" int unpad_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
}
