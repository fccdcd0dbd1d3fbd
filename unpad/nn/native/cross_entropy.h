/* Cross-entropy of rows of logits, overwritten with their gradient.
 *
 * Three passes over a row, the last two from the cache: the largest logit, the sums, the gradient.
 */
#ifndef UNPAD_CROSS_ENTROPY_H
#define UNPAD_CROSS_ENTROPY_H

#include "columns.h"
#include "types.h"

#include <limits>

namespace unpad {
namespace {
namespace losses {

/* A NaN may be lost here; row_sums meets it again. */
template <class T>
typename T::Wide row_largest(int64_t vocab_size, const typename T::Element* logits) {
    typename T::Vec largest = T::set(-std::numeric_limits<typename T::Wide>::infinity());
    for_columns<T>(vocab_size, [&](int64_t c, auto m) UNPAD_INLINE {
        largest = T::select(m, T::max(largest, T::load(logits + c, m)), largest);
    });
    return T::largest(largest);
}

template <class T>
struct Sums {
    typename T::Wide exponentials; /* of exp(logit - largest) */
    typename T::Wide logits;
};

template <class T, bool smoothed>
Sums<T> row_sums(int64_t vocab_size, const typename T::Element* logits, typename T::Wide largest) {
    const typename T::Vec zero = T::set(0), offset = T::set(largest);
    typename T::Vec exponentials = zero, plain = zero;
    for_columns<T>(vocab_size, [&](int64_t c, auto m) UNPAD_INLINE {
        const typename T::Vec x = T::load(logits + c, m);
        exponentials = exponentials + T::select(m, T::exp(x - offset), zero);
        if (smoothed) plain = plain + x;
    });
    return {T::sum(exponentials), T::sum(plain)};
}

/* logits become exp(logit - largest) * factor - floor. */
template <class T>
void write_gradient(
    int64_t vocab_size, typename T::Element* logits, typename T::Wide largest, typename T::Wide factor,
    typename T::Wide floor) {
    const typename T::Vec offset = T::set(largest), times = T::set(factor), minus = T::set(-floor);
    for_columns<T>(vocab_size, [&](int64_t c, auto m) UNPAD_INLINE {
        T::store(logits + c, T::fma(T::exp(T::load(logits + c, m) - offset), times, minus), m);
    });
}

template <class T>
void cross_entropy(
    int64_t num_rows, int64_t vocab_size, double smoothing, bool want_grad, int num_threads, void* all_logits, const int64_t* labels, void* loss, void* nll) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    const Wide floor = (Wide)(smoothing / (double)vocab_size);
    const Wide target = (Wide)(1 - smoothing);
    const auto one = T::first(1);
    const int threads = useful_threads(num_rows * vocab_size, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < num_rows; ++row) {
        Element* logits = (Element*)all_logits + row * vocab_size;
        const Wide largest = row_largest<T>(vocab_size, logits);
        const Sums<T> sums = smoothing != 0 ? row_sums<T, true>(vocab_size, logits, largest)
                                            : row_sums<T, false>(vocab_size, logits, largest);
        Element* at_label = logits + labels[row];
        const Wide label_logit = T::sum(T::load(at_label, one));
        const Wide log_sum = std::log(sums.exponentials);
        const Wide row_nll = log_sum + (largest - label_logit);
        const Wide row_uniform = log_sum + (largest - sums.logits / (Wide)vocab_size);
        ((Wide*)nll)[row] = row_nll;
        ((Wide*)loss)[row] =
            smoothing != 0 ? (Wide)(1 - smoothing) * row_nll + (Wide)smoothing * row_uniform : row_nll;
        if (!want_grad) continue;
        const Wide factor = 1 / sums.exponentials;
        write_gradient<T>(vocab_size, logits, largest, factor, floor);
        /* Once more for the label, so that its gradient is rounded once. */
        const auto softmax = T::exp(T::set(label_logit) - T::set(largest));
        T::store(at_label, T::fma(softmax, T::set(factor), T::set(-floor - target)), one);
    }
}

int64_t count_outside(int64_t num_rows, int64_t vocab_size, const int64_t* labels) {
    int64_t outside = 0;
    for (int64_t row = 0; row < num_rows; ++row) outside += labels[row] < 0 || labels[row] >= vocab_size;
    return outside;
}

}  // namespace losses

int64_t cross_entropy(
    int dtype, int64_t num_rows, int64_t vocab_size, double smoothing, int want_grad, int num_threads, void* logits,
    const int64_t* labels, void* loss, void* nll) {
    if (const int64_t outside = losses::count_outside(num_rows, vocab_size, labels)) return outside;
    with_type(dtype, [&](auto type) {
        losses::cross_entropy<decltype(type)>(
            num_rows, vocab_size, smoothing, want_grad != 0, num_threads, logits, labels, loss, nll);
    });
    return 0;
}

}  // namespace
}  // namespace unpad

#endif
