"""The certificate for a Hugging Face trainer: the gradient of its first update equals that of the sequences alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.certificate import ForeignCertificate, Kind
from unpad.proof.foreign.first_update import (
    LOSS_ONLY,
    Collate,
    FirstUpdate,
    ForeignTrainer,
    HasOrigins,
    TrainerStep,
    first_update,
    has_own_loss,
    is_users_own,
    proving,
    refuse_several,
    take_step,
    users_loss,
)
from unpad.proof.foreign.judge import OWN_LOSS, Outcome, Precision, judge, raise_memory, refused
from unpad.proof.foreign.kinds import no_trainer_of_tokens
from unpad.proof.foreign.known import Batch, Padding, example_of, known_of_masks, listed
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
)
from unpad.proof.foreign.model import called
from unpad.proof.foreign.own_loss import (
    FITS,
    NO_MEAN,
    OWN_STEP,
    alone_by_trainer,
    counts_padding,
    is_mean_of_means,
    pull,
)
from unpad.proof.foreign.script import Script, read_script
from unpad.proof.foreign.targets import Taken, are_shifted_before, target_taken
from unpad.proof.foreign.update import IGNORE, LABELS, Known, Update, read_batch, read_update, refuse_missing

OF_TOKENS = (  # inputs of a model that say which tokens there are, and where sequences begin
    *("input_ids", "attention_mask", "position_ids", "use_cache", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)


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
    refuse_several(trainer)
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
        update = _read(self.trainer, self.first, step, self.sequences, self.loss_masks, self.known)
        update = replace(update, given=self._given(update))
        truth = plain = self._truth(update)
        notes: tuple[str, ...] = ()
        taken: Taken = 1
        unjudged = self.unjudged
        has_own = has_own_loss(self.trainer) or objective_of(self.model, update).own
        if (has_own or is_users_own(self.trainer.training_step)) and "loss" not in unjudged:
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

        def again() -> UpdateResults:
            logits, step = logits_in_batches(forward, update), self._step()
            return UpdateResults(logits, step.loss, step.gradient)

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
            has_own,
        )

    def _by_own_loss(
        self, update: Update, step: TrainerStep, plain: UpdateResults, has_own: bool
    ) -> tuple[UpdateResults, tuple[str, ...], Taken, dict[Kind, str]]:
        """The truth of a loss or a step of the trainer's own: notes, its target, and reasons not to judge it.

        Args:
            plain: the truth of the mean cross-entropy.
            has_own: whether the loss may be another.
        """
        # A loss may divide by it; attach fills updates with other numbers of micro-batches, and none may.
        accumulation = 1 if self.any_mean else self.trainer.args.gradient_accumulation_steps
        counts = {index: sum(one != IGNORE for one in update.labels_of(at)) for index, at in enumerate(update.pieces)}
        counts = {index: count for index, count in counts.items() if count}
        alone = [self._batch_of(update, update.pieces[index]) for index in counts]
        weights = [count / update.num_wanted for count in counts.values()]
        own, losses = alone_by_trainer(self.trainer, alone, weights, plain.logits, accumulation)
        truth, notes = plain, tuple[str, ...]()
        taken: Taken = 1
        apart = own.errors(plain)  # of random weights the losses of any tokens are much alike
        if has_own and (apart.loss > OWN or (apart.loss > FITS and apart.gradient > OWN)):
            truth, notes = own, (OWN_LOSS,)
            taken = target_taken(update, partial(pull, self.trainer, self._batch_alone))
        if not self.any_mean:  # `attach` refuses what is not the truth
            return truth, notes, taken, {}
        found = UpdateResults(plain.logits, step.loss, step.gradient)
        errors, reasons = found.errors(truth), dict[Kind, str]()
        name = users_loss(self.trainer) or type(self.model).__name__
        is_stock = has_own_loss(self.trainer) and not users_loss(self.trainer)
        if has_own and not is_stock and errors.loss > FITS:
            by_piece = dict(zip(counts, losses, strict=True))
            if not is_mean_of_means(update, by_piece, step.loss) and not counts_padding(self.trainer, alone[0]):
                reasons = dict.fromkeys(("loss", "gradient"), NO_MEAN.format(name))
        if is_users_own(self.trainer.training_step) and errors.loss <= FITS:
            # A gradient that is the sum of those of the rows is compared with that of the loss: a part may be lost.
            least = min(errors.gradient, own.errors(truth).gradient, found.errors(own).gradient)
            reasons = {"gradient": OWN_STEP} if least > OWN else {}
        return truth, notes, taken, reasons

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
        return take_step(self.trainer, self.first.batches, self.first.num_items)

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
) -> Update:
    """Find the sequences in the model's inputs."""
    labels = [{name: batch[name] for name in LABELS if name in batch} for batch in first.batches]
    batches = [read_batch({**inputs, **label}) for inputs, label in zip(step.inputs, labels, strict=True)]
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
    packed = bool(getattr(trainer.args, "packing", False))
    padding = _padding_of(trainer, first.collate)
    return read_script(first.examples, first.collate, first.batches, packed=packed, padding=padding)


def _padding_of(trainer: ForeignTrainer, collate: Collate) -> Padding:
    """Tokens of the trainer's tokenizer, or of its collator's."""
    given = getattr(trainer, "processing_class", None) or getattr(collate, "tokenizer", None)
    return Padding(getattr(given, "pad_token_id", None), getattr(given, "eos_token_id", None))


def _perhaps_cut(trainer: ForeignTrainer, update: Update) -> list[str]:
    """A note about sequences as long as the longest that the trainer lets pass."""
    longest = getattr(trainer.args, "max_length", None)
    num = sum(len(one.ids) == longest for one in update.known)
    note = f"{num} sequences have exactly max_length = {longest} tokens: the trainer may have cut them before; pass the"
    return [f"{note} whole ones as sequences= to see"] if num else []
