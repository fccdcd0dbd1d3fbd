"""Does a model still use its latent? Read again and again, and what follows when it does not.

A posterior has collapsed when it says nothing about its own set: it equals the prior, and the decoder does without it.
The signs are few active units, many dead dimensions, and a reconstruction that is as good from the latents of other
sets (`latent.py`). Few active units and an idle latent together, for some readings in a row, are a collapse. Neither
alone is: few units may carry all there is to say, and a decoder that sees the history may need little else for a while.

Where the prior is predicted from the history, a posterior that equals it still varies over sets. Then only dead
dimensions tell, and the light stays yellow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unpad.data.family import Data
from unpad.errors import CollapseError
from unpad.models.contract import HasLatent, Model
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import CollapseSettings
from unpad.run import checkpoint
from unpad.training.latent import LatentReading, Sample, draw_sample, read_latent

Action = Literal["save", "stop", "recover"]
LIGHTS = ("green", "yellow", "orange")  # by the number of signs; a confirmed collapse is red
KL = "kl"  # the loss term that recovery lowers
HEALTHY = "healthy."  # begins the names of the kept weights in a checkpoint


@dataclass
class CollapseState:
    """What is known from one reading to the next, during a stage. JSON values, part of every checkpoint.

    Args:
        since: update at which the stage began, or the last recovery was.
        light: of the last reading after the warm-up.
        streak: readings in a row that looked collapsed.
        healthy_step: update of the last reading with one sign at most; where there was none, the stage's beginning.
        kl_factor: what the weight of the KL term is multiplied by, lowered by every recovery.
        kept_aside: whether the weights before a collapse have been kept.
    """

    since: int = 0
    light: str = "green"
    streak: int = 0
    healthy_step: int = 0
    kl_factor: float = 1.0
    num_recoveries: int = 0
    kept_aside: bool = False

    @classmethod
    def at(cls, step: int) -> CollapseState:
        """The state at the beginning of a stage."""
        return cls(since=step, healthy_step=step)

    def scaled(self, weights: dict[str, float]) -> dict[str, float]:
        """Weights of loss terms as recoveries left them."""
        return {name: weight * self.kl_factor if name == KL else weight for name, weight in weights.items()}


@dataclass(frozen=True)
class Verdict:
    """What one reading means.

    Args:
        light: green, yellow (one sign), orange (several) or red (a confirmed collapse).
        streak: readings in a row that looked collapsed, this one included.
        changed: whether the light is another than at the reading before; never during the warm-up.
        action: what the training loop has to do now.
        message: light and signs in words.
    """

    step: int
    light: str
    streak: int
    changed: bool
    action: Action | None
    message: str
    reading: LatentReading

    def to_row(self) -> dict[str, Any]:
        """The reading and its light, for the log."""
        return {"light": self.light, "streak": self.streak, **asdict(self.reading)}


class CollapseMonitor:
    """Reads a model's latent now and then, and says what it means.

    With the policies save and recover it holds a copy of the model's weights as they were at the last healthy reading.

    Args:
        sample: two sets or more.
        state: of the run; changed by every reading.
        step: update that the run stands at.
        kept: the tensors of the checkpoint that the run resumes from; none for a new stage.
    """

    def __init__(
        self,
        settings: CollapseSettings,
        model: HasLatent,
        sample: Sample,
        state: CollapseState,
        step: int,
        kept: Mapping[str, Tensor],
    ) -> None:
        self.settings, self.model, self.sample, self.state = settings, model, sample, state
        self._healthy: dict[str, Tensor] = {}
        if settings.policy in ("save", "recover"):
            self._healthy = {name: value.clone() for name, value in model.state_dict().items()}
            found = {name.removeprefix(HEALTHY): value for name, value in kept.items() if name.startswith(HEALTHY)}
            for name, value in found.items():
                self._healthy[name].copy_(value)
            if not found:  # a new stage, or the policy is new
                state.healthy_step = step

    @classmethod
    def begin(
        cls,
        model: Model,
        data: Data,
        held_out: np.ndarray,
        train: np.ndarray,
        recipe: Recipe,
        state: CollapseState,
        step: int,
        kept: Mapping[str, Tensor],
    ) -> CollapseMonitor | None:
        """The monitor of a stage; None where the recipe wants none, the model has no latent, or sets are missing.

        Args:
            held_out, train: ids of the stage's sequences, (n,) int.
            recipe: the stage's own.
        """
        settings = recipe.collapse
        if settings.policy == "off" or not isinstance(model, HasLatent):
            return None
        sample = draw_sample(
            data, held_out, train, settings.window,
            tokens=recipe.plan.tokens_per_micro, seed=recipe.train.seed, device=next(model.parameters()).device,
        )  # fmt: skip
        return cls(settings, model, sample, state, step, kept) if sample.num_sets > 1 else None

    def describe(self) -> str:
        """What is read and when, in words."""
        part = "held-out" if self.sample.held_out else "training"
        return (
            f"the latent is read every {self.settings.every} updates on {self.sample.num_sets} sets of "
            f"{self.sample.num_seqs} {part} patients"
        )

    def due(self, step: int) -> bool:
        """Whether a reading is due after this update."""
        return step % self.settings.every == 0

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold beside the state."""
        return {HEALTHY + name: value for name, value in self._healthy.items()}

    def check(self, step: int) -> Verdict:
        """Read the latent after update `step` of the run. Equal weights and an equal state give an equal verdict."""
        settings, state = self.settings, self.state
        reading = read_latent(self.model, self.sample.batches, settings)
        signs = self._signs(reading)
        counts = step >= state.since + settings.warmup
        suspicious = counts and {"active", "probe"} <= signs.keys()
        state.streak = state.streak + 1 if suspicious else 0
        confirmed = state.streak >= settings.patience
        light = "red" if confirmed else LIGHTS[min(len(signs), 2)]
        changed = counts and light != state.light  # every run begins with a latent that says little
        if counts:
            state.light = light
        if len(signs) <= 1:
            state.healthy_step = step
            current = self.model.state_dict()
            for name, value in self._healthy.items():
                value.copy_(current[name])
        message = f"latent {light} at step {step}: " + ("; ".join(signs.values()) or "in use")
        if confirmed:
            message += f"; {state.streak} readings in a row, the last healthy one at step {state.healthy_step}"
        return Verdict(step, light, state.streak, changed, self._action(confirmed), message, reading)

    def _signs(self, reading: LatentReading) -> dict[str, str]:
        settings, signs = self.settings, {}
        if reading.active_share < settings.active_share:
            signs["active"] = f"{reading.active_share:.1%} of its units are active"
        if reading.dead_share > settings.dead_share:
            signs["kl"] = f"{reading.dead_share:.1%} of its dimensions have a KL below {settings.dead_kl:g} nats"
        if reading.probe_gap < settings.probe_gap:
            signs["probe"] = f"latents of other sets cost {reading.probe_gap:.2%} more than a set's own"
        return signs

    def _action(self, confirmed: bool) -> Action | None:
        policy, state = self.settings.policy, self.state
        if not confirmed or policy == "off" or policy == "warn" or (policy == "save" and state.kept_aside):
            return None
        if policy == "recover" and state.num_recoveries >= self.settings.recoveries:
            return "stop"
        return policy

    # ----------------------------------------------------------------------- what follows

    def keep_aside(self, checkpoints: Path) -> Path:
        """Write the weights of the last healthy reading to `before-collapse-step-<step>`, beside the checkpoints.

        Raises:
            DiskError: they do not fit or cannot be written.
        """
        step = self.state.healthy_step
        name = f"before-collapse-step-{step:08d}"
        tensors = {f"model.{key}": value for key, value in self._healthy.items()}
        checkpoint.save_named(checkpoints, name, checkpoint.State(step, tensors, {"collapse": asdict(self.state)}))
        self.state.kept_aside = True
        return checkpoints / name

    def recover(self, step: int, optimizer: torch.optim.Optimizer) -> str:
        """Put the weights of the last healthy reading back, forget the optimizer's state and lower the KL's weight.

        Returns:
            What was done, in words.
        """
        state = self.state
        self.model.load_state_dict(self._healthy)
        optimizer.state.clear()
        state.since, state.light, state.streak = step, "green", 0
        state.kl_factor *= self.settings.factor
        state.num_recoveries += 1
        return (
            f"recovery {state.num_recoveries} of {self.settings.recoveries} at step {step}: the weights of step "
            f"{state.healthy_step} again, a fresh optimizer, and {state.kl_factor:g} times the weight of {KL}"
        )

    def error(self, verdict: Verdict) -> CollapseError:
        """What a stopped run says."""
        return CollapseError(
            verdict.message,
            where=f"step {verdict.step}",
            fix=f"resume with collapse.policy=warn to go on as it is, or start anew with less weight on losses.{KL}",
        )
