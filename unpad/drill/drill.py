"""`unpad drill`: the checks one after the other, in a folder beside the run that is gone afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unpad.drill.bounded import FORWARD_SHARE, SAVE_RATE, Bounded, Cost, bounded, stand_in
from unpad.drill.clock import Clock
from unpad.drill.files import check_files
from unpad.drill.findings import Drilled, finding
from unpad.drill.kills import Calm, Plan, Train, check_kills, kill_and_compare, undisturbed
from unpad.drill.measure import Measured, judge, measure
from unpad.drill.mounts import check_mount
from unpad.drill.names import check_names
from unpad.drill.place import left_behind, working_folder
from unpad.drill.room import folder_bytes
from unpad.drill.train import train_here
from unpad.errors import DiskError
from unpad.interchange.origin import open_recipe
from unpad.machine.memory import memory_limit
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RUNS, as_run, run_recipe
from unpad.storage.disk import free_bytes
from unpad.terminal.finding import Finding
from unpad.terminal.progress import progress
from unpad.training.parallel.divisions import alone

MINUTES = 3.0
PROBED = 0.35  # of the time, at most, is for reading the data and measuring a step
CALM = 0.35  # of the time left then, at most, is for an undisturbed run
LAST_SECONDS = 8.0  # for imports before, and what comes after the kills
MOST_STOPS = 100


@dataclass
class _Work:
    """The drill while it goes on.

    Args:
        folder: to work in; run: the run that is drilled, if it is one.
        until: `time.monotonic` at its end.
    """

    folder: Path
    run: Path | None
    recipe: Recipe
    until: float
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(self.until - time.monotonic(), 0.0)

    def write(self, recipe: Recipe, name: str) -> Path:
        """Write a recipe that another process trains."""
        path = self.folder / f"{name}.yaml"
        path.write_text(recipe.to_yaml(), "utf-8")
        return path


def drill(
    subject: str,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    minutes: float = MINUTES,
    train: Train = train_here,
    most_stops: int = MOST_STOPS,
) -> Drilled:
    """Check that a run is safe on this machine and on the disk of its directory.

    Args:
        subject: a run, which is only read, or a recipe.
        overrides: `key=value` changes.
        out: the run directory that would be trained in; by default the run's own, or one in runs/.
        minutes: that it takes at most; a training that is slow to end may take some seconds more.
        train: trains a recipe in a folder, or goes on with its run; most_stops: kills, at most.

    Raises:
        UnpadError: the recipe or its data cannot be trained, or no folder can be made there.
    """
    began, clock = time.monotonic(), Clock()
    run, recipe = _opened(subject, overrides)
    with working_folder(out or run or RUNS / Path(subject).stem) as folder:
        work = _Work(folder, run, recipe, began + 60 * minutes)
        work.notes += [f"left by a drill that was killed; remove it: {path}" for path in left_behind(folder)]
        with progress("checking the disk"):
            work.findings += _disk(work)
        with progress("measuring a step"):
            path = work.write(alone(recipe), "measured")
            measured = measure(path, folder, memory_limit(of_new_process=True), PROBED * work.left)
        used = 0 if run is None else folder_bytes(run)
        work.findings += judge(measured, folder, recipe.checkpoint.keep, used)
        work.facts |= {
            "read": measured.read and asdict(measured.read),
            "step": measured.stepped and asdict(measured.stepped),
        }
        _kill(work, measured, train, most_stops)
        work.findings += clock.findings(folder, run)
    seconds = time.monotonic() - began
    return Drilled(str(folder.parent), subject, tuple(work.findings), tuple(work.notes), seconds, work.facts)


def _opened(subject: str, overrides: Sequence[str]) -> tuple[Path | None, Recipe]:
    """The run, if `subject` is one, and the recipe."""
    if (run := as_run(subject)) is not None:
        return run, run_recipe(run, overrides)
    return None, open_recipe(subject, overrides)


def _disk(work: _Work) -> Iterator[Finding]:
    yield check_mount(work.folder)
    yield from check_files(work.folder)
    yield check_names(work.folder, [stage.name for stage in work.recipe.stages])


# --------------------------------------------------------------------------- kills


def _kill(work: _Work, measured: Measured, train: Train, most_stops: int) -> None:
    """Train a short recipe undisturbed, then kill and resume it until the time is over."""
    chosen = _chosen(work, measured)
    with progress("training undisturbed"):
        calm = undisturbed(work.write(chosen.recipe, "killed"), work.folder, CALM * work.left, train)
        if calm.code is None and chosen.is_own:
            chosen = stand_in(
                f"{chosen.recipe.train.max_steps} steps of it take more than {calm.seconds:.0f} s; --minutes gives more"
            )
            calm = undisturbed(work.write(chosen.recipe, "killed"), work.folder, CALM * work.left, train)
    work.notes += chosen.notes
    if calm.code != 0:
        work.findings.append(_failed(calm))
        return
    until, exact = work.until - LAST_SECONDS, measured.repeats
    if not exact:
        work.notes.append("as the same step has other bits here, resumed runs were compared by their steps alone")
    plan = Plan(work.folder / "killed.yaml", work.folder, calm, until, most_stops, exact, train)
    tally = kill_and_compare(plan)
    work.findings.append(check_kills(tally, chosen.recipe.train.max_steps or 0, exact=exact))
    work.facts["kills"] = asdict(tally)


def _chosen(work: _Work, measured: Measured) -> Bounded:
    """The recipe to kill: the user's if it is fast enough and fits."""
    read, stepped, needs = measured.read, measured.stepped, measured.needs(work.recipe.checkpoint.keep)
    if read is None or stepped is None or needs is None or not measured.fits:
        return stand_in(measured.why or "it does not fit into memory")
    if 2 * needs.disk_bytes > free_bytes(work.folder):
        return stand_in("the disk has no room for two such runs")
    cost = Cost(
        start=read.seconds,
        step=stepped.seconds,
        evaluation=FORWARD_SHARE * stepped.seconds * read.evaluation,
        checkpoint=stepped.checkpoint_bytes / SAVE_RATE,
    )
    return bounded(work.recipe, cost, read.precision, work.left, max(read.steps, 1))


def _failed(calm: Calm) -> Finding:
    """The finding of a training that did not come to its end by itself."""
    if calm.code is None:
        return finding("kill, resume", "warning", f"no training ended in {calm.seconds:.0f} s", "raise --minutes")
    if isinstance(calm.error, DiskError):
        return finding("kill, resume", "fault", calm.error.what, "no run can be saved here")
    if calm.error is not None:
        raise calm.error
    told = f"a training that nobody killed ended with exit code {calm.code}: {calm.last_words}"
    return finding("kill, resume", "fault", told, "it cannot be trained here")
