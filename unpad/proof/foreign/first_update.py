"""The first update of a Hugging Face trainer: its micro-batches, its state before them, and its steps on them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.judge import NO_ROUTER_LOSS
from unpad.proof.foreign.known import Batch, Collated
from unpad.proof.foreign.measure import take_gradient
from unpad.proof.foreign.model import no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.undisturbed import Accelerator, undisturbed, without_dropout
from unpad.proof.foreign.update import LABELS, Known
from unpad.proof.members import HasMembers

Collate = Callable[[list[object]], Collated]

STOCK = ("transformers", "trl", "unpad")  # packages with a `compute_loss` that is the mean over targets

LOSS_ONLY = ("fused_lm_head", "num_items_in_batch", "return_dict")  # inputs of a model that belong to its loss


@runtime_checkable
class Arguments(HasMembers, Protocol):
    """Arguments of a trainer."""

    gradient_accumulation_steps: int
    device: torch.device
    n_gpu: int
    optim: object


@runtime_checkable
class ForeignTrainer(HasMembers, Protocol):
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


class Origins(Protocol):
    """Object that knows the data rows and the collator from which the examples of a trainer were made."""

    def sequence_before(self, example: object) -> Known: ...

    def batch_before(self, example: object) -> Batch: ...


@runtime_checkable
class HasOrigins(HasMembers, Protocol):
    """A trainer with batches from another source than its own loader; its examples are not the data's."""

    attachment: Origins | None


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
        if hasattr(trainer, "aux_loss_enabled"):  # of TRL, which adds that loss by itself
            router |= trainer.aux_loss_enabled
            trainer.aux_loss_enabled = False
        notes = [NO_ROUTER_LOSS] if router else []
        if trainer.accelerator.mixed_precision != "no":
            notes.append(f"training will run in {trainer.accelerator.mixed_precision}; the proof does without")
        yield model, notes


def refuse_several(trainer: ForeignTrainer) -> None:
    if trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1:
        raise ProofError("the trainer runs in several processes or on several devices", fix="prove it in one process")
    if "lomo" in str(trainer.args.optim).lower():
        raise ProofError("this optimizer changes weights during backward", fix="prove with another optim")


@dataclass(eq=False)
class Recorded:
    """Collator that keeps the examples of every call, and gets copies, as it may change rows that the data hold."""

    collate: Collate
    examples: list[list[object]] = field(default_factory=list)

    def __call__(self, examples: list[object]) -> Collated:
        self.examples.append(copy.deepcopy(examples))
        return self.collate(copy.deepcopy(examples))


@contextmanager
def recording(loader: object) -> Iterator[Recorded]:
    """Record the inputs of a loader's collator, in this process, and leave the collator unchanged."""
    inner: Any = getattr(loader, "base_dataloader", loader)  # accelerate has one around it
    if not hasattr(inner, "collate_fn"):
        yield Recorded(no_batches)
        return
    before = (inner.collate_fn, inner.num_workers, inner.timeout)
    inner.collate_fn = recorded = Recorded(copy.deepcopy(inner.collate_fn))
    inner.num_workers, inner.timeout = 0, 0
    try:
        yield recorded
    finally:
        inner.collate_fn, inner.num_workers, inner.timeout = before


def no_batches(examples: list[object]) -> Collated:
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


BEGUN = ("state", "is_in_train")  # attributes of a trainer that `begin` gives


def begin(trainer: Any, loader: object) -> None:
    """Give a trainer the state that `train` begins with, which a loss may read."""
    if not hasattr(trainer, "_init_training_state"):  # before transformers 5
        return
    try:
        num_epochs, steps_per_epoch, *_, max_steps = trainer.set_initial_training_values(trainer.args, loader)
    except ValueError:  # neither max_steps nor a length: `train` raises it too
        return
    trainer._init_training_state(max_steps, steps_per_epoch, num_epochs, None, None)
    vars(trainer)["is_in_train"] = True


@dataclass(frozen=True, eq=False)
class TrainerStep:
    """Results of `training_step` over the micro-batches of an update, and the inputs that the model got."""

    loss: float
    gradient: dict[str, Tensor]
    inputs: list[dict[str, object]]


def take_step(trainer: ForeignTrainer, batches: Sequence[Batch], num_items: Tensor | int | None) -> TrainerStep:
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


def has_own_loss(trainer: ForeignTrainer) -> bool:
    """True if the loss may differ from the mean cross-entropy: a user's function or class, smoothing, or DFT."""
    named = getattr(trainer.args, "loss_type", "nll") != "nll"  # of TRL
    return named or trainer.label_smoother is not None or bool(users_loss(trainer))


def users_loss(trainer: ForeignTrainer) -> str:
    """Name of the user's own function or method that makes the loss; empty if there is none."""
    made = [trainer.compute_loss_func, trainer.compute_loss]
    names = [getattr(one, "__qualname__", type(one).__name__) for one in made if callable(one) and is_users_own(one)]
    names += ["compute_loss"] if "compute_loss" in vars(trainer) else []
    return str(names[0]) if names else own_divisor(trainer)


def is_users_own(method: Callable[..., object]) -> bool:
    """True for a method of a user's own."""
    return str(getattr(method, "__module__", "")).partition(".")[0] not in STOCK


def own_divisor(trainer: ForeignTrainer) -> str:
    """Name of the user's own method that makes the number of items of an update; empty if there is none."""
    stock = trainer.get_batch_samples
    methods = [stock, getattr(trainer, "_get_num_items_in_batch", stock)]
    return next((getattr(one, "__qualname__", "get_batch_samples") for one in methods if is_users_own(one)), "")
