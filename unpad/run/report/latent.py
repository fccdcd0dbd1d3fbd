"""Report section of a latent: its readings during training, from `metrics.jsonl`."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from unpad.recipes.recipe import Recipe
from unpad.run.report.history import Array
from unpad.run.report.section import PageSection
from unpad.run.report.svg import Axes, Curve, plot
from unpad.storage.reading import Count, Number


class _LatentValues(TypedDict):
    light: str
    num_sets: Count
    kl: Annotated[list[Number], Field(min_length=1)]
    variance: list[Number]
    active_share: Number
    dead_share: Number
    probe_gap: Number
    reconstruction: Number
    shuffled: Number


READING = _LatentValues


def section(rows: list[dict[str, Any]], recipe: Recipe | None) -> PageSection:
    """Draw the readings of a run.

    Args:
        rows: of `metrics.jsonl`, in the order of the file.
        recipe: recipe of the run, with the thresholds; None draws none.
    """
    levels, newest = {} if recipe is None else recipe.collapse.model_dump(), rows[-1]
    rows = [row for row in rows if len(row["values"]["kl"]) == len(newest["values"]["kl"])]
    steps = np.array([row["step"] for row in rows], float)

    def column(name: str, scale: float = 1.0) -> Array:
        return scale * np.array([row["values"][name] for row in rows], float)

    kl, variance = (
        np.array([np.median(np.array(row["values"][name], float)) for row in rows]) for name in ("kl", "variance")
    )
    loss = [
        Curve("main", [(steps, column("reconstruction"))], "from its own latent"),
        Curve("held", [(steps, column("shuffled"))], "from another set's"),
    ]
    figures = [
        _over(steps, "KL of the median dimension", kl, "nats, mean over sets", levels.get("dead_kl")),
        _over(steps, "Active units", column("active_share", 100), "% of dimensions", levels.get("active_share"), 100),
        _over(steps, "Variance of the median mean", variance, "over sets", levels.get("active_variance")),
        _over(steps, "Probe gap", column("probe_gap", 100), "% a wrong latent costs", levels.get("probe_gap"), 100),
        plot("Reconstruction", loss, Axes("mean over sets")),
    ]
    values = newest["values"]
    note = f"{values['light']} at step {newest['step']:,}, read on {values['num_sets']:,} sets"
    return PageSection("Latent", note, figures)


def _over(steps: Array, title: str, values: Array, unit: str, limit: float | None, scale: float = 1.0) -> str:
    lines = [Curve("main", [(steps, values)], dots=len(steps) <= 60)]
    if limit is not None:  # a curve, so that the axis always includes it
        lines.append(Curve("limit", [(np.array([0.0, steps[-1]]), np.full(2, scale * limit))], "threshold"))
    return plot(title, lines, Axes(unit, zero=bool(values.min() >= 0)))
