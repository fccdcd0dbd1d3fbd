"""Our plan, flat batches and evaluation in Trainer of transformers and SFTTrainer of TRL."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from unpad.batching.ledger import Ledger
from unpad.errors import RecipeError
from unpad.hf.checks import (
    PROMISED,
    MeanOverTargets,
    ProvedModel,
    Settings,
    check_alike,
    divide_by_targets,
    group_of,
    is_sft,
    keeps_evaluation,
    loss_of_ones_own,
    refuse,
    stop_packing,
    trial,
    warn_of_cuts,
)
from unpad.hf.head import TargetHead, add_target_head
from unpad.hf.loader import (
    IGNORED,
    PLAN,
    Examples,
    PlannedBatches,
    Ranks,
    collate,
    is_streamed,
    refuse_other_plan,
)
from unpad.hf.prepare import Prepared, preparing
from unpad.hf.rows import CollatedRows
from unpad.hf.update import OwnUpdate, doubts_of_own, prove_ours, take_own
from unpad.processes.group import Group
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.lengths import refuse_long
from unpad.proof.foreign.undisturbed import own_counts


@dataclass(repr=False)
class Attachment:
    """State that `attach` gives to a trainer.

    Args:
        tokens_per_micro, tokens_per_eval: most tokens of a micro-batch in training and evaluation.
        prepared: the model, and its isolated layers.
        head: mode in which the loss is computed; see `TargetHead`.
        model: the model as it was proved, which must compute what flat batches give.
        own: an update of the trainer's own, before anything was replaced; None if no proof was asked for.
        rows_of: rows of a dataset as the trainer's collator gives them.
        examples: of every dataset that was read.
        loss: name of a loss of the user's own, which gets all logits; empty for others.
        keeps_evaluation: whether the user's own class makes the batches of evaluations, or reads them.
        promised: what must stay as it was when the update was proved.
        group: the processes that train together.
        certificate: the proof of the same update on flat batches; None if no proof was asked for.
    """

    tokens_per_micro: int
    tokens_per_eval: int
    prepared: Prepared
    head: TargetHead
    model: ProvedModel
    own: OwnUpdate | None
    rows_of: Callable[[Any], CollatedRows]
    examples: dict[int, tuple[object, Examples]]
    loss: str
    keeps_evaluation: bool
    group: Group
    certificate: ForeignCertificate | None = None
    promised: Settings = field(default_factory=lambda: Settings({}))
    evaluated: MeanOverTargets = field(default_factory=MeanOverTargets)
    trained: Examples | None = None  # those of the last loader for training
    plan: dict[str, Any] = field(default_factory=dict)  # identity of the plan of that loader

    def __repr__(self) -> str:
        proof = self.certificate
        verdict = f"{proof.verdict} in {proof.precision}" if proof else "not proved"
        return f"Attachment(tokens_per_micro={self.tokens_per_micro}, {verdict})"

    def examples_of(self, data: Any) -> Examples:
        """The examples of a dataset, with lengths that are read once."""
        if id(data) not in self.examples:
            rows = self.rows_of(data)
            self.examples[id(data)] = (data, Examples(rows))
        return self.examples[id(data)][1]

    def check(self, trainer: Trainer, called: nn.Module | None = None) -> None:
        """Refuse a trainer with another update than was proved; `called` as of `ProvedModel.check`."""
        self.promised.check(trainer)
        self.model.check(trainer, called)

    def ledger(self, data: Any) -> Ledger:
        """The fate of every token of a dataset in one epoch."""
        return PlannedBatches(self.examples_of(data), self.tokens_per_micro, epochs=1, seed=0).ledger

    @property
    def rows(self) -> CollatedRows:
        """The data's rows by the collator that the trainer had, of which its batches are made."""
        rows = None if self.trained is None else self.trained.data
        if not isinstance(rows, CollatedRows):
            raise RecipeError(
                "the trainer's batches are not those of unpad.hf.attach: another loader makes them since then",
                fix="call unpad.hf.attach again after the change, or prove the trainer before it",
            )
        return rows


METRICS = (
    "compute_metrics still reads the trainer's own batches, padded: leave out the places whose labels are -100, or its "
    "result depends on how rows are batched"
)
EVALUATION = "eval_loss is now the mean over all targets of the set; the trainer's own is a mean of batches' means"


class UnpadMixin(Trainer):
    """Trainer with our plan, flat batches and exact evaluation, which `attach` mixes into the class of a trainer.

    `per_device_train_batch_size` no longer says anything: a micro-batch has up to `tokens_per_micro` tokens, and a step
    `gradient_accumulation_steps` of them on every rank.
    """

    attachment: Attachment

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Micro-batches of the plan of every epoch."""
        attachment = self.attachment
        attachment.check(self)
        examples = attachment.trained = attachment.examples_of(self.train_dataset)
        tokens, args = attachment.tokens_per_micro, self.args
        epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:  # the plan fills micro-batches, so that an epoch has at least so many
            least = max(1, int(examples.lengths[examples.targets > 0].sum()) // tokens)
            per_step = args.gradient_accumulation_steps * attachment.group.size
            epochs = math.ceil(args.max_steps * per_step / least)
        seed = args.seed if args.data_seed is None else args.data_seed
        ranks = Ranks(attachment.group.rank, attachment.group.size, args.gradient_accumulation_steps)
        planned = PlannedBatches(examples, tokens, epochs=epochs, seed=seed, ranks=ranks)
        attachment.plan = planned.identity()
        return self._flat_batches(examples, planned)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, with the plan in the state that checkpoints keep.

        Raises:
            ResumeError: the checkpoint is of another plan, by which other rows would be skipped than were trained.
        """
        done = super()._init_training_state(*args, **kwargs)
        kept = self.state.stateful_callbacks
        if self.state.global_step and not self.args.ignore_data_skip:
            refuse_other_plan(kept.get(PLAN), self.attachment.plan)
        kept[PLAN] = self.attachment.plan
        return done

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Flat batches of an evaluation set, of the dataset by that name, or of the trainer's own.

        Streams, and metrics, which read rows as the collator makes them, keep the trainer's own ones.
        """
        attachment = self.attachment
        if attachment.keeps_evaluation:
            own: DataLoader[Any] = super().get_eval_dataloader(eval_dataset)
            return own
        attachment.check(self)
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            data = self.eval_dataset[eval_dataset]
        if data is None:
            raise RecipeError("the trainer has no eval_dataset", fix="pass eval_dataset to the trainer or to evaluate")
        if is_streamed(data) or self.compute_metrics is not None:
            padded: DataLoader[Any] = super().get_eval_dataloader(eval_dataset)
            return padded
        examples, ranks = attachment.examples_of(data), Ranks(attachment.group.rank, attachment.group.size)
        planned = PlannedBatches(examples, attachment.tokens_per_eval, epochs=1, seed=0, ranks=ranks)
        return self._flat_batches(examples, planned)

    def _flat_batches(self, examples: Examples, sampler: Sampler[list[int]]) -> DataLoader[Any]:
        args = self.args
        loader = DataLoader(
            examples,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        accelerator = self.accelerator
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,  # the sampler has the batches of this rank alone
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        return prepared

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """A micro-batch, forward and backward, with logits of targets alone."""
        self.attachment.model.check(self, model)
        with self._targets_alone():
            loss: Tensor = super().training_step(model, *args, **kwargs)
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A batch of an evaluation, with its loss counted by its targets."""
        attachment = self.attachment
        if attachment.keeps_evaluation:
            own: tuple[Any, Any, Any] = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
            return own
        if "cu_seq_lens_q" in inputs:
            attachment.model.check(self, model)
        labels = inputs.get("labels")
        num_targets = 0 if labels is None else int((labels[..., 1:] != IGNORED).sum())
        with self._targets_alone() if prediction_loss_only else nullcontext(), own_counts(self.args):
            loss, logits, given = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is not None:
            attachment.evaluated.add(loss, num_targets)
            loss = loss.float()  # a rank without targets has no other type
        return loss, logits, given

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """An evaluation, with the mean over the targets of the whole set for its loss."""
        attachment = self.attachment
        if attachment.keeps_evaluation:
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        evaluated, group = MeanOverTargets(), attachment.group
        examples = dataloader.dataset
        if isinstance(examples, Examples):
            told = group.exchange([attachment.tokens_per_eval, examples.digest()])
            check_alike("sequences of evaluation", told)
        attachment.evaluated = evaluated
        out = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if group.size > 1:  # accelerate's own loaders repeat sequences on the last ranks
            parts = group.exchange([evaluated.total, evaluated.num_targets]) if isinstance(examples, Examples) else []
            evaluated = MeanOverTargets.of_parts(parts)
        if evaluated.num_targets:
            out.metrics[f"{metric_key_prefix}_loss"] = evaluated.mean
        return out

    def _targets_alone(self) -> AbstractContextManager[None]:
        """Compute the loss alone inside, unless a loss of the user's own reads logits."""
        needs_all = self.attachment.loss or self.compute_loss_func is not None
        return nullcontext() if needs_all else self.attachment.head.alone()


def attach(
    trainer: Trainer, tokens_per_micro: int = 4096, *, tokens_per_eval: int | None = None, prove: bool = True
) -> Attachment:
    """Give a trainer our plan, flat batches without padding, and exact evaluation.

    The trainer's class becomes a subclass of its own with `UnpadMixin`. An update of rows of the data is proved first:
    in flat batches its sequences are what they are one at a time. A trainer that is refused, and its model, are as they
    were before.

    Args:
        trainer: a Trainer or an SFTTrainer, before `train`. Rows that SFTTrainer packed are taken apart again.
        tokens_per_micro: most tokens of a micro-batch; a longer example is a micro-batch of its own.
        tokens_per_eval: the same in evaluation, whose result does not depend on it; by default as in training.
        prove: False leaves the proof out, for a model that was proved before.

    Raises:
        RecipeError: the trainer batches by itself, or its ranks hold parts of the model.
        UnlikeProcessesError: ranks have other data or arguments.
        SourceError: its dataset is streamed or not tokenized.
        ProofError: the model does not keep the sequences of a flat batch apart.
    """
    group, args = group_of(trainer), trainer.args
    with ExitStack() as stack:
        with group.together() as talk:
            if isinstance(trainer, UnpadMixin):
                raise RecipeError("unpad.hf.attach has this trainer already", fix="build it anew, and attach once")
            refuse(trainer)
            if trainer.train_dataset is None:
                raise RecipeError("the trainer has no train_dataset", fix="pass train_dataset to the trainer")
            if tokens_per_micro < 1 or (tokens_per_eval is not None and tokens_per_eval < 1):
                fix = "set tokens_per_micro and tokens_per_eval to 1 or more"
                raise RecipeError("a micro-batch of no tokens", fix=fix)
            rows = CollatedRows.of(trainer, trainer.train_dataset)
            examples = Examples(rows)
            rows.check(args.per_device_train_batch_size)
            warn_of_cuts(trainer, examples)
            doubts = rows.doubts()
            loss = loss_of_ones_own(trainer)
            own = take_own(trainer, rows, examples) if prove else None
            model = trainer.accelerator.unwrap_model(trainer.model)
            prepared = stack.enter_context(preparing(model))
            refuse_long(prepared.limit, max(tokens_per_micro, tokens_per_eval or 0, int(examples.lengths.max())))
            head = add_target_head(model, prepared.inner, trial(examples, prepared), fused=is_sft(trainer))
            stack.push(lambda kind, error, trace: None if error is None else head.remove())
            attachment = Attachment(
                tokens_per_micro,
                tokens_per_eval or tokens_per_micro,
                prepared,
                head,
                ProvedModel.of(prepared, head),
                own,
                rows_of=partial(CollatedRows.of, trainer),
                examples={id(trainer.train_dataset): (trainer.train_dataset, examples)},
                loss=loss,
                keeps_evaluation=keeps_evaluation(trainer),
                group=group,
            )
            stack.enter_context(replacing(trainer, attachment))
            if own is not None:
                attachment.certificate = prove_ours(trainer, own, prepared.limit)
            talk.own = [tokens_per_micro, args.gradient_accumulation_steps, args.seed, args.data_seed, head.mode]
            talk.own.append(examples.digest())
        check_alike("training data or arguments", talk.told)
    if trainer.compute_metrics is not None and not attachment.keeps_evaluation:
        doubts.append(METRICS)
    if trainer.eval_dataset is not None and not attachment.keeps_evaluation:
        doubts.append(EVALUATION)
    if own is not None and attachment.certificate is not None:
        doubts += doubts_of_own(own, attachment.certificate)
    for text in doubts:
        warnings.warn(text, stacklevel=2)
    return attachment


@contextmanager
def replacing(trainer: Trainer, attachment: Attachment) -> Iterator[None]:
    """Give a trainer its attachment, which it loses again, with all that was changed, if anything inside raises."""
    kind, before = type(trainer), Settings.now(trainer)
    try:
        divide_by_targets(trainer)
        stop_packing(trainer)
        trainer.__class__ = type(f"Unpad{kind.__name__}", (UnpadMixin, kind), {"__module__": __name__})
        vars(trainer)["attachment"] = attachment
        # A loss of one's own may be right in one micro-batch and wrong in several.
        names = (*PROMISED, "gradient_accumulation_steps") if attachment.loss else PROMISED
        attachment.promised = Settings.now(trainer, names)
        yield
    except BaseException:
        trainer.__class__ = kind
        vars(trainer).pop("attachment", None)
        before.restore(trainer)
        raise
