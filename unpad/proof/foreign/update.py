"""The batches of one update, read without knowledge of their format: places of their sequences, and
checks of their labels."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.errors import ProofError

IGNORE = -100
LABELS = ("labels", "shift_labels")
# Keyword arguments of a flat batch that name its boundaries, as FlashAttention's users in transformers pass them.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
TOKENS = ("input_ids", "attention_mask", "position_ids", "use_cache", *LABELS, *BOUNDARIES)
NOBODY, OUTSIDE = -1, -2  # owners: a token of no sequence; beyond the end of a row
LEAST_RUN = 3  # tokens of a piece of a sequence; shorter ones match by chance


Batch = Mapping[str, object]
Collated = Batch | Sequence[Batch]


@dataclass(frozen=True)
class LabelledSequence:
    """One sequence as the data has it.

    Args:
        labels: the token at each target position, else -100; the first position is never a target.
        beside: what the model reads of it besides tokens, such as pixels, as in a batch of it alone.
    """

    ids: list[int]
    labels: list[int]
    beside: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        return sum(label != IGNORE for label in self.labels)


@dataclass(frozen=True, eq=False)
class ForeignBatch:
    """Batch that a collator made of some sequences.

    Args:
        inputs: everything in the batch but labels.
        labels: `labels` and `shift_labels`, as far as the batch has them.
        ids: (rows, width) int64.
        targets: the target of each cell's logits, -100 where none, (rows, width) int64.
        real: False for what `attention_mask` hides, (rows, width) bool.
    """

    inputs: dict[str, object]
    labels: dict[str, Tensor]
    ids: Tensor
    targets: Tensor
    real: Tensor

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORE).sum())

    def rectangle(self, name: str) -> Tensor | None:
        """An input with an entry for every token, (rows, width)."""
        value = self.inputs.get(name)
        if not isinstance(value, Tensor) or value.numel() != self.ids.numel():
            return None
        return value.reshape(self.ids.shape)

    def with_ids(self, ids: Tensor) -> dict[str, object]:
        """The inputs with other tokens, (rows, width)."""
        given = cast(Tensor, self.inputs["input_ids"])
        return {**self.inputs, "input_ids": ids.reshape(given.shape).to(given)}

    def starts(self) -> Tensor:
        """Cells at which `position_ids` do not go on from the cell before, (rows, width) bool."""
        positions = self.rectangle("position_ids")
        if positions is None:
            return torch.zeros_like(self.real)
        return F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)


def has_media(batch: Batch) -> bool:
    """True if a batch has features besides its tokens, such as pixels: floats of several axes, not one a token."""
    features = [value for name, value in batch.items() if name not in (*TOKENS, "inputs_embeds")]
    shape = getattr(batch.get("input_ids"), "shape", None)
    tensors = [one for one in features if isinstance(one, Tensor) and one.is_floating_point()]
    return any(one.dim() > 1 and one.shape[:2] != shape for one in tensors)


def beside_tokens(batch: Batch, real: Tensor) -> dict[str, object]:
    """What a batch of one sequence has besides its tokens, labels and boundaries.

    Args:
        real: False for cells of padding, (width,) bool, of which nothing is kept.
    """
    return {
        name: value[:, real] if isinstance(value, Tensor) and value.shape[:2] == (1, len(real)) else value
        for name, value in batch.items()
        if name not in TOKENS and value is not None
    }


def listed(collated: Collated) -> list[Batch]:
    return [collated] if isinstance(collated, Mapping) else list(collated)


def labelled(sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None) -> list[LabelledSequence]:
    """The sequences with the targets of masks, by default all tokens but the first.

    Raises:
        ProofError: a sequence is empty, or masks have other lengths.
    """
    ids = [[int(token) for token in one] for one in sequences]
    if not ids or not all(ids):
        raise ProofError("there is no sequence, or an empty one", fix="pass sequences of at least one token")
    kept = [[True] * len(one) for one in ids] if masks is None else masks
    if list(map(len, kept)) != list(map(len, ids)):
        raise ProofError("loss_masks have other lengths than the sequences", fix="pass one flag for every token")
    return [
        LabelledSequence(
            one, [token if flag and at else IGNORE for at, (token, flag) in enumerate(zip(one, mask, strict=True))]
        )
        for one, mask in zip(ids, kept, strict=True)
    ]


def converted(value: Any, *, device: torch.device | None = None, floats: torch.dtype | None = None) -> Any:
    """Tensors, also those in mappings, lists and dataclasses, on a device and, if floating-point, in a dtype."""
    part = partial(converted, device=device, floats=floats)
    if isinstance(value, Tensor):
        value = value.to(device)
        return value.to(floats) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: part(one) for name, one in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return list(map(part, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: part(getattr(value, one.name)) for one in fields(value)})
    return value


def read_batch(batch: Batch) -> ForeignBatch:
    """Read a batch with `input_ids` and `labels` or `shift_labels`.

    Raises:
        ProofError: one of them is missing, or not of the shape of `input_ids`.
    """
    given = batch.get("input_ids")
    if not isinstance(given, Tensor) or given.dim() not in (1, 2):
        raise ProofError("the batch has no tensor input_ids of one or two dimensions", fix="collate to input_ids")
    ids = given.reshape(1, -1) if given.dim() == 1 else given
    labels = {name: value for name in LABELS if isinstance(value := batch.get(name), Tensor)}
    if not labels or any(value.numel() != ids.numel() for value in labels.values()):
        what = "the batch has no labels or shift_labels in the shape of input_ids"
        raise ProofError(what, fix="let the collator write labels: the token itself at each target, -100 elsewhere")
    if "shift_labels" in labels:
        targets = labels["shift_labels"].reshape(ids.shape)
    else:
        targets = F.pad(labels["labels"].reshape(ids.shape)[:, 1:], (0, 1), value=IGNORE)
    inputs = {str(name): value for name, value in batch.items() if name not in LABELS}
    mask = inputs.get("attention_mask")
    real = mask.reshape(ids.shape) > 0 if isinstance(mask, Tensor) and mask.numel() == ids.numel() else ids == ids
    return ForeignBatch(inputs, labels, ids, targets, real)


@dataclass(frozen=True)
class Span:
    """A run of one sequence's tokens in a row.

    Args:
        sequence: index of the sequence.
        offset: position in the sequence of the first token.
        row, start: cell of the first token.
        length: in tokens.
    """

    sequence: int
    offset: int
    row: int
    start: int
    length: int


class Cells:
    """Rows of tokens; some cells may be taken.

    Args:
        rows: token ids of each row; None for a cell without a token, such as masked padding.
        starts: (row, column) of cells at which a sequence may start, from restarting positions.
    """

    def __init__(self, rows: Sequence[Sequence[int | None]], starts: Iterable[tuple[int, int]] = ()) -> None:
        self._rows = [list(row) for row in rows]
        self._hints = set(starts)
        self._pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._singles: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for r, row in enumerate(self._rows):
            for c, token in enumerate(row):
                following = row[c + 1] if c + 1 < len(row) else None
                if token is not None:
                    self._singles[token].append((r, c))
                    if following is not None:
                        self._pairs[token, following].append((r, c))

    def candidates(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Cells where these tokens start, compared up to the first two."""
        return self._singles[tokens[0]] if len(tokens) == 1 else self._pairs[tokens[0], tokens[1]]

    def run(self, tokens: Sequence[int], row: int, start: int) -> int:
        """Number of free cells from `start` on that hold the tokens."""
        length, cells = 0, self._rows[row]
        while length < len(tokens) and start + length < len(cells) and cells[start + length] == tokens[length]:
            length += 1
        return length

    def fit(self, row: int, start: int, length: int) -> int:
        """Number of the ends of a run, 0 to 2, that lie at a boundary, less the boundaries inside of it.

        Boundaries are ends of the row, taken cells, and hints.
        """
        cells, end = self._rows[row], start + length
        first = start == 0 or cells[start - 1] is None or (row, start) in self._hints
        last = end == len(cells) or cells[end] is None or (row, end) in self._hints
        return first + last - sum((row, column) in self._hints for column in range(start + 1, end))

    def take(self, row: int, start: int, length: int) -> None:
        self._rows[row][start : start + length] = [None] * length


def locate(cells: Cells, sequences: Sequence[Sequence[int]]) -> list[Span]:
    """Find the sequences by their content; pieces of whole sequences come first.

    Nothing is assumed about the batch: padding on either side, any order, several sequences in a row, cut or split
    sequences are all found. Whole sequences are placed first, longest first, where they best fill a gap between
    boundaries; the other cells then go to the longest runs of the remaining sequences. A missing one has no piece.
    """
    pieces: list[Span] = []
    left = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    for least in (2, -math.inf):  # exactly between two boundaries, then anywhere
        waiting, left = left, []
        for index in waiting:
            place = _whole(cells, sequences[index], least)
            if place is None:
                left.append(index)
            else:
                pieces.append(Span(index, 0, *place, len(sequences[index])))
                cells.take(*place, len(sequences[index]))
    for index in left:
        pieces += _torn(cells, index, sequences[index])
    return pieces


def _whole(cells: Cells, tokens: Sequence[int], least: float) -> tuple[int, int] | None:
    """The best free place of a whole sequence that fits so well, the first of equally good ones."""
    found = [place for place in cells.candidates(tokens) if cells.run(tokens, *place) == len(tokens)]
    best = max(found, key=lambda place: cells.fit(place[0], place[1], len(tokens)), default=None)
    return None if best is None or cells.fit(*best, len(tokens)) < least else best


def _torn(cells: Cells, index: int, tokens: Sequence[int]) -> list[Span]:
    """Longest runs of a sequence, then of what remains before and after each."""
    pieces, spans = [], [(0, len(tokens))]
    while spans:
        low, high = spans.pop()
        best: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # (length, fit, -offset, row, column)
        for offset in range(low, high - 1):
            if high - offset < best[0]:
                break
            for row, column in cells.candidates(tokens[offset : offset + 2]):
                length = cells.run(tokens[offset:high], row, column)
                if length >= best[0]:
                    best = max(best, (length, cells.fit(row, column, length), -offset, row, column))
        length, _, negative, row, column = best
        if length >= LEAST_RUN:
            pieces.append(Span(index, -negative, row, column, length))
            cells.take(row, column, length)
            spans += [(low, -negative), (-negative + length, high)]
    return pieces


@dataclass(frozen=True, eq=False)
class Update:
    """The batches of one update and the places of the sequences in them.

    Args:
        pieces: runs of the sequences; their rows are counted over all batches.
        owners: per batch, index into `pieces` of each cell's owner, or NOBODY, (rows, width) int64.
        filler: per batch, True where a cell is padding, (rows, width) bool.
        complete: True if all sequences are in the batches; otherwise missing sequences are left out.
        whole: the update that this one is a part of, for what is counted; None if it is no part.
    """

    batches: list[ForeignBatch]
    sequences: list[LabelledSequence]
    pieces: list[Span]
    owners: list[Tensor]
    filler: list[Tensor]
    complete: bool = True
    whole: "Update | None" = None

    @property
    def num_labelled(self) -> int:
        """Number of targets that the batches have."""
        return sum(batch.num_targets for batch in self.batches)

    def labels_of(self, piece: Span) -> list[int]:
        """Labels of a piece as a sequence of its own: its first token is not a target."""
        return [IGNORE, *self.sequences[piece.sequence].labels[piece.offset + 1 : piece.offset + piece.length]]

    def ids_of(self, piece: Span) -> list[int]:
        return self.sequences[piece.sequence].ids[piece.offset : piece.offset + piece.length]

    def one_at_a_time(self) -> list[LabelledSequence]:
        """Every piece as a sequence of its own."""
        pieces = [(self.ids_of(piece), self.labels_of(piece), self.sequences[piece.sequence]) for piece in self.pieces]
        if any(of.beside and len(ids) < len(of.ids) for ids, _, of in pieces):
            raise ProofError("the batches cut sequences with pictures", fix="let the collator keep them whole")
        return [LabelledSequence(ids, labels, of.beside) for ids, labels, of in pieces]

    @property
    def num_wanted(self) -> int:
        """Number of targets of the pieces taken one at a time."""
        return sum(one.num_targets for one in self.one_at_a_time())

    def places(self, batch: int) -> list[tuple[int, int, slice]]:
        """(piece, row in the batch, cells) of every piece in a batch."""
        first = sum(len(one.ids) for one in self.batches[:batch])
        rows = range(first, first + len(self.batches[batch].ids))
        return [
            (index, piece.row - first, slice(piece.start, piece.start + piece.length))
            for index, piece in enumerate(self.pieces)
            if piece.row in rows
        ]


def read_update(
    batches: Sequence[ForeignBatch], sequences: Sequence[LabelledSequence], *, complete: bool = True
) -> Update:
    """Find the sequences in the batches."""
    rows: list[list[int | None]] = []
    starts: list[tuple[int, int]] = []
    for batch in batches:
        starts += [(len(rows) + row, column) for row, column in batch.starts().nonzero().tolist()]
        rows += [
            [token if ok else None for token, ok in zip(ids, real, strict=True)]
            for ids, real in zip(batch.ids.tolist(), batch.real.tolist(), strict=True)
        ]
    pieces = locate(Cells(rows, starts), [one.ids for one in sequences])
    update = Update(list(batches), list(sequences), pieces, [], [], complete)
    for index, batch in enumerate(batches):
        owners = torch.full_like(batch.ids, NOBODY)
        for piece, row, cells in update.places(index):
            owners[row, cells] = piece
        update.owners.append(owners)
        update.filler.append(_filler(batch, owners))
    return update


def _filler(batch: ForeignBatch, owners: Tensor) -> Tensor:
    """Padding: masked cells, and runs of one token without an owner at the ends of rows or without targets."""
    filler = ~batch.real & (owners == NOBODY)
    width = batch.ids.shape[1]
    for row, (ids, owned) in enumerate(zip(batch.ids.tolist(), (owners[:, :] != NOBODY).tolist(), strict=True)):
        targets = (batch.targets[row] != IGNORE).tolist()
        start = 0
        while start < width:
            end = start + 1
            if not owned[start]:
                while end < width and not owned[end] and ids[end] == ids[start]:
                    end += 1
                if start == 0 or end == width or not any(targets[max(start - 1, 0) : end]):
                    filler[row, start:end] = True
            start = end
    return filler


@dataclass(frozen=True)
class Labels:
    """Numbers of labels in an update that differ from the labels of the sequences."""

    crossing: int = 0
    padding_predicts: int = 0
    padding_predicted: int = 0
    missing: int = 0
    added: int = 0
    wrong: int = 0
    unknown_tokens: int = 0
    missing_ids: frozenset[int] = frozenset()


def refuse_missing(update: Update) -> None:
    """Refuse an update with nothing to compare.

    Raises:
        ProofError: none of the sequences is in the batches, or none of their tokens is a target.
    """
    if not update.pieces:
        what = "none of the sequences is in the batches: the collator writes other tokens, or in another order"
        raise ProofError(what, fix="prove with the sequences as the collator writes them")
    if update.num_wanted == 0:
        raise ProofError("no sequence of the batches has a target", fix="look at the labels, and at their first tokens")


def read_labels(update: Update) -> Labels:
    """Compare the targets of the batches with those of the sequences."""
    parts = [_labels_of_batch(update, index) for index in range(len(update.batches))]
    names = [one.name for one in fields(Labels) if one.name != "missing_ids"]
    counts = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Labels(**counts, missing_ids=frozenset[int]().union(*(part.missing_ids for part in parts)))


def _labels_of_batch(update: Update, index: int) -> Labels:
    batch, owners, filler = update.batches[index], update.owners[index], update.filler[index]
    wanted = torch.full_like(batch.targets, IGNORE)
    for number, row, cells in update.places(index):
        labels = update.labels_of(update.pieces[number])[1:]
        wanted[row, cells.start : cells.stop - 1] = torch.tensor(labels, dtype=wanted.dtype, device=wanted.device)
    following = F.pad(owners[:, 1:], (0, 1), value=OUTSIDE)  # owner of the cell that each cell predicts
    into_filler = F.pad(filler[:, 1:], (0, 1), value=False)
    target = batch.targets != IGNORE
    inside = (owners == following) & (owners >= 0)
    crossing = target & (owners >= 0) & (following >= 0) & (owners != following)
    predicts, predicted = target & filler & ~into_filler, target & into_filler
    missing = inside & ~target & (wanted != IGNORE)
    other = target & ~crossing & ~predicts & ~predicted
    return Labels(
        crossing=int(crossing.sum()),
        padding_predicts=int(predicts.sum()),
        padding_predicted=int(predicted.sum()),
        missing=int(missing.sum()),
        added=int((other & (wanted == IGNORE)).sum()),
        wrong=int((other & inside & (wanted != IGNORE) & (wanted != batch.targets)).sum()),
        unknown_tokens=int(((owners == NOBODY) & ~filler).sum()),
        missing_ids=frozenset(wanted[missing].tolist()),
    )


def count_cut(update: Update) -> tuple[int, int]:
    """Number of tokens that are missing or in a piece that does not begin its sequence; and number of such
    sequences."""
    kept = dict.fromkeys(range(len(update.sequences)), 0) if update.complete else {}
    for piece in update.pieces:
        kept[piece.sequence] = kept.get(piece.sequence, 0) + (piece.length if piece.offset == 0 else 0)
    gaps = [len(update.sequences[index].ids) - length for index, length in kept.items()]
    return sum(gaps), sum(gap > 0 for gap in gaps)
