"""`unpad prove --serve` of runs of images and patients: every line holds, and a fault of each kind makes one fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.families import Finished
from tests.helpers.paths import on
from unpad.evaluation.family import HeldOutInputs, Numbers
from unpad.inference.loaded import LoadedRun, load
from unpad.nn.native import library
from unpad.proof import passes
from unpad.proof.passes import AT_ONCE, HTTP, OTHERS, WITHOUT, prove_passes
from unpad.proof.serving import prove_serving

KINDS = ("images", "patients")


@pytest.fixture(scope="module")
def runs(finished: Finished) -> dict[str, LoadedRun]:
    return {kind: load(finished(kind).run) for kind in KINDS}


def planted(patch: pytest.MonkeyPatch, fault: Callable[[list[Any], list[Numbers]], None]) -> None:
    """A fault in the numbers of inputs that are computed together."""
    own = passes.inputs_of

    def of(run: LoadedRun) -> HeldOutInputs:
        made = own(run)

        def compute(inputs: Any) -> list[Numbers]:
            found = made.compute(inputs)
            fault(inputs, found)
            return found

        return replace(made, compute=compute)

    patch.setattr(passes, "inputs_of", of)


def of_neighbours(inputs: list[Any], found: list[Numbers]) -> None:
    """One number moves by its last bit where others are beside it."""
    if len(inputs) > 1:
        name = sorted(found[-1])[0]
        found[-1][name] = np.nextafter(found[-1][name], np.inf)


def of_places(inputs: list[Any], found: list[Numbers]) -> None:
    """Numbers of the first place go to the last in small passes."""
    if 1 < len(inputs) <= passes.GROUP:
        found[0], found[-1] = found[-1], found[0]


def of_torch(inputs: list[Any], found: list[Numbers]) -> None:
    """Without kernels numbers depend on how many there are."""
    if not library.enabled():
        for one in found:
            one |= {name: values * (1 + len(inputs) * 2**-20) for name, values in one.items()}


@pytest.mark.slow
@pytest.mark.promise("serving.alone")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["native", "torch"])
def test_every_line_holds(runs, kind, path):
    if path == "native" and not library.enabled():
        pytest.skip(library.describe())
    with on(path):
        lines = {line.name: line for line in prove_serving(runs[kind]).lines}
    assert list(lines) == [AT_ONCE, OTHERS, WITHOUT, HTTP]
    assert all(lines[name].passed for name in (AT_ONCE, OTHERS)), lines
    assert lines[WITHOUT].passed or path == "torch"
    assert (lines[HTTP].passed, "unpad[serve]" in lines[HTTP].note) == (None, True)  # said, not silent


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "where"), [(of_neighbours, (AT_ONCE, OTHERS)), (of_places, (OTHERS,)), (of_torch, (WITHOUT,))]
)
def test_a_fault_makes_a_line_fail(runs, kind, fault, where, monkeypatch):
    if fault is of_torch and not library.enabled():
        pytest.skip(library.describe())
    planted(monkeypatch, fault)
    failed = [line for line in prove_passes(runs[kind], None, "").lines if line.passed is False]
    assert set(where) <= {line.name for line in failed}
    assert all("differ" in line.note and line.measured for line in failed)


def test_what_compares_nothing_is_not_proven(runs, monkeypatch):
    monkeypatch.setattr(passes, "MOST_INPUTS", 1)
    lines = prove_passes(runs["images"], None, "").lines
    assert [line.passed for line in lines] == [None] * 4
    assert lines[0].note == "fewer than two inputs"
