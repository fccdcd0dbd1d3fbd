/* Activations of the feed-forward layer, plain and gated. */
#ifndef UNPAD_ACTIVATION_H
#define UNPAD_ACTIVATION_H

#include "column_sums.h"
#include "columns.h"
#include "types.h"

namespace unpad {
namespace {
namespace activation {

template <class T>
struct ValueAndSlope {
    typename T::Vec value;
    typename T::Vec slope;
};

template <class T>
struct Relu {
    using Vec = typename T::Vec;
    static Vec value(Vec x) { return T::max(T::set(0), x); }
    static ValueAndSlope<T> both(Vec x) {
        const Vec y = value(x);
        return {y, T::select(T::above(x, T::set(0)), T::set(1), y)}; /* y is 0 here, or NaN where x is */
    }
};

/* x * P(a normal number is below x), exact: Hendrycks and Gimpel 2016, arXiv 1606.08415. */
template <class T>
struct Gelu {
    using Vec = typename T::Vec;
    static Vec below(Vec x) { return T::fma(T::set(0.5), T::erf(x * T::set(0.70710678118654752440)), T::set(0.5)); }
    static Vec value(Vec x) { return x * below(x); }
    static ValueAndSlope<T> both(Vec x) {
        const Vec share = below(x);
        const Vec density = T::exp(x * x * T::set(-0.5)) * T::set(0.39894228040143267794);
        return {x * share, T::fma(x, density, share)};
    }
};

/* x * sigmoid(x). */
template <class T>
struct Silu {
    using Vec = typename T::Vec;
    static Vec sigmoid(Vec x) { return T::set(1) / (T::set(1) + T::exp(T::set(0) - x)); }
    static Vec value(Vec x) { return x * sigmoid(x); }
    static ValueAndSlope<T> both(Vec x) {
        const Vec share = sigmoid(x), y = x * share;
        return {y, T::fma(y, T::set(1) - share, share)};
    }
};

template <class T, class Function, bool gated>
void forward(int64_t rows, int64_t hidden, int num_threads, const void* x, const void* bias, void* y) {
    using Element = typename T::Element;
    const int64_t input_width = gated ? 2 * hidden : hidden;
    const Element* shift = (const Element*)bias;
    const int threads = useful_threads(rows * input_width, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* in = (const Element*)x + row * input_width;
        Element* out = (Element*)y + row * hidden;
        for_columns<T>(hidden, [&](int64_t c, auto m) UNPAD_INLINE {
            typename T::Vec value = Function::value(load_shifted<T>(in, shift, c, m));
            if (gated) value = value * load_shifted<T>(in, shift, hidden + c, m);
            T::store(out + c, value, m);
        });
    }
}

template <class T, class Function, bool gated>
void backward_row(
    int64_t hidden, const typename T::Element* grad_out, const typename T::Element* in, const typename T::Element* bias,
    typename T::Element* grad_in) {
    for_columns<T>(hidden, [&](int64_t c, auto m) UNPAD_INLINE {
        const ValueAndSlope<T> at = Function::both(load_shifted<T>(in, bias, c, m));
        typename T::Vec grad = T::load(grad_out + c, m);
        if (gated) {
            T::store(grad_in + hidden + c, grad * at.value, m);
            grad = grad * load_shifted<T>(in, bias, hidden + c, m);
        }
        T::store(grad_in + c, grad * at.slope, m);
    });
}

template <class T, class Function, bool gated>
void backward(
    int64_t rows, int64_t hidden, int num_threads, const void* grad_y, const void* x, const void* bias, void* grad_x,
    void* grad_bias) {
    using Element = typename T::Element;
    const int64_t input_width = gated ? 2 * hidden : hidden;
    const int threads = useful_threads(rows * input_width, num_threads);
    ColumnSums<T> sums(grad_bias ? rows : 0, input_width);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < rows; start += SUM_ROWS) {
        const int64_t stop = std::min(start + SUM_ROWS, rows);
        for (int64_t row = start; row < stop; ++row) {
            Element* grad_in = (Element*)grad_x + row * input_width;
            backward_row<T, Function, gated>(
                hidden, (const Element*)grad_y + row * hidden, (const Element*)x + row * input_width,
                (const Element*)bias, grad_in);
            if (grad_bias) sums.add(row, grad_in);
        }
    }
    if (grad_bias) sums.write((typename T::Wide*)grad_bias, num_threads);
}

template <class T>
void forward_kind(int kind, int64_t rows, int64_t hidden, int num_threads, const void* x, const void* bias, void* y) {
    switch (kind) {
        case UNPAD_RELU: return forward<T, Relu<T>, false>(rows, hidden, num_threads, x, bias, y);
        case UNPAD_GELU: return forward<T, Gelu<T>, false>(rows, hidden, num_threads, x, bias, y);
        case UNPAD_GEGLU: return forward<T, Gelu<T>, true>(rows, hidden, num_threads, x, bias, y);
        case UNPAD_SWIGLU: return forward<T, Silu<T>, true>(rows, hidden, num_threads, x, bias, y);
    }
}

template <class T>
void backward_kind(
    int kind, int64_t rows, int64_t hidden, int num_threads, const void* grad_y, const void* x, const void* bias,
    void* grad_x, void* grad_bias) {
    switch (kind) {
        case UNPAD_RELU:
            return backward<T, Relu<T>, false>(rows, hidden, num_threads, grad_y, x, bias, grad_x, grad_bias);
        case UNPAD_GELU:
            return backward<T, Gelu<T>, false>(rows, hidden, num_threads, grad_y, x, bias, grad_x, grad_bias);
        case UNPAD_GEGLU:
            return backward<T, Gelu<T>, true>(rows, hidden, num_threads, grad_y, x, bias, grad_x, grad_bias);
        case UNPAD_SWIGLU:
            return backward<T, Silu<T>, true>(rows, hidden, num_threads, grad_y, x, bias, grad_x, grad_bias);
    }
}

}  // namespace activation

void activation_forward(
    int dtype, int kind, int64_t total_tokens, int64_t hidden, int num_threads, const void* x, const void* bias,
    void* y) {
    with_type(dtype, [&](auto type) {
        activation::forward_kind<decltype(type)>(kind, total_tokens, hidden, num_threads, x, bias, y);
    });
}

void activation_backward(
    int dtype, int kind, int64_t total_tokens, int64_t hidden, int num_threads, const void* grad_y, const void* x,
    const void* bias, void* grad_x, void* grad_bias) {
    with_type(dtype, [&](auto type) {
        activation::backward_kind<decltype(type)>(
            kind, total_tokens, hidden, num_threads, grad_y, x, bias, grad_x, grad_bias);
    });
}

}  // namespace
}  // namespace unpad

#endif
