/* The optimizer's update, and the norm of gradients that clipping needs before it.
 *
 * A model has hundreds of tensors of very unlike sizes, so threads share out chunks of all of them in one region.
 */
#include "kernels.h"

#include "columns.h"

#include <vector>

namespace unpad {
namespace {

constexpr int64_t chunk_size = 16384;

/* Numbers [begin, begin + numel) of one tensor. */
struct Chunk {
    const unpad_parameter* parameter;
    int64_t begin;
    int64_t numel;
};

std::vector<Chunk> all_chunks(const unpad_parameter* parameters, int64_t count) {
    std::vector<Chunk> chunks;
    for (const unpad_parameter* p = parameters; p != parameters + count; ++p)
        for (int64_t begin = 0; begin < p->numel; begin += chunk_size)
            chunks.push_back({p, begin, std::min(chunk_size, p->numel - begin)});
    return chunks;
}

int threads_for(const std::vector<Chunk>& chunks, int num_threads) {
    return useful_threads((int64_t)chunks.size() * chunk_size, num_threads);
}

/* Four sums side by side: one alone would wait for its own last addition. */
template <class Grad>
float square_sum(const Grad* grad, int64_t numel) {
    constexpr int lanes = Bf16::lanes;
    const int64_t quarter = numel / (4 * lanes) * lanes;
    Bf16::Vec total[4] = {Bf16::set(0), Bf16::set(0), Bf16::set(0), Bf16::set(0)};
    for (int64_t c = 0; c < quarter; c += lanes) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const Bf16::Vec g = Bf16::load(grad + part * quarter + c);
            total[part] = Bf16::fma(g, g, total[part]);
        }
    }
    for_columns<Bf16>(numel - 4 * quarter, [&](int64_t c, Bf16::Mask m) UNPAD_INLINE {
        const Bf16::Vec g = Bf16::load(grad + 4 * quarter + c, m);
        total[0] = Bf16::fma(g, g, total[0]);
    });
    return Bf16::sum((total[0] + total[1]) + (total[2] + total[3]));
}

double square_sum(const Chunk& chunk) {
    const unpad_parameter& p = *chunk.parameter;
    return p.grad_is_bf16 ? square_sum((const uint16_t*)p.grad + chunk.begin, chunk.numel)
                          : square_sum((const float*)p.grad + chunk.begin, chunk.numel);
}

struct Coefficients {
    double beta1;
    double beta2;
    double eps;
    double grad_scale;
};

/* value and moments of one chunk, as torch.optim.AdamW computes them. */
template <class Grad>
void update(const Chunk& chunk, const Grad* all_grads, const Coefficients& by) {
    using Vec = Bf16::Vec;
    const unpad_parameter& p = *chunk.parameter;
    const double correction1 = 1 - std::pow(by.beta1, (double)p.step);
    const double correction2 = std::sqrt(1 - std::pow(by.beta2, (double)p.step));
    const Vec beta1 = Bf16::set((float)by.beta1), rest1 = Bf16::set((float)(1 - by.beta1));
    const Vec beta2 = Bf16::set((float)by.beta2), rest2 = Bf16::set((float)(1 - by.beta2));
    const Vec kept = Bf16::set((float)(1 - p.lr * p.weight_decay)), minus_lr = Bf16::set((float)(-p.lr / correction1));
    const Vec root_scale = Bf16::set((float)(1 / correction2)), eps = Bf16::set((float)by.eps);
    const Vec grad_scale = Bf16::set((float)by.grad_scale);
    const Grad* grad = all_grads + chunk.begin;
    float *value = p.value + chunk.begin, *exp_avg = p.exp_avg + chunk.begin, *exp_avg_sq = p.exp_avg_sq + chunk.begin;
    uint16_t* copy = p.copy ? p.copy + chunk.begin : nullptr;
    for_columns<Bf16>(chunk.numel, [&](int64_t c, Bf16::Mask m) UNPAD_INLINE {
        const Vec g = Bf16::load(grad + c, m) * grad_scale;
        const Vec first = Bf16::fma(beta1, Bf16::load(exp_avg + c, m), rest1 * g);
        const Vec second = Bf16::fma(beta2, Bf16::load(exp_avg_sq + c, m), rest2 * g * g);
        const Vec direction = first / Bf16::fma(Bf16::sqrt(second), root_scale, eps);
        const Vec next = Bf16::fma(minus_lr, direction, kept * Bf16::load(value + c, m));
        Bf16::store(exp_avg + c, first, m);
        Bf16::store(exp_avg_sq + c, second, m);
        Bf16::store(value + c, next, m);
        if (copy) Bf16::store(copy + c, next, m);
    });
}

}  // namespace
}  // namespace unpad

double unpad_grad_square_sum(const unpad_parameter* parameters, int64_t count, int num_threads) {
    const std::vector<unpad::Chunk> chunks = unpad::all_chunks(parameters, count);
    std::vector<double> partials(chunks.size());
    const int64_t num_chunks = (int64_t)chunks.size();
    const int threads = unpad::threads_for(chunks, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < num_chunks; ++i) partials[(size_t)i] = unpad::square_sum(chunks[(size_t)i]);
    double total = 0; /* in the order of chunks, so the number of threads does not matter */
    for (double partial : partials) total += partial;
    return total;
}

void unpad_adamw(
    const unpad_parameter* parameters, int64_t count, double beta1, double beta2, double eps, double grad_scale,
    int num_threads) {
    const std::vector<unpad::Chunk> chunks = unpad::all_chunks(parameters, count);
    const unpad::Coefficients by{beta1, beta2, eps, grad_scale};
    const int64_t num_chunks = (int64_t)chunks.size();
    const int threads = unpad::threads_for(chunks, num_threads);
    /* In turns: small tensors stand together, and halves of the list would hold unlike amounts of work. */
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int64_t i = 0; i < num_chunks; ++i) {
        const unpad::Chunk& chunk = chunks[(size_t)i];
        const unpad_parameter& p = *chunk.parameter;
        if (p.grad_is_bf16) {
            unpad::update(chunk, (const uint16_t*)p.grad, by);
        } else {
            unpad::update(chunk, (const float*)p.grad, by);
        }
    }
}
