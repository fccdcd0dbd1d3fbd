"""Scales of values: monotone functions from the numbers of a table to those a model reads, one per code.

All are fitted on the values of training patients. A logarithm or a rank takes the skew out of values such as laboratory
results, where a few large ones would otherwise stretch the scale of all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from typing_extensions import TypedDict

from unpad.storage.reading import Finite

Kind = Literal["standard", "log", "rank"]
FARTHEST = 1e6  # standard deviations; a larger distance is an error of the data, and might not fit float32
# Where the values of a code are kept as knots of its ranks, in normal scores: closer in the tails than equal shares.
KNOTS = np.linspace(-3.5, 3.5, 71)


class LogJson(TypedDict):
    """A `LogScale` in the run's file of codes."""

    mean: list[Finite]
    std: list[Annotated[Finite, Field(ge=0)]]
    least: list[Finite]


class RankJson(TypedDict):
    """A `RankScale` in it."""

    values: list[list[Finite]]
    scores: list[list[Finite]]


@dataclass(frozen=True, eq=False)
class LogScale:
    """Logarithms in standard deviations, for the codes whose values in training are all above 0.

    Args:
        mean, std: (num_codes,) float64, of the logarithms; std is 0 for other codes, which stay standardised.
        least: (num_codes,) float64, smallest value in training; smaller ones count as this one.
    """

    mean: np.ndarray
    std: np.ndarray
    least: np.ndarray
    kind: ClassVar[Kind] = "log"

    def of(self, code: np.ndarray, value: np.ndarray, standard: np.ndarray) -> np.ndarray:
        """Scale the values of codes; arguments as `standardised`, with its result."""
        usable = (self.std[code] > 0) & ~np.isnan(value)
        chosen = code[usable]
        logs = np.log(np.maximum(value[usable], self.least[chosen]))
        scaled = standard.copy()
        scaled[usable] = (logs - self.mean[chosen]) / self.std[chosen]
        return scaled

    def describe(self) -> str:
        return f"{int((self.std > 0).sum()):,} of them as logarithms"

    def to_json(self) -> dict[str, LogJson]:
        return {"log": {"mean": self.mean.tolist(), "std": self.std.tolist(), "least": self.least.tolist()}}


@dataclass(frozen=True, eq=False)
class RankScale:
    """Normal scores of ranks: the normal quantile of the share of training values below a value, where equal values
    count half (van der Waerden 1952). Between knots it is linear, beyond the outermost constant.

    Args:
        values, scores: of every code, (num_knots,) float64, rising; empty for a code without values.
    """

    values: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    kind: ClassVar[Kind] = "rank"

    def of(self, code: np.ndarray, value: np.ndarray, standard: np.ndarray) -> np.ndarray:
        """Scale the values of codes; arguments as `standardised`, with its result."""
        scaled = standard.copy()
        for one, rows in by_code(code, np.flatnonzero(~np.isnan(standard))):
            scaled[rows] = np.interp(value[rows], self.values[one], self.scores[one])
        return scaled

    def describe(self) -> str:
        return "as normal scores of ranks"

    def to_json(self) -> dict[str, RankJson]:
        values, scores = ([one.tolist() for one in rows] for rows in (self.values, self.scores))
        return {"rank": {"values": values, "scores": scores}}


Scale = LogScale | RankScale | None  # None: standardised


def standardised(code: np.ndarray, value: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Distance from the mean in standard deviations, (num_events,) float64, nan without a value.

    Args:
        code: (num_events,) index of each event's code.
        value: (num_events,) float64.
        mean, std: (num_codes,); std is 0 for codes without values in training, whose scale is unknown.
    """
    spread = std[code]
    with np.errstate(over="ignore"):  # by a spread near 0, whose distances are cut
        scaled = (value - mean[code]) / np.where(spread > 0, spread, 1)
    return np.where(spread > 0, np.clip(scaled, -FARTHEST, FARTHEST), np.nan)


def fit_scale(kind: Kind, code: np.ndarray, value: np.ndarray, std_floor: float, num_codes: int) -> Scale:
    """Fit a scale on the values of training patients.

    Args:
        code: (num_values,) int64.
        value: (num_values,) float64.
        std_floor: smallest standard deviation of logarithms; their unit is a factor, so it is no share of their mean.
    """
    if kind == "standard":
        return None
    if kind == "log":
        mean, std, least = np.zeros((3, num_codes))
        for one, rows in by_code(code, np.arange(len(code))):
            least[one] = value[rows].min()
            if least[one] > 0:
                logs = np.log(value[rows])
                mean[one], std[one] = logs.mean(), max(float(logs.std()), std_floor)
        return LogScale(mean, std, least)
    values, scores = ([np.zeros(0)] * num_codes for _ in range(2))
    for one, rows in by_code(code, np.arange(len(code))):
        values[one], scores[one] = _knots(value[rows])
    return RankScale(tuple(values), tuple(scores))


def _knots(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of a code, or those at `KNOTS` and both ends where they are more, and their normal scores."""
    ordered = np.sort(value)
    share = torch.special.ndtr(torch.from_numpy(KNOTS)).numpy()
    at = np.rint(share * (len(ordered) - 1)).astype(np.int64)
    knots = np.unique(ordered)
    if len(knots) > len(KNOTS):
        knots = np.unique(np.concatenate([ordered[:1], ordered[at], ordered[-1:]]))
    below, until = (np.searchsorted(ordered, knots, side) for side in ("left", "right"))
    middle = torch.from_numpy((below + until) / (2 * len(ordered)))
    return knots, torch.special.ndtri(middle).numpy()


def by_code(code: np.ndarray, places: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Every code of the events at some places, in order, and its places among them.

    Args:
        code: (num_events,) int64; places: (num,) int64.
    """
    order = places[np.argsort(code[places], kind="stable")]
    codes, starts = np.unique(code[order], return_index=True)
    yield from zip(codes.tolist(), np.split(order, starts[1:]) if len(codes) else (), strict=True)


def scale_of(log: LogJson | None, rank: RankJson | None) -> Scale:
    """The scale that a run kept."""
    if log is not None:
        return LogScale(*(np.array(column, np.float64) for column in (log["mean"], log["std"], log["least"])))
    if rank is not None:
        values, scores = (tuple(np.array(one, np.float64) for one in rows) for rows in (rank["values"], rank["scores"]))
        return RankScale(values, scores)
    return None
