/* Cross-entropy of rows of logits, overwritten with their gradient.
 *
 * Three passes over a row, the last two from the cache: the largest logit, the sums, the gradient. One exponential per
 * logit where its digits fit into the logit's place, else two.
 */
#ifndef UNPAD_CROSS_ENTROPY_H
#define UNPAD_CROSS_ENTROPY_H

#include "columns.h"
#include "labels.h"
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

/* Columns that are summed apart before they join the row's sum: next to a likely token, thousands of unlikely ones
 * would each be rounded away. */
constexpr int64_t SUM_COLUMNS = 512;

/* Where `kept`, the exponentials take the logits' place, unless rounding to T's element would lose digits of them. */
template <class T>
constexpr bool keeps_exponentials = std::is_same<typename T::Element, typename T::Wide>::value;

template <class T, bool smoothed, bool kept>
Sums<T> row_sums(int64_t vocab_size, typename T::Element* logits, typename T::Wide largest) {
    const typename T::Vec zero = T::set(0), offset = T::set(largest);
    typename T::Vec exponentials = zero, plain = zero;
    for (int64_t start = 0; start < vocab_size; start += SUM_COLUMNS) {
        typename T::Vec some = zero, plain_some = zero;
        for_columns<T>(std::min(SUM_COLUMNS, vocab_size - start), [&](int64_t c, auto m) UNPAD_INLINE {
            const typename T::Vec x = T::load(logits + start + c, m), e = T::exp(x - offset);
            some = some + T::select(m, e, zero);
            if (smoothed) plain_some = plain_some + x;
            if constexpr (kept) T::store(logits + start + c, e, m);
        });
        exponentials = exponentials + some;
        if (smoothed) plain = plain + plain_some;
    }
    return {T::sum(exponentials), T::sum(plain)};
}

/* exp(logit - largest) * factor - floor replaces the logits, or the exponentials that `row_sums` kept. */
template <class T, bool kept>
void write_gradient(
    int64_t vocab_size, typename T::Element* logits, typename T::Wide largest, typename T::Wide factor,
    typename T::Wide floor) {
    const typename T::Vec offset = T::set(largest), times = T::set(factor), minus = T::set(-floor);
    for_columns<T>(vocab_size, [&](int64_t c, auto m) UNPAD_INLINE {
        typename T::Vec e = T::load(logits + c, m);
        if constexpr (!kept) e = T::exp(e - offset);
        T::store(logits + c, T::fma(e, times, minus), m);
    });
}

/* Loss and nll of a row; with `want_grad` the gradient takes the logits' place. */
template <class T, bool smoothed, bool want_grad>
void score_row(
    int64_t vocab_size, typename T::Wide smoothing, typename T::Element* logits, int64_t label, typename T::Wide* loss,
    typename T::Wide* nll) {
    using Wide = typename T::Wide;
    constexpr bool kept = want_grad && keeps_exponentials<T>;
    const auto one = T::first(1);
    typename T::Element* at_label = logits + label;
    const Wide label_logit = T::sum(T::load(at_label, one)), largest = row_largest<T>(vocab_size, logits);
    const Sums<T> sums = row_sums<T, smoothed, kept>(vocab_size, logits, largest);
    const Wide log_sum = std::log(sums.exponentials);
    *nll = log_sum + (largest - label_logit);
    const Wide uniform = log_sum + (largest - sums.logits / (Wide)vocab_size);
    *loss = smoothed ? (1 - smoothing) * *nll + smoothing * uniform : *nll;
    if (!want_grad) return;
    const Wide floor = smoothing / (Wide)vocab_size, factor = 1 / sums.exponentials;
    write_gradient<T, kept>(vocab_size, logits, largest, factor, floor);
    /* Once more for the label, so that its gradient is rounded once. */
    const auto softmax = T::exp(T::set(label_logit) - T::set(largest));
    T::store(at_label, T::fma(softmax, T::set(factor), T::set(smoothing - 1 - floor)), one);
}

template <class T>
void cross_entropy(
    int64_t num_rows, int64_t vocab_size, double smoothing, bool want_grad, int num_threads, void* all_logits,
    const int64_t* labels, void* loss, void* nll) {
    using Wide = typename T::Wide;
    const auto score = smoothing != 0 ? (want_grad ? score_row<T, true, true> : score_row<T, true, false>)
                                      : (want_grad ? score_row<T, false, true> : score_row<T, false, false>);
    const int threads = useful_threads(num_rows * vocab_size, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < num_rows; ++row)
        score(
            vocab_size, (Wide)smoothing, (typename T::Element*)all_logits + row * vocab_size, labels[row],
            (Wide*)loss + row, (Wide*)nll + row);
}

}  // namespace losses

int64_t cross_entropy(
    int dtype, int64_t num_rows, int64_t vocab_size, double smoothing, int want_grad, int num_threads, void* logits,
    const int64_t* labels, void* loss, void* nll) {
    if (const int64_t outside = count_outside(num_rows, vocab_size, labels)) return outside;
    with_type(dtype, [&](auto type) {
        losses::cross_entropy<decltype(type)>(
            num_rows, vocab_size, smoothing, want_grad != 0, num_threads, logits, labels, loss, nll);
    });
    return 0;
}

}  // namespace
}  // namespace unpad

#endif
