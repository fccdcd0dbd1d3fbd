"""Detection of posterior collapse during training, and the actions that follow.

A posterior has collapsed when it holds no information about its own set: it equals the prior, and the decoder ignores
it. The signs are few active units, many dead dimensions, and a reconstruction that is as good from the latents of other
sets. Few active units and an idle latent together, for some readings in a row, are a collapse. Neither
suffices alone: few units may carry all the information, and a decoder that sees the history may need little else for a
while.

Where the prior is predicted from the history, a posterior that equals it still varies over sets. Then only dead
dimensions tell, and the light stays yellow.

A model uses its latent if the posterior means vary over sets (Burda et al. 2016, arXiv 1509.00519), the KL is above
almost zero, in plain nats without weight or free bits, and the decoder does worse with the latents of other sets.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.errors import CheckpointError, CollapseError
from unpad.models.adapters import kept_weights, load_kept
from unpad.models.contract import HasLatent
from unpad.models.set_sequence.event_sets import EventSets
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import CollapseSettings
from unpad.run import checkpoint
from unpad.storage.reading import known_fields, misfit
from unpad.terminal.table import number_of
from unpad.training.context import Action, SavedWatches, Verdict
from unpad.training.stage import StageSetup

SEED = 77  # makes the draw of the sample independent of other draws from the run's seed


# --------------------------------------------------------------------------- the sample


@dataclass(frozen=True)
class LatentSample:
    """Sets that every reading of a stage measures: all sets of some patients."""

    batches: list[RaggedBatch]
    held_out: bool

    @property
    def num_sets(self) -> int:
        return sum(_num_sets(batch) for batch in self.batches)

    @property
    def num_seqs(self) -> int:
        return sum(batch.num_seqs for batch in self.batches)


def draw_sample(stage: StageSetup, num_sets: int, device: torch.device) -> LatentSample:
    """Draw patients by the recipe's seed until they have `num_sets` sets; training ones if too few are held out."""
    sample = LatentSample(_draw(stage, stage.held_out_ids, num_sets, device), True)
    if sample.num_sets < num_sets:
        other = LatentSample(_draw(stage, stage.train_ids, num_sets, device), False)
        sample = max(sample, other, key=lambda sample: sample.num_sets)
    return sample


def _draw(stage: StageSetup, ids: np.ndarray, num_sets: int, device: torch.device) -> list[RaggedBatch]:
    data, seed, tokens = stage.data, stage.recipe.train.seed, stage.recipe.plan.tokens_per_micro
    drawn = np.random.default_rng([seed, SEED]).permutation(ids[data.table.positions[ids] > 0])
    # Patients longer than a micro-batch come last, so that a single one does not make every reading expensive.
    drawn = drawn[np.argsort(data.table.positions[drawn] > tokens, kind="stable")]
    batches: list[RaggedBatch] = []
    while num_sets > 0 and drawn.size:
        positions = data.table.positions[drawn]
        first = max(int(np.searchsorted(positions.cumsum(), tokens, side="right")), 1)
        chosen, stops, drawn = drawn[:first], positions[:first].astype(np.int32), drawn[first:]
        batch = data.load(Micro(chosen, np.zeros_like(stops), stops, np.zeros_like(stops), 0, 0))
        before = batch.require(EventSets).history.cu_seqlens[:-1]  # (num_seqs,) sets of the patients before
        needed = int((before < num_sets).sum())
        batches.append((batch.select(range(needed)) if needed < batch.num_seqs else batch).to(device))
        num_sets -= _num_sets(batches[-1])
    return batches


def _num_sets(batch: RaggedBatch) -> int:
    return batch.require(EventSets).num_sets


# --------------------------------------------------------------------------- one reading


@dataclass(frozen=True)
class LatentReading:
    """Statistics of posterior and decoder on the sample.

    Args:
        kl: mean over sets of each dimension's KL, (latent,) nats.
        variance: variance over sets of each dimension's posterior mean, (latent,).
        active_share: share of dimensions with a variance above `active_variance`.
        dead_share: share of dimensions with a KL below `dead_kl`.
        reconstruction, shuffled: mean reconstruction loss from each set's own posterior mean, and from another set's.
        probe_gap: extra loss from another set's latent, as a share of the loss from its own.
    """

    num_sets: int
    kl: list[float]
    variance: list[float]
    active_share: float
    dead_share: float
    reconstruction: float
    shuffled: float
    probe_gap: float


@torch.no_grad()
def read_latent(model: HasLatent, batches: Sequence[RaggedBatch], settings: CollapseSettings) -> LatentReading:
    """Read a model on batches with two sets or more; the cut into batches makes no difference.

    The other set is half the sample away, so nearly always from another patient.
    """
    was_training = model.training
    model.train(False)
    try:
        posteriors = [model.posterior(batch) for batch in batches]
        means = [mean for mean, _, _ in posteriors]  # (num_sets, latent) of each batch
        all_means = torch.cat(means)
        others = all_means.roll(len(all_means) // 2, 0).split([len(mean) for mean in means])
        own_loss, other_loss = (
            float(torch.cat([model.reconstruct(b, z) for b, z in zip(batches, latents, strict=True)]).double().mean())
            for latents in (means, others)
        )
    finally:
        model.train(was_training)
    kl = torch.cat([kl for _, _, kl in posteriors]).double().mean(0)
    variance = all_means.double().var(0, correction=0)
    return LatentReading(
        num_sets=len(all_means),
        kl=_rounded(kl),
        variance=_rounded(variance),
        active_share=float((variance > settings.active_variance).double().mean()),
        dead_share=float((kl < settings.dead_kl).double().mean()),
        reconstruction=own_loss,
        shuffled=other_loss,
        probe_gap=(other_loss - own_loss) / max(abs(own_loss), 1e-12),
    )


def _rounded(values: Tensor) -> list[float]:
    """Round to six digits: every row of the metrics holds two numbers per dimension."""
    return [float(f"{value:.6g}") for value in values.tolist()]


NO_GAP = 1e-4  # probe_gap of a decoder that ignores its latent
LIGHTS = ("green", "yellow", "orange")  # by the number of signs; a confirmed collapse is red
KL = "kl"  # the loss term that recovery lowers
HEALTHY = "healthy."  # prefix of the healthy weights' names in a checkpoint


@dataclass
class CollapseState:
    """State of the detector from one reading of a stage to the next. JSON values, part of every checkpoint.

    Args:
        since: step at which the stage began, or of the last recovery.
        light: light of the last reading after the warm-up.
        streak: readings in a row that looked collapsed.
        healthy_step: step of the last reading with one sign at most; without such a reading, the stage's beginning.
        kl_factor: factor on the weight of the KL term, lowered by every recovery.
        num_recoveries: recoveries so far.
        kept_aside: whether the weights before a collapse have been saved.
    """

    since: int = 0
    light: str = "green"
    streak: int = 0
    healthy_step: int = 0
    kl_factor: float = 1.0
    num_recoveries: int = 0
    kept_aside: bool = False


class CollapseMonitor:
    """Watch that reads a model's latent every few steps and looks for signs of a collapse.

    It reads nothing with the policy off, or from a sample of fewer than two sets. With the policies save and recover it
    holds a copy of the model's weights from the last healthy reading.
    """

    name = "collapse"
    subject = "latent"

    def __init__(self, settings: CollapseSettings, model: HasLatent, sample: LatentSample, saved: SavedWatches) -> None:
        self.settings, self.model, self.sample = settings, model, sample
        values = saved.states.get(self.name, {"since": saved.stage_start, "healthy_step": saved.stage_start})
        if fault := misfit(values, CollapseState):
            fix = "use another copy of the run, or resume with collapse.policy=off"
            raise CheckpointError(f"the saved state of the watch is damaged: {fault}", where=self.name, fix=fix)
        self.state = CollapseState(**known_fields(CollapseState, values))
        self._reads = settings.policy != "off" and sample.num_sets > 1
        self._healthy: dict[str, Tensor] = {}
        if self._reads and settings.policy in ("save", "recover"):
            self._healthy = {name: value.clone() for name, value in kept_weights(model).items()}
            weights = {name.removeprefix(HEALTHY): w for name, w in saved.tensors.items() if name.startswith(HEALTHY)}
            for name, value in weights.items():
                self._healthy[name].copy_(value)
            if not weights:  # a new stage, or the policy is new
                self.state.healthy_step = saved.step

    @classmethod
    def start(cls, stage: StageSetup, model: HasLatent, saved: SavedWatches) -> "CollapseMonitor":
        """Draw the sample of a stage, and continue from the saved state."""
        settings = stage.recipe.collapse
        device = next(model.parameters()).device
        sample = LatentSample([], False) if settings.policy == "off" else draw_sample(stage, settings.window, device)
        return cls(settings, model, sample, saved)

    def describe(self) -> str:
        if not self._reads:
            return ""
        part = "held-out" if self.sample.held_out else "training"
        return (
            f"the latent is read every {number_of(self.settings.every, 'steps')} on "
            f"{number_of(self.sample.num_sets, 'sets')} of "
            f"{self.sample.num_seqs} {part} patients"
        )

    def due(self, step: int) -> bool:
        return self._reads and step % self.settings.every == 0

    def scaled(self, weights: dict[str, float]) -> dict[str, float]:
        factor = self.state.kl_factor
        return {name: weight * factor if name == KL else weight for name, weight in weights.items()}

    def values(self) -> dict[str, Any]:
        return asdict(self.state)

    def tensors(self) -> dict[str, Tensor]:
        return {HEALTHY + name: value for name, value in self._healthy.items()}

    def check(self, step: int) -> Verdict:
        settings, state = self.settings, self.state
        reading = read_latent(self.model, self.sample.batches, settings)
        signs = self._signs(reading)
        counts = step >= state.since + settings.warmup
        ignored = counts and abs(reading.probe_gap) < NO_GAP  # also where units of the latent are active
        suspicious = counts and (ignored or {"active", "probe"} <= signs.keys())
        state.streak = state.streak + 1 if suspicious else 0
        confirmed = state.streak >= settings.patience
        light = "red" if confirmed else LIGHTS[min(len(signs), 2)]
        changed = counts and light != state.light  # every run begins with a latent of little information
        if counts:
            state.light = light
        if len(signs) <= 1 and not ignored:
            state.healthy_step = step
            current = kept_weights(self.model)
            for name, value in self._healthy.items():
                value.copy_(current[name])
        message = f"latent {light} at step {step}: " + ("; ".join(signs.values()) or "in use")
        if confirmed:
            message += f"; {state.streak} readings in a row, the last healthy one at step {state.healthy_step}"
        values = {"light": light, "streak": state.streak, **asdict(reading)}
        return Verdict(step, light, changed, self._action(confirmed), message, values)

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

    # ----------------------------------------------------------------------- actions

    def save_healthy(self, checkpoints: Path, group: Group = ALONE) -> Path:
        """Write the weights of the last healthy reading to `before-collapse-step-<step>`, once per stage.

        Args:
            group: all of these processes call it, and the first writes.

        Raises:
            DiskError: they do not fit or cannot be written.
        """
        step = self.state.healthy_step
        name = f"before-collapse-step-{step:08d}"
        state = checkpoint.State(step, checkpoint.model_tensors(self._healthy), {self.name: self.values()})
        group.of_leader(lambda: checkpoint.save_named(checkpoints, name, state).name)
        self.state.kept_aside = True  # in every process, or the next reading would save in some of them only
        return checkpoints / name

    def recover(self, step: int, optimizer: torch.optim.Optimizer) -> str:
        """Load the weights of the last healthy reading, reset the optimizer and lower the weight of the KL term."""
        state = self.state
        load_kept(self.model, self._healthy)
        optimizer.state.clear()
        state.since, state.light, state.streak = step, "green", 0
        state.kl_factor *= self.settings.factor
        state.num_recoveries += 1
        return (
            f"recovery {state.num_recoveries} of {self.settings.recoveries} at step {step}: the weights of step "
            f"{state.healthy_step} again, a fresh optimizer, and {state.kl_factor:g} times the weight of {KL}"
        )

    def error(self, verdict: Verdict) -> CollapseError:
        return CollapseError(
            verdict.message,
            where=f"step {verdict.step}",
            fix=f"resume with collapse.policy=warn to go on as it is, or start again with less weight on losses.{KL}",
        )
