"""Parameter groups, the optimizer, and learning rates as a function of the step."""

from __future__ import annotations

import math
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from unpad.errors import RecipeError
from unpad.native import library
from unpad.native.adamw import adamw_, grad_square_sum
from unpad.nn.linear import copies_written, kept_copy, parameters_changed
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


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Global L2 norm of all gradients, a scalar in fp32 or wider; 0 without gradients."""
    if not gradients:
        return torch.zeros(())
    if _read_native(gradients):
        return torch.tensor(grad_square_sum(gradients), dtype=torch.float64).sqrt()
    return torch.nn.utils.get_total_norm(gradients)


def update(optimizer: torch.optim.AdamW, norm: Tensor, clip: float | None) -> None:
    """Scale gradients so that their norm, `norm` now, is at most `clip`, and take the optimizer's step.

    Natively both happen in one pass, which also writes the low-precision copies that `nn/linear.py` keeps.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if _updates_native(optimizer, parameters):
        _update_native(optimizer, 1.0 if clip is None else min(clip / (float(norm) + 1e-6), 1.0))
        return
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
    parameters_changed(parameters)


def _read_native(gradients: list[Tensor]) -> bool:
    kinds = (torch.float32, torch.bfloat16)
    return library.enabled() and all(g.device.type == "cpu" and g.dtype in kinds for g in gradients)


def _updates_native(optimizer: torch.optim.AdamW, parameters: list[Tensor]) -> bool:
    plain = not any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)
    known = all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    return plain and known and _read_native([p.grad for p in parameters if p.grad is not None])


def _update_native(optimizer: torch.optim.AdamW, grad_scale: float) -> None:
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [optimizer.state[p] for p in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:  # as torch.optim.AdamW begins
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
        copies = [kept_copy(p, torch.bfloat16) for p in parameters]
        adamw_(
            [p.detach() for p in parameters],
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            copies,
            lrs=[group["lr"]] * len(parameters),
            weight_decays=[group["weight_decay"]] * len(parameters),
            steps=[int(state["step"]) for state in states],
            betas=group["betas"],
            eps=group["eps"],
            grad_scale=grad_scale,
        )
        copies_written(p for p, copy in zip(parameters, copies, strict=True) if copy is not None)


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
