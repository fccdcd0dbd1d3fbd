"""Flat batches of tokenized examples by our plan: every token once, none of padding."""

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler

from unpad.batching.balance import assign
from unpad.batching.plan import Plan
from unpad.batching.sampler import MicroBatch, plan_whole, share_of
from unpad.errors import PlanError, RecipeError, SourceError
from unpad.processes.group import ALONE, Group
from unpad.recipes.section import checked
from unpad.recipes.training import PlanSettings

IGNORED = -100  # label of a token that is no target
PACKED = "seq_lengths"  # column in which TRL writes the lengths of the sequences in a row
PLACE = "unpad_place"  # of an example: number of its row, and which of the sequences in it
MICRO = "unpad_micro"  # of an example: number of its micro-batch in an update
MICROS = "unpad_micros"  # of an update: its micro-batches, each a flat batch
COLUMNS = ("input_ids", "labels", "attention_mask", PACKED)
NUM_ITEMS = "num_items_in_batch"  # of an example and a batch: what the sum over targets is divided by
EMPTY = ("token_type_ids", "special_tokens_mask")  # columns that tokenizers write, and causal models do not need
LOOKED_AT = 8  # rows that tell columns with a value a token from others


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
            what = f"a row has {_size(example)} tokens and targets, and had {before} when it was read first"
            fix = "let the data and the collator give the same for a row every time, without random numbers"
            raise SourceError(what, where=f"row {place[0]}", fix=fix)
        if index < 0:
            example["labels"][:] = IGNORED
        return example

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The examples of a batch of a loader; of a `BatchSampler`, with what its loss is divided by.

        Raises:
            SourceError: the sampler has other targets than these examples.
        """
        fill = [] if indices else [~int(min(np.flatnonzero(self.targets), key=self.lengths.__getitem__))]
        examples: list[dict[str, Any]] = [self[index] for index in [*indices, *fill]]
        if isinstance(indices, MicroBatch):
            num_targets = sum(_size(example)[1] for example in examples)
            if num_targets != indices.num_targets:
                what = f"a batch has {num_targets} targets, and {indices.num_targets} by its sampler"
                raise SourceError(what, fix="make it with BatchSampler(rows.lengths, targets=rows.targets, ...)")
            examples = [{**example, NUM_ITEMS: indices.num_items} for example in examples]
        return examples

    def digest(self) -> str:
        """The same for examples of the same lengths and targets in the same order."""
        return hashlib.blake2b(np.stack([self.lengths, self.targets]).tobytes(), digest_size=16).hexdigest()

    def plan(self, settings: PlanSettings, seed: int, epoch: int) -> Plan:
        """The plan of an epoch. Examples are whole, and those without targets are left out; the ledger counts them."""
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
        kinds, pairs = (list, tuple, np.ndarray, Tensor), zip(values, rows, strict=True)
        wide = all(isinstance(one, kinds) and len(one) == len(row.get("input_ids", ())) for one, row in pairs)
        if wide and not (name in EMPTY and all(not torch.as_tensor(value).any() for value in values)):
            what = f"rows have a value for every token in the column {name}, which flat batches would not have"
            raise SourceError(what, fix=f"pass columns=({name!r},) to have it there, or remove it from the rows")


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
            what = f"a row has {ids.numel()} input_ids and {len(value)} {name}"
            fix = "give one label per token, -100 where there is no loss; and one value in each further column"
            raise SourceError(what, where=f"row {number}", fix=fix)
    real = torch.as_tensor(row["attention_mask"])[span].bool() if "attention_mask" in row else slice(None)
    sequence = {name: value[span][real] for name, value in named.items()}
    sequence["labels"][:1] = IGNORED
    return {**sequence, PLACE: torch.tensor([number, part])}


def places_of(number: int, row: Mapping[str, Any]) -> Iterator[tuple[int, int, slice]]:
    """The examples of a row: its number, that of the example in it, and their tokens."""
    if "input_ids" not in row:
        what = f"a row has {', '.join(row) or 'no columns'} and no input_ids"
        raise SourceError(what, where=f"row {number}", fix="tokenize the dataset first")
    ends = np.cumsum([0, *row[PACKED]]).tolist() if PACKED in row else [0, len(row["input_ids"])]
    yield from ((number, part, slice(start, stop)) for part, (start, stop) in enumerate(pairwise(ends)))


def _size(example: Mapping[str, Tensor]) -> tuple[int, int]:
    """Tokens and targets."""
    return len(example["labels"]), int((example["labels"] != IGNORED).sum())


class Updates(Sampler[list[tuple[int, int]]]):
    """Batches of one rank in an epoch, with the rows of a trainer's own updates cut into micro-batches of ours.

    A trainer takes `accumulation` batches for an update. The last of them has all micro-batches of the update for this
    rank, and those before it are empty. Every rank has the same number of micro-batches in an update. Sequences without
    targets are left out.

    Args:
        batches: rows of the batches of this rank, as the trainer's own loader has them.
        tokens: most tokens of a micro-batch, unless a single sequence has more.
    """

    def __init__(
        self, examples: Examples, batches: BatchSampler, tokens: int, *, accumulation: int, group: Group = ALONE
    ) -> None:
        self.batches, self.lengths, self.tokens = batches, examples.lengths, tokens
        self.accumulation, self.group = accumulation, group
        self.whole: Any = getattr(batches, "batch_sampler", batches)  # of all ranks, around which accelerate puts one's
        self.sampler = self.whole.sampler  # accelerate tells it the epoch
        self.indices: list[list[int]] = [[] for _ in range(len(examples.data))]  # of the sequences of each row
        usable = np.flatnonzero(examples.targets)
        for index in usable.tolist():
            self.indices[examples.places[index][0]].append(index)
        self.shortest = int(usable[self.lengths[usable].argmin()])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Indices of sequences, each with the number of its micro-batch in the update."""
        ranks = self._rows()
        for start in range(0, len(self), self.accumulation):
            span = slice(start, min(start + self.accumulation, len(self)))
            rows = [row for batches in ranks for batch in batches[span] for row in batch]
            yield from ([] for _ in range(span.start + 1, span.stop))
            yield [(index, number) for number, micro in enumerate(self._own(rows)) for index in micro]

    def _rows(self) -> list[list[list[int]]]:
        """Rows of the batches of every rank in an epoch."""
        rows, group = [int(row) for row in self.sampler], self.group
        if group.size > 1:  # some samplers draw another order on each rank
            rows = group.exchange(rows if group.leads else [])[0]
        batches = BatchSampler(rows, self.whole.batch_size, self.whole.drop_last)
        if group.size == 1:
            return [list(batches)]
        ranks: list[Any] = [copy.copy(self.batches) for _ in range(group.size)]
        for rank, own in enumerate(ranks):
            own.batch_sampler, own.process_index = batches, rank
        return list(map(list, ranks))

    def _own(self, rows: Sequence[int]) -> list[list[int]]:
        """Micro-batches of this rank in an update of these rows."""
        indices, size = [index for row in rows for index in self.indices[row]], self.group.size
        costs = self.lengths[indices].tolist()
        num = rounded_up(max(math.ceil(sum(min(cost, self.tokens) for cost in costs) / self.tokens), 1), size)
        while True:
            micros = [[indices[at] for at in share] for share in assign(costs, num)]
            if all(len(micro) < 2 or self.lengths[micro].sum() <= self.tokens for micro in micros):
                silent = [~self.shortest]  # without a target, for a rank that has nothing else to compute
                return share_of([micro or silent for micro in micros], self.lengths, self.group.rank, size)
            num += rounded_up(max(num // 16, 1), size)


class MicroBatches(Dataset[dict[str, Any]]):
    """Examples by what `Updates` yields, each with the number of its micro-batch. Its length is that of the data."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples.data)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        index, micro = place
        return {**self.examples[index], MICRO: micro}


def micros_of(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Examples of `MicroBatches`, in order, by micro-batch."""
    return [list(run) for _, run in groupby(rows, key=itemgetter(MICRO))]


def collate_update(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A flat batch of all examples of an update, with those of its micro-batches as MICROS.

    Without examples its tokens are (1, 0).
    """
    if not rows:
        nothing = torch.zeros(1, 0, dtype=torch.int64)
        return {**dict.fromkeys(("input_ids", "labels", "position_ids"), nothing), MICROS: []}
    return {**collate(rows), MICROS: [collate(micro) for micro in micros_of(rows)]}


def rounded_up(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple


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


@dataclass(frozen=True)
class Collator:
    """Rows end to end as one batch without padding, as `collate_fn` of a DataLoader or `data_collator` of a trainer.

    Rows are as in `unpad.hf.Examples`, each of one sequence or several. The batch is that of `unpad.hf.collate`; with
    rows that `Examples` and `unpad.BatchSampler` chose it also has `num_items_in_batch`, by which a model of
    transformers divides its loss: the mean of the losses of an update is so the mean over its targets. With rows of
    another dataset it has not, and each loss is the mean over the targets of its batch.

    Args:
        columns: further columns with a value for every token, which the batch has under their own names. What has no
            value a token is left out.

    Raises:
        SourceError: no rows; rows without `input_ids`; another column with a value for every token.
    """

    columns: Sequence[str] = ()

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not rows:
            raise SourceError("a batch of no rows", fix="let the dataset be unpad.hf.Examples(rows)")
        refuse_columns(rows, self.columns)
        parts = [read(row, place, self.columns) for number, row in enumerate(rows) for place in places_of(number, row)]
        items = {NUM_ITEMS: rows[0][NUM_ITEMS]} if NUM_ITEMS in rows[0] else {}
        return {**collate(parts, self.columns), **items}


class Step(NamedTuple):
    """Micro-batches of one rank in an optimizer step, and the number of targets of all ranks in it.

    `model(**batch, num_items_in_batch=num_targets).loss` of all of them, on all ranks, adds up to the mean over
    the step's targets.
    """

    batches: list[dict[str, Any]]
    num_targets: Tensor


def steps(
    data: Rows, *, seed: int = 0, epoch: int = 0, rank: int = 0, world_size: int = 1, **settings: Any
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
        data: `Examples`, or rows for them.
        rank, world_size: number of this process and of all; every one calls this with the same other arguments.
        settings: fields of the recipe's `plan` section. Examples are never cut.

    Raises:
        PlanError: settings that cut examples or pad them.
        RecipeError: no such rank.
    """
    if not 0 <= rank < world_size:
        raise RecipeError(f"there is no rank {rank} of {world_size}", fix="pass 0 <= rank < world_size")
    examples = data if isinstance(data, Examples) else Examples(data)
    chosen = checked(PlanSettings, settings)
    epoch_plan = examples.plan(chosen, seed, epoch)
    if epoch_plan.pad_to.any() or epoch_plan.fill_to.any() or chosen.max_tokens is not None:
        raise PlanError("flat batches of whole examples are neither padded nor cut", fix="use strategy=pack")
    for index in range(epoch_plan.num_steps):
        micros = [micro.seq_ids.tolist() for micro in epoch_plan.step(index)]
        num_targets = int(sum(examples.targets[micro].sum() for micro in micros))
        micros += [[] for _ in range(-len(micros) % world_size)]
        own = share_of(micros, examples.lengths, rank, world_size)
        made = [collate(examples.__getitems__(micro), examples.columns) for micro in own]
        yield Step(made, torch.tensor(num_targets))
