"""Flat batches and exact evaluation in Trainer of transformers and SFTTrainer of TRL."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from unpad.batching.ledger import Ledger
from unpad.batching.sampler import BatchSampler
from unpad.errors import RecipeError
from unpad.hf import checks
from unpad.hf.head import TargetHead, add_target_head
from unpad.hf.loader import MICROS, Examples, MicroBatches, Updates, collate, collate_update, is_streamed
from unpad.hf.prepare import Prepared, preparing
from unpad.hf.rows import CollatedRows
from unpad.hf.update import OwnUpdate, doubts_of_own, prove_ours, take_own
from unpad.processes.group import Group
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.lengths import refuse_long
from unpad.proof.foreign.undisturbed import own_counts
from unpad.recipes.training import PlanSettings


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
        promised: what must stay as it was when the update was proved.
        group: the processes that train together.
        certificate: the proof of the same update on flat batches; None if no proof was asked for.
    """

    tokens_per_micro: int
    tokens_per_eval: int
    prepared: Prepared
    head: TargetHead
    model: checks.ProvedModel
    own: OwnUpdate | None
    rows_of: Callable[[Any], CollatedRows]
    examples: dict[int, tuple[object, Examples]]
    loss: str
    group: Group
    certificate: ForeignCertificate | None = None
    promised: checks.Settings = field(default_factory=lambda: checks.Settings({}))
    evaluated: checks.MeanOverTargets = field(default_factory=checks.MeanOverTargets)
    trained: Examples | None = None  # those of the last loader for training

    def __repr__(self) -> str:
        proof = self.certificate
        verdict = f"{proof.verdict} in {proof.precision}" if proof else "not proved"
        return f"Attachment(tokens_per_micro={self.tokens_per_micro}, {verdict})"

    def examples_of(self, data: Any) -> Examples:
        """The examples of a dataset, with lengths that are read once."""
        if id(data) not in self.examples:
            self.examples[id(data)] = (data, Examples(self.rows_of(data)))
        return self.examples[id(data)][1]

    def check(self, trainer: Trainer, called: nn.Module | None = None) -> None:
        """Refuse a trainer with another update than was proved; `called` as of `ProvedModel.check`."""
        self.promised.check(trainer)
        self.model.check(trainer, called)

    def ledger(self, data: Any) -> Ledger:
        """The fate of every token of a dataset in one epoch; `dataloader_drop_last` leaves out others in each."""
        return self.examples_of(data).plan(PlanSettings(), seed=0, epoch=0).ledger

    @property
    def rows(self) -> CollatedRows:
        """The data's rows by the collator that the trainer had, of which its batches are made."""
        rows = None if self.trained is None else self.trained.data
        if not isinstance(rows, CollatedRows):
            what = "the trainer's batches are not those of unpad.hf.attach: another loader makes them since then"
            raise RecipeError(what, fix="call unpad.hf.attach again after the change, or prove the trainer before it")
        return rows


METRICS = (
    "compute_metrics still reads the trainer's own batches, padded: leave out the places whose labels are -100, or its "
    "result depends on how rows are batched"
)
LATER = "the model sees later tokens (use_bidirectional_attention), so that its loss of the next token says nothing"
EVALUATION = "eval_loss is now the mean over all targets of the set; the trainer's own is a mean of batches' means"


class UnpadMixin(Trainer):
    """Trainer with flat batches, which `attach` mixes into the class of a trainer.

    An update has the rows of the trainer's own, in the order of its sampler, and is cut into micro-batches of up to
    `tokens_per_micro` tokens.
    """

    attachment: Attachment

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As many batches as the trainer's own loader has, with the sequences of its rows."""
        attachment = self.attachment
        attachment.check(self)
        examples = attachment.trained = attachment.examples_of(self.train_dataset)
        own, accumulation = super().get_train_dataloader().batch_sampler, self.args.gradient_accumulation_steps
        updates = Updates(examples, own, attachment.tokens_per_micro, accumulation=accumulation, group=attachment.group)
        return self._flat_batches(MicroBatches(examples), updates, collate_update)

    def _flat_batches(
        self, data: Dataset[Any], sampler: Sampler[list[Any]], collate_fn: Callable[[list[Any]], dict[str, Any]]
    ) -> DataLoader[Any]:
        args = self.args
        loader = DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        accelerator = self.accelerator
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,  # the sampler has the batches of this rank alone
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The micro-batches of an update, forward and backward, with logits of targets alone.

        Returns:
            The sum of their losses; 0 for the empty batches before the one that has them.
        """
        self.attachment.model.check(self, model)
        micros, total = inputs.get(MICROS, [inputs]), torch.zeros((), device=self.args.device)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.clamp(min=1)  # an update without targets adds nothing
        self.current_gradient_accumulation_steps = len(micros)
        syncs_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for number, micro in enumerate(micros, 1):
            is_last = number == len(micros) or syncs_each
            with nullcontext() if is_last else self.accelerator.no_sync(model), self._targets_alone():
                total = total + super().training_step(model, dict(micro), num_items_in_batch)
        if checks.is_sft(self) and len(micros) > 1:
            counts = torch.stack([checks.count_targets(micro) for micro in micros])
            checks.weigh_logs(self, "train", self.accelerator.gather(counts).view(-1, len(micros)).sum(0).tolist())
        return total

    def _targets_alone(self) -> AbstractContextManager[None]:
        """Compute the loss alone inside, unless a loss of the user's own reads logits."""
        needs_all = self.attachment.loss or self.compute_loss_func is not None
        return nullcontext() if needs_all else self.attachment.head.alone()


class ExactEvaluation(UnpadMixin):
    """The same, with flat batches and means over targets in evaluation, unless the user's own class makes these."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Flat batches of an evaluation set, of the dataset by that name, or of the trainer's own.

        Streams, and metrics, which read rows as the collator makes them, keep the trainer's own ones.
        """
        attachment = self.attachment
        attachment.check(self)
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            data = self.eval_dataset[eval_dataset]
        if data is None:
            raise RecipeError("the trainer has no eval_dataset", fix="pass eval_dataset to the trainer or to evaluate")
        if is_streamed(data) or self.compute_metrics is not None:
            return super().get_eval_dataloader(eval_dataset)
        examples, group = attachment.examples_of(data), attachment.group
        sizes: dict[str, Any] = {"targets": examples.targets, "tokens": attachment.tokens_per_eval}
        planned = BatchSampler(examples.lengths, **sizes, rank=group.rank, world_size=group.size)
        return self._flat_batches(examples, planned, collate)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A batch of an evaluation, with its loss counted by its targets."""
        attachment = self.attachment
        if "cu_seq_lens_q" in inputs:
            attachment.model.check(self, model)
        num_targets = int(checks.count_targets(inputs))
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
        attachment, group, examples = self.attachment, self.attachment.group, dataloader.dataset
        if isinstance(examples, Examples):
            checks.check_alike(
                "sequences of evaluation", group.exchange([attachment.tokens_per_eval, examples.digest()])
            )
        evaluated = attachment.evaluated = checks.MeanOverTargets()
        out = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if group.size > 1:  # accelerate's own loaders repeat sequences on the last ranks
            parts = group.exchange([evaluated.total, evaluated.counts]) if isinstance(examples, Examples) else []
            evaluated = checks.MeanOverTargets.of_parts(parts)
        if evaluated.num_targets:
            out.metrics[f"{metric_key_prefix}_loss"] = evaluated.mean
            checks.weigh_logs(self, "eval", evaluated.counts)
        return out


def attach(
    trainer: Trainer, tokens_per_micro: int = 4096, *, tokens_per_eval: int | None = None, prove: bool = True
) -> Attachment:
    """Give a trainer flat batches without padding, of the rows of its own updates, and exact evaluation.

    The trainer's class becomes a subclass of its own with `UnpadMixin`. An update of rows of the data is proved first:
    in flat batches its sequences are what they are one at a time. A trainer that is refused, and its model, are as they
    were before.

    Args:
        trainer: a Trainer or an SFTTrainer, before `train`. Rows that SFTTrainer packed are taken apart again.
        tokens_per_micro: most tokens of a micro-batch, for memory alone; a longer sequence is one of its own.
        tokens_per_eval: the same in evaluation, whose result does not depend on it; by default as in training.
        prove: False leaves the proof out, for a model that was proved before.

    Raises:
        RecipeError: the trainer batches by itself, or its ranks hold parts of the model.
        UnlikeProcessesError: ranks have other data or arguments.
        SourceError: its dataset is streamed or not tokenized.
        ProofError: the model does not keep the sequences of a flat batch apart.
    """
    group, args = checks.group_of(trainer), trainer.args
    with ExitStack() as stack:
        with group.together() as talk:
            if isinstance(trainer, UnpadMixin):
                raise RecipeError("unpad.hf.attach has this trainer already", fix="build it anew, and attach once")
            checks.refuse(trainer)
            if trainer.train_dataset is None:
                raise RecipeError("the trainer has no train_dataset", fix="pass train_dataset to the trainer")
            if tokens_per_micro < 1 or (tokens_per_eval is not None and tokens_per_eval < 1):
                fix = "set tokens_per_micro and tokens_per_eval to 1 or more"
                raise RecipeError("a micro-batch of no tokens", fix=fix)
            rows = CollatedRows.of(trainer, trainer.train_dataset)
            examples = Examples(rows)
            rows.check(args.per_device_train_batch_size)
            checks.warn_of_cuts(trainer, examples)
            doubts = rows.doubts()
            loss = checks.loss_of_ones_own(trainer)
            own = take_own(trainer, rows, examples) if prove else None
            model = trainer.accelerator.unwrap_model(trainer.model)
            prepared = stack.enter_context(preparing(model))
            refuse_long(prepared.limit, max(tokens_per_micro, tokens_per_eval or 0, int(examples.lengths.max())))
            head = add_target_head(
                model, prepared.inner, checks.trial(examples, prepared), fused=checks.is_sft(trainer)
            )
            stack.push(lambda kind, error, trace: None if error is None else head.remove())
            attachment = Attachment(
                tokens_per_micro,
                tokens_per_eval or tokens_per_micro,
                prepared,
                head,
                checks.ProvedModel.of(prepared, head),
                own,
                rows_of=partial(CollatedRows.of, trainer),
                examples={id(trainer.train_dataset): (trainer.train_dataset, examples)},
                loss=loss,
                group=group,
            )
            stack.enter_context(replacing(trainer, attachment))
            if own is not None:
                attachment.certificate = prove_ours(trainer, own, prepared.limit)
            talk.own = [tokens_per_micro, args.gradient_accumulation_steps, args.train_batch_size, args.seed]
            talk.own += [args.data_seed, head.mode, examples.digest()]
        checks.check_alike("training data or arguments", talk.told)
    if getattr(prepared.inner.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        doubts.append(LATER)
    if isinstance(trainer, ExactEvaluation):
        doubts += [METRICS] * (trainer.compute_metrics is not None) + [EVALUATION] * (trainer.eval_dataset is not None)
    if own is not None and attachment.certificate is not None:
        doubts += doubts_of_own(own, attachment.certificate)
    for text in doubts:
        warnings.warn(text, stacklevel=2)
    compiling = trainer.accelerator.state.dynamo_plugin
    compiling.dynamic = compiling.dynamic is not False  # one graph for all sizes, not a first for those of one batch
    return attachment


@contextmanager
def replacing(trainer: Trainer, attachment: Attachment) -> Iterator[None]:
    """Give a trainer its attachment, which it loses again, with all that was changed, if anything inside raises."""
    kind, before = type(trainer), checks.Settings.now(trainer)
    try:
        checks.divide_by_targets(trainer)
        if checks.is_sft(trainer):  # its rows are not packed any more, nor those of a later evaluation set
            trainer.args.packing, trainer.args.eval_packing = False, None
        mixin = UnpadMixin if checks.keeps_evaluation(trainer) else ExactEvaluation
        trainer.__class__ = type(f"Unpad{kind.__name__}", (mixin, kind), {"__module__": __name__})
        vars(trainer)["attachment"] = attachment
        attachment.promised = checks.Settings.now(trainer, checks.PROMISED)
        yield
    except BaseException:
        trainer.__class__ = kind
        vars(trainer).pop("attachment", None)
        before.restore(trainer)
        raise
