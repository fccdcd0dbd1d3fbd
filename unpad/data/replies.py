"""The two replies of a pair as sequences: the document of a pair holds the chosen one, then the rejected one."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, required
from unpad.data.tokens.token_set import TokenSet
from unpad.nn.preference import Pairs


@dataclass(frozen=True, eq=False)
class Replies:
    """Sequences of a token set with pairs: its documents in order, of a pair its chosen reply, then all rejected ones.

    Positions of a sequence count from its own first token.

    Args:
        tokens: documents, not joined.
        reference: (num_sequences,) float64, log-probability of each reply of a pair under the weights that training
            starts from, in nats; training fills it in before it loads a batch.
    """

    tokens: TokenSet
    reference: np.ndarray

    @classmethod
    def of(cls, tokens: TokenSet) -> "Replies | None":
        """The sequences of a token set with pairs; None without pairs, as the documents are the sequences."""
        num_pairs = int((tokens.num_chosen > 0).sum())
        return cls(tokens, np.zeros(len(tokens) + num_pairs)) if num_pairs else None

    @cached_property
    def document(self) -> np.ndarray:
        """Document of every sequence, (num_sequences,) int64."""
        return np.concatenate([np.arange(len(self.tokens)), np.flatnonzero(self.tokens.num_chosen)])

    @cached_property
    def first(self) -> np.ndarray:
        """Place of every sequence's first token in its document, (num_sequences,) int64."""
        chosen = self.tokens.num_chosen.astype(np.int64)
        return np.concatenate([np.zeros_like(chosen), chosen[chosen > 0]])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, (num_sequences,) int64."""
        chosen, whole = self.tokens.num_chosen.astype(np.int64), self.tokens.lengths
        return np.asarray(np.concatenate([np.where(chosen > 0, chosen, whole), (whole - chosen)[chosen > 0]]))

    @cached_property
    def pair(self) -> np.ndarray:
        """Number of every sequence's pair, which is its document, (num_sequences,) int64; -1 for no reply of a pair."""
        return np.asarray(np.where(self.tokens.num_chosen[self.document] > 0, self.document, -1))

    @property
    def num_targets(self) -> np.ndarray:
        """Tokens of every sequence that carry loss, (num_sequences,) int64."""
        ids = np.arange(len(self.document))
        return self.count_targets(ids, np.zeros_like(ids), np.maximum(self.lengths - 1, 0))

    def is_chosen(self, seq_ids: np.ndarray) -> np.ndarray:
        """True for sequences that are the chosen reply of a pair, (n,) bool."""
        return np.asarray((self.pair[seq_ids] >= 0) & (self.first[seq_ids] == 0))

    def rejected_of(self, seq_ids: np.ndarray) -> np.ndarray:
        """Sequences of the rejected replies of pairs, by those of the chosen ones, (n,) int64."""
        number = np.cumsum(self.tokens.num_chosen > 0) - 1
        return np.asarray(len(self.tokens) + number[seq_ids])

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `TokenSet.gather`, of these sequences."""
        first = self.first[seq_ids]
        return self.tokens.gather(self.document[seq_ids], starts + first, stops + first)

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """As `TokenSet.count_targets`, of these sequences."""
        first = self.first[seq_ids]
        return self.tokens.count_targets(self.document[seq_ids], starts + first, stops + first)

    def with_pairs(self, batch: RaggedBatch) -> RaggedBatch:
        """Mark the replies of each pair in a batch; a batch without pairs is unchanged."""
        ids = required(batch.seq_ids).numpy()
        pair = np.where(ids < 0, -1, self.pair[ids])
        if not (pair >= 0).any():
            return batch
        reference = np.where(pair < 0, 0.0, self.reference[ids])
        chosen = (ids >= 0) & self.is_chosen(ids)
        return batch.with_part(Pairs(*map(torch.from_numpy, (pair, chosen, reference))))

    def place(self, seq_id: int) -> tuple[int, int]:
        """The document of a sequence, and the place of its first token in it."""
        return int(self.document[seq_id]), int(self.first[seq_id])

    def where(self, seq_id: int) -> str:
        """Place of a sequence in its file."""
        place, is_pair = self.tokens.where(int(self.document[seq_id])), self.pair[seq_id] >= 0
        return f"{place}, {'rejected' if self.first[seq_id] else 'chosen'}" if is_pair else place
