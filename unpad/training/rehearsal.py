"""Steps of a stage outside its training, to measure or to try something; the run is unchanged."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro, Plan
from unpad.errors import needs_memory
from unpad.machine import peak_memory, process_memory, restart_peak
from unpad.models import lower_sizes
from unpad.models.contract import Model
from unpad.nn.precision import autocast
from unpad.recipes.training import OptimSettings
from unpad.training.memory import return_freed_memory
from unpad.training.optim import make_optimizer, set_rate
from unpad.training.parallel.share import Share
from unpad.training.setup import Setup
from unpad.training.stage import StageSetup, prepare_model
from unpad.training.step import LossScaler, StepResult, train_step


@dataclass(frozen=True)
class StepCost:
    """Memory and time of a step.

    Args:
        tokens: computed in the step, padding included.
        seconds: of its forward and backward passes and the optimizer update.
        peak_bytes: resident memory of the process at its peak in the plan's largest micro-batch, optimizer included.
        base_bytes: resident memory before it.
    """

    tokens: int
    seconds: float
    peak_bytes: int
    base_bytes: int


class Rehearsal:
    """A stage prepared as for training, at its peak learning rate, on a copy of the model.

    Args:
        model: replaces the one that training starts from.
        copies: False trains the model itself.
        drops: whether dropout is on, as in training.
        changes: fields of `optim` that replace the recipe's.

    Raises:
        OutOfMemoryError: a copy of the model does not fit.
    """

    def __init__(
        self,
        setup: Setup,
        stage: StageSetup,
        *,
        model: Model | None = None,
        copies: bool = True,
        drops: bool = True,
        **changes: object,
    ) -> None:
        self.setup, self.stage, self.drops = setup, stage, drops
        self.settings: OptimSettings = stage.recipe.optim.model_copy(update=changes)
        self.model = setup.model if model is None else model
        with needs_memory("a copy of the model", lower_sizes(self.model.config)):
            if copies:
                self.model = copy.deepcopy(self.model)
            objective = prepare_model(self.model, stage).objective
            self.optimizer = make_optimizer(self.model, self.settings)
        self.rate(self.settings.lr * self.settings.lr_scale)
        self.weights = objective.final(self.model)
        self.scaler = LossScaler() if setup.precision == "fp16" else None

    def rate(self, rate: float) -> None:
        """Set the learning rate."""
        set_rate(self.optimizer, rate)

    def load(self, planned: Sequence[Micro]) -> list[RaggedBatch]:
        """The micro-batches of a step."""
        return [self.setup.data.load(micro).to(self.setup.device) for micro in planned]

    def step(self, micros: Sequence[RaggedBatch], share: Share | None = None) -> StepResult:
        """Take one step.

        Args:
            share: the part of the step that these are; None: all of it.
        """
        self.model.train(self.drops)
        return train_step(
            self.model,
            micros,
            self.optimizer,
            weights=self.weights,
            precision=self.setup.precision,
            clip=self.settings.clip,
            scaler=self.scaler,
            share=share,
        )

    def is_lost(self, result: StepResult) -> bool:
        """True if a step was not finite; in fp16 such steps are usual, and lower the scale of the loss."""
        return not result.updated and self.scaler is None

    @torch.no_grad()
    def loss(self, batch: RaggedBatch) -> float:
        """Mean negative log-likelihood of a batch without dropout, in nats; of a model without it, its trained loss."""
        self.model.eval()
        with autocast(self.setup.precision, self.setup.device):
            terms = self.model.losses(batch)
        if "nll" in terms and terms["nll"][1]:
            return float(terms["nll"][0]) / terms["nll"][1]
        return sum(w * float(terms[name][0]) / max(terms[name][1], 1) for name, w in self.weights.items())

    def cost(self, plan: Plan) -> StepCost:
        """Take a step of the plan's largest micro-batch, for its memory, and the plan's first step, for its time."""
        return_freed_memory()
        base = process_memory()
        if plan.num_steps == 0:  # every token is dropped, as the ledger says
            return StepCost(0, 0.0, base, base)
        restart_peak()
        self.step(self.load([plan.micro(int(np.argmax(plan.micro_cells)))]))
        peak = max(peak_memory(), base)
        first = self.load(plan.step(0))
        began = time.perf_counter()
        self.step(first)
        seconds = time.perf_counter() - began
        return StepCost(sum(batch.total_tokens for batch in first), seconds, peak, base)
