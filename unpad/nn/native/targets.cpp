/* Choice of a target at run time. Compiled without the instructions it asks about. */
#include "kernels.h"

#include <cstring>

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

const unpad_kernels* unpad_kernels_plain();
#ifdef __x86_64__
const unpad_kernels* unpad_kernels_avx2();
const unpad_kernels* unpad_kernels_avx512();
const unpad_kernels* unpad_kernels_avx512_bf16();
const unpad_kernels* unpad_kernels_avx512_amx();
const unpad_kernels* unpad_kernels_plain_tiles();
#endif

int unpad_interface(void) { return UNPAD_INTERFACE; }

/* Not by __builtin_cpu_supports, which knows these names since gcc 11, and asks the system too. */
int unpad_has_tiles(void) {
#ifdef __x86_64__
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1); /* amx_bf16, amx_tile */
#else
    return 0;
#endif
}

int unpad_grants_tiles(void) {
#ifdef __x86_64__
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18; /* of asm/prctl.h of newer systems */
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return granted;
#else
    return 0;
#endif
}

const unpad_kernels* unpad_kernels_for(const char* target) {
    if (!std::strcmp(target, "plain")) return unpad_kernels_plain();
#ifdef __x86_64__
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!std::strcmp(target, "avx2")) return avx2 ? unpad_kernels_avx2() : nullptr;
    if (!std::strcmp(target, "avx512")) return avx512 ? unpad_kernels_avx512() : nullptr;
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (!std::strcmp(target, "avx512_bf16")) return bf16 ? unpad_kernels_avx512_bf16() : nullptr;
    if (!std::strcmp(target, "avx512_amx"))
        return bf16 && unpad_has_tiles() && unpad_grants_tiles() ? unpad_kernels_avx512_amx() : nullptr;
    if (!std::strcmp(target, "plain_tiles")) return bf16 ? unpad_kernels_plain_tiles() : nullptr;
#endif
    return nullptr;
}
}
