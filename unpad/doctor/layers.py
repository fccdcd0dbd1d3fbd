"""Layers in one pass over a batch, forward and backward: what is not finite, what grows, and what gets no gradient."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.doctor.finding import Finding, Found, Words, finding, level
from unpad.doctor.subject import Subject
from unpad.nn.block import Block
from unpad.nn.precision import Precision, autocast
from unpad.training.rehearsal import Rehearsal

Bad = tuple[float, str, Words, str]  # what is not finite: its share, the layer, the kind, and the field to change


@dataclass(frozen=True)
class Output:
    """Numbers of a module's output.

    Args:
        bad: share that is not finite; rms: root of the mean square of the others.
    """

    name: str
    module: nn.Module
    bad: float
    rms: float


@dataclass(frozen=True)
class Layers:
    """A pass over a batch.

    Args:
        norm: of the gradient.
        finite: whether the pass was finite, so that training can be tried.
        blocks: name, size of the output and norm of the gradient of every block.
        without: parameters without a gradient, as of loss terms without a weight, and of values that no event has.
    """

    findings: list[Finding]
    norm: float
    finite: bool
    blocks: list[tuple[str, float, float]]
    without: list[str]


def check_layers(subject: Subject) -> Layers:
    """Look at every layer of the model with the weights of the run, or those that training starts from; of a stage of
    pairs at the weights alone."""
    shares = {name: bad_share(p) for name, p in subject.model.named_parameters()}
    broken = not_finite(*_first(shares, ("Weights", "权重"), "train.init_from"))
    if broken or subject.stage.of_pairs:
        return Layers(broken, math.nan, False, [], [])
    trial = subject.rehearsal(drops=False, model=subject.model)
    batch, precision = subject.small_batch(32, 1024), subject.setup.precision
    outputs, loss = _forward(trial, batch, precision)
    shares, kind = {one.name: one.bad for one in outputs}, (f"Outputs in {precision}", f"{precision} 输出")
    broken = not_finite(*_first(shares, kind, "precision"))
    if broken:
        return Layers(broken, math.nan, False, [], [])
    loss.backward()
    gradients = {name: p.grad for name, p in trial.model.named_parameters() if p.requires_grad}
    shares = {name: bad_share(grad) for name, grad in reversed(gradients.items()) if grad is not None}
    broken = not_finite(*_first(shares, ("Gradients", "梯度"), "model"))
    without = [name for name, grad in gradients.items() if grad is None or not bool(grad.any())]
    norms = {name: float(grad.double().square().sum()) for name, grad in gradients.items() if grad is not None}
    norm = math.sqrt(sum(norms.values()))
    blocks = [(one.name, one.rms, math.sqrt(sum(norms[name] for name in norms if name.startswith(f"{one.name}."))))
              for one in outputs if isinstance(one.module, Block)]  # fmt: skip
    return Layers(broken or exploding(outputs, norm), norm, not broken, blocks, without)


def bad_share(numbers: Tensor) -> float:
    return float((~torch.isfinite(numbers)).float().mean())


def _first(shares: dict[str, float], kind: Words, field: str) -> list[Bad]:
    return [(share, name, kind, field) for name, share in shares.items() if share][:1]


@finding("not_finite", "fault",
    en=("{what} of {layer} are NaN or infinite ({number:.2g} of them), the first that overflow.",
        "lower optim.lr, set precision=fp32, or start from an earlier checkpoint"),
    zh=("{layer} 的{what}是 NaN 或无穷大（占 {number:.2g}）。", "调低 optim.lr 或设 precision=fp32"))  # fmt: skip
def not_finite(bad: Bad | None = None) -> Found | None:
    """The first weight, output or gradient that is not finite."""
    return None if bad is None else Found(bad[0], bad[3], layer=bad[1], what=bad[2])


@finding("exploding", "fault",
    en=("Numbers grow {number:,.0f} times from the first block to {layer}; the gradient's norm is {norm:.2g}.",
        "lower optim.lr and optim.clip, set optim.warmup=0.1, or start from an earlier checkpoint"),
    zh=("从第一个块到 {layer}，数值增大 {number:,.0f} 倍；梯度范数 {norm:.2g}。",
        "调低 optim.lr、optim.clip"))  # fmt: skip
def exploding(outputs: list[Output], norm: float) -> Found | None:
    """Outputs of blocks, or a gradient, a thousand times what they should be."""
    largest = max((one for one in outputs if isinstance(one.module, Block)), key=lambda one: one.rms, default=None)
    grown = 0.0 if largest is None else largest.rms / max(outputs[0].rms, 1e-12)
    if largest is None or (grown < 1000 and norm < 1000):
        return None
    return Found(grown, "optim.lr", "optim.clip", "optim.warmup", layer=largest.name, norm=norm)


@finding("frozen", "fault", explains={"by_heart", "labels_random"},
    en=("{number:.0%} of the parameters to train do not change in a step, such as {layer}.",
        "look at train.freeze, optim.groups, losses"),
    zh=("要训练的参数中有 {number:.0%} 不变化，例如 {layer}。", "检查 train.freeze、optim.groups"))  # fmt: skip
def frozen(subject: Subject, layers: Layers, unmoved: list[str]) -> Found | None:
    """Parameters that the recipe does not freeze and that some steps did not change."""
    sizes = {name: p.numel() for name, p in subject.rehearsal().model.named_parameters() if p.requires_grad}
    names = [name for name in unmoved if name in sizes and name not in layers.without]
    share = sum(sizes[name] for name in names) / max(sum(sizes.values()), 1)
    if share < 0.02:
        return None
    return Found(share, "train.freeze", "optim.groups", "losses", severity=level(share >= 0.3), layer=names[0])


def _forward(trial: Rehearsal, batch: RaggedBatch, precision: Precision) -> tuple[list[Output], Tensor]:
    """Outputs of all modules in the order in which they end, and the loss that training would follow."""
    outputs: list[Output] = []

    def record(name: str) -> Any:
        def look(module: nn.Module, given: Any, made: Any) -> None:
            tensors = [
                one.detach().flatten().float() for one in _tensors(made) if one.is_floating_point() and one.numel()
            ]
            if tensors:
                flat = torch.cat(tensors)
                fine = flat[torch.isfinite(flat)]
                rms = float(fine.double().square().mean().sqrt()) if len(fine) else 0.0
                outputs.append(Output(name, module, bad_share(flat), rms))

        return look

    hooks = [module.register_forward_hook(record(name)) for name, module in trial.model.named_modules() if name]
    trial.model.eval()
    with autocast(precision, trial.setup.device):
        terms = trial.model.losses(batch)
    parts = [weight * terms[name][0] / max(terms[name][1], 1) for name, weight in trial.weights.items()]
    for hook in hooks:
        hook.remove()
    return outputs, torch.stack([part for part in parts if part.requires_grad]).sum()


def _tensors(made: Any) -> Iterator[Tensor]:
    """Tensors of an output of any form."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, dict | list | tuple):
        for one in made.values() if isinstance(made, dict) else made:
            yield from _tensors(one)
    elif is_dataclass(made) and not isinstance(made, type) and not isinstance(made, Layout):
        for field in fields(made):
            if field.name in ("x", "delta"):  # of a stream; its biases may be -inf on purpose
                yield from _tensors(getattr(made, field.name))
