"""Metrics of models with fewer visual tokens: accuracy by mode, and numbers of tokens kept."""

from __future__ import annotations

import numpy as np

from unpad.evaluation.metrics import Extremes, Metric, interval, resample

HIGHER_IS_BETTER: dict[str, bool | None] = {
    "accuracy_*": True,
    "soft_to_hard_gap": None,
    "visual_tokens": None,
    "kept_*": None,
    "keep_ratio_*": None,
}


def mode_metrics(right: dict[str, np.ndarray]) -> dict[str, Metric]:
    """`accuracy_MODE` of every mode, and `soft_to_hard_gap`, the accuracy of hard removal less that of soft.

    Args:
        right: for every mode the scores of the same rows, (num_rows,).
    """
    found = {f"accuracy_{mode}": mean_of(scores) for mode, scores in right.items()}
    if "soft" in right and "hard" in right:  # of the same rows: the interval is that of the difference
        found["soft_to_hard_gap"] = mean_of(right["hard"] - right["soft"])
    return found


def kept_metrics(patches: np.ndarray, given: np.ndarray, kept: np.ndarray) -> dict[str, Metric]:
    """Numbers of visual tokens of rows, over the rows with images.

    `visual_tokens` counts the patches of their images, `kept_block_N` the tokens that enter block N, `kept_average` is
    the mean over the blocks, and `kept_final` counts the tokens that enter the last: each the mean, the least and the
    most of a row.
    `keep_ratio_merge` is the number after merging over patches; `keep_ratio_average` and `keep_ratio_final` are the
    average and the final number over the number after merging; these are ratios of totals, with 95 % confidence
    intervals.

    Args:
        patches: (num_rows,) int64.
        given: (num_rows,) int64, visual tokens before any was removed; fewer than patches where they were merged.
        kept: (num_rows, blocks) int64, visual tokens that entered each block.
    """
    seen = patches > 0
    patches, given, kept = patches[seen], given[seen], kept[seen]
    if not len(patches) or not kept.shape[1]:
        return {}
    final, average = kept[:, -1], kept.mean(1)
    counts = {"visual_tokens": patches}
    counts |= {f"kept_block_{block}": column for block, column in enumerate(kept.T)}
    counts |= {"kept_average": average, "kept_final": final}
    found: dict[str, Metric] = {
        name: Extremes(float(values.mean()), float(values.min()), float(values.max()), len(values))
        for name, values in counts.items()
    }
    ratios = {"merge": (given, patches), "average": (average, given), "final": (final, given)}
    for name, (left, of) in ratios.items():
        sums = resample([left, of], 0)
        found[f"keep_ratio_{name}"] = interval(left.sum() / of.sum(), sums[0] / sums[1], len(patches))
    return found


def mean_of(values: np.ndarray) -> Metric:
    """The mean of values of rows (num_rows,), with its interval."""
    return interval(values.mean(), resample([values], 0)[0] / len(values), len(values))
