/* Vector types of the kernels, which are templates over them.
 *
 * `Fp32` is as wide as the target's registers, written with the compiler's vector extensions; `Double` is one
 * number, so that the proof runs in double the code that trains in float. bf16.h adds `Bf16` where the processor
 * multiplies it. A type gives `Element`, a number in memory, and `Wide`, what sums are kept in. Vec has + - * /.
 *
 * Included once per target (target_*.cpp), after the target's instructions are switched on; everything is in a
 * namespace without a name, so that the linker does not mix targets.
 */
#ifndef UNPAD_SIMD_H
#define UNPAD_SIMD_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Bodies of loops that are called from two places; uninlined, their sums would live in memory. */
#define UNPAD_INLINE __attribute__((always_inline))

namespace unpad {
namespace {

/* Bits that determine what dropout keeps: the finaliser of MurmurHash3. nn/draws.py computes the same in torch. */
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

/* One stream of bits per row, from which `Vec keep` draws for the columns of this row. */
inline uint32_t dropout_row(uint64_t seed, uint64_t row) {
    uint32_t low = mix((uint32_t)seed ^ mix((uint32_t)row));
    return mix(low ^ (uint32_t)(seed >> 32) ^ (uint32_t)(row >> 32));
}

/* Column c of a row stays when mix(row bits ^ c * 0x9e3779b9) is not below this. */
inline uint32_t dropout_threshold(double dropout) { return (uint32_t)(dropout * 4294967296.0); }

/* The mask of a whole vector: a type, so that whole vectors are loaded and stored without one. */
struct Whole {};

/* The target's file says how many floats a register has: g++ before 13 does not tell the preprocessor of the
 * instructions that `#pragma GCC target` switches on. */
#ifndef UNPAD_FLOATS
#error "define UNPAD_FLOATS, the floats of a register of the target, before this file is included"
#endif
#if UNPAD_FLOATS == 16 || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true; /* 32, not 16 */
#else
constexpr bool MANY_REGISTERS = false;
#endif

struct Fp32 {
    using Element = float;
    using Wide = float;
    typedef float Vec __attribute__((vector_size(4 * UNPAD_FLOATS)));
    typedef int32_t Mask __attribute__((vector_size(4 * UNPAD_FLOATS))); /* -1 where set */
    typedef uint32_t Bits __attribute__((vector_size(4 * UNPAD_FLOATS)));
    static constexpr int lanes = UNPAD_FLOATS;

    static Mask lane_numbers() {
        Mask lane;
        for (int i = 0; i < lanes; ++i) lane[i] = i;
        return lane;
    }
    static Mask first(int64_t n) { return lane_numbers() < (int32_t)(n < lanes ? n : lanes); }
    static Vec set(float x) { return x - Vec{}; }
    static Vec load(const float* p) {
        Vec v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static Vec load(const float* p, Whole) { return load(p); }
    static Vec load(const float* p, Mask m) {
#if UNPAD_FLOATS == 16
        return _mm512_maskz_loadu_ps(_mm512_test_epi32_mask((__m512i)m, (__m512i)m), p);
#elif UNPAD_FLOATS == 8
        return _mm256_maskload_ps(p, (__m256i)m);
#else
        Vec v = {};
        for (int i = 0; i < lanes; ++i)
            if (m[i]) v[i] = p[i];
        return v;
#endif
    }
    static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
    static void store(float* p, Vec v, Whole) { store(p, v); }
    static void store(float* p, Vec v, Mask m) {
#if UNPAD_FLOATS == 16
        _mm512_mask_storeu_ps(p, _mm512_test_epi32_mask((__m512i)m, (__m512i)m), v);
#elif UNPAD_FLOATS == 8
        _mm256_maskstore_ps(p, (__m256i)m, v);
#else
        for (int i = 0; i < lanes; ++i)
            if (m[i]) p[i] = v[i];
#endif
    }
    static Vec fma(Vec a, Vec b, Vec c) {
#if UNPAD_FLOATS == 16
        return _mm512_fmadd_ps(a, b, c);
#elif UNPAD_FLOATS == 8
        return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
        return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
        return a * b + c;
#endif
    }
    /* The second operand where either is NaN: a NaN in b survives. */
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }
    static Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
    static Vec select(Whole, Vec yes, Vec) { return yes; }
    static Mask above(Vec a, Vec b) { return a > b; }
    /* Which of columns c to c + lanes - 1 are below `limit`. */
    static Mask below(int64_t column, int32_t limit) { return lane_numbers() + (int32_t)column < limit; }
    static float sum(Vec v) {
        for (int n = lanes / 2; n; n /= 2)
            for (int i = 0; i < n; ++i) v[i] += v[i + n];
        return v[0];
    }
    static float largest(Vec v) {
        float most = v[0];
        for (int i = 1; i < lanes; ++i) most = most > v[i] ? most : v[i];
        return most;
    }

    /* 2^x for |x| <= 1/2; coefficients ln(2)^k / k!. */
    static Vec exp2_near_0(Vec x) {
        Vec r = set(1.5403530e-4f);
        r = fma(r, x, set(1.3333558e-3f));
        r = fma(r, x, set(9.6181291e-3f));
        r = fma(r, x, set(5.5504109e-2f));
        r = fma(r, x, set(2.4022651e-1f));
        r = fma(r, x, set(6.9314718e-1f));
        return fma(r, x, set(1.0f));
    }

    /* 2^x to 2e-7 relative; NaN stays NaN, anything below -126 gives 0 or close to it, 128 and above infinity. */
    static Vec exp2(Vec x) {
        const Vec high = set(128), low = set(-126.9f), magic = set(12582912.0f); /* 1.5 * 2^23 */
        x = x > high ? high : x;
        x = low > x ? low : x;
        const Vec shifted = x + magic; /* its low bits are the nearest whole number */
        const Vec r = exp2_near_0(x - (shifted - magic));
        const Vec scaled = (Vec)((Bits)r + ((Bits)shifted << 23));
        return x == x ? scaled : x;
    }
    static Vec exp(Vec x) { return exp2(x * set(1.44269504f)); }

    /* erf to 2e-7 absolute, as x times a polynomial of degree 16 in x^2; |x| is cut at 3.8, where erf is 1 - 8e-8. The
     * polynomial is the least-squares fit at Chebyshev nodes of t = 2 x^2 / 3.8^2 - 1. */
    static Vec erf(Vec x) {
        const Vec limit = set(3.8f);
        x = x > limit ? limit : x;
        x = -limit > x ? -limit : x;
        const Vec t = fma(x * x, set(2.0f / (3.8f * 3.8f)), set(-1.0f));
        Vec p = set(2.050570833e-04f);
        p = fma(p, t, set(-5.171063246e-04f));
        p = fma(p, t, set(4.172619213e-04f));
        p = fma(p, t, set(-8.645352343e-04f));
        p = fma(p, t, set(3.000215519e-03f));
        p = fma(p, t, set(-5.884428257e-03f));
        p = fma(p, t, set(9.709891468e-03f));
        p = fma(p, t, set(-1.648229819e-02f));
        p = fma(p, t, set(2.666671312e-02f));
        p = fma(p, t, set(-3.964629225e-02f));
        p = fma(p, t, set(5.509852416e-02f));
        p = fma(p, t, set(-7.237772246e-02f));
        p = fma(p, t, set(9.082305807e-02f));
        p = fma(p, t, set(-1.111973503e-01f));
        p = fma(p, t, set(1.377401855e-01f));
        p = fma(p, t, set(-1.856409120e-01f));
        p = fma(p, t, set(3.721076137e-01f));
        return p * x;
    }

    /* Which of columns c to c + lanes - 1 dropout keeps. */
    static Mask keep(uint32_t row_bits, uint32_t column, uint32_t threshold) {
        return mix_each(((Bits)lane_numbers() + column) * 0x9e3779b9u ^ row_bits) >= threshold;
    }

    /* Which of as many rows it keeps in a column. */
    static Mask keep_each(const uint32_t* row_bits, uint32_t column, uint32_t threshold) {
        Bits rows;
        std::memcpy(&rows, row_bits, sizeof rows);
        return mix_each(rows ^ column * 0x9e3779b9u) >= threshold;
    }

    /* A square of as many rows as a vector has lanes, `stride` apart, to columns that are `out_stride` apart. */
    static void transpose(const float* rows, int64_t stride, float* out, int64_t out_stride) {
        Vec square[lanes];
        for (int i = 0; i < lanes; ++i) square[i] = load(rows + i * stride);
        swap_blocks<1>(square);
        for (int i = 0; i < lanes; ++i) store(out + i * out_stride, square[i]);
    }

    /* The sums of as many vectors as a vector has lanes, each in the same order. */
    static Vec sum_each(const Vec* v) {
        Vec sums[lanes];
        for (int i = 0; i < lanes; ++i) sums[i] = v[i];
        add_halves<lanes / 2>(sums);
        return sums[0];
    }

  private:
    static Bits mix_each(Bits x) {
        x ^= x >> 16;
        x *= 0x85ebca6bu;
        x ^= x >> 13;
        x *= 0xc2b2ae35u;
        return x ^ x >> 16;
    }
    /* Adds the halves of every block of 2 * HALF lanes, of two vectors at a time into one. */
    template <int HALF>
    static UNPAD_INLINE void add_halves(Vec* sums) {
        if constexpr (HALF) {
            const Mask lane = lane_numbers(), second = (lane & HALF) != 0;
            const Mask low = second ? lanes + (lane ^ HALF) : lane, high = second ? lanes + lane : lane | HALF;
            for (int i = 0; i < HALF; ++i)
                sums[i] = __builtin_shuffle(sums[i], sums[i + HALF], low) +
                          __builtin_shuffle(sums[i], sums[i + HALF], high);
            add_halves<HALF / 2>(sums);
        }
    }
    /* Transposes by swapping the two blocks beside the diagonal of squares of 2, 4, 8 ... lanes. */
    template <int BLOCK>
    static UNPAD_INLINE void swap_blocks(Vec* square) {
        if constexpr (BLOCK < lanes) {
            const Mask lane = lane_numbers(), right = (lane & BLOCK) != 0;
            const Mask upper = right ? lanes + (lane ^ BLOCK) : lane;
            const Mask lower = right ? lanes + lane : lane ^ BLOCK;
            for (int i = 0; i < lanes; ++i) {
                if (i & BLOCK) continue;
                const Vec a = square[i], b = square[i + BLOCK];
                square[i] = __builtin_shuffle(a, b, upper);
                square[i + BLOCK] = __builtin_shuffle(a, b, lower);
            }
            swap_blocks<2 * BLOCK>(square);
        }
    }
};

struct Double {
    using Element = double;
    using Wide = double;
    using Vec = double;
    using Mask = bool;
    static constexpr int lanes = 1;

    static Mask first(int64_t n) { return n > 0; }
    static Vec set(double x) { return x; }
    static Vec load(const double* p) { return *p; }
    static Vec load(const double* p, Whole) { return *p; }
    static Vec load(const double* p, Mask m) { return m ? *p : 0.0; }
    static void store(double* p, Vec v) { *p = v; }
    static void store(double* p, Vec v, Whole) { *p = v; }
    static void store(double* p, Vec v, Mask m) {
        if (m) *p = v;
    }
    static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }
    static Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
    static Vec select(Whole, Vec yes, Vec) { return yes; }
    static Mask above(Vec a, Vec b) { return a > b; }
    static Mask below(int64_t column, int32_t limit) { return column < limit; }
    static double sum(Vec v) { return v; }
    static double largest(Vec v) { return v; }
    static Vec exp2(Vec x) { return std::exp2(x); }
    static Vec exp(Vec x) { return std::exp(x); }
    static Vec erf(Vec x) { return std::erf(x); }
    static Mask keep(uint32_t row_bits, uint32_t column, uint32_t threshold) {
        return mix(row_bits ^ (column * 0x9e3779b9u)) >= threshold;
    }
    static void transpose(const double* rows, int64_t, double* out, int64_t) { *out = *rows; }
    static Vec sum_each(const Vec* v) { return v[0]; }
};

}  // namespace
}  // namespace unpad

#endif
