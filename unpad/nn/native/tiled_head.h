/* The product with the vocabulary, its cross-entropy and both products of the backward pass, in bf16 by tiles.
 *
 * Logits are made twice and stored nowhere: once for every row's sum of exponentials, once for the gradients, in
 * squares of 32 words and 32 rows ("rows" are of hidden states, one per target). What a row needs lies along a vector.
 *
 * Rows are taken ROWS at a time. The words are divided into the same chunks whatever the number of threads; a task is a
 * chunk. Sums of exponentials and gradients of rows are a chunk's first and then added up in the order of chunks, and
 * the gradient of a word is one task's: results do not depend on the number of threads.
 */
#ifndef UNPAD_TILED_HEAD_H
#define UNPAD_TILED_HEAD_H

#include "attention_call.h"
#include "columns.h"
#include "tiles.h"

#include <limits>

namespace unpad {
namespace {
namespace head {

using attention::interleave_rows;
using attention::round_up;

constexpr int64_t ROWS = 512;  /* of a block */
constexpr int64_t WORDS = 128; /* of a block: the gradients of its logits stay in the second cache */
constexpr int64_t CHUNKS = 16; /* at most, and so are threads that have work */
constexpr float LOG2_E = (float)attention::LOG2_E;

/* Scratch memory of a thread. */
template <class M>
struct Workspace {
    Buffer<typename M::Element> words, grads;
    Buffer<typename M::Pair> word_pairs, grad_pairs;
    Buffer<float> scores, last_words;
};

template <class M, class Tiles>
class Head {
    using Element = typename M::Element;
    using Pair = typename M::Pair;
    using Vec = typename M::Vec;

  public:
    Head(
        int64_t num_rows, int64_t width, int64_t vocab_size, double smoothing, int num_threads, const Element* hidden,
        const Element* weight, const int64_t* labels)
        : num_rows_(num_rows),
          width_(width),
          channels_(round_up(width, PANEL)),
          vocab_size_(vocab_size),
          chunk_words_(round_up((vocab_size + CHUNKS - 1) / CHUNKS, WORDS)),
          num_chunks_((vocab_size + chunk_words_ - 1) / chunk_words_),
          smoothing_((float)smoothing),
          num_threads_(useful_threads(num_rows * vocab_size, num_threads)),
          hidden_(hidden),
          weight_(weight),
          labels_(labels) {
        columns_.at_least(ROWS / 2 * channels_);
        first_row_.at_least((vocab_size + PANEL - 1) / PANEL);
    }

    void forward(float* loss, float* nll, float* log_z) {
        largest_.at_least(CHUNKS * ROWS);
        exponentials_.at_least(CHUNKS * ROWS);
        logits_.at_least(CHUNKS * ROWS);
#pragma omp parallel num_threads(num_threads_)
        {
            [[maybe_unused]] const Tiles tiles{};
            for (int64_t first = 0; first < num_rows_; first += ROWS) {
#pragma omp single
                begin_block(first);
#pragma omp for schedule(static)
                for (int64_t panel = 0; panel < num_panels_; panel++) pack(panel, nullptr);
#pragma omp for schedule(dynamic, 1)
                for (int64_t chunk = 0; chunk < num_chunks_; chunk++) sum_chunk(chunk);
#pragma omp for schedule(static)
                for (int64_t row = 0; row < num_panels_ * PANEL; row += TILE) finish(row, loss, nll, log_z);
            }
        }
    }

    /* nll and log_z as forward gave them. Either gradient may be NULL. */
    void backward(const float* nll, const float* log_z, Element* grad_hidden, float* grad_weight) {
        if (!num_rows_ && grad_weight) std::fill_n(grad_weight, vocab_size_ * width_, 0.0f);
        const int64_t num_words = round_up(vocab_size_, PANEL);
        if (grad_weight) row_pairs_.at_least(ROWS / 2 * width_);
        if (grad_hidden) words_turned_.at_least(num_words / 2 * width_);
        if (grad_hidden) hidden_grad_.at_least(CHUNKS * ROWS * width_);
#pragma omp parallel num_threads(num_threads_)
        {
            [[maybe_unused]] const Tiles tiles{};
            if (grad_hidden) {
#pragma omp for schedule(static)
                for (int64_t word = 0; word < num_words; word += PANEL) turn_words(word);
            }
            for (int64_t first = 0; first < num_rows_; first += ROWS) {
#pragma omp single
                {
                    begin_block(first);
                    load_gradients(nll + first, log_z + first);
                }
#pragma omp for schedule(static)
                for (int64_t panel = 0; panel < num_panels_; panel++)
                    pack(panel, grad_weight ? row_pairs_.data() : nullptr);
#pragma omp for schedule(dynamic, 1)
                for (int64_t chunk = 0; chunk < num_chunks_; chunk++)
                    differentiate_chunk(chunk, grad_hidden != nullptr, grad_weight);
                if (!grad_hidden) continue;
#pragma omp for schedule(static)
                for (int64_t panel = 0; panel < num_panels_; panel++) write_hidden(panel, grad_hidden);
            }
        }
    }

  private:
    static Workspace<M>& work() {
        static thread_local Workspace<M> workspace;
        return workspace;
    }

    /* Sets the sizes of the block of rows from `first` on, and lists its rows by the panel of their label's word. */
    void begin_block(int64_t first) {
        first_ = first;
        block_rows_ = std::min(ROWS, num_rows_ - first);
        num_panels_ = (block_rows_ + PANEL - 1) / PANEL;
        std::fill_n(first_row_.data(), (vocab_size_ + PANEL - 1) / PANEL, (int32_t)ROWS);
        for (int64_t row = block_rows_ - 1; row >= 0; row--) {
            int32_t& begin = first_row_.data()[labels_[first + row] / PANEL];
            next_row_[row] = begin;
            begin = (int32_t)row;
        }
    }

    /* Calls f(row) for the rows of a panel that are left in a list, of which `row` is the next. */
    template <class F>
    void each_labelled(int32_t& row, int64_t panel, F f) const {
        for (; row < (panel + 1) * PANEL; row = next_row_[row]) f((int64_t)row);
    }

    /* A panel of the block's rows as right operands: columns, and pairs of rows where they are wanted. */
    void pack(int64_t panel, Pair* pairs) {
        Element* rows = work().words.at_least(PANEL * channels_);
        const int64_t num = std::min(PANEL, block_rows_ - panel * PANEL);
        copy_rows(hidden_ + (first_ + panel * PANEL) * width_, num, rows);
        M::transpose(rows, channels_, columns_.data() + panel * TILE * channels_);
        if (pairs) interleave_rows<M>(rows, channels_, PANEL, width_, pairs + panel * TILE * width_);
    }

    /* Rows of (num, width_), completed by zeros to (PANEL, channels_). */
    void copy_rows(const Element* from, int64_t num, Element* to) const {
        for (int64_t row = 0; row < num; row++) {
            std::copy_n(from + row * width_, width_, to + row * channels_);
            std::fill_n(to + row * channels_ + width_, channels_ - width_, (Element)0);
        }
        std::fill_n(to + num * channels_, (PANEL - num) * channels_, (Element)0);
    }

    int64_t words_from(int64_t word) const { return std::min(PANEL, vocab_size_ - word); }

    /* A panel of words as left operand: in place where it is whole. */
    const Element* words(int64_t word) const {
        if (channels_ == width_ && words_from(word) == PANEL) return weight_ + word * width_;
        Element* rows = work().words.at_least(PANEL * channels_);
        copy_rows(weight_ + word * width_, words_from(word), rows);
        return rows;
    }

    /* Calls f(panel, logits) for the block's panels of rows, (32 words, 32 rows), with the products of the next panel
     * begun first. */
    template <class F>
    void each_panel(int64_t word, F f) const {
        float* scores = work().scores.at_least(2 * SQUARE);
        const TileView left = rows_view(words(word), channels_);
        const auto make = [&](int64_t panel) {
            multiply_tiles<Tiles>(
                left, columns_view(columns_.data() + panel * TILE * channels_),
                sums_view(scores + panel % 2 * SQUARE, PANEL), tiles_of(words_from(word)), 2, channels_ / PANEL, false);
        };
        make(0);
        for (int64_t panel = 0; panel < num_panels_; panel++) {
            if (panel + 1 < num_panels_) make(panel + 1);
            f(panel, scores + panel % 2 * SQUARE);
        }
    }

    /* ----------------------------------------------------------------------- forward */

    /* Every row's largest logit of a chunk of words, the sum of exponentials less it, and the sum of logits. */
    void sum_chunk(int64_t chunk) {
        float* largest = largest_.data() + chunk * ROWS;
        float* exponentials = exponentials_.data() + chunk * ROWS;
        float* logits = logits_.data() + chunk * ROWS;
        std::fill_n(largest, ROWS, -std::numeric_limits<float>::infinity());
        std::fill_n(exponentials, ROWS, 0.0f);
        std::fill_n(logits, ROWS, 0.0f);
        const int64_t stop = std::min(vocab_size_, (chunk + 1) * chunk_words_);
        for (int64_t word = chunk * chunk_words_; word < stop; word += PANEL) {
            const int64_t num = words_from(word);
            int32_t labelled = first_row_.data()[word / PANEL];
            each_panel(word, [&](int64_t panel, const float* scores) {
                for (int64_t at = panel * PANEL; at < (panel + 1) * PANEL; at += TILE)
                    add_exponentials(scores + at % PANEL, num, largest + at, exponentials + at, logits + at);
                each_labelled(labelled, panel, [&](int64_t row) {
                    label_logits_[row] = scores[labels_[first_ + row] % PANEL * PANEL + row % PANEL];
                });
            });
        }
    }

    void add_exponentials(const float* scores, int64_t num, float* largest, float* exponentials, float* logits) const {
        const Vec factor = M::set(LOG2_E), before = M::load(largest);
        Vec most = before, sum = M::set(0), plain = M::set(0);
        for (int64_t word = 0; word < num; word++) most = M::max(most, M::load(scores + word * PANEL));
        for (int64_t word = 0; word < num; word++) {
            const Vec logit = M::load(scores + word * PANEL);
            sum = sum + M::exp2((logit - most) * factor);
            plain = plain + logit;
        }
        M::store(largest, most);
        M::store(exponentials, M::fma(M::load(exponentials), M::exp2((before - most) * factor), sum));
        M::store(logits, M::load(logits) + plain);
    }

    /* Adds up the chunks for 16 rows. */
    void finish(int64_t at, float* loss, float* nll, float* log_z) const {
        const Vec factor = M::set(LOG2_E);
        Vec most = M::load(largest_.data() + at), sum = M::set(0), plain = M::set(0);
        for (int64_t chunk = 1; chunk < num_chunks_; chunk++)
            most = M::max(most, M::load(largest_.data() + chunk * ROWS + at));
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++) {
            const int64_t place = chunk * ROWS + at;
            const Vec share = M::exp2((M::load(largest_.data() + place) - most) * factor);
            sum = M::fma(M::load(exponentials_.data() + place), share, sum);
            plain = plain + M::load(logits_.data() + place);
        }
        float largest[TILE], sums[TILE], logits[TILE];
        M::store(largest, most);
        M::store(sums, sum);
        M::store(logits, plain);
        for (int64_t i = 0; i < TILE && at + i < block_rows_; i++) {
            const int64_t row = first_ + at + i;
            const float log_sum = std::log(sums[i]);
            const float uniform = log_sum + (largest[i] - logits[i] / (float)vocab_size_);
            nll[row] = log_sum + (largest[i] - label_logits_[at + i]);
            loss[row] = smoothing_ != 0 ? (1 - smoothing_) * nll[row] + smoothing_ * uniform : nll[row];
            log_z[row] = log_sum + largest[i];
        }
    }

    /* ----------------------------------------------------------------------- backward */

    void turn_words(int64_t word) {
        Pair* pairs = work().word_pairs.at_least(TILE * width_);
        interleave_rows<M>(words(word), channels_, PANEL, width_, pairs);
        for (int64_t d = 0; d < width_; d += TILE)
            Fp32::transpose(
                (const float*)pairs + d, width_, (float*)words_turned_.data() + word / 2 * width_ + d * TILE, TILE);
    }

    /* Of the block's rows: log_z as a power of two, and the gradient of the label's logit, by far the largest of a row:
     * what its rounding takes off is added to both gradients in float. Rows that complete a panel are zeros in what
     * their gradients are multiplied by. */
    void load_gradients(const float* nll, const float* log_z) {
        std::fill_n(minus_shift_, ROWS, -std::numeric_limits<float>::infinity());
        std::fill_n(label_rests_, ROWS, 0.0f);
        const float floor = smoothing_ / (float)vocab_size_;
        for (int64_t row = 0; row < block_rows_; row++) {
            minus_shift_[row] = -log_z[row] * LOG2_E;
            label_rests_[row] = std::expm1(-nll[row]) + (smoothing_ - floor);
        }
        for (int64_t row = 0; row < ROWS; row += TILE) {
            const Vec whole = M::load(label_rests_ + row);
            M::store(label_grads_ + row, whole);
            M::store(label_rests_ + row, whole - M::load(label_grads_ + row));
        }
    }

    void differentiate_chunk(int64_t chunk, bool want_hidden, float* grad_weight) {
        Element* grads = work().grads.at_least(WORDS * ROWS);
        Pair* pairs = work().grad_pairs.at_least(WORDS / 2 * ROWS);
        const int64_t begin = chunk * chunk_words_, stop = std::min(vocab_size_, begin + chunk_words_);
        for (int64_t block = begin; block < stop; block += WORDS) {
            const int64_t end = std::min(block + WORDS, stop), num_word_panels = (end - block + PANEL - 1) / PANEL;
            for (int64_t word = block; word < end; word += PANEL) {
                const int64_t place = (word - block) / PANEL * num_panels_ * SQUARE;
                differentiate_words(word, grads + place, pairs + place / 2);
                if (grad_weight) sum_weight(word, grads + place, grad_weight);
            }
            if (!want_hidden) continue;
            for (int64_t panel = 0; panel < num_panels_; panel++) {
                float* to = hidden_grad_.data() + (chunk * ROWS + panel * PANEL) * width_;
                multiply_tiles<Tiles>(
                    turned_view(words_turned_.data() + block / 2 * width_, width_),
                    {pairs + panel * SQUARE / 2, 4 * PANEL, TILE_BYTES, 2 * SQUARE * num_panels_}, sums_view(to, PANEL),
                    width_ / TILE, 2, num_word_panels, block > begin);
            }
        }
    }

    /* Gradients of the logits of a panel of words, by panel of rows: (32 words, 32 rows), and pairs of words. */
    void differentiate_words(int64_t word, Element* grads, Pair* pairs) {
        const int64_t num = words_from(word);
        const Vec factor = M::set(LOG2_E), floor = M::set(smoothing_ / (float)vocab_size_), zero = M::set(0);
        int32_t labelled = first_row_.data()[word / PANEL];
        each_panel(word, [&](int64_t panel, const float* scores) {
            Element* to = grads + panel * SQUARE;
            Pair* to_pairs = pairs + panel * SQUARE / 2;
            for (int64_t half = 0; half < PANEL; half += TILE) {
                const Vec minus_shift = M::load(minus_shift_ + panel * PANEL + half);
                const auto gradient = [&](int64_t i) {
                    const Vec x = M::fma(M::load(scores + i * PANEL + half), factor, minus_shift);
                    return i < num ? M::exp2_short(x) - floor : zero;
                };
                for (int64_t i = 0; i < PANEL; i += 2)
                    M::store_pairs(
                        to_pairs + i / 2 * PANEL + half, to + i * PANEL + half, PANEL, gradient(i), gradient(i + 1));
            }
            each_labelled(labelled, panel, [&](int64_t row) {
                const int64_t at = labels_[first_ + row] % PANEL, column = row % PANEL;
                to[at * PANEL + column] = label_grads_[row];
                ((Element*)(to_pairs + at / 2 * PANEL + column))[at % 2] = label_grads_[row];
            });
        });
    }

    /* Adds the block's part to the gradient of a panel of words. */
    void sum_weight(int64_t word, const Element* grads, float* grad_weight) {
        const int64_t num = words_from(word);
        float *own = grad_weight + word * width_, *to = own;
        if (num < PANEL) { /* tiles of these words would go beyond the vocabulary */
            to = work().last_words.at_least(PANEL * width_);
            if (first_) std::copy_n(own, num * width_, to);
        }
        multiply_tiles<Tiles>(
            squares_view(grads), pairs_view(row_pairs_.data(), width_), sums_view(to, width_), tiles_of(num),
            width_ / TILE, num_panels_, first_ > 0);
        if (num < PANEL) std::copy_n(to, num * width_, own);
        for (int32_t row = first_row_.data()[word / PANEL]; row < ROWS; row = next_row_[row]) {
            const Element* hidden = hidden_ + (first_ + row) * width_;
            add_product(label_rests_[row], hidden, grad_weight + labels_[first_ + row] * width_);
        }
    }

    /* sum += factor * row, both (width_). */
    void add_product(float factor, const Element* row, float* sum) const {
        for (int64_t d = 0; d < width_; d += TILE)
            M::store(sum + d, M::fma(M::set(factor), M::load(row + d), M::load(sum + d)));
    }

    /* Adds up the chunks, (channel, row), and turns them. */
    void write_hidden(int64_t panel, Element* grad_hidden) {
        float square[TILE * TILE], turned[TILE * TILE];
        for (int64_t d = 0; d < width_; d += TILE)
            for (int64_t half = 0; half < PANEL; half += TILE) {
                for (int64_t i = 0; i < TILE; i++) {
                    Vec sum = M::set(0);
                    for (int64_t chunk = 0; chunk < num_chunks_; chunk++)
                        sum = sum + M::load(
                                        hidden_grad_.data() + (chunk * ROWS + panel * PANEL) * width_ +
                                        (d + i) * PANEL + half);
                    M::store(square + i * TILE, sum);
                }
                Fp32::transpose(square, TILE, turned, TILE);
                for (int64_t row = panel * PANEL + half, i = 0; i < TILE && row < block_rows_; row++, i++) {
                    const Vec word = M::load(weight_ + labels_[first_ + row] * width_ + d);
                    const Vec sum = M::fma(M::set(label_rests_[row]), word, M::load(turned + i * TILE));
                    M::store(grad_hidden + (first_ + row) * width_ + d, sum);
                }
            }
    }

    const int64_t num_rows_, width_, channels_, vocab_size_, chunk_words_, num_chunks_;
    const float smoothing_;
    const int num_threads_;
    const Element *hidden_, *weight_;
    const int64_t* labels_;

    Buffer<Pair> columns_, row_pairs_, words_turned_;
    Buffer<float> largest_, exponentials_, logits_; /* (CHUNKS, ROWS) */
    Buffer<float> hidden_grad_;                     /* (CHUNKS, panel, channel, PANEL) */
    Buffer<int32_t> first_row_;                     /* of the block, with a label in each panel of words */

    /* Of the block of rows at hand. */
    int64_t first_ = 0, block_rows_ = 0, num_panels_ = 0;
    int32_t next_row_[ROWS]; /* with a label in the same panel of words; ROWS ends */
    float label_logits_[ROWS], minus_shift_[ROWS];
    Element label_grads_[ROWS]; /* of the label's logit, */
    float label_rests_[ROWS];   /* and what its rounding took off */
};

}  // namespace head
}  // namespace
}  // namespace unpad

#endif
