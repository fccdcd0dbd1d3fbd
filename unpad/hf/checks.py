"""Checks of a trainer before it trains on flat batches: of its settings, its processes, and its model by the proof."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer

from unpad.errors import RecipeError, UnlikeProcessesError
from unpad.hf.head import TargetHead
from unpad.hf.loader import IGNORED, Examples, collate
from unpad.hf.mixers import Boundaries
from unpad.hf.prepare import Prepared
from unpad.processes.group import ALONE, Group
from unpad.proof.foreign.kinds import no_trainer_of_tokens
from unpad.proof.foreign.lengths import within
from unpad.proof.foreign.measure import cross_entropy
from unpad.proof.foreign.update import converted

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
            what = f"{name} parallelism over {size} processes divides what a flat batch holds together"
            raise RecipeError(what, fix="leave parallelism_config out")
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


UNBOUNDED = "is wrapped: rows do not say where sequences begin"
TRIED = 5  # sequences on which the head is tried
BATCHES = (
    "makes the batches, and flat batches would replace what it chooses",
    "choose rows in train_dataset, or train with the trainer's own batches",
)
COUNTS = (
    "chooses micro-batches or what their loss is divided by, which is then no mean over targets",
    "leave it out: transformers divides by the targets of the update",
)
MAKE_BATCHES = dict.fromkeys(("get_train_dataloader", "_get_dataloader"), BATCHES)
COUNT_TARGETS = dict.fromkeys(("get_batch_samples", "_get_num_items_in_batch"), COUNTS)
OF_LOSS = ("compute_loss", "training_step")
STOCK = ("transformers", "trl", "unpad")  # packages with a loss that is the mean over targets
LOGGED = {"entropy", "mean_token_accuracy", "aux_loss"}  # by SFTTrainer, of each batch
READ_EVALUATION = ("get_eval_dataloader", "_get_eval_sampler", "prediction_step", "evaluation_loop")


def refuse(trainer: Trainer) -> None:
    """Refuse trainers, models and settings that flat batches contradict.

    Raises:
        RecipeError: several devices in a process, rows without boundaries, a sampling strategy, kernels of Liger,
            methods of the user's own that make batches, a trainer or a model of another task.
    """
    if reason := no_trainer_of_tokens(trainer):
        raise RecipeError(reason.what, fix=reason.fix)
    refuse_methods(trainer, COUNT_TARGETS | MAKE_BATCHES)
    refuse_losses(trainer)
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {}).values()
    virtual = [one.peft_type.value for one in adapters if getattr(one, "is_prompt_learning", False)]
    is_packed = is_sft(trainer) and (args.to_dict()["packing"] or args.to_dict()["eval_packing"])
    one_process = args.world_size == 1 or keeps_evaluation(trainer)
    _refuse_named(
        {
            "use_liger_kernel": args.use_liger_kernel and "exchanges layers when train begins, behind every proof",
            "auto_find_batch_size": args.auto_find_batch_size
            and "makes updates smaller; tokens_per_micro bounds memory",
            "model_init": trainer.model_init and "makes the model again when train begins, behind every proof",
            "neftune_noise_alpha": trainer.neftune_noise_alpha and "adds noise by the length of the row",
            "train_sampling_strategy": args.train_sampling_strategy == "batch_rebalance"
            and "is batch_rebalance, which makes batches of other sizes; flat batches have no padding to balance",
            "dispatch_batches": trainer.accelerator.dispatch_batches and "lets one process make the batches of all",
            "packing_strategy": is_packed and args.to_dict()["packing_strategy"] == "wrapped" and UNBOUNDED,
            "n_gpu": args.n_gpu > 1 and f"is {args.n_gpu}, and a flat batch is on one device; start it by torchrun",
            "compute_metrics": trainer.compute_metrics and not one_process and "reads rows that processes repeat",
            ", ".join(virtual): virtual and "puts virtual tokens before every row, and a flat batch has one row",
        }
    )


def _refuse_named(reasons: Mapping[str, object]) -> None:
    for name, reason in reasons.items():
        if reason:
            raise RecipeError(f"{name} {reason}", fix="leave it out, or train with the trainer's own batches")


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
    if name in vars(trainer) and str(getattr(vars(trainer)[name], "__module__", "")).partition(".")[0] not in STOCK:
        return f"{type(trainer).__name__}'s own {name}"
    for kind in type(trainer).__mro__:
        if name in vars(kind) and kind.__module__.partition(".")[0] not in STOCK:
            return f"{kind.__name__}.{name}"
    return ""


def keeps_evaluation(trainer: Trainer) -> bool:
    """True if the user's own class makes the batches of an evaluation, or reads them: they stay what they were."""
    return any(overrides(trainer, name) for name in READ_EVALUATION)


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
    kind, smooths = getattr(trainer.args, "loss_type", "nll"), trainer.label_smoother
    other = "makes another loss than the mean cross-entropy over targets, and only that one is judged"
    _refuse_named({"label_smoothing_factor": smooths and other, f"loss_type={kind}": kind != "nll" and other})


@dataclass
class MeanOverTargets:
    """Sum of losses and number of targets; the mean of the batches' means would depend on the batches."""

    total: float = 0.0
    counts: list[int] = field(default_factory=list)  # of each batch

    def add(self, mean: Tensor, num_targets: int) -> None:
        """Add a batch by its loss, the mean over its targets."""
        self.total += float(mean) * num_targets if num_targets else 0.0
        self.counts.append(num_targets)

    @classmethod
    def of_parts(cls, parts: Sequence[Any]) -> MeanOverTargets:
        """Sum of parts of a set, with equally many batches: `total` and `counts` of each."""
        return cls(
            sum(total for total, _ in parts), [sum(nums) for nums in zip(*(nums for _, nums in parts), strict=True)]
        )

    @property
    def num_targets(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """In nats per target."""
        return self.total / self.num_targets


def count_targets(batch: Mapping[str, Any]) -> Tensor:
    """Number of targets of a batch, () int64; 0 without labels."""
    labels = batch.get("labels")
    return torch.tensor(0) if labels is None else (labels[..., 1:] != IGNORED).sum()


def weigh_logs(trainer: Trainer, mode: str, counts: Sequence[int]) -> None:
    """Replace what SFTTrainer is to log of the last batches by its mean over their targets.

    Args:
        mode: "train" or "eval".
        counts: targets of each batch, on all ranks.
    """
    lists = vars(trainer)["_metrics"][mode] if is_sft(trainer) and any(counts) else {}
    for name in LOGGED & lists.keys():
        lists[name][-len(counts) :] = [float(np.average(lists[name][-len(counts) :], weights=counts))]


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
    following = labels[:, 1:]
    total = cross_entropy(outputs["logits"][:, :-1], following)
    return total / ((following != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def trial(examples: Examples, prepared: Prepared) -> dict[str, Any]:
    """A flat batch of a few of the shorter sequences with targets, on which the head is tried."""
    usable = np.flatnonzero(examples.targets > 0)
    ordered = usable[np.argsort(examples.lengths[usable], kind="stable")]
    spread = dict.fromkeys(ordered[np.linspace(0, len(ordered) // 2, TRIED).astype(int)].tolist())
    chosen = within(list(spread), [int(examples.lengths[index]) for index in spread], prepared.limit)[0]
    device = next(prepared.model.parameters()).device
    return converted(collate([examples[index] for index in chosen]), device=device)


# --------------------------------------------------------------------------- what must stay as it was

CHANGED = ("compute_loss_func", "model_accepts_loss_kwargs", "average_tokens_across_devices", "packing", "eval_packing")
PROMISED = ("data_collator", "compute_loss_func", "compute_loss")


@dataclass(frozen=True, eq=False)
class Settings:
    """Values of a trainer or its arguments by name; None for what neither of them has."""

    values: dict[str, Any]

    @classmethod
    def now(cls, trainer: Trainer, names: Iterable[str] = CHANGED) -> Settings:
        return cls({name: _owner(trainer, name).get(name) for name in names})

    def restore(self, trainer: Trainer) -> None:
        for name, value in self.values.items():
            if name in (owner := _owner(trainer, name)):
                owner[name] = value

    def check(self, trainer: Trainer) -> None:
        """Refuse what was changed.

        Raises:
            RecipeError: the collator or the loss.
        """
        for name, now in Settings.now(trainer, self.values).values.items():
            if now is not self.values[name] and not (isinstance(now, int) and now == self.values[name]):
                what = f"{name} is another than when unpad.hf.attach proved the update"
                raise RecipeError(what, fix="make the change before unpad.hf.attach")


def _owner(trainer: Trainer, name: str) -> dict[str, Any]:
    owner: object = trainer.args if hasattr(trainer.args, name) else trainer
    return vars(owner)


@dataclass(frozen=True, eq=False)
class ProvedModel:
    """A prepared model with all that its proof rests on. Weights and what learns may change.

    Args:
        state: of it when it was proved.
        hooks: keys of the hooks that it had then, or that are watched since.
    """

    prepared: Prepared
    head: TargetHead
    state: dict[str, object]
    hooks: set[int]

    @classmethod
    def of(cls, prepared: Prepared, head: TargetHead) -> ProvedModel:
        return cls(prepared, head, _state(prepared, head), {key for hooks in _hooks(prepared.model) for key in hooks})

    def check(self, trainer: Trainer, called: nn.Module | None = None) -> None:
        """Refuse to train or evaluate another model on flat batches.

        Args:
            called: the model that is handed the batch, by default the trainer's.

        Raises:
            RecipeError: it is another than was proved, or was changed since then; the message says how.
        """
        changed = self._other_model(trainer, called) or self._changed_part()
        if changed:
            what = f"the model is another than when unpad.hf.attach proved it: {changed}"
            raise RecipeError(what, fix="make the change before unpad.hf.attach")
        for hooks in _hooks(self.prepared.model):
            for key in hooks.keys() - self.hooks:
                hooks[key] = _Watched(hooks[key])
                self.hooks.add(key)

    def _other_model(self, trainer: Trainer, called: nn.Module | None) -> str:
        proved = _bare(trainer, self.prepared.model)
        for place, model in (("the trainer has", trainer.model), ("training calls", called)):
            if model is not None and (now := _bare(trainer, model)) is not proved:
                return f"{place} another {type(now).__name__}"
        return ""

    def _changed_part(self) -> str:
        now = _state(self.prepared, self.head)
        changed = [name for name in {**self.state, **now} if now.get(name, ()) != self.state.get(name, ())]
        return f"its {changed[0]} was exchanged, added or removed" if changed else ""


class _Watched:
    """A hook that came after the proof, with a warning where it exchanges what passes."""

    def __init__(self, hook: Callable[..., object]) -> None:
        self.hook = hook

    def __call__(self, *args: object, **kwargs: object) -> object:
        made = self.hook(*args, **kwargs)
        if made is not None:
            name = getattr(self.hook, "__qualname__", type(self.hook).__name__)
            warnings.warn(
                f"the hook {name} returns a value, and came after unpad.hf.attach proved the model", stacklevel=2
            )
        return made


def _hooks(model: nn.Module) -> Iterator[dict[int, Callable[..., object]]]:
    """Hooks of every part, before and behind it."""
    for part in model.modules():
        yield from (part._forward_pre_hooks, part._forward_hooks)


def _state(prepared: Prepared, head: TargetHead) -> dict[str, object]:
    """What a proof rests on, by the name of the part. The model's own `forward` is left out: accelerate puts one around
    it for each precision."""
    model, inner, linear = prepared.model, prepared.inner, prepared.inner.get_output_embeddings()
    configs = [config for part in model.modules() if (config := vars(part).get("config")) is not None]
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "attention": [name for config in configs if (name := getattr(config, "_attn_implementation", None))],
        "hook that finds sequences": any(isinstance(hook, Boundaries) for hook in model._forward_pre_hooks.values()),
        "loss function": (head.is_there(), inner.loss_function),
        "head's hooks": 0 if linear is None else sum(len(getattr(linear, kind)) for kind in kinds),
        **{
            f"part {name}": (part, None if part in (model, inner) else vars(part).get("forward"))
            for name, part in model.named_modules()
        },
    }


def _bare(trainer: Trainer, model: nn.Module) -> nn.Module:
    """The model in what accelerate and torch.compile put around it."""
    return trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
