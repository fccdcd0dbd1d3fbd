"""Checks of a trainer before it trains on flat batches: of its settings, its processes, and its model by the proof."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from unpad.errors import RecipeError, UnlikeProcessesError
from unpad.hf.loader import IGNORED, Examples, collate
from unpad.hf.prepare import Prepared
from unpad.processes.group import ALONE, Group
from unpad.proof.foreign.kinds import no_trainer_of_tokens
from unpad.proof.foreign.lengths import within

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def group_of(trainer: Trainer) -> Group:
    """The processes that train with this one, which hold a copy of the model each.

    Raises:
        RecipeError: they hold parts of a model, or divide sequences.
    """
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type
    if kind not in REPLICATED:
        reason = "a loss in chunks reads the weights of the head, which every process must hold whole"
        raise RecipeError(
            f"accelerate runs {kind.value}, and {reason}",
            fix="start it by torchrun without DeepSpeed and FSDP, or train it with the trainer's own batches",
        )
    parallel = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    for name, size in parallel.items():
        if size > 1:
            raise RecipeError(
                f"{name} parallelism over {size} processes divides what a flat batch holds together",
                fix="leave parallelism_config out",
            )
    if accelerator.num_processes == 1:
        return ALONE
    import torch.distributed as dist

    messages = dist.new_group(backend="gloo")
    return Group(accelerator.process_index, accelerator.num_processes, accelerator.local_process_index, messages)


def check_alike(what: str, told: Sequence[object]) -> None:
    """Compare what all processes must have alike.

    Args:
        what: name of it.
        told: that of every process, by rank.

    Raises:
        UnlikeProcessesError: a process has another than the first.
    """
    unlike = [rank for rank, own in enumerate(told) if own != told[0]]
    if unlike:
        error = UnlikeProcessesError(
            f"{what} of process {unlike[0]} are not those of process 0",
            fix="give every process the same data, in the same order, and the same arguments",
        )
        error.is_agreed = True
        raise error


@contextmanager
def own_counts(args: TrainingArguments) -> Iterator[None]:
    """Let the trainer divide a loss by the targets of this rank's batch alone inside."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


TRIED = 5  # sequences on which the head is tried
BATCHES = (
    "makes the batches, and flat batches would replace what it chooses",
    "choose rows in train_dataset, or train with the trainer's own batches",
)
COUNTS = (
    "chooses micro-batches or what their loss is divided by, which is then no mean over targets",
    "leave it out: transformers divides by the targets of the update",
)
MAKE_BATCHES = dict.fromkeys(("get_train_dataloader", "_get_dataloader", "_get_train_sampler"), BATCHES)
COUNT_TARGETS = dict.fromkeys(("get_batch_samples", "_get_num_items_in_batch"), COUNTS)
OF_LOSS = ("compute_loss", "training_step")
STOCK = ("transformers", "trl", "unpad")  # packages with a loss that is the mean over targets
READ_EVALUATION = ("get_eval_dataloader", "_get_eval_sampler", "prediction_step", "evaluation_loop")


def refuse(trainer: Trainer) -> None:
    """Refuse trainers, models and settings that flat batches of our plan contradict.

    Raises:
        RecipeError: several devices in a process, rows without boundaries, a sampling strategy, kernels of Liger,
            methods of the user's own that make batches, a trainer or a model of another task.
    """
    args = trainer.args
    _refuse_other_tasks(trainer)
    refuse_methods(trainer, COUNT_TARGETS | MAKE_BATCHES)
    refuse_losses(trainer)
    if trainer.compute_metrics is not None and not keeps_evaluation(trainer):
        refuse_metrics(trainer)
    if args.n_gpu > 1:
        raise RecipeError(
            f"flat batches are trained on one device, and this process sees {args.n_gpu}",
            fix="start one process for each by torchrun, or set CUDA_VISIBLE_DEVICES to one of them",
        )
    strategy = args.train_sampling_strategy
    settings = {
        "use_liger_kernel": args.use_liger_kernel
        and "exchanges layers and the loss when train begins, behind every proof",
        "model_init": trainer.model_init and "makes the model again when train begins, behind every proof",
        "neftune_noise_alpha": trainer.neftune_noise_alpha and "adds noise by the length of the row, not the sequence",
        "train_sampling_strategy": strategy != "random" and f"is {strategy}, and the plan chooses the order",
    }
    for name, reason in settings.items():
        if reason:
            fix = f"leave {name} out, or train with the trainer's own batches"
            raise RecipeError(f"{name} {reason}", fix=fix)
    if is_sft(trainer):
        settings = args.to_dict()
        if (settings["packing"] or settings["eval_packing"]) and settings["packing_strategy"] == "wrapped":
            raise RecipeError(
                "packing_strategy is wrapped: rows do not say where sequences begin", fix="set packing=False"
            )


def refuse_metrics(trainer: Trainer) -> None:
    """Refuse metrics of several processes.

    Raises:
        RecipeError: their own loaders repeat rows, so that the loss is no mean over targets.
    """
    if trainer.args.world_size > 1:
        raise RecipeError(
            f"compute_metrics reads the trainer's own batches, and {trainer.args.world_size} processes repeat rows in "
            "theirs, so that the loss is no mean over targets",
            fix="compute metrics in one process, or with a get_eval_dataloader of your own",
        )


def _refuse_other_tasks(trainer: Trainer) -> None:
    """Refuse trainers and models of other tasks than the next token, and virtual tokens, by name."""
    if reason := no_trainer_of_tokens(trainer):
        raise RecipeError(reason.what, fix=reason.fix)
    model = trainer.accelerator.unwrap_model(trainer.model)
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise RecipeError(
                f"{config.peft_type.value} puts virtual tokens before every row, and a flat batch has one row",
                fix="use other adapters, such as LoRA, or train with the trainer's own batches",
            )


def refuse_methods(trainer: Trainer, methods: Mapping[str, tuple[str, str]]) -> None:
    """Refuse methods of the user's own.

    Args:
        methods: what each of them does, and what to do instead, by the name of the method.

    Raises:
        RecipeError: names the method.
    """
    for name, (what, fix) in methods.items():
        if owner := overrides(trainer, name):
            raise RecipeError(f"{owner} {what}", fix=fix)


def overrides(trainer: Trainer, name: str) -> str:
    """The method of a user's own, on the object or a class, that stands for one of the trainer's; empty if none."""
    if name in vars(trainer) and not _is_stock(vars(trainer)[name]):
        return f"{type(trainer).__name__}'s own {name}"
    for kind in type(trainer).__mro__:
        if name in vars(kind) and kind.__module__.partition(".")[0] not in STOCK:
            return f"{kind.__name__}.{name}"
    return ""


def _is_stock(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in STOCK


def keeps_evaluation(trainer: Trainer) -> bool:
    """True if the user's own class makes the batches of an evaluation, or reads them: they stay what they were."""
    return any(overrides(trainer, name) for name in READ_EVALUATION)


def stop_packing(trainer: Trainer) -> None:
    """Tell SFTTrainer that its rows are not packed any more, so that it packs no later evaluation set either."""
    if is_sft(trainer):
        trainer.args.packing, trainer.args.eval_packing = False, None


def warn_of_cuts(trainer: Trainer, examples: Examples) -> None:
    """Warn of examples as long as SFTTrainer's `max_length`, which cuts longer ones when it reads the data."""
    limit = trainer.args.to_dict()["max_length"] if is_sft(trainer) else None
    num_at_limit = int((examples.lengths == limit).sum()) if limit else 0
    if num_at_limit:
        warnings.warn(
            f"{num_at_limit} examples have exactly max_length={limit} tokens: SFTTrainer cuts longer ones. Set "
            "SFTConfig(max_length=None) to train on whole examples",
            stacklevel=3,
        )


def is_sft(trainer: Trainer) -> bool:
    """True for TRL's SFTTrainer; TRL is not imported for it."""
    module = sys.modules.get("trl.trainer.sft_trainer")
    return module is not None and isinstance(trainer, module.SFTTrainer)


def loss_of_ones_own(trainer: Trainer) -> str:
    """The user's own function or method that makes the loss; empty for the losses of transformers and TRL."""
    for name in OF_LOSS:
        if owner := overrides(trainer, name):
            return owner
    function = trainer.compute_loss_func
    if function is None or function is mean_over_targets:
        return ""
    return str(getattr(function, "__qualname__", "compute_loss_func"))


def refuse_losses(trainer: Trainer) -> None:
    """Refuse losses of transformers and TRL that are not the mean cross-entropy over targets.

    Raises:
        RecipeError: names the argument.
    """
    loss_type = getattr(trainer.args, "loss_type", "nll")
    if trainer.label_smoother or loss_type != "nll":
        name = "label_smoothing_factor" if trainer.label_smoother else f"loss_type={loss_type}"
        raise RecipeError(
            f"{name} makes another loss than the mean cross-entropy over targets, and only that one is judged",
            fix="leave it out, or train with the trainer's own batches",
        )


@dataclass
class MeanOverTargets:
    """Sum of losses and number of targets; the mean of the batches' means would depend on the batches."""

    total: float = 0.0
    num_targets: int = 0

    def add(self, mean: Tensor, num_targets: int) -> None:
        """Add a batch by its loss, the mean over its targets."""
        if num_targets:
            self.total += float(mean) * num_targets
            self.num_targets += num_targets

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[float]]) -> MeanOverTargets:
        """Sum of parts of a set: `total` and `num_targets` of each."""
        return cls(sum(total for total, _ in parts), int(sum(num for _, num in parts)))

    @property
    def mean(self) -> float:
        """In nats per target."""
        return self.total / self.num_targets


def divide_by_targets(trainer: Trainer) -> None:
    """Let every micro-batch's loss be its sum over the targets of the whole step, also where the model cannot.

    Models without `num_items_in_batch` in their `forward` return a mean per micro-batch, and the mean of such means
    weighs targets of small micro-batches more. The same is true of means per rank.
    """
    trainer.args.average_tokens_across_devices = trainer.args.world_size > 1
    if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        return
    if is_sft(trainer):  # it computes the loss itself, and only has to be told the number
        trainer.model_accepts_loss_kwargs = True
    else:
        trainer.compute_loss_func = mean_over_targets


def mean_over_targets(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Sum of the cross-entropy over the targets of a batch, divided by the number of those of the step."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    following = labels[:, 1:].flatten()
    total = F.cross_entropy(wide, following, ignore_index=IGNORED, reduction="sum")
    return total / ((following != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def trial(examples: Examples, prepared: Prepared) -> dict[str, Any]:
    """A flat batch of a few of the shorter sequences with targets, on which the head is tried."""
    usable = np.flatnonzero(examples.targets > 0)
    ordered = usable[np.argsort(examples.lengths[usable], kind="stable")]
    spread = dict.fromkeys(ordered[np.linspace(0, len(ordered) // 2, TRIED).astype(int)].tolist())
    chosen = within(list(spread), [int(examples.lengths[index]) for index in spread], prepared.limit)[0]
    device = next(prepared.model.parameters()).device
    batch = collate([examples[index] for index in chosen])
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in batch.items()}
