/* Every kernel, and the table of them, for the target that includes this. */
#include "activation.h"
#include "attention.h"
#include "cross_entropy.h"
#include "decode.h"
#include "gradient_sum.h"
#include "norm.h"
#include "quantized_linear.h"
#include "rowwise_linear.h"

namespace unpad {
namespace {

/* Of targets with tiles, which replace them. */
constexpr decltype(unpad_kernels::head_forward) head_forward = nullptr;
constexpr decltype(unpad_kernels::head_backward) head_backward = nullptr;

constexpr unpad_kernels table = {
    attention_forward, attention_backward, piece_attention,    decode_attention,    rowwise_linear, int8_linear,
    add_norm_forward,  add_norm_backward,  activation_forward, activation_backward, cross_entropy,  add_rounded,
    head_forward,      head_backward,
};

}  // namespace
}  // namespace unpad
