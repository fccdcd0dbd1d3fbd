/* Attention of attention.h in bf16 by products of tiles, forward and backward.
 *
 * Forward makes scores (queries, keys). Backward makes them (keys, queries): weights and gradients of scores are left
 * operands as they are stored, what belongs to a query lies along a vector, and only the gradient of queries is turned,
 * once per block of queries.
 *
 * Keys go by panels of 32 that begin at multiples of 32 of their sequence, and a sum takes each panel's part as a
 * whole, of zeros where a key is hidden: a row's bits depend neither on the rows beside it, nor on later keys, nor on
 * where a prompt is cut into pieces.
 *
 * Operands (tiles.h) are completed by zeros to whole panels of rows, and of channels where those are summed over.
 */
#ifndef UNPAD_TILED_ATTENTION_H
#define UNPAD_TILED_ATTENTION_H

#include "attention_call.h"
#include "tiles.h"

#include <limits>
#include <type_traits>

namespace unpad {
namespace {
namespace attention {
namespace tiled {

constexpr int64_t FORWARD_QUERIES = PANEL; /* of a block */
constexpr int64_t FORWARD_KEYS = 256;      /* of a block: its weights stay in the first cache */
constexpr int64_t BACKWARD_QUERIES = 2 * PANEL;
constexpr int64_t BACKWARD_KEYS = 128;

/* What applies to the scores of a panel, from the fastest body to the one that knows everything. */
enum Kind { WHOLE, HIDDEN, ANY };

template <int N>
using Constant = std::integral_constant<int, N>;

template <class M>
struct Workspace {
    Buffer<typename M::Element> rows, keys, values, queries, grads, weights, grad_scores;
    Buffer<typename M::Pair> key_columns, value_pairs, key_pairs, keys_turned;
    Buffer<typename M::Pair> query_columns, query_pairs, grad_columns, grad_pairs, grad_score_pairs;
    Buffer<float> bias, bias_grad, scores, grad_weights, out, key_grad, value_grad, query_grad, query_grad_rows;
    Buffer<double> key_squares;
};

template <class M, class Tiles>
class Task {
    using Element = typename M::Element;
    using Vec = typename M::Vec;
    using Pair = typename M::Pair;

  public:
    Task(const Call<M>& call, int64_t seq, int64_t kv_head)
        : seq_(call, seq, kv_head),
          call_(call),
          sizes_(call.sizes),
          head_dim_(call.sizes.head_dim),
          channels_(round_up(head_dim_, PANEL)),
          length_(seq_.length),
          padded_(round_up(length_, PANEL)),
          window_(call.sizes.window),
          scale_(M::set((float)(sizes_.scale * LOG2_E))),
          threshold_(dropout_threshold(sizes_.dropout)),
          kept_(M::set((float)(1 / (1 - sizes_.dropout)))) {
        static thread_local Workspace<M> workspace;
        work_ = &workspace;
    }

    void forward(Element* out, float* log_z) {
        Element* rows = work_->rows.at_least(PANEL * channels_);
        Pair* columns = work_->key_columns.at_least(padded_ / 2 * channels_);
        Pair* pairs = work_->value_pairs.at_least(padded_ / 2 * head_dim_);
        double* squares = work_->key_squares.at_least(length_);
        double largest = 0;
        for (int64_t key = 0; key < length_; key += PANEL) {
            const int64_t num_keys = std::min(PANEL, length_ - key);
            load(seq_.key_row(), seq_.held_keys, true, key, num_keys, rows);
            M::transpose(rows, channels_, columns + key / 2 * channels_);
            for (int64_t row = 0; row < num_keys; row++)
                squares[key + row] = largest = std::max(largest, square_of<M>(rows + row * channels_, head_dim_));
            load(seq_.value_row(), seq_.held_values, false, key, num_keys, rows);
            interleave_rows<M>(rows, channels_, PANEL, head_dim_, pairs + key / 2 * head_dim_);
        }
        load_bias();
        for (int64_t i = 0; i < call_.group(); i++) {
            head_ = seq_.query_row(i);
            for (first_ = seq_.earlier; first_ < length_; first_ += FORWARD_QUERIES) forward_block(out, log_z);
        }
    }

    void backward(
        const Element* out, const float* log_z, const Element* grad_out, Element* grad_qkv, float* grad_bias) {
        load(seq_.key_row(), nullptr, true, 0, length_, work_->keys.at_least(padded_ * channels_));
        load(seq_.value_row(), nullptr, false, 0, length_, work_->values.at_least(padded_ * channels_));
        turn_keys();
        load_bias();
        const float* key_grad = zeros(work_->key_grad, padded_ * head_dim_);
        const float* value_grad = zeros(work_->value_grad, padded_ * head_dim_);
        bias_grad_ = grad_bias ? zeros(work_->bias_grad, padded_ * M::lanes) : nullptr;
        for (int64_t i = 0; i < call_.group(); i++) {
            head_ = seq_.query_row(i);
            for (first_ = 0; first_ < length_; first_ += BACKWARD_QUERIES)
                backward_block(out, log_z, grad_out, grad_qkv);
        }
        seq_.write(key_grad, seq_.key_row(), true, sizes_.scale, grad_qkv);
        seq_.write(value_grad, seq_.value_row(), false, 1 / (1 - sizes_.dropout), grad_qkv);
        if (!grad_bias) return;
        float* to = grad_bias + seq_.kv_head * sizes_.total_tokens + seq_.start;
        for (int64_t key = 0; key < length_; key++) to[key] = M::sum(M::load(bias_grad_ + key * M::lanes));
    }

  private:
    static float* zeros(Buffer<float>& buffer, int64_t count) {
        float* data = buffer.at_least(count);
        std::fill_n(data, count, 0.0f);
        return data;
    }

    /* Rows of the sequence as left operands, (num_rows in whole panels, channels_). */
    void load(int64_t row, Element* held, bool rotary, int64_t first, int64_t num_rows, Element* rows) const {
        seq_.load(row, held, rotary, first, num_rows, rows, channels_);
        complete(rows, num_rows);
    }

    void complete(Element* rows, int64_t num_rows) const {
        if (channels_ > head_dim_)
            for (int64_t row = 0; row < num_rows; row++)
                std::fill_n(rows + row * channels_ + head_dim_, channels_ - head_dim_, (Element)0);
        std::fill_n(rows + num_rows * channels_, (round_up(num_rows, PANEL) - num_rows) * channels_, (Element)0);
    }

    void load_bias() {
        bias_ = nullptr;
        if (!call_.key_bias) return;
        float* bias = zeros(work_->bias, padded_);
        seq_.load_bias(bias);
        bias_ = bias;
    }

    /* Queries from first_ on; sets the sizes of the block. */
    const Element* load_queries(int64_t most) {
        num_rows_ = std::min(most, length_ - first_);
        Element* rows = work_->queries.at_least(BACKWARD_QUERIES * channels_);
        load(head_, nullptr, true, first_, num_rows_, rows);
        if (threshold_)
            for (int64_t row = 0; row < num_rows_; row++) dropout_bits_[row] = seq_.dropout_bits(first_ + row, head_);
        return rows;
    }

    /* The first panel of keys that row `row` of the block sees, and the end of the keys that rows before `stop` see. */
    int64_t first_panel(int64_t row) const { return seq_.first_seen(first_ + row) / PANEL * PANEL; }
    int64_t seen_by(int64_t stop) const { return seq_.seen_before(first_ + stop); }

    /* Whether rows `row` to `stop` of the block see every key from `key` up to `end`. */
    bool all_seen(int64_t row, int64_t stop, int64_t key, int64_t end) const {
        return end <= seen_by(row + 1) && key >= seq_.first_seen(first_ + stop - 1);
    }

    /* ----------------------------------------------------------------------- forward */

    void forward_block(Element* out, float* log_z) {
        const Element* queries = load_queries(FORWARD_QUERIES);
        Element* weights = work_->weights.at_least(FORWARD_KEYS * PANEL);
        float* sums = work_->out.at_least(FORWARD_QUERIES * head_dim_);
        for (int64_t row = 0; row < num_rows_; row++) totals_[row] = M::set(0);
        find_shifts(queries);
        const int64_t begin = first_panel(0), seen = seen_by(num_rows_);
        for (int64_t block = begin; block < seen; block += FORWARD_KEYS) {
            const int64_t stop = std::min(block + FORWARD_KEYS, seen);
            each_panel(queries, block, stop, [&](auto vecs, int64_t key, const float* scores) {
                Element* to = weights + (key - block) * PANEL;
                if (bias_ || threshold_)
                    weigh<vecs, ANY>(scores, key, to);
                else if (all_seen(0, num_rows_, key, key + vecs * TILE))
                    weigh<vecs, WHOLE>(scores, key, to);
                else
                    weigh<vecs, HIDDEN>(scores, key, to);
            });
            const Pair* values = work_->value_pairs.data() + block / 2 * head_dim_;
            multiply_tiles<Tiles>(
                squares_view(weights), pairs_view(values, head_dim_), sums_view(sums, head_dim_), tiles_of(num_rows_),
                head_dim_ / TILE, (stop - block + PANEL - 1) / PANEL, block > begin);
        }
        finish(sums, out, log_z);
    }

    /* Calls f(vectors, key, scores) for the panels of keys from `from` to `stop`, (32 rows, 32 keys). The products of
     * the next panel are begun first, so that the processor may make them beside f. */
    template <class F>
    void each_panel(const Element* queries, int64_t from, int64_t stop, F f) {
        float* scores = work_->scores.at_least(2 * SQUARE);
        const auto place = [&](int64_t key) { return scores + key / PANEL % 2 * SQUARE; };
        const auto make = [&](int64_t key) {
            const Pair* columns = work_->key_columns.data() + key / 2 * channels_;
            multiply_tiles<Tiles>(
                rows_view(queries, channels_), columns_view(columns), sums_view(place(key), PANEL),
                tiles_of(num_rows_), tiles_of(stop - key), channels_ / PANEL, false);
        };
        make(from);
        for (int64_t key = from; key < stop; key += PANEL) {
            if (key + PANEL < stop) make(key + PANEL);
            if (stop - key > TILE)
                f(Constant<2>(), key, place(key));
            else
                f(Constant<1>(), key, place(key));
        }
    }

    /* Subtracted from each row's scores before exponentiation: nothing when the scores are known to be small. Keys that
     * a causal row does not see have no part in this. */
    void find_shifts(const Element* queries) {
        bool shifts[FORWARD_QUERIES], any = false;
        std::fill_n(minus_shift_, FORWARD_QUERIES, 0.0f);
        for (int64_t row = 0; row < num_rows_; row++) {
            const double square = square_of<M>(queries + row * channels_, head_dim_);
            shifts[row] = bias_ || seq_.needs_shift(square, work_->key_squares.data()[seen_by(row + 1) - 1]);
            any |= shifts[row];
        }
        if (!any) return;
        Vec largest[FORWARD_QUERIES];
        const Vec lowest = M::set(-std::numeric_limits<float>::infinity());
        std::fill_n(largest, FORWARD_QUERIES, lowest);
        each_panel(queries, first_panel(0), seen_by(num_rows_), [&](auto vecs, int64_t key, const float* scores) {
            for (int64_t row = 0; row < num_rows_; row++)
                for (int v = 0; v < vecs; v++) {
                    const Vec x = exponent(scores, row, v, key);
                    largest[row] = M::max(largest[row], where_seen(row, key + v * TILE, x, lowest));
                }
        });
        for (int64_t row = 0; row < num_rows_; row++)
            if (shifts[row]) minus_shift_[row] = -M::largest(largest[row]);
    }

    /* Scores of a row and 16 keys as powers of two. */
    UNPAD_INLINE Vec exponent(const float* scores, int64_t row, int v, int64_t key) const {
        const Vec x = M::fma(M::load(scores + row * PANEL + v * TILE), scale_, M::set(minus_shift_[row]));
        return bias_ ? x + M::load(bias_ + key + v * TILE) : x;
    }

    /* `x` where a row sees the keys from `key` on, else `hidden`. */
    UNPAD_INLINE Vec where_seen(int64_t row, int64_t key, Vec x, Vec hidden) const {
        const Vec before = M::select(M::below(key, (int32_t)seen_by(row + 1)), x, hidden);
        if (!window_) return before;
        return M::select(M::below(key, (int32_t)(first_ + row + 1 - window_)), hidden, before);
    }

    /* Weights, not yet divided by their sum, of the block's queries on a panel. */
    template <int VECS, Kind KIND>
    void weigh(const float* scores, int64_t key, Element* weights) {
        const Vec scale = scale_, zero = M::set(0);
        for (int64_t row = 0; row < num_rows_; row++) {
            Vec weight[2] = {zero, zero}, total = totals_[row];
            for (int v = 0; v < VECS; v++) {
                if constexpr (KIND == ANY)
                    weight[v] = M::exp2_short(exponent(scores, row, v, key));
                else
                    weight[v] = M::exp2_short(
                        M::fma(M::load(scores + row * PANEL + v * TILE), scale, M::set(minus_shift_[row])));
                if (KIND != WHOLE) weight[v] = where_seen(row, key + v * TILE, weight[v], zero);
                total = total + weight[v];
                if (KIND != ANY || !threshold_) continue;
                const auto stays = M::keep(dropout_bits_[row], seq_.dropout_column(key + v * TILE), threshold_);
                weight[v] = M::select(stays, weight[v], zero);
            }
            totals_[row] = total;
            M::store_both(weights + row * PANEL, weight[0], weight[1]);
        }
    }

    void finish(const float* sums, Element* out, float* log_z) const {
        for (int64_t row = 0; row < num_rows_; row++) {
            const int64_t token = seq_.start + first_ + row;
            const float total = M::sum(totals_[row]);
            if (log_z) log_z[head_ * sizes_.total_tokens + token] = std::log(total) - minus_shift_[row] * (float)LN_2;
            const Vec factor = M::set(1 / total) * kept_;
            Element* to = out + token * call_.out_stride() + head_ * head_dim_;
            for (int64_t d = 0; d < head_dim_; d += M::lanes)
                M::store(to + d, M::load(sums + row * head_dim_ + d) * factor);
        }
    }

    /* ----------------------------------------------------------------------- backward */

    void turn_keys() {
        Pair* turned = work_->keys_turned.at_least(padded_ / 2 * head_dim_);
        Pair* pairs = work_->key_pairs.at_least(TILE * head_dim_);
        for (int64_t key = 0; key < padded_; key += PANEL) {
            interleave_rows<M>(work_->keys.data() + key * channels_, channels_, PANEL, head_dim_, pairs);
            for (int64_t d = 0; d < head_dim_; d += TILE)
                Fp32::transpose(
                    (const float*)pairs + d, head_dim_, (float*)turned + key / 2 * head_dim_ + d * TILE, TILE);
        }
    }

    void backward_block(const Element* out, const float* log_z, const Element* grad_out, Element* grad_qkv) {
        const Element* queries = load_queries(BACKWARD_QUERIES);
        const Element* grads = load_grads(out, log_z, grad_out);
        num_panels_ = (num_rows_ + PANEL - 1) / PANEL;
        pack(queries, work_->query_columns, work_->query_pairs);
        pack(grads, work_->grad_columns, work_->grad_pairs);
        work_->scores.at_least(2 * SQUARE);
        work_->grad_weights.at_least(2 * SQUARE);
        work_->weights.at_least(BACKWARD_QUERIES * PANEL);
        work_->grad_scores.at_least(BACKWARD_QUERIES * PANEL);
        work_->grad_score_pairs.at_least(BACKWARD_QUERIES * BACKWARD_KEYS / 2);
        work_->query_grad.at_least(BACKWARD_QUERIES * head_dim_);
        const int64_t seen = seen_by(num_rows_);
        for (int64_t block = first_panel(0); block < seen; block += BACKWARD_KEYS) {
            const int64_t stop = std::min(block + BACKWARD_KEYS, seen);
            for (int64_t key = block; key < stop; key += PANEL)
                backward_panel(key, std::min(PANEL, stop - key), (key - block) / PANEL);
            sum_query_grads(block, stop);
        }
        write_query_grads(grad_qkv);
    }

    /* Gradients of the block's outputs; also each row's log_z as a power of two and its sum of grad * out. Rows that
     * complete a panel have no weights. */
    const Element* load_grads(const Element* out, const float* log_z, const Element* grad_out) {
        Element* rows = work_->grads.at_least(BACKWARD_QUERIES * channels_);
        const int64_t token = seq_.start + first_;
        const int64_t offset = token * call_.out_stride() + head_ * head_dim_;
        std::fill_n(minus_shift_, BACKWARD_QUERIES, -std::numeric_limits<float>::infinity());
        std::fill_n(delta_, BACKWARD_QUERIES, 0.0f);
        for (int64_t row = 0; row < num_rows_; row++) {
            Vec delta = M::set(0);
            for (int64_t d = 0; d < head_dim_; d += M::lanes) {
                const Vec grad = M::load(grad_out + offset + row * call_.out_stride() + d);
                delta = M::fma(grad, M::load(out + offset + row * call_.out_stride() + d), delta);
                M::store(rows + row * channels_ + d, grad);
            }
            delta_[row] = M::sum(delta);
            minus_shift_[row] = -log_z[head_ * sizes_.total_tokens + token + row] * (float)LOG2_E;
        }
        complete(rows, num_rows_);
        return rows;
    }

    /* The block's rows as both kinds of right operands. */
    void pack(const Element* rows, Buffer<Pair>& columns, Buffer<Pair>& pairs) const {
        Pair* to = columns.at_least(BACKWARD_QUERIES / 2 * channels_);
        for (int64_t panel = 0; panel < num_panels_; panel++)
            M::transpose(rows + panel * PANEL * channels_, channels_, to + panel * TILE * channels_);
        interleave_rows<M>(
            rows, channels_, num_panels_ * PANEL, head_dim_, pairs.at_least(BACKWARD_QUERIES / 2 * head_dim_));
    }

    int64_t rows_of(int64_t panel) const { return std::min(PANEL, num_rows_ - panel * PANEL); }

    /* Whether any query of a panel of the block sees any key of a panel of keys. */
    bool sees(int64_t panel, int64_t key) const {
        return key >= first_panel(panel * PANEL) && key < seen_by(std::min(panel * PANEL + PANEL, num_rows_));
    }

    /* Weights of a panel of keys, the gradients of their scores, and its part of the gradients of keys and values. */
    void backward_panel(int64_t key, int64_t num_keys, int64_t place) {
        int64_t first = 0, last = num_panels_ - 1;
        while (!sees(first, key)) first++;
        while (!sees(last, key)) last--;
        const int64_t key_tiles = tiles_of(num_keys);
        const auto make = [&](int64_t panel) {
            const auto product = [&](const Buffer<Element>& left, const Buffer<Pair>& right, Buffer<float>& to) {
                multiply_tiles<Tiles>(
                    rows_view(left.data() + key * channels_, channels_),
                    columns_view(right.data() + panel * TILE * channels_),
                    sums_view(to.data() + panel % 2 * SQUARE, PANEL), key_tiles, tiles_of(rows_of(panel)),
                    channels_ / PANEL, false);
            };
            product(work_->keys, work_->query_columns, work_->scores);
            product(work_->values, work_->grad_columns, work_->grad_weights);
        };
        make(first);
        for (int64_t panel = first; panel <= last; panel++) {
            if (panel < last) make(panel + 1);
            Pair* pairs = work_->grad_score_pairs.data() + (place * num_panels_ + panel) * SQUARE / 2;
            differentiate(panel, key, num_keys, pairs);
        }
        const auto sum = [&](const Buffer<Element>& left, const Buffer<Pair>& right, Buffer<float>& to) {
            multiply_tiles<Tiles>(
                squares_view(left.data() + first * SQUARE),
                pairs_view(right.data() + first * TILE * head_dim_, head_dim_),
                sums_view(to.data() + key * head_dim_, head_dim_), key_tiles, head_dim_ / TILE, last - first + 1, true);
        };
        sum(work_->weights, work_->grad_pairs, work_->value_grad);
        sum(work_->grad_scores, work_->query_pairs, work_->key_grad);
    }

    void differentiate(int64_t panel, int64_t key, int64_t num_keys, Pair* pairs) {
        const int64_t row = panel * PANEL;
        const auto run = [&](auto vecs) {
            if (bias_ || threshold_)
                differentiate_keys<vecs, ANY>(panel, key, num_keys, pairs);
            else if (all_seen(row, row + rows_of(panel), key, key + num_keys))
                differentiate_keys<vecs, WHOLE>(panel, key, num_keys, pairs);
            else
                differentiate_keys<vecs, HIDDEN>(panel, key, num_keys, pairs);
        };
        if (rows_of(panel) > TILE)
            run(Constant<2>());
        else
            run(Constant<1>());
    }

    /* Two keys at a time, whose gradients are pairs: weights and gradients of scores as rows (32 keys, 32 queries), the
     * latter also as pairs of keys. Keys past the end have none. */
    template <int VECS, Kind KIND>
    void differentiate_keys(int64_t panel, int64_t key, int64_t num_keys, Pair* pairs) {
        const Vec zero = M::set(0);
        Element* weights = work_->weights.data() + panel * SQUARE;
        Element* grad_scores = work_->grad_scores.data() + panel * SQUARE;
        for (int64_t row = 0; row < PANEL; row += 2) {
            Vec w[2][2] = {{zero, zero}, {zero, zero}}, g[2][2] = {{zero, zero}, {zero, zero}};
#pragma GCC unroll 2
            for (int r = 0; r < 2; r++) {
                if (row + r >= num_keys) continue;
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++) differentiate_cells<KIND>(panel, row + r, v, key, w[r][v], g[r][v]);
            }
            for (int r = 0; r < 2; r++) M::store_both(weights + (row + r) * PANEL, w[r][0], w[r][1]);
            for (int v = 0; v < 2; v++) {
                Element* rows = grad_scores + row * PANEL + v * TILE;
                M::store_pairs(pairs + row / 2 * PANEL + v * TILE, rows, PANEL, g[0][v], g[1][v]);
            }
        }
    }

    /* Weights of a key for 16 queries, and the gradients of its scores. */
    template <Kind KIND>
    UNPAD_INLINE void differentiate_cells(int64_t panel, int64_t row, int v, int64_t key, Vec& w, Vec& g) {
        const int64_t at = panel % 2 * SQUARE + row * PANEL + v * TILE, query = panel * PANEL + v * TILE;
        const Vec zero = M::set(0), delta = M::load(delta_ + query);
        Vec x = M::fma(M::load(work_->scores.data() + at), scale_, M::load(minus_shift_ + query));
        if (KIND == ANY && bias_) x = x + M::set(bias_[key + row]);
        Vec weight = M::exp2_short(x), grad = M::load(work_->grad_weights.data() + at);
        if (KIND != WHOLE) weight = where_sees(query, key + row, weight);
        w = weight;
        if (KIND == ANY && threshold_) {
            const auto stays = M::keep_each(dropout_bits_ + query, seq_.dropout_column(key + row), threshold_);
            w = M::select(stays, weight, zero);
            grad = M::select(stays, grad * kept_, zero);
        }
        g = weight * (grad - delta);
        if (KIND != WHOLE) g = where_sees(query, key + row, g);
        if (KIND != ANY || !bias_grad_) return;
        float* sum = bias_grad_ + (key + row) * M::lanes;
        M::store(sum, M::load(sum) + g);
    }

    /* `x` where the queries from `query` of the block on see a key, else 0. */
    UNPAD_INLINE Vec where_sees(int64_t query, int64_t key, Vec x) const {
        if (!sizes_.causal) return x;
        const Vec after = M::select(M::below(first_ + query, (int32_t)key), M::set(0), x);
        if (!window_) return after;
        return M::select(M::below(first_ + query, (int32_t)(key + window_)), after, M::set(0));
    }

    /* The part of a block of keys, (channel, query). */
    void sum_query_grads(int64_t block, int64_t stop) {
        for (int64_t panel = 0; panel < num_panels_; panel++) {
            const int64_t begin = first_panel(panel * PANEL), first = std::max(block, begin);
            const int64_t end = std::min(stop, seen_by(std::min(panel * PANEL + PANEL, num_rows_)));
            if (first >= end) continue;
            const Pair* keys = work_->keys_turned.data() + first / 2 * head_dim_;
            const int64_t place = (first - block) / PANEL * num_panels_ + panel;
            const Pair* pairs = work_->grad_score_pairs.data() + place * SQUARE / 2;
            multiply_tiles<Tiles>(
                turned_view(keys, head_dim_), {pairs, 4 * PANEL, TILE_BYTES, 2 * SQUARE * num_panels_},
                sums_view(work_->query_grad.data() + panel * PANEL, BACKWARD_QUERIES), head_dim_ / TILE,
                tiles_of(rows_of(panel)), (end - first + PANEL - 1) / PANEL, first > begin);
        }
    }

    void write_query_grads(Element* grad_qkv) {
        float* rows = work_->query_grad_rows.at_least(BACKWARD_QUERIES * head_dim_);
        for (int64_t row = 0; row < num_rows_; row += TILE)
            for (int64_t d = 0; d < head_dim_; d += TILE)
                Fp32::transpose(
                    work_->query_grad.data() + d * BACKWARD_QUERIES + row, BACKWARD_QUERIES,
                    rows + row * head_dim_ + d, head_dim_);
        turn<M>(
            rows, head_dim_, (const float*)nullptr, num_rows_, head_dim_, seq_.cos(first_), seq_.sin(first_), true,
            sizes_.scale, grad_qkv + seq_.offset(first_, head_), call_.qkv_stride());
    }

    const Sequence<M> seq_;
    const Call<M>& call_;
    const unpad_attention& sizes_;
    const int64_t head_dim_, channels_, length_, padded_, window_;
    const Vec scale_;
    const uint32_t threshold_;
    const Vec kept_;
    Workspace<M>* work_;
    const float* bias_ = nullptr;
    float* bias_grad_ = nullptr; /* (padded_, lanes): of a key, to be added up */

    /* Of the block of queries at hand. */
    int64_t head_ = 0, first_ = 0, num_rows_ = 0, num_panels_ = 0;
    uint32_t dropout_bits_[BACKWARD_QUERIES];
    float minus_shift_[BACKWARD_QUERIES], delta_[BACKWARD_QUERIES];
    Vec totals_[FORWARD_QUERIES];
};

template <class Tiles, class M>
void forward(const Call<M>& call, void* out, void* log_z) {
    each_task<Tiles>(call, [&](int64_t seq, int64_t kv_head) {
        Task<M, Tiles>(call, seq, kv_head).forward((typename M::Element*)out, (float*)log_z);
    });
}

template <class Tiles, class M>
void backward(
    const Call<M>& call, const void* out, const void* log_z, const void* grad_out, void* grad_qkv, void* grad_bias) {
    using Element = typename M::Element;
    each_task<Tiles>(call, [&](int64_t seq, int64_t kv_head) {
        Task<M, Tiles>(call, seq, kv_head)
            .backward(
                (const Element*)out, (const float*)log_z, (const Element*)grad_out, (Element*)grad_qkv,
                (float*)grad_bias);
    });
}

}  // namespace tiled
}  // namespace attention
}  // namespace
}  // namespace unpad

#endif
