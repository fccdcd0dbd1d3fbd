/* Loop over columns for the kernels that work row by row, and the number of threads it is worth. */
#ifndef UNPAD_COLUMNS_H
#define UNPAD_COLUMNS_H

#include "simd.h"

#include <algorithm>

namespace unpad {
namespace {

/* Calls body(column, mask) for every vector of a row; only the tail pays for a mask. */
template <class T, class Body>
inline void for_columns(int64_t width, Body body) {
    int64_t column = 0;
    for (; column + T::lanes <= width; column += T::lanes) body(column, Whole());
    if (column < width) body(column, T::first(width - column));
}

/* x[column] of a row, and bias[column] added where there is a bias. */
template <class T, class Mask>
inline typename T::Vec load_shifted(
    const typename T::Element* x, const typename T::Element* bias, int64_t column, Mask m) {
    return bias ? T::load(x + column, m) + T::load(bias + column, m) : T::load(x + column, m);
}

/* Threads to wake for this many numbers: below some 16,000 each, waking costs more than it saves. */
inline int useful_threads(int64_t numbers, int num_threads) {
    return (int)std::max<int64_t>(1, std::min<int64_t>(num_threads, numbers / 16384));
}

}  // namespace
}  // namespace unpad

#endif
