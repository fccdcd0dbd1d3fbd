/* Attention within each sequence of a flat run of tokens, forward and backward.
 *
 * A task (attention_call.h) packs its keys and values once, then takes QUERY_ROWS queries at a time against KEY_BLOCK
 * keys at a time: scores of a tile stay in registers until they are weights, and only weights are stored, in the type
 * of activations. Memory is linear in the length of the longest sequence.
 *
 * The code is written once over `Math<T>` (pairs.h), which gives vectors, the product of pairs, and the two ways of
 * packing.
 *
 * Two packed forms, both of pairs (M::depth neighbours, which one instruction multiplies and adds; one or two):
 * columns  [panel][channel / depth][PANEL keys]: pairs of channels, keys side by side; scores are made from it;
 * pairs    [row / depth][channel]: pairs of rows, channels side by side; sums over rows are made from it. Rows past
 * the end of a sequence are zero in both.
 */
#ifndef UNPAD_ATTENTION_H
#define UNPAD_ATTENTION_H

#include "attention_call.h"
#include "types.h"

#include <limits>
#include <type_traits>

namespace unpad {
namespace {
namespace attention {

constexpr int64_t QUERY_ROWS = 48; /* queries of a block: a multiple of every tile height */
constexpr int64_t KEY_BLOCK = 256; /* keys of a block: its weights stay in the first cache */
constexpr int64_t ROW_WIDTH = 128; /* numbers from row to row of a block of queries; fixed, so that offsets are too */

#define UNPAD_APART __attribute__((noinline)) /* registers are for one tile at a time */

/* --------------------------------------------------------------------------- tiles of products */

/* c[row][vec] += sum over pairs of a[row][pair] * b[pair][vec], all of c in registers. */
template <class M, int ROWS, int VECS>
inline UNPAD_INLINE void multiply(
    const typename M::Pair* a, int64_t row_stride, int64_t pair_stride, const typename M::Pair* b, int64_t b_stride,
    int64_t num_pairs, typename M::Vec (&c)[ROWS][VECS]) {
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        typename M::PairVec right[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) right[v] = M::load_pairs(b + pair * b_stride + v * M::lanes);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            typename M::PairVec left = M::broadcast(a + r * row_stride + pair * pair_stride);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) c[r][v] = M::dot(left, right[v], c[r][v]);
        }
    }
}

template <int N>
using Constant = std::integral_constant<int, N>;

/* Calls f(height, row) for tiles of three, two or one M::row_unit. */
template <class M, class F>
inline UNPAD_INLINE void each_row_tile(int64_t num_rows, F f) {
    constexpr int unit = M::row_unit;
    for (int64_t row = 0; row < num_rows;) {
        int64_t left = num_rows - row;
        if (left >= 3 * unit && left != 4 * unit) {
            f(Constant<3 * unit>(), row);
            row += 3 * unit;
        } else if (left >= 2 * unit) {
            f(Constant<2 * unit>(), row);
            row += 2 * unit;
        } else {
            f(Constant<unit>(), row);
            row += unit;
        }
    }
}

template <class M, int ROWS, int VECS>
void sum_tile(
    const typename M::Pair* a, int64_t row_stride, int64_t pair_stride, const typename M::Pair* b, int64_t num_pairs,
    typename M::Wide* c, int64_t width, bool add) {
    typename M::Vec sum[ROWS][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = add ? M::load(c + r * width + v * M::lanes) : M::set(0);
    multiply<M, ROWS, VECS>(a, row_stride, pair_stride, b, width, num_pairs, sum);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) M::store(c + r * width + v * M::lanes, sum[r][v]);
}

/* c (ROWS, width) = or += a times b, where b is `pairs` packed, (num_pairs, width). */
template <class M, int ROWS>
void sum_rows(
    const typename M::Pair* a, int64_t row_stride, int64_t pair_stride, const typename M::Pair* b, int64_t num_pairs,
    typename M::Wide* c, int64_t width, bool add) {
    constexpr int full = M::panel_vecs;
    int64_t column = 0;
    for (; column + full * M::lanes <= width; column += full * M::lanes)
        sum_tile<M, ROWS, full>(a, row_stride, pair_stride, b + column, num_pairs, c + column, width, add);
    for (; column < width; column += M::lanes)
        sum_tile<M, ROWS, 1>(a, row_stride, pair_stride, b + column, num_pairs, c + column, width, add);
}

/* Scratch memory of the tiles of one task. */
template <class M>
struct Workspace {
    Buffer<typename M::Element> rows, queries, grads, weights, grad_scores;
    Buffer<typename M::Pair> key_columns, key_pairs, value_columns, value_pairs, query_pairs, grad_pairs;
    Buffer<typename M::Pair> weight_pairs, grad_score_pairs;
    Buffer<typename M::Wide> bias, bias_grad, key_grad, value_grad, query_grad, out;
    Buffer<double> key_squares;
};

/* --------------------------------------------------------------------------- a sequence and a key head */

template <class M>
class Task {
  public:
    using Element = typename M::Element;
    using Wide = typename M::Wide;
    using Vec = typename M::Vec;
    using Pair = typename M::Pair;
    static constexpr int64_t PANEL = M::panel_vecs * M::lanes;

    Task(const Call<M>& call, int64_t seq, int64_t kv_head)
        : seq_(call, seq, kv_head),
          call_(call),
          sizes_(call.sizes),
          head_dim_(call.sizes.head_dim),
          length_(seq_.length),
          padded_(round_up(length_, PANEL)),
          window_(call.sizes.window),
          scale_(M::set((Wide)(sizes_.scale * LOG2_E))),
          threshold_(dropout_threshold(sizes_.dropout)),
          kept_(M::set((Wide)(1 / (1 - sizes_.dropout)))) {
        static thread_local Workspace<M> workspace;
        work_ = &workspace;
    }

    void forward(Element* out, Wide* log_z) {
        Pair* value_pairs = work_->value_pairs.at_least(padded_ / M::depth * head_dim_);
        key_squares_ = work_->key_squares.at_least(length_);
        pack(seq_.key_row(), seq_.held_keys, true, columns(work_->key_columns), nullptr, key_squares_);
        pack(seq_.value_row(), seq_.held_values, false, nullptr, value_pairs, nullptr);
        load_bias();
        for (int64_t i = 0; i < call_.group(); i++) {
            head_ = seq_.query_row(i);
            for (first_ = seq_.earlier; first_ < length_; first_ += QUERY_ROWS) forward_block(value_pairs, out, log_z);
        }
    }

    void backward(const Element* out, const Wide* log_z, const Element* grad_out, Element* grad_qkv, Wide* grad_bias) {
        Pair* key_pairs = work_->key_pairs.at_least(padded_ / M::depth * head_dim_);
        pack(seq_.key_row(), nullptr, true, columns(work_->key_columns), key_pairs, nullptr);
        pack(seq_.value_row(), nullptr, false, columns(work_->value_columns), nullptr, nullptr);
        load_bias();
        Wide* key_grad = zeros(work_->key_grad, padded_ * head_dim_);
        Wide* value_grad = zeros(work_->value_grad, padded_ * head_dim_);
        bias_grad_ = grad_bias ? zeros(work_->bias_grad, padded_) : nullptr;
        for (int64_t i = 0; i < call_.group(); i++) {
            head_ = seq_.query_row(i);
            for (first_ = 0; first_ < length_; first_ += QUERY_ROWS) backward_block(out, log_z, grad_out, grad_qkv);
        }
        seq_.write(key_grad, seq_.key_row(), true, sizes_.scale, grad_qkv);
        seq_.write(value_grad, seq_.value_row(), false, 1 / (1 - sizes_.dropout), grad_qkv);
        if (grad_bias) std::copy_n(bias_grad_, length_, grad_bias + seq_.kv_head * sizes_.total_tokens + seq_.start);
    }

  private:
    Pair* columns(Buffer<Pair>& buffer) const { return buffer.at_least(padded_ / M::depth * head_dim_); }

    static Wide* zeros(Buffer<Wide>& buffer, int64_t count) {
        Wide* data = buffer.at_least(count);
        std::fill_n(data, count, (Wide)0);
        return data;
    }

    /* Keys or values into the packed forms that are not NULL: the earlier ones from `held`, unless it is NULL, where
     * the new ones are stored; and into `squares` (length_), if not NULL, the largest square of a row up to each one. A
     * NaN may be lost there; it shows again in the scores. */
    void pack(int64_t token_row, Element* held, bool rotary, Pair* columns, Pair* pairs, double* squares) {
        Element* rows = work_->rows.at_least(PANEL * head_dim_);
        double largest = 0;
        for (int64_t key = 0; key < length_; key += PANEL) {
            const int64_t num_rows = std::min(PANEL, length_ - key);
            seq_.load(token_row, held, rotary, key, num_rows, rows, head_dim_);
            std::fill_n(rows + num_rows * head_dim_, (PANEL - num_rows) * head_dim_, (Element)0);
            if (columns) M::transpose(rows, head_dim_, columns + key / M::depth * head_dim_);
            if (pairs) interleave_rows<M>(rows, head_dim_, PANEL, head_dim_, pairs + key / M::depth * head_dim_);
            if (!squares) continue;
            for (int64_t row = 0; row < num_rows; row++)
                squares[key + row] = largest = std::max(largest, square_of<M>(rows + row * head_dim_, head_dim_));
        }
    }

    void load_bias() {
        bias_ = nullptr;
        if (!call_.key_bias) return;
        Wide* bias = zeros(work_->bias, padded_);
        seq_.load_bias(bias);
        bias_ = bias;
    }

    /* Queries first_ and on, turned; sets the sizes of the block. */
    Element* load_queries() {
        num_rows_ = std::min(QUERY_ROWS, length_ - first_);
        padded_rows_ = round_up(num_rows_, M::row_unit);
        Element* rows = work_->queries.at_least(QUERY_ROWS * ROW_WIDTH);
        seq_.load_new(head_, true, first_, num_rows_, rows, ROW_WIDTH);
        std::fill_n(rows + num_rows_ * ROW_WIDTH, (padded_rows_ - num_rows_) * ROW_WIDTH, (Element)0);
        for (int64_t row = 0; row < padded_rows_; row++) limits_[row] = (int32_t)seen_by(row + 1);
        if (threshold_)
            for (int64_t row = 0; row < num_rows_; row++) dropout_rows_[row] = seq_.dropout_bits(first_ + row, head_);
        return rows;
    }

    /* Keys seen by any of the first `num_rows` rows of the block. */
    int64_t seen_by(int64_t num_rows) const { return seq_.seen_before(first_ + num_rows); }

    /* Whether `num_rows` rows from `row` on see every key from `key` up to `stop`. */
    bool all_seen(int64_t row, int64_t num_rows, int64_t key, int64_t stop) const {
        return stop <= seen_by(row + 1) && (!window_ || key > first_ + row + num_rows - 1 - window_);
    }

    /* `x` where a row sees the keys from `key` on, else `hidden`. */
    UNPAD_INLINE Vec where_seen(int64_t row, int64_t key, Vec x, Vec hidden) const {
        const Vec before = M::select(M::below(key, limits_[row]), x, hidden);
        if (!window_) return before;
        return M::select(M::below(key, (int32_t)(first_ + row + 1 - window_)), hidden, before);
    }

    /* First key of a panel that any row of the block sees. */
    int64_t begin() const { return seq_.first_seen(first_) / PANEL * PANEL; }

    typename M::Mask kept(int64_t row, int64_t key) const {
        return M::keep(dropout_rows_[row], seq_.dropout_column(key), threshold_);
    }

    static int64_t pairs_of(int64_t num_keys) { return (num_keys + M::depth - 1) / M::depth; }

    /* Score as a power of two. */
    UNPAD_INLINE Vec exponent(Vec score, int64_t row, int64_t key) const {
        Vec x = M::fma(score, scale_, M::set(-shift_[row]));
        return bias_ ? x + M::load(bias_ + key) : x;
    }

    /* Scores of a tile are made with as few vectors as its keys need. */
    template <class F>
    UNPAD_INLINE static void each_panel(int64_t from, int64_t to, F f) {
        for (int64_t key = from; key < to; key += PANEL) {
            if (M::lanes > 1 && to - key <= M::lanes)
                f(Constant<1>(), key);
            else
                f(Constant<M::panel_vecs>(), key);
        }
    }

    /* Products of ROWS rows of a block with a panel's columns. */
    template <int ROWS, int VECS>
    UNPAD_INLINE void scores(
        const Element* rows, const Buffer<Pair>& columns, int64_t key, Vec (&c)[ROWS][VECS]) const {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) c[r][v] = M::set(0);
        const Pair* panel = columns.data() + key / M::depth * head_dim_;
        multiply<M, ROWS, VECS>((const Pair*)rows, ROW_WIDTH / M::depth, 1, panel, PANEL, head_dim_ / M::depth, c);
    }

    /* The same to memory: with bias, shift and dropout a tile's scores do not stay in registers. */
    template <int ROWS, int VECS>
    UNPAD_APART void store_scores(const Element* rows, const Buffer<Pair>& columns, int64_t key, Vec* to) const {
        Vec c[ROWS][VECS];
        scores<ROWS, VECS>(rows, columns, key, c);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) to[r * VECS + v] = c[r][v];
    }

    /* ----------------------------------------------------------------------- forward */

    void forward_block(const Pair* value_pairs, Element* out, Wide* log_z) {
        const Element* queries = load_queries();
        Element* weights = work_->weights.at_least(QUERY_ROWS * KEY_BLOCK);
        Wide* sums = work_->out.at_least(QUERY_ROWS * head_dim_);
        for (int64_t row = 0; row < padded_rows_; row++) totals_[row] = M::set(0);
        find_shifts(queries);
        for (int64_t block = begin(); block < seen_by(num_rows_); block += KEY_BLOCK) {
            each_panel(block, std::min(block + KEY_BLOCK, seen_by(num_rows_)), [&](auto vecs, int64_t key) {
                each_row_tile<M>(padded_rows_, [&](auto rows, int64_t row) {
                    if (key >= seen_by(row + rows)) return;
                    Element* to = weights + row * KEY_BLOCK + key - block;
                    if (shifted_ || threshold_)
                        weigh_any<rows, vecs>(queries, row, key, to);
                    else if (all_seen(row, rows, key, key + vecs * M::lanes))
                        weigh<rows, vecs, false>(queries, row, key, to);
                    else
                        weigh<rows, vecs, true>(queries, row, key, to);
                });
            });
            each_row_tile<M>(padded_rows_, [&](auto rows, int64_t row) {
                const int64_t num_keys = std::min(KEY_BLOCK, seen_by(row + rows) - block);
                if (num_keys > 0)
                    sum_rows<M, rows>(
                        (const Pair*)(weights + row * KEY_BLOCK), KEY_BLOCK / M::depth, 1,
                        value_pairs + block / M::depth * head_dim_,
                        pairs_of(num_keys), sums + row * head_dim_, head_dim_, block > begin());
            });
        }
        finish(sums, out, log_z);
    }

    /* Subtracted from each row's scores before exponentiation: nothing when the scores are known to be small. Keys that
     * a causal row does not see have no part in this: a prefix has the same bits whatever follows it. */
    void find_shifts(const Element* queries) {
        bool shifts[QUERY_ROWS];
        shifted_ = false;
        for (int64_t row = 0; row < padded_rows_; row++) {
            const double square = square_of<M>(queries + row * ROW_WIDTH, head_dim_);
            shifts[row] = bias_ || seq_.needs_shift(square, key_squares_[seen_by(row + 1) - 1]);
            shifted_ |= shifts[row];
        }
        std::fill_n(shift_, QUERY_ROWS, (Wide)0);
        if (!shifted_) return;
        Vec largest[QUERY_ROWS];
        const Vec lowest = M::set(-std::numeric_limits<Wide>::infinity());
        std::fill_n(largest, QUERY_ROWS, lowest);
        each_panel(begin(), seen_by(num_rows_), [&](auto vecs, int64_t key) {
            each_row_tile<M>(padded_rows_, [&](auto rows, int64_t row) {
                if (key < seen_by(row + rows)) find_largest<rows, vecs>(queries, row, key, largest);
            });
        });
        for (int64_t row = 0; row < padded_rows_; row++)
            if (shifts[row]) shift_[row] = M::largest(largest[row]);
    }

    template <int ROWS, int VECS>
    void find_largest(const Element* queries, int64_t row, int64_t key, Vec* largest) const {
        Vec c[ROWS * VECS];
        store_scores<ROWS, VECS>(queries + row * ROW_WIDTH, work_->key_columns, key, c);
        for (int i = 0; i < ROWS * VECS; i++) {
            const int64_t at_row = row + i / VECS, at_key = key + i % VECS * M::lanes;
            const Vec lowest = M::set(-std::numeric_limits<Wide>::infinity());
            const Vec x = where_seen(at_row, at_key, exponent(c[i], at_row, at_key), lowest);
            largest[at_row] = M::max(largest[at_row], x);
        }
    }

    /* Weights, not yet divided by their sum, of ROWS queries on VECS vectors of keys. */
    template <int ROWS, int VECS, bool MASKED>
    UNPAD_APART void weigh(const Element* queries, int64_t row, int64_t key, Element* weights) {
        Vec c[ROWS][VECS];
        scores<ROWS, VECS>(queries + row * ROW_WIDTH, work_->key_columns, key, c);
        const Vec scale = scale_;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            Vec total = totals_[row + r];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) {
                Vec weight = M::exp2_short(c[r][v] * scale);
                if (MASKED) weight = where_seen(row + r, key + v * M::lanes, weight, M::set(0));
                total = total + weight;
                M::store(weights + r * KEY_BLOCK + v * M::lanes, weight);
            }
            totals_[row + r] = total;
        }
    }

    /* The same with everything that may apply. */
    template <int ROWS, int VECS>
    UNPAD_APART void weigh_any(const Element* queries, int64_t row, int64_t key, Element* weights) {
        Vec c[ROWS * VECS];
        store_scores<ROWS, VECS>(queries + row * ROW_WIDTH, work_->key_columns, key, c);
        for (int i = 0; i < ROWS * VECS; i++) {
            const int64_t at_row = row + i / VECS, at_key = key + i % VECS * M::lanes;
            Vec weight = M::exp2_short(exponent(c[i], at_row, at_key));
            weight = where_seen(at_row, at_key, weight, M::set(0));
            totals_[at_row] = totals_[at_row] + weight;
            if (threshold_) weight = M::select(kept(at_row, at_key), weight, M::set(0));
            M::store(weights + i / VECS * KEY_BLOCK + i % VECS * M::lanes, weight);
        }
    }

    void finish(const Wide* sums, Element* out, Wide* log_z) {
        for (int64_t row = 0; row < num_rows_; row++) {
            const int64_t token = seq_.start + first_ + row;
            const Wide total = M::sum(totals_[row]);
            if (log_z) log_z[head_ * sizes_.total_tokens + token] = shift_[row] * (Wide)LN_2 + std::log(total);
            const Vec factor = M::set(1 / total) * kept_;
            Element* to = out + token * call_.out_stride() + head_ * head_dim_;
            for (int64_t d = 0; d < head_dim_; d += M::lanes)
                M::store(to + d, M::load(sums + row * head_dim_ + d) * factor);
        }
    }

    /* ----------------------------------------------------------------------- backward */

    void backward_block(const Element* out, const Wide* log_z, const Element* grad_out, Element* grad_qkv) {
        const Element* queries = load_queries();
        const Element* grads = load_grads(out, log_z, grad_out);
        Pair* query_pairs = work_->query_pairs.at_least(QUERY_ROWS / M::depth * head_dim_);
        Pair* grad_pairs = work_->grad_pairs.at_least(QUERY_ROWS / M::depth * head_dim_);
        interleave_rows<M>(queries, ROW_WIDTH, padded_rows_, head_dim_, query_pairs);
        interleave_rows<M>(grads, ROW_WIDTH, padded_rows_, head_dim_, grad_pairs);
        work_->grad_scores.at_least(QUERY_ROWS * KEY_BLOCK);
        work_->weight_pairs.at_least(QUERY_ROWS / M::depth * KEY_BLOCK);
        work_->grad_score_pairs.at_least(QUERY_ROWS / M::depth * KEY_BLOCK);
        for (int64_t block = begin(); block < seen_by(num_rows_); block += KEY_BLOCK) {
            const int64_t stop = std::min(block + KEY_BLOCK, seen_by(num_rows_));
            each_panel(block, stop, [&](auto vecs, int64_t key) {
                const int64_t top = backward_panel<vecs>(queries, grads, key, key - block);
                sum_panel(top, key, key - block, stop, query_pairs, grad_pairs);
            });
            sum_query_grads(block);
        }
        turn<M>(
            work_->query_grad.data(), head_dim_, (const Wide*)nullptr, num_rows_, head_dim_, seq_.cos(first_),
            seq_.sin(first_), true, sizes_.scale, grad_qkv + seq_.offset(first_, head_), call_.qkv_stride());
    }

    /* Gradients of the block's outputs; also each row's log_z as a power of two and its sum of grad * out. Rows that
     * complete the block have no weights, however large the bias of a key. */
    const Element* load_grads(const Element* out, const Wide* log_z, const Element* grad_out) {
        Element* rows = work_->grads.at_least(QUERY_ROWS * ROW_WIDTH);
        const int64_t token = seq_.start + first_;
        const int64_t offset = token * call_.out_stride() + head_ * head_dim_;
        std::fill_n(shift_, QUERY_ROWS, std::numeric_limits<Wide>::infinity());
        std::fill_n(delta_, QUERY_ROWS, (Wide)0);
        for (int64_t row = 0; row < num_rows_; row++) {
            Vec delta = M::set(0);
            for (int64_t d = 0; d < head_dim_; d += M::lanes) {
                const Vec grad = M::load(grad_out + offset + row * call_.out_stride() + d);
                delta = M::fma(grad, M::load(out + offset + row * call_.out_stride() + d), delta);
                M::store(rows + row * ROW_WIDTH + d, grad);
            }
            delta_[row] = M::sum(delta);
            shift_[row] = log_z[head_ * sizes_.total_tokens + token + row] * (Wide)LOG2_E;
        }
        std::fill_n(rows + num_rows_ * ROW_WIDTH, (padded_rows_ - num_rows_) * ROW_WIDTH, (Element)0);
        return rows;
    }

    /* Weights and gradients of scores of a panel of keys; returns the first row that has any. */
    template <int VECS>
    int64_t backward_panel(const Element* queries, const Element* grads, int64_t key, int64_t in_block) {
        int64_t top = padded_rows_;
        /* The tiles that sum_query_grads reads, in lower ones: two products fill the registers. */
        each_row_tile<M>(padded_rows_, [&](auto rows, int64_t row) {
            if (key >= seen_by(row + rows)) return;
            top = std::min(top, row);
            constexpr int height = M::row_unit == 2 ? rows : rows % 6 == 0 ? 6 : 4;
            for (int64_t part = row; part < row + rows; part += height)
                backward_tile<height, VECS>(queries, grads, part, key, in_block);
        });
        return top;
    }

    template <int ROWS, int VECS>
    void backward_tile(const Element* queries, const Element* grads, int64_t row, int64_t key, int64_t in_block) {
        if (bias_ || threshold_)
            differentiate_any<ROWS, VECS>(queries, grads, row, key, in_block);
        else if (all_seen(row, ROWS, key, key + VECS * M::lanes))
            differentiate<ROWS, VECS, false>(queries, grads, row, key, in_block);
        else
            differentiate<ROWS, VECS, true>(queries, grads, row, key, in_block);
    }

    /* Weights of a tile and gradients of its scores. */
    template <int ROWS, int VECS, bool MASKED>
    UNPAD_APART void differentiate(
        const Element* queries, const Element* grads, int64_t row, int64_t key, int64_t in_block) {
        Vec c[ROWS][VECS], g[ROWS][VECS];
        scores<ROWS, VECS>(queries + row * ROW_WIDTH, work_->key_columns, key, c);
        scores<ROWS, VECS>(grads + row * ROW_WIDTH, work_->value_columns, key, g);
        const Vec scale = scale_;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) {
                c[r][v] = M::exp2_short(M::fma(c[r][v], scale, M::set(-shift_[row + r])));
                g[r][v] = c[r][v] * (g[r][v] - M::set(delta_[row + r]));
                if (!MASKED) continue;
                c[r][v] = where_seen(row + r, key + v * M::lanes, c[r][v], M::set(0));
                g[r][v] = where_seen(row + r, key + v * M::lanes, g[r][v], M::set(0));
            }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r += 2)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                store_cells(row + r, in_block + v * M::lanes, c[r][v], c[r + 1][v], g[r][v], g[r + 1][v]);
    }

    /* The same with everything that may apply. */
    template <int ROWS, int VECS>
    UNPAD_APART void differentiate_any(
        const Element* queries, const Element* grads, int64_t row, int64_t key, int64_t in_block) {
        Vec c[ROWS * VECS], g[ROWS * VECS];
        store_scores<ROWS, VECS>(queries + row * ROW_WIDTH, work_->key_columns, key, c);
        store_scores<ROWS, VECS>(grads + row * ROW_WIDTH, work_->value_columns, key, g);
        for (int i = 0; i < ROWS * VECS; i++)
            differentiate_cells(row + i / VECS, key + i % VECS * M::lanes, c[i], g[i]);
        for (int r = 0; r < ROWS; r += 2)
            for (int v = 0; v < VECS; v++) {
                const int even = r * VECS + v, odd = even + VECS;
                store_cells(row + r, in_block + v * M::lanes, c[even], c[odd], g[even], g[odd]);
            }
    }

    void differentiate_cells(int64_t row, int64_t key, Vec& c, Vec& g) {
        const Vec zero = M::set(0);
        const Vec weight = where_seen(row, key, M::exp2_short(exponent(c, row, key)), zero);
        c = weight;
        if (threshold_) {
            const auto stays = kept(row, key);
            c = M::select(stays, weight, zero);
            g = M::select(stays, g * kept_, zero);
        }
        g = where_seen(row, key, weight * (g - M::set(delta_[row])), zero);
        if (bias_grad_ && row < num_rows_) M::store(bias_grad_ + key, M::load(bias_grad_ + key) + g);
    }

    /* Weights and gradients of two rows: both as pairs, gradients also row by row. */
    UNPAD_INLINE void store_cells(int64_t row, int64_t in_block, Vec even, Vec odd, Vec even_grad, Vec odd_grad) {
        const int64_t panel = in_block / PANEL * PANEL * (QUERY_ROWS / M::depth);
        const int64_t at = panel + row / M::depth * PANEL + in_block % PANEL;
        M::store_pairs(work_->weight_pairs.data() + at, nullptr, 0, even, odd);
        Element* rows = work_->grad_scores.data() + row * KEY_BLOCK + in_block;
        M::store_pairs(work_->grad_score_pairs.data() + at, rows, KEY_BLOCK, even_grad, odd_grad);
    }

    /* Adds a panel's part to the gradients of its keys and values. */
    void sum_panel(
        int64_t top, int64_t key, int64_t in_block, int64_t stop, const Pair* query_pairs, const Pair* grad_pairs) {
        const int64_t num_pairs = (padded_rows_ - top) / M::depth;
        const int64_t offset = in_block * (QUERY_ROWS / M::depth) + top / M::depth * PANEL;
        const Pair* weights = work_->weight_pairs.data() + offset;
        const Pair* grads = work_->grad_score_pairs.data() + offset;
        Wide* value_grad = work_->value_grad.data() + key * head_dim_;
        Wide* key_grad = work_->key_grad.data() + key * head_dim_;
        const int64_t skip = top / M::depth * head_dim_;
        each_row_tile<M>(round_up(std::min(PANEL, stop - key), M::row_unit), [&](auto rows, int64_t row) {
            sum_rows<M, rows>(
                weights + row, 1, PANEL, grad_pairs + skip, num_pairs, value_grad + row * head_dim_, head_dim_, true);
            sum_rows<M, rows>(
                grads + row, 1, PANEL, query_pairs + skip, num_pairs, key_grad + row * head_dim_, head_dim_, true);
        });
    }

    void sum_query_grads(int64_t block) {
        Wide* query_grad = work_->query_grad.at_least(QUERY_ROWS * head_dim_);
        const Pair* key_pairs = work_->key_pairs.data() + block / M::depth * head_dim_;
        const Element* grad_scores = work_->grad_scores.data();
        each_row_tile<M>(padded_rows_, [&](auto rows, int64_t row) {
            const int64_t num_keys = std::min(KEY_BLOCK, seen_by(row + rows) - block);
            if (num_keys > 0)
                sum_rows<M, rows>(
                    (const Pair*)(grad_scores + row * KEY_BLOCK), KEY_BLOCK / M::depth, 1, key_pairs,
                    pairs_of(num_keys), query_grad + row * head_dim_, head_dim_, block > begin());
        });
    }

    const Sequence<M> seq_;
    const Call<M>& call_;
    const unpad_attention& sizes_;
    const int64_t head_dim_, length_, padded_, window_;
    const Vec scale_;
    const uint32_t threshold_;
    const Vec kept_;
    Workspace<M>* work_;
    const Wide* bias_ = nullptr;
    Wide* bias_grad_ = nullptr;
    double* key_squares_ = nullptr; /* (length_) the largest up to each key */

    /* Of the block of queries at hand. */
    int64_t head_ = 0, first_ = 0, num_rows_ = 0, padded_rows_ = 0;
    bool shifted_ = false;
    int32_t limits_[QUERY_ROWS]; /* the key after the last one that a row sees */
    uint32_t dropout_rows_[QUERY_ROWS];
    Wide shift_[QUERY_ROWS], delta_[QUERY_ROWS];
    Vec totals_[QUERY_ROWS];
};

template <class M>
void forward(const Call<M>& call, void* out, void* log_z) {
    each_task<Nothing>(call, [&](int64_t seq, int64_t kv_head) {
        Task<M>(call, seq, kv_head).forward((typename M::Element*)out, (typename M::Wide*)log_z);
    });
}

template <class M>
void backward(
    const Call<M>& call, const void* out, const void* log_z, const void* grad_out, void* grad_qkv, void* grad_bias) {
    using Element = typename M::Element;
    using Wide = typename M::Wide;
    each_task<Nothing>(call, [&](int64_t seq, int64_t kv_head) {
        Task<M>(call, seq, kv_head)
            .backward(
                (const Element*)out, (const Wide*)log_z, (const Element*)grad_out, (Element*)grad_qkv,
                (Wide*)grad_bias);
    });
}

}  // namespace attention

void attention_forward(
    int dtype, const unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv,
    const void* qkv_bias, const void* cos, const void* sin, const void* key_bias, void* out, void* log_z) {
    with_type(dtype, [&](auto type) {
        using M = Math<decltype(type)>;
        const auto call = attention::make_call<M>(sizes, cu_seqlens, qkv, qkv_bias, cos, sin, key_bias);
        attention::forward(call, out, log_z);
    });
}

void piece_attention(
    int dtype, const unpad_attention* sizes, const int32_t* cu_seqlens, const unpad_held* held, const void* qkv,
    const void* cos, const void* sin, const void* key_bias, void* out) {
    with_type(dtype, [&](auto type) {
        using M = Math<decltype(type)>;
        auto call = attention::make_call<M>(sizes, cu_seqlens, qkv, nullptr, cos, sin, key_bias);
        call.held = held;
        attention::forward(call, out, nullptr);
    });
}

void attention_backward(
    int dtype, const unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv,
    const void* qkv_bias, const void* cos, const void* sin, const void* key_bias, const void* out, const void* log_z,
    const void* grad_out, void* grad_qkv, void* grad_key_bias) {
    with_type(dtype, [&](auto type) {
        using M = Math<decltype(type)>;
        const auto call = attention::make_call<M>(sizes, cu_seqlens, qkv, qkv_bias, cos, sin, key_bias);
        attention::backward(call, out, log_z, grad_out, grad_qkv, grad_key_bias);
    });
}

}  // namespace
}  // namespace unpad

#endif
