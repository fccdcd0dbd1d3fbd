"""Parameter groups, the optimizer, and learning rates as a function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from unpad.errors import RecipeError
from unpad.models.adapters import adapter_names
from unpad.processes.divided import divided_like, total_norm
from unpad.recipes.training import OptimSettings, ParameterGroup


def freeze(model: nn.Module, patterns: list[str]) -> int:
    """Freeze the parameters with a name that matches any pattern, and train all others, or the adapters of an adapted
    model.

    Returns:
        Number of frozen values.

    Raises:
        RecipeError: a pattern matches no parameter, or no parameter is left to train.
    """
    _check_patterns(model, patterns, "train.freeze")
    frozen, adapters = 0, set(adapter_names(model))
    for name, parameter in model.named_parameters():
        learns = (name in adapters or not adapters) and not parameter.is_meta  # other processes hold these
        parameter.requires_grad_(learns and not any(fnmatch(name, pattern) for pattern in patterns))
        frozen += 0 if parameter.requires_grad or parameter.is_meta else parameter.numel()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError("every parameter is frozen", where="train.freeze", fix="leave a parameter to train")
    return frozen


def _check_patterns(model: nn.Module, patterns: list[str], where: str) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            fix = "names are such as " + ", ".join(names[:3])
            raise RecipeError(f'"{pattern}" matches no parameter', where=where, fix=fix)


class AdamW(torch.optim.AdamW):
    """torch's AdamW without its wrappers for torch.compile, which take half of the import time of a start.

    Args:
        found_inf: () fp32 of the fused kernels, above 0 where they leave out a step.
    """

    found_inf: Tensor | None = None

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


def make_optimizer(model: nn.Module, settings: OptimSettings) -> AdamW:
    """Build AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay on matrices only.

    Biases, norms and embeddings keep their scale: decay would pull the rows of rare words, which get few gradients, to
    zero. A parameter belongs to the first of `settings.groups` that names it.

    Raises:
        RecipeError: a pattern of a group matches no parameter.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for part, group in enumerate([*settings.groups, ParameterGroup(parameters=["*"])]):
        _check_patterns(model, group.parameters, f"optim.groups.{part}")
        names = [name for name in named if any(fnmatch(name, pattern) for pattern in group.parameters)]
        mine = [named.pop(name) for name in names]
        decay = [p for p in mine if p.dim() >= 2 and id(p) not in embeddings]
        keep = [p for p in mine if p.dim() < 2 or id(p) in embeddings]
        weight_decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
        shared = {"lr_scale": group.lr_scale, "clip": group.clip, "part": part}
        groups += [
            {"params": decay, "weight_decay": weight_decay, **shared},
            {"params": keep, "weight_decay": 0.0, **shared},
        ]
    return AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group: `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def forget(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Reset the state of reinitialized parameters."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


def update(optimizer: torch.optim.Optimizer, norm: Tensor, clip: float | None, finite: Tensor | None = None) -> None:
    """Clip the gradients and take the optimizer's step.

    Args:
        norm: global norm of all gradients.
        clip: largest norm of the gradients of all groups that set no limit.
        finite: () bool, on the device of the weights: False leaves out the step of an `AdamW`. None: it is known.
    """
    if isinstance(optimizer, AdamW):
        optimizer.found_inf = None if finite is None else (~finite).float()
    parts: dict[int, list[dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        parts.setdefault(-1 if group.get("clip") is None else group["part"], []).append(group)
    for groups in parts.values():
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        limit = groups[0].get("clip") or clip
        if limit is not None and parameters:
            gradients = [p.grad for p in parameters if p.grad is not None]
            part_norm = norm if len(parts) == 1 else total_norm(gradients)
            if not _within(limit, part_norm):
                nn.utils.clip_grads_with_norm_(parameters, limit, part_norm)
    optimizer.step()
    # torch's fused optimizers do not count as a write, and copies of weights (nn/linear.py) would outlive the step.
    torch.autograd.graph.increment_version(p for group in optimizer.param_groups for p in group["params"])


def _within(limit: float, norm: Tensor) -> bool:
    """True if clipping would multiply by 1. Checked on the CPU only: a GPU would synchronize."""
    return norm.device.type == "cpu" and bool(limit / (norm + 1e-6) >= 1)  # as in clip_grads_with_norm_


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as flat names, `optim.<parameter>.<field>`; fields are exp_avg, exp_avg_sq and step."""
    return {
        f"optim.{name}.{field}": value
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the tensors that `optimizer_tensors` returned, except for parameters of other processes."""
    for name, parameter in model.named_parameters():
        prefix = f"optim.{name}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state and not parameter.is_meta:
            on_device = {key: value.to(parameter.device, copy=True) for key, value in state.items()}  # step too
            optimizer.state[parameter] = {
                key: value if key == "step" else divided_like(parameter, value) for key, value in on_device.items()
            }


@dataclass(frozen=True)
class Epochs:
    """Number of steps in the epochs of a stage.

    Args:
        first: first epoch of each segment of equal epochs, 0-based and ascending; starts with 0.
        steps: steps per epoch in each segment.
    """

    first: tuple[int, ...]
    steps: tuple[int, ...]

    def steps_before(self, epoch: int) -> int:
        """Steps of all epochs before a 0-based epoch."""
        ends = (*self.first[1:], epoch)
        return sum(
            max(min(end, epoch) - first, 0) * steps
            for first, end, steps in zip(self.first, ends, self.steps, strict=True)
        )

    def epochs_before(self, step: int) -> float:
        """Epochs, with a fraction, that are over before a 0-based step of the stage."""
        segment = max(i for i, first in enumerate(self.first) if i == 0 or self.steps_before(first) <= step)
        first = self.first[segment]
        return first + (step - self.steps_before(first)) / max(self.steps[segment], 1)


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of a stage.

    Args:
        epochs: as planned; the epochs that a run trains may differ by a few steps.
        num_steps: steps planned for the stage.

    cosine and restarts: Loshchilov and Hutter 2017, arXiv 1608.03983; each cycle of two steps or more starts at the
    peak and reaches the floor at its last step, and so does the stage.
    """

    settings: OptimSettings
    epochs: Epochs
    num_steps: int

    def check(self) -> None:
        """Refuse a schedule that does not fit the stage.

        Raises:
            RecipeError: as many restarts as there are steps, or more; or a first cycle as long as the stage.
        """
        total, restarts, first = self._length(), self.settings.restarts, self.settings.first_cycle
        unit = "epochs" if self.settings.per == "epoch" else "steps"
        if self.settings.schedule != "restarts" or total == 0:
            return
        if first is not None and first >= total:
            what = f"a first cycle of {first} {unit} leaves no restart in {total}"
            raise RecipeError(what, where="optim.first_cycle", fix=f"use at most {total - 1}, or optim.schedule=cosine")
        if first is None and restarts >= total:
            what = f"{restarts} restarts do not fit into {total} {unit}"
            raise RecipeError(what, where="optim.restarts", fix=f"use at most {total - 1}")

    def rate(self, step: int, epoch: int) -> float:
        """Learning rate of a step; with `per: epoch` it changes only between epochs.

        Args:
            step: 0-based, within the stage.
            epoch: 0-based, the epoch that the step belongs to.
        """
        settings, total = self.settings, max(self._length(), 1)
        peak = settings.lr * settings.lr_scale
        by_epoch = settings.per == "epoch"
        now = epoch if by_epoch else step
        if settings.schedule == "constant":
            return peak
        if settings.schedule == "exponential":
            epochs = epoch if by_epoch else self.epochs.epochs_before(step)
            return float(peak * settings.decay ** (epochs / settings.decay_epochs))
        least = 0 if by_epoch else min(settings.min_warmup, total // 2)
        warmup = max(math.ceil(settings.warmup * total), least)
        if settings.schedule != "restarts" and now < warmup:
            return peak * (now + 1) / warmup
        if settings.schedule == "warmup":
            return peak
        if now >= total - 1 > 0:
            return peak * settings.floor
        if settings.schedule == "restarts":
            return peak * _restarts(now, total, settings)
        return peak * _cosine(now - warmup, total - warmup, settings.floor)

    def _length(self) -> int:
        """Length of the stage, in epochs if the rate changes by them, otherwise in steps."""
        if self.settings.per == "epoch":
            return math.ceil(self.epochs.epochs_before(self.num_steps))
        return self.num_steps


def _cosine(step: int, length: int, floor: float) -> float:
    """Factor that is 1 at the first of `length` steps and `floor` at the last."""
    progress = min(step / (length - 1), 1.0) if length > 1 else 0.0
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def _restarts(step: int, total: int, settings: OptimSettings) -> float:
    """Factor of repeated cosines that end with the total.

    They are of equal length, or of lengths that differ by one if the total does not divide. With `first_cycle` they
    grow by `cycle_factor`, and the last is as long as the rest of the total.
    """
    if settings.first_cycle is None:
        cycles = settings.restarts + 1
        bounds = [round(total * cycle / cycles) for cycle in range(cycles + 1)]
    else:
        bounds, length = [0], float(settings.first_cycle)
        while bounds[-1] < total:
            bounds.append(min(round(bounds[-1] + length), total))
            length *= settings.cycle_factor
    cycle = max(i for i in range(len(bounds) - 1) if bounds[i] <= step)
    return _cosine(step - bounds[cycle], bounds[cycle + 1] - bounds[cycle], settings.floor)
