"""Numeric precision: its choice, the context that computes in it, and the wider dtype of sums."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Precision = str  # one of DTYPES: of matrix products; weights and optimizer stay in fp32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(asked: str, device: torch.device) -> tuple[Precision, str]:
    """Return the precision to compute in, and the reason.

    auto takes bf16 where the hardware multiplies it natively, and fp32 elsewhere: emulated bf16 is slower than fp32.
    """
    if asked != "auto":
        return asked, "as the recipe says"
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has it") if native else ("fp32", "this GPU has no bf16")
    capability = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bf16", f"the processor multiplies it natively ({capability})"
    return "fp32", f"the processor has no bf16 products ({capability})"


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
