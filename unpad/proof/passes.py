"""`unpad prove --serve` of runs of images and of patients: numbers of each input do not depend on what is beside it.

The truth is a pass of the model over each input alone. Every number is compared bit for bit.
"""

from collections.abc import Callable, Sequence

import numpy as np

from unpad.errors import SourceError
from unpad.evaluation.family import HeldOutInputs, Numbers, measures_of
from unpad.inference.loaded import LoadedRun
from unpad.nn.native import library
from unpad.proof.line import Certificate, Line, Lines, not_applicable
from unpad.terminal.progress import progress

MOST_INPUTS = 32
GROUP = 5  # inputs beside one another, in another order
AT_ONCE, OTHERS = "all in one pass = alone", "in another order, beside others = alone"
WITHOUT = "without native kernels: one pass = alone"
HTTP = "through HTTP, by concurrent requests = alone"


def inputs_of(run: LoadedRun) -> HeldOutInputs:
    """Held-out inputs of a run.

    Raises:
        SourceError: there are none.
    """
    data = run.data()
    found = measures_of(data.family).held_out_inputs(run, data, MOST_INPUTS)
    if not found.inputs:
        fix = "use a run with held-out data"
        raise SourceError("the run holds nothing out to prove with", where=str(run.folder), fix=fix)
    return found


def few(inputs: HeldOutInputs) -> str:
    """Reason why nothing is compared; "" if something is."""
    return "" if len(inputs.inputs) > 1 else "fewer than two inputs"


def prove_passes(
    run: LoadedRun, over_http: Callable[[LoadedRun, HeldOutInputs, Sequence[Numbers]], Line] | None, reason: str
) -> Certificate:
    """Prove that the numbers of a run's answers do not depend on what runs beside them.

    Args:
        over_http: compares numbers through HTTP with those of each input alone; None where `reason` says why not.

    Raises:
        SourceError: the run holds nothing out.
    """
    subject, lines = inputs_of(run), Lines()
    with progress("computing each alone"):
        truth = lines.value("each alone", subject.alone)
    if truth is None:
        return lines.certificate()
    here = "native" if library.enabled() else "torch"
    gap = few(subject)
    lines.add_shown(AT_ONCE, lambda: line_of_numbers(AT_ONCE, here, subject.compute(subject.inputs), truth).unless(gap))
    lines.add_shown(OTHERS, lambda: _beside_others(subject, here, truth).unless(gap))
    lines.add_shown(WITHOUT, lambda: _without_kernels(subject).unless(gap))
    unproven = Line(HTTP, "", None, None, None, reason)
    lines.add_shown(HTTP, lambda: unproven if over_http is None else over_http(run, subject, truth))
    return lines.certificate()


def _beside_others(subject: HeldOutInputs, here: str, truth: Sequence[Numbers]) -> Line:
    order = np.random.default_rng(0).permutation(len(subject.inputs)).tolist()
    found: dict[int, Numbers] = {}
    for start in range(0, len(order), GROUP):
        group = order[start : start + GROUP]
        found |= zip(group, subject.compute([subject.inputs[place] for place in group]), strict=True)
    return line_of_numbers(OTHERS, here, [found[place] for place in range(len(order))], truth)


def _without_kernels(subject: HeldOutInputs) -> Line:
    if not library.enabled():
        return not_applicable(WITHOUT, "all lines are without them")
    with library.switched_off():
        made, alone = subject.compute(subject.inputs), subject.alone()
    return line_of_numbers(WITHOUT, "torch", made, alone)


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
    return Line(name, here, measured, 0.0, not differ, f"{differ} of {len(truth)} differ" if differ else "")
