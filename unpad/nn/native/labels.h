/* Labels of losses. */
#ifndef UNPAD_LABELS_H
#define UNPAD_LABELS_H

#include <cstdint>

namespace unpad {
namespace {

/* How many are outside of the vocabulary. */
inline int64_t count_outside(int64_t num_rows, int64_t vocab_size, const int64_t* labels) {
    int64_t outside = 0;
    for (int64_t row = 0; row < num_rows; ++row) outside += labels[row] < 0 || labels[row] >= vocab_size;
    return outside;
}

}  // namespace
}  // namespace unpad

#endif
