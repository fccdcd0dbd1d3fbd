/* A linear layer whose rows depend on nothing else, for any number of rows.
 *
 * Each product is a sum over the lanes of a vector, added up in one order, whatever the number of rows, the place of
 * the row and the number of threads: a row's result does not depend on the rows beside it.
 *
 * A panel of weight rows is read from memory once for a block of input rows and multiplied by them tile by tile, while
 * the next panel is prefetched. For few rows reading the weights takes longer than multiplying by them.
 */
#ifndef UNPAD_ROWWISE_LINEAR_H
#define UNPAD_ROWWISE_LINEAR_H

#include "rows.h"
#include "types.h"

#include <algorithm>
#include <cstring>

namespace unpad {
namespace {
namespace rowwise {

constexpr int64_t BLOCK_BYTES = 1 << 18; /* of input rows that meet every panel: they stay in the second cache */

template <class T>
struct Linear {
    using Element = typename T::Element;
    using Vec = typename T::Vec;
    static constexpr int TILE = T::tile; /* sums of a tile: rows of x times rows of the weight */

    int64_t in;
    int64_t out;
    const Element* x;
    const Element* weight;
    const Element* bias; /* NULL for none */
    Element* y;

    /* `count` numbers, rounded up to as many as vectors hold. */
    static constexpr int whole_vectors(int count) { return (count + T::lanes - 1) / T::lanes * T::lanes; }

    /* Outputs [start, stop) of every row. */
    void run(int64_t num_rows, int64_t start, int64_t stop) const {
        const int64_t blocks = num_rows * in * (int64_t)sizeof(Element) / BLOCK_BYTES + 1;
        const int64_t most = (num_rows / blocks / 4 + 1) * 4;
        for (int64_t row = 0; row < num_rows; row += most) {
            const int64_t rows = std::min(most, num_rows - row);
            if (rows == 1)
                block<8>(row, rows, start, stop); /* more than eight streams at once are slower to read */
            else if (rows == 2)
                block<TILE / 2>(row, rows, start, stop);
            else
                block<TILE / 4>(row, rows, start, stop);
        }
    }

  private:
    template <int OUTS>
    void block(int64_t row, int64_t num_rows, int64_t start, int64_t stop) const {
        for (int64_t first = start; first < stop; first += OUTS)
            panel<OUTS>(row, num_rows, first, std::min(first + OUTS, stop), stop);
    }

    /* Rows from `row` on against the panel of outputs [first, last), four at a time, and no single one at the end. */
    template <int OUTS>
    void panel(int64_t row, int64_t num_rows, int64_t first, int64_t last, int64_t stop) const {
        constexpr int64_t LINE = 64 / sizeof(Element);
        const Element* next = weight + last * in; /* what follows the panel: its share for every tile */
        const int64_t ahead = std::min(last - first, stop - last) * in;
        for (int64_t done = 0, rows; done < num_rows; done += rows) {
            const int64_t left = num_rows - done;
            rows = left > 4 && left < 8 ? (left + 1) / 2 : std::min<int64_t>(left, 4);
            for (int64_t i = ahead * done / num_rows; i < ahead * (done + rows) / num_rows; i += LINE)
                __builtin_prefetch(next + i, 0, 2);
            tile_of<std::min(4, TILE / OUTS), OUTS>(rows, row + done, first, last);
        }
    }

    /* A tile of `num_rows` rows, at most ROWS. */
    template <int ROWS, int OUTS>
    void tile_of(int64_t num_rows, int64_t row, int64_t first, int64_t last) const {
        if (num_rows == ROWS)
            tile<ROWS, OUTS>(row, first, last);
        else if constexpr (ROWS > 1)
            tile_of<ROWS - 1, OUTS>(num_rows, row, first, last);
    }

    /* Outputs [first, last), at most OUTS, of input rows [row, row + ROWS). */
    template <int ROWS, int OUTS>
    void tile(int64_t row, int64_t first, int64_t last) const {
        constexpr int SUMS = whole_vectors(ROWS * OUTS);
        const Element *xs[ROWS], *ws[OUTS];
        for (int r = 0; r < ROWS; ++r) xs[r] = x + (row + r) * in;
        for (int o = 0; o < OUTS; ++o) ws[o] = weight + std::min(first + o, last - 1) * in; /* spare ones repeat */
        Vec sums[SUMS];
        for (int i = 0; i < SUMS; ++i) sums[i] = T::set(0);
        int64_t c = 0;
        const auto whole = [&](const Element* p) UNPAD_INLINE { return T::load_part(p + c); };
        const auto rest = [&](const Element* p) UNPAD_INLINE { return T::load_part(p + c, in - c); };
        for (; c + T::part <= in; c += T::part) add_products<ROWS, OUTS>(xs, ws, sums, whole);
        if (c < in) add_products<ROWS, OUTS>(xs, ws, sums, rest);
        write<ROWS, OUTS>(sums, row, first, last);
    }

    template <int ROWS, int OUTS>
    void write(const Vec* sums, int64_t row, int64_t first, int64_t last) const {
        constexpr int SUMS = whole_vectors(ROWS * OUTS);
        Element biases[SUMS] = {}, rounded[SUMS];
        if (bias)
            for (int i = 0; i < ROWS * OUTS; ++i) biases[i] = bias[std::min(first + i % OUTS, last - 1)];
        for (int i = 0; i < SUMS; i += T::lanes) T::store(rounded + i, T::sum_each(sums + i) + T::load(biases + i));
        Element* to = y + row * out + first;
        if (last - first == OUTS)
            for (int r = 0; r < ROWS; ++r) std::memcpy(to + r * out, rounded + r * OUTS, OUTS * sizeof(Element));
        else
            for (int r = 0; r < ROWS; ++r) std::copy_n(rounded + r * OUTS, last - first, to + r * out);
    }

    template <int ROWS, int OUTS, class Load>
    static UNPAD_INLINE void add_products(const Element* const* xs, const Element* const* ws, Vec* sums, Load load) {
        typename T::Part parts[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) parts[r] = load(xs[r]);
#pragma GCC unroll 16
        for (int o = 0; o < OUTS; ++o) {
            const typename T::Part w = load(ws[o]);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) sums[r * OUTS + o] = T::dot(parts[r], w, sums[r * OUTS + o]);
        }
    }
};

template <class T>
void run(
    int64_t num_rows, int64_t in, int64_t out, int num_threads, const void* x, const void* weight, const void* bias,
    void* y) {
    using Element = typename T::Element;
    constexpr int STEP = T::tile; /* no panel crosses the border of two threads */
    const Linear<T> linear{in, out, (const Element*)x, (const Element*)weight, (const Element*)bias, (Element*)y};
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int share = 0; share < num_threads; ++share) {
        const int64_t steps = (out + STEP - 1) / STEP;
        linear.run(
            num_rows, steps * share / num_threads * STEP, std::min(steps * (share + 1) / num_threads * STEP, out));
    }
}

}  // namespace rowwise

void rowwise_linear(
    int dtype, int64_t num_rows, int64_t in, int64_t out, int num_threads, const void* x, const void* weight,
    const void* bias, void* y) {
    with_type(dtype, [&](auto type) {
        rowwise::run<Rows<decltype(type)>>(num_rows, in, out, num_threads, x, weight, bias, y);
    });
}

}  // namespace
}  // namespace unpad

#endif
