"""The certificate for a trainer of Hugging Face: the gradient of its first update is that of the sequences alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.certificate import ForeignCertificate, Kind
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, OWN_LOSS, Outcome, Precision, judge, refused
from unpad.proof.foreign.kinds import no_trainer_of_tokens
from unpad.proof.foreign.known import (
    Batch,
    Collated,
    Padding,
    example_of,
    known_of_masks,
    listed,
)
from unpad.proof.foreign.measure import (
    OWN,
    Measurement,
    Objective,
    logits_in_batches,
    moves,
    objective_of,
    one_at_a_time,
    take_gradient,
)
from unpad.proof.foreign.model import called, no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.precision import EPS, Errors, by_rounding
from unpad.proof.foreign.randomness import without_dropout
from unpad.proof.foreign.script import Script, read_script, without_holes
from unpad.proof.foreign.targets import Taken, are_shifted_before, logits_noted, target_taken
from unpad.proof.foreign.undisturbed import Accelerator, undisturbed
from unpad.proof.foreign.update import IGNORE, LABELS, Known, Update, read_batch, read_update, refuse_missing

Collate = Callable[[list[object]], Collated]
STOCK = ("transformers", "trl", "unpad")  # packages whose `compute_loss` is the mean over targets
LOSS_ONLY = ("fused_lm_head", "num_items_in_batch", "return_dict")  # inputs of a model that belong to its loss

DRAWN = "the data draw rows anew each time that they are read: the update is compared with those that were read for it"


@runtime_checkable
class Arguments(Protocol):
    """Arguments of a trainer."""

    gradient_accumulation_steps: int
    device: torch.device
    n_gpu: int
    optim: object


@runtime_checkable
class ForeignTrainer(Protocol):
    """A trainer of transformers, or one with the same methods."""

    model: nn.Module
    args: Arguments
    accelerator: Accelerator
    label_smoother: object | None
    compute_loss_func: object | None
    compute_loss: Callable[..., object]

    def get_train_dataloader(self) -> Iterable[Batch]: ...

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | int | None]: ...

    def training_step(
        self, model: nn.Module, inputs: dict[str, object], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor: ...


@runtime_checkable
class NamedLoss(Protocol):
    """Arguments that name a loss, as those of TRL."""

    loss_type: str


@runtime_checkable
class Packing(Protocol):
    """Arguments that say if rows hold several sequences, as those of TRL."""

    packing: bool


@runtime_checkable
class Cutting(Protocol):
    """Arguments with a longest length, as those of TRL."""

    max_length: int | None


@runtime_checkable
class Processing(Protocol):
    """A trainer with a tokenizer."""

    processing_class: object


@runtime_checkable
class HasEnd(Protocol):
    """A tokenizer with a token that ends sequences."""

    eos_token_id: int | None


@runtime_checkable
class HasPadding(Protocol):
    """A tokenizer with a token that pads."""

    pad_token_id: int | None


@runtime_checkable
class HasTokenizer(Protocol):
    """A collator with a tokenizer."""

    tokenizer: object


@runtime_checkable
class RouterLoss(Protocol):
    """A trainer that adds a router's auxiliary loss by itself, as that of TRL."""

    aux_loss_enabled: bool


class Origins(Protocol):
    """Object that knows from which rows of data, and by which collator, the examples of a trainer were made."""

    def sequence_before(self, example: object) -> Known: ...

    def batch_before(self, example: object) -> Batch: ...

    def draws_anew(self, example: object) -> bool: ...


@runtime_checkable
class HasOrigins(Protocol):
    """A trainer whose batches are made otherwise than it would by itself; its examples are not the data's."""

    attachment: Origins | None


@runtime_checkable
class Loader(Protocol):
    """A loader of torch."""

    collate_fn: Collate
    num_workers: int
    timeout: float


@runtime_checkable
class Adapter(Protocol):
    """A loader of accelerate, around one of torch."""

    base_dataloader: Loader


def prove_trainer(
    trainer: object,
    sequences: Sequence[Sequence[int]] | None = None,
    *,
    loss_masks: Sequence[Sequence[bool]] | None = None,
    precision: Precision = "auto",
) -> ForeignCertificate:
    """Prove that the first update of a trainer is, to its model, its sequences one at a time.

    What is judged goes through the trainer's own loader, `get_batch_samples` and `training_step`, without dropout, a
    router's auxiliary loss and mixed precision. Nothing is updated, and nothing is changed afterwards: weights,
    gradients, the optimizer, generators, modes, the trainer's state and order of data; only a stream of data that
    cannot be started again is read ahead.

    Args:
        trainer: a Trainer of transformers, SFTTrainer of TRL, or a subclass, built and not yet run.
        sequences: token ids of all sequences of the data; by default those that the trainer gives to its collator,
            which it may have cut before, taken apart where they say that they are packed.
        loss_masks: of `sequences`, True where a token is a target; by default all but the first.
        precision: as of `prove_callable`.

    Raises:
        ProofError: another kind of trainer; several processes; batches without labels; rows that are packed and do not
            say where sequences begin, without `sequences`.
    """
    if not isinstance(trainer, ForeignTrainer):
        raise ProofError(
            f"{type(trainer).__name__} is no trainer of transformers", fix="use unpad.prove_callable with its model"
        )
    _refuse_several(trainer)
    reason = no_trainer_of_tokens(trainer)
    if reason is not None:
        raise ProofError(reason.what, fix=reason.fix)
    with proving(trainer) as (model, notes):
        first = first_update(trainer)
        case = Case(trainer, model, first, sequences, loss_masks)
        if isinstance(trainer, HasOrigins) and trainer.attachment is not None and sequences is None:
            origins = trainer.attachment
            known = [origins.sequence_before(example) for example in first.examples]
            case = replace(case, known=known, alone=[origins.batch_before(example) for example in first.examples])
            if any(map(origins.draws_anew, first.examples)):
                notes.append(DRAWN)
        elif sequences is None:
            script = _script(trainer, first)
            case = replace(
                case,
                known=script.known,
                alone=script.alone,
                unjudged=script.unjudged,
                doubts=script.doubts,
                any_mean=True,
            )
        return judge(model, precision, case.measure, notes)


@contextmanager
def proving(trainer: ForeignTrainer) -> Iterator[tuple[nn.Module, list[str]]]:
    """The model of a trainer and notes on what is left out; inside, steps leave no trace and draw no dropout."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    with (
        untouched_generators(),
        undisturbed(trainer, trainer.accelerator),
        untouched(model),
        no_router_loss(model) as router,
        warnings.catch_warnings(),
        without_dropout(model),
    ):
        warnings.simplefilter("ignore")  # of a step that is not meant to be one
        if isinstance(trainer, RouterLoss):
            router |= trainer.aux_loss_enabled
            trainer.aux_loss_enabled = False
        notes = [NO_ROUTER_LOSS] if router else []
        if trainer.accelerator.mixed_precision != "no":
            notes.append(f"training will run in {trainer.accelerator.mixed_precision}; the proof does without")
        yield model, notes


def _refuse_several(trainer: ForeignTrainer) -> None:
    if trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1:
        raise ProofError("the trainer runs in several processes or on several devices", fix="prove it in one process")
    if "lomo" in str(trainer.args.optim).lower():
        raise ProofError("this optimizer changes weights during backward", fix="prove with another optim")


@dataclass(eq=False)
class Recorded:
    """Collator that keeps the examples of every call."""

    collate: Collate
    examples: list[list[object]] = field(default_factory=list)

    def __call__(self, examples: list[object]) -> Collated:
        self.examples.append(copy.deepcopy(examples))
        return self.collate(examples)


@contextmanager
def recording(loader: object) -> Iterator[Recorded]:
    """Record what the collator of a loader is given, in this process, and leave the collator itself as it is."""
    inner = loader.base_dataloader if isinstance(loader, Adapter) else loader
    if not isinstance(inner, Loader):
        yield Recorded(_no_batches)
        return
    before = (inner.collate_fn, inner.num_workers, inner.timeout)
    inner.collate_fn = recorded = Recorded(copy.deepcopy(inner.collate_fn))
    inner.num_workers, inner.timeout = 0, 0
    try:
        yield recorded
    finally:
        inner.collate_fn, inner.num_workers, inner.timeout = before


def _no_batches(examples: list[object]) -> Collated:
    return []


@dataclass(frozen=True, eq=False)
class FirstUpdate:
    """The micro-batches of the first update, as `get_batch_samples` returns them."""

    batches: list[Batch]
    num_items: Tensor | int | None
    examples: list[object]
    collate: Collate


def first_update(trainer: ForeignTrainer) -> FirstUpdate:
    """Take the first update from a trainer's loader.

    Raises:
        ProofError: the loader is empty.
    """
    loader = trainer.get_train_dataloader()
    with recording(loader) as recorded:
        iterator = iter(loader)
        wanted = trainer.args.gradient_accumulation_steps
        batches, num_items = trainer.get_batch_samples(iterator, wanted, trainer.args.device)
        if isinstance(iterator, Generator):
            iterator.close()
    if not batches:
        raise ProofError("the trainer's loader is empty", fix="give the trainer a train_dataset")
    # Loaders of accelerate are one batch ahead.
    examples = [example for call in recorded.examples[: len(batches)] for example in call]
    return FirstUpdate(batches, num_items, examples, recorded.collate)


@dataclass(frozen=True, eq=False)
class Step:
    """Results of `training_step` over the micro-batches of an update, and the inputs that the model got."""

    loss: float
    gradient: dict[str, Tensor]
    inputs: list[dict[str, object]]


def _step(trainer: ForeignTrainer, batches: Sequence[Batch], num_items: Tensor | int | None) -> Step:
    calls: list[dict[str, object]] = []

    def note(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled() and not args:
            calls.append(dict(kwargs))

    vars(trainer)["current_gradient_accumulation_steps"] = len(batches)  # as `train` does; there is none before
    loss, inputs = 0.0, []
    hook = trainer.model.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        for batch in batches:
            calls.clear()
            loss += float(trainer.training_step(trainer.model, dict(batch), num_items))
            given = next((call for call in calls if "input_ids" in call), dict(batch))
            inputs.append({name: value for name, value in given.items() if name not in (*LABELS, *LOSS_ONLY)})
    finally:
        hook.remove()
    return Step(loss, take_gradient(trainer.model), inputs)


@dataclass(frozen=True, eq=False)
class Case:
    """A trainer under proof with its first update.

    Args:
        sequences, loss_masks: as of `prove_trainer`.
        known: the sequences of the update with their targets; by default `sequences`, or those of its examples.
        alone: batch of each of `known`, for the trainer's own loss of it; by default the collator's.
        reference: loss and gradient of the sequences one at a time, by `exact`, that were measured before; compared
            with in place of those that the model has now.
        unjudged, doubts: as of `Outcome`.
        any_mean: whether a loss of the trainer's own may weigh sequences alike or be a sum, if the batches do so.
    """

    trainer: ForeignTrainer
    model: nn.Module
    first: FirstUpdate
    sequences: Sequence[Sequence[int]] | None = None
    loss_masks: Sequence[Sequence[bool]] | None = None
    known: list[Known] | None = None
    alone: Sequence[Batch] | None = None
    reference: Mapping[bool, Measurement] = field(default_factory=dict)
    unjudged: Mapping[Kind, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    any_mean: bool = False
    truths: dict[bool, Measurement] = field(default_factory=dict)  # that were measured here

    def measure(self, exact: bool) -> Outcome:
        """Both ways to compute the update; `exact` changes nothing, the weights are already in their precision."""
        try:
            step = self._step()
        except Exception as error:
            raise refused(error) from error
        update = _read(self.trainer, self.first, step, self.sequences, self.loss_masks, self.known, self.unjudged)
        truth = plain = self._truth(update)
        notes: tuple[str, ...] = ()
        taken: Taken = 1
        unjudged = self.unjudged
        has_own = _has_own_loss(self.trainer) or objective_of(self.model, update).own
        if has_own and "loss" not in unjudged:
            # A loss may divide by it; attach fills updates with other numbers of micro-batches, and none may.
            accumulation = 1 if self.any_mean else self.trainer.args.gradient_accumulation_steps
            own, over_rows = _alone_by_trainer(self.trainer, update, self._batch_alone, truth.logits, accumulation)
            is_own = own.errors(truth).loss > OWN
            if is_own:
                truth, notes = own, (OWN_LOSS,)
                taken = target_taken(update, partial(_pull, self.trainer, self._batch_alone))
            if self.any_mean:
                batches = [self._batch_alone(one) for one in _targeted(update)]
                probe = Probe(self.trainer, self.first, batches, update)
                truth, note, reason = probe.fitting(step, truth, over_rows, plain.loss if is_own else None)
                notes = (*notes, note) if note else notes
                unjudged = {**unjudged, **dict.fromkeys(("loss", "gradient"), reason)} if reason else unjudged
        if taken == 0 and are_shifted_before(update):
            raise ProofError(
                "labels are shifted before the loss, and the loss takes them as they are: the last target of a "
                "sequence is no token of it, which cannot be followed",
                fix="for the proof, label each token with itself and shift in the loss",
            )
        self.truths[exact] = truth
        if (before := self.reference.get(exact)) is not None:
            truth = replace(truth, loss=before.loss, gradient=before.gradient)
        forward = partial(called, self.trainer.model)
        found = Measurement(logits_in_batches(forward, update), step.loss, step.gradient)

        def rounding() -> Errors:
            return by_rounding(self.model, EPS, lambda: self._truth(update)).errors(plain)

        def again() -> list[Tensor]:
            return [*logits_in_batches(forward, update), *self._step().gradient.values()]

        notes = (*notes, *_perhaps_cut(self.trainer, update)) if self.sequences is None else notes
        return Outcome(
            update, truth, found, moves(forward, update), rounding, again, notes, taken, unjudged, self.doubts
        )

    def _batch_alone(self, one: Known) -> Batch:
        """The batch of a sequence alone."""
        if self.alone is not None and self.known is not None and one in self.known:
            return self.alone[self.known.index(one)]
        return listed(self.first.collate([example_of(one, self.first.examples[0])]))[0]

    def _step(self) -> Step:
        return _step(self.trainer, self.first.batches, self.first.num_items)

    def _truth(self, update: Update) -> Measurement:
        return one_at_a_time(self.model, update, Objective(returned=False, own=False))


def _read(
    trainer: ForeignTrainer,
    first: FirstUpdate,
    step: Step,
    sequences: Sequence[Sequence[int]] | None,
    loss_masks: Sequence[Sequence[bool]] | None,
    known: list[Known] | None,
    unjudged: Mapping[Kind, str],
) -> Update:
    """Find the sequences in what the model got."""
    labels = [{name: batch[name] for name in LABELS if name in batch} for batch in first.batches]
    batches = [read_batch({**inputs, **label}) for inputs, label in zip(step.inputs, labels, strict=True)]
    if "logits" in unjudged:  # rows are taken whole, whatever a mask hides inside
        batches = [without_holes(batch) for batch in batches]
    if known is not None:
        pass
    elif sequences is not None:
        known = known_of_masks(sequences, loss_masks)
    else:
        known = _script(trainer, first).known
    update = read_update(batches, known, complete=sequences is None)
    refuse_missing(update)
    return update


def _script(trainer: ForeignTrainer, first: FirstUpdate) -> Script:
    """The trainer's rows, as its collator makes them."""
    if not first.examples:
        raise ProofError("the trainer's loader has no collator to watch", fix="pass the token ids as sequences=")
    packed = isinstance(trainer.args, Packing) and trainer.args.packing
    padding = _padding_of(trainer, first.collate)
    return read_script(first.examples, first.collate, first.batches, packed=packed, padding=padding)


def _padding_of(trainer: ForeignTrainer, collate: Collate) -> Padding:
    """Tokens of the trainer's tokenizer, or of its collator's."""
    given = trainer.processing_class if isinstance(trainer, Processing) else None
    given = collate.tokenizer if given is None and isinstance(collate, HasTokenizer) else given
    padding = given.pad_token_id if isinstance(given, HasPadding) else None
    return Padding(padding, given.eos_token_id if isinstance(given, HasEnd) else None)


def _perhaps_cut(trainer: ForeignTrainer, update: Update) -> list[str]:
    """A note about sequences as long as the longest that the trainer lets pass."""
    longest = trainer.args.max_length if isinstance(trainer.args, Cutting) else None
    num = sum(len(one.ids) == longest for one in update.known)
    note = f"{num} sequences have exactly max_length = {longest} tokens: the trainer may have cut them before; pass the"
    return [f"{note} whole ones as sequences= to see"] if num else []


def _has_own_loss(trainer: ForeignTrainer) -> bool:
    """True if the loss may be another than the mean cross-entropy: a user's function or class, smoothing, or DFT."""
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
        return True
    named = isinstance(trainer.args, NamedLoss) and trainer.args.loss_type != "nll"
    methods = (trainer.compute_loss, trainer.get_batch_samples)
    return named or any(one.__module__.partition(".")[0] not in STOCK for one in methods)


def _alone_by_trainer(
    trainer: ForeignTrainer,
    update: Update,
    alone: Callable[[Known], Batch],
    logits: list[Tensor],
    accumulation: int,
) -> tuple[Measurement, Measurement]:
    """The trainer's own loss of every sequence as an update of its own: each weighted by its targets, and all alike."""
    loss, gradient, means = 0.0, dict[str, Tensor](), list[float]()
    equal: dict[str, Tensor] = {}
    num = len(_targeted(update))
    for piece in update.pieces:
        one = Known(update.ids_of(piece), update.labels_of(piece))
        count = sum(label != IGNORE for label in one.labels)
        if count:
            step = _step_alone(trainer, alone(one), accumulation)
            share = count / update.num_wanted
            loss += share * step.loss
            means.append(step.loss)
            for name, value in step.gradient.items():
                gradient[name] = gradient[name] + share * value if name in gradient else share * value
                equal[name] = equal[name] + value / num if name in equal else value / num
    mean = sum(means) / max(len(means), 1)
    return Measurement(logits, loss, gradient, mean), Measurement(logits, mean, equal, mean)


def _targeted(update: Update) -> list[Known]:
    """The pieces with a target."""
    pieces = [Known(update.ids_of(piece), update.labels_of(piece)) for piece in update.pieces]
    return [one for one in pieces if any(label != IGNORE for label in one.labels)]


def _step_alone(trainer: ForeignTrainer, batch: Batch, accumulation: int = 1) -> Step:
    """A batch as an update of its own, with a setting of the accumulation."""
    before = trainer.args.gradient_accumulation_steps
    trainer.args.gradient_accumulation_steps = accumulation
    try:
        batches, num_items = trainer.get_batch_samples(iter([dict(batch)]), 1, trainer.args.device)
        return _step(trainer, batches, num_items)
    finally:
        trainer.args.gradient_accumulation_steps = before


FITS = 1e-5  # relative difference of a loss and gradient from a mean that it is
BY_ROWS = "the loss is a mean over rows, each of which weighs alike whatever its targets"
BY_SUM = "the loss is a sum over rows, divided by nothing that depends on the batches"
COUPLED = "the loss couples the rows of a batch, so that a row alone has none to compare with"
OWN_SHARES = (
    "the loss has a normalisation of its own: it is no mean over targets or rows, and no sum, of the rows' losses"
)


@dataclass(frozen=True, eq=False)
class Probe:
    """Looks for what a loss of the trainer's own is, of the rows of an update.

    Args:
        alone: the batch of each sequence with a target.
    """

    trainer: ForeignTrainer
    first: FirstUpdate
    alone: list[Batch]
    update: Update

    def fitting(
        self, step: Step, truth: Measurement, over_rows: Measurement, usual: float | None
    ) -> tuple[Measurement, str, str]:
        """The measurement that the update is to be compared with, a note on it, and the reason if there is none.

        Args:
            usual: the mean cross-entropy over targets, if the loss is another; a sum of it that is divided by nothing
                is a division that was forgotten.
        """
        found = Measurement(truth.logits, step.loss, step.gradient)

        def fits(one: Measurement) -> bool:
            errors = found.errors(one)
            return max(errors.loss, errors.gradient) < FITS

        if fits(truth) or len(self.alone) < 2:
            return truth, "", ""
        if fits(over_rows) and self._weighs_alike():
            return over_rows, BY_ROWS, ""
        num = len(self.alone)
        total = {name: num * value for name, value in over_rows.gradient.items()}
        in_sum = replace(over_rows, loss=num * over_rows.loss, gradient=total)
        if usual is not None and fits(in_sum) and self._adds_up():
            forgotten = abs(in_sum.loss / (usual * self.update.num_wanted) - 1) < FITS
            return (truth, "", "") if forgotten else (in_sum, BY_SUM, "")
        if usual is None or self._counts_padding() or self._depends_on_division():
            return truth, "", ""
        return truth, "", COUPLED if self._couples() else OWN_SHARES

    def _weighs_alike(self) -> bool:
        """True if a batch of two unlike rows has the mean of their losses, and not that of their targets."""
        counts = [read_batch(one).num_targets for one in self.alone]
        one, two = (self.alone[index] for index in (counts.index(min(counts)), counts.index(max(counts))))
        if min(counts) == max(counts):
            return False
        losses = [_step_alone(self.trainer, batch).loss for batch in (one, two, _stacked(one, two))]
        return abs(losses[2] - (losses[0] + losses[1]) / 2) < FITS * abs(losses[2])

    def _adds_up(self) -> bool:
        """True if a batch of a row twice has twice its loss."""
        one = self.alone[0]
        once, twice = (_step_alone(self.trainer, batch).loss for batch in (one, _stacked(one, one)))
        return abs(twice - 2 * once) < FITS * abs(twice)

    def _counts_padding(self) -> bool:
        """True if more masked padding changes the loss of a row."""
        one = {"attention_mask": torch.ones_like(read_batch(self.alone[0]).ids), **self.alone[0]}
        plain, wider = (_step_alone(self.trainer, batch).loss for batch in (one, _widened(one, 7)))
        return abs(plain - wider) > FITS * abs(plain)

    def _depends_on_division(self) -> bool:
        """True if the same rows, divided otherwise among as many and as large batches, have another loss."""
        sizes = [len(read_batch(one).ids) for one in self.first.batches]
        if len(sizes) < 2 or sum(sizes) != len(self.alone):
            return False
        counts = [read_batch(one).num_targets for one in self.alone]
        ordered = [self.alone[index] for index in sorted(range(len(counts)), key=lambda index: counts[index])]
        losses = []
        for rows in (ordered, [*ordered[::2], *ordered[1::2]]):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            made = [_stacked(*rows[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
            taken, num_items = self.trainer.get_batch_samples(iter(made), len(made), self.trainer.args.device)
            losses.append(_step(self.trainer, taken, num_items).loss)
        return abs(losses[0] - losses[1]) > FITS * abs(losses[0]) and not self._couples()

    def _couples(self) -> bool:
        """True if what a token of one row changes in the loss depends on another row."""
        batch = next((one for one in self.first.batches if len(read_batch(one).ids) > 1), None)
        if batch is None:
            return False
        read = read_batch(batch)
        losses = []
        for changed in ((), (0,), (1,), (0, 1)):
            ids = read.ids.clone()
            for row in changed:
                real = read.real[row].nonzero().flatten()
                cell = int(real[len(real) // 2])
                ids[row, cell] = read.ids[row, int(real[-2])]
            given = read.with_ids(ids)
            losses.append(_step_alone(self.trainer, {**given, **read.labels}).loss)
        mixed = losses[0] - losses[1] - losses[2] + losses[3]
        return abs(mixed) > FITS * max(abs(losses[0] - losses[3]), FITS * abs(losses[0]))


def _widened(batch: Batch, more: int) -> Batch:
    """The batch of a row with more padding on the right."""
    shape = read_batch(batch).ids.shape

    def wide(name: str, value: object) -> object:
        if not isinstance(value, Tensor) or value.shape != shape:
            return value
        return nn.functional.pad(value, (0, more), value=IGNORE if name in LABELS else 0)

    return {name: wide(name, value) for name, value in batch.items()}


def _stacked(*rows: Batch) -> Batch:
    """Batches of one row each as one batch, padded on the right."""
    width = max(read_batch(row).ids.shape[1] for row in rows)
    full = [{**row, "attention_mask": torch.ones_like(read_batch(row).ids)} for row in rows]
    padded = [_widened(row, width - read_batch(row).ids.shape[1]) for row in full]
    names = [name for name, value in padded[0].items() if isinstance(value, Tensor)]
    return {name: torch.cat([value for row in padded if isinstance(value := row[name], Tensor)]) for name in names}


def _pull(
    trainer: ForeignTrainer, alone: Callable[[Known], Batch], ids: list[int], labels: list[int], given: list[int]
) -> Tensor | None:
    """Gradient of the trainer's loss of a sequence alone with respect to its logits; see `targets.Pull`."""
    batch = alone(Known(ids, labels))
    read = read_batch(batch)
    places = read_update([read], [Known(ids, labels)]).places(0)
    if len(places) != 1:
        return None
    _, row, cells = places[0]
    exchanged = dict(batch)
    for name, value in read.labels.items():
        shift = int(name == "shift_labels")
        values = torch.tensor(given[shift:] + [IGNORE] * shift).to(value)
        made = value.clone().reshape(read.ids.shape)
        made[row, cells] = torch.where(made[row, cells] == IGNORE, made[row, cells], values)
        exchanged[name] = made.reshape(value.shape)
    with logits_noted(trainer.model) as noted:
        _step_alone(trainer, exchanged)
    pulls = [logits.grad for logits in noted if logits.grad is not None and logits.shape[:-1] == read.ids.shape]
    return sum(pulls[1:], pulls[0])[row, cells] if pulls else None
