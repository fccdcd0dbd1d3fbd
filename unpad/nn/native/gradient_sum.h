/* Gradients of micro-batches added up in double, each rounded so that no order of adding changes the sum.
 *
 * `processes/sums.py` has the proof. No product is rounded: the compiler may fuse it with the addition.
 */
#ifndef UNPAD_GRADIENT_SUM_H
#define UNPAD_GRADIENT_SUM_H

#include "columns.h"

namespace unpad {
namespace {
namespace gradient {

/* Plain loops: the compiler makes registers of them, whatever the target has. */
template <bool REPLACE>
void add_rounded(int64_t first, int64_t last, double factor, double shift, const float* gradient, double* sum) {
    for (int64_t i = first; i < last; ++i) {
        const double rounded = (double)gradient[i] * factor + shift - shift;
        sum[i] = REPLACE ? rounded : sum[i] + rounded;
    }
}

}  // namespace gradient

void add_rounded(
    int64_t count, double factor, double shift, int replace, int num_threads, const float* gradient, double* sum) {
    const int64_t threads = useful_threads(count, num_threads);
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t share = 0; share < threads; ++share) {
        const int64_t first = count * share / threads, last = count * (share + 1) / threads;
        if (replace)
            gradient::add_rounded<true>(first, last, factor, shift, gradient, sum);
        else
            gradient::add_rounded<false>(first, last, factor, shift, gradient, sum);
    }
}

}  // namespace
}  // namespace unpad

#endif
