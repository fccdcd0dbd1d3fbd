"""Choice of the numeric precision of a run, and of generation, on the machine at hand."""

from __future__ import annotations

import torch

from unpad.nn.precision import Precision

MIN_GAIN = 1.1  # of bf16's products over fp32's: conversions of weights and activations cost a few percent


def choose_precision(
    asked: str, device: torch.device, recorded: Precision | None = None, *, decoding: bool = False
) -> tuple[Precision, str]:
    """Return the precision to compute in, and the reason.

    auto takes the precision that a run was begun in; for a new run bf16 where a GPU has it, or where the processor's
    products in it are at least `MIN_GAIN` times as fast as in fp32, by measurement; fp32 elsewhere.

    Args:
        asked: of a recipe.
        recorded: by a run that goes on, which auto keeps; None for a new one.
        decoding: whether the products are those of generation, a row each, in which bf16 halves what is read.
    """
    if asked != "auto":
        return asked, "as the recipe says"
    own, reason = _fastest(device, decoding)
    if recorded in (None, own):
        return own, reason
    return recorded, f"as this run was begun; a new one here would take {own}: {reason}"


def _fastest(device: torch.device, decoding: bool) -> tuple[Precision, str]:
    """The precision of a new run under auto, and the reason."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has it") if native else ("fp32", "this GPU has no bf16")
    if not multiplies_bf16():
        return "fp32", f"without AVX-512 BF16 and AMX bf16 is emulated ({torch.backends.cpu.get_cpu_capability()})"
    from unpad.nn import product_speed  # a choice that is written measures nothing

    speeds = product_speed.product_speeds()
    emulated = speeds.training.gain < 1 / product_speed.HOPELESS  # the products of a prompt are like those of training
    gain = (speeds.decoding if decoding and not emulated else speeds.training).gain
    if gain >= MIN_GAIN:
        return "bf16", f"its products are {gain:.1f} times as fast as fp32's here, measured"
    if gain > 1:
        return "fp32", f"products in bf16 are only {gain:.2f} times as fast here, measured; {MIN_GAIN} are needed"
    return "fp32", f"its products are {1 / gain:.1f} times as fast as bf16's here, measured"


def multiplies_bf16() -> bool:
    """True if the processor has instructions for products in bf16; libraries may be told not to use them."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
