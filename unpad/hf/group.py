"""Processes of a trainer under torchrun: which of them train together, and what all must have alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from accelerate.utils import DistributedType
from transformers import PreTrainedModel, Trainer, TrainingArguments

from unpad.errors import RecipeError, UnlikeProcessesError
from unpad.processes.group import ALONE, Group

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


def cells_per_token(inner: PreTrainedModel) -> float:
    """The cost of a model of transformers, see `models.cost`: every block attends to all tokens before."""
    config = inner.config.get_text_config()
    embedded = sum(p.numel() for p in inner.get_input_embeddings().parameters())
    weights = max(sum(p.numel() for p in inner.parameters()) - embedded, 1)
    return float(weights / (config.num_hidden_layers * config.hidden_size))


@contextmanager
def own_counts(args: TrainingArguments) -> Iterator[None]:
    """Let the trainer divide a loss by the targets of this rank's batch alone inside."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before
