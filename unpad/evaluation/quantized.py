"""Losses of quantized weights against the run that they were made of (apart: of every family).

The original's perplexity, how far predictions moved, and how often the likeliest answer stays.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.data.measuring import Measuring
from unpad.errors import UnpadError
from unpad.evaluation.family import per_sequence
from unpad.evaluation.metrics import Metric, perplexity, ratio_of
from unpad.inference.loaded import LoadedRun, load
from unpad.models.contract import Classifies, Generates, Model
from unpad.run.base import fingerprint, run_weights
from unpad.run.folder import RECIPE
from unpad.run.quantized import Quantized

ROWS = 512  # whose scores are held at a time


def against_original(run: LoadedRun, over: Measuring[Any]) -> tuple[dict[str, Metric], list[str]]:
    """Compare a run of quantized weights with its original, if this is there and as it was.

    Returns:
        `original_perplexity` of token models, `divergence`, the mean of KL(original || quantized) in nats over targets
        or rows, and `likeliest_kept`, the share of them of which the original's likeliest token or class is the
        likeliest still; or else a line with the reason.
    """
    assert run.quantized is not None, "a run of quantized weights"
    folder = _folder(run.quantized, run.folder)
    if folder is None:
        return {}, [f"not compared with the original: {run.quantized.original} is gone"]
    try:
        if fingerprint(run_weights(folder)[0]) != run.quantized.sha256:
            return {}, [f"not compared with the original: the weights of {folder} have changed"]
        original = load(folder).model
    except UnpadError as error:
        return {}, [f"not compared with the original: {error.what}"]
    if not isinstance(run.model, Classifies | Generates):
        return {}, [f"not compared with the original: a model of kind {run.model.config.kind} predicts no distribution"]
    original.mode = run.model.mode
    of_tokens = isinstance(run.model, Generates)
    values = _compare(original, replace(over, overflow="split") if of_tokens else over)
    groups = over.data.table.group[over.seq_ids]

    def of(name: str, share: bool = False) -> Metric:
        return ratio_of(values[name], values["targets"], groups, share=share)

    metrics = {"divergence": of("moved"), "likeliest_kept": of("kept", share=True)}
    return ({"original_perplexity": perplexity(of("nll"))} if of_tokens else {}) | metrics, []


VALUES = ("nll", "moved", "kept", "targets")


def _folder(record: Quantized, beside: Path) -> Path | None:
    """The original's folder, at its place or beside the run, in case both were copied."""
    places = (Path(record.original), beside.parent / Path(record.original).name)
    return next((place for place in places if (place / RECIPE).is_file()), None)


@torch.no_grad()
def _compare(original: Model, over: Measuring[Any]) -> dict[str, np.ndarray]:
    """Sums over the targets of every sequence, (num_seqs,) each: the original's negative log-likelihood, divergence, 1
    where the likeliest stays, and 1."""

    def compare(batch: RaggedBatch) -> dict[str, np.ndarray]:
        if isinstance(over.model, Generates) and isinstance(original, Generates):
            labels = batch.labels.index_select(0, batch.target_index)
            hidden = [model.target_hidden(batch).split(ROWS) for model in (original, over.model)]
            parts = [
                _moved(original.logits(before), over.model.logits(after), wanted)
                for before, after, wanted in zip(*hidden, labels.split(ROWS), strict=True)
            ]
            columns = torch.cat([torch.zeros(3, 0, dtype=torch.float64), *parts], 1)
            sums = [per_sequence(column, batch) for column in columns]
            return dict(zip(VALUES, [*(values for values, _ in sums), sums[0][1]], strict=True))
        assert isinstance(over.model, Classifies)
        assert isinstance(original, Classifies)
        scores = original.classify(batch)
        columns = _moved(scores, over.model.classify(batch), scores.argmax(1))
        return dict(zip(VALUES, [*columns.numpy(), np.ones(len(scores))], strict=True))

    over.model.eval()
    original.eval()
    return over.collect(compare)


def _moved(before: Tensor, after: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of the labels before, divergence, and 1 where the likeliest stays, (3, num) float64.

    Args:
        before: scores, (num, num_classes); after: the same of the quantized model.
    """
    log_p, log_q = (scores.double().log_softmax(-1) for scores in (before, after))
    moved = (log_p.exp() * (log_p - log_q)).sum(-1)
    kept = log_p.argmax(-1) == log_q.argmax(-1)
    return torch.stack([-log_p.gather(1, labels[:, None])[:, 0], moved, kept.double()])
