/* Products and packing of attention's tiles: `Math<T>` multiplies `depth` neighbouring numbers per lane and
 * instruction.
 *
 * A "pair" is `depth` numbers: one here, two in bf16.h.
 */
#ifndef UNPAD_PAIRS_H
#define UNPAD_PAIRS_H

#include "simd.h"

namespace unpad {
namespace {

/* Products of single numbers, for float and double. */
template <class T>
struct Math : T {
    using Element = typename T::Element;
    using Vec = typename T::Vec;
    using Pair = Element;
    using PairVec = Vec;
    static constexpr int depth = 1;
    static constexpr int panel_vecs = T::lanes > 1 ? 2 : 4;
    static constexpr int row_unit = T::lanes == 1 || MANY_REGISTERS ? 4 : 2;

    static PairVec load_pairs(const Pair* p) { return T::load(p); }
    static PairVec broadcast(const Pair* p) { return T::set(*p); }
    static Vec dot(PairVec a, PairVec b, Vec sum) { return T::fma(a, b, sum); }

    /* 2^x; -inf gives 0, NaN stays NaN. */
    static Vec exp2_short(Vec x) { return T::select(T::above(T::set(-126), x), T::set(0), T::exp2(x)); }

    static void store_pairs(Pair* pairs, Element* rows, int64_t stride, Vec even, Vec odd) {
        T::store(pairs, even);
        T::store(pairs + panel_vecs * T::lanes, odd);
        if (!rows) return;
        T::store(rows, even);
        T::store(rows + stride, odd);
    }

    static void interleave(const Element* row, const Element*, Pair* pairs) { T::store(pairs, T::load(row)); }

    /* rows (panel, head_dim) to one panel of columns. */
    static void transpose(const Element* rows, int64_t head_dim, Pair* panel) {
        constexpr int64_t width = panel_vecs * T::lanes;
        for (int64_t key = 0; key < width; key += T::lanes)
            for (int64_t channel = 0; channel < head_dim; channel += T::lanes)
                T::transpose(rows + key * head_dim + channel, head_dim, panel + channel * width + key, width);
    }
};

}  // namespace
}  // namespace unpad

#endif
