"""What a search of parameters judges its trials by: a metric of `unpad eval`, or the score of pruned models."""

from __future__ import annotations

from pathlib import Path

from unpad.errors import RecipeError, nearest
from unpad.trials.search.prune_score import prune_score

SCORE = "score"
# Parts of the names of metrics of which more is better, and less.
MORE = ("accuracy", "auroc", "average_precision", "concordance", "keywords", "recall", SCORE)
LESS = ("loss", "perplexity", "bits_per", "brier", "calibration_error", "reconstruction", "made_code")


def direction(metric: str) -> int:
    """1 where less of a metric is better, -1 where more is.

    Raises:
        RecipeError: it is not known which.
    """
    if any(part in metric for part in MORE):
        return -1
    if any(part in metric for part in LESS):
        return 1
    raise RecipeError(
        f'more or less of "{metric}": which is better is not known', where="--for",
        fix="name a metric of `unpad eval` with one of " + ", ".join((*MORE, *LESS)) + " in its name",
    )  # fmt: skip


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
            fix = f"{hint if metric == SCORE else nearest(name, list(metrics))} Continue with --resume --for METRIC"
            raise RecipeError(what, where=f"--for {metric}: {folder}", fix=fix)
    return prune_score(*(metrics[name] for name in needed)) if metric == SCORE else metrics[metric]
