/* A linear layer for few rows, where reading the weights takes longer than multiplying by them.
 *
 * A panel of weight rows is read from memory once and multiplied by every input row while the next panel is prefetched.
 * Each product is summed in one order whatever the number of rows, so that a row's result does not depend on the rows
 * beside it.
 */
#ifndef UNPAD_SMALL_LINEAR_H
#define UNPAD_SMALL_LINEAR_H

#include "rows.h"
#include "types.h"

#include <algorithm>

namespace unpad {
namespace {
namespace small {

/* Weight rows of a tile; more than eight streams at once are slower to read. */
constexpr int outs_of(int tile, int rows) { return rows == 1 ? 8 : tile / rows; }

template <class T>
struct Linear {
    using Element = typename T::Element;
    static constexpr int TILE = T::tile; /* sums of a tile: rows of x times rows of the weight */

    int64_t in;
    int64_t out;
    const Element* x;
    const Element* weight;
    const Element* bias; /* NULL for none */
    Element* y;

    /* Outputs [first, last) of input rows [row, row + ROWS); at most outs_of(TILE, ROWS) outputs. */
    template <int ROWS>
    void tile(int64_t row, int64_t first, int64_t last) const {
        constexpr int OUTS = outs_of(TILE, ROWS);
        const Element *xs[ROWS], *ws[OUTS];
        for (int r = 0; r < ROWS; ++r) xs[r] = x + (row + r) * in;
        for (int o = 0; o < OUTS; ++o) ws[o] = weight + std::min(first + o, last - 1) * in; /* spare ones repeat */
        typename T::Vec sums[TILE];
        for (int i = 0; i < TILE; ++i) sums[i] = T::set(0);
        int64_t c = 0;
        for (; c + T::part <= in; c += T::part) add_products<ROWS>(xs, ws, sums, [c](const Element* p) {
            return T::load_part(p + c);
        });
        if (c < in) add_products<ROWS>(xs, ws, sums, [c, this](const Element* p) {
            return T::load_part(p + c, in - c);
        });
        write<ROWS>(sums, row, first, last);
    }

    template <int ROWS, class Load>
    static void add_products(const Element* const* xs, const Element* const* ws, typename T::Vec* sums, Load load) {
        constexpr int OUTS = outs_of(TILE, ROWS);
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

    template <int ROWS>
    void write(const typename T::Vec* sums, int64_t row, int64_t first, int64_t last) const {
        constexpr int OUTS = outs_of(TILE, ROWS);
        Element biases[TILE] = {}, rounded[TILE];
        if (bias)
            for (int i = 0; i < TILE; ++i) biases[i] = bias[std::min(first + i % OUTS, last - 1)];
        for (int i = 0; i < TILE; i += T::lanes) T::store(rounded + i, T::sum_each(sums + i) + T::load(biases + i));
        for (int r = 0; r < ROWS; ++r)
            std::copy_n(rounded + r * OUTS, std::min<int64_t>(OUTS, last - first), y + (row + r) * out + first);
    }

    /* All input rows against the panel of outputs [first, last), ROWS at a time. */
    template <int ROWS>
    void panel(int64_t num_rows, int64_t first, int64_t last, int64_t stop) const {
        constexpr int64_t LINE = 64 / sizeof(Element);
        const int64_t blocks = num_rows / ROWS;
        const Element* next = weight + last * in; /* what follows the panel: its share for every block of rows */
        const int64_t ahead = std::min(last - first, stop - last) * in;
        for (int64_t block = 0; block < blocks; ++block) {
            for (int64_t i = ahead * block / blocks; i < ahead * (block + 1) / blocks; i += LINE)
                __builtin_prefetch(next + i, 0, 2);
            tile<ROWS>(block * ROWS, first, last);
        }
        for (int64_t row = blocks * ROWS; row < num_rows; ++row)
            tile<1>(row, first, last); /* a panel for more rows is no wider */
    }

    /* Outputs [start, stop) of every row. */
    void run(int64_t num_rows, int64_t start, int64_t stop) const {
        const int64_t outs = outs_of(TILE, num_rows >= 4 ? 4 : num_rows >= 2 ? 2 : 1);
        for (int64_t first = start; first < stop; first += outs) {
            const int64_t last = std::min(first + outs, stop);
            if (num_rows >= 4)
                panel<4>(num_rows, first, last, stop);
            else if (num_rows >= 2)
                panel<2>(num_rows, first, last, stop);
            else
                panel<1>(num_rows, first, last, stop);
        }
    }
};

template <class T>
void small_linear(
    int64_t num_rows, int64_t in, int64_t out, int num_threads, const void* x, const void* weight, const void* bias,
    void* y) {
    using Element = typename T::Element;
    constexpr int TILE = T::tile;
    const Linear<T> linear{in, out, (const Element*)x, (const Element*)weight, (const Element*)bias, (Element*)y};
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int share = 0; share < num_threads; ++share) {
        const int64_t panels = (out + TILE - 1) / TILE;
        linear.run(
            num_rows, panels * share / num_threads * TILE,
            std::min(panels * (share + 1) / num_threads * TILE, out));
    }
}

}  // namespace small

void small_linear(
    int dtype, int64_t num_rows, int64_t in, int64_t out, int num_threads, const void* x, const void* weight,
    const void* bias, void* y) {
    with_type(dtype, [&](auto type) {
        small::small_linear<Rows<decltype(type)>>(num_rows, in, out, num_threads, x, weight, bias, y);
    });
}

}  // namespace
}  // namespace unpad

#endif
