"""The Python interface: functions for what the command line does, and batches for any training loop."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from unpad import storage
from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_micro, load_steps
from unpad.batching.plan import Plan
from unpad.batching.plan import plan as make_plan
from unpad.errors import PlanError
from unpad.inference.loaded import LoadedRun, load
from unpad.nn.native import library
from unpad.processes.group import joined
from unpad.recipes.section import checked
from unpad.recipes.training import PlanSettings
from unpad.run.folder import Start, free_folder
from unpad.storage.paths import new_path
from unpad.terminal.progress import held
from unpad.terminal.table import number_of
from unpad.training.loop import train as run_training


def train(
    recipe: str, *overrides: str, out: str | Path | None = None, resume: bool = False, quiet: bool = False
) -> LoadedRun:
    """Train a recipe and load the finished run.

    Progress is one line on standard error: a live one on a terminal and in a notebook, else one every 30 s.

    Args:
        recipe: packaged name or YAML file; with `resume`, also a run.
        overrides: such as "data.chat=my.jsonl", "optim.lr=1e-4".
        out: run directory; default runs/<recipe>-<n>. Processes of torchrun, and those in a process group of
            torch.distributed, train one run together, and must name it.
        resume: continue the run that `recipe` names, or the one in `out`.
        quiet: show no progress.
    """
    start = Start.of(recipe, overrides, new_path(out) if out is not None else None, resume=resume)
    silent = Console(quiet=True)
    with joined() as group, held() if quiet or not group.leads else nullcontext():
        run_training(start.recipe, start.folder, start.overrides, resume=resume, console=silent, group=group)
    return load(start.folder)


def plan(
    lengths: Sequence[int] | np.ndarray, *, seed: int = 0, epoch: int = 0, first_step: int = 0, **settings: Any
) -> Plan:
    """Plan one epoch over sequences of the given lengths.

    Args:
        lengths: positions the model sees per sequence, (num_seqs,).
        first_step: steps before this epoch, for grow_per="step".
        settings: fields of the recipe's `plan` section but `window`, such as strategy="pack" or tokens_per_step=4096.
    """
    chosen = checked(PlanSettings, settings)
    return make_plan(np.asarray(lengths), chosen, seed=seed, epoch=epoch, first_step=first_step)


def batches(
    sequences: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[bool]] | None = None,
    *,
    seed: int = 0,
    epoch: int = 0,
    first_step: int = 0,
    **settings: Any,
) -> Iterator[list[RaggedBatch]]:
    """Yield the micro-batches of every optimizer step of an epoch, for any training loop.

    Divide each loss sum by the step's number of targets, not by the micro-batch's, as `training.step.accumulate` does.

    Args:
        sequences: token ids; n tokens give n - 1 positions.
        loss_masks: True where a token counts in the loss; default everywhere.
        first_step: steps before this epoch, for grow_per="step".
        settings: fields of the recipe's `plan` section.

    Raises:
        PlanError: masks do not fit the sequences, or nothing is planned.
    """
    lengths = [max(len(s) - 1, 0) for s in sequences]
    epoch_plan = plan(lengths, seed=seed, epoch=epoch, first_step=first_step, **settings)
    if not epoch_plan.num_steps:
        what = f"no batch comes of {number_of(len(sequences), 'sequences')}: all are dropped, or have no second token"
        raise PlanError(what, fix="give sequences of two tokens or more, without plan.drop_last")
    masks = loss_masks if loss_masks is not None else [[True] * len(s) for s in sequences]
    for index, (sequence, mask) in enumerate(zip(sequences, masks, strict=False)):
        if len(sequence) != len(mask):
            what = f"sequence {index} has {number_of(len(sequence), 'tokens')}, and its loss mask {len(mask)}"
            raise PlanError(what, fix="give one mask value per token")
    if len(sequences) != len(masks):
        what = f"{number_of(len(sequences), 'sequences')} and {number_of(len(masks), 'loss masks')} are given"
        raise PlanError(what, fix="give one per sequence")
    tokens = _InMemory([np.asarray(s, np.int64) for s in sequences], [np.asarray(m, np.bool_) for m in masks])
    yield from load_steps(
        partial(load_micro, tokens, pad_id=0), epoch_plan, torch.device("cpu"), group_lengths=not library.enabled()
    )


@dataclass(frozen=True)
class _InMemory:
    """Sequences and loss masks in memory, with the interface that the loader reads."""

    tokens: list[np.ndarray]
    loss_masks: list[np.ndarray]

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        spans = [
            (s, slice(a, b + 1)) for s, a, b in zip(seq_ids.tolist(), starts.tolist(), stops.tolist(), strict=True)
        ]
        tokens = [self.tokens[seq][span] for seq, span in spans]
        masks = [self.loss_masks[seq][span] for seq, span in spans]
        offsets = np.cumsum([0, *map(len, tokens)])
        return (
            np.concatenate([*tokens, np.zeros(0, np.int64)]),
            np.concatenate([*masks, np.zeros(0, np.bool_)]),
            offsets,
        )


# --------------------------------------------------------------------------- lists of texts, one call


def train_texts(
    texts: Sequence[str],
    epochs: int,
    lr: float,
    out: str | Path | None = None,
    *,
    patience: int | None = None,
    batch_size: int = 1,
    bucket: bool = False,
) -> int:
    """Train the small Chinese model on texts, and return the epochs it took.

    Args:
        epochs: upper limit; training stops earlier under `patience`.
        out: run directory; default runs/texts-<n>. The texts are written beside it, as <out>.jsonl.
        patience: evaluations without progress before training stops; None never stops early.
        batch_size: texts per step.
        bucket: whether the texts of a step have similar lengths; else they are drawn at random.
    """
    strategy = "bucket" if bucket else "dynamic"
    return _train_texts(texts, epochs, lr, out, patience, f"plan.strategy={strategy}", f"plan.batch_size={batch_size}")


def _train_texts(
    texts: Sequence[str], epochs: int, lr: float, out: str | Path | None, patience: int | None, *batching: str
) -> int:
    """Train on texts with `batching`, overrides of the plan, and return the epochs it took."""
    folder = new_path(out) if out is not None else free_folder("texts", resume=False)
    source = folder.with_name(folder.name + ".jsonl")
    storage.make_folder(source.parent)
    storage.write_atomic(source, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    overrides = [
        f"data.text={source}", "stages=[]", "data.chat=[]", f"optim.lr={lr}", f"train.max_epochs={epochs}",
        "plan.tokens_per_step=1", "train.eval_every=null", "checkpoint.every=null", *batching,
        *([f"train.patience={patience}"] if patience is not None else []),
    ]  # fmt: skip
    return run_training("zh_chat", folder, overrides, console=Console(quiet=True)).epochs


def _deprecated(name: str, arguments: str) -> None:
    """Warn the caller of `name`, which the next minor version removes, of what to call in its place."""
    what = f"unpad.{name} is deprecated and goes in 0.3.0; call unpad.train_texts({arguments})"
    warnings.warn(what, DeprecationWarning, stacklevel=3)


def train_monitored(
    texts: Sequence[str], epochs: int, lr: float, patience: int, accumulation_steps: int, out: str | Path | None = None
) -> int:
    """Deprecated: `train_texts` by the name and arguments of an earlier program.

    Texts are computed one at a time, so memory is that of one text; a step adds up the gradients of
    `accumulation_steps` of them. `train_texts` with as large a batch takes the same updates, to rounding.
    """
    _deprecated("train_monitored", "texts, epochs, lr, out, patience=patience, batch_size=accumulation_steps")
    alone = "plan.strategy=dynamic", "plan.batch_size=1"
    return _train_texts(texts, epochs, lr, out, patience, *alone, f"plan.batches_per_step={accumulation_steps}")


def train_monitored_batch(
    texts: Sequence[str],
    max_epochs: int,
    initial_lr: float,
    patience: int,
    batch_size: int,
    out: str | Path | None = None,
) -> int:
    """Deprecated: `train_texts` with `bucket`, by the name and arguments of an earlier program."""
    _deprecated(
        "train_monitored_batch",
        "texts, max_epochs, initial_lr, out, patience=patience, batch_size=batch_size, bucket=True",
    )
    return train_texts(texts, max_epochs, initial_lr, out, patience=patience, batch_size=batch_size, bucket=True)
