/* The types of activations that a target has. */
#ifndef UNPAD_TYPES_H
#define UNPAD_TYPES_H

#include "kernels.h"
#include "simd.h"
#ifdef UNPAD_HAS_BF16
#include "bf16.h"
#endif

namespace unpad {
namespace {

/* Calls f with an object of the type that `dtype` names. */
template <class F>
void with_type(int dtype, F f) {
    if (dtype == UNPAD_DOUBLE) return f(Double());
#ifdef UNPAD_HAS_BF16
    if (dtype == UNPAD_BF16) return f(Bf16());
#endif
    f(Fp32());
}

}  // namespace
}  // namespace unpad

#endif
