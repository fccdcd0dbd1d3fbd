"""The truth about a trainer's first update: every sequence alone, in fp64, by autograd and nothing of the proof."""

import copy
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

IGNORE = -100


def plain(model: nn.Module, ids: list[int]) -> Tensor:
    """Logits of a sequence alone, (length, vocabulary)."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def alone(
    model: nn.Module, sequences: Sequence[Sequence[int]], labels: Sequence[Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """Gradient of the mean cross-entropy over all targets, one sequence at a time, in fp64."""
    model = copy.deepcopy(model).double().eval()
    wanted = [[IGNORE, *one[1:]] for one in (sequences if labels is None else labels)]
    num = sum(label != IGNORE for one in wanted for label in one)
    for ids, own in zip(sequences, wanted, strict=True):
        logits = plain(model, list(ids))
        sum_of_targets = F.cross_entropy(
            logits[len(logits) - len(ids) : -1], torch.tensor(own[1:]), ignore_index=IGNORE, reduction="sum"
        )
        if sum_of_targets.requires_grad:
            (sum_of_targets / num).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def first_update(trainer: Trainer) -> dict[str, Tensor]:
    """Gradient of the trainer's first update, as `train` makes it, in its own precision and without dropout."""
    found: dict[str, Tensor] = {}

    class StopError(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        found.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})
        raise StopError

    trainer.args.max_grad_norm = 0.0
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    create = trainer.create_optimizer

    def creating(*args: object, **kwargs: object) -> object:
        optimizer = create(*args, **kwargs)
        optimizer.step = stop
        return optimizer

    trainer.create_optimizer = creating  # type: ignore[method-assign]
    with suppress(StopError):
        trainer.train()
    return found


def distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Relative norm of the difference of two gradients."""
    names = {*found, *truth}
    zero = {name: torch.zeros_like(found.get(name, truth.get(name))) for name in names}  # type: ignore[arg-type]
    parts = [
        (found.get(name, zero[name]).double() - truth.get(name, zero[name]).double()).square().sum() for name in names
    ]
    size = sum(one.double().square().sum() for one in truth.values())
    return float((sum(parts) / size) ** 0.5)
