/* What all bodies of attention share: the arguments of a call, the rows of a sequence, and the order of its tasks.
 *
 * A task is one sequence and one key head with all the query heads that it serves, so that one task writes each number
 * and the order in which gradients of keys are summed is fixed.
 */
#ifndef UNPAD_ATTENTION_CALL_H
#define UNPAD_ATTENTION_CALL_H

#include "buffer.h"
#include "kernels.h"
#include "pairs.h"
#include "simd.h"

#include <algorithm>

namespace unpad {
namespace {
namespace attention {

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN_2 = 0.6931471805599453;

/* Scores (in powers of two) no larger than this need no maximum taken off: sums of 2^100 fit the range of a float, and
 * so does 2^-100. */
constexpr double SAFE_EXPONENT = 100.0;

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* --------------------------------------------------------------------------- one call */

template <class M>
struct Call {
    using Element = typename M::Element;
    using Wide = typename M::Wide;

    const unpad_attention& sizes;
    const int32_t* cu_seqlens;
    const Element* qkv;
    const Element* qkv_bias; /* (heads + 2 * kv_heads, head_dim) or NULL */
    const Wide* cos;
    const Wide* sin;
    const Wide* key_bias;
    const unpad_held* held = nullptr; /* earlier tokens of the sequences; NULL for none */

    int64_t qkv_stride() const { return (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim; }
    int64_t out_stride() const { return sizes.heads * sizes.head_dim; }
    int64_t group() const { return sizes.heads / sizes.kv_heads; }
};

template <class M, bool biased, class In>
void turn_rows(
    const In* x, int64_t x_stride, const In* bias, int64_t num_rows, int64_t head_dim, const typename M::Wide* cos,
    const typename M::Wide* sin, bool back, double factor, typename M::Element* y, int64_t y_stride) {
    const auto scale = M::set((typename M::Wide)factor);
    const auto load_biased = [&](int64_t d, auto m) UNPAD_INLINE {
        return biased ? M::load(x + d, m) + M::load(bias + d, m) : M::load(x + d, m);
    };
    if (!cos) {
        for (int64_t row = 0; row < num_rows; row++, x += x_stride)
            for (int64_t d = 0; d < head_dim; d += M::lanes)
                M::store(y + row * y_stride + d, load_biased(d, Whole()) * scale);
        return;
    }
    const auto sin_scale = back ? M::set(0) - scale : scale;
    const int64_t half = head_dim / 2;
    for (int64_t row = 0; row < num_rows; row++, x += x_stride, y += y_stride, cos += half, sin += half) {
        int64_t d = 0;
        for (; d + M::lanes <= half; d += M::lanes) {
            auto c = M::load(cos + d) * scale, s = M::load(sin + d) * sin_scale;
            auto a = load_biased(d, Whole()), b = load_biased(half + d, Whole());
            M::store(y + d, a * c - b * s);
            M::store(y + half + d, a * s + b * c);
        }
        if (d == half) continue;
        const auto valid = M::first(half - d); /* for the rest only: masked stores are slow */
        auto c = M::load(cos + d, valid) * scale, s = M::load(sin + d, valid) * sin_scale;
        auto a = load_biased(d, valid), b = load_biased(half + d, valid);
        M::store(y + d, a * c - b * s, valid);
        M::store(y + half + d, a * s + b * c, valid);
    }
}

/* y = (x + bias) * factor, rotated by the angles of cos and sin (by their negatives when `back`), row by row; bias
 * (head_dim) NULL for none. */
template <class M, class In>
void turn(
    const In* x, int64_t x_stride, const In* bias, int64_t num_rows, int64_t head_dim, const typename M::Wide* cos,
    const typename M::Wide* sin, bool back, double factor, typename M::Element* y, int64_t y_stride) {
    if (bias)
        turn_rows<M, true>(x, x_stride, bias, num_rows, head_dim, cos, sin, back, factor, y, y_stride);
    else
        turn_rows<M, false>(x, x_stride, bias, num_rows, head_dim, cos, sin, back, factor, y, y_stride);
}

template <class M>
void interleave_rows(
    const typename M::Element* rows, int64_t stride, int64_t num_rows, int64_t head_dim, typename M::Pair* pairs) {
    for (int64_t row = 0; row < num_rows; row += M::depth)
        for (int64_t d = 0; d < head_dim; d += M::lanes)
            M::interleave(
                rows + row * stride + d, rows + (row + 1) * stride + d, pairs + row / M::depth * head_dim + d);
}

/* Sum of squares of a row. */
template <class M>
double square_of(const typename M::Element* row, int64_t head_dim) {
    auto square = M::set(0);
    for (int64_t d = 0; d < head_dim; d += M::lanes) {
        auto x = M::load(row + d);
        square = M::fma(x, x, square);
    }
    return M::sum(square);
}

/* A sequence and a key head of a call: where its rows lie, and which keys its queries see. */
template <class M>
struct Sequence {
    using Element = typename M::Element;
    using Wide = typename M::Wide;

    const Call<M>& call;
    const int64_t head_dim, kv_head;
    const int64_t earlier; /* held tokens, before the new ones */
    const int64_t start;   /* in the run, where the sequence would start with the held ones: may be negative */
    const int64_t length;  /* with the held ones */
    const int64_t window;
    const int64_t place; /* of its first token, for dropout */
    Element* held_keys = nullptr;
    Element* held_values = nullptr;

    Sequence(const Call<M>& of, int64_t seq, int64_t of_head)
        : call(of),
          head_dim(of.sizes.head_dim),
          kv_head(of_head),
          earlier(of.held ? of.held->lengths[seq] : 0),
          start(of.cu_seqlens[seq] - earlier),
          length(of.cu_seqlens[seq + 1] - start),
          window(of.sizes.window),
          place(of.sizes.bases ? of.sizes.bases[seq] : start) {
        if (!of.held) return;
        const int64_t size = of.held->capacities[seq] * head_dim;
        held_keys = (Element*)of.held->buffers[seq] + kv_head * size;
        held_values = held_keys + of.sizes.kv_heads * size;
    }

    /* Tables from a row on, not a held one; NULL without rotary. */
    const Wide* cos(int64_t row) const { return call.cos ? call.cos + (start + row) * head_dim / 2 : nullptr; }
    const Wide* sin(int64_t row) const { return call.cos ? call.sin + (start + row) * head_dim / 2 : nullptr; }

    /* Rows of a token's (heads + 2 * kv_heads, head_dim). */
    int64_t query_row(int64_t i) const { return kv_head * call.group() + i; } /* of the i-th head that it serves */
    int64_t key_row() const { return call.sizes.heads + kv_head; }
    int64_t value_row() const { return key_row() + call.sizes.kv_heads; }

    /* Where rows of this token lie in something like qkv. */
    int64_t offset(int64_t place, int64_t row) const { return (start + place) * call.qkv_stride() + row * head_dim; }

    /* The same rows of new tokens, `first` and on: with their bias, and turned where they are `rotary`. */
    void load_new(
        int64_t row, bool rotary, int64_t first, int64_t num_rows, Element* rows, int64_t stride) const {
        const Wide* none = nullptr;
        turn<M>(
            call.qkv + offset(first, row), call.qkv_stride(), call.qkv_bias ? call.qkv_bias + row * head_dim : nullptr,
            num_rows, head_dim, rotary ? cos(first) : none, rotary ? sin(first) : none, false, 1, rows, stride);
    }

    /* Of held tokens from `held`, and of new ones, which are stored there; all new where it is NULL. */
    void load(
        int64_t row, Element* held, bool rotary, int64_t first, int64_t num_rows, Element* rows, int64_t stride) const {
        const int64_t num_held = std::min(std::max<int64_t>(earlier - first, 0), num_rows);
        for (int64_t i = 0; i < num_held; i++)
            std::copy_n(held + (first + i) * head_dim, head_dim, rows + i * stride);
        if (num_held == num_rows) return;
        load_new(row, rotary, first + num_held, num_rows - num_held, rows + num_held * stride, stride);
        if (!held) return;
        for (int64_t i = num_held; i < num_rows; i++)
            std::copy_n(rows + i * stride, head_dim, held + (first + i) * head_dim);
    }

    /* Biases of all keys, as powers of two. */
    void load_bias(Wide* bias) const {
        for (int64_t key = 0; key < length; key++) bias[key] = call.key_bias[start + key] * (Wide)LOG2_E;
    }

    /* Gradients of all keys, or of all values, turned back and written. */
    void write(const Wide* grad, int64_t row, bool rotary, double factor, Element* grad_qkv) const {
        const Wide *no_bias = nullptr, *none = nullptr;
        turn<M>(
            grad, head_dim, no_bias, length, head_dim, rotary ? cos(0) : none, rotary ? sin(0) : none, true, factor,
            grad_qkv + offset(0, row), call.qkv_stride());
    }

    /* Keys that the queries before `stop` see end here, and those of `query` and of later ones begin there. */
    int64_t seen_before(int64_t stop) const { return call.sizes.causal ? std::min(stop, length) : length; }
    int64_t first_seen(int64_t query) const { return window ? std::max((int64_t)0, query + 1 - window) : 0; }

    /* Whether scores of a query and keys with these squares may be too large for sums without a shift. */
    bool needs_shift(double query_square, double key_square) const {
        const double safe = SAFE_EXPONENT / (call.sizes.scale * LOG2_E);
        return !(query_square * key_square <= safe * safe); /* so for NaN too */
    }

    /* What dropout draws from for a query of a head and for a key. */
    uint32_t dropout_bits(int64_t query, int64_t head) const {
        const uint64_t token = (uint64_t)(place + query);
        return dropout_row(call.sizes.seed, token * (uint64_t)call.sizes.heads + (uint64_t)head);
    }
    uint32_t dropout_column(int64_t key) const { return (uint32_t)(place + key); }
};

/* Order in which sequences are started, (num_seqs): by descending power of two of their length, so that no thread
 * is left with a long one at the end. */
void long_first(const int32_t* cu_seqlens, int64_t num_seqs, int32_t* order) {
    int64_t starts[34] = {};
    auto place = [&](int64_t seq) {
        const uint32_t length = (uint32_t)(cu_seqlens[seq + 1] - cu_seqlens[seq]);
        return length ? __builtin_clz(length) : 32;
    };
    for (int64_t seq = 0; seq < num_seqs; seq++) starts[place(seq) + 1]++;
    for (int i = 1; i < 34; i++) starts[i] += starts[i - 1];
    for (int64_t seq = 0; seq < num_seqs; seq++) order[starts[place(seq)]++] = (int32_t)seq;
}

/* Does nothing at the beginning and the end of a thread's part. */
struct Nothing {};

/* Calls run(seq, kv_head) for every sequence that has tokens and every key head. In each thread a `Region` lives
 * meanwhile. */
template <class Region, class M, class F>
void each_task(const Call<M>& call, F run) {
    const int64_t kv_heads = call.sizes.kv_heads, num_tasks = call.sizes.num_seqs * kv_heads;
    Buffer<int32_t> buffer;
    int32_t* order = buffer.at_least(call.sizes.num_seqs);
    long_first(call.cu_seqlens, call.sizes.num_seqs, order);
#pragma omp parallel num_threads(call.sizes.num_threads)
    {
        [[maybe_unused]] const Region region{};
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; i++) {
            const int64_t seq = order[i / kv_heads];
            if (call.cu_seqlens[seq + 1] != call.cu_seqlens[seq]) run(seq, i % kv_heads);
        }
    }
}

template <class M>
Call<M> make_call(
    const unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv, const void* qkv_bias, const void* cos,
    const void* sin, const void* key_bias) {
    using Element = typename M::Element;
    using Wide = typename M::Wide;
    return {*sizes, cu_seqlens, (const Element*)qkv, (const Element*)qkv_bias, (const Wide*)cos, (const Wide*)sin,
            (const Wide*)key_bias, nullptr};
}

}  // namespace attention
}  // namespace
}  // namespace unpad

#endif
