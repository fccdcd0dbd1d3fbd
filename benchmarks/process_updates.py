"""Updates of the packaged recipe zh_chat, by one process or several: for `process_sums.py` and `process_speed.py`."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.batching.plan import Micro
from unpad.models.cost import cells_per_token
from unpad.processes.group import ALONE, Group
from unpad.recipes.file import load_recipe
from unpad.training.optim import make_optimizer
from unpad.training.parallel.parallelism import Replicas
from unpad.training.parallel.share import Share, counts_of_all, counts_to_json, own_numbers, step_seed
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import epoch_plan
from unpad.training.step import train_step
from unpad.training.updates import takes_groups

Sums = Literal["exact", "fast"]
STAGE = 1  # conversations: the stage with most tokens


class Loaded(NamedTuple):
    """An update: the plan of all its micro-batches, and the batches of those that this process computes."""

    planned: Sequence[Micro]
    numbers: Sequence[int]
    batches: list[RaggedBatch]

    @property
    def tokens(self) -> int:
        """Real tokens of the whole update."""
        return sum(int((micro.stops - micro.starts).sum()) for micro in self.planned)


def prepare(precision: str, threads: int = 1) -> Setup:
    """Data and model of the recipe."""
    fields = [f"train.threads={threads}", f"precision={precision}"]
    return prepare_setup(load_recipe("zh_chat", fields), Path(), None, compare=False)


def load(
    setup: Setup, group: Group, *, update: int, micro: int, num_updates: int, num_micros: int | None = None
) -> list[Loaded]:
    """Full updates of the first epoch, the micro-batches of this process alone.

    Args:
        update, micro: tokens of an update and at most of a micro-batch.
        num_micros: of every update, its first ones; None: all of them.
    """
    recipe = setup.stages[STAGE].recipe
    sizes = recipe.plan.model_copy(update={"tokens_per_step": update, "tokens_per_micro": micro})
    stage = replace(setup.stages[STAGE], recipe=recipe.model_copy(update={"plan": sizes}))
    plan, ratio, found = epoch_plan(stage, 0), cells_per_token(setup.model), list[Loaded]()
    grouped = takes_groups(setup)
    for step in range(min(num_updates, plan.num_steps - 1)):  # the last may be smaller
        planned = plan.step(step)[:num_micros]
        numbers = own_numbers(planned, group, ratio)
        batches = [setup.data.load(planned[number]) for number in numbers]
        for batch in batches:
            if grouped and isinstance(batch.layout, Layout):
                _ = batch.layout.grouped
        found.append(Loaded(planned, numbers, batches))
    return found


@dataclass(frozen=True)
class Took:
    """Seconds of one turn of this process."""

    wall: float
    processor: float


class Trained:
    """A model in training, a copy of that of the set-up."""

    def __init__(self, setup: Setup, sums: Sums, group: Group = ALONE) -> None:
        self.setup, self.group, self.step = setup, group, 0
        self.model = copy.deepcopy(setup.model).train()
        self.optimizer = make_optimizer(self.model, setup.recipe.optim)
        self.sums = Replicas(group).gradient_sum(sums, self.model)

    def update(self, loaded: Loaded) -> None:
        """Take one step, as the loop of a run does."""
        with self.group.together() as talk:
            talk.own = counts_to_json(self.model, loaded.batches, loaded.numbers)
        counts, seed = counts_of_all(talk.told), (0, self.step)
        torch.manual_seed(step_seed(*seed))
        sums = self.sums if self.group.size > 1 or len(counts) > 1 else None
        train_step(
            self.model, loaded.batches, self.optimizer, weights={"cross_entropy": 1.0}, precision=self.setup.precision,
            clip=self.setup.recipe.optim.clip, share=Share(loaded.numbers, counts, seed, Replicas(self.group), sums),
        )  # fmt: skip
        self.step += 1

    def turn(self, updates: Sequence[Loaded]) -> Took:
        """Take a step with each of the updates."""
        wall, processor = time.perf_counter(), time.process_time()
        for loaded in updates:
            self.update(loaded)
        return Took(time.perf_counter() - wall, time.process_time() - processor)
