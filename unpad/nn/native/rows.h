/* Inner products of rows in place in memory, the main work of decoding.
 *
 * `sum_each` adds up the lanes of as many vectors as a vector has lanes, each in the same order: a product does not
 * depend on its place in a tile.
 */
#ifndef UNPAD_ROWS_H
#define UNPAD_ROWS_H

#include "simd.h"

namespace unpad {
namespace {

/* Products of as many numbers per instruction as a vector has lanes, for float and double. */
template <class T>
struct Rows : T {
    using Element = typename T::Element;
    using Vec = typename T::Vec;
    using Part = Vec; /* of a row */
    static constexpr int64_t part = T::lanes;
    static constexpr int tile = T::lanes == 1 || MANY_REGISTERS ? 16 : 8; /* sums kept at a time */

    static Part load_part(const Element* p) { return T::load(p); }
    static Part load_part(const Element* p, int64_t n) { return T::load(p, T::first(n)); }
    static Vec dot(Part a, Part b, Vec sum) { return T::fma(a, b, sum); }
};

}  // namespace
}  // namespace unpad

#endif
