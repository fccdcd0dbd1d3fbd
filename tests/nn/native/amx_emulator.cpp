/* Runs the instructions of AMX that tiles.h has on a processor without them, one number at a time, as Intel's manual of
 * instructions defines them: a handler of SIGILL decodes the instruction, does its work and goes on behind it.
 *
 * Ends the process where tiles are used that were not configured, and where another instruction is unknown.
 * `unreleased_tiles` counts threads whose tiles are configured and not released.
 */
#include <cfloat>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <atomic>
#include <ucontext.h>

namespace {

struct Tiles {
    bool configured;
    uint8_t bytes[8][16][64];
};

/* A pointer, since little room is left for variables of threads in a library that is loaded late. */
__attribute__((tls_model("initial-exec"))) thread_local Tiles* own = nullptr;
std::atomic<int> configured{0};

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "AMX: %s\n", what);
    std::_Exit(3);
}

Tiles& tiles() {
    if (!own) own = (Tiles*)std::calloc(1, sizeof(Tiles));
    return *own;
}

float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

/* Numbers of a tile of bf16, [row][even or odd][pair]. */
struct Wide {
    float rows[16][2][16];
    explicit Wide(const uint8_t (&bytes)[16][64]) {
        for (int row = 0; row < 16; row++)
            for (int i = 0; i < 32; i++) {
                const uint32_t bits = (uint32_t)bytes[row][2 * i] << 16 | (uint32_t)bytes[row][2 * i + 1] << 24;
                float x;
                std::memcpy(&x, &bits, sizeof x);
                rows[row][i % 2][i / 2] = flushed(x);
            }
    }
};

/* sums += left times right, as TDPBF16PS. */
void multiply(uint8_t (&sums)[16][64], const uint8_t (&left)[16][64], const uint8_t (&right)[16][64]) {
    const Wide a(left), b(right);
    for (int m = 0; m < 16; m++) {
        float parts[2][16] = {}, sum[16];
        for (int k = 0; k < 16; k++)
            for (int odd = 0; odd < 2; odd++)
                for (int n = 0; n < 16; n++)
                    parts[odd][n] = flushed(std::fma(a.rows[m][odd][k], b.rows[k][odd][n], parts[odd][n]));
        std::memcpy(sum, sums[m], sizeof sum);
        for (int n = 0; n < 16; n++) sum[n] = flushed(flushed(sum[n]) + flushed(parts[0][n] + parts[1][n]));
        std::memcpy(sums[m], sum, sizeof sum);
    }
}

struct Operand {
    int64_t base, step; /* address of the first row, and from row to row */
    const uint8_t* next;
};

/* The operand in memory that ModRM at `code` begins. */
Operand memory(const uint8_t* code, bool x, bool b, const greg_t* registers) {
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const auto value = [&](int number) { return (int64_t)registers[order[number]]; };
    const int mod = *code >> 6, rm = *code & 7;
    code++;
    int64_t base = 0, step = 0;
    bool relative = false, no_base = false;
    if (rm == 4) {
        const int scale = *code >> 6, index = (*code >> 3 & 7) + 8 * x, number = (*code & 7) + 8 * b;
        no_base = mod == 0 && (*code & 7) == 5;
        if (index != 4) step = value(index) << scale;
        if (!no_base) base = value(number);
        code++;
    } else if (mod == 0 && rm == 5)
        relative = true;
    else
        base = value(rm + 8 * b);
    int32_t offset = 0;
    if (mod == 2 || relative || no_base) std::memcpy(&offset, code, 4), code += 4;
    if (mod == 1) offset = (int8_t)*code++;
    return {base + offset + (relative ? (int64_t)code : 0), step, code};
}

void emulate(int, siginfo_t*, void* context) {
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const uint8_t* code = (const uint8_t*)registers[REG_RIP];
    if (code[0] != 0xc4 || (code[1] & 0x9f) != 0x82 || code[2] & 0x84) fail("an unknown instruction");
    const bool x = !(code[1] & 0x40), b = !(code[1] & 0x20);
    const int prefix = code[2] & 3, third = ~code[2] >> 3 & 7, operation = code[3];
    const uint8_t* modrm = code + 4;
    const bool in_memory = *modrm < 0xc0;
    const int first = *modrm >> 3 & 7, second = *modrm & 7;
    enum { NONE = 0, F3 = 2, F2 = 3 };
    const uint8_t* next = modrm + 1;
    Tiles& t = tiles();
    if (operation == 0x49 && prefix == NONE && in_memory) { /* ldtilecfg */
        static const uint8_t wanted[64] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0,
                                           64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                           0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};
        const Operand from = memory(modrm, x, b, registers);
        if (std::memcmp((const void*)from.base, wanted, 64)) fail("a configuration other than eight whole tiles");
        configured += !t.configured;
        t.configured = true;
        std::memset(t.bytes, 0, sizeof t.bytes);
        next = from.next;
    } else if (operation == 0x49 && prefix == NONE) { /* tilerelease */
        configured -= t.configured;
        t.configured = false;
    } else if (!t.configured)
        fail("tiles that are not configured");
    else if (operation == 0x49 && prefix == F2) /* tilezero */
        std::memset(t.bytes[first], 0, sizeof t.bytes[first]);
    else if (operation == 0x4b && prefix == F2) { /* tileloadd */
        const Operand from = memory(modrm, x, b, registers);
        for (int row = 0; row < 16; row++) std::memcpy(t.bytes[first][row], (void*)(from.base + row * from.step), 64);
        next = from.next;
    } else if (operation == 0x4b && prefix == F3) { /* tilestored */
        const Operand to = memory(modrm, x, b, registers);
        for (int row = 0; row < 16; row++) std::memcpy((void*)(to.base + row * to.step), t.bytes[first][row], 64);
        next = to.next;
    } else if (operation == 0x5c && prefix == F3) /* tdpbf16ps */
        multiply(t.bytes[first], t.bytes[second], t.bytes[third]);
    else
        fail("an unknown instruction");
    registers[REG_RIP] = (greg_t)next;
}

}  // namespace

extern "C" void emulate_amx() {
    struct sigaction action{};
    action.sa_sigaction = emulate;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}

extern "C" int unreleased_tiles() { return configured; }
