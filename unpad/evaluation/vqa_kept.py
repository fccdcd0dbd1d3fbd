"""Metrics of models with fewer visual tokens: accuracy by mode, and numbers of tokens kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unpad.evaluation.metrics import Extremes, Metric, interval, mean_of, resample

HIGHER_IS_BETTER: dict[str, bool | None] = {
    "accuracy_*": True,
    "soft_to_hard_gap": None,
    "visual_tokens": None,
    "kept_*": None,
    "keep_ratio_*": None,
}


def mode_metrics(right: dict[str, np.ndarray], groups: np.ndarray | None = None) -> dict[str, Metric]:
    """`accuracy_MODE` of every mode, and `soft_to_hard_gap`, the accuracy of hard removal less that of soft.

    Args:
        right: for every mode the scores of the same rows, (num_rows,).
        groups: (num_rows,) as in `metrics.resample`.
    """
    found = {f"accuracy_{mode}": mean_of(scores, groups, share=True) for mode, scores in right.items()}
    if "soft" in right and "hard" in right:  # of the same rows: the interval is that of the difference
        gap = right["hard"] - right["soft"]
        found["soft_to_hard_gap"] = mean_of(gap, groups)
        if not gap.any():  # no resample differs; the mean is at most the share of rows whose answers differ
            reach = mean_of(gap, groups, share=True)
            found["soft_to_hard_gap"] = replace(reach, low=-reach.high)
    return found


def kept_metrics(
    patches: np.ndarray, given: np.ndarray, kept: np.ndarray, groups: np.ndarray | None = None
) -> dict[str, Metric]:
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
        groups: (num_rows,) as in `metrics.resample`.
    """
    seen = patches > 0
    groups = np.arange(len(patches)) if groups is None else groups
    patches, given, kept, groups = patches[seen], given[seen], kept[seen], groups[seen]
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
        sums = resample([left, of], 0, groups)
        num_groups = len(np.unique(groups))
        found[f"keep_ratio_{name}"] = interval(left.sum() / of.sum(), sums[0] / sums[1], len(patches), num_groups)
    return found
