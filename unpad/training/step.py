"""One optimizer step: accumulate, divide by counts, clip, update.

Training divides losses here and nowhere else: each named sum by its own count over all micro-batches of the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.errors import NonFiniteError, OutOfMemoryError, is_memory_error, needs_memory
from unpad.models.contract import Trainable
from unpad.nn.losses import Terms
from unpad.nn.precision import Precision
from unpad.processes.divided import total_norm
from unpad.processes.group import lost_connections
from unpad.terminal.table import number_of
from unpad.training.memory import used_at_most
from unpad.training.optim import AdamW, update
from unpad.training.parallel.share import Share, whole_share
from unpad.training.passes import Passes, joined, visual_figures

OPTIMIZER_FIX = "lower the sizes of the model section, such as model.width, or freeze parts of the model"


@dataclass
class LossScaler:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018, arXiv 1710.03740): halves on overflow, doubles after
    `growth_interval` good steps. Its two numbers are part of a checkpoint."""

    scale: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass(frozen=True)
class StepResult:
    """Measurements of one step.

    Args:
        terms: mean of every term over the step's targets, in nats; 0 for a term without targets among others with them.
        num_targets: labels that count over all micro-batches; for preferences, pairs.
        grad_norm: global L2 norm before clipping.
        visual: for vision-language models, mean, minimum and maximum visual tokens of a sample by block, by name.
        updated: False if the step was left out because a loss or gradient was not finite; True for a step without
            targets, which has nothing to update.
    """

    terms: dict[str, float]
    num_targets: int
    grad_norm: float
    updated: bool
    visual: dict[str, float] = field(default_factory=dict)


def accumulate(
    model: Trainable,
    micros: Sequence[RaggedBatch],
    weights: dict[str, float],
    precision: Precision,
    scale: float = 1.0,
    visual: dict[str, Tensor] | None = None,
    share: Share | None = None,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Add the gradients of one step to the parameters' `.grad`.

    Args:
        micros: micro-batches of this process; empty ones are legal.
        weights: weight of every trained term; a term without a weight is only reported.
        scale: factor on the loss, for fp16; `share.sums` takes it out again.
        visual: gets the visual tokens of the step, as of `visual_tokens`.
        share: the part of the step that these are; None: all of it.

    Returns:
        Sums of all terms over the step, detached, and their counts.

    Raises:
        OutOfMemoryError: names the largest micro-batch of a process and the setting to lower.
    """
    # Counts are known from the batches, so every divisor is right before the first backward pass.
    share = share or whole_share(model, micros)
    totals = {name: share.total(name) for name in weights}

    def loss(terms: Terms) -> Tensor:
        parts = [weight * terms[name][0] / totals[name] for name, weight in weights.items() if totals[name]]
        return torch.stack(parts).sum() * scale

    local = list(share.passes(micros, weights))
    passes = Passes(
        local, loss, share.draw_seed(), precision, scale, share.sums, rounded=len(share.counts) > 1, room=share.room
    )
    with share.given_up_on_error():
        waits = not share.parallelism.replicates
        with share.group.together() as talk, lost_connections(), _memory_of(micros, share, alone=waits):
            results = share.parallelism.compute(model, passes)
            talk.own = share.to_json(results)
        step = joined(share.of_all(results, talk.told))
    if visual is not None:
        visual |= step.visual
    return {name: total for name, (total, _) in step.terms.items()}, {n: count for n, (_, count) in step.terms.items()}


@contextmanager
def _memory_of(micros: Sequence[RaggedBatch], share: Share, *, alone: bool = False) -> Iterator[None]:
    """Describe a memory error by the largest of these micro-batches.

    Args:
        alone: whether the others notice the loss of this process themselves, as in lockstep, where they wait for
            its computation; no message is sent then.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        described = _out_of_memory(error, micros, share)
        described.is_agreed = alone
        raise described from error


def train_step(
    model: Trainable,
    micros: Sequence[RaggedBatch],
    optimizer: torch.optim.Optimizer,
    *,
    weights: dict[str, float],
    precision: Precision,
    clip: float | None,
    scaler: LossScaler | None = None,
    share: Share | None = None,
) -> StepResult:
    """Take one optimizer step over its micro-batches.

    Args:
        micros: micro-batches of this process.
        share: the part of the step that these are; None: all of it.

    The caller sets learning rates and handles a step that was not `updated`. Clipped gradients stay in `.grad`.

    Raises:
        OutOfMemoryError: names the step's largest micro-batch and the setting to lower.
    """
    for parameter in model.parameters():
        parameter.grad = None  # of frozen ones too: one left by an earlier stage would count in the norm
    share, scale, visual = share or whole_share(model, micros), scaler.scale if scaler else 1.0, dict[str, Tensor]()
    sums, counts = accumulate(model, micros, weights, precision, scale, visual, share)
    with _memory_of(micros, share):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if scale != 1.0 and share.sums is None:
            torch._foreach_mul_(gradients, 1.0 / scale)
        norm = total_norm(gradients)
        loss = sum((sums[name] for name in weights if name in sums), torch.zeros((), device=norm.device))
        finite = torch.isfinite(norm) & torch.isfinite(loss)
    # Before an accelerator is waited for it has the optimizer's step, which leaves out what is not finite.
    on_card = finite if finite.is_cuda and isinstance(optimizer, AdamW) else None
    if gradients and (on_card is not None or finite):
        with needs_memory("the optimizer's state, twice the size of the trained weights,", OPTIMIZER_FIX):
            update(optimizer, norm, clip, on_card)
    numbers = torch.stack([x.to(norm.device, torch.float64) for x in (finite, norm, *sums.values())]).tolist()
    updated, grad_norm, totals = bool(numbers[0]), numbers[1], numbers[2:]
    if scaler:
        scaler.update(updated)
    terms = {name: total / max(counts[name], 1) for name, total in zip(sums, totals, strict=True)}
    num_targets = counts.get("preference", share.num_targets)
    return StepResult(terms, num_targets, grad_norm, updated, visual_figures(visual))


def _out_of_memory(error: Exception, micros: Sequence[RaggedBatch], share: Share) -> OutOfMemoryError:
    """Describe a memory error by the step's largest micro-batch."""
    largest = max(micros, key=lambda batch: batch.total_tokens)
    longest = int(largest.layout.lengths().max()) if largest.num_seqs else 0
    uncut = "; processes that wait for each other's passes do not cut it" if share.is_uncut else ""
    return OutOfMemoryError(
        f"a micro-batch of {number_of(largest.num_seqs, 'sequences')}, {number_of(largest.total_tokens, 'tokens')}, "
        f"the longest {longest}, "
        f"does not fit: {(str(error).splitlines() or [type(error).__name__])[0][:200]}{uncut}",
        where=f"peak memory {used_at_most() / 2**30:.2f} GiB",
        fix="lower plan.tokens_per_micro; it changes memory and never the result. "
        "For one long sequence lower plan.max_tokens",
    )


def non_finite(result: StepResult, step: int, names: list[str]) -> NonFiniteError:
    """Describe a step with a NaN or infinite loss or gradient, by its number and its examples."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return NonFiniteError(
        f"loss {result.terms.get('nll', float('nan')):.4g}, gradient norm {result.grad_norm:.4g} at step {step}",
        where=f"examples {shown}",
        fix="start a new run from these weights: train.init_from=RUN with a lower optim.lr or optim.clip, "
        "precision=fp32, or train.on_nonfinite=skip",
    )
