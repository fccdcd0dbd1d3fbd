/* x86-64 with AVX-512 BF16 and AMX: attention and head in bf16 by products of tiles, everything else as without AMX.
 *
 * The same with tiles in plain C++ is for tests. setup.py compiles this file without contraction of products and sums:
 * so the two, which differ in their products alone, give the same bits.
 */
#include "std.h"

#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")
#define UNPAD_FLOATS 16
#include "bf16.h"
#include "labels.h"
#include "tiled_attention.h"
#include "tiled_head.h"

extern "C" const unpad_kernels* unpad_kernels_avx512_bf16();

namespace unpad {
namespace {

using M = Math<Bf16>;

template <class Tiles>
void attention_forward(
    int dtype, const unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv, const void* qkv_bias,
    const void* cos, const void* sin, const void* key_bias, void* out, void* log_z) {
    if (dtype != UNPAD_BF16)
        return unpad_kernels_avx512_bf16()->attention_forward(
            dtype, sizes, cu_seqlens, qkv, qkv_bias, cos, sin, key_bias, out, log_z);
    const auto call = attention::make_call<M>(sizes, cu_seqlens, qkv, qkv_bias, cos, sin, key_bias);
    attention::tiled::forward<Tiles>(call, out, log_z);
}

/* By tiles too: a prompt that is read in pieces then has the bits of one that is read at once. */
template <class Tiles>
void piece_attention(
    int dtype, const unpad_attention* sizes, const int32_t* cu_seqlens, const unpad_held* held, const void* qkv,
    const void* cos, const void* sin, const void* key_bias, void* out) {
    if (dtype != UNPAD_BF16)
        return unpad_kernels_avx512_bf16()->piece_attention(
            dtype, sizes, cu_seqlens, held, qkv, cos, sin, key_bias, out);
    auto call = attention::make_call<M>(sizes, cu_seqlens, qkv, nullptr, cos, sin, key_bias);
    call.held = held;
    attention::tiled::forward<Tiles>(call, out, nullptr);
}

template <class Tiles>
void attention_backward(
    int dtype, const unpad_attention* sizes, const int32_t* cu_seqlens, const void* qkv, const void* qkv_bias,
    const void* cos, const void* sin, const void* key_bias, const void* out, const void* log_z, const void* grad_out,
    void* grad_qkv, void* grad_key_bias) {
    if (dtype != UNPAD_BF16)
        return unpad_kernels_avx512_bf16()->attention_backward(
            dtype, sizes, cu_seqlens, qkv, qkv_bias, cos, sin, key_bias, out, log_z, grad_out, grad_qkv, grad_key_bias);
    const auto call = attention::make_call<M>(sizes, cu_seqlens, qkv, qkv_bias, cos, sin, key_bias);
    attention::tiled::backward<Tiles>(call, out, log_z, grad_out, grad_qkv, grad_key_bias);
}

template <class Tiles>
int64_t head_forward(
    int64_t num_rows, int64_t width, int64_t vocab_size, double smoothing, int num_threads, const void* hidden,
    const void* weight, const int64_t* labels, void* loss, void* nll, void* log_z) {
    if (const int64_t outside = count_outside(num_rows, vocab_size, labels)) return outside;
    head::Head<M, Tiles>(
        num_rows, width, vocab_size, smoothing, num_threads, (const uint16_t*)hidden, (const uint16_t*)weight, labels)
        .forward((float*)loss, (float*)nll, (float*)log_z);
    return 0;
}

template <class Tiles>
void head_backward(
    int64_t num_rows, int64_t width, int64_t vocab_size, double smoothing, int num_threads, const void* hidden,
    const void* weight, const int64_t* labels, const void* nll, const void* log_z, void* grad_hidden,
    void* grad_weight) {
    head::Head<M, Tiles>(
        num_rows, width, vocab_size, smoothing, num_threads, (const uint16_t*)hidden, (const uint16_t*)weight, labels)
        .backward((const float*)nll, (const float*)log_z, (uint16_t*)grad_hidden, (float*)grad_weight);
}

template <class Tiles>
unpad_kernels with_tiles() {
    unpad_kernels kernels = *unpad_kernels_avx512_bf16();
    kernels.attention_forward = attention_forward<Tiles>;
    kernels.attention_backward = attention_backward<Tiles>;
    kernels.piece_attention = piece_attention<Tiles>;
    kernels.head_forward = head_forward<Tiles>;
    kernels.head_backward = head_backward<Tiles>;
    return kernels;
}

}  // namespace
}  // namespace unpad

extern "C" const unpad_kernels* unpad_kernels_avx512_amx() {
    static const unpad_kernels table = unpad::with_tiles<unpad::AmxTiles>();
    return &table;
}

extern "C" const unpad_kernels* unpad_kernels_plain_tiles() {
    static const unpad_kernels table = unpad::with_tiles<unpad::PlainTiles>();
    return &table;
}
#endif
