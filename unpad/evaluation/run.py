"""`unpad eval`: the held-out metrics of a run."""

from __future__ import annotations

from importlib import import_module

import numpy as np

from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.evaluation.metrics import Metric
from unpad.inference.loaded import load


def evaluate_run(name: str, num_shown: int = 0) -> tuple[dict[str, Metric], list[str]]:
    """Measure a run on what it held out, in fp32, so that no number depends on batching or hardware format.

    Measured are the kinds of data that the last stage trained on. What is measured says the family's file here.

    Args:
        num_shown: how many examples to show with what the model makes of them.

    Returns:
        Metrics, and lines with the examples.

    Raises:
        SourceError: nothing is held out.
    """
    run = load(name)
    data = run.data()
    used = (run.recipe.stages[-1].use if run.recipe.stages else None) or data.kinds
    kinds = [
        kind
        for k, kind in enumerate(data.kinds)
        if kind in used and np.any((data.table.split == Split.HOLDOUT) & (data.table.kind == k))
    ]
    if not kinds:
        raise SourceError("the run holds nothing out", where="data.holdout", fix="train with data.holdout=0.05")
    family = import_module(f"unpad.evaluation.{data.family}")
    found: tuple[dict[str, Metric], list[str]] = family.evaluate(run, data, kinds, num_shown)
    return found
