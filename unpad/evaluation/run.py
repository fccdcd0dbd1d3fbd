"""`unpad eval`: held-out metrics of a run, and the part of its page on them."""

from __future__ import annotations

import json
from importlib import import_module

import numpy as np

from unpad.data.sources.split import Split
from unpad.errors import DiskError, SourceError
from unpad.evaluation.metrics import Evaluation, Metric
from unpad.inference.loaded import load
from unpad.run.report.page import EVALUATION, write_report
from unpad.run.report.samples import keep_evaluation
from unpad.storage import write_atomic


def evaluate_run(run: str, num_shown: int = 0) -> tuple[dict[str, Metric], list[str]]:
    """Evaluate a run on its held-out data, in fp32, so that no number depends on batching or hardware format.

    The evaluation covers the kinds of data that the last stage trained on; `evaluation/<family>.py` has the metrics.
    They are added to `evaluations.jsonl`; what the page draws of the family is written to `evaluation.json`.

    Args:
        num_shown: number of examples to show with the model's output.

    Returns:
        Metrics, and lines with the examples.

    Raises:
        SourceError: nothing is held out.
        DiskError: a file cannot be written.
    """
    loaded = load(run)
    data = loaded.data()
    used = (loaded.recipe.stages[-1].use if loaded.recipe.stages else None) or data.kinds
    kinds = [
        kind
        for k, kind in enumerate(data.kinds)
        if kind in used and np.any((data.table.split == Split.HOLDOUT) & (data.table.kind == k))
    ]
    if not kinds:
        raise SourceError("the run holds nothing out", where="data.holdout", fix="train with data.holdout=0.05")
    family = import_module(f"unpad.evaluation.{data.family}")
    result: Evaluation = family.evaluate(loaded, data, kinds, num_shown)
    if result.drawn is not None:
        write_atomic(loaded.folder / EVALUATION, json.dumps(result.drawn, ensure_ascii=False), private=data.private)
    kept = {name: vars(metric) for name, metric in result.metrics.items()}
    try:
        keep_evaluation(loaded.folder, loaded.step, kept, result.lines)
        write_report(loaded.folder)
    except (DiskError, SourceError) as error:  # the run may be read-only, or without its metrics
        return result.metrics, [*result.lines, f"not shown on the run's page: {error.what}"]
    return result.metrics, result.lines
