"""Held-out perplexity, bits per byte and bits per character, from sums that no batching can change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unpad.batch import RaggedBatch
from unpad.layout import Layout
from unpad.loader import load_micro
from unpad.models.decoder import Decoder
from unpad.plan.plan import plan
from unpad.recipe import PlanSettings
from unpad.tokens.corpus import TokenSet

NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Metric:
    """A measured value, its 95 % confidence interval, and how many documents or replies it rests on."""

    value: float
    low: float
    high: float
    num: int


@dataclass(frozen=True)
class DocumentSums:
    """Per document: nats, targets, and the characters and UTF-8 bytes those targets spell; each (num_docs,)."""

    nll: np.ndarray
    targets: np.ndarray
    chars: np.ndarray
    num_bytes: np.ndarray

    def mean_nll(self) -> float:
        return float(self.nll.sum() / max(int(self.targets.sum()), 1))


def document_nll(
    model: Decoder, tokens: TokenSet, seq_ids: np.ndarray, *, settings: PlanSettings, pad_id: int, device: torch.device
) -> DocumentSums:
    """Sum the negative log-likelihood of every document, in the model's own precision (fp32 unless it was converted).

    A document longer than the context is cut into windows; `settings.stride` decides how much context a window's first
    targets see. No target is left out and none counts twice.

    Args:
        seq_ids: (num_docs,) documents to evaluate.
        settings: the recipe's plan section; only its sizes matter, as no result depends on the batching.
    """
    everything = {
        "overflow": "split",
        "drop_last": False,
        "strategy": "pack",
        "tokens_per_step": settings.tokens_per_micro,
    }
    batches = plan(
        np.maximum(tokens.lengths - 1, 0), settings.model_copy(update=everything),
        seed=0, epoch=0, max_tokens=model.config.longest, seq_ids=seq_ids, targets=tokens.count_targets,
    )  # fmt: skip
    slot = np.full(len(tokens.lengths), -1, np.int64)
    slot[seq_ids] = np.arange(len(seq_ids))
    nll, targets = np.zeros(len(seq_ids)), np.zeros(len(seq_ids), np.int64)
    was_training = model.training
    model.eval()
    for step in range(batches.num_steps):
        for micro in batches.step(step):
            batch = load_micro(tokens, micro, pad_id)
            sums, counts = per_sequence(model.token_nll(batch.to(device)).cpu(), batch)
            np.add.at(nll, slot[micro.seq_ids], sums)
            np.add.at(targets, slot[micro.seq_ids], counts)
    model.train(was_training)
    return DocumentSums(nll, targets, tokens.target_chars[seq_ids], tokens.target_bytes[seq_ids])


def per_sequence(nll: Tensor, batch: RaggedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Add up (num_targets,) values by sequence; returns sums in fp64 and counts, each (num_seqs,)."""
    assert isinstance(batch.layout, Layout)
    bounds = batch.layout.cu_seqlens[1:].long()
    sequence = torch.searchsorted(bounds, batch.target_index, right=True).numpy()
    sums = np.bincount(sequence, weights=nll.double().numpy(), minlength=batch.num_seqs)
    return sums, np.bincount(sequence, minlength=batch.num_seqs)


def summarise(sums: DocumentSums, seed: int = 0) -> dict[str, Metric]:
    """Loss (nats per target), perplexity, bits per byte and bits per character.

    Intervals are 95 % percentile bootstraps over documents (Efron 1979), because tokens of one document are not
    independent.
    """
    nll, targets, chars, num_bytes = resample([sums.nll, sums.targets, sums.chars, sums.num_bytes], seed)
    ratios = {
        "loss": (sums.targets, targets),
        "bits_per_char": (sums.chars, chars),
        "bits_per_byte": (sums.num_bytes, num_bytes),
    }
    metrics = {}
    for name, (divisor, resampled) in ratios.items():
        scale = 1.0 if name == "loss" else 1 / math.log(2)
        samples = scale * nll / np.maximum(resampled, 1)
        metrics[name] = interval(scale * sums.nll.sum() / max(divisor.sum(), 1), samples, len(sums.nll))
    loss = metrics["loss"]
    metrics["perplexity"] = Metric(_exp(loss.value), _exp(loss.low), _exp(loss.high), loss.num)
    return metrics


def resample(columns: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Sums of each column over resamples of its items, drawn with replacement and together.

    Args:
        columns: arrays (num,) of numbers that belong to the same items.

    Returns:
        (len(columns), NUM_RESAMPLES) float64.
    """
    rng = np.random.default_rng(seed)
    num = len(columns[0])
    values = np.stack(columns).astype(np.float64)  # (columns, num)
    draws = (np.bincount(rng.integers(0, num, num), minlength=num) for _ in range(NUM_RESAMPLES if num else 0))
    sums = [values @ times for times in draws]  # one resample at a time: all together would not fit for many items
    return np.stack(sums, 1) if sums else np.zeros((len(columns), NUM_RESAMPLES))


def interval(value: float, samples: np.ndarray, num: int) -> Metric:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Metric(float(value), float(low), float(high), num)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
