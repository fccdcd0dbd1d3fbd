"""Latent statistics on a fixed sample of sets, in evaluation mode and without gradient.

A model uses its latent if the posterior means vary over sets (Burda et al. 2016, arXiv 1509.00519), the KL is above
almost zero, in plain nats without weight or free bits, and the decoder does worse with the latents of other sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.models.contract import HasLatent
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.training import CollapseSettings
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
