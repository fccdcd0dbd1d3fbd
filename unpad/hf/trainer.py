"""Our plan, flat batches and evaluation in Trainer of transformers and SFTTrainer of TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from unpad.batching.ledger import Ledger
from unpad.errors import RecipeError
from unpad.hf.checks import (
    certify,
    divide_by_targets,
    has_standard_loss,
    is_sft,
    refuse,
    sample,
    stop_packing,
    warn_of_cuts,
)
from unpad.hf.evaluation import MeanOverTargets
from unpad.hf.group import cells_per_token, check_alike, group_of, own_counts
from unpad.hf.head import TargetHead, add_target_head
from unpad.hf.loader import IGNORED, Examples, PlannedBatches, Row, collate
from unpad.hf.prepare import Prepared, preparing
from unpad.hf.ranks import Ranks
from unpad.processes.group import ALONE, Group
from unpad.proof.foreign.certificate import ForeignCertificate


@dataclass
class Attachment:
    """State that `attach` gives to a trainer.

    Args:
        tokens_per_micro, tokens_per_eval: most tokens of a micro-batch in training and evaluation.
        prepared: the model, and its isolated layers.
        head: mode in which the loss is computed; see `TargetHead`.
        certificate: the proof of the model on sequences of the training data; None if it was not asked for.
        group: the processes that train together.
    """

    tokens_per_micro: int
    tokens_per_eval: int
    prepared: Prepared
    head: TargetHead
    certificate: ForeignCertificate | None
    examples: dict[int, tuple[object, Examples]]
    group: Group = ALONE
    evaluated: MeanOverTargets = field(default_factory=MeanOverTargets)

    def examples_of(self, data: Sequence[Row]) -> Examples:
        """The examples of a dataset, whose lengths are read once."""
        if id(data) not in self.examples:
            self.examples[id(data)] = (data, Examples(data))
        return self.examples[id(data)][1]

    def ledger(self, data: Sequence[Row]) -> Ledger:
        """The fate of every token of a dataset in one epoch."""
        return PlannedBatches(self.examples_of(data), self.tokens_per_micro, epochs=1, seed=0).ledger


class UnpadMixin(Trainer):
    """Trainer with our plan, flat batches and exact evaluation; mix it into Trainer, SFTTrainer or a subclass.

        class MyTrainer(UnpadMixin, SFTTrainer): ...
        trainer = MyTrainer(model=model, args=args, train_dataset=data, tokens_per_micro=4096)

    `attach` gives the same to a trainer that is there already. `per_device_train_batch_size` no longer says anything: a
    micro-batch has up to `tokens_per_micro` tokens, and a step `gradient_accumulation_steps` of them on every rank.

    Args:
        tokens_per_micro, tokens_per_eval, prove: as in `attach`.
    """

    attachment: Attachment

    def __init__(
        self,
        *args: Any,
        tokens_per_micro: int = 4096,
        tokens_per_eval: int | None = None,
        prove: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        set_up(self, tokens_per_micro, tokens_per_eval, prove)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Micro-batches of the plan of every epoch."""
        examples = self.attachment.examples_of(self.train_dataset)
        tokens, args = self.attachment.tokens_per_micro, self.args
        epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:  # the plan fills micro-batches, so that an epoch has at least so many
            least = max(1, int(examples.lengths[examples.targets > 0].sum()) // tokens)
            per_step = args.gradient_accumulation_steps * self.attachment.group.size
            epochs = math.ceil(args.max_steps * per_step / least)
        seed = args.seed if args.data_seed is None else args.data_seed
        ranks = self._ranks(args.gradient_accumulation_steps)
        return self._flat_batches(examples, PlannedBatches(examples, tokens, epochs=epochs, seed=seed, ranks=ranks))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Flat batches of an evaluation set, of the dataset by that name, or of the trainer's own."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            data = self.eval_dataset[eval_dataset]
        if data is None:
            raise RecipeError("the trainer has no eval_dataset", fix="pass eval_dataset to the trainer or to evaluate")
        examples = self.attachment.examples_of(data)
        tokens = self.attachment.tokens_per_eval
        return self._flat_batches(examples, PlannedBatches(examples, tokens, epochs=1, seed=0, ranks=self._ranks(1)))

    def _ranks(self, micros: int) -> Ranks:
        group = self.attachment.group
        return Ranks(group.rank, group.size, micros, cells_per_token(self.attachment.prepared.inner))

    def _flat_batches(self, examples: Examples, sampler: PlannedBatches) -> DataLoader[Any]:
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

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """A micro-batch, forward and backward, with logits of targets alone."""
        with self._targets_alone():
            loss: Tensor = super().training_step(*args, **kwargs)
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A batch of an evaluation, whose loss is counted by its targets."""
        labels = inputs.get("labels")
        num_targets = 0 if labels is None else int((labels[..., 1:] != IGNORED).sum())
        with self._targets_alone() if prediction_loss_only else nullcontext(), own_counts(self.args):
            loss, logits, given = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is not None:
            self.attachment.evaluated.add(loss, num_targets)
        return loss, logits, given

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """An evaluation, whose loss is the mean over the targets of the whole set."""
        evaluated, group = MeanOverTargets(), self.attachment.group
        examples = dataloader.dataset
        if isinstance(examples, Examples):
            told = group.exchange([self.attachment.tokens_per_eval, examples.digest()])
            check_alike("sequences of evaluation", told)
        self.attachment.evaluated = evaluated
        out = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if group.size > 1:  # accelerate's own loaders repeat sequences on the last ranks
            parts = group.exchange([evaluated.total, evaluated.num_targets]) if isinstance(examples, Examples) else []
            evaluated = MeanOverTargets.of_parts(parts)
        if evaluated.num_targets:
            out.metrics[f"{metric_key_prefix}_loss"] = evaluated.mean
        return out

    def _targets_alone(self) -> AbstractContextManager[None]:
        """Compute the loss alone inside, unless a loss of the user's own reads logits."""
        return self.attachment.head.alone() if has_standard_loss(self) else nullcontext()


def attach(
    trainer: Trainer, tokens_per_micro: int = 4096, *, tokens_per_eval: int | None = None, prove: bool = True
) -> Attachment:
    """Give a trainer our plan, flat batches without padding, and exact evaluation.

    The trainer's class becomes a subclass of its own with `UnpadMixin`. The model is proved first, on a few sequences
    of the training data: in one flat batch they are what they are one at a time. A trainer that is refused, and its
    model, are as they were before.

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
    return set_up(trainer, tokens_per_micro, tokens_per_eval, prove)


_mixed: dict[type[Trainer], type[UnpadMixin]] = {}


def _with_mixin(kind: type[Trainer]) -> type[UnpadMixin]:
    """The subclass of a trainer's class with `UnpadMixin`, the same one every time."""
    if kind not in _mixed:
        _mixed[kind] = type(f"Unpad{kind.__name__}", (UnpadMixin, kind), {"__module__": kind.__module__})
    return _mixed[kind]


def set_up(trainer: Trainer, tokens_per_micro: int, tokens_per_eval: int | None, prove: bool) -> Attachment:
    """Check the trainer, prove its model, and give it an attachment; nothing is changed if either fails on a rank."""
    group, args = group_of(trainer), trainer.args
    with ExitStack() as stack:
        with group.together() as talk:
            refuse(trainer)
            if trainer.train_dataset is None:
                raise RecipeError("the trainer has no train_dataset", fix="pass train_dataset to the trainer")
            if tokens_per_micro < 1 or (tokens_per_eval is not None and tokens_per_eval < 1):
                fix = "set tokens_per_micro and tokens_per_eval to 1 or more"
                raise RecipeError("a micro-batch of no tokens", fix=fix)
            examples = Examples(trainer.train_dataset)
            warn_of_cuts(trainer, examples)
            model = trainer.accelerator.unwrap_model(trainer.model)
            prepared = stack.enter_context(preparing(model))
            rows = sample(examples, prepared)
            certificate = certify(prepared, rows) if prove else None
            device = next(model.parameters()).device
            batch = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in collate(rows).items()}
            head = add_target_head(model, prepared.inner, batch, args.loss_type if is_sft(trainer) else None)
            stack.push(lambda kind, error, trace: None if error is None else head.remove())
            talk.own = [tokens_per_micro, args.gradient_accumulation_steps, args.seed, args.data_seed, head.mode]
            talk.own.append(examples.digest())
        check_alike("training data or arguments", talk.told)
    known = {id(trainer.train_dataset): (trainer.train_dataset, examples)}
    divide_by_targets(trainer)
    stop_packing(trainer)
    if not isinstance(trainer, UnpadMixin):
        trainer.__class__ = _with_mixin(type(trainer))
    assert isinstance(trainer, UnpadMixin)
    tokens = (tokens_per_micro, tokens_per_eval or tokens_per_micro)
    attachment = Attachment(*tokens, prepared, head, certificate, known, group)
    trainer.attachment = attachment
    return attachment
