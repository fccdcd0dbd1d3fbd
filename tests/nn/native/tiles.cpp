/* The products of tiles.h beside their definition, one number at a time: test_tiles.py builds and runs it with "plain"
 * or "amx", the body to look at. Numbers are so far apart that many products and sums are denormal. */
#include "std.h"

#include <cstdio>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define UNPAD_FLOATS 16
#include "tiles.h"

namespace {

constexpr int64_t MOST = 3; /* tiles of an operand in each direction */

float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

float wide(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return flushed(y);
}

/* Of any sign, with exponents from 2^-127, which is denormal, or from 2^-70, up to 2^9. */
uint16_t drawn(uint32_t& state, bool small) {
    state = state * 1664525u + 1013904223u;
    const uint32_t exponent = (state >> 8) % (small ? 137 : 80) + (small ? 0 : 57);
    return (uint16_t)(state >> 31 << 15 | exponent << 7 | (state >> 1 & 0x7f));
}

uint16_t left[16 * MOST][32 * MOST];      /* (row, inner) */
uint16_t right[16 * MOST][16 * MOST * 2]; /* (inner / 2, column) pairs */
float result[16 * MOST][16 * MOST];

/* What each sum should be; `before` is what it starts with. */
float defined(int64_t row, int64_t column, int64_t depth, float before) {
    float sum = flushed(before);
    for (int64_t tile = 0; tile < depth; tile++) {
        float even = 0, odd = 0;
        for (int64_t k = 16 * tile; k < 16 * (tile + 1); k++) {
            even = flushed(std::fma(wide(left[row][2 * k]), wide(right[k][2 * column]), even));
            odd = flushed(std::fma(wide(left[row][2 * k + 1]), wide(right[k][2 * column + 1]), odd));
        }
        sum = flushed(sum + flushed(even + odd));
    }
    return sum;
}

template <class Tiles>
int64_t wrong(int64_t rows, int64_t columns, int64_t depth, bool add, bool small) {
    using namespace unpad;
    uint32_t state = (uint32_t)(rows * 100 + columns * 10 + depth);
    for (auto& row : left)
        for (uint16_t& x : row) x = drawn(state, small);
    for (auto& row : right)
        for (uint16_t& x : row) x = drawn(state, false);
    float before[16 * MOST][16 * MOST];
    for (auto& row : before)
        for (float& x : row) x = std::ldexp(wide(drawn(state, small)), small ? -60 : 0);
    std::memcpy(result, before, sizeof result);
    {
        [[maybe_unused]] const Tiles tiles{};
        multiply_tiles<Tiles>(
            {left, sizeof left[0], 16 * sizeof left[0], 64}, {right, sizeof right[0], 64, 16 * sizeof right[0]},
            {result, sizeof result[0], 16 * sizeof result[0], 64}, rows, columns, depth, add);
    }
    int64_t found = 0;
    for (int64_t row = 0; row < 16 * MOST; row++)
        for (int64_t column = 0; column < 16 * MOST; column++) {
            const bool written = row < 16 * rows && column < 16 * columns;
            const float wanted = !written ? before[row][column]
                                          : defined(row, column, depth, add ? before[row][column] : 0.0f);
            found += std::memcmp(&wanted, &result[row][column], sizeof wanted) != 0;
        }
    return found;
}

template <class Tiles>
int64_t check() {
    int64_t found = 0;
    for (int64_t rows = 1; rows <= MOST; rows++)
        for (int64_t columns = 1; columns <= MOST; columns++)
            for (int64_t depth = 1; depth <= MOST; depth++)
                for (int options = 0; options < 4; options++)
                    found += wrong<Tiles>(rows, columns, depth, options & 1, options & 2);
    return found;
}

}  // namespace

int main(int, char** arguments) {
    const bool amx = !std::strcmp(arguments[1], "amx");
    if (amx && syscall(SYS_arch_prctl, 0x1023, 18)) return 2;
    const int64_t found = amx ? check<unpad::AmxTiles>() : check<unpad::PlainTiles>();
    std::printf("%lld numbers differ\n", (long long)found);
    return found != 0;
}
