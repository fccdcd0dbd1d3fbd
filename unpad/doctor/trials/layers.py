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
from unpad.doctor.subject import Subject, Trial
from unpad.inference.attention import attention_weights
from unpad.models.contract import PredictsSets
from unpad.models.objective import LAST, Objective
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.block import Block, FeedForward
from unpad.nn.precision import Precision, autocast
from unpad.recipes.training import Ramp
from unpad.terminal.finding import Finding, Severity, Value

SEQUENCES, TOKENS = 32, 1024  # of the batch
DEAD, MANY_DEAD, MOST_DEAD = 3e-5, 0.5, 0.9  # a kernel rounds the GELU of -50 to 3e-6
LEAST_TOKENS = 64  # below which a unit may be 0 by chance
SHARP, MANY_SHARP, MOST_SHARP = 0.02, 0.5, 0.9
EXACTLY, NEARLY = 1e-7, 1e-4  # distance from the most entropy: of heads that never learnt, and of trained ones
TRAINED = 100  # steps after which attention is no longer as it began
LEAST_KEYS = 4
GROWN, LARGE_NORM = 1e3, 1000.0
UNCHANGED, MANY_UNCHANGED = 0.02, 0.3  # of the parameters to train


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
    broken = _weights(subject.model)
    if broken:
        return Layers(broken, math.nan, finite=False, blocks=[], without=[], left_out=[])
    if subject.stage.of_pairs:
        return Layers([], math.nan, finite=False, blocks=[], without=[], left_out=[])
    trial = Trial(subject, drops=False, model=subject.model)
    batch = subject.small_batch(SEQUENCES, TOKENS)
    precision = subject.setup.precision
    with _dead_units(trial.model) as dead:
        seen, loss = _forward(trial, batch, precision)
    first = next((one for one in seen if one.bad), None)
    if first is not None:
        return Layers([_not_finite(trial, batch, first)], math.nan, finite=False, blocks=[], without=[], left_out=[])
    loss.backward()
    gradients = {name: p.grad for name, p in trial.model.named_parameters() if p.requires_grad}
    worst = _bad_gradient(gradients)
    if worst is not None:
        return Layers([worst], math.nan, finite=False, blocks=[], without=[], left_out=[])
    without = [name for name, grad in gradients.items() if grad is None or not bool(grad.any())]
    left_out = _by_other_terms(trial, batch, without) if without else []
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients.values() if grad is not None))
    blocks = _blocks(seen, gradients)
    found = [*_dead(dead, batch), *_attention(subject, trial, batch), *_exploding(seen, norm)]
    return Layers(found, norm, finite=True, blocks=blocks, without=without, left_out=left_out)


def check_unchanged(subject: Subject, layers: Layers, unmoved: list[str]) -> list[Finding]:
    """A finding on parameters that the recipe does not freeze and that steps leave as they are.

    Args:
        unmoved: names of those that some steps did not change.
    """
    trial = Trial(subject)
    sizes = {name: p.numel() for name, p in trial.model.named_parameters() if p.requires_grad}
    named = [name for name in unmoved if name in sizes and name not in layers.left_out]
    share = sum(sizes[name] for name in named) / max(sum(sizes.values()), 1)
    if share < UNCHANGED:
        return []
    why = "@no_gradient" if named[0] in layers.without else "@no_step"
    values: dict[str, Value] = {"layer": named[0], "why": why}
    severity: Severity = "fault" if share >= MANY_UNCHANGED else "warning"
    return [Finding("frozen", severity, share, ("train.freeze", "optim.groups", "losses"), values)]


# --------------------------------------------------------------------------- finite numbers


def _weights(model: nn.Module) -> list[Finding]:
    bad = {name: int((~torch.isfinite(p)).sum()) for name, p in model.named_parameters() if p.is_floating_point()}
    names = [name for name, num in bad.items() if num]
    if not names:
        return []
    return [Finding("weights_not_finite", "fault", sum(bad.values()), ("train.init_from",), {"layer": names[0]})]


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
        with autocast(precision, trial.subject.setup.device):
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


def _not_finite(trial: Trial, batch: RaggedBatch, first: Output) -> Finding:
    precision = trial.subject.setup.precision
    if precision != "fp32":
        wide = next((one for one in _forward(trial, batch, "fp32")[0] if one.name == first.name), None)
        if wide is not None and not wide.bad:
            values: dict[str, Value] = {"precision": precision, "layer": first.name}
            return Finding("overflow", "fault", wide.largest, ("precision",), values)
    return Finding("not_finite", "fault", first.bad, ("model",), {"layer": first.name, "pass_name": "@forward"})


def _bad_gradient(gradients: dict[str, Tensor | None]) -> Finding | None:
    for name, grad in reversed(gradients.items()):
        if grad is not None and not bool(torch.isfinite(grad).all()):
            share = float((~torch.isfinite(grad)).float().mean())
            return Finding("not_finite", "fault", share, ("model",), {"layer": name, "pass_name": "@backward"})
    return None


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
def _dead_units(model: nn.Module) -> Iterator[dict[str, Tensor]]:
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


def _dead(largest: dict[str, Tensor], batch: RaggedBatch) -> list[Finding]:
    if not largest or batch.total_tokens < LEAST_TOKENS:
        return []
    shares = {name: float((most <= DEAD).float().mean()) for name, most in largest.items()}
    name = max(shares, key=lambda one: shares[one])
    if shares[name] < MANY_DEAD:
        return []
    severity: Severity = "fault" if shares[name] >= MOST_DEAD else "warning"
    return [Finding("dead_units", severity, shares[name], ("optim.lr", "model.activation"), {"layer": name})]


def _attention(subject: Subject, trial: Trial, batch: RaggedBatch) -> list[Finding]:
    if not isinstance(batch.layout, Layout):
        return []
    longest = int(batch.layout.lengths().argmax())
    one = batch.select([longest])
    weights = attention_weights(trial.model, one) if one.total_tokens >= LEAST_KEYS else []
    shares = [entropies for block in weights if len(entropies := _entropies(block))]
    if not shares:
        return []
    every = torch.cat(shares)
    sharp = every < SHARP
    values: dict[str, Value] = {"all_heads": len(every)}
    if float(sharp.float().mean()) >= MANY_SHARP:
        where = next(index for index, block in enumerate(shares) if bool((block < SHARP).any()))
        severity: Severity = "fault" if float(sharp.float().mean()) >= MOST_SHARP else "warning"
        values |= {"heads": int(sharp.sum()), "layer": f"blocks.{where}"}
        mean = float(every[sharp].mean())
        return [Finding("attention_sharp", severity, mean, ("optim.lr", "optim.warmup"), values)]
    distance = float((1 - every).max())
    if distance < EXACTLY or (subject.step >= TRAINED and distance < NEARLY):
        return [Finding("attention_uniform", "fault", float(every.mean()), ("train.freeze", "optim.groups"), values)]
    return []


def _entropies(weights: Tensor) -> Tensor:
    """Entropy of each head over the most that it can have, mean of queries with some keys to choose from, (heads,)."""
    wide = weights.double().cpu()
    keys = (wide > 0).sum(-1).amax(0)  # (num_tokens,) a head that looks at one of many leaves others near 0
    causal = bool((wide[:, 0, 1:] == 0).all()) and bool((wide[:, -1] > 0).any())
    allowed = torch.arange(1, wide.shape[1] + 1) if causal else torch.full_like(keys, wide.shape[1])
    chosen = allowed >= LEAST_KEYS
    if not bool(chosen.any()):
        return wide.new_zeros(0)
    entropy = -(wide * wide.clamp_min(1e-300).log()).sum(-1)  # (heads, num_tokens)
    return (entropy[:, chosen] / allowed[chosen].double().log()).mean(1)


def _exploding(seen: list[Output], norm: float) -> list[Finding]:
    blocks = [one for one in seen if isinstance(one.module, Block)]
    if not blocks:
        return []
    largest = max(blocks, key=lambda one: one.rms)
    grown = largest.rms / max(seen[0].rms, 1e-12)
    if grown < GROWN and norm < LARGE_NORM:
        return []
    values: dict[str, Value] = {"layer": largest.name, "norm": norm}
    return [Finding("exploding", "fault", grown, ("optim.lr", "optim.clip", "optim.warmup"), values)]


def _blocks(seen: list[Output], gradients: dict[str, Tensor | None]) -> list[tuple[str, float, float]]:
    found = []
    for one in seen:
        if isinstance(one.module, Block):
            own = [grad for name, grad in gradients.items() if name.startswith(f"{one.name}.") and grad is not None]
            found.append((one.name, one.rms, math.sqrt(sum(float(g.double().square().sum()) for g in own))))
    return found


OUTCOME = ("classification", "hazard")  # terms that learn it from labels and times
PENALTY = "kl"  # large at first and small soon, whatever its weight
STARVED = 0.01  # of the norms of the gradients of all terms but that


def check_terms(subject: Subject) -> list[Finding]:
    """A finding on an outcome that is trained, with next to no share in the gradient of the layers that it shares."""
    trial = Trial(subject, drops=False)
    if not set(OUTCOME) & set(trial.weights):
        return _untrained(subject, trial)
    trial.model.eval()
    terms = trial.terms(subject.small_batch(SEQUENCES, TOKENS))
    parameters = [one for one in trial.model.parameters() if one.requires_grad]
    gradients = {
        name: torch.autograd.grad(
            weight * terms[name][0] / terms[name][1], parameters, retain_graph=True, materialize_grads=True
        )
        for name, weight in trial.weights.items()
        if name != PENALTY and terms[name][1] and terms[name][0].requires_grad
    }
    own, others = [name for name in gradients if name in OUTCOME], [name for name in gradients if name not in OUTCOME]
    if not own or not others:
        return []
    shared = [
        place
        for place in range(len(parameters))
        if all(any(bool(gradients[name][place].any()) for name in names) for names in (own, others))
    ]
    norms = {
        name: sum(float(grads[place].double().square().sum()) for place in shared) ** 0.5
        for name, grads in gradients.items()
    }
    share = sum(norms[name] for name in own) / max(sum(norms.values()), 1e-300)
    # What begins with a fit of its own leaves little to the layers at first.
    least = STARVED * (trial.model.outcome_share if isinstance(trial.model, PredictsSets) else 1)
    if not shared or share >= least:
        return []
    strongest = max(others, key=lambda name: norms[name])
    usual = subject.setup.model.weights[own[0]]
    field = subject.field(f"losses.{own[0]}")
    values: dict[str, Value] = {
        "strongest": strongest,
        "other": norms[strongest] / sum(norms.values()),
        "field": field,
        "usual": usual.end if isinstance(usual, Ramp) else usual,
    }
    return [Finding("starved", "warning", share, (field, f"losses.{strongest}"), values)]


def _untrained(subject: Subject, trial: Trial) -> list[Finding]:
    """An outcome that the recipe gives labels for, and that no stage trains."""
    usual = subject.setup.model.weights
    own = [name for name in OUTCOME if name in usual]
    if not own or subject.data.class_labels() is None or not trial.weights:
        return []
    if any(name in Objective.of(subject.setup.model, one.recipe.losses).at(LAST, LAST)
           for one in subject.setup.stages for name in own):  # fmt: skip
        return []
    field, strongest = subject.field(f"losses.{own[0]}"), max(trial.weights, key=lambda name: trial.weights[name])
    values: dict[str, Value] = {"strongest": strongest, "other": 1.0, "field": field, "usual": 1.0}
    return [Finding("starved", "warning", 0.0, (field,), values)]
