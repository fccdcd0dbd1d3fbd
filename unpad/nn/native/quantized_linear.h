/* Linear layers whose weights have 8 bits (unpad/nn/native/quantized.py says what these stand for).
 *
 * The numbers of OUTS outputs lie together, input by input, so that a vector holds sums of different outputs: nothing
 * is added up over its lanes, and a panel is read from memory in order. Rows of inputs meet a panel tile by tile.
 *
 * Sums of whole numbers are exact in 32 bits, so their order cannot matter. Nothing saturates: pairs of bytes are
 * multiplied by instructions that add them up in 32 bits, or are widened to 16 bits first.
 */
#ifndef UNPAD_QUANTIZED_LINEAR_H
#define UNPAD_QUANTIZED_LINEAR_H

#include "buffer.h"
#include "simd.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace unpad {
namespace {
namespace quantized {

constexpr int OUTS = 16; /* outputs of a block */

/* Calls body(share) for every thread's share of blocks. */
template <class Body>
void each_share(int64_t num_blocks, int64_t step, int num_threads, Body body) {
    const int64_t steps = (num_blocks + step - 1) / step;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int share = 0; share < num_threads; ++share)
        body(steps * share / num_threads * step, std::min(steps * (share + 1) / num_threads * step, num_blocks));
}

/* Calls tile_of(rows, row) for all rows, at most ROWS at a time and no single one at the end. */
template <int ROWS, class Body>
void each_tile(int64_t num_rows, Body tile) {
    for (int64_t row = 0, rows; row < num_rows; row += rows) {
        const int64_t tiles = (num_rows - row + ROWS - 1) / ROWS;
        rows = (num_rows - row + tiles - 1) / tiles;
        tile(rows, row);
    }
}

/* Products of bytes: sums are vectors of int32, `per_out` neighbouring lanes for each output. */
#if defined(UNPAD_HAS_VNNI)
struct Bytes {
    using Number = int8_t; /* of activations */
    using Part = __m512i;
    using Sums = __m512i;
    static constexpr int vecs = 1, per_out = 1; /* vectors of the sums of a block */
    static constexpr int rows = 6, blocks = 4;  /* of a tile */

    static Part weights(const uint8_t* p, int v) { return _mm512_loadu_si512(p + 64 * v); }
    static Part inputs(const Number* p) {
        int32_t four;
        std::memcpy(&four, p, sizeof four);
        return _mm512_set1_epi32(four);
    }
    static Sums add(Sums sums, Part w, Part x) { return _mm512_dpbusd_epi32(sums, w, x); }
};
#elif UNPAD_FLOATS == 16
struct Bytes {
    using Number = int16_t;
    using Part = __m512i;
    using Sums = __m512i;
    static constexpr int vecs = 2, per_out = 2;
    static constexpr int rows = 6, blocks = 2;

    static Part weights(const uint8_t* p, int v) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(p + 32 * v)));
    }
    static Part inputs(const Number* p) {
        int64_t four;
        std::memcpy(&four, p, sizeof four);
        return _mm512_set1_epi64(four);
    }
    static Sums add(Sums sums, Part w, Part x) { return _mm512_add_epi32(sums, _mm512_madd_epi16(w, x)); }
};
#elif UNPAD_FLOATS == 8
struct Bytes {
    using Number = int16_t;
    using Part = __m256i;
    using Sums = __m256i;
    static constexpr int vecs = 4, per_out = 2;
    static constexpr int rows = 3, blocks = 1;

    static Part weights(const uint8_t* p, int v) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * v)));
    }
    static Part inputs(const Number* p) {
        int64_t four;
        std::memcpy(&four, p, sizeof four);
        return _mm256_set1_epi64x(four);
    }
    static Sums add(Sums sums, Part w, Part x) { return _mm256_add_epi32(sums, _mm256_madd_epi16(w, x)); }
};
#elif defined(__x86_64__)
struct Bytes {
    using Number = int16_t;
    using Part = __m128i;
    using Sums = __m128i;
    static constexpr int vecs = 8, per_out = 2;
    static constexpr int rows = 1, blocks = 1;

    static Part weights(const uint8_t* p, int v) {
        return _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)(p + 8 * v)), _mm_setzero_si128());
    }
    static Part inputs(const Number* p) {
        int64_t four;
        std::memcpy(&four, p, sizeof four);
        return _mm_set1_epi64x(four);
    }
    static Sums add(Sums sums, Part w, Part x) { return _mm_add_epi32(sums, _mm_madd_epi16(w, x)); }
};
#elif defined(__aarch64__)
struct Bytes {
    using Number = int16_t;
    using Part = int16x8_t;
    using Sums = int32x4_t;
    static constexpr int vecs = 8, per_out = 2;
    static constexpr int rows = 2, blocks = 1;

    static Part weights(const uint8_t* p, int v) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * v))); }
    static Part inputs(const Number* p) {
        int64_t four;
        std::memcpy(&four, p, sizeof four);
        return vreinterpretq_s16_s64(vdupq_n_s64(four));
    }
    /* Lane i adds the products of the pair i of either half: the two halves of a vector are two outputs. */
    static Sums add(Sums sums, Part w, Part x) {
        const int32x4_t low = vmull_s16(vget_low_s16(w), vget_low_s16(x)), high = vmull_high_s16(w, x);
        return vaddq_s32(sums, vpaddq_s32(low, high));
    }
};
#endif

/* Whole numbers nearest to those of a vector, ties to even. */
inline Fp32::Mask nearest(Fp32::Vec x) {
#if UNPAD_FLOATS == 16
    return (Fp32::Mask)_mm512_cvtps_epi32(x);
#elif UNPAD_FLOATS == 8
    return (Fp32::Mask)_mm256_cvtps_epi32(x);
#elif defined(__x86_64__)
    return (Fp32::Mask)_mm_cvtps_epi32(x);
#else
    return (Fp32::Mask)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

/* Rows of activations as whole numbers, filled up with zeros to `stride`. */
struct Rounded {
    const Bytes::Number* numbers; /* (num_rows, stride) */
    const float* scales;          /* (num_rows) */
    const int32_t* shifts;        /* (num_rows) 128 times the sum of the numbers: what weights plus 128 add to a sum */
    int64_t stride;

    /* One row; NaN and infinity make the scale so, and with it all results of the row. */
    static void round(const float* x, int64_t in, int64_t stride, Bytes::Number* to, float* scale, int32_t* shift) {
        using Vec = Fp32::Vec;
        using Mask = Fp32::Mask;
        typedef Bytes::Number Narrow __attribute__((vector_size(sizeof(Bytes::Number) * UNPAD_FLOATS)));
        Mask most = {}, sums = {};
        const auto each = [&](auto step) UNPAD_INLINE {
            int64_t c = 0;
            for (; c + Fp32::lanes <= in; c += Fp32::lanes) step(c, Fp32::load(x + c), Fp32::lanes);
            if (c < in) step(c, Fp32::load(x + c, Fp32::first(in - c)), in - c);
        };
        each([&](int64_t, Vec v, int64_t) UNPAD_INLINE {
            const Mask size = (Mask)v & 0x7fffffff; /* bits of floats without a sign are in their order, NaN last */
            most = size > most ? size : most;
        });
        int32_t bits = 0;
        for (int i = 0; i < Fp32::lanes; ++i) bits = std::max<int32_t>(bits, most[i]);
        float largest;
        std::memcpy(&largest, &bits, sizeof bits);
        *scale = largest / 127;
        const float inverse = *scale < std::numeric_limits<float>::min() ? 0 : 1 / *scale;
        each([&](int64_t c, Vec v, int64_t count) UNPAD_INLINE {
            const Mask whole = nearest(v * Fp32::set(inverse));
            sums += whole;
            const Narrow narrow = __builtin_convertvector(whole, Narrow);
            std::memcpy(to + c, &narrow, (size_t)count * sizeof(Bytes::Number));
        });
        std::fill(to + in, to + stride, (Bytes::Number)0);
        uint32_t sum = 0; /* of any bits where the scale is not finite */
        for (int i = 0; i < Fp32::lanes; ++i) sum += (uint32_t)sums[i];
        *shift = (int32_t)(128 * sum);
    }
};

struct Int8 {
    int64_t in;
    int64_t out;
    Rounded x;
    const uint8_t* weight;
    const float* scales;
    float* y;

    int64_t block_bytes() const { return x.stride * OUTS; }

    void run(int64_t num_rows, int64_t first, int64_t last) const {
        for (; first < last; first += Bytes::blocks)
            each_tile<Bytes::rows>(num_rows, [&](int64_t rows, int64_t row) {
                tile_of<Bytes::rows, Bytes::blocks>(rows, std::min<int64_t>(last - first, Bytes::blocks), row, first);
            });
    }

    template <int ROWS, int BLOCKS>
    void tile_of(int64_t rows, int64_t blocks, int64_t row, int64_t first) const {
        if constexpr (BLOCKS > 1)
            if (blocks < BLOCKS) return tile_of<ROWS, BLOCKS - 1>(rows, blocks, row, first);
        if constexpr (ROWS > 1)
            if (rows < ROWS) return tile_of<ROWS - 1, BLOCKS>(rows, blocks, row, first);
        tile<ROWS, BLOCKS>(row, first);
    }

    template <int ROWS, int BLOCKS>
    void tile(int64_t row, int64_t first) const {
        typename Bytes::Sums sums[ROWS][BLOCKS * Bytes::vecs];
        std::memset(sums, 0, sizeof sums);
        const uint8_t* w = weight + first * block_bytes();
        const Bytes::Number* numbers = x.numbers + row * x.stride;
        for (int64_t c = 0; c < x.stride; c += 4, w += 4 * OUTS) {
            typename Bytes::Part parts[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) parts[r] = Bytes::inputs(numbers + r * x.stride + c);
#pragma GCC unroll 8
            for (int v = 0; v < BLOCKS * Bytes::vecs; ++v) {
                const auto part = Bytes::weights(w + v / Bytes::vecs * block_bytes(), v % Bytes::vecs);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) sums[r][v] = Bytes::add(sums[r][v], part, parts[r]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int b = 0; b < BLOCKS; ++b) write(row + r, first + b, sums[r] + b * Bytes::vecs);
    }

    void write(int64_t row, int64_t block, const typename Bytes::Sums* sums) const {
        int32_t each[OUTS * Bytes::per_out];
        float scaled[OUTS], of_block[OUTS] = {};
        const int64_t start = block * OUTS, count = std::min<int64_t>(OUTS, out - start);
        std::memcpy(each, sums, sizeof each);
        std::memcpy(of_block, scales + start, (size_t)count * sizeof(float));
        for (int o = 0; o < OUTS; ++o) {
            uint32_t sum = 0;
            for (int i = 0; i < Bytes::per_out; ++i) sum += (uint32_t)each[o * Bytes::per_out + i];
            scaled[o] = (float)(int32_t)(sum - (uint32_t)x.shifts[row]) * (x.scales[row] * of_block[o]);
        }
        std::memcpy(y + row * out + start, scaled, (size_t)count * sizeof(float));
    }
};

}  // namespace quantized

void int8_linear(
    int64_t num_rows, int64_t in, int64_t out, int num_threads, const float* x, const uint8_t* weight,
    const float* scales, float* y) {
    using namespace quantized;
    const int64_t stride = (in + 3) / 4 * 4;
    Buffer<Bytes::Number> numbers;
    Buffer<float> own;
    Buffer<int32_t> shifts;
    Bytes::Number* const to = numbers.at_least(num_rows * stride);
    float* const to_scales = own.at_least(num_rows);
    int32_t* const to_shifts = shifts.at_least(num_rows);
    for (int64_t row = 0; row < num_rows; ++row)
        Rounded::round(x + row * in, in, stride, to + row * stride, to_scales + row, to_shifts + row);
    const Int8 linear{in, out, {to, to_scales, to_shifts, stride}, weight, scales, y};
    each_share((out + OUTS - 1) / OUTS, Bytes::blocks, num_threads, [&](int64_t first, int64_t last) {
        linear.run(num_rows, first, last);
    });
}

}  // namespace
}  // namespace unpad

#endif
