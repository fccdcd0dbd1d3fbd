"""Room for passes: the size of a micro-batch, as learned from out-of-memory errors."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from unpad.batching.batch import RaggedBatch
from unpad.batching.parts import in_parts
from unpad.errors import OutOfMemoryError
from unpad.machine.memory import peak_memory
from unpad.nn.draws import UnmeasuredError
from unpad.training.memory.heap import return_freed_memory


class DoesNotFitError(Exception):
    """A pass ran out of memory.

    Args:
        batch: the batch of the pass; reason: first line of the error.
    """

    def __init__(self, batch: RaggedBatch, reason: str) -> None:
        super().__init__(reason)
        self.batch, self.reason = batch, reason


@dataclass
class Room:
    """Bound on the passes of a run, learned from those that ran out of memory.

    A pass that runs out of memory is cut in two between sequences, and so is every larger one from then on.

    Args:
        most: most computed tokens of a pass; None before any has failed.

    Attributes:
        measures: whether the entries of all parts are measured before they draw (`SplitDraws`).
        messages: bounds learned since they were last read.
    """

    most: int | None = None
    measures: bool = False
    messages: list[str] = field(default_factory=list)

    def parts(self, batch: RaggedBatch) -> list[RaggedBatch]:
        """The parts that a micro-batch is computed in; itself if it has room."""
        return [batch] if self.most is None or batch.total_tokens <= self.most else in_parts(batch, self.most)

    def agree(self, learnt: Sequence[tuple[int | None, list[str]]]) -> None:
        """Adopt the smallest bound of all processes, so that all cut a micro-batch alike.

        Args:
            learnt: `most` and `messages` of all.
        """
        self.most = min((most for most, _ in learnt if most is not None), default=None)
        self.messages = [f"process {rank}: {text}" for rank, (_, texts) in enumerate(learnt) for text in texts]

    def learn(self, failure: DoesNotFitError | UnmeasuredError) -> None:
        """Compute smaller passes from now on; free the memory of the failed one.

        Raises:
            OutOfMemoryError: a sequence does not fit by itself.
        """
        if isinstance(failure, UnmeasuredError):
            self.measures = True
            return
        batch = failure.batch
        gc.collect()
        if batch.position_ids.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()
        parts = in_parts(batch, (batch.total_tokens + 1) // 2)
        if len(parts) == 1:
            raise _too_large(failure)
        self.most = max(part.total_tokens for part in parts)
        longest = int(batch.layout.lengths().max())
        self.messages.append(
            f"{batch.num_seqs} sequences of {batch.total_tokens:,} tokens, the longest {longest:,}, do not fit into "
            f"memory; the update is computed again, and micro-batches of more than {self.most:,} tokens from here on "
            "in parts, with the same draws; the last bits of gradients may differ"
        )


def _too_large(failure: DoesNotFitError) -> OutOfMemoryError:
    """Describe a batch that does not fit and cannot be cut."""
    batch = failure.batch
    what = "a sequence" if batch.num_seqs == 1 else f"{batch.num_seqs} sequences that belong together,"
    error = OutOfMemoryError(
        f"{what} of {batch.total_tokens:,} tokens does not fit by itself: {failure.reason}",
        where=f"peak memory {used_at_most() / 2**30:.2f} GiB",
        fix="lower plan.max_tokens, or the sizes of the model section",
    )
    error.seq_ids = () if batch.seq_ids is None else [seq_id for seq_id in batch.seq_ids.tolist() if seq_id >= 0]
    return error


def used_at_most() -> int:
    """Largest memory in use so far, in bytes, on the GPU if there is one, otherwise of this process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory()
