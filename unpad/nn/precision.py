"""The device that computes, and numeric precision: its context, and the wider dtype of sums."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Precision = str  # one of DTYPES: of matrix products; weights and optimizer stay in fp32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")


def computing_device() -> torch.device:
    """The processor, or this process's GPU by its index: without one, another thread takes the first. One of Apple's is
    left alone, as training says: MPS has no fp64, in which rotary angles are computed."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


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
