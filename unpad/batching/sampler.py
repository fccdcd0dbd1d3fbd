"""Batches for a data loader of torch in a training loop of one's own, by our plan."""

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from torch import distributed
from torch.utils.data import Sampler

from unpad.batching.balance import assign_equally
from unpad.batching.plan import Plan, plan
from unpad.errors import PlanError, RecipeError, ResumeError
from unpad.recipes.section import checked
from unpad.recipes.training import PlanSettings

Indices = TypeVar("Indices", bound=list[int])
PLAN = ("tokens", "gradient_accumulation_steps", "world_size", "seed", "digest of lengths and targets")
PLANNED = 4  # epochs that are planned to find a number of batches for all


class MicroBatch(list[int]):
    """Indices of the sequences of a micro-batch, with what its loss is divided by.

    Attributes:
        num_targets: targets in it.
        num_items: targets of its update over the number of micro-batches in it, of all ranks.
    """

    def __init__(self, indices: Sequence[int], num_targets: int, num_items: float) -> None:
        super().__init__(indices)
        self.num_targets, self.num_items = num_targets, num_items


class BatchSampler(Sampler[list[int]]):
    """Batches of at most `tokens` tokens for a `DataLoader(batch_sampler=...)`, each sequence once an epoch.

        rows = unpad.hf.Examples(data)
        sampler = unpad.BatchSampler(rows.lengths, targets=rows.targets, tokens=4096, gradient_accumulation_steps=2)
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=unpad.hf.Collator(), num_workers=2)

    Every update has `gradient_accumulation_steps` batches on every rank, shared out by tokens, and every epoch the same
    number of updates. To make up the number the largest batches are halved; where all have one sequence, empty ones are
    added, which `Examples` fills with a sequence without targets. With `Examples` and `Collator` each batch has
    `num_items_in_batch`: the targets of the whole update over its number of batches. So the mean over the batches of an
    update and over ranks, as accelerate, Lightning and DistributedDataParallel make it, is that over its targets.

    Args:
        lengths: tokens of each sequence, (num_sequences,) int.
        tokens: most tokens of a batch, unless a single sequence has more.
        targets: tokens with loss of each sequence, (num_sequences,) int; by default all but the first. A sequence
            without targets is left out.
        rank, world_size: number of this process and of all; by default those of torch.distributed.
        seed: of the order, another one every epoch.

    Attributes:
        epoch: of the next batch, from 0.
        position: batches of the epoch that were handed out.

    Raises:
        PlanError: lengths and targets that do not fit, or no target.
        RecipeError: no such rank; or several processes without torch.distributed.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        tokens: int,
        targets: Sequence[int] | np.ndarray | None = None,
        gradient_accumulation_steps: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.targets = np.maximum(self.lengths - 1, 0) if targets is None else np.asarray(targets, np.int64)
        if self.targets.shape != self.lengths.shape or not self.targets.any():
            what = f"{self.targets.sum()} targets of {len(self.targets)} sequences, and {len(self.lengths)} lengths"
            raise PlanError(what, fix="pass one length and one number of targets for each sequence")
        if gradient_accumulation_steps < 1:
            raise RecipeError("an update of no batch", fix="set gradient_accumulation_steps to 1 or more")
        self.rank, self.world_size = _place(rank, world_size)
        self.seed, self.epoch, self.position, self._resumed = seed, 0, 0, False
        self.settings = checked(PlanSettings, {"tokens_per_step": tokens, "tokens_per_micro": tokens})
        self.per_update = gradient_accumulation_steps * self.world_size
        most = max(self.plan(epoch).num_micros for epoch in range(PLANNED))
        self.num = -(-most // self.per_update) * self.per_update

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch, before its batches are shared out; its ledger has what was left out."""
        return plan_whole(self.lengths, self.targets, self.settings, self.seed, epoch)

    def __len__(self) -> int:
        """Batches of this rank in every epoch, a multiple of `gradient_accumulation_steps`."""
        return self.num // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        first, self._resumed = self.position if self._resumed else 0, False
        for number, micro in enumerate(self._own()[first:], first + 1):
            self.position = number
            yield micro

    def set_epoch(self, epoch: int) -> None:
        """Go on with the first batch of an epoch; with the next one, in the epoch that a state was loaded of.

        Raises:
            ResumeError: the epoch of that state is not at its end.
        """
        if self._resumed and epoch == self.epoch:
            return
        if self._resumed and self.position < len(self):
            what = f"the state that was loaded is of epoch {self.epoch}, and epoch {epoch} is asked for"
            raise ResumeError(what, fix="begin the loop over epochs at sampler.epoch")
        self.epoch, self.position, self._resumed = epoch, 0, False

    @property
    def sampler(self) -> "BatchSampler":
        """Itself: Lightning sets the epoch of what it finds here."""
        return self

    @property
    def batch_size(self) -> int:
        """None that is fixed; accelerate and Lightning ask for it to share batches out among ranks a second time.

        Raises:
            RecipeError: there are several ranks.
            AttributeError: there is one.
        """
        if self.world_size > 1:
            fix = "leave the loader out of accelerator.prepare; set use_distributed_sampler=False in Lightning"
            raise RecipeError("the batches of this sampler are shared out among ranks already", fix=fix)
        raise AttributeError("batch_size")

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """What `load_state_dict` goes on from, as JSON values.

        Args:
            position: batches of the epoch that were trained on; by default those handed out, which are more where
                workers of a loader fetch ahead.
        """
        return {"epoch": self.epoch, "position": self.position if position is None else position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the batch after those of a state; in the midst of an update with the first batch of it.

        Raises:
            ResumeError: it is of another plan; names what differs.
        """
        for name, now in self._identity().items():
            if state.get(name) != now:
                what = f"the state is of another plan: {name} {now}, was {state.get(name)}"
                raise ResumeError(f"{what}; rows would be skipped or trained twice", fix="make the sampler as before")
        begun = state["position"] % state["gradient_accumulation_steps"]  # of an update, whose gradient is not kept
        self.epoch, self.position, self._resumed = state["epoch"], state["position"] - begun, True

    def _identity(self) -> dict[str, Any]:
        """What decides on the batches."""
        digest = blake2b(np.stack([self.lengths, self.targets]).astype("<i8").tobytes(), digest_size=8).hexdigest()
        accumulated = self.per_update // self.world_size
        values = (self.settings.tokens_per_micro, accumulated, self.world_size, self.seed, digest)
        return dict(zip(PLAN, values, strict=True))

    def _own(self) -> list[MicroBatch]:
        """The batches of this rank in the epoch."""
        made = self.plan(self.epoch)
        if made.num_micros > self.num:
            made = self.plan(self.epoch % PLANNED)
        micros = [made.micro(number).seq_ids for number in range(made.num_micros)]
        micros, own = halved(micros, self.lengths, self.num), list[MicroBatch]()
        for start in range(0, self.num, self.per_update):
            update = micros[start : start + self.per_update]
            targets = [int(self.targets[micro].sum()) for micro in update]
            num_items = max(sum(targets), 1) / self.per_update
            batches = [MicroBatch(one.tolist(), num, num_items) for one, num in zip(update, targets, strict=True)]
            own += share_of(batches, self.lengths, self.rank, self.world_size)
        return own


def share_of(micros: list[Indices], lengths: np.ndarray, rank: int, size: int) -> list[Indices]:
    """The micro-batches of one of `size` ranks: equally many of each, shared out by tokens.

    Args:
        micros: indices of sequences; a multiple of `size`.
        lengths: tokens per sequence, (num_sequences,) int64.
    """
    if size == 1:
        return micros
    costs = [float(lengths[np.asarray(micro, np.int64)].sum()) for micro in micros]
    return [micros[index] for index in assign_equally(costs, size)[rank]]


def plan_whole(lengths: np.ndarray, targets: np.ndarray, settings: PlanSettings, seed: int, epoch: int) -> Plan:
    """The plan of an epoch of whole sequences. Those without targets are left out; the ledger counts them.

    Args:
        lengths, targets: of each sequence, (num_sequences,) int64.
    """
    return plan(lengths, settings, seed=seed, epoch=epoch, targets=lambda seq_ids, starts, stops: targets[seq_ids])


def halved(micros: Sequence[np.ndarray], lengths: np.ndarray, num: int) -> list[np.ndarray]:
    """Make `num` micro-batches of fewer: the largest are halved; empty ones follow where all have one sequence.

    Args:
        micros: indices of sequences, (num_seqs,) int64 each.
        lengths: of each sequence, (num_sequences,) int64.
    """
    made = list(micros)
    while len(made) < num:
        size, at = max((int(lengths[micro].sum()) if len(micro) > 1 else 0, at) for at, micro in enumerate(made))
        if not size:
            return made + [np.zeros(0, np.int64)] * (num - len(made))
        made[at : at + 1] = made[at][::2], made[at][1::2]
    return made


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Number of this process, and of all."""
    known = distributed.is_available() and distributed.is_initialized()
    if world_size is None and not known and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = "several processes were started, and without torch.distributed each would take every row"
        raise RecipeError(what, fix="make the sampler after init_process_group, or pass rank and world_size")
    size = world_size if world_size is not None else distributed.get_world_size() if known else 1
    number = rank if rank is not None else distributed.get_rank() if known and size > 1 else 0
    if not 0 <= number < size:
        raise RecipeError(f"there is no rank {number} of {size}", fix="pass 0 <= rank < world_size")
    return number, size
