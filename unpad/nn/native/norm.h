/* Residual add, dropout and normalisation over channels in one visit to each row.
 *
 * A row is read from memory once; later passes read it from the cache. The mean is subtracted before
 * squaring: E[x^2] - E[x]^2 would lose the variance of rows far from zero.
 */
#ifndef UNPAD_NORM_H
#define UNPAD_NORM_H

#include "buffer.h"
#include "columns.h"
#include "types.h"

#include <algorithm>
#include <omp.h>

namespace unpad {
namespace {
namespace norm {

/* Dropout of one row; a share of 0 changes nothing. */
template <class T>
class RowDropout {
  public:
    RowDropout(const unpad_norm& sizes, int64_t row)
        : threshold_(dropout_threshold(sizes.dropout)),
          bits_(dropout_row(sizes.seed, (uint64_t)(sizes.places ? sizes.places[row] : row))),
          scale_((typename T::Wide)(1.0 / (1.0 - sizes.dropout))) {}

    typename T::Vec operator()(typename T::Vec x, int64_t column) const {
        if (threshold_ == 0) return x;
        return T::select(T::keep(bits_, (uint32_t)column, threshold_), x * T::set(scale_), T::set(0));
    }

  private:
    uint32_t threshold_;
    uint32_t bits_;
    typename T::Wide scale_;
};

template <class T>
void add_row(
    int64_t width, const typename T::Wide* residual, const typename T::Element* delta, RowDropout<T> dropout,
    typename T::Wide* sum) {
    for_columns<T>(width, [&](int64_t c, auto m) UNPAD_INLINE {
        T::store(sum + c, T::load(residual + c, m) + dropout(T::load(delta + c, m), c), m);
    });
}

template <class T>
typename T::Wide row_mean(int64_t width, const typename T::Wide* x) {
    typename T::Vec total = T::set(0);
    for_columns<T>(width, [&](int64_t c, auto m) UNPAD_INLINE { total = total + T::load(x + c, m); });
    return T::sum(total) / (typename T::Wide)width;
}

/* Mean of the squared distance from `centre`. */
template <class T>
typename T::Wide row_spread(int64_t width, const typename T::Wide* x, typename T::Wide centre) {
    const typename T::Vec zero = T::set(0), mean = T::set(centre);
    typename T::Vec total = zero;
    for_columns<T>(width, [&](int64_t c, auto m) UNPAD_INLINE {
        const typename T::Vec distance = T::select(m, T::load(x + c, m) - mean, zero);
        total = T::fma(distance, distance, total);
    });
    return T::sum(total) / (typename T::Wide)width;
}

template <class T>
void write_row(
    int64_t width, const typename T::Wide* x, const typename T::Wide* stats, const typename T::Wide* weight,
    const typename T::Wide* bias, typename T::Element* y) {
    const typename T::Vec mean = T::set(stats[0]), inverse = T::set(stats[1]);
    for_columns<T>(width, [&](int64_t c, auto m) UNPAD_INLINE {
        const typename T::Vec normal = (T::load(x + c, m) - mean) * inverse;
        const typename T::Vec shift = bias ? T::load(bias + c, m) : T::set(0);
        T::store(y + c, T::fma(normal, T::load(weight + c, m), shift), m);
    });
}

template <class T>
void forward(
    const unpad_norm& sizes, const typename T::Wide* residual, const typename T::Element* delta,
    const typename T::Wide* weight, const typename T::Wide* bias, typename T::Wide* sum, typename T::Element* y,
    typename T::Wide* stats) {
    using Wide = typename T::Wide;
    const int64_t width = sizes.width;
    const int threads = useful_threads(sizes.total_tokens * width, sizes.num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < sizes.total_tokens; ++row) {
        const Wide* x = residual + row * width;
        if (delta) {
            add_row<T>(width, x, delta + row * width, RowDropout<T>(sizes, row), sum + row * width);
            x = sum + row * width;
        }
        Wide* row_stats = stats + 2 * row;
        row_stats[0] = sizes.centred ? row_mean<T>(width, x) : 0;
        row_stats[1] = 1 / std::sqrt(row_spread<T>(width, x, row_stats[0]) + (Wide)sizes.eps);
        write_row<T>(width, x, row_stats, weight, bias, y + row * width);
    }
}

/* Means over a row that the gradient of its numbers needs: of g * weight, and of g * weight * normalised x. */
template <class T>
struct RowMeans {
    typename T::Wide plain;
    typename T::Wide along;
};

/* First visit of a row: the two means, and the row's share of the gradients of weight and bias. */
template <class T>
RowMeans<T> gather_row(
    int64_t width, const typename T::Element* grad_y, const typename T::Wide* x, const typename T::Wide* stats,
    const typename T::Wide* weight, typename T::Wide* grad_weight, typename T::Wide* grad_bias) {
    const typename T::Vec mean = T::set(stats[0]), inverse = T::set(stats[1]);
    typename T::Vec plain = T::set(0), along = T::set(0);
    for_columns<T>(width, [&](int64_t c, auto m) UNPAD_INLINE {
        const typename T::Vec grad = T::load(grad_y + c, m);
        const typename T::Vec normal = (T::load(x + c, m) - mean) * inverse;
        const typename T::Vec weighted = grad * T::load(weight + c, m);
        plain = plain + weighted;
        along = T::fma(weighted, normal, along);
        T::store(grad_weight + c, T::fma(grad, normal, T::load(grad_weight + c, m)), m);
        if (grad_bias) T::store(grad_bias + c, grad + T::load(grad_bias + c, m), m);
    });
    return {T::sum(plain) / (typename T::Wide)width, T::sum(along) / (typename T::Wide)width};
}

/* Second visit: the gradients of the row's numbers. grad_sum and grad_delta may be NULL. */
template <class T>
void scatter_row(
    int64_t width, const typename T::Element* grad_y, const typename T::Wide* grad_sum, const typename T::Wide* x,
    const typename T::Wide* stats, const typename T::Wide* weight, RowMeans<T> means, RowDropout<T> dropout,
    typename T::Wide* grad_residual, typename T::Element* grad_delta) {
    const typename T::Vec mean = T::set(stats[0]), inverse = T::set(stats[1]);
    const typename T::Vec plain = T::set(means.plain), along = T::set(means.along);
    for_columns<T>(width, [&](int64_t c, auto m) UNPAD_INLINE {
        const typename T::Vec normal = (T::load(x + c, m) - mean) * inverse;
        const typename T::Vec weighted = T::load(grad_y + c, m) * T::load(weight + c, m);
        typename T::Vec grad = (weighted - plain - normal * along) * inverse;
        if (grad_sum) grad = grad + T::load(grad_sum + c, m);
        T::store(grad_residual + c, grad, m);
        if (grad_delta) T::store(grad_delta + c, dropout(grad, c), m);
    });
}

/* Adds the threads' rows in the order of threads. */
template <class Wide>
void add_partials(const Wide* partials, int threads, int64_t stride, int64_t width, Wide* total) {
    for (int64_t c = 0; c < width; ++c) {
        Wide value = 0;
        for (int thread = 0; thread < threads; ++thread) value += partials[thread * stride + c];
        total[c] = value;
    }
}

template <class T>
void backward(
    const unpad_norm& sizes, const typename T::Element* grad_y, const typename T::Wide* grad_sum,
    const typename T::Wide* sum, const typename T::Wide* stats, const typename T::Wide* weight,
    typename T::Wide* grad_residual, typename T::Element* grad_delta, typename T::Wide* grad_weight,
    typename T::Wide* grad_bias) {
    using Wide = typename T::Wide;
    const int64_t width = sizes.width;
    const int threads = useful_threads(sizes.total_tokens * width, sizes.num_threads);
    /* Of each thread, a row for weight and one for bias; the gap keeps threads off each other's cache lines. */
    const int64_t half = (width + 31) / 32 * 32, stride = 2 * half + 32;
    Buffer<Wide> buffer;
    Wide* partials = buffer.at_least(threads * stride);
    std::fill_n(partials, threads * stride, (Wide)0);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < sizes.total_tokens; ++row) {
        Wide* own = partials + omp_get_thread_num() * stride;
        const int64_t at = row * width;
        const RowMeans<T> means = gather_row<T>(
            width, grad_y + at, sum + at, stats + 2 * row, weight, own, grad_bias ? own + half : nullptr);
        scatter_row<T>(
            width, grad_y + at, grad_sum ? grad_sum + at : nullptr, sum + at, stats + 2 * row, weight,
            {sizes.centred ? means.plain : 0, means.along}, RowDropout<T>(sizes, row), grad_residual + at,
            grad_delta ? grad_delta + at : nullptr);
    }
    add_partials(partials, threads, stride, width, grad_weight);
    if (grad_bias) add_partials(partials + half, threads, stride, width, grad_bias);
}

template <class T>
void forward_any(
    const unpad_norm& sizes, const void* residual, const void* delta, const void* weight, const void* bias, void* sum,
    void* y, void* stats) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    forward<T>(
        sizes, (const Wide*)residual, (const Element*)delta, (const Wide*)weight, (const Wide*)bias, (Wide*)sum,
        (Element*)y, (Wide*)stats);
}

template <class T>
void backward_any(
    const unpad_norm& sizes, const void* grad_y, const void* grad_sum, const void* sum, const void* stats,
    const void* weight, void* grad_residual, void* grad_delta, void* grad_weight, void* grad_bias) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    backward<T>(
        sizes, (const Element*)grad_y, (const Wide*)grad_sum, (const Wide*)sum, (const Wide*)stats,
        (const Wide*)weight, (Wide*)grad_residual, (Element*)grad_delta, (Wide*)grad_weight, (Wide*)grad_bias);
}

}  // namespace norm

void add_norm_forward(
    int dtype, const unpad_norm* sizes, const void* residual, const void* delta, const void* weight, const void* bias,
    void* sum, void* y, void* stats) {
    with_type(dtype, [&](auto type) {
        norm::forward_any<decltype(type)>(*sizes, residual, delta, weight, bias, sum, y, stats);
    });
}

void add_norm_backward(
    int dtype, const unpad_norm* sizes, const void* grad_y, const void* grad_sum, const void* sum, const void* stats,
    const void* weight, void* grad_residual, void* grad_delta, void* grad_weight, void* grad_bias) {
    with_type(dtype, [&](auto type) {
        norm::backward_any<decltype(type)>(
            *sizes, grad_y, grad_sum, sum, stats, weight, grad_residual, grad_delta, grad_weight, grad_bias);
    });
}

}  // namespace
}  // namespace unpad

#endif
