"""Padded rows of any trainer, computed end to end: the backbone sees real tokens alone, all around it sees rows."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import Trainer

from unpad.errors import ProofError, RecipeError
from unpad.hf.prepare import preparing
from unpad.proof.foreign.measure import (
    EPS,
    LEAST,
    MARGIN,
    by_rounding,
    gradient_error,
    not_below_fp32,
    relative,
    take_gradient,
)
from unpad.proof.foreign.model import base_of, no_router_loss, untouched_generators
from unpad.proof.foreign.undisturbed import proving
from unpad.proof.foreign.update import has_media

MODELS = ("model", "ref_model")  # of a trainer
KEPT = ("past_key_values", "output_hidden_states", "output_attentions")  # asked for these, rows stay padded


@dataclass(repr=False)
class WithoutPadding:
    """What `without_padding` did to a trainer.

    Args:
        trainer: whose models have the hooks.
        loss, gradient: relative errors of a `training_step` beside the same step with padding; 0 if none was proved.
        num_cells, num_tokens: of the batches that were computed since then.
        most_rows: of a batch.
    """

    trainer: Trainer
    loss: float = 0.0
    gradient: float = 0.0
    num_cells: int = 0
    num_tokens: int = 0
    most_rows: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)

    def __repr__(self) -> str:
        padding = f", {1 - self.num_tokens / self.num_cells:.0%} padding left out" if self.num_cells else ""
        return f"WithoutPadding(loss {self.loss:.0e}, gradient {self.gradient:.0e}{padding})"

    def remove(self) -> None:
        """Let rows be computed with their padding again."""
        for handle in self.handles:
            handle.remove()

    def hook(self, backbone: nn.Module) -> None:
        """Let a backbone compute the real tokens of padded rows end to end."""
        rows = _Rows(self)
        before = backbone.register_forward_pre_hook(rows.flatten, with_kwargs=True, prepend=True)
        self.handles += [before, backbone.register_forward_hook(rows.restore)]


class _Rows:
    """Hooks of one backbone."""

    def __init__(self, owner: WithoutPadding) -> None:
        self.owner = owner
        self.shape = (0, 0)
        self.real: Tensor | None = None  # cells of the padded rows that hold a token, (num_tokens,) int64

    def flatten(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Rows of (batch, seq) tokens as one of all that are real."""
        self.real = None
        ids, mask = args[0] if args else kwargs.get("input_ids"), kwargs.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape or has_media(kwargs):
            return None
        if len(args) > 1 or any(kwargs.get(name) not in (None, False) for name in KEPT):
            return None
        lengths = mask.sum(1)
        if not bool(lengths.all()):
            return None
        self.real = mask.flatten().nonzero().flatten()
        self.shape = ids.shape[0], ids.shape[1]
        self.owner.num_cells += mask.numel()
        self.owner.num_tokens += len(self.real)
        self.owner.most_rows = max(self.owner.most_rows, len(ids))
        bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        given = {"position_ids": mask.cumsum(1) - 1, **kwargs, "input_ids": ids}
        flat = {  # ids, positions, and what else has a value a token
            name: value.flatten()[self.real][None] if isinstance(value, Tensor) and value.shape == ids.shape else value
            for name, value in given.items()
        }
        flat |= {"attention_mask": None, "use_cache": False, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        flat |= dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max()))
        return (), flat

    def restore(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hidden states of the real tokens in their cells; zeros in those of padding."""
        if self.real is None:
            return None
        hidden = output[0]  # (1, num_tokens, dim)
        cells = hidden.new_zeros(self.shape[0] * self.shape[1], hidden.shape[-1]).index_copy(0, self.real, hidden[0])
        padded = cells.unflatten(0, self.shape)
        if isinstance(output, tuple):
            return (padded, *output[1:])
        output[next(iter(output))] = padded
        return output


def without_padding(trainer: Trainer, *, prove: bool = True) -> WithoutPadding:
    """Compute the padded rows of a trainer end to end, without their padding; its batches and its loss stay its own.

    For trainers with another objective than the next token, such as those of pairs of TRL (DPO, KTO, reward, ORPO,
    CPO, GRPO). A `training_step` is computed with padding and without, and compared. A trainer that is refused is as
    it was before.

    Args:
        trainer: of transformers or TRL, before `train`.
        prove: False leaves the proof out, for a trainer that was proved before.

    Raises:
        RecipeError: its model is none of transformers, or computes no flat batch.
        ProofError: a step without padding has another loss or gradient.
    """
    done, model = WithoutPadding(trainer), trainer.accelerator.unwrap_model(trainer.model)
    with ExitStack() as stack:
        if stack.enter_context(no_router_loss(model)) or getattr(trainer, "aux_loss_enabled", False):
            raise RecipeError("a router's auxiliary loss reads padded rows", fix="set output_router_logits=False")
        padded, bounds = _step_and_bounds(trainer) if prove else (None, (0.0, 0.0))
        stack.push(lambda kind, *_: done.remove() if kind else None)
        for name in MODELS:
            if isinstance(model := getattr(trainer, name, None), nn.Module):
                backbone: Any = base_of(trainer.accelerator.unwrap_model(model))
                backbone = getattr(backbone, "base_model", backbone)
                stack.enter_context(preparing(backbone))
                done.hook(backbone)
        if padded is None:
            return done
        done.loss, done.gradient = errors = _errors(_step(trainer), padded)
        if done.most_rows < 2:
            what = f"{done.most_rows} padded rows reach the model in a batch, which need no flattening"
            raise RecipeError(what, fix="raise per_device_train_batch_size, or leave unpad.hf.without_padding out")
        if any(error > most for error, most in zip(errors, bounds, strict=True)):
            raise ProofError(
                f"without padding a step has another loss ({done.loss:.1e}) and gradient ({done.gradient:.1e})",
                where=type(trainer).__name__,
                fix="train with padding",
            )
        done.num_cells = done.num_tokens = 0
    return done


def _step(trainer: Trainer) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of `training_step` on the first batch of the trainer's loader, without dropout."""
    with proving(trainer) as (model, _), untouched_generators(0), not_below_fp32(model):
        batches, num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1  # `train` sets it
        loss = trainer.training_step(trainer.model, batches[0], num_items)
        return loss.detach(), take_gradient(trainer.model)


def _step_and_bounds(trainer: Trainer) -> tuple[tuple[Tensor, dict[str, Tensor]], tuple[float, float]]:
    """A step, and the errors that it may have: MARGIN times those of one rounding of all weights."""
    step = _step(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    rounded = _errors(by_rounding(model, EPS, lambda: _step(trainer)), step)
    loss, gradient = (max(LEAST, MARGIN * error) for error in rounded)
    return step, (loss, gradient)


def _errors(found: tuple[Tensor, dict[str, Tensor]], truth: tuple[Tensor, dict[str, Tensor]]) -> tuple[float, float]:
    """Relative errors of the loss and of the gradient of all parameters."""
    return relative(found[0], truth[0]), gradient_error(found[1], truth[1])
