/* Products of bf16 by tiles of 16 rows of 64 bytes, of which a thread has eight.
 *
 * A product takes 16 rows of 32 numbers and 16 pairs of rows of 16 numbers (the first number in the low half of a
 * pair) and adds to 16 rows of 16 floats. Even and odd numbers of the inner dimension are summed apart, by fused
 * multiply-adds from zero; then even + odd is added to the tile. Denormal numbers count as zero wherever they appear.
 *
 * `AmxTiles` runs the instructions of processors that have them, `PlainTiles` the same sums in the same order, so that
 * what is written over tiles is tested to the bit on processors that have none. Tiles are an object's, in the thread
 * that made it: their numbers are arguments of templates because instructions hold them.
 */
#ifndef UNPAD_TILES_H
#define UNPAD_TILES_H

#include "simd.h"

namespace unpad {
namespace {

constexpr int64_t TILE = 16;       /* rows of a tile, floats of its rows */
constexpr int64_t TILE_BYTES = 64; /* of a row */

/* Written in assembly, so that compilers without these intrinsics translate it. */
struct AmxTiles {
    AmxTiles() {
        alignas(64) static constexpr struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        static_assert(sizeof shapes == 64);
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~AmxTiles() { asm volatile("tilerelease"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    template <int N>
    static UNPAD_INLINE inline void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(N));
    }
    /* Rows `stride` bytes apart. */
    template <int N>
    static UNPAD_INLINE inline void load(const void* rows, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(N) : "memory");
    }
    template <int N>
    static UNPAD_INLINE inline void store(void* rows, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(N) : "memory");
    }
    /* Tile C += tile A times tile B. */
    template <int C, int A, int B>
    static UNPAD_INLINE inline void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

#if UNPAD_FLOATS == 16
struct PlainTiles {
    using Vec = Fp32::Vec;
    using Bits = Fp32::Bits;

    template <int N>
    static void zero() {
        for (Vec& row : tile(N)) row = Vec{};
    }
    template <int N>
    static void load(const void* rows, int64_t stride) {
        for (int64_t i = 0; i < TILE; i++) tile(N)[i] = Fp32::load((const float*)((const char*)rows + i * stride));
    }
    template <int N>
    static void store(void* rows, int64_t stride) {
        for (int64_t i = 0; i < TILE; i++) Fp32::store((float*)((char*)rows + i * stride), tile(N)[i]);
    }
    template <int C, int A, int B>
    static void multiply() {
        multiply(tile(C), tile(A), tile(B));
    }

  private:
    using Tile = Vec[TILE];

    static Tile& tile(int number) {
        static thread_local Tile tiles[8];
        return tiles[number];
    }

    /* A denormal number becomes the zero of its sign. */
    static Vec flush(Vec x) {
        const Bits bits = (Bits)x, sign = bits & 0x80000000u;
        return (bits & 0x7f800000u) ? x : (Vec)sign;
    }
    static Vec even(Vec pairs) { return flush((Vec)((Bits)pairs << 16)); }
    static Vec odd(Vec pairs) { return flush((Vec)((Bits)pairs & 0xffff0000u)); }

    static void multiply(Tile& c, const Tile& a, const Tile& b) {
        Tile even_b, odd_b;
        for (int64_t k = 0; k < TILE; k++) even_b[k] = even(b[k]), odd_b[k] = odd(b[k]);
        for (int64_t row = 0; row < TILE; row++) {
            const Vec even_a = even(a[row]), odd_a = odd(a[row]);
            Vec even_sum = {}, odd_sum = {};
            for (int64_t k = 0; k < TILE; k++) {
                even_sum = flush(Fp32::fma(Fp32::set(even_a[k]), even_b[k], even_sum));
                odd_sum = flush(Fp32::fma(Fp32::set(odd_a[k]), odd_b[k], odd_sum));
            }
            c[row] = flush(flush(c[row]) + flush(even_sum + odd_sum));
        }
    }
};
#endif

/* Where the tiles of an operand lie, in bytes: from row to row of a tile, from tile to tile across the inner dimension,
 * and from tile to tile along it (of a result: from column to column of tiles). */
struct TileView {
    const void* base;
    int64_t row, across, along;
    char* at(int64_t i, int64_t k) const { return (char*)base + i * across + k * along; }
};

/* --------------------------------------------------------------------------- operands
 *
 * Panels are two tiles of rows. What is multiplied lies in one of these forms, `stride` numbers from row to row:
 * rows     [row][channel]: left operands;
 * squares  [panel][32 rows][32 columns]: left operands, summed over panels and columns;
 * columns  [panel][channel / 2][32 rows]: pairs of channels, right operands of products of rows;
 * pairs    [row / 2][channel]: pairs of rows, right operands of sums over rows;
 * turned   [panel][channel][16 pairs of rows]: left operands of sums over rows;
 * sums     [row][column]: floats, results. */
constexpr int64_t PANEL = 2 * TILE;
constexpr int64_t SQUARE = PANEL * PANEL;

inline TileView rows_view(const uint16_t* rows, int64_t stride) {
    return {rows, 2 * stride, 2 * stride * TILE, TILE_BYTES};
}
inline TileView squares_view(const uint16_t* squares) { return {squares, 2 * PANEL, 2 * PANEL * TILE, 2 * SQUARE}; }
inline TileView columns_view(const uint32_t* columns) {
    return {columns, 4 * PANEL, TILE_BYTES, 4 * PANEL * TILE};
}
inline TileView pairs_view(const uint32_t* pairs, int64_t stride) {
    return {pairs, 4 * stride, TILE_BYTES, 4 * stride * TILE};
}
inline TileView turned_view(const uint32_t* turned, int64_t num_channels) {
    return {turned, TILE_BYTES, TILE_BYTES * TILE, TILE_BYTES * num_channels};
}
inline TileView sums_view(const float* sums, int64_t stride) {
    return {sums, 4 * stride, 4 * stride * TILE, TILE_BYTES};
}

inline int64_t tiles_of(int64_t num) { return num > TILE ? 2 : 1; } /* of the rows of a panel */

/* --------------------------------------------------------------------------- products */

/* c = or += a times b, all of c in tiles: ROWS x COLUMNS of them, `depth` tiles of inner dimension. */
template <class Tiles, int ROWS, int COLUMNS>
void multiply_block(const TileView& a, const TileView& b, const TileView& c, int64_t depth, bool add) {
    constexpr bool both = ROWS > 1 && COLUMNS > 1;
    if (add) {
        Tiles::template load<0>(c.at(0, 0), c.row);
        if (COLUMNS > 1) Tiles::template load<1>(c.at(0, 1), c.row);
        if (ROWS > 1) Tiles::template load<2>(c.at(1, 0), c.row);
        if (both) Tiles::template load<3>(c.at(1, 1), c.row);
    } else {
        Tiles::template zero<0>();
        if (COLUMNS > 1) Tiles::template zero<1>();
        if (ROWS > 1) Tiles::template zero<2>();
        if (both) Tiles::template zero<3>();
    }
    for (int64_t k = 0; k < depth; k++) {
        Tiles::template load<4>(a.at(0, k), a.row);
        Tiles::template load<6>(b.at(0, k), b.row);
        Tiles::template multiply<0, 4, 6>();
        if (COLUMNS > 1) Tiles::template load<7>(b.at(1, k), b.row);
        if (COLUMNS > 1) Tiles::template multiply<1, 4, 7>();
        if (ROWS > 1) Tiles::template load<5>(a.at(1, k), a.row);
        if (ROWS > 1) Tiles::template multiply<2, 5, 6>();
        if (both) Tiles::template multiply<3, 5, 7>();
    }
    Tiles::template store<0>(c.at(0, 0), c.row);
    if (COLUMNS > 1) Tiles::template store<1>(c.at(0, 1), c.row);
    if (ROWS > 1) Tiles::template store<2>(c.at(1, 0), c.row);
    if (both) Tiles::template store<3>(c.at(1, 1), c.row);
}

/* The same for any number of tiles. */
template <class Tiles>
void multiply_tiles(
    const TileView& a, const TileView& b, const TileView& c, int64_t rows, int64_t columns, int64_t depth, bool add) {
    for (int64_t i = 0; i < rows; i += 2)
        for (int64_t j = 0; j < columns; j += 2) {
            const TileView left{a.at(i, 0), a.row, a.across, a.along};
            const TileView right{b.at(j, 0), b.row, b.across, b.along};
            const TileView to{c.at(i, j), c.row, c.across, c.along};
            if (i + 1 < rows && j + 1 < columns)
                multiply_block<Tiles, 2, 2>(left, right, to, depth, add);
            else if (i + 1 < rows)
                multiply_block<Tiles, 2, 1>(left, right, to, depth, add);
            else if (j + 1 < columns)
                multiply_block<Tiles, 1, 2>(left, right, to, depth, add);
            else
                multiply_block<Tiles, 1, 1>(left, right, to, depth, add);
        }
}

}  // namespace
}  // namespace unpad

#endif
