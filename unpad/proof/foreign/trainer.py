"""The certificate for a Hugging Face trainer: the gradient of its first update equals that of the sequences alone."""

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
from unpad.proof.foreign.causes import FITS, cause_of
from unpad.proof.foreign.certificate import ForeignCertificate, Kind
from unpad.proof.foreign.judge import (
    NO_ROUTER_LOSS,
    OWN_LOSS,
    Outcome,
    Precision,
    judge,
    no_cause,
    raise_memory,
    refused,
)
from unpad.proof.foreign.kinds import no_trainer_of_tokens
from unpad.proof.foreign.known import (
    Batch,
    Collated,
    Padding,
    example_of,
    known_of_masks,
    listed,
)
from unpad.proof.foreign.locate import Span
from unpad.proof.foreign.measure import (
    EPS,
    OWN,
    Errors,
    FollowedLoss,
    UpdateResults,
    by_rounding,
    logits_in_batches,
    moves,
    objective_of,
    one_at_a_time,
    relative,
    take_gradient,
)
from unpad.proof.foreign.model import called, no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.script import Script, read_script, without_holes
from unpad.proof.foreign.targets import Taken, are_shifted_before, logits_noted, target_taken
from unpad.proof.foreign.undisturbed import Accelerator, undisturbed, without_dropout
from unpad.proof.foreign.update import (
    IGNORE,
    LABELS,
    ForeignBatch,
    Known,
    Update,
    read_batch,
    read_update,
    refuse_missing,
)

Collate = Callable[[list[object]], Collated]
STOCK = ("transformers", "trl", "unpad")  # packages with a `compute_loss` that is the mean over targets
OF_TOKENS = (  # inputs of a model that say which tokens there are, and where sequences begin
    *("input_ids", "attention_mask", "position_ids", "use_cache", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
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
    """Object that knows the data rows and the collator from which the examples of a trainer were made."""

    def sequence_before(self, example: object) -> Known: ...

    def batch_before(self, example: object) -> Batch: ...

    def draws_anew(self, example: object) -> bool: ...


@runtime_checkable
class HasOrigins(Protocol):
    """A trainer with batches from another source than its own loader; its examples are not the data's."""

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
    """Prove that a trainer's model computes the same from its first update as from the sequences one at a time.

    What is judged goes through the trainer's own loader, `get_batch_samples` and `training_step`, without dropout, a
    router's auxiliary loss and mixed precision. Nothing is updated or left changed: weights, gradients, the optimizer,
    generators, modes, the trainer's state and order of data; only a data stream that cannot be restarted is read ahead.

    Args:
        trainer: a Trainer of transformers, SFTTrainer of TRL, or a subclass, built and not yet run.
        sequences: token ids of all sequences of the data; by default those that the trainer gives to its collator,
            which it may have cut before, split if they are marked as packed.
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
        case = TrainerCase(trainer, model, first, sequences, loss_masks)
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
    """The model of a trainer and notes on omitted parts; inside, steps have no side effects and no dropout."""
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
    """Record the inputs of a loader's collator, in this process, and leave the collator unchanged."""
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
    begin(trainer, loader)
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


@runtime_checkable
class Beginning(Protocol):
    """A trainer that makes the state of its training from a loader, as those of transformers 5."""

    args: Arguments

    def set_initial_training_values(
        self, args: Arguments, dataloader: object
    ) -> tuple[int, int, int, int, int, int | None, int]: ...

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: None,
        trial: None,
    ) -> object: ...


@runtime_checkable
class Scheduling(Protocol):
    """A trainer that makes its optimizer and learning rates when it begins to train."""

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: object | None

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None: ...


BEGUN = ("state", "is_in_train", "optimizer", "lr_scheduler")  # attributes of a trainer that `begin` gives


def begin(trainer: object, loader: object) -> None:
    """Give a trainer the state that `train` begins with, which a loss may read."""
    if not isinstance(trainer, Beginning):
        return
    try:
        num_epochs, steps_per_epoch, *_, max_steps = trainer.set_initial_training_values(trainer.args, loader)
    except ValueError:  # neither max_steps nor a length: `train` raises it too
        return
    trainer._init_training_state(max_steps, steps_per_epoch, num_epochs, None, None)
    vars(trainer)["is_in_train"] = True
    is_own = isinstance(trainer, ForeignTrainer) and (_has_own_loss(trainer) or _is_own(trainer.training_step))
    if is_own and isinstance(trainer, Scheduling) and "layerwise" not in str(trainer.args.optim):
        try:
            _schedule(trainer, max_steps)
        except Exception as error:  # `train` raises it too
            raise_memory(error)


def _schedule(trainer: Scheduling, max_steps: int) -> None:
    """Make what a loss may read learning rates of; a schedule changes its optimizer, so a user's is copied."""
    if trainer.optimizer is not None and trainer.lr_scheduler is None:
        vars(trainer)["optimizer"] = made = copy.copy(trainer.optimizer)
        made.param_groups = [dict(group) for group in made.param_groups]
    trainer.create_optimizer_and_scheduler(max_steps)


@dataclass(frozen=True, eq=False)
class TrainerStep:
    """Results of `training_step` over the micro-batches of an update, and the inputs that the model got."""

    loss: float
    gradient: dict[str, Tensor]
    inputs: list[dict[str, object]]


def _step(trainer: ForeignTrainer, batches: Sequence[Batch], num_items: Tensor | int | None) -> TrainerStep:
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
    return TrainerStep(loss, take_gradient(trainer.model), inputs)


@dataclass(frozen=True, eq=False)
class TrainerCase:
    """A trainer under proof with its first update.

    Args:
        sequences, loss_masks: as of `prove_trainer`.
        known: the sequences of the update with their targets; by default `sequences`, or those of its examples.
        alone: batch of each of `known`, for the trainer's own loss of it; by default the collator's.
        reference: earlier measured loss and gradient of the sequences one at a time, by `exact`; replaces a measurement
            of the current model.
        unjudged, doubts: as of `Outcome`.
        any_mean: whether the trainer's own loss may weight sequences equally or be a sum, if the batches do so.
    """

    trainer: ForeignTrainer
    model: nn.Module
    first: FirstUpdate
    sequences: Sequence[Sequence[int]] | None = None
    loss_masks: Sequence[Sequence[bool]] | None = None
    known: list[Known] | None = None
    alone: Sequence[Batch] | None = None
    reference: Mapping[bool, UpdateResults] = field(default_factory=dict)
    unjudged: Mapping[Kind, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    any_mean: bool = False
    truths: dict[bool, UpdateResults] = field(default_factory=dict)  # that were measured here

    def measure(self, exact: bool) -> Outcome:
        """Both ways to compute the update, where weights are in their precision already; `exact` for fp64."""
        if exact:
            alone = None if self.alone is None else [_in_fp64(batch) for batch in self.alone]
            first = replace(self.first, batches=[_in_fp64(batch) for batch in self.first.batches])
            return replace(self, alone=alone, first=first)._measured(exact)
        return self._measured(exact)

    def _measured(self, exact: bool) -> Outcome:
        try:
            step = self._step()
        except Exception as error:
            raise refused(error) from error
        update = _read(self.trainer, self.first, step, self.sequences, self.loss_masks, self.known, self.unjudged)
        update = replace(update, given=self._given(update))
        truth = plain = self._truth(update)
        notes: tuple[str, ...] = ()
        taken: Taken = 1
        unjudged = self.unjudged
        has_own = _has_own_loss(self.trainer) or objective_of(self.model, update).own
        if (has_own or _is_own(self.trainer.training_step)) and "loss" not in unjudged:
            truth, notes, taken, reasons = self._by_own_loss(update, step, plain, has_own)
            unjudged = {**unjudged, **reasons}
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
        found = UpdateResults(logits_in_batches(forward, update), step.loss, step.gradient)

        def rounding() -> Errors:
            return by_rounding(self.model, EPS, lambda: self._truth(update)).errors(plain)

        def again() -> list[Tensor]:
            return [*logits_in_batches(forward, update), *self._step().gradient.values()]

        notes = (*notes, *_perhaps_cut(self.trainer, update)) if self.sequences is None else notes
        return Outcome(
            update,
            truth,
            found,
            moves(forward, update),
            rounding,
            again,
            notes,
            taken,
            unjudged,
            self.doubts,
            partial(self._cause, update, truth.loss) if has_own else no_cause,
            has_own,
        )

    def _by_own_loss(
        self, update: Update, step: TrainerStep, plain: UpdateResults, has_own: bool
    ) -> tuple[UpdateResults, tuple[str, ...], Taken, dict[Kind, str]]:
        """The truth of a loss or a step of the trainer's own: with notes, its target, and reasons not to judge it.

        Args:
            plain: the truth of the mean cross-entropy.
            has_own: whether the loss may be another.
        """
        # A loss may divide by it; attach fills updates with other numbers of micro-batches, and none may.
        accumulation = 1 if self.any_mean else self.trainer.args.gradient_accumulation_steps
        pieces = _targeted(update)
        alone = [self._batch_of(update, piece) for piece in pieces]
        shares = _own_shares(self.trainer, alone, self.first.num_items)
        own, over_rows = _alone_by_trainer(self.trainer, update, pieces, alone, shares, plain.logits, accumulation)
        truth, notes = plain, tuple[str, ...]()
        taken: Taken = 1
        apart = own.errors(plain)  # of random weights the losses of any tokens are much alike
        is_own = has_own and (apart.loss > OWN or (apart.loss > FITS and apart.gradient > OWN))
        if is_own:
            truth, notes = own, (OWN_LOSS,)
            taken = target_taken(update, partial(_pull, self.trainer, self._batch_alone))
        if not self.any_mean:
            return truth, notes, taken, {}
        probe, reasons = Probe(self.trainer, self.first, alone, update), dict[Kind, str]()
        if has_own:
            truth, note, reason = probe.fitting(step, truth, over_rows, plain.loss if is_own else None)
            notes = (*notes, note) if note else notes
            reasons = dict.fromkeys(("loss", "gradient"), reason) if reason else {}
        if not reasons and _is_own(self.trainer.training_step) and probe.makes_another_gradient(step, truth, own):
            reasons = {"gradient": OWN_STEP}
        return truth, notes, taken, reasons

    def _cause(self, update: Update, truth: float) -> str:
        """Cause for which a loss of the trainer's own is wrong, as far as it shows."""
        batches = [self._batch_of(update, piece) for piece in _targeted(update)]
        if divisor := _own_divisor(self.trainer):
            counts = _divisors(self.trainer, batches)
            if counts and self.first.num_items is not None and not _adds_up(counts, float(self.first.num_items)):
                return (
                    f"{divisor} is {float(self.first.num_items):g} for the update, and {sum(counts):g} for its "
                    "sequences one at a time: the loss depends on how they are batched"
                )
        num_items, args = self.first.num_items, self.trainer.args

        def loss(tried: Sequence[Batch], factor: int, accumulation: int) -> float:
            before = args.gradient_accumulation_steps
            args.gradient_accumulation_steps = accumulation * before
            try:
                return _step(self.trainer, tried, None if num_items is None else factor * num_items).loss
            finally:
                args.gradient_accumulation_steps = before

        rows = [(index, row) for index in range(len(update.batches)) for _, row, _ in update.places(index)]
        return cause_of(loss, self.first.batches, batches, truth, len(rows) > len(set(rows)))

    def _given(self, update: Update) -> dict[int, dict[str, object]]:
        """Inputs of each sequence besides its tokens, as the batch of the sequence alone has them."""
        names = {name for batch in update.batches for name, value in batch.inputs.items() if value is not None}
        names -= {*OF_TOKENS, *LABELS, *LOSS_ONLY}
        masks = [batch.inputs.get("attention_mask") for batch in update.batches]
        names |= {"attention_mask"} if all(isinstance(one, Tensor) and one.dim() > 2 for one in masks) else set()
        return {index: self._given_of(update, index, names) for index in range(len(update.known))} if names else {}

    def _given_of(self, update: Update, index: int, names: set[str]) -> dict[str, object]:
        one = update.known[index]
        try:
            batch = self.alone[index] if self.alone is not None else self._batch_alone(one)
            read = read_batch(batch)
        except Exception as error:  # a collator that lacks columns of rows that were given as sequences=
            raise_memory(error)
            return {}
        places = read_update([read], [one]).places(0)
        if len(places) != 1:
            return {}
        _, row, cells = places[0]
        given: dict[str, object] = {}
        for name in names.intersection(batch):
            value = batch[name]
            if isinstance(value, Tensor) and value.shape[:2] == read.ids.shape and value.dim() < 4:
                given[name] = value[row : row + 1, cells]
            elif read.ids.shape == (1, len(one.ids)):  # of the row, which is this sequence
                given[name] = value
        return given

    def _batch_of(self, update: Update, piece: Span) -> Batch:
        """The batch of a piece alone."""
        if self.alone is not None and piece.length == len(update.known[piece.sequence].ids):
            return self.alone[piece.sequence]
        return self._batch_alone(Known(update.ids_of(piece), update.labels_of(piece)))

    def _batch_alone(self, one: Known) -> Batch:
        """The batch of a sequence alone."""
        if self.alone is not None and self.known is not None and one in self.known:
            return self.alone[self.known.index(one)]
        return listed(self.first.collate([example_of(one, self.first.examples[0])]))[0]

    def _step(self) -> TrainerStep:
        return _step(self.trainer, self.first.batches, self.first.num_items)

    def _truth(self, update: Update) -> UpdateResults:
        return one_at_a_time(self.model, update, FollowedLoss(returned=False, own=False))


def _in_fp64(batch: Batch) -> Batch:
    """A batch with its numbers in fp64: attention reads a mask of another precision than its own wrongly."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _read(
    trainer: ForeignTrainer,
    first: FirstUpdate,
    step: TrainerStep,
    sequences: Sequence[Sequence[int]] | None,
    loss_masks: Sequence[Sequence[bool]] | None,
    known: list[Known] | None,
    unjudged: Mapping[Kind, str],
) -> Update:
    """Find the sequences in the model's inputs."""
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
    """True if the loss may differ from the mean cross-entropy: a user's function or class, smoothing, or DFT."""
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
        return True
    named = isinstance(trainer.args, NamedLoss) and trainer.args.loss_type != "nll"
    return named or _is_own(trainer.compute_loss) or bool(_own_divisor(trainer))


def _is_own(method: Callable[..., object]) -> bool:
    """True for a method of a user's own."""
    return str(getattr(method, "__module__", "")).partition(".")[0] not in STOCK


@runtime_checkable
class Counting(Protocol):
    """A trainer with a method that counts what a loss is divided by, as those of transformers."""

    _get_num_items_in_batch: Callable[..., object]


def _own_divisor(trainer: ForeignTrainer) -> str:
    """Name of the user's own method that makes the number of items of an update; empty if there is none."""
    methods: list[Callable[..., object]] = [trainer.get_batch_samples]
    methods += [trainer._get_num_items_in_batch] if isinstance(trainer, Counting) else []
    return next((getattr(one, "__qualname__", "get_batch_samples") for one in methods if _is_own(one)), "")


def _divisors(trainer: ForeignTrainer, alone: Sequence[Batch]) -> list[float]:
    """The number of items of each batch as an update of its own; none if one has none."""
    device = trainer.args.device
    counts = [trainer.get_batch_samples(iter([dict(batch)]), 1, device)[1] for batch in alone]
    return [] if any(count is None for count in counts) else [float(count) for count in counts if count is not None]


def _adds_up(counts: Sequence[float], total: float) -> bool:
    return abs(sum(counts) - total) <= FITS * abs(total)


def _own_shares(trainer: ForeignTrainer, alone: Sequence[Batch], num_items: Tensor | int | None) -> list[float] | None:
    """The share of each sequence in the update by a divisor of the trainer's own; None where targets are counted.

    A divisor that is not the sum of those of the sequences is none: it depends on the batches.
    """
    if num_items is None or not _own_divisor(trainer):
        return None
    counts, total = _divisors(trainer, alone), float(num_items)
    return [count / total for count in counts] if counts and total and _adds_up(counts, total) else None


def _alone_by_trainer(
    trainer: ForeignTrainer,
    update: Update,
    pieces: Sequence[Span],
    alone: Sequence[Batch],
    shares: Sequence[float] | None,
    logits: list[Tensor],
    accumulation: int,
) -> tuple[UpdateResults, UpdateResults]:
    """The trainer's own loss of every sequence as an update of its own: each by its share, and all alike.

    Args:
        pieces, alone: the pieces with a target, and the batch of each alone.
        shares: of the pieces, by default those of their targets.
    """
    loss, gradient, means = 0.0, dict[str, Tensor](), list[float]()
    equal: dict[str, Tensor] = {}
    num = len(pieces)
    counts = [sum(label != IGNORE for label in update.labels_of(piece)) / update.num_wanted for piece in pieces]
    for share, batch in zip(shares or counts, alone, strict=True):
        step = _step_alone(trainer, batch, accumulation)
        loss += share * step.loss
        means.append(step.loss)
        for name, value in step.gradient.items():
            gradient[name] = gradient[name] + share * value if name in gradient else share * value
            equal[name] = equal[name] + value / num if name in equal else value / num
    mean = sum(means) / max(num, 1)
    return UpdateResults(logits, loss, gradient, mean), UpdateResults(logits, mean, equal, mean)


def _targeted(update: Update) -> list[Span]:
    """The pieces with a target."""
    return [piece for piece in update.pieces if any(label != IGNORE for label in update.labels_of(piece))]


def _step_alone(trainer: ForeignTrainer, batch: Batch, accumulation: int = 1) -> TrainerStep:
    """A batch as an update of its own, with a setting of the accumulation."""
    before = trainer.args.gradient_accumulation_steps
    trainer.args.gradient_accumulation_steps = accumulation
    try:
        batches, num_items = trainer.get_batch_samples(iter([dict(batch)]), 1, trainer.args.device)
        return _step(trainer, batches, num_items)
    finally:
        trainer.args.gradient_accumulation_steps = before


BY_ROWS = "the loss is a mean over rows, each of which weighs alike whatever its targets"
BY_SUM = "the loss is a sum over rows, divided by nothing that depends on the batches"
COUPLED = "the loss couples the rows of a batch, so that a row alone has none to compare with"
OWN_SHARES = (
    "the loss has a normalisation of its own: it is no mean over targets or rows, and no sum, of the rows' losses"
)
OWN_STEP = (
    "training_step makes a gradient of its own, which of several rows is not the sum of theirs: there is none to "
    "compare with"
)


@dataclass(frozen=True, eq=False)
class Probe:
    """Determines how a trainer's own loss combines the rows of an update.

    Args:
        alone: the batch of each sequence with a target.
    """

    trainer: ForeignTrainer
    first: FirstUpdate
    alone: list[Batch]
    update: Update

    def fitting(
        self, step: TrainerStep, truth: UpdateResults, over_rows: UpdateResults, usual: float | None
    ) -> tuple[UpdateResults, str, str]:
        """The measurement to compare the update with, a note on it, and the reason if there is none.

        Args:
            usual: the mean cross-entropy over targets, if the loss is another; a sum of it that is divided by nothing
                is a division that was forgotten.
        """
        found = UpdateResults(truth.logits, step.loss, step.gradient)

        def fits(one: UpdateResults) -> bool:
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
        if usual is not None and self._counts_padding():
            return truth, "", ""
        if self._couples():
            return truth, "", COUPLED
        return truth, "", "" if usual is None or self._depends_on_division() else OWN_SHARES

    def makes_another_gradient(self, step: TrainerStep, truth: UpdateResults, own: UpdateResults) -> bool:
        """True if the trainer's step makes another gradient than that of its loss, as an adversarial one does.

        A gradient that is the sum of those of the rows is compared with that of the loss: a part of it may be lost.

        Args:
            truth: of the loss; own: of the trainer's steps of the rows alone.
        """
        found = UpdateResults(truth.logits, step.loss, step.gradient)
        errors = found.errors(truth)
        if errors.loss >= FITS or errors.gradient < OWN or own.errors(truth).gradient < OWN:
            return False
        return found.errors(own).gradient > OWN

    def _weighs_alike(self) -> bool:
        """True if the loss of a batch of two different rows is the mean over rows, not over targets."""
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
        steps = []
        for rows in (ordered, [*ordered[::2], *ordered[1::2]]):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            made = [_stacked(*rows[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
            taken, num_items = self.trainer.get_batch_samples(iter(made), len(made), self.trainer.args.device)
            steps.append(_step(self.trainer, taken, num_items))
        one, two = (step.loss for step in steps)
        return abs(two - one) > FITS * abs(one)

    def _couples(self) -> bool:
        """True if the effect of a token in one row on the loss, or the weights of its targets, depend on another."""
        reads = [read for read in map(read_batch, self.first.batches) if len(read.ids) > 1]
        return any(map(self._share_weights, reads)) or (bool(reads) and self._mixes(reads[0]))

    def _mixes(self, read: ForeignBatch) -> bool:
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

    def _share_weights(self, read: ForeignBatch) -> bool:
        """True if the loss pulls otherwise at the logits of every second row of a batch when the others are turned."""
        pulls = []
        for turned in (False, True):
            ids = read.ids.clone()
            for row in range(1, turned * len(ids), 2):  # as many tokens and targets, and other losses of them
                ids[row, read.real[row]] = read.ids[row, read.real[row]].flip(0)
            with logits_noted(self.trainer.model) as noted:
                _step_alone(self.trainer, {**read.with_ids(ids), **read.labels})
            pulls += [one.grad for one in noted if one.grad is not None and one.shape[:-1] == read.ids.shape][:1]
        learnt = read.targets[::2] != IGNORE
        return len(pulls) == 2 and relative(pulls[1][::2][learnt], pulls[0][::2][learnt]) > FITS


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
