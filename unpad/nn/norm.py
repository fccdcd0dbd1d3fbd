"""Residual add, dropout and normalisation over channels in one operation `unpad::add_norm`, summed in fp32 or wider."""

import ctypes
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.autograd import apply
from unpad.nn.draws import Seed, draw, dropout
from unpad.nn.linear import compute_dtype
from unpad.nn.native import library
from unpad.nn.native.library import call, fields, operator, pointer
from unpad.nn.precision import wide_dtype, widened


class _Norm(ctypes.Structure):
    """`struct unpad_norm` of kernels.h."""

    _fields_ = fields("q total_tokens width", "d eps dropout", "u seed", "p places", "i centred num_threads")


Settings = tuple[float, bool, float, int, Tensor | None]  # as in `_SETTINGS`
_SETTINGS = "float eps, bool centred, float dropout, int seed, Tensor? places"


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """sum = residual + dropout(delta); y = normalise(sum) * weight + bias. All four tensors may need a gradient.

    Args:
        residual: (total_tokens, width), wide: fp64 for fp64 activations, fp32 for others.
        delta: (total_tokens, width) of `dtype`, output of the previous layer; None for none.
        weight, bias: (width,), wide; bias None for none.
        settings: eps, added to the variance; centred, True for LayerNorm, False for RMSNorm; dropout, the share of
            `delta` set to zero, below 1, while the rest is divided by 1 - dropout; its seed, 0 to 2**63 - 1, which
            determines the numbers that stay, the same in forward and backward; and the contiguous places of tokens in
            its draws, (total_tokens,) int64, None for those in the run.
        dtype: of activations, a key of `DTYPES`.

    Returns:
        sum (total_tokens, width), wide, `residual` itself without a delta; y (total_tokens, width) of `dtype`.
    """
    if torch.is_grad_enabled():
        return apply(_AddNorm, residual, delta, weight, bias, settings, dtype)
    total, y, _ = _forward(residual, delta, weight, bias, *settings, dtype)
    return residual if delta is None else total, y


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        total, y, stats = _forward(residual, delta, weight, bias, *settings, dtype)
        if delta is None:
            total = residual
        ctx.save_for_backward(total, stats, weight, settings[4])
        ctx.settings, ctx.dtype = settings[:4], dtype
        ctx.has_delta, ctx.has_bias = delta is not None, bias is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad_y = grads
        total, stats, weight, places = ctx.saved_tensors
        if grad_y is None:  # only the sum was used
            grad_y = torch.zeros_like(total, dtype=ctx.dtype)
        settings = *ctx.settings, places
        grad_residual, grad_delta, grad_weight, grad_bias = _backward(
            grad_y, grad_total, total, stats, weight, ctx.has_delta, ctx.has_bias, *settings
        )
        return (
            grad_residual,
            grad_delta if ctx.has_delta else None,
            grad_weight,
            grad_bias if ctx.has_bias else None,
            None,
            None,
        )


def _outputs(residual: Tensor, delta: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for sum, y and stats; an operator may not return its argument: without delta sum is empty."""
    total = residual.new_empty(residual.shape if delta is not None else 0)
    return total, residual.new_empty(residual.shape, dtype=settings[-1]), residual.new_empty((len(residual), 2))


@operator(
    "add_norm",
    _outputs,
    schema=f"(Tensor residual, Tensor? delta, Tensor weight, Tensor? bias, {_SETTINGS}, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
)
def _forward(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *numbers, dtype = settings
    wide = wide_dtype(dtype)
    assert residual.dtype == wide, f"activations of {dtype} with a residual of {residual.dtype}"
    for vector in (weight,) if bias is None else (weight, bias):
        assert vector.dtype == wide, f"parameters of {vector.dtype} with a residual of {wide}"
        assert vector.shape == residual.shape[1:], "parameters do not match"
    if delta is not None:
        assert delta.dtype == dtype, f"delta is {delta.dtype}, not {dtype}"
        assert delta.shape == residual.shape, "delta does not match"
        delta = delta.contiguous()
    outputs = _outputs(residual, delta, dtype)
    call("add_norm_forward", dtype, _sizes(residual, *numbers), residual.contiguous(), delta, weight, bias, *outputs)
    return outputs


def _grads(
    grad_y: Tensor, grad_sum: Any, total: Any, stats: Any, weight: Tensor, has_delta: bool, has_bias: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of residual, delta, weight and bias, without numbers for a missing tensor."""
    return (
        weight.new_empty(grad_y.shape),
        grad_y.new_empty(grad_y.shape if has_delta else 0),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape if has_bias else 0),
    )


@operator(
    "add_norm_backward",
    _grads,
    schema="(Tensor grad_y, Tensor? grad_sum, Tensor total, Tensor stats, Tensor weight, bool has_delta, "
    f"bool has_bias, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats, weight, has_delta, has_bias, *settings = given
    grad_y, total = grad_y.contiguous(), total.contiguous()
    grad_sum = None if grad_sum is None else grad_sum.contiguous()
    grads = _grads(grad_y, None, None, None, weight, has_delta, has_bias)
    wanted = grads[0], grads[1] if has_delta else None, grads[2], grads[3] if has_bias else None
    call("add_norm_backward", grad_y.dtype, _sizes(grad_y, *settings), grad_y, grad_sum, total, stats, weight, *wanted)
    return grads


def _sizes(x: Tensor, eps: float, centred: bool, dropout: float, seed: int, places: Tensor | None) -> _Norm:
    assert 0 <= dropout < 1, f"dropout of {dropout}"
    return _Norm(*x.shape, eps, dropout, seed, pointer(places), centred, torch.get_num_threads())


def _runs_native(residual: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    wide = wide_dtype(dtype)
    fits = residual.device.type == "cpu" and residual.dtype == weight.dtype == wide and library.is_plain(weight)
    return fits and library.computes(dtype)


class Norm(nn.Module):
    """RMSNorm, g * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv 1910.07467), or LayerNorm,
    g * (x - mean) / sqrt(var + eps) + b (Ba et al. 2016, arXiv 1607.06450), of a residual stream.

    Args:
        dropout: share of `delta` that training sets to zero.
    """

    def __init__(self, kind: Literal["layernorm", "rmsnorm"], dim: int, eps: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layernorm" else None
        self.eps, self.dropout = eps, dropout

    def forward(
        self,
        residual: Tensor,
        delta: Tensor | None = None,
        layout: Layout | PaddedLayout | None = None,
        index: Tensor | None = None,
        seed: Seed | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add a branch's output to the residual stream, and normalise the sum for the next branch.

        Args:
            residual: (total_tokens, dim), fp32 or wider; without a delta in any dtype.
            delta: (total_tokens, dim) in the computing dtype; None at the beginning of the stream.
            layout: of the tokens, which dropout draws by; None: by the places of rows.
            index: (total_tokens,) int64, the tokens of `layout` that these are; None: all.
            seed: of dropout; None draws one.

        Returns:
            The new residual, and its normalised form in the computing dtype.
        """
        dtype = compute_dtype(residual)
        share = self.dropout if self.training and delta is not None else 0.0
        seed = 0 if not share else draw() if seed is None else seed
        places = None if layout is None or not share else layout.places
        if places is not None and index is not None:
            places = places.index_select(0, index)
        if _runs_native(residual, self.weight, dtype):
            settings = self.eps, self.bias is not None, share, int(seed), places
            return add_norm(residual, delta, self.weight, self.bias, settings, dtype)
        if delta is not None:
            residual = residual + dropout(delta, share, seed, places)
        wide = widened(residual)
        weight, bias = self.weight.to(wide.dtype), None if self.bias is None else self.bias.to(wide.dtype)
        if bias is None:
            y = F.rms_norm(wide, weight.shape, weight, self.eps)
        else:
            y = F.layer_norm(wide, weight.shape, weight, bias, self.eps)
        return residual, y.to(dtype)
