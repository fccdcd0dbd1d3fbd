"""Samples of vision and question tokens, and the first test of every layer: a sample in a batch equals it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout, build_layout
from unpad.models.vision_language.visual import VisionTokens
from unpad.nn.block import BlockConfig

M = TypeVar("M", bound=nn.Module)
WIDTH = 16
# Very different lengths in both runs, a sample without question and one without vision tokens.
VISION = [7, 1, 40, 12, 0, 3, 44]
QUESTION = [5, 2, 17, 0, 4, 1, 16]
# Members of sets, and a block of them.
SIZES = [1, 40, 2, 7, 1, 3, 12]
CONFIG = BlockConfig(width=WIDTH, heads=2, hidden=24, norm="layernorm", activation="gelu", bias=True)


def members_of(sizes: list[int]) -> Layout:
    """Layout of sets of so many members."""
    return build_layout(np.array(sizes, int))


@dataclass(frozen=True)
class Samples(VisionTokens):
    """Vision tokens (num_vision, WIDTH) and question tokens (num_question, WIDTH)."""

    def only(self, seq: int) -> Samples:
        """One sample by itself, cut off from the graph of the batch."""
        vision = self.vision[self.vision_layout.select([seq])[1]].detach().requires_grad_()
        question = self.question[self.question_layout.select([seq])[1]].detach().requires_grad_()
        return Samples(vision, build_layout(np.array([len(vision)])), question, build_layout(np.array([len(question)])))


def make_samples(
    vision: list[int] = VISION, question: list[int] = QUESTION, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    flat = [torch.randn(sum(n), WIDTH, generator=generator, dtype=dtype).requires_grad_() for n in (vision, question)]
    return Samples(flat[0], build_layout(np.array(vision, int)), flat[1], build_layout(np.array(question, int)))


def moved(module: M, dtype: torch.dtype = torch.float64) -> M:
    """The module in eval with every parameter away from where it starts, so that zeros and ones hide no gradient."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module.to(dtype).eval()


def bounds_of(layout: Layout) -> list[tuple[int, int]]:
    return list(pairwise(layout.cu_seqlens.tolist()))


def gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def check_alone(
    run: Callable[[Samples], tuple[Tensor, Layout]], module: nn.Module | None = None, samples: Samples | None = None
) -> None:
    """Outputs and gradients of every sample in a batch equal those of the sample alone, and an empty batch is legal.

    Args:
        run: samples -> outputs (num, ...), and their layout, one sequence per sample.
    """
    samples = samples or make_samples()
    parameters = [] if module is None else [p for p in module.parameters() if p.requires_grad]
    out, layout = run(samples)
    probe = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    grad_vision, grad_question, *grads = gradients((out * probe).sum(), [samples.vision, samples.question, *parameters])
    assert all(torch.isfinite(x).all() for x in (out, grad_vision, grad_question, *grads))
    sums = [torch.zeros_like(p) for p in parameters]
    for seq, (start, stop) in enumerate(bounds_of(layout)):
        one = samples.only(seq)
        alone, _ = run(one)
        torch.testing.assert_close(out[start:stop], alone, rtol=1e-10, atol=1e-10)
        found = gradients((alone * probe[start:stop]).sum(), [one.vision, one.question, *parameters])
        for whole, tokens, part in (
            (grad_vision, samples.vision_layout.select([seq])[1], found[0]),
            (grad_question, samples.question_layout.select([seq])[1], found[1]),
        ):
            torch.testing.assert_close(whole[tokens], part, rtol=1e-10, atol=1e-10)
        sums = [a + b for a, b in zip(sums, found[2:], strict=True)]
    torch.testing.assert_close(grads, sums, rtol=1e-9, atol=1e-10)
    nothing = make_samples([], [])
    out, layout = run(nothing)
    assert len(out) == layout.num_seqs == 0
    assert all((g == 0).all() for g in gradients(out.sum(), [nothing.vision, nothing.question, *parameters]))
