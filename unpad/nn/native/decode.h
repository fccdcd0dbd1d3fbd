/* Attention of one new token per sequence against the keys and values of its earlier ones, or the last of them.
 *
 * A task is one row and one key head with all the query heads that it serves. It reads as many keys as the row sees,
 * whatever other rows see, and depends on no other task: a row's result does not depend on the other rows.
 */
#ifndef UNPAD_DECODE_H
#define UNPAD_DECODE_H

#include "buffer.h"
#include "columns.h"
#include "rows.h"
#include "types.h"

#include <limits>

namespace unpad {
namespace {
namespace decoding {

template <class T>
struct Decode {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    using Vec = typename T::Vec;

    unpad_attention sizes;
    unpad_held held;
    const Element* qkv;
    const Wide* cos; /* NULL for none */
    const Wide* sin;
    Element* out;

    void task(int64_t row, int64_t kv_head) const {
        const int64_t head_dim = sizes.head_dim, group = sizes.heads / sizes.kv_heads;
        const int64_t length = held.lengths[row], capacity = held.capacities[row];
        const Element* token = qkv + row * (sizes.heads + 2 * sizes.kv_heads) * head_dim;
        Element* row_keys = (Element*)held.buffers[row] + kv_head * capacity * head_dim;
        Element* row_values = row_keys + sizes.kv_heads * capacity * head_dim;
        turn(token + (sizes.heads + kv_head) * head_dim, row, row_keys + length * head_dim);
        const Element* value = token + (sizes.heads + sizes.kv_heads + kv_head) * head_dim;
        std::copy_n(value, head_dim, row_values + length * head_dim);
        thread_local Buffer<Element> queries;
        thread_local Buffer<Wide> scores;
        Element* query = queries.at_least(head_dim);
        const int64_t begin = sizes.window ? std::max<int64_t>(0, length + 1 - sizes.window) : 0;
        const int64_t num_keys = length + 1 - begin;
        Wide* weights = scores.at_least((num_keys + T::lanes - 1) / T::lanes * T::lanes);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            turn(token + head * head_dim, row, query);
            score(query, row_keys + begin * head_dim, num_keys, weights);
            const Wide total = exponentiate(num_keys, weights);
            Element* to = out + (row * sizes.heads + head) * head_dim;
            add_values(weights, row_values + begin * head_dim, num_keys, 1 / total, to);
        }
    }

  private:
    /* One head of a new token, rotated by the row's angles. */
    void turn(const Element* x, int64_t row, Element* y) const {
        const int64_t half = sizes.head_dim / 2;
        if (!cos) {
            std::copy_n(x, sizes.head_dim, y);
            return;
        }
        for_columns<T>(half, [&](int64_t d, auto m) UNPAD_INLINE {
            const Vec c = T::load(cos + row * half + d, m), s = T::load(sin + row * half + d, m);
            const Vec a = T::load(x + d, m), b = T::load(x + half + d, m);
            T::store(y + d, a * c - b * s, m);
            T::store(y + half + d, a * s + b * c, m);
        });
    }

    /* scores[k] = query . key k * scale. Fills whole vectors: the rest of the last one repeats the last key. */
    void score(const Element* query, const Element* row_keys, int64_t num_keys, Wide* scores) const {
        const int64_t head_dim = sizes.head_dim;
        for (int64_t first = 0; first < num_keys; first += T::lanes) {
            Vec sums[T::lanes];
            for (int lane = 0; lane < T::lanes; ++lane) {
                const Element* key = row_keys + std::min(first + lane, num_keys - 1) * head_dim;
                sums[lane] = T::set(0);
                int64_t d = 0;
                for (; d + T::part <= head_dim; d += T::part)
                    sums[lane] = T::dot(T::load_part(query + d), T::load_part(key + d), sums[lane]);
                if (d < head_dim)
                    sums[lane] =
                        T::dot(T::load_part(query + d, head_dim - d), T::load_part(key + d, head_dim - d), sums[lane]);
            }
            T::store(scores + first, T::sum_each(sums) * T::set((Wide)sizes.scale));
        }
    }

    /* scores to exp(score - largest), and their sum; a NaN among them makes the sum NaN. */
    static Wide exponentiate(int64_t num_keys, Wide* scores) {
        Vec most = T::set(-std::numeric_limits<Wide>::infinity());
        for (int64_t k = 0; k < num_keys; k += T::lanes) most = T::max(most, T::load(scores + k));
        const Vec largest = T::set(T::largest(most)), zero = T::set(0);
        Vec total = zero;
        for_columns<T>(num_keys, [&](int64_t k, auto m) UNPAD_INLINE {
            const Vec weight = T::exp(T::load(scores + k, m) - largest);
            T::store(scores + k, weight, m);
            total = total + T::select(m, weight, zero);
        });
        return T::sum(total);
    }

    /* y = sum over keys of weight * value, times `factor`. */
    void add_values(const Wide* weights, const Element* row_values, int64_t num_keys, Wide factor, Element* y) const {
        constexpr int VECS = 4;
        const int64_t head_dim = sizes.head_dim;
        for (int64_t start = 0; start < head_dim; start += VECS * T::lanes) {
            typename T::Mask valid[VECS];
            Vec sums[VECS];
            for (int i = 0; i < VECS; ++i) {
                valid[i] = T::first(head_dim - start - i * T::lanes);
                sums[i] = T::set(0);
            }
            for (int64_t k = 0; k < num_keys; ++k) {
                const Element* value = row_values + k * head_dim + start;
                const Vec weight = T::set(weights[k]);
                for (int i = 0; i < VECS; ++i)
                    sums[i] = T::fma(weight, T::load(value + i * T::lanes, valid[i]), sums[i]);
            }
            for (int i = 0; i < VECS; ++i) T::store(y + start + i * T::lanes, sums[i] * T::set(factor), valid[i]);
        }
    }
};

template <class T>
void decode(
    const unpad_attention& sizes, const unpad_held& held, const void* qkv, const void* cos, const void* sin,
    void* out) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    const Decode<T> call{sizes, held, (const Element*)qkv, (const Wide*)cos, (const Wide*)sin, (Element*)out};
    int64_t numbers = 0;
    for (int64_t row = 0; row < sizes.num_seqs; ++row)
        numbers += (held.lengths[row] + 1) * sizes.heads * sizes.head_dim;
    const int threads = useful_threads(numbers, sizes.num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < sizes.num_seqs * sizes.kv_heads; ++task)
        call.task(task / sizes.kv_heads, task % sizes.kv_heads);
}

}  // namespace decoding

void decode_attention(
    int dtype, const unpad_attention* sizes, const unpad_held* held, const void* qkv, const void* cos,
    const void* sin, void* out) {
    with_type(dtype, [&](auto type) {
        decoding::decode<Rows<decltype(type)>>(*sizes, *held, qkv, cos, sin, out);
    });
}

}  // namespace
}  // namespace unpad

#endif
