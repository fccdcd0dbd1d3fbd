"""Parameter groups, the optimizer, and learning rates as a function of the step."""

from __future__ import annotations

import math
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from unpad.errors import RecipeError
from unpad.recipe import Optim


def freeze(model: nn.Module, patterns: list[str]) -> int:
    """Stop training of parameters whose name matches any pattern, and train all others.

    Returns:
        Number of frozen values.

    Raises:
        RecipeError: a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise RecipeError(
                f'"{pattern}" matches no parameter',
                where="train.freeze",
                fix="names are such as " + ", ".join(names[:3]),
            )
    frozen = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in patterns))
        frozen += 0 if parameter.requires_grad else parameter.numel()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError("every parameter is frozen", where="train.freeze", fix="leave something to train")
    return frozen


def make_optimizer(model: nn.Module, settings: Optim) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay on matrices only.

    Biases, norms and embeddings keep their scale: decay would pull rare words, whose rows get few gradients, to zero.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    decay: list[Tensor] = []
    keep: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decay if parameter.dim() >= 2 and id(parameter) not in embeddings else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": settings.weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def update(optimizer: torch.optim.AdamW, norm: Tensor, clip: float | None) -> None:
    """Scale gradients so that their norm, `norm` now, is at most `clip`, and take the optimizer's step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
    # torch's fused optimizers do not tell autograd that they write: kept copies of weights would outlive the update.
    torch.autograd.graph.increment_version(parameters)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state as flat names, `optim.<parameter>.<field>`; fields are exp_avg, exp_avg_sq and step."""
    return {
        f"optim.{name}.{field}": value
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned."""
    for name, parameter in model.named_parameters():
        prefix = f"optim.{name}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            optimizer.state[parameter] = {
                key: value.to(parameter.device if key != "step" else value.device, copy=True)
                for key, value in state.items()
            }


def learning_rate(settings: Optim, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Learning rate of one update.

    Args:
        step: update within the stage, from 0.
        total_steps: updates planned for the stage.
        steps_per_epoch: updates of one epoch; with `per: epoch` the rate changes only between epochs.

    cosine and restarts: Loshchilov and Hutter 2017, arXiv 1608.03983; each cycle of two steps or more starts at the
    peak and reaches the floor at its last step, and so does the stage.
    """
    peak = settings.lr * settings.lr_scale
    epoch_length = max(steps_per_epoch, 1)
    if settings.per == "epoch":
        at, total = step // epoch_length, max(math.ceil(total_steps / epoch_length), 1)
        epoch: float = at
    else:
        at, total = step, max(total_steps, 1)
        epoch = step / epoch_length
    if settings.schedule == "constant":
        return peak
    if settings.schedule == "exponential":
        return peak * settings.decay ** (epoch / settings.decay_epochs)
    warmup = math.ceil(settings.warmup * total)
    if settings.schedule != "restarts" and at < warmup:
        return peak * (at + 1) / warmup
    if settings.schedule == "warmup":
        return peak
    if at >= total - 1 > 0:
        return peak * settings.floor
    if settings.schedule == "restarts":
        return peak * _restarts(at, total, settings)
    return peak * _cosine(at - warmup, total - warmup, settings.floor)


def check_schedule(settings: Optim, total_steps: int, steps_per_epoch: int) -> None:
    """Refuse a schedule that does not fit the run.

    Raises:
        RecipeError: as many restarts as there are steps, or more.
    """
    total = math.ceil(total_steps / max(steps_per_epoch, 1)) if settings.per == "epoch" else total_steps
    if settings.schedule == "restarts" and settings.restarts >= total > 0:
        raise RecipeError(
            f"{settings.restarts} restarts do not fit into {total} {settings.per}s",
            where="optim.restarts",
            fix=f"use at most {total - 1}",
        )


def _cosine(at: int, length: int, floor: float) -> float:
    """1 at the first of `length` steps, `floor` at the last."""
    progress = min(at / (length - 1), 1.0) if length > 1 else 0.0
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def _restarts(at: int, total: int, settings: Optim) -> float:
    """Cycles of equal length; when the total does not divide, their lengths differ by one."""
    cycles = settings.restarts + 1
    bounds = [round(total * cycle / cycles) for cycle in range(cycles + 1)]
    cycle = max(i for i in range(cycles) if bounds[i] <= at)
    return _cosine(at - bounds[cycle], bounds[cycle + 1] - bounds[cycle], settings.floor)
