/* The C interface of the native kernels: plain pointers and sizes, no header of torch.
 *
 * The kernels are compiled for several targets, sets of instructions; `unpad_kernels_for` gives the functions of
 * one. Every function of activations takes `dtype`, their type: UNPAD_FP32, UNPAD_BF16 (on avx512_bf16 and the
 * targets above it) or UNPAD_DOUBLE (the same code, one number at a time, which the proof runs). "Wide" below is the
 * type sums are kept in: double for double, float for the others. Arrays are contiguous unless a stride is given;
 * nothing is kept between calls. Results depend on the arguments alone: no atomics, no sum in an order that a
 * scheduler decides.
 */
#ifndef UNPAD_KERNELS_H
#define UNPAD_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { UNPAD_BF16 = 0, UNPAD_DOUBLE = 1, UNPAD_FP32 = 2 };

/* Raised with every change of an interface below, so that a library compiled from another one is not called. */
#define UNPAD_INTERFACE 13
int unpad_interface(void);

/* Whether the processor multiplies tiles of bf16 (amx_tile and amx_bf16), and whether the system lets this process and
 * all its threads do so, which it is asked once. */
int unpad_has_tiles(void);
int unpad_grants_tiles(void);

/* Attention within each sequence of a flat run (attention.h). */
struct unpad_attention {
    int64_t num_seqs;
    int64_t total_tokens;
    int64_t heads;
    int64_t kv_heads; /* divides heads; key head h serves query heads h * heads / kv_heads and on */
    int64_t head_dim; /* even, 16 to 128, a multiple of 16 unless UNPAD_DOUBLE */
    double scale;     /* of the scores, usually 1 / sqrt(head_dim) */
    double dropout;   /* share of attention weights set to zero, the others divided by 1 - dropout */
    uint64_t seed;    /* of dropout; `keep` in simd.h determines which weights stay */
    const int64_t* bases; /* (num_seqs) place of each sequence's first token for dropout; NULL: that in the run */
    int64_t window;   /* keys that a query sees at most, its own and those just before it; 0 is all; causal only */
    int32_t causal;
    int32_t num_threads;
};

/* Keys and values of the earlier tokens of every sequence, each in a buffer of its own. */
struct unpad_held {
    const int64_t* lengths;    /* (num_seqs) tokens that a buffer holds */
    const int64_t* capacities; /* (num_seqs) tokens that it has room for */
    void* const* buffers;      /* (num_seqs), of (2, kv_heads, capacity, head_dim): turned keys, then values */
};

/* Residual add and normalisation over channels (norm.h). */
struct unpad_norm {
    int64_t total_tokens;
    int64_t width;
    double eps;
    double dropout; /* of delta, before it is added */
    uint64_t seed;
    const int64_t* places; /* (total_tokens) of the tokens for dropout; NULL: those in the run */
    int32_t centred; /* 1 LayerNorm, 0 RMSNorm */
    int32_t num_threads;
};

enum { UNPAD_RELU = 0, UNPAD_GELU = 1, UNPAD_GEGLU = 2, UNPAD_SWIGLU = 3 };

struct unpad_kernels {
    /* cu_seqlens (num_seqs + 1) int32; qkv (total_tokens, heads + 2 * kv_heads, head_dim): queries, keys, values;
     * qkv_bias (heads + 2 * kv_heads, head_dim) of their type or NULL is added to every token's first; cos, sin
     * (total_tokens, head_dim / 2) wide: each pair (x[i], x[i + head_dim / 2]) of queries and keys is turned by its
     * token's angle then; both NULL for none. key_bias (total_tokens) wide or NULL is added to the scores of a key and
     * may be -inf as long as each query sees a key that is finite. Writes out (total_tokens, heads, head_dim) and
     * log_z (heads, total_tokens) wide, the log of each softmax's sum. */
    void (*attention_forward)(
        int dtype, const struct unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv,
        const void* qkv_bias, const void* cos, const void* sin, const void* key_bias, void* out, void* log_z);

    /* Writes grad_qkv like qkv, and grad_key_bias (kv_heads, total_tokens) wide where it is not NULL: the caller
     * adds up the heads. */
    void (*attention_backward)(
        int dtype, const struct unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv,
        const void* qkv_bias, const void* cos, const void* sin, const void* key_bias, const void* out,
        const void* log_z, const void* grad_out, void* grad_qkv, void* grad_key_bias);

    /* attention_forward of new tokens that follow the held ones of their sequence (attention.h): always causal, without
     * dropout. Their turned keys and their values are written behind the held ones. A token's out has the same bits
     * wherever a sequence is cut (but for UNPAD_DOUBLE). key_bias only where nothing is held. */
    void (*piece_attention)(
        int dtype, const struct unpad_attention* sizes, const int32_t* cu_seqlens, const struct unpad_held* held,
        const void* qkv, const void* cos, const void* sin, const void* key_bias, void* out);

    /* The same for one new token per sequence (decode.h), summed in another order: num_seqs and total_tokens count the
     * rows, which have room for one more token. */
    void (*decode_attention)(
        int dtype, const struct unpad_attention* sizes, const struct unpad_held* held, const void* qkv,
        const void* cos, const void* sin, void* out);

    /* y = x weight^T + bias (rowwise_linear.h): x (num_rows, in), weight (out, in), bias (out) or NULL, y (num_rows,
     * out), all of the activations' type. A row's result depends neither on the other rows nor on their number. */
    void (*rowwise_linear)(
        int dtype, int64_t num_rows, int64_t in, int64_t out, int num_threads, const void* x, const void* weight,
        const void* bias, void* y);

    /* y = x weight^T for weights of 8 bits (quantized_linear.h): x (num_rows, in), weight (blocks of 16 outputs, in / 4
     * rounded up, 16, 4) plus 128, scales (out), y (num_rows, out). Rows of x are rounded to whole numbers from -127 to
     * 127 in units of their largest / 127; sums are exact. in is 65,536 at most. */
    void (*int8_linear)(
        int64_t num_rows, int64_t in, int64_t out, int num_threads, const float* x, const uint8_t* weight,
        const float* scales, float* y);

    /* sum = residual + dropout(delta); y = normalise(sum) * weight + bias. residual and sum (total_tokens, width)
     * wide; delta (total_tokens, width) or NULL for nothing to add, and then sum is not written; weight, bias
     * (width) wide, bias NULL for none; y (total_tokens, width); stats (total_tokens, 2) wide: mean and 1 / root of
     * each token. */
    void (*add_norm_forward)(
        int dtype, const struct unpad_norm* sizes, const void* residual, const void* delta, const void* weight,
        const void* bias, void* sum, void* y, void* stats);

    /* grad_residual (total_tokens, width) wide = grad_sum + gradient through the norm, grad_sum NULL for none;
     * grad_delta (total_tokens, width) the same through dropout, NULL when there was no delta; grad_weight,
     * grad_bias (width) wide. */
    void (*add_norm_backward)(
        int dtype, const struct unpad_norm* sizes, const void* grad_y, const void* grad_sum, const void* sum,
        const void* stats, const void* weight, void* grad_residual, void* grad_delta, void* grad_weight,
        void* grad_bias);

    /* x (total_tokens, hidden), or (total_tokens, 2 * hidden) for the gated kinds, the gate first; bias, as wide as x
     * and of its type, or NULL is added to every row first; y (total_tokens, hidden). */
    void (*activation_forward)(
        int dtype, int kind, int64_t total_tokens, int64_t hidden, int num_threads, const void* x, const void* bias,
        void* y);

    /* grad_x like x; grad_bias, as wide as x and wide, NULL without a bias: the sum over rows of grad_x. */
    void (*activation_backward)(
        int dtype, int kind, int64_t total_tokens, int64_t hidden, int num_threads, const void* grad_y, const void* x,
        const void* bias, void* grad_x, void* grad_bias);

    /* Cross-entropy (cross_entropy.h). logits (num_rows, vocab_size) are overwritten with the gradient of the
     * smoothed sum, softmax - target, when want_grad is 1. labels (num_rows) int64. loss and nll (num_rows) wide:
     * each row's smoothed and plain negative log-likelihood, in nats. Returns the number of labels outside the
     * vocabulary; if there is any, nothing is written. */
    int64_t (*cross_entropy)(
        int dtype, int64_t num_rows, int64_t vocab_size, double smoothing, int want_grad, int num_threads, void* logits,
        const int64_t* labels, void* loss, void* nll);

    /* Rounded sums of gradients (gradient_sum.h): (gradient * factor + shift) - shift is added to sum, or replaces it
     * where `replace` is 1; gradient, sum (count). factor is a power of two. */
    void (*add_rounded)(
        int64_t count, double factor, double shift, int replace, int num_threads, const float* gradient, double* sum);

    /* Product with the vocabulary and cross-entropy at once (tiled_head.h), in bf16: on targets with tiles, else NULL.
     * hidden (num_rows, width), weight (vocab_size, width), width a multiple of 16; labels, loss, nll and what is
     * returned as of cross_entropy; log_z (num_rows) float, the log of each softmax's sum. */
    int64_t (*head_forward)(
        int64_t num_rows, int64_t width, int64_t vocab_size, double smoothing, int num_threads, const void* hidden,
        const void* weight, const int64_t* labels, void* loss, void* nll, void* log_z);

    /* Gradients of the losses' sum: grad_hidden like hidden, grad_weight (vocab_size, width) float; either may be NULL.
     * nll and log_z as head_forward gave them, perhaps of some of its rows. */
    void (*head_backward)(
        int64_t num_rows, int64_t width, int64_t vocab_size, double smoothing, int num_threads, const void* hidden,
        const void* weight, const int64_t* labels, const void* nll, const void* log_z, void* grad_hidden,
        void* grad_weight);
};

/* The functions of a target - "plain", "avx2", "avx512", "avx512_bf16", "avx512_amx", or for tests "plain_tiles", which
 * computes in plain C++ what avx512_amx does by tiles - or NULL where the processor cannot run them, and of avx512_amx
 * where the system does not let it. */
const struct unpad_kernels* unpad_kernels_for(const char* target);

#ifdef __cplusplus
}
#endif

#endif
