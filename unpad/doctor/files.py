"""Files of a run: steps that were not finite, a loss that does not fall, spikes, and held-out against training."""

from __future__ import annotations

from typing import Any

import numpy as np

from unpad.doctor.subject import Subject
from unpad.run.report.history import METRICS, load_metrics
from unpad.terminal.finding import Finding, Severity, Value

LEAST_STEPS = 40  # of a stage, below which nothing is said about its course
FLAT = 0.03  # of the first loss
WINDOW = 25  # steps around one that it is compared with
HIGH_LOSS, HIGH_NORM = 2.0, 20.0  # times the median of the neighbours
SPIKES = 3
LEAST_LOGGED, WORSE = 10, 1.5  # steps, and times its start that a term ends at
LIKE_LOSSES = ("cross_entropy", "nll", "classification", "reconstruction", "next_code", "next_value", "next_time")
ROSE, ROSE_MUCH = 0.1, 0.3  # of the best held-out loss


def check_files(subject: Subject) -> list[Finding]:
    """Findings on the metrics of a run; of a recipe there are none.

    Raises:
        RunFileError: the metrics are damaged.
    """
    if subject.folder is None or not (subject.folder / METRICS).exists():  # a run made from another, not trained
        return []
    rows = load_metrics(subject.folder)
    train = [row for row in rows if row["kind"] == "train"]
    found = _not_finite(train)
    for stage in dict.fromkeys(row["stage"] for row in train):
        own = [row for row in train if row["stage"] == stage]
        if len(own) >= LEAST_STEPS:
            found += [*_flat(stage, own), *_spikes(own)]
        found += _worse(stage, own)
    return [*found, *_overfit(subject, rows)]


def _not_finite(train: list[dict[str, Any]]) -> list[Finding]:
    bad = [row for row in train if not np.isfinite([float(row["loss"]), float(row["grad_norm"])]).all()]
    if not bad:
        return []
    values: dict[str, Value] = {"step": bad[0]["step"]}
    return [Finding("run_nan", "fault", len(bad), ("optim.lr", "optim.clip", "precision", METRICS), values)]


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def _flat(stage: str, own: list[dict[str, Any]]) -> list[Finding]:
    losses = _column(own, "loss")
    losses = losses[np.isfinite(losses)]
    part = max(len(losses) // 10, 3)
    start, end = float(np.mean(losses[:part])), float(np.mean(losses[-part:]))
    fall = (start - end) / max(abs(start), 1e-9)
    if fall >= FLAT or not len(losses):
        return []
    values: dict[str, Value] = {"stage": stage, "steps": len(own), "start": start, "end": end}
    return [Finding("run_flat", "fault", fall, ("optim.lr", METRICS), values)]


def _spikes(own: list[dict[str, Any]]) -> list[Finding]:
    """Steps far above the median of their neighbours; the first ones are on their way down."""
    losses, norms = _column(own, "loss"), _column(own, "grad_norm")
    high = []
    for index in range(WINDOW, len(own)):
        near = slice(max(index - WINDOW, 0), index + WINDOW + 1)
        medians = float(np.median(losses[near])), float(np.median(norms[near]))
        is_high = losses[index] > HIGH_LOSS * medians[0] + 1 or norms[index] > HIGH_NORM * medians[1]
        if is_high and np.isfinite(losses[index]):
            high.append(own[index]["step"])
    if not high:
        return []
    values: dict[str, Value] = {"step": high[0]}
    severity: Severity = "warning" if len(high) >= SPIKES else "note"
    return [Finding("run_spikes", severity, len(high), ("optim.lr", "optim.clip", METRICS), values)]


def _worse(stage: str, own: list[dict[str, Any]]) -> list[Finding]:
    """A term that a stage logs beside the loss, or trains, and that ends far above its start; that of rejected replies
    is meant to rise."""
    part = max(len(own) // 10, 1)
    for name in own[0]["values"] if len(own) >= LEAST_LOGGED else ():
        known = [float(row["values"][name]) for row in own if row["values"].get(name) is not None]
        if name not in LIKE_LOSSES or len(known) < LEAST_LOGGED:
            continue
        start, end = float(np.mean(known[:part])), float(np.mean(known[-part:]))
        if end >= WORSE * start and end >= start + 0.5 and start > 0:
            of_pairs = "rejected" in own[0]["values"]
            values: dict[str, Value] = {"stage": stage, "name": name, "start": start, "end": end}
            fields = ("optim.lr", "train.beta", f"losses.{name}", METRICS)
            code = "chosen_unlearned" if of_pairs else "term_worse"
            return [Finding(code, "warning", end / start, fields, values)]
    return []


def _overfit(subject: Subject, rows: list[dict[str, Any]]) -> list[Finding]:
    """The last stage's held-out loss after its best."""
    evaluated = [row for row in rows if row["kind"] == "eval" and row["loss"] is not None]
    own = [row for row in evaluated if row["stage"] == subject.setup.stages[-1].name]
    if len(own) < 2:
        return []
    losses = _column(own, "loss")
    best = int(losses.argmin())
    rise = float(losses[-1] / max(losses[best], 1e-9) - 1)
    trained = [float(row["loss"]) for row in rows if row["kind"] == "train"]
    if rise < ROSE or not trained:
        return []
    train = subject.setup.stages[-1].recipe.train
    severity: Severity = "warning" if rise >= ROSE_MUCH and train.patience is None else "note"
    values: dict[str, Value] = {"step": own[best]["step"], "end": trained[-1]}
    return [Finding("overfit", severity, rise, ("train.patience", "model.dropout"), values)]
