/* Inner products of rows in place in memory, the main work of decoding.
 *
 * `Bf16Rows` multiplies 32 numbers per instruction, `DoubleRows` one. `sum_each` adds up the lanes of as many vectors
 * as a vector has lanes, each in the same order: a product does not depend on its place in a tile.
 */
#ifndef UNPAD_ROWS_H
#define UNPAD_ROWS_H

#include "simd.h"

/* gcc 12 takes the don't-care operand of its own intrinsics for a forgotten one (its bug 105593). */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace unpad {

struct Bf16Rows : Bf16 {
    using Part = __m512bh; /* of a row */
    static constexpr int64_t part = 32;

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

struct DoubleRows : Double {
    using Part = double;
    static constexpr int64_t part = 1;

    static Part load_part(const double* p) { return *p; }
    static Part load_part(const double* p, int64_t n) { return n > 0 ? *p : 0.0; }
    static Vec dot(Part a, Part b, Vec sum) { return a * b + sum; }
    static Vec sum_each(const Vec* v) { return v[0]; }
};

}  // namespace unpad

#endif
