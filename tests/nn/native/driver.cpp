/* Calls every kernel of every target in every type over ragged shapes: test_sanitizers.py builds and runs it.
 *
 * Every array is an allocation of its own, of exactly the size that kernels.h states, and ends at a page that may not
 * be touched: AddressSanitizer does not look at masked loads and stores, the processor does. Inputs are exact in bf16,
 * outputs start as NaN, and what float and bf16 give is compared with what double gives.
 */
#include "kernels.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr int num_threads = 2;
constexpr int64_t lengths[] = {0, 1, 2, 17, 48, 49, 100};
const double infinity = std::numeric_limits<double>::infinity();

double from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounded to nearest, ties to even. */
uint16_t to_bf16(double x) {
    const float value = (float)x;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void put(uint16_t& to, double x) { to = to_bf16(x); }
void put(float& to, double x) { to = (float)x; }
void put(double& to, double x) { to = x; }
void put(int32_t& to, double x) { to = (int32_t)x; }
void put(uint32_t& to, double x) { to = (uint32_t)x; }
void put(uint8_t& to, double x) { to = (uint8_t)x; }
void put(int64_t& to, double x) { to = (int64_t)x; }
double get(uint16_t x) { return from_bf16(x); }
double get(float x) { return x; }
double get(double x) { return x; }

/* What an array holds, as doubles. */
using Numbers = std::vector<double>;

template <class Number>
class Array {
  public:
    Array(int64_t size, const std::function<double(int64_t)>& value) : size_(size) {
        const size_t page = 4096, bytes = (size_t)size * sizeof(Number);
        mapped_ = (bytes + page - 1) / page * page + page;
        start_ = (char*)mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start_ == MAP_FAILED || mprotect(start_ + mapped_ - page, page, PROT_NONE)) std::abort();
        data_ = (Number*)(start_ + mapped_ - page - bytes);
        ASAN_POISON_MEMORY_REGION(start_, (size_t)((char*)data_ - start_));
        for (int64_t i = 0; i < size; ++i) put(data_[i], value(i));
    }
    explicit Array(int64_t size) : Array(size, [](int64_t) { return std::nan(""); }) {}
    Array(Array&& other) : size_(other.size_), mapped_(other.mapped_), start_(other.start_), data_(other.data_) {
        other.start_ = nullptr;
    }
    ~Array() {
        if (!start_) return;
        ASAN_UNPOISON_MEMORY_REGION(start_, mapped_);
        munmap(start_, mapped_);
    }
    Number* data() { return data_; }
    Numbers numbers() const {
        Numbers all;
        for (int64_t i = 0; i < size_; ++i) all.push_back(get(data_[i]));
        return all;
    }

  private:
    int64_t size_;
    size_t mapped_;
    char* start_;
    Number* data_;
};

/* The i-th number of a fixed stream, between -1 and 1 and exact in bf16. */
double noise(int64_t stream, int64_t i) {
    uint64_t x = ((uint64_t)stream << 40) + (uint64_t)i + 1;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)(int64_t)((x ^ (x >> 31)) % 257) / 128 - 1;
}

template <class Number>
Array<Number> random_array(int64_t size, int64_t stream) {
    return Array<Number>(size, [stream](int64_t i) { return noise(stream, i); });
}

struct LowType {
    using Element = uint16_t;
    using Wide = float;
    static constexpr int dtype = UNPAD_BF16;
    static constexpr double bound = 0.03; /* of the error */
};

struct FloatType {
    using Element = float;
    using Wide = float;
    static constexpr int dtype = UNPAD_FP32;
    static constexpr double bound = 1e-5;
};

struct DoubleType {
    using Element = double;
    using Wide = double;
    static constexpr int dtype = UNPAD_DOUBLE;
};

const unpad_kernels* kernels = nullptr; /* of the target at hand */
int failures = 0;

/* Norm of the difference over the norm of what is expected, taken as `least` per number or more; not-a-number where
 * anything was left unwritten. */
double error(const Numbers& actual, const Numbers& expected, double least) {
    double difference = 0, norm = least * least * (double)expected.size();
    for (size_t i = 0; i < expected.size(); ++i) {
        difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    return expected.empty() ? 0 : std::sqrt(difference / norm);
}

/* Worst error of any output of a function so far, and whether all are small enough. */
struct Comparison {
    std::string name;
    double least = 1e-6;
    double worst = 0;
    int cases = 0;

    void add(const std::vector<Numbers>& actual, const std::vector<Numbers>& expected) {
        ++cases;
        for (size_t i = 0; i < expected.size(); ++i) {
            const double here = error(actual[i], expected[i], least);
            if (here > worst || std::isnan(here)) worst = here; /* nothing is above NaN: it stays */
        }
    }
    void report(double bound) const {
        const bool good = worst < bound;
        failures += !good;
        std::printf("%s %-14s %3d shapes, worst difference %.2g\n", good ? "ok  " : "FAIL", name.c_str(), cases, worst);
    }
};

struct AttentionCase {
    std::vector<int64_t> seqs;
    int64_t heads, kv_heads, head_dim;
    bool causal, rotary, key_bias, qkv_bias;
    double dropout;
    int64_t window;
};

int64_t total(const std::vector<int64_t>& seqs) {
    int64_t sum = 0;
    for (int64_t length : seqs) sum += length;
    return sum;
}

unpad_attention attention_sizes(const AttentionCase& c) {
    unpad_attention sizes{};
    sizes.num_seqs = (int64_t)c.seqs.size();
    sizes.total_tokens = total(c.seqs);
    sizes.heads = c.heads;
    sizes.kv_heads = c.kv_heads;
    sizes.head_dim = c.head_dim;
    sizes.scale = 1 / std::sqrt((double)c.head_dim);
    sizes.dropout = c.dropout;
    sizes.seed = 0x123456789abcdefu;
    sizes.causal = c.causal;
    sizes.window = c.window;
    sizes.num_threads = num_threads;
    return sizes;
}

/* The last key of every sequence of two or more is hidden. */
std::vector<double> key_biases(const std::vector<int64_t>& seqs) {
    std::vector<double> bias;
    for (int64_t length : seqs)
        for (int64_t i = 0; i < length; ++i)
            bias.push_back(i > 0 && i == length - 1 ? -infinity : noise(3, (int64_t)bias.size()));
    return bias;
}

template <class T>
std::vector<Numbers> attention(const AttentionCase& c) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    const unpad_attention sizes = attention_sizes(c);
    const int64_t tokens = sizes.total_tokens, half = c.head_dim / 2;
    const int64_t qkv_size = tokens * (c.heads + 2 * c.kv_heads) * c.head_dim, out_size = tokens * c.heads * c.head_dim;
    Array<int32_t> cu_seqlens(sizes.num_seqs + 1, [&](int64_t i) {
        return (double)total({c.seqs.begin(), c.seqs.begin() + i});
    });
    const std::vector<double> bias = key_biases(c.seqs);
    Array<Element> qkv = random_array<Element>(qkv_size, 1), grad_out = random_array<Element>(out_size, 2);
    Array<Wide> cos(tokens * half, [](int64_t i) { return std::cos((double)i); });
    Array<Wide> sin(tokens * half, [](int64_t i) { return std::sin((double)i); });
    Array<Wide> key_bias(tokens, [&](int64_t i) { return bias[(size_t)i]; });
    Array<Element> qkv_bias = random_array<Element>((c.heads + 2 * c.kv_heads) * c.head_dim, 3);
    Array<Element> out(out_size), grad_qkv(qkv_size);
    Array<Wide> log_z(c.heads * tokens), grad_key_bias(c.kv_heads * tokens);
    const void* cos_data = c.rotary ? cos.data() : nullptr;
    const void* sin_data = c.rotary ? sin.data() : nullptr;
    const void* bias_data = c.key_bias ? key_bias.data() : nullptr;
    const void* qkv_bias_data = c.qkv_bias ? qkv_bias.data() : nullptr;
    kernels->attention_forward(
        T::dtype, &sizes, cu_seqlens.data(), qkv.data(), qkv_bias_data, cos_data, sin_data, bias_data, out.data(),
        log_z.data());
    kernels->attention_backward(
        T::dtype, &sizes, cu_seqlens.data(), qkv.data(), qkv_bias_data, cos_data, sin_data, bias_data, out.data(),
        log_z.data(), grad_out.data(), grad_qkv.data(), c.key_bias ? grad_key_bias.data() : nullptr);
    std::vector<Numbers> results{out.numbers(), log_z.numbers(), grad_qkv.numbers()};
    /* Where each query sees one key, the gradient of its bias is zero, and bf16 leaves rounding alone. */
    if (c.key_bias && tokens > 2) results.push_back(grad_key_bias.numbers());
    return results;
}

template <class T>
void check_attention() {
    Comparison comparison{"attention", 0.03};
    const std::vector<int64_t> all(std::begin(lengths), std::end(lengths));
    const std::vector<std::vector<int64_t>> runs{{}, {0}, {1}, {2}, {17}, {49}, all};
    const int64_t heads[][3] = {{2, 2, 16}, {4, 2, 32}, {3, 1, 128}};
    for (const auto& seqs : runs)
        for (const auto& h : heads)
            for (int options = 0; options < 8; ++options) {
                const bool causal = options & 1, rotary = options & 2, extras = options & 4;
                const bool biased = causal != rotary;
                const int64_t window = causal && rotary ? 20 : 0;
                const AttentionCase c{seqs,   h[0],   h[1],   h[2],                causal,
                                      rotary, extras, biased, extras ? 0.25 : 0.0, window};
                comparison.add(attention<T>(c), attention<DoubleType>(c));
            }
    comparison.report(T::bound);
}

/* Keys and values of rows of all lengths, each with room for so many more tokens and no other. */
template <class Element>
struct Held {
    Held(int64_t token_size, int64_t more)
        : tokens(std::size(lengths), [](int64_t i) { return (double)lengths[i]; }),
          capacities(std::size(lengths), [=](int64_t i) { return (double)(lengths[i] + more); }) {
        rows.reserve(std::size(lengths));
        for (int64_t length : lengths) {
            rows.push_back(random_array<Element>(2 * token_size * (length + more), (int)(2 + length)));
            buffers.push_back(rows.back().data());
        }
        all = {tokens.data(), capacities.data(), buffers.data()};
    }
    std::vector<Numbers> numbers() const {
        std::vector<Numbers> found;
        for (const auto& row : rows) found.push_back(row.numbers());
        return found;
    }
    Array<int64_t> tokens, capacities;
    std::vector<Array<Element>> rows;
    std::vector<void*> buffers;
    unpad_held all;
};

template <class T>
std::vector<Numbers> decode(int64_t heads, int64_t kv_heads, int64_t head_dim, bool rotary, int64_t window) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    const int64_t num_rows = std::size(lengths), half = head_dim / 2;
    unpad_attention sizes = attention_sizes({{}, heads, kv_heads, head_dim, true, rotary, false, false, 0, window});
    sizes.num_seqs = sizes.total_tokens = num_rows;
    Held<Element> held(kv_heads * head_dim, 1);
    Array<Element> qkv = random_array<Element>(num_rows * (heads + 2 * kv_heads) * head_dim, 1);
    Array<Wide> cos(num_rows * half, [](int64_t i) { return std::cos((double)i); });
    Array<Wide> sin(num_rows * half, [](int64_t i) { return std::sin((double)i); });
    Array<Element> out(num_rows * heads * head_dim);
    kernels->decode_attention(
        T::dtype, &sizes, &held.all, qkv.data(), rotary ? cos.data() : nullptr, rotary ? sin.data() : nullptr,
        out.data());
    std::vector<Numbers> results = held.numbers();
    results.push_back(out.numbers());
    return results;
}

/* Pieces of 33 tokens that follow the held ones; without any held, also with a bias. */
template <class T>
std::vector<Numbers> pieces(int64_t heads, int64_t kv_heads, int64_t head_dim, bool rotary, int64_t window) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    const int64_t num_seqs = std::size(lengths), new_tokens = 33, tokens = num_seqs * new_tokens, half = head_dim / 2;
    unpad_attention sizes = attention_sizes({{}, heads, kv_heads, head_dim, true, rotary, false, false, 0, window});
    sizes.num_seqs = num_seqs;
    sizes.total_tokens = tokens;
    Held<Element> held(kv_heads * head_dim, new_tokens);
    Array<int32_t> cu_seqlens(num_seqs + 1, [&](int64_t i) { return (double)(i * new_tokens); });
    Array<Element> qkv = random_array<Element>(tokens * (heads + 2 * kv_heads) * head_dim, 1);
    Array<Wide> cos(tokens * half, [](int64_t i) { return std::cos((double)i); });
    Array<Wide> sin(tokens * half, [](int64_t i) { return std::sin((double)i); });
    Array<Element> out(tokens * heads * head_dim);
    kernels->piece_attention(
        T::dtype, &sizes, cu_seqlens.data(), &held.all, qkv.data(), rotary ? cos.data() : nullptr,
        rotary ? sin.data() : nullptr, nullptr, out.data());
    std::vector<Numbers> results = held.numbers();
    results.push_back(out.numbers());
    return results;
}

template <class T>
void check_decode() {
    Comparison comparison{"decode"}, of_pieces{"pieces", 0.03};
    const int64_t heads[][3] = {{2, 2, 16}, {4, 2, 32}, {3, 1, 128}};
    for (const auto& h : heads)
        for (bool rotary : {false, true})
            for (int64_t window : {0, 20}) {
                comparison.add(
                    decode<T>(h[0], h[1], h[2], rotary, window), decode<DoubleType>(h[0], h[1], h[2], rotary, window));
                of_pieces.add(
                    pieces<T>(h[0], h[1], h[2], rotary, window), pieces<DoubleType>(h[0], h[1], h[2], rotary, window));
            }
    comparison.report(T::bound);
    of_pieces.report(T::bound);
}

template <class T>
std::vector<Numbers> rowwise_linear(int64_t rows, int64_t in, int64_t out, bool with_bias) {
    using Element = typename T::Element;
    Array<Element> x = random_array<Element>(rows * in, 1), weight = random_array<Element>(out * in, 2);
    Array<Element> bias = random_array<Element>(out, 3), y(rows * out);
    kernels->rowwise_linear(
        T::dtype, rows, in, out, num_threads, x.data(), weight.data(), with_bias ? bias.data() : nullptr, y.data());
    return {y.numbers()};
}

template <class T>
void check_rowwise_linear() {
    Comparison comparison{"rowwise_linear"};
    for (int64_t rows : {1, 2, 3, 5, 8, 31, 70})
        for (int64_t in : {7, 32, 100, 2100})
            for (int64_t out : {1, 17, 64})
                for (bool bias : {false, true})
                    comparison.add(rowwise_linear<T>(rows, in, out, bias), rowwise_linear<DoubleType>(rows, in, out, bias));
    comparison.report(T::bound);
}

/* Quantized weights have no type of activations: what they give is compared with sums in double. */
void check_int8_linear() {
    Comparison comparison{"int8_linear"};
    for (int64_t rows : {1, 2, 3, 5, 7, 31})
        for (int64_t in : {1, 4, 7, 64, 300})
            for (int64_t out : {1, 16, 17, 100}) {
                const int64_t fours = (in + 3) / 4, blocks = (out + 15) / 16;
                Array<float> x = random_array<float>(rows * in, 1), scales = random_array<float>(out, 2), y(rows * out);
                const auto number = [](int64_t o, int64_t i) { return std::round(127 * noise(4, 1000 * o + i)); };
                Array<uint8_t> weight(blocks * fours * 64, [&](int64_t at) {
                    const int64_t i = at / 64 % fours * 4 + at % 4, o = at / (64 * fours) * 16 + at / 4 % 16;
                    return i < in && o < out ? number(o, i) + 128 : 128;
                });
                kernels->int8_linear(rows, in, out, num_threads, x.data(), weight.data(), scales.data(), y.data());
                Numbers expected;
                for (int64_t row = 0; row < rows; ++row) {
                    float largest = 0;
                    for (int64_t i = 0; i < in; ++i) largest = std::fmax(largest, std::fabs(x.data()[row * in + i]));
                    const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
                    for (int64_t o = 0; o < out; ++o) {
                        double sum = 0;
                        for (int64_t i = 0; i < in; ++i)
                            sum += std::nearbyint(x.data()[row * in + i] * inverse) * number(o, i);
                        expected.push_back((float)sum * (scale * scales.data()[o]));
                    }
                }
                comparison.add({y.numbers()}, {expected});
            }
    comparison.report(std::numeric_limits<double>::min());
}

struct NormCase {
    int64_t tokens, width;
    bool centred, delta, bias, grad_sum;
    double dropout;
};

template <class T>
std::vector<Numbers> add_norm(const NormCase& c) {
    using Element = typename T::Element;
    using Wide = typename T::Wide;
    const int64_t size = c.tokens * c.width;
    const unpad_norm sizes{c.tokens, c.width, 1e-2, c.dropout, 77, nullptr, c.centred, num_threads};
    Array<Wide> residual = random_array<Wide>(size, 1), weight = random_array<Wide>(c.width, 2);
    Array<Wide> bias = random_array<Wide>(c.width, 3), grad_sum = random_array<Wide>(size, 4);
    Array<Element> delta = random_array<Element>(size, 5), grad_y = random_array<Element>(size, 6);
    Array<Wide> sum(size), stats(2 * c.tokens), grad_residual(size), grad_weight(c.width), grad_bias(c.width);
    Array<Element> y(size), grad_delta(size);
    kernels->add_norm_forward(
        T::dtype, &sizes, residual.data(), c.delta ? delta.data() : nullptr, weight.data(),
        c.bias ? bias.data() : nullptr, c.delta ? sum.data() : nullptr, y.data(), stats.data());
    kernels->add_norm_backward(
        T::dtype, &sizes, grad_y.data(), c.grad_sum ? grad_sum.data() : nullptr,
        c.delta ? sum.data() : residual.data(), stats.data(), weight.data(), grad_residual.data(),
        c.delta ? grad_delta.data() : nullptr, grad_weight.data(), c.bias ? grad_bias.data() : nullptr);
    std::vector<Numbers> results{y.numbers(), stats.numbers(), grad_residual.numbers(), grad_weight.numbers()};
    if (c.delta) results.insert(results.end(), {sum.numbers(), grad_delta.numbers()});
    if (c.bias) results.push_back(grad_bias.numbers());
    return results;
}

template <class T>
void check_add_norm() {
    Comparison comparison{"add_norm"};
    for (int64_t tokens : lengths)
        for (int64_t width : {2, 7, 16, 33, 80})
            for (int options = 0; options < 16; ++options) {
                const bool centred = options & 1, delta = options & 2, bias = options & 4, grad_sum = options & 8;
                const NormCase c{tokens, width, centred, delta, bias, grad_sum, delta && bias ? 0.25 : 0.0};
                comparison.add(add_norm<T>(c), add_norm<DoubleType>(c));
            }
    comparison.report(T::bound);
}

template <class T>
std::vector<Numbers> activation(int kind, int64_t tokens, int64_t hidden, bool biased) {
    using Element = typename T::Element;
    const int64_t size = tokens * hidden, width = kind >= UNPAD_GEGLU ? 2 * hidden : hidden;
    Array<Element> x = random_array<Element>(tokens * width, 1), grad_y = random_array<Element>(size, 2);
    Array<Element> bias = random_array<Element>(width, 3), y(size), grad_x(tokens * width);
    Array<typename T::Wide> grad_bias(width);
    const void* bias_data = biased ? bias.data() : nullptr;
    kernels->activation_forward(T::dtype, kind, tokens, hidden, num_threads, x.data(), bias_data, y.data());
    kernels->activation_backward(
        T::dtype, kind, tokens, hidden, num_threads, grad_y.data(), x.data(), bias_data, grad_x.data(),
        biased ? grad_bias.data() : nullptr);
    std::vector<Numbers> results{y.numbers(), grad_x.numbers()};
    if (biased) results.push_back(grad_bias.numbers());
    return results;
}

template <class T>
void check_activation() {
    Comparison comparison{"activation"};
    for (int kind : {UNPAD_RELU, UNPAD_GELU, UNPAD_GEGLU, UNPAD_SWIGLU})
        for (int64_t tokens : lengths)
            for (int64_t hidden : {1, 7, 16, 33, 80})
                for (bool biased : {false, true})
                    comparison.add(
                        activation<T>(kind, tokens, hidden, biased), activation<DoubleType>(kind, tokens, hidden, biased));
    comparison.report(T::bound);
}

template <class T>
std::vector<Numbers> cross_entropy(int64_t rows, int64_t vocab_size, double smoothing, bool want_grad) {
    using Wide = typename T::Wide;
    auto logits = random_array<typename T::Element>(rows * vocab_size, 1);
    Array<Wide> loss(rows), nll(rows);
    Array<int64_t> labels(rows, [&](int64_t i) { return (double)((vocab_size - 1 + 3 * i) % vocab_size); });
    kernels->cross_entropy(
        T::dtype, rows, vocab_size, smoothing, want_grad, num_threads, logits.data(), labels.data(), loss.data(),
        nll.data());
    return {logits.numbers(), loss.numbers(), nll.numbers()};
}

template <class T>
void check_cross_entropy() {
    Comparison comparison{"cross_entropy"};
    for (int64_t rows : lengths)
        for (int64_t vocab_size : {2, 7, 16, 33, 131})
            for (double smoothing : {0.0, 0.1})
                for (bool want_grad : {false, true})
                    comparison.add(
                        cross_entropy<T>(rows, vocab_size, smoothing, want_grad),
                        cross_entropy<DoubleType>(rows, vocab_size, smoothing, want_grad));
    comparison.report(T::bound);
}

/* Loss, nll, log_z and both gradients, in double. */
std::vector<Numbers> head_in_double(
    int64_t rows, int64_t width, int64_t vocab_size, double smoothing, Array<uint16_t>& hidden, Array<uint16_t>& weight,
    Array<int64_t>& labels) {
    Numbers loss, nll, log_z, grad_hidden((size_t)(rows * width)), grad_weight((size_t)(vocab_size * width));
    const auto x = [&](int64_t row, int64_t d) { return get(hidden.data()[row * width + d]); };
    const auto w = [&](int64_t word, int64_t d) { return get(weight.data()[word * width + d]); };
    for (int64_t row = 0; row < rows; ++row) {
        Numbers logits;
        double total = 0, sum = 0;
        for (int64_t word = 0; word < vocab_size; ++word) {
            double logit = 0;
            for (int64_t d = 0; d < width; ++d) logit += x(row, d) * w(word, d);
            logits.push_back(logit);
            total += std::exp(logit);
            sum += logit;
        }
        log_z.push_back(std::log(total));
        nll.push_back(log_z.back() - logits[(size_t)labels.data()[row]]);
        loss.push_back((1 - smoothing) * nll.back() + smoothing * (log_z.back() - sum / (double)vocab_size));
        for (int64_t word = 0; word < vocab_size; ++word) {
            const double target = smoothing / (double)vocab_size + (word == labels.data()[row] ? 1 - smoothing : 0);
            const double grad = std::exp(logits[(size_t)word]) / total - target;
            for (int64_t d = 0; d < width; ++d) {
                grad_hidden[(size_t)(row * width + d)] += grad * w(word, d);
                grad_weight[(size_t)(word * width + d)] += grad * x(row, d);
            }
        }
    }
    return {loss, nll, log_z, grad_hidden, grad_weight};
}

void check_head() {
    Comparison comparison{"head"};
    for (int64_t rows : {0, 1, 33, 530})
        for (int64_t width : {16, 64})
            for (int64_t vocab_size : {2, 33, 150})
                for (double smoothing : {0.0, 0.1}) {
                    auto hidden = random_array<uint16_t>(rows * width, 1);
                    auto weight = random_array<uint16_t>(vocab_size * width, 2);
                    Array<int64_t> labels(rows, [=](int64_t i) { return (double)((vocab_size - 1 + 3 * i) % vocab_size); });
                    Array<float> loss(rows), nll(rows), log_z(rows), grad_weight(vocab_size * width);
                    Array<uint16_t> grad_hidden(rows * width);
                    kernels->head_forward(
                        rows, width, vocab_size, smoothing, num_threads, hidden.data(), weight.data(), labels.data(),
                        loss.data(), nll.data(), log_z.data());
                    kernels->head_backward(
                        rows, width, vocab_size, smoothing, num_threads, hidden.data(), weight.data(), labels.data(),
                        nll.data(), log_z.data(), grad_hidden.data(), grad_weight.data());
                    comparison.add(
                        {loss.numbers(), nll.numbers(), log_z.numbers(), grad_hidden.numbers(), grad_weight.numbers()},
                        head_in_double(rows, width, vocab_size, smoothing, hidden, weight, labels));
                }
    comparison.report(LowType::bound);
}

/* Of rounded sums the bits are compared with the formula: rounded sums have no type of activations. */
void check_add_rounded() {
    Comparison comparison{"add_rounded"};
    const double shift = 48, factor = 0.25;
    for (int64_t count : {0, 1, 3, 4, 7, 8, 15, 16, 17, 33, 40001})
        for (int replace : {0, 1}) {
            Array<float> gradient = random_array<float>(count, 1);
            for (int64_t i = 0; i < count; ++i) gradient.data()[i] *= std::ldexp(1.0f, -(int)(i % 60));
            Array<double> sum = random_array<double>(count, 2);
            Numbers expected = sum.numbers();
            for (int64_t i = 0; i < count; ++i) {
                const double rounded = gradient.data()[i] * factor + shift - shift;
                expected[(size_t)i] = replace ? rounded : expected[(size_t)i] + rounded;
            }
            kernels->add_rounded(count, factor, shift, replace, num_threads, gradient.data(), sum.data());
            comparison.add({sum.numbers()}, {expected});
        }
    comparison.report(std::numeric_limits<double>::min());
}

template <class T>
void check_all() {
    check_attention<T>();
    check_decode<T>();
    check_rowwise_linear<T>();
    check_int8_linear();
    check_add_norm<T>();
    check_activation<T>();
    check_cross_entropy<T>();
    check_add_rounded();
}

}  // namespace

int main() {
    for (const char* target : {"plain", "avx2", "avx512", "avx512_bf16"}) {
        kernels = unpad_kernels_for(target);
        if (!kernels) continue;
        std::printf("%s, float\n", target);
        check_all<FloatType>();
        if (std::strcmp(target, "avx512_bf16")) continue;
        std::printf("%s, bf16\n", target);
        check_all<LowType>();
    }
    for (const char* target : {"plain_tiles", "avx512_amx"}) {
        kernels = unpad_kernels_for(target);
        if (!kernels) continue;
        std::printf("%s, tiles\n", target);
        check_attention<LowType>();
        check_decode<LowType>();
        check_head();
    }
    return failures ? 1 : 0;
}
