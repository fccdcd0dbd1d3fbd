"""Encoded sequences of a run, read from mapped shards by number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from unpad.data.tokens.cache import Shard, make_key

# Columns of shards and of token sets that are added up where documents are joined.
COUNTS = ("num_targets", "target_chars", "target_bytes", "lost_target_chars", "lost_target_bytes", "num_chosen")


@dataclass(frozen=True, eq=False)
class CorpusShard:
    """One shard as a corpus uses it.

    Args:
        path: current path of the source file.
        data_key: hash of the shard's inputs without the code.
        kind: index into TEXT_KINDS of `sources/reader.py`.
        source: index into the weights of the corpus.
        split: (rows,) uint8 of `Split`.
        unit: (rows,) int64, number of the unit of copies and group that a row belongs to; see `split.units`.
    """

    shard: Shard
    path: str
    data_key: str
    kind: int
    source: int
    split: np.ndarray
    unit: np.ndarray


@dataclass(frozen=True, eq=False)
class TokenSet:
    """All sequences of a run: texts and conversations, training and held-out, originals before augmented copies.

    A sequence is one document, or several after `joined`. Arrays are (num_sequences,), integers.

    Args:
        lengths: tokens, BOS and EOS included; a sequence of n tokens has n - 1 positions.
        kind: index into TEXT_KINDS of `sources/reader.py`.
        source: index into `weights`.
        split: of `Split`; documents of TEST are only evaluated.
        unit: number of the unit of copies and group of each document; documents of different units are independent.
        copy: 0 for an original, otherwise the number of the augmented copy.
        num_targets: tokens that carry loss.
        target_chars, target_bytes: characters and UTF-8 bytes of the text that carries loss.
        lost_target_chars, lost_target_bytes: characters and bytes of it that the tokenizer lost.
        num_chosen: tokens of a pair's chosen reply, before those of its rejected reply; 0 for other documents.
        weights: epochs of each source per epoch of the run: the recipe's texts, then its conversations.
        parts: the shards; their rows, one part after the other, are the documents.
        documents: (num_documents,) int64, documents in the order of the sequences.
        first_document: (num_sequences + 1,) int64, start of each sequence in `documents`.
        file_hashes: (path, sha256) of every source file.
        split_settings: everything besides the files that determines the split, as JSON.
    """

    lengths: np.ndarray
    kind: np.ndarray
    source: np.ndarray
    split: np.ndarray
    unit: np.ndarray
    copy: np.ndarray
    num_targets: np.ndarray
    target_chars: np.ndarray
    target_bytes: np.ndarray
    lost_target_chars: np.ndarray
    lost_target_bytes: np.ndarray
    num_chosen: np.ndarray
    weights: list[float]
    parts: tuple[CorpusShard, ...]
    documents: np.ndarray
    first_document: np.ndarray
    file_hashes: tuple[tuple[str, str], ...]
    split_settings: tuple[object, ...]

    def __len__(self) -> int:
        return self.lengths.size

    # ----------------------------------------------------------------------- tokens

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read spans of sequences: positions [start, stop) and the label of the last, so tokens [start, stop].

        Args:
            seq_ids, starts, stops: (n,) integers, 0 <= start <= stop < length.

        Returns:
            tokens (total,) int64; loss_mask (total,) bool, of each token as a label; offsets (n + 1,) int64.
        """
        seq_ids, starts, stops = (np.asarray(values, np.int64) for values in (seq_ids, starts, stops))
        assert np.all((starts >= 0) & (starts <= stops) & (stops < self.lengths[seq_ids])), "a span leaves its sequence"
        runs = self._runs(seq_ids, starts, stops + 1)
        tokens, masks = [np.zeros(0, np.uint16)], [np.zeros(0, np.bool_)]
        for part, start, stop in runs:  # one cheap slice per document
            shard = self.parts[part].shard
            tokens.append(shard.tokens[start:stop])
            masks.append(shard.loss_mask[start:stop])
        offsets = np.zeros(seq_ids.size + 1, np.int64)
        np.cumsum(stops + 1 - starts, out=offsets[1:])
        return np.concatenate(tokens, dtype=np.int64), np.concatenate(masks), offsets

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Count the positions of [start, stop) with a label that carries loss, (n,) int64."""
        seq_ids, starts, stops = (np.asarray(values, np.int64) for values in (seq_ids, starts, stops))
        begin = self._document_ends[self.first_document[seq_ids]]
        return np.asarray(self._targets_before(begin + stops + 1) - self._targets_before(begin + starts + 1))

    def tokens(self, i: int) -> np.ndarray:
        """All tokens of a sequence, (length,) int64."""
        return self._whole(i)[0]

    def loss_mask(self, i: int) -> np.ndarray:
        """True for the tokens of a sequence that carry loss, (length,) bool."""
        return self._whole(i)[1]

    def joined(self) -> "TokenSet":
        """Join the documents of each kind, split and source to one long sequence, with BOS and EOS between them."""
        assert self.documents.size == len(self), "joined already"
        assert not self.num_chosen.any(), "pairs are not joined"
        groups = np.stack([self.kind, self.split, self.source]).astype(np.int64)
        order = np.lexsort(groups[::-1])
        groups = groups[:, order]
        first = np.flatnonzero(np.any(np.diff(groups, prepend=-1), axis=0))
        kind, split, source = groups[:, first]

        def total(values: np.ndarray) -> np.ndarray:
            return np.add.reduceat(values[order].astype(np.int64), first)

        counts: dict[str, Any] = {name: total(getattr(self, name)) for name in COUNTS}
        return replace(
            self,
            lengths=total(self.lengths),
            kind=kind.astype(np.uint8),
            source=source.astype(np.int16),
            split=split.astype(np.uint8),
            unit=np.arange(first.size),
            copy=np.zeros(first.size, np.uint8),
            **counts,
            documents=self.documents[order],
            first_document=np.append(first, order.size),
        )

    def documents_in(self, i: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents that have some of the tokens [start, stop) of a sequence.

        Returns:
            Their numbers, (n,) int64; and the tokens of the sequence before each, and to the end of the last,
            (n + 1,) int64.
        """
        begin = self._document_ends[self.first_document[i]]
        first = int(np.searchsorted(self._document_ends, begin + start, "right")) - 1
        last = int(np.searchsorted(self._document_ends, begin + stop, "left"))
        return self.documents[first:last], self._document_ends[first : last + 1] - begin

    def documents_of_sequences(self) -> Iterator[tuple[int, int, int, int]]:
        """Every document with its sequence, and where its tokens begin and end there."""
        begins = self._document_ends[self.first_document]
        of = np.repeat(np.arange(len(self)), np.diff(self.first_document))
        starts, stops = self._document_ends[:-1] - begins[of], self._document_ends[1:] - begins[of]
        yield from zip(self.documents.tolist(), of.tolist(), starts.tolist(), stops.tolist(), strict=True)

    # ----------------------------------------------------------------------- names

    def where(self, i: int) -> str:
        """Place of a sequence in its file; for joined documents the first and the last place."""
        first, last = self.documents[self.first_document[i]], self.documents[self.first_document[i + 1] - 1]
        return self.place(first) if first == last else f"{self.place(first)} to {self.place(last)}"

    def keywords(self, i: int) -> tuple[str, ...]:
        """Words that a correct reply to the sequence's first document must contain."""
        part, row = self._part_row(self.documents[self.first_document[i]])
        return part.shard.keywords(row)

    def fingerprint(self) -> str:
        """sha256 of the data, the tokenizer, the encoding settings and the split."""
        return make_key([[part.data_key, part.kind, part.source] for part in self.parts], self.split_settings)

    # ----------------------------------------------------------------------- documents within parts

    def _whole(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        last = np.array([self.lengths[i] - 1])
        return self.gather(np.array([i]), np.zeros_like(last), last)

    def place(self, document: int) -> str:
        """Place of a document, by its number, in its file."""
        part, row = self._part_row(document)
        return part.path + part.shard.where(row)

    def _part_row(self, document: int) -> tuple[CorpusShard, int]:
        part = int(np.searchsorted(self._first_rows, document, "right")) - 1
        return self.parts[part], int(document - self._first_rows[part])

    @cached_property
    def _first_rows(self) -> np.ndarray:
        """Document number of each part's first row, (num_parts + 1,) int64."""
        return np.cumsum([0, *(part.shard.num_rows for part in self.parts)])

    @cached_property
    def _document_part(self) -> np.ndarray:
        return np.searchsorted(self._first_rows, self.documents, "right") - 1

    @cached_property
    def _document_start(self) -> np.ndarray:
        """Start of each document within the tokens of its part, (num_documents,) int64."""
        return np.asarray(rows_of([part.shard.offsets[:-1] for part in self.parts], np.int64)[self.documents])

    @cached_property
    def _document_ends(self) -> np.ndarray:
        """Running total of the tokens of the sequences' documents, (num_documents + 1,) int64."""
        lengths = rows_of([np.diff(part.shard.offsets) for part in self.parts], np.int64)[self.documents]
        return np.concatenate([[0], np.cumsum(lengths)])

    @cached_property
    def _target_ends(self) -> np.ndarray:
        """Running total of the tokens with loss, like `_document_ends`."""
        counts = rows_of([part.shard.num_targets for part in self.parts], np.int64)[self.documents]
        return np.concatenate([[0], np.cumsum(counts)])

    def _runs(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Sequence[tuple[int, int, int]]:
        """Spans of tokens as (part, start, stop) within the parts' tokens, one per document; no span is empty."""
        ends = self._document_ends
        begin = ends[self.first_document[seq_ids]] + starts
        end = begin + stops - starts
        first = np.searchsorted(ends, begin, "right") - 1
        count = np.searchsorted(ends, end, "left") - first
        span = np.repeat(np.arange(seq_ids.size), count)
        document = np.arange(span.size) - np.repeat(np.cumsum(count) - count, count) + first[span]
        shift = self._document_start[document] - ends[document]
        start = np.maximum(begin[span], ends[document]) + shift
        stop = np.minimum(end[span], ends[document + 1]) + shift
        return list(zip(self._document_part[document].tolist(), start.tolist(), stop.tolist(), strict=True))

    def _targets_before(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens with loss among the first `tokens` of all sequences' documents in order, (n,) int64."""
        ends, targets = self._document_ends, self._target_ends
        document = np.searchsorted(ends, tokens, "right") - 1
        inside = tokens - ends[document]
        counts = targets[document]
        cut = np.flatnonzero(inside > 1)  # a document's first token is BOS, which carries no loss
        document, inside = document[cut], inside[cut]
        has_loss = targets[document + 1] - targets[document]
        all_but_bos = has_loss == ends[document + 1] - ends[document] - 1
        counts[cut] += np.where(all_but_bos, inside - 1, 0)
        for i in np.flatnonzero(~all_but_bos):
            start = self._document_start[document[i]]
            mask = self.parts[self._document_part[document[i]]].shard.loss_mask
            counts[cut[i]] += np.count_nonzero(mask[start : start + inside[i]])
        return counts


def build_token_set(
    parts: Sequence[CorpusShard],
    weights: list[float],
    file_hashes: Sequence[tuple[str, str]],
    split_settings: tuple[object, ...],
) -> TokenSet:
    """Make every row of the parts a sequence, in order."""
    shards = [part.shard for part in parts]
    sizes = np.array([shard.num_rows for shard in shards], np.int64)
    total = int(sizes.sum())
    counts: dict[str, Any] = {name: rows_of([getattr(shard, name) for shard in shards], np.int32) for name in COUNTS}
    return TokenSet(
        lengths=rows_of([np.diff(shard.offsets) for shard in shards], np.int64),
        kind=np.repeat(np.array([part.kind for part in parts], np.uint8), sizes),
        source=np.repeat(np.array([part.source for part in parts], np.int16), sizes),
        split=rows_of([part.split for part in parts], np.uint8),
        unit=rows_of([part.unit for part in parts], np.int64),
        copy=rows_of([shard.copy for shard in shards], np.uint8),
        **counts,
        weights=weights,
        parts=tuple(parts),
        documents=np.arange(total),
        first_document=np.arange(total + 1),
        file_hashes=tuple(file_hashes),
        split_settings=split_settings,
    )


def rows_of(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Concatenate arrays; (0,) without any."""
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
