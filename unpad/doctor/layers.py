"""Layers in one pass over a batch, forward and backward: the first number that is not finite, units that are always 0,
attention that tells nothing apart, numbers that grow, and parameters that get no gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.fields import BatchPart
from unpad.batching.layout import Layout
from unpad.doctor.finding import Finding, Found, Words, finding, level
from unpad.doctor.subject import Subject, Trial
from unpad.inference.attention import attention_weights
from unpad.models.contract import PredictsSets
from unpad.models.objective import LAST, Objective
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.block import Block, FeedForward
from unpad.nn.precision import Precision, autocast
from unpad.recipes.training import Ramp

SEQUENCES, TOKENS = 32, 1024  # of the batch


@dataclass(frozen=True)
class Output:
    """Numbers of a module's output.

    Args:
        bad: share that is not finite; largest: of the others, in size; rms: root of their mean square.
    """

    name: str
    module: nn.Module
    bad: float
    largest: float
    rms: float


@dataclass(frozen=True)
class Layers:
    """A pass over a batch.

    Args:
        norm: of the gradient.
        finite: whether the pass was finite, so that training can be tried.
        blocks: name, size of the output and norm of the gradient of every block.
        without: names of parameters to train that got no gradient; left_out: those that would get one if every loss
            term of the model had a weight, and events had values.
    """

    findings: list[Finding]
    norm: float
    finite: bool
    blocks: list[tuple[str, float, float]]
    without: list[str]
    left_out: list[str]


def check_layers(subject: Subject) -> Layers:
    """Look at every layer of the model with the weights of the run, or those that training starts from; of a stage of
    pairs at the weights alone."""
    broken = not_finite(*_bad_weights(subject.model))
    if broken or subject.stage.of_pairs:
        return Layers(broken, math.nan, finite=False, blocks=[], without=[], left_out=[])
    trial = Trial(subject, drops=False, model=subject.model)
    batch = subject.small_batch(SEQUENCES, TOKENS)
    with _largest_units(trial.model) as units:
        outputs, loss = _forward(trial, batch, subject.setup.precision)
    broken = not_finite(*_bad_output(trial, batch, outputs))
    if not broken:
        loss.backward()
    gradients = {name: p.grad for name, p in trial.model.named_parameters() if p.requires_grad}
    broken = broken or not_finite(*_bad_gradient(gradients))
    if broken:
        return Layers(broken, math.nan, finite=False, blocks=[], without=[], left_out=[])
    without = [name for name, grad in gradients.items() if grad is None or not bool(grad.any())]
    left_out = _by_other_terms(trial, batch, without) if without else []
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients.values() if grad is not None))
    findings = [*exploding(outputs, norm), *dead_units(units, batch), *attention_sharp(trial, batch)]
    return Layers(findings, norm, True, _blocks(outputs, gradients), without, left_out)


@finding(
    "frozen", "fault", explains={"by_heart", "labels_random"},
    en=("{number:.0%} of the parameters to train do not change, such as {layer}: {why}.",
        "look at train.freeze, optim.groups (lr_scale 0) and losses; in code, at detach and no_grad"),
    zh=("要训练的参数中有 {number:.0%} 不变化，例如 {layer}：{why}。",
        "检查 train.freeze、optim.groups（lr_scale 为 0）和 losses；代码里检查 detach 和 no_grad"),
)  # fmt: skip
def frozen(subject: Subject, layers: Layers, unmoved: list[str]) -> Found | None:
    """Parameters that the recipe does not freeze and that some steps did not change."""
    sizes = {name: p.numel() for name, p in Trial(subject).model.named_parameters() if p.requires_grad}
    names = [name for name in unmoved if name in sizes and name not in layers.left_out]
    share = sum(sizes[name] for name in names) / max(sum(sizes.values()), 1)
    if share < 0.02:
        return None
    no_gradient = names[0] in layers.without
    why = (
        ("they get no gradient", "它们没有梯度")
        if no_gradient
        else ("steps leave them as they are", "每一步都不改变它们")
    )
    return Found(share, "train.freeze", "optim.groups", "losses", severity=level(share >= 0.3), layer=names[0], why=why)


# --------------------------------------------------------------------------- finite numbers


Bad = tuple[float, str, Words, str]  # what is not finite: its share, the layer, the kind, and the field to change


@finding(
    "not_finite", "fault",
    en=("{what} of {layer} are NaN or infinite ({number:.2g} of them), the first that are not finite (overflow).",
        "lower optim.lr, set precision=fp32 or bf16 in place of fp16, or start from an earlier checkpoint"),
    zh=("{layer} 的{what}是 NaN 或无穷大（占 {number:.2g}），是最先溢出的。",
        "调低 optim.lr，设 precision=fp32 或用 bf16 代替 fp16，或从更早的检查点开始"),
)  # fmt: skip
def not_finite(bad: Bad | None = None) -> Found | None:
    """The first weight, output or gradient that is not finite."""
    return None if bad is None else Found(bad[0], bad[3], layer=bad[1], what=bad[2])


def _bad_weights(model: nn.Module) -> list[Bad]:
    bad = ((name, float((~torch.isfinite(p)).float().mean())) for name, p in model.named_parameters())
    return [(share, name, ("Weights", "权重"), "train.init_from") for name, share in bad if share][:1]


def _bad_output(trial: Trial, batch: RaggedBatch, outputs: list[Output]) -> list[Bad]:
    first = next((one for one in outputs if one.bad), None)
    if first is None:
        return []
    precision, field = trial.setup.precision, "model"
    if precision != "fp32":
        wide = next((one for one in _forward(trial, batch, "fp32")[0] if one.name == first.name), None)
        field = "precision" if wide is not None and not wide.bad else field
    words = (f"Outputs (in {precision})", f"输出（{precision}）") if field == "precision" else ("Outputs", "输出")
    return [(first.bad, first.name, words, field)]


def _bad_gradient(gradients: dict[str, Tensor | None]) -> list[Bad]:
    shares = {
        name: float((~torch.isfinite(grad)).float().mean()) for name, grad in gradients.items() if grad is not None
    }
    return [(share, name, ("Gradients", "梯度"), "model") for name, share in reversed(shares.items()) if share][:1]


def _forward(trial: Trial, batch: RaggedBatch, precision: Precision) -> tuple[list[Output], Tensor]:
    """Outputs of all modules in the order in which they end, and the loss that training would follow."""
    seen: list[Output] = []

    def record(name: str) -> Any:
        def look(module: nn.Module, given: Any, made: Any) -> None:
            tensors = [one for one in _tensors(made) if one.is_floating_point() and one.numel()]
            if tensors:
                seen.append(_output(name, module, tensors))

        return look

    hooks = [module.register_forward_hook(record(name)) for name, module in trial.model.named_modules() if name]
    trial.model.eval()
    try:
        with autocast(precision, trial.setup.device):
            terms = trial.model.losses(batch)
        parts = [weight * terms[name][0] / max(terms[name][1], 1) for name, weight in trial.weights.items()]
        return seen, torch.stack([part for part in parts if part.requires_grad]).sum()
    finally:
        for hook in hooks:
            hook.remove()


def _output(name: str, module: nn.Module, tensors: list[Tensor]) -> Output:
    flat = torch.cat([one.detach().flatten().float() for one in tensors])
    good = torch.isfinite(flat)
    fine = flat[good]
    rms = float(fine.double().square().mean().sqrt()) if len(fine) else 0.0
    return Output(name, module, 1 - float(good.float().mean()), float(fine.abs().max()) if len(fine) else 0.0, rms)


def _tensors(made: Any) -> Iterator[Tensor]:
    """Tensors of an output of any form."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, dict):
        for one in made.values():
            yield from _tensors(one)
    elif isinstance(made, list | tuple):
        for one in made:
            yield from _tensors(one)
    elif is_dataclass(made) and not isinstance(made, type) and not isinstance(made, Layout):
        for field in fields(made):
            if field.name in ("x", "delta"):  # of a stream; its biases may be -inf on purpose
                yield from _tensors(getattr(made, field.name))


def _by_other_terms(trial: Trial, batch: RaggedBatch, without: list[str]) -> list[str]:
    """Those of some parameters that only loss terms without a weight in the recipe reach, or values where no event has
    one."""
    model = trial.model.eval()
    parameters = dict(model.named_parameters())
    terms = model.losses(_with_values(batch))
    parts = [terms[name][0] for name in model.weights if name in terms and terms[name][0].requires_grad]
    wanted = [parameters[name] for name in without]
    gradients = torch.autograd.grad(torch.stack(parts).sum(), wanted, allow_unused=True)
    return [name for name, grad in zip(without, gradients, strict=True) if grad is not None and bool(grad.any())]


def _with_values(batch: RaggedBatch) -> RaggedBatch:
    """The batch with a value of every event, where none has one."""

    def filled(part: BatchPart) -> BatchPart:
        if isinstance(part, EventSets) and not bool(part.has_value.any()):
            return replace(part, has_value=torch.ones_like(part.has_value))
        return part

    return replace(batch, parts=tuple(map(filled, batch.parts)))


# --------------------------------------------------------------------------- units, heads, sizes


@contextmanager
def _largest_units(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect the largest size of every unit of the feed-forward parts inside, (hidden,) by name."""
    largest: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def look(module: nn.Module, given: tuple[Any, ...]) -> None:
            most = given[0].detach().abs().amax(0).float()
            largest[name] = torch.maximum(largest[name], most) if name in largest else most

        return look

    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, FeedForward)]
    hooks = [part.down.register_forward_pre_hook(record(name)) for name, part in parts]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


@finding(
    "dead_units", explains={"by_heart", "labels_random"},
    en=("{number:.0%} of the units of {layer} are 0 for every token: they pass no gradient.",
        "lower optim.lr, or begin anew; another model.activation than relu dies less easily"),
    zh=("{layer} 中 {number:.0%} 的单元对所有词元都输出 0：梯度无法通过。",
        "调低 optim.lr 或重新开始；不用 relu 的 model.activation 不容易死"),
)  # fmt: skip
def dead_units(largest: dict[str, Tensor], batch: RaggedBatch) -> Found | None:
    """Units of feed-forward parts that are 0 for all tokens; a kernel rounds the GELU of -50 to 3e-6."""
    shares = {name: float((most <= 3e-5).float().mean()) for name, most in largest.items()}
    name = max(shares, key=lambda one: shares[one], default="")
    if not name or batch.total_tokens < 64 or shares[name] < 0.5:
        return None
    return Found(shares[name], "optim.lr", "model.activation", severity=level(shares[name] >= 0.9), layer=name)


@finding(
    "attention_sharp",
    en=("{heads} of {num} heads look at one token alone (entropy {number:.1%} of the most): attention has collapsed.",
        "begin anew with a lower optim.lr and optim.warmup=0.1; model.qk_norm=true bounds the scores of decoders"),
    zh=("{num} 个注意力头中有 {heads} 个只看一个词元（熵为最大值的 {number:.1%}）：注意力已坍缩。",
        "调低 optim.lr 并设 optim.warmup=0.1，重新开始；解码器可用 model.qk_norm=true 限制分数"),
)  # fmt: skip
def attention_sharp(trial: Trial, batch: RaggedBatch) -> Found | None:
    """Heads whose queries look at one key each."""
    if not isinstance(batch.layout, Layout):
        return None
    longest = batch.select([int(batch.layout.lengths().argmax())])
    weights = attention_weights(trial.model, longest) if longest.total_tokens >= 4 else []
    entropies = torch.cat([torch.zeros(0), *(_entropies(block) for block in weights)])
    sharp = entropies < 0.02
    share = float(sharp.float().mean()) if len(entropies) else 0.0
    if share < 0.5:
        return None
    mean = float(entropies[sharp].mean())
    return Found(
        mean, "optim.lr", "optim.warmup", severity=level(share >= 0.9), heads=int(sharp.sum()), num=len(entropies)
    )


def _entropies(weights: Tensor) -> Tensor:
    """Entropy of each head over the most that it can have, mean of queries with some keys to choose from, (heads,)."""
    wide = weights.double().cpu()
    keys = (wide > 0).sum(-1).amax(0)  # (num_tokens,) a head that looks at one of many leaves others near 0
    causal = bool((wide[:, 0, 1:] == 0).all()) and bool((wide[:, -1] > 0).any())
    allowed = torch.arange(1, wide.shape[1] + 1) if causal else torch.full_like(keys, wide.shape[1])
    chosen = allowed >= 4
    if not bool(chosen.any()):
        return wide.new_zeros(0)
    entropy = -(wide * wide.clamp_min(1e-300).log()).sum(-1)  # (heads, num_tokens)
    return (entropy[:, chosen] / allowed[chosen].double().log()).mean(1)


@finding(
    "exploding", "fault", explains={"clip"},
    en=("Numbers grow {number:,.0f} times from the first block to {layer}; the gradient's norm is {norm:.2g}.",
        "lower optim.lr and optim.clip, warm up longer (optim.warmup=0.1), or start from an earlier checkpoint"),
    zh=("从第一个块到 {layer}，数值增大了 {number:,.0f} 倍；梯度范数是 {norm:.2g}。",
        "调低 optim.lr 和 optim.clip，延长预热（optim.warmup=0.1），或从更早的检查点开始"),
)  # fmt: skip
def exploding(outputs: list[Output], norm: float) -> Found | None:
    """Outputs of blocks, or a gradient, a thousand times what they should be."""
    blocks = [one for one in outputs if isinstance(one.module, Block)]
    largest = max(blocks, key=lambda one: one.rms, default=None)
    grown = 0.0 if largest is None else largest.rms / max(outputs[0].rms, 1e-12)
    if largest is None or (grown < 1000 and norm < 1000):
        return None
    return Found(grown, "optim.lr", "optim.clip", "optim.warmup", layer=largest.name, norm=norm)


def _blocks(seen: list[Output], gradients: dict[str, Tensor | None]) -> list[tuple[str, float, float]]:
    blocks = []
    for one in seen:
        if isinstance(one.module, Block):
            inside = [grad for name, grad in gradients.items() if name.startswith(f"{one.name}.") and grad is not None]
            blocks.append((one.name, one.rms, math.sqrt(sum(float(g.double().square().sum()) for g in inside))))
    return blocks


@finding(
    "starved",
    en=("The outcome has {number:.2%} of the gradient that the layers get, {strongest} has {other:.0%}: they hardly learn "
        "it.", "set {field}={usual:g}, the default, or lower losses.{strongest}"),
    zh=("各层得到的梯度中结局只占 {number:.2%}，{strongest} 占 {other:.0%}：几乎学不到结局。",
        "设置 {field}={usual:g}（默认值），或调低 losses.{strongest}"),
)  # fmt: skip
def starved(subject: Subject) -> Found | None:
    """An outcome, of labels and times, with next to no share in the gradient of the layers that it shares."""
    trial, outcome, weights = Trial(subject, drops=False), ("classification", "hazard"), subject.setup.model.weights
    trial.model.eval()
    if subject.data.class_labels() is None or not set(outcome) & set(weights):
        return None
    name = next(name for name in outcome if name in weights)
    field, usual = subject.field(f"losses.{name}"), weights[name]
    default = usual.end if isinstance(usual, Ramp) else usual
    if not any(set(outcome) & set(Objective.of(subject.setup.model, stage.recipe.losses).at(LAST, LAST))
               for stage in subject.setup.stages):  # fmt: skip
        strongest = max(trial.weights, key=lambda term: trial.weights[term])
        return Found(0.0, field, strongest=strongest, other=1.0, field=field, usual=default or 1.0)
    terms = trial.terms(subject.small_batch(SEQUENCES, TOKENS))
    parameters = [one for one in trial.model.parameters() if one.requires_grad]
    gradients = {
        term: torch.autograd.grad(
            weight * terms[term][0] / terms[term][1], parameters, retain_graph=True, materialize_grads=True
        )
        for term, weight in trial.weights.items()  # the penalty `kl` is large at first and small soon
        if term != "kl" and terms[term][1] and terms[term][0].requires_grad
    }
    sides = [[term for term in gradients if (term in outcome) == of_it] for of_it in (True, False)]
    shared = [place for place in range(len(parameters))
              if all(any(bool(gradients[term][place].any()) for term in side) for side in sides)]  # fmt: skip
    norms = {term: sum(float(grads[place].double().square().sum()) for place in shared) ** 0.5
             for term, grads in gradients.items()}  # fmt: skip
    share = sum(norms[term] for term in sides[0]) / max(sum(norms.values()), 1e-300)
    # What begins with a fit of its own leaves little to the layers at first.
    least = 0.01 * (trial.model.outcome_share if isinstance(trial.model, PredictsSets) else 1)
    if not all(sides) or not shared or share >= least:
        return None
    strongest = max(sides[1], key=lambda term: norms[term])
    other = norms[strongest] / sum(norms.values())
    return Found(share, field, f"losses.{strongest}", strongest=strongest, other=other, field=field, usual=default)
