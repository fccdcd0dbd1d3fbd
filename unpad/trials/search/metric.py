"""Metric of a search: one of `unpad eval`, or the score of pruned models."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from unpad.errors import RecipeError, nearest
from unpad.evaluation.family import measures_of
from unpad.trials.search.prune_score import prune_score

SCORE = "score"


def direction(metric: str, family: str) -> int:
    """1 if a lower metric is better, -1 if a higher one is.

    Args:
        family: of the data of the trials.

    Raises:
        RecipeError: the family has no such metric, or neither direction of it is better.
    """
    if metric == SCORE:
        return -1
    known = measures_of(family).HIGHER_IS_BETTER
    better = next((more for pattern, more in known.items() if fnmatchcase(metric, pattern)), None)
    if better is None:
        names = [pattern.replace("*", "NAME") for pattern, more in known.items() if more is not None]
        what = f'more or less of "{metric}": which is better is not known'
        raise RecipeError(what, where="--for", fix="name a metric of `unpad eval`: " + ", ".join(names))
    return -1 if better else 1


def judge(metrics: dict[str, float], metric: str, folder: Path) -> float:
    """The value of a trial by the metrics of its run.

    Raises:
        RecipeError: the run has no such metric.
    """
    needed = ("accuracy_origin", "accuracy_hard", "keep_ratio_final") if metric == SCORE else (metric,)
    for name in needed:
        if name not in metrics:
            what = f'there is no "{name}" among the metrics of these runs'
            hint = "score is of models that make visual tokens fewer, as those of vqa_prune are."
            known = hint if metric == SCORE else nearest(name, list(metrics))
            fix = f"{known} Then run the same command with --resume --for METRIC"
            raise RecipeError(what, where=f"--for {metric}: {folder}", fix=fix)
    return prune_score(*(metrics[name] for name in needed)) if metric == SCORE else metrics[metric]
