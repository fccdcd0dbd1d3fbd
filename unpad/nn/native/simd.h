/* Vector types of the kernels, which are written once for both.
 *
 * `Bf16` holds 16 bf16 numbers in memory and 16 floats in a register; `Double` one double in both. A kernel is a
 * template over them, so the proof runs in double the code that trains in bf16. Vec has + - * /.
 */
#ifndef UNPAD_SIMD_H
#define UNPAD_SIMD_H

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace unpad {

/* Bits that determine what dropout keeps: the finaliser of MurmurHash3. nn/dropout.py computes the same in torch. */
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

struct Bf16 {
    using Element = uint16_t;
    using Wide = float;
    using Vec = __m512;
    using Mask = __mmask16;
    static constexpr int lanes = 16;

    static Mask first(int64_t n) { return n >= lanes ? 0xffff : n <= 0 ? 0 : (Mask)((1u << n) - 1); }
    static Vec set(float x) { return _mm512_set1_ps(x); }
    static Vec load(const Element* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
    }
    static Vec load(const Element* p, Mask m) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
    }
    static Vec load(const Wide* p) { return _mm512_loadu_ps(p); }
    static Vec load(const Wide* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
    static void store(Element* p, Vec v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
    static void store(Element* p, Vec v, Mask m) { _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(v)); }
    static void store(Wide* p, Vec v) { _mm512_storeu_ps(p, v); }
    static void store(Wide* p, Vec v, Mask m) { _mm512_mask_storeu_ps(p, m, v); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    /* The second operand where either is NaN: a NaN in b survives. */
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
    static Mask above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
    static float sum(Vec v) { return _mm512_reduce_add_ps(v); }
    static float largest(Vec v) { return _mm512_reduce_max_ps(v); }

    /* 2^x to 2e-7 relative; NaN stays NaN, anything below -126 gives 0 or close to it. */
    static Vec exp2(Vec x) {
        x = _mm512_max_ps(_mm512_set1_ps(-126.9f), x);
        Vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        Vec f = x - n; /* |f| <= 1/2; coefficients ln(2)^k / k! */
        Vec r = set(1.5403530e-4f);
        r = fma(r, f, set(1.3333558e-3f));
        r = fma(r, f, set(9.6181291e-3f));
        r = fma(r, f, set(5.5504109e-2f));
        r = fma(r, f, set(2.4022651e-1f));
        r = fma(r, f, set(6.9314718e-1f));
        r = fma(r, f, set(1.0f));
        return _mm512_scalef_ps(r, n);
    }
    static Vec exp(Vec x) { return exp2(x * set(1.44269504f)); }

    /* erf to 6e-7 absolute, as x times a polynomial of degree 12 in x^2; |x| is cut at 3.6, where erf is 1 - 4e-7. The
     * polynomial is the least-squares fit at Chebyshev nodes of t = 2 x^2 / 3.6^2 - 1. */
    static Vec erf(Vec x) {
        x = _mm512_min_ps(set(3.6f), _mm512_max_ps(set(-3.6f), x));
        Vec t = fma(x * x, set(2.0f / (3.6f * 3.6f)), set(-1.0f));
        Vec p = set(2.148790983e-03f);
        p = fma(p, t, set(-5.740973167e-03f));
        p = fma(p, t, set(5.899403244e-03f));
        p = fma(p, t, set(-8.306667209e-03f));
        p = fma(p, t, set(1.988921873e-02f));
        p = fma(p, t, set(-3.436132148e-02f));
        p = fma(p, t, set(4.892636463e-02f));
        p = fma(p, t, set(-6.755413115e-02f));
        p = fma(p, t, set(8.967991173e-02f));
        p = fma(p, t, set(-1.138468012e-01f));
        p = fma(p, t, set(1.438208222e-01f));
        p = fma(p, t, set(-1.954888552e-01f));
        p = fma(p, t, set(3.927119970e-01f));
        return p * x;
    }

    /* Which of columns c to c + 15 dropout keeps. */
    static Mask keep(uint32_t row_bits, uint32_t column, uint32_t threshold) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i x = _mm512_mullo_epi32(
            _mm512_add_epi32(_mm512_set1_epi32((int)column), lane), _mm512_set1_epi32((int)0x9e3779b9u));
        x = _mm512_xor_si512(x, _mm512_set1_epi32((int)row_bits));
        x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
        x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)0x85ebca6bu));
        x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 13));
        x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)0xc2b2ae35u));
        x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
        return _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32((int)threshold));
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
    static Vec load(const double* p, Mask m) { return m ? *p : 0.0; }
    static void store(double* p, Vec v) { *p = v; }
    static void store(double* p, Vec v, Mask m) {
        if (m) *p = v;
    }
    static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }
    static Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
    static Mask above(Vec a, Vec b) { return a > b; }
    static double sum(Vec v) { return v; }
    static double largest(Vec v) { return v; }
    static Vec exp2(Vec x) { return std::exp2(x); }
    static Vec exp(Vec x) { return std::exp(x); }
    static Vec erf(Vec x) { return std::erf(x); }
    static Mask keep(uint32_t row_bits, uint32_t column, uint32_t threshold) {
        return mix(row_bits ^ (column * 0x9e3779b9u)) >= threshold;
    }
};

}  // namespace unpad

#endif
