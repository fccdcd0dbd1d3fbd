/* Choice of a target at run time. Compiled without the instructions it asks about. */
#include "kernels.h"

#include <cstring>

extern "C" {

const unpad_kernels* unpad_kernels_plain();
#ifdef __x86_64__
const unpad_kernels* unpad_kernels_avx2();
const unpad_kernels* unpad_kernels_avx512();
const unpad_kernels* unpad_kernels_avx512_bf16();
#endif

int unpad_interface(void) { return UNPAD_INTERFACE; }

const unpad_kernels* unpad_kernels_for(const char* target) {
    if (!std::strcmp(target, "plain")) return unpad_kernels_plain();
#ifdef __x86_64__
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!std::strcmp(target, "avx2")) return avx2 ? unpad_kernels_avx2() : nullptr;
    if (!std::strcmp(target, "avx512")) return avx512 ? unpad_kernels_avx512() : nullptr;
    if (!std::strcmp(target, "avx512_bf16"))
        return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")
                   ? unpad_kernels_avx512_bf16()
                   : nullptr;
#endif
    return nullptr;
}
}
