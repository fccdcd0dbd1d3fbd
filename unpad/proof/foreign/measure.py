"""Logits, losses and gradients of a foreign model, alone and in batches, in fp64 or else with error bounds."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unpad.proof.foreign.model import (
    Inputs,
    accepts,
    alone_inputs,
    base_of,
    logits_alone,
    logits_of,
    loss_of,
    taken_labels,
)
from unpad.proof.foreign.update import IGNORE, LabelledSequence, Update

EXACT = 1e-10  # most error of a result in fp64
MARGIN = 32.0  # largest error of batching in fp32, in multiples of the error of the same sequences alone
EPS = torch.finfo(torch.float32).eps
LEAST = 16 * EPS  # least bound in fp32
T = TypeVar("T")


class Wide(TorchFunctionMode):
    """Replace requests for fp32 by fp64: norms, rotary tables, softmax and losses of models that are otherwise fp64."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*wide, **named)


@contextmanager
def wide() -> Iterator[None]:
    """Compute in fp64: requests for fp32 are replaced, and new tensors are fp64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Errors:
    """Relative errors of logits, the loss and the gradient; or their bounds."""

    logits: float
    loss: float
    gradient: float

    def bounds(self) -> "Errors":
        """Bounds for the same work in batches, in fp32, from the errors of sequences alone."""
        return Errors(*(max(LEAST, MARGIN * error) for error in (self.logits, self.loss, self.gradient)))


def relative(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over that of the truth; infinite for NaN and other shapes."""
    if found.shape != truth.shape:
        return float("inf")
    same = found == truth  # also infinities
    difference = float(torch.where(same, 0, found.double() - truth.double()).norm())
    size = float(torch.where(truth.isfinite(), truth.double(), 0).norm())
    error = difference / size if size > 0 else float("inf" if difference else 0)
    return error if error == error else float("inf")


def by_rounding(model: nn.Module, size: float, compute: Callable[[], T]) -> T:
    """A result with every weight changed by a random share of at most `size`; the weights are restored to the bit.

    The shares are always the same ones.
    """
    weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    kept = [parameter.data for parameter in weights]
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, data in zip(weights, kept, strict=True):
            share = torch.rand(data.shape, generator=generator, dtype=torch.float64).to(data.device)
            parameter.data = (data.double() * (1 + size * (2 * share - 1))).to(data.dtype)
        return compute()
    finally:
        for parameter, data in zip(weights, kept, strict=True):
            parameter.data = data


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[None]:
    """Weights and buffers in fp64, and computation in it; the model has its own weights again afterwards."""
    with eager_experts(model), _cast(model, (torch.float32, torch.bfloat16, torch.float16), torch.float64), wide():
        yield


def not_below_fp32(model: nn.Module) -> AbstractContextManager[None]:
    """Weights and buffers of less than fp32 in fp32; the model has its own again afterwards."""
    return _cast(model, (torch.bfloat16, torch.float16), torch.float32)


@contextmanager
def _cast(model: nn.Module, dtypes: Collection[torch.dtype], to: torch.dtype) -> Iterator[None]:
    weights = [(parameter, parameter.data) for parameter in model.parameters() if parameter.dtype in dtypes]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in dtypes
    ]
    try:
        for parameter, data in weights:
            parameter.data = data.to(to)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(to)
        yield
    finally:
        for parameter, data in weights:
            parameter.grad = None
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Experts of transformers one by one: their grouped products have no fp64."""
    base: Any = base_of(model)
    before = base.get_experts_implementation() if hasattr(base, "set_experts_implementation") else None
    if before is None:
        yield
        return
    base.set_experts_implementation("eager")
    try:
        yield
    finally:
        base.set_experts_implementation(before)


MOST_COLUMNS = 1024  # number of evenly spaced vocabulary entries with compared logits
OTHER_LOSS = 1e-4  # least relative difference of a loss that is not the mean cross-entropy
TRIED = 3  # sequences to find out if a model's own loss is the mean cross-entropy of its logits
Forward = Callable[[Inputs], object]


@dataclass(frozen=True, eq=False)
class UpdateResults:
    """Results of the sequences of one update.

    Args:
        logits: of every piece, (length, columns).
        loss: mean over the targets of the update.
        gradient: of that mean, by name, for trainable parameters.
    """

    logits: list[Tensor]
    loss: float
    gradient: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.logits, *self.gradient.values()]

    def errors(self, truth: "UpdateResults") -> Errors:
        """Relative errors against the reference."""
        pairs = zip(self.logits, truth.logits, strict=True)
        logits = max((relative(one, other) for one, other in pairs), default=0.0)
        loss = abs(self.loss - truth.loss) / max(abs(truth.loss), 1e-30)
        return Errors(logits, loss if loss == loss else float("inf"), gradient_error(self.gradient, truth.gradient))


def gradient_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Relative error of the norm over all parameters; one without a gradient has zeros."""
    difference = size = 0.0
    for name in {*found, *truth}:
        one, other = (side.get(name, torch.zeros(())) for side in (found, truth))
        difference += float((one.double() - other.double()).square().sum())
        size += float(other.double().square().sum())
    error = (difference / size) ** 0.5 if size > 0 else float("inf" if difference else 0)
    return error if error == error else float("inf")


@torch.no_grad()
def error_of_loss(model: nn.Module, sequences: Sequence[LabelledSequence]) -> float | None:
    """Relative error of the loss that a model returns of some sequences alone, given labels, beside the mean
    cross-entropy of its logits; None if it returns none."""
    if not accepts(model, "labels"):
        return None
    errors, device = [0.0], next(model.parameters()).device
    for one in sorted((one for one in sequences if one.num_targets), key=lambda one: len(one.ids))[:TRIED]:
        labels = torch.tensor([one.labels], device=device)
        output = model(**alone_inputs(model, one), labels=labels)
        returned = loss_of(output)
        if returned is None:
            return None
        expected = float(cross_entropy(logits_alone(output, labels)[:-1], labels[0, 1:])) / one.num_targets
        errors.append(abs(float(returned) - expected) / max(abs(expected), 1e-30))
    return max(errors)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the targets of logits, (..., vocabulary) and (...) int64, -100 where there is none."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, targets.flatten().to(logits.device), ignore_index=IGNORE, reduction="sum")


def one_at_a_time(model: nn.Module, sequences: Sequence[LabelledSequence]) -> UpdateResults:
    """Measure every sequence alone; gradients of `model` must be empty, and are empty afterwards."""
    logits, loss, total = [], 0.0, max(sum(one.num_targets for one in sequences), 1)
    for one in sequences:
        labels = torch.tensor([one.labels], device=next(model.parameters()).device)
        made = logits_alone(model(**alone_inputs(model, one)), labels)
        logits.append(_columns(made))
        if one.num_targets:
            loss += _backward(cross_entropy(made[:-1], labels[0, 1:]) / total)
    return UpdateResults(logits, loss, take_gradient(model))


def in_batches(model: nn.Module, update: Update, *, returned: bool) -> UpdateResults:
    """Measure the batches; each loss is weighted by its number of targets.

    Args:
        returned: True for the loss that the model returns given labels, False for that of its logits.
    """
    logits = dict[int, Tensor]()
    total, loss = max(update.num_labelled, 1), 0.0
    for index, batch in enumerate(update.batches):
        labels = taken_labels(model, batch) if returned and batch.num_targets else {}
        output = model(**batch.inputs, **labels)
        made = _take(logits, update, index, output)
        if batch.num_targets:
            mean = loss_of(output) if labels else None
            share = cross_entropy(made, batch.targets) if mean is None else mean * batch.num_targets
            loss += _backward(share / total)
    return UpdateResults([logits[piece] for piece in sorted(logits)], loss, take_gradient(model))


@torch.no_grad()
def logits_in_batches(forward: Forward, update: Update) -> list[Tensor]:
    """Logits of every piece, (length, columns).

    Args:
        forward: the model on one batch's inputs, without labels.
    """
    logits = dict[int, Tensor]()
    for index, batch in enumerate(update.batches):
        _take(logits, update, index, forward(batch.inputs))
    return [logits[piece] for piece in sorted(logits)]


def _take(pieces: dict[int, Tensor], update: Update, index: int, output: object) -> Tensor:
    """The logits of a batch, (rows, width, vocabulary); those of its pieces, (length, columns) each, go into a dict."""
    logits = logits_of(output, update.batches[index])
    for piece, row, cells in update.places(index):
        pieces[piece] = _columns(logits[row, cells])
    return logits


def _columns(logits: Tensor) -> Tensor:
    step = -(-logits.shape[-1] // MOST_COLUMNS)
    return logits[..., ::step].detach().clone()


def _backward(loss: Tensor) -> float:
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


def take_gradient(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name; the model has none afterwards."""
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradient


@dataclass(frozen=True)
class Moves:
    """Largest relative changes of a sequence's logits.

    Args:
        others: when other sequences of its batch change.
        filler: when the padding changes; None without padding.
        itself: when its own tokens change; None if no sequence shares a batch.
    """

    others: float
    filler: float | None
    itself: float | None


@torch.no_grad()
def moves(forward: Forward, update: Update, kept: Collection[int] = ()) -> Moves:
    """Change every second sequence of each batch, then the others, then the padding, and measure the effect on the
    rest.

    Args:
        forward: the model on one batch's inputs, without labels.
        kept: tokens that stay, such as those of pictures.
    """
    pool = _pool(update, kept)
    others, fillers, itself = 0.0, [], []
    for index, (batch, filler) in enumerate(zip(update.batches, update.filler, strict=True)):
        places = sorted(update.places(index), key=lambda place: (place[1], place[2].start))
        changes = [places[::2], places[1::2]] if len(places) > 1 else []
        if not changes and not bool(filler.any()):
            continue
        before = logits_of(forward(batch.inputs), batch)
        for changed in changes:
            ids = batch.ids.clone()
            for _, row, cells in changed:
                ids[row, cells] = _other(ids[row, cells], pool)
            after = logits_of(forward(batch.with_ids(ids)), batch)
            others = max([others, *_moved(before, after, [place for place in places if place not in changed])])
            itself += _moved(before, after, changed)
        if bool(filler.any()):
            other = torch.where(batch.ids == pool[0], pool[-1], pool[0])  # a token of the pool that differs from each
            ids = torch.where(filler, other, batch.ids)
            fillers += _moved(before, logits_of(forward(batch.with_ids(ids)), batch), places)
    return Moves(others, max(fillers, default=None), max(itself, default=None))


def _moved(before: Tensor, after: Tensor, places: Sequence[tuple[int, int, slice]]) -> list[float]:
    return [relative(after[row, cells], before[row, cells]) for _, row, cells in places]


def _pool(update: Update, kept: Collection[int]) -> Tensor:
    """Interchangeable tokens, sorted, (tokens,), without `kept` and those that mark the ends of sequences."""
    whole = [one.ids for one in update.sequences]
    ends = (Counter(ids[0] for ids in whole), Counter(ids[-1] for ids in whole))
    marks = {token for counts in ends for token, count in counts.items() if 2 * count > len(whole)}
    tokens = {token for ids in whole for token in ids}.difference(kept)
    tokens |= {int(tokens == {0})} if len(tokens) == 1 else set()  # a second one: 0 or 1
    device = update.batches[0].ids.device
    return torch.tensor(sorted(tokens - marks if len(tokens - marks) > 1 else tokens), device=device)


def _other(ids: Tensor, pool: Tensor) -> Tensor:
    """Another token of the pool for each that is in it."""
    place = torch.searchsorted(pool, ids).clamp(max=len(pool) - 1)
    return torch.where(pool[place] == ids, pool[(place + 1 + (len(pool) - 1) // 2) % len(pool)], ids)
