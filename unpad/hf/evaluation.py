"""Evaluation: the loss as the mean over all targets, and metrics that depend on padding."""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer

from unpad.hf.loader import IGNORED
from unpad.proof.foreign.model import untouched_generators
from unpad.proof.foreign.undisturbed import attributes_kept


def is_mean_of_means(targets: np.ndarray, batch_size: int) -> bool:
    """True if the mean over rows of the means of their batches, as trainers compute it, is the mean over targets.

    Args:
        targets: of each row, (num_rows,) int64, in order.
    """
    starts = np.arange(0, len(targets), batch_size)
    rows = np.diff([*starts, len(targets)])
    return bool((np.add.reduceat(targets, starts) * len(targets) == rows * targets.sum()).all())


@dataclass
class MeanOverTargets:
    """Sum of losses and number of targets; the mean of the batches' means would depend on the batches."""

    total: float = 0.0
    num_targets: int = 0

    def add(self, mean: Tensor, num_targets: int) -> None:
        """Add a batch by its loss, the mean over its targets."""
        if num_targets:
            self.total += float(mean) * num_targets
            self.num_targets += num_targets

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[float]]) -> MeanOverTargets:
        """Sum of parts of a set: `total` and `num_targets` of each."""
        return cls(sum(total for total, _ in parts), int(sum(num for _, num in parts)))

    @property
    def mean(self) -> float:
        """In nats per target."""
        return self.total / self.num_targets


# --------------------------------------------------------------------------- metrics

MORE = 7  # columns of padding that are added
MOST_BYTES = 1 << 26  # of the arrays that metrics are tried on
SLOW_SECONDS = 2.0  # metrics that take longer are not tried
MOST_KEPT = 1000  # entries of a container that is kept
SAME_METRIC = 1e-4  # relative difference of two metrics that are the same


@contextmanager
def watching_padding(trainer: Trainer) -> Iterator[None]:
    """Inside, warn of metrics of a trainer that are others for the same rows with more padding.

    Metrics that draw numbers, are slow or raise on such rows are not judged. What they keep stays as it was.
    """
    compute = trainer.compute_metrics

    def watched(given: EvalPrediction) -> Any:
        tried = _rows_of(given)
        begun = time.perf_counter()
        found = compute(given)
        if tried is not None and time.perf_counter() - begun < SLOW_SECONDS:
            words = ""
            with suppress(Exception):
                words = counted_padding(compute, tried)
            if words:
                name = getattr(compute, "__qualname__", type(compute).__name__)
                warnings.warn(f"compute_metrics ({name}) counts padding: {words}", stacklevel=2)
        return found

    if compute is not None:
        trainer.compute_metrics = watched
    try:
        yield
    finally:
        trainer.compute_metrics = compute


def counted_padding(compute: Callable[[EvalPrediction], Any], given: EvalPrediction) -> str:
    """Words for a metric that is another with more padding; empty for none."""
    with (
        untouched_generators(),
        state_kept(compute),
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        once = _numbers(compute(_widened(given, 0)))
        wide = _numbers(compute(_widened(given, MORE)))
        again = _numbers(compute(_widened(given, 0)))
    if once.keys() != again.keys() or not all(_is_same(once[metric], again[metric]) for metric in once):
        return ""
    for metric in once:
        if metric in wide and not _is_same(once[metric], wide[metric]):
            return (
                f"{metric} is {once[metric]:.4g}, and {wide[metric]:.4g} of the same rows with {MORE} more columns of "
                f"it, so that it depends on how rows are batched. Leave out the places whose labels are {IGNORED}"
            )
    return ""


@contextmanager
def state_kept(function: Callable[..., Any]) -> Iterator[None]:
    """Restore what a function keeps from call to call: in its object, in variables around it and in global ones."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    code = getattr(function, "__func__", function)
    code = code if isinstance(code, FunctionType) else type(code).__call__
    cells: dict[str, CellType] = {}
    names: dict[str, Any] = {}
    if isinstance(code, FunctionType):
        cells = dict(zip(code.__code__.co_freevars, code.__closure__ or (), strict=True))
        names = {name: code.__globals__[name] for name in code.__code__.co_names if name in code.__globals__}
    around = {name: cell.cell_contents for name, cell in cells.items()}
    with ExitStack() as stack:
        for one in (owner, *around.values(), *names.values()):
            if hasattr(one, "__dict__") and not isinstance(one, type | ModuleType | nn.Module):
                stack.enter_context(attributes_kept(one, ("train_dataset", "eval_dataset")))
        for given in (around, names):
            small = {name: one for name, one in given.items() if not isinstance(one, Sized) or len(one) <= MOST_KEPT}
            stack.enter_context(attributes_kept(SimpleNamespace(**small)))
        try:
            yield
        finally:
            for name, one in around.items():
                cells[name].cell_contents = one
            if isinstance(code, FunctionType):
                code.__globals__.update(names)


def _rows_of(given: EvalPrediction) -> EvalPrediction | None:
    """A copy of as many rows as are tried; None for results that are not of tokens."""
    labels = given.label_ids
    if not isinstance(labels, np.ndarray) or labels.ndim != 2 or given.losses is not None:
        return None
    num = len(labels)
    size = sum(one.nbytes for one in _arrays((given.predictions, labels, given.inputs)))
    kept = min(num, max(2, num * MOST_BYTES // max(size, 1)))

    def part(one: np.ndarray) -> np.ndarray:
        return one[:kept].copy() if len(one) == num else one.copy()

    parts = {"predictions": given.predictions, "label_ids": labels, "inputs": given.inputs}
    return EvalPrediction(**{name: _mapped(one, part) for name, one in parts.items()})


def _widened(given: EvalPrediction, more: int) -> EvalPrediction:
    """The same with more columns of padding, as Trainer fills up rows of unlike batches; copies of all arrays."""
    num, width = given.label_ids.shape

    def wide(one: np.ndarray) -> np.ndarray:
        if one.ndim < 2 or len(one) != num or one.shape[1] not in (width, width - 1):  # the last is of shifted logits
            return one.copy()
        further = [(0, 0)] * (one.ndim - 2)
        return np.pad(one, [(0, 0), (0, more), *further], constant_values=IGNORED)

    parts = {"predictions": given.predictions, "label_ids": given.label_ids, "inputs": given.inputs}
    return EvalPrediction(**{name: _mapped(one, wide) for name, one in parts.items()})


def _mapped(value: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    if isinstance(value, Mapping):
        return {name: _mapped(one, change) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(one, change) for one in value)
    return change(value) if isinstance(value, np.ndarray) and value.ndim else value


def _arrays(value: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    _mapped(value, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return found


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if np.ndim(value) == 0 and np.isreal(value)}


def _is_same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=SAME_METRIC, abs_tol=1e-9)
