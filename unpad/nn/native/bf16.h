/* Vectors of 16 bf16 numbers in memory, 16 floats in a register, for processors with AVX-512 BF16. */
#ifndef UNPAD_BF16_H
#define UNPAD_BF16_H

#include "pairs.h"
#include "rows.h"
#include "simd.h"

/* gcc 12 takes the don't-care operand of its own intrinsics for a forgotten one (its bug 105593). */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace unpad {
namespace {

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
    static Vec load(const Element* p, Whole) { return load(p); }
    static Vec load(const Wide* p) { return _mm512_loadu_ps(p); }
    static Vec load(const Wide* p, Whole) { return load(p); }
    static Vec load(const Wide* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
    static void store(Element* p, Vec v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
    static void store(Element* p, Vec v, Mask m) { _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(v)); }
    static void store(Element* p, Vec v, Whole) { store(p, v); }
    static void store(Wide* p, Vec v) { _mm512_storeu_ps(p, v); }
    static void store(Wide* p, Vec v, Whole) { store(p, v); }
    static void store(Wide* p, Vec v, Mask m) { _mm512_mask_storeu_ps(p, m, v); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    /* The second operand where either is NaN: a NaN in b survives. */
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
    static Vec select(Whole, Vec yes, Vec) { return yes; }
    static Mask above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
    /* Which of columns c to c + 15 are below `limit`. */
    static Mask below(int64_t column, int32_t limit) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_cmplt_epi32_mask(
            _mm512_add_epi32(_mm512_set1_epi32((int)column), lane), _mm512_set1_epi32(limit));
    }
    static float sum(Vec v) { return _mm512_reduce_add_ps(v); }
    static float largest(Vec v) { return _mm512_reduce_max_ps(v); }

    /* As Fp32's, in fewer instructions: scalef gives infinity from 128 on, and keeps NaN. */
    static Vec exp2(Vec x) {
        x = _mm512_max_ps(_mm512_set1_ps(-126.9f), x);
        const Vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return _mm512_scalef_ps(Fp32::exp2_near_0(x - n), n);
    }
    static Vec exp(Vec x) { return exp2(x * set(1.44269504f)); }

    /* erf to 6e-7 absolute, as x times a polynomial of degree 12 in x^2; |x| is cut at 3.6, where erf is 1 - 4e-7. The
     * polynomial is the least-squares fit at Chebyshev nodes of t = 2 x^2 / 3.6^2 - 1. Fp32's has four terms more and
     * takes 1.3 times as long in gelu. */
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

    static Mask keep(uint32_t row_bits, uint32_t column, uint32_t threshold) {
        return _mm512_movepi32_mask((__m512i)Fp32::keep(row_bits, column, threshold));
    }
    static Mask keep_each(const uint32_t* row_bits, uint32_t column, uint32_t threshold) {
        return _mm512_movepi32_mask((__m512i)Fp32::keep_each(row_bits, column, threshold));
    }
};

/* Products of pairs of numbers in attention (attention.h). */
template <>
struct Math<Bf16> : Bf16 {
    using Pair = uint32_t; /* the first number in the low half */
    using PairVec = __m512bh;
    static constexpr int depth = 2;
    static constexpr int panel_vecs = 2;
    static constexpr int row_unit = 4;

    static PairVec load_pairs(const Pair* p) { return (PairVec)_mm512_loadu_si512(p); }
    static PairVec broadcast(const Pair* p) {
        int32_t bits;
        std::memcpy(&bits, p, sizeof bits); /* p may point to single numbers */
        return (PairVec)_mm512_set1_epi32(bits);
    }
    static Vec dot(PairVec a, PairVec b, Vec sum) { return _mm512_dpbf16_ps(sum, a, b); }

    /* 2^x to 8e-5 relative: what is rounded to bf16 next loses 2e-3. -inf gives 0, NaN stays NaN. */
    static Vec exp2_short(Vec x) {
        Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x), 0 for -inf */
        Vec r = set(0.07802452f); /* least relative error on [0, 1) */
        r = fma(r, f, set(0.22606717f));
        r = fma(r, f, set(0.69583350f));
        r = fma(r, f, set(0.99992520f));
        return _mm512_scalef_ps(r, x); /* r * 2^floor(x) */
    }

    /* Two rows of 16 numbers: as pairs, and each row by itself where `rows` is not NULL. */
    static void store_pairs(Pair* pairs, Element* rows, int64_t stride, Vec even, Vec odd) {
        const __m512i zip = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17,
            1, 16, 0);
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(zip, both));
        if (!rows) return;
        _mm256_storeu_si256((__m256i*)rows, _mm512_castsi512_si256(both));
        _mm256_storeu_si256((__m256i*)(rows + stride), _mm512_extracti64x4_epi64(both, 1));
    }

    /* Two vectors side by side. */
    static void store_both(Element* p, Vec low, Vec high) {
        _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }

    static void interleave(const Element* even, const Element* odd, Pair* pairs) {
        __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
        __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
        _mm512_storeu_si512(pairs, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }

    /* rows (32, head_dim) to one panel of columns. */
    static void transpose(const Element* rows, int64_t head_dim, Pair* panel) {
        for (int64_t key = 0; key < 32; key += 16)
            for (int64_t pair = 0; pair < head_dim / 2; pair += 16)
                transpose_square(
                    rows + key * head_dim + 2 * pair, head_dim, head_dim / 2 - pair, panel + pair * 32 + key);
    }

  private:
    /* 16 rows of up to 16 pairs to up to 16 rows of 16 pairs, 32 apart. */
    static void transpose_square(const Element* rows, int64_t stride, int64_t num_pairs, Pair* out) {
        __m512i r[16], t[16];
        Mask valid = first(num_pairs);
        for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(valid, rows + i * stride);
        for (int i = 0; i < 8; i++) {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int j = 0; j < 2; j++) {
                r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
                r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
            }
        for (int i = 0; i < 16; i += 8)
            for (int j = 0; j < 4; j++) {
                t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
                t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
            }
        for (int j = 0; j < 8; j++) {
            r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
            r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
        }
        for (int i = 0; i < 16; i++)
            if (i < num_pairs) _mm512_storeu_si512(out + i * 32, r[i]);
    }
};

/* Products of 32 numbers per instruction (rows.h). */
template <>
struct Rows<Bf16> : Bf16 {
    using Part = __m512bh; /* of a row */
    static constexpr int64_t part = 32;
    static constexpr int tile = 16;

    static Part load_part(const Element* p) { return (Part)_mm512_loadu_si512(p); }
    static Part load_part(const Element* p, int64_t n) {
        return (Part)_mm512_maskz_loadu_epi16(n >= part ? ~0u : (1u << n) - 1, p);
    }
    static Vec dot(Part a, Part b, Vec sum) { return _mm512_dpbf16_ps(sum, a, b); }

    static Vec sum_each(const Vec* v) {
        Vec a[8], b[4];
        for (int i = 0; i < 8; ++i) a[i] = add_halves(v[i], v[i + 8]);
        for (int i = 0; i < 4; ++i) b[i] = add_quarters(a[i], a[i + 4]);
        const Vec low = add_pairs(b[0], b[2]), high = add_pairs(b[1], b[3]);
        const Vec sums = _mm512_shuffle_ps(low, high, 0x88) + _mm512_shuffle_ps(low, high, 0xdd);
        return _mm512_permutexvar_ps(_mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0), sums);
    }

  private:
    /* Lanes 0-7 get the sums of a's two halves, lanes 8-15 of b's. */
    static Vec add_halves(Vec a, Vec b) {
        return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    }
    /* Four lanes each: both operands hold two vectors, of two quarters each. */
    static Vec add_quarters(Vec a, Vec b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    /* Within four lanes: two of a, two of b. */
    static Vec add_pairs(Vec a, Vec b) {
        return _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
    }
};

}  // namespace
}  // namespace unpad

#endif
