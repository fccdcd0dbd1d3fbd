"""Flat batches of tokenized examples by our plan: every token once, none of padding."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from unpad.batching.balance import assign_equally
from unpad.batching.plan import Plan
from unpad.batching.sampler import MicroBatch, plan_whole
from unpad.errors import PlanError, RecipeError, ResumeError, SourceError
from unpad.recipes.section import checked
from unpad.recipes.training import PlanSettings


@dataclass(frozen=True)
class Ranks:
    """One rank among those that train a model, and how updates are divided among them.

    Args:
        rank: number of this one, from 0, of `size`.
        micros: micro-batches of each rank in an update; the last update of an epoch may have fewer.
    """

    rank: int = 0
    size: int = 1
    micros: int = 1

    def own(self, micros: Sequence[list[int]], lengths: np.ndarray) -> Iterator[list[int]]:
        """The micro-batches of this rank among those of an epoch: equally many in every update, shared out by tokens.

        Args:
            micros: indices of sequences; a multiple of `size`.
            lengths: tokens per sequence, (num_sequences,) int64.
        """
        if self.size == 1:
            yield from micros
            return
        for start in range(0, len(micros), self.size * self.micros):
            update = micros[start : start + self.size * self.micros]
            costs = [float(lengths[np.asarray(micro)].sum()) for micro in update]
            yield from (update[index] for index in assign_equally(costs, self.size)[self.rank])


IGNORED = -100  # label of a token that is no target
PACKED = "seq_lengths"  # column in which TRL writes the lengths of the sequences in a row
PLACE = "unpad_place"  # of an example: number of its row, and which of the sequences in it
PLAN = "UnpadPlan"  # key of the plan's identity in the state of a checkpoint
ARGUMENTS = {  # of that identity: name -> what sets it as before
    "tokens_per_micro": "attach(trainer, tokens_per_micro={})",
    "micro-batches of an update": "gradient_accumulation_steps times the number of ranks = {}",
    "seed": "data_seed={}",
    "digest of the lengths": "the train_dataset of before, with the digest {}",
    "micro-batches of an epoch": "num_train_epochs or max_steps as before, which give {}",
}
COLUMNS = ("input_ids", "labels", "attention_mask", PACKED)
NUM_ITEMS = "num_items_in_batch"  # of an example and a batch: what the sum over targets is divided by
EMPTY = ("token_type_ids", "special_tokens_mask")  # columns that tokenizers write, and causal models do not need
LOOKED_AT = 8  # rows that tell columns with a value a token from others
Row = Mapping[str, Sequence[int]]


class Rows(Protocol):
    """A dataset with rows that can be read in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]: ...


class Examples(Dataset[dict[str, Tensor]]):
    """Tokenized examples, with the lengths and targets that a plan needs.

    Args:
        data: rows of `input_ids`; `labels` of the same length, -100 where there is no loss, by default all tokens;
            `attention_mask`, whose zeros are padding that is left out; and `seq_lengths` of rows that are packed, which
            are taken apart again. A list, a map-style dataset of torch, or a dataset of the package datasets.
        columns: further columns with a value for every token, which batches have under their own names. What has no
            value a token, such as ids of documents, is left out.

    Attributes:
        lengths: tokens of each example, (num_examples,) int64.
        targets: tokens with loss, predicted from a token before them, (num_examples,) int64.

    Raises:
        SourceError: data without length or rows, rows without `input_ids` or with labels of another length, or further
            columns with a value for every token.
    """

    def __init__(self, data: Rows, columns: Sequence[str] = ()) -> None:
        refuse_streams(data)
        refuse_columns([data[number] for number in range(min(len(data), LOOKED_AT))], columns)
        if hasattr(data, "select_columns") and hasattr(data, "column_names"):  # of the package datasets
            data = data.select_columns([name for name in (*COLUMNS, *columns) if name in data.column_names])
        self.data, self.columns = data, tuple(columns)
        self.places: list[tuple[int, int, slice]] = []  # row, which of the sequences in it, and its tokens
        sizes: list[tuple[int, int]] = []
        for number in range(len(data)):
            row = data[number]
            for place in places_of(number, row):
                self.places.append(place)
                sizes.append(_size(read(row, place, self.columns)))
        self.lengths = np.array([length for length, _ in sizes], np.int64)
        self.targets = np.array([targets for _, targets in sizes], np.int64)
        if not self.targets.any():
            raise SourceError(f"none of the {len(self.places)} examples has a target", fix="check the labels")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids`, `labels` and columns of an example, each (length, ...); the first label is never a target.

        Example -1 - i is example i without a target, for a rank that has nothing else to compute.

        Raises:
            SourceError: the row has another length or number of targets than it had at first.
        """
        number = ~index if index < 0 else index
        place = self.places[number]
        row = self.data[place[0]]
        now = next((one for one in places_of(place[0], row) if one[1] == place[1]), place)  # a row may have grown
        example = read(row, now, self.columns)
        before = (int(self.lengths[number]), int(self.targets[number]))
        if _size(example) != before:
            raise SourceError(
                f"a row has {_size(example)} tokens and targets, and had {before} when it was read first",
                where=f"row {place[0]}",
                fix="let the data and the collator give the same for a row every time, without random numbers",
            )
        if index < 0:
            example["labels"][:] = IGNORED
        return example

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The examples of a batch of a loader; of a `BatchSampler`, with what its loss is divided by.

        Raises:
            SourceError: the sampler has other targets than these examples.
        """
        examples: list[dict[str, Any]] = [self[index] for index in indices or [~int(self.lengths.argmin())]]
        if isinstance(indices, MicroBatch):
            num_targets = sum(_size(example)[1] for example in examples)
            if num_targets != indices.num_targets:
                raise SourceError(
                    f"a batch has {num_targets} targets, and {indices.num_targets} by its sampler",
                    fix="make it with BatchSampler(examples.lengths, targets=examples.targets, ...)",
                )
            examples = [{**example, NUM_ITEMS: indices.num_items} for example in examples]
        return examples

    def digest(self) -> str:
        """The same for examples of the same lengths and targets in the same order."""
        return hashlib.blake2b(np.stack([self.lengths, self.targets]).tobytes(), digest_size=16).hexdigest()

    def plan(self, settings: PlanSettings, seed: int, epoch: int) -> Plan:
        return plan_whole(self.lengths, self.targets, settings, seed, epoch)


def is_streamed(data: object) -> bool:
    """True if the rows of data come one after the other, or their number is unknown."""
    return isinstance(data, IterableDataset) or not isinstance(data, Sequence | Sized)


def refuse_streams(data: object) -> None:
    """Refuse data with rows that cannot be read in any order.

    Raises:
        SourceError: it is streamed.
    """
    if is_streamed(data):
        raise SourceError(
            f"{type(data).__name__} has no length, or no rows by number, and a plan needs all lengths before it begins",
            fix="pass a dataset that is not streamed",
        )


def refuse_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Refuse rows with a value for every token under another name than those in `columns`.

    Raises:
        SourceError: names it.
    """
    names = [name for name in (rows[0] if rows else ()) if name not in (*COLUMNS, *columns, PLACE, NUM_ITEMS)]
    for name in names:
        values = [row.get(name) for row in rows]
        wide = all(
            isinstance(value, list | tuple | np.ndarray | Tensor) and len(value) == len(row.get("input_ids", ()))
            for value, row in zip(values, rows, strict=True)
        )
        if wide and not (name in EMPTY and all(not torch.as_tensor(value).any() for value in values)):
            raise SourceError(
                f"rows have a value for every token in the column {name}, which flat batches would not have",
                fix=f"pass columns=({name!r},) to have it in the batches, or remove it from the rows",
            )


def read(row: Mapping[str, Any], place: tuple[int, int, slice], columns: Sequence[str]) -> dict[str, Tensor]:
    """A sequence of a row, without padding.

    Args:
        place: of `places_of`.
        columns: further columns with a value for every token.
    """
    number, part, span = place
    ids = torch.as_tensor(row["input_ids"], dtype=torch.int64)
    labels = torch.as_tensor(row.get("labels", row["input_ids"]), dtype=torch.int64).clone()
    named = {"input_ids": ids, "labels": labels, **{name: torch.as_tensor(row.get(name, ())) for name in columns}}
    for name, value in named.items():
        if value.shape[:1] != ids.shape:
            raise SourceError(
                f"a row has {ids.numel()} input_ids and {len(value)} {name}",
                where=f"row {number}",
                fix="give one label per token, -100 where there is no loss; and one value in each further column",
            )
    real = torch.as_tensor(row["attention_mask"])[span].bool() if "attention_mask" in row else slice(None)
    sequence = {name: value[span][real] for name, value in named.items()}
    sequence["labels"][:1] = IGNORED
    return {**sequence, PLACE: torch.tensor([number, part])}


def places_of(number: int, row: Mapping[str, Any]) -> Iterator[tuple[int, int, slice]]:
    """The examples of a row: its number, that of the example in it, and their tokens."""
    if "input_ids" not in row:
        raise SourceError(
            f"a row has {', '.join(row) or 'no columns'} and no input_ids",
            where=f"row {number}",
            fix="tokenize the dataset first",
        )
    ends = np.cumsum([0, *row[PACKED]]).tolist() if PACKED in row else [0, len(row["input_ids"])]
    yield from ((number, part, slice(start, stop)) for part, (start, stop) in enumerate(pairwise(ends)))


def _size(example: Mapping[str, Tensor]) -> tuple[int, int]:
    """Tokens and targets."""
    return len(example["labels"]), int((example["labels"] != IGNORED).sum())


class PlannedBatches(Sampler[list[int]]):
    """Micro-batches of one rank in every epoch, as indices of examples; every epoch and rank has the same number.

    The trainers of transformers count the steps of an epoch once, and their ranks wait for each other in every
    micro-batch. Where the plan of an epoch has fewer micro-batches than that of another, or no multiple of the number
    of ranks, some without targets are added.

    Args:
        tokens: most tokens of a micro-batch, unless a single example has more.
        epochs: number of epochs with plans that are made; a later one repeats their order.
        ranks: how micro-batches are divided; default one rank, which has all.
    """

    def __init__(self, examples: Examples, tokens: int, *, epochs: int, seed: int, ranks: Ranks | None = None) -> None:
        self.examples, self.seed, self.epoch, self.ranks = examples, seed, 0, ranks or Ranks()
        self.settings = checked(PlanSettings, {"tokens_per_step": tokens, "tokens_per_micro": tokens})
        self.epochs = max(epochs, 1)
        plans = [self.plan(epoch) for epoch in range(self.epochs)]
        self.ledger = plans[0].ledger
        self.num = rounded_up(max(one.num_micros for one in plans), self.ranks.size)

    def identity(self) -> dict[str, Any]:
        """Everything that decides which rows an update trains, as JSON values by the names of `ARGUMENTS`."""
        per_update, digest = self.ranks.micros * self.ranks.size, self.examples.digest()
        values = (self.settings.tokens_per_micro, per_update, self.seed, digest, self.num)
        return dict(zip(ARGUMENTS, values, strict=True))

    def plan(self, epoch: int) -> Plan:
        return self.examples.plan(self.settings, self.seed, epoch % self.epochs)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num // self.ranks.size

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.plan(self.epoch)
        micros = [micro.seq_ids.tolist() for index in range(epoch.num_steps) for micro in epoch.step(index)]
        yield from self.ranks.own(filled(micros, self.examples.lengths, self.num), self.examples.lengths)


def refuse_other_plan(kept: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another plan.

    Args:
        kept: `PlannedBatches.identity` in the checkpoint; None in one of a trainer without `attach`.
        now: that of the plan to go on with.

    Raises:
        ResumeError: names what differs, and its value of before.
    """
    other = next((name for name, value in now.items() if kept is not None and kept.get(name) != value), None)
    if kept is not None and other is None:
        return
    what, fix = "the checkpoint was written without unpad.hf.attach", "resume it without attach"
    if kept is not None and other is not None:
        what = f"the checkpoint is of another plan: {other} {now[other]}, was {kept.get(other)}"
        fix = "resume it with " + ARGUMENTS[other].format(kept.get(other))
    what += "; by this plan some rows would be skipped and others trained twice"
    raise ResumeError(what, fix=f"{fix}, or begin anew from its weights")


def rounded_up(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple


def filled(micros: list[list[int]], lengths: np.ndarray, num: int) -> list[list[int]]:
    """Add micro-batches until there are `num`: of the shortest sequence without targets, which changes no sum.

    Args:
        micros: indices of sequences.
        lengths: tokens per sequence, (num_sequences,) int64.
    """
    shortest = min((index for micro in micros for index in micro), key=lambda index: int(lengths[index]))
    return micros + [[~shortest]] * (num - len(micros))


def collate(rows: Sequence[Mapping[str, Sequence[int] | Tensor]], columns: Sequence[str] = ()) -> dict[str, Any]:
    """Rows of `input_ids` and, if not all tokens are targets, `labels`, end to end as one row without padding.

    Args:
        columns: further columns with a value for every token, each (1, total_tokens, ...) in the batch.

    Returns:
        `input_ids`, `labels`, `position_ids`, (1, total_tokens) int64; `cu_seq_lens_q` and `cu_seq_lens_k`,
        (num_seqs + 1,) int32; `max_length_q` and `max_length_k`, int. The first label of every sequence is -100, so
        that none is predicted from the sequence before it.
    """
    ids = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    labels = [torch.as_tensor(row.get("labels", row["input_ids"]), dtype=torch.int64).clone() for row in rows]
    for own in labels:
        own[:1] = IGNORED
    lengths = [len(own) for own in ids]
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        **{name: torch.cat([torch.as_tensor(row[name]) for row in rows])[None] for name in columns},
    }


class Step(NamedTuple):
    """Micro-batches of one rank in an optimizer step, and the number of targets of all ranks in it.

    `model(**batch, num_items_in_batch=num_targets).loss` of all of them, on all ranks, adds up to the mean over
    the step's targets.
    """

    batches: list[dict[str, Any]]
    num_targets: Tensor


def steps(
    data: Sequence[Row],
    *,
    columns: Sequence[str] = (),
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    **settings: Any,
) -> Iterator[Step]:
    """Yield the steps of an epoch for a training loop of one's own.

        for batches, num_targets in unpad.hf.steps(rows, tokens_per_step=16384, tokens_per_micro=4096, epoch=epoch):
            for batch in batches:
                model(**batch, num_items_in_batch=num_targets).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Of several ranks each gets its micro-batches of every step, equally many, shared out by tokens. The gradient of the
    step is the sum of theirs; torch's DistributedDataParallel makes the mean, so there the loss is to be multiplied by
    `world_size`.

    Args:
        data, columns: as in `Examples`.
        rank, world_size: number of this process and of all; every one calls this with the same other arguments.
        settings: fields of the recipe's `plan` section. Examples are never cut.

    Raises:
        PlanError: settings that cut examples or pad them.
        RecipeError: no such rank.
    """
    if not 0 <= rank < world_size:
        raise RecipeError(f"there is no rank {rank} of {world_size}", fix="pass 0 <= rank < world_size")
    examples = Examples(data, columns)
    chosen = checked(PlanSettings, settings)
    epoch_plan = examples.plan(chosen, seed, epoch)
    if epoch_plan.pad_to.any() or epoch_plan.fill_to.any() or chosen.max_tokens is not None:
        raise PlanError("flat batches of whole examples are neither padded nor cut", fix="use strategy=pack")
    for index in range(epoch_plan.num_steps):
        micros = [micro.seq_ids.tolist() for micro in epoch_plan.step(index)]
        num_targets = int(sum(examples.targets[micro].sum() for micro in micros))
        num = rounded_up(len(micros), world_size)
        own = Ranks(rank, world_size, num // world_size).own(filled(micros, examples.lengths, num), examples.lengths)
        made = [collate([examples[one] for one in micro], columns) for micro in own]
        yield Step(made, torch.tensor(num_targets))
