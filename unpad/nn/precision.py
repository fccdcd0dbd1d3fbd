"""Numeric precision: its choice, the context that computes in it, and the wider dtype of sums."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from unpad.nn import product_speed

Precision = str  # one of DTYPES: of matrix products; weights and optimizer stay in fp32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIN_GAIN = 1.1  # of bf16's products over fp32's: conversions of weights and activations cost a few percent


def choose_precision(asked: str, device: torch.device, recorded: Precision | None = None) -> tuple[Precision, str]:
    """Return the precision to compute in, and the reason.

    auto takes the precision that a run was begun in; for a new run bf16 where a GPU has it, or where the processor's
    products in it are at least `MIN_GAIN` times as fast as in fp32, by measurement; fp32 elsewhere.

    Args:
        asked: of a recipe.
        recorded: by a run that goes on, which auto keeps; None for a new one.
    """
    if asked != "auto":
        return asked, "as the recipe says"
    own, reason = _fastest(device)
    if recorded in (None, own):
        return own, reason
    return recorded, f"as this run was begun; a new one here would take {own}: {reason}"


def _fastest(device: torch.device) -> tuple[Precision, str]:
    """The precision of a new run under auto, and the reason."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has it") if native else ("fp32", "this GPU has no bf16")
    if not multiplies_bf16():
        return "fp32", f"without AVX-512 BF16 and AMX bf16 is emulated ({torch.backends.cpu.get_cpu_capability()})"
    gain = product_speed.product_speed().gain
    if gain >= MIN_GAIN:
        return "bf16", f"its products are {gain:.1f} times as fast as fp32's here, measured"
    if gain > 1:
        return "fp32", f"products in bf16 are only {gain:.2f} times as fast here, measured; {MIN_GAIN} are needed"
    return "fp32", f"its products are {1 / gain:.1f} times as fast as bf16's here, measured"


def multiplies_bf16() -> bool:
    """True if the processor has instructions for products in bf16; libraries may be told not to use them."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Context in which matrix products run in `precision`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` accumulate: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """x in the dtype in which its sums accumulate."""
    return x.to(wide_dtype(x.dtype))
