"""`unpad prove --serve` of runs of images and of patients: numbers of each input do not depend on what is beside it.

The truth is a pass of the model over each input alone. Every number is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unpad.data.family import Data
from unpad.data.images import ImageData
from unpad.data.patients import EventData
from unpad.data.pixels.formats import ImageError
from unpad.data.rows import read_classes
from unpad.data.sources.images import read_bytes
from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.evaluation.family import evenly
from unpad.inference.embed import predicts
from unpad.inference.images import ReadImage, classify_images, read_image
from unpad.inference.loaded import LoadedRun
from unpad.inference.patients import batches, computed_at_once
from unpad.nn.native import library
from unpad.proof.line import Certificate, Line, Lines, not_applicable
from unpad.terminal.progress import progress

MOST_INPUTS = 32
GROUP = 5  # inputs beside one another, in another order
AT_ONCE, OTHERS = "all in one pass = alone", "in another order, beside others = alone"
WITHOUT = "without native kernels: one pass = alone"
HTTP = "through HTTP, by concurrent requests = alone"

Numbers = dict[str, np.ndarray]


@dataclass(frozen=True)
class Passes:
    """Held-out inputs of a run, and what computes their numbers.

    Args:
        seq_ids: of the inputs in the data, those whose sizes are as unlike as there are.
        compute: from inputs to the numbers of each, in one pass of the model.
    """

    data: Data
    seq_ids: list[int]
    inputs: list[Any]
    compute: Callable[[Sequence[Any]], list[Numbers]]

    @classmethod
    def of(cls, run: LoadedRun) -> Passes:
        """Raises SourceError if no input is held out."""
        data = run.data()
        held_out = data.table.split == Split.HOLDOUT
        if isinstance(data, EventData):
            held_out &= _has_events(data)
        rows = evenly(np.flatnonzero(held_out), data.table.positions, MOST_INPUTS)
        found = _images(run, data, rows) if isinstance(data, ImageData) else _patients(run, data, rows)
        if not found.inputs:
            fix = "use a run with held-out data"
            raise SourceError("the run holds nothing out to prove with", where=str(run.folder), fix=fix)
        return found

    def alone(self) -> list[Numbers]:
        """Numbers of every input in a pass of its own."""
        return [numbers for one in self.inputs for numbers in self.compute([one])]

    def gap(self) -> str:
        """Why nothing is compared, or ""."""
        return "" if len(self.inputs) > 1 else "fewer than two inputs"


def _images(run: LoadedRun, data: ImageData, rows: Sequence[int]) -> Passes:
    used: dict[int, ReadImage] = {}
    for row in rows:
        try:
            used[row] = read_image(run, read_bytes(data.examples[row]), data.examples[row].path)
        except ImageError:  # blank, so `unpad infer` gives it no class
            continue
    classes = read_classes(run.files)

    def compute(images: Sequence[ReadImage]) -> list[Numbers]:
        found = [dict(answer.top) for answer in classify_images(run, images, len(classes))]
        return [{"score": np.array([scores[name] for name in classes])} for scores in found]

    return Passes(data, list(used), list(used.values()), compute)


def _has_events(data: EventData) -> np.ndarray:
    """True for patients with an event in time, (num_patients,) bool; others are refused where they are served."""
    timed = np.append(0, np.cumsum(~data.sets.timeless))
    num_timed: np.ndarray = np.diff(timed[data.sets.sets_of])
    return num_timed > 0


def _patients(run: LoadedRun, data: Data, rows: Sequence[int]) -> Passes:
    assert isinstance(data, EventData), "data of patients"
    classifies, has_hazards = predicts(run)
    inputs = [batch for row in rows for _, batch in batches(run, data, np.array([row]))]

    def compute(given: Sequence[Any]) -> list[Numbers]:
        found = [{"vector": one["vector"][0]} for one in computed_at_once(run, "vector", given)]
        if classifies or has_hazards:
            for numbers, one in zip(found, computed_at_once(run, "predict", given), strict=True):
                numbers |= {"probability": np.exp(one["log_p"][:, 1])} if classifies else {}
                numbers |= {"risk": one["risk"]} if has_hazards else {}
        if classifies:
            for numbers, one in zip(found, computed_at_once(run, "explain", given), strict=True):
                numbers |= {"course": one["probability"], "attention": one["attention"]}
        return found

    return Passes(data, list(rows), inputs, compute)


def prove_passes(
    run: LoadedRun, over_http: Callable[[LoadedRun, Passes, Sequence[Numbers]], Line] | None, reason: str
) -> Certificate:
    """Prove that the numbers of a run's answers do not depend on what runs beside them.

    Args:
        over_http: compares numbers through HTTP with those of each input alone; None where `reason` says why not.

    Raises:
        SourceError: the run holds nothing out.
    """
    subject, lines = Passes.of(run), Lines()
    with progress("computing each alone"):
        truth = lines.value("each alone", subject.alone)
    if truth is None:
        return lines.certificate()
    here = "native" if library.enabled() else "torch"
    for name, check in ((AT_ONCE, _at_once), (OTHERS, _beside_others), (WITHOUT, _without_kernels)):
        with progress(name):
            lines.add(name, lambda check=check: check(subject, here, truth))  # type: ignore[misc]
    if over_http is None:
        lines.add(HTTP, lambda: Line(HTTP, "", None, None, None, reason))
    else:
        with progress("asking through HTTP"):
            lines.add(HTTP, lambda: over_http(run, subject, truth))
    return lines.certificate()


def _at_once(subject: Passes, here: str, truth: Sequence[Numbers]) -> Line:
    return line_of_numbers(AT_ONCE, here, subject.compute(subject.inputs), truth).unless(subject.gap())


def _beside_others(subject: Passes, here: str, truth: Sequence[Numbers]) -> Line:
    order = np.random.default_rng(0).permutation(len(subject.inputs)).tolist()
    found: dict[int, Numbers] = {}
    for start in range(0, len(order), GROUP):
        group = order[start : start + GROUP]
        found |= zip(group, subject.compute([subject.inputs[place] for place in group]), strict=True)
    made = [found[place] for place in range(len(order))]
    return line_of_numbers(OTHERS, here, made, truth).unless(subject.gap())


def _without_kernels(subject: Passes, here: str, truth: Sequence[Numbers]) -> Line:
    if not library.enabled():
        return not_applicable(WITHOUT, "all lines are without them")
    with library.switched_off():
        made, alone = subject.compute(subject.inputs), subject.alone()
    return line_of_numbers(WITHOUT, "torch", made, alone).unless(subject.gap())


def line_of_numbers(name: str, here: str, found: Sequence[Numbers], truth: Sequence[Numbers]) -> Line:
    """Compare the numbers of every input with the truth, bit for bit."""
    differ, largest = 0, 0.0
    for one, expected in zip(found, truth, strict=True):
        wrong = [key for key in expected if key not in one or one[key].tobytes() != expected[key].tobytes()]
        differ += bool(wrong)
        for key in wrong:
            is_alike = key in one and one[key].shape == expected[key].shape
            apart = np.abs(one[key] - expected[key]).max(initial=0.0) if is_alike else np.inf
            largest = max(largest, float(apart) if np.isfinite(apart) else float("inf"))
    measured = largest if largest or not differ else float("inf")
    note = f"{differ} of {len(truth)} differ" if differ else ""
    return Line(name, here, measured, 0.0, not differ, note)
