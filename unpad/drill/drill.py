"""`unpad drill`: all checks in turn, in a temporary folder beside the run."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from unpad.drill.clock import Clock
from unpad.drill.files import check_files
from unpad.drill.findings import Drilled, finding
from unpad.drill.kills import Calm, KillPlan, Train, check_kills, kill_and_compare, undisturbed
from unpad.drill.measure import Probed, judge, measure
from unpad.drill.mounts import check_mount, check_names, folder_bytes
from unpad.drill.train import train_here
from unpad.errors import DiskError, HungUp, Terminated, UnpadError
from unpad.interchange.origin import open_recipe
from unpad.machine.memory import memory_limit
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RUNS, as_run, run_recipe
from unpad.storage import RunLock
from unpad.storage.disk import free_bytes
from unpad.terminal.finding import Finding
from unpad.terminal.progress import progress
from unpad.training.parallel.divisions import alone

PREFIX = ".unpad-drill-"


@contextmanager
def working_folder(beside: Path) -> Iterator[Path]:
    """Create a folder beside a run, and remove it at the end with the parents created for it.

    Args:
        beside: the run directory, which need not exist and is not touched.

    Raises:
        DiskError: none can be created there.
        Terminated, HungUp: SIGTERM or SIGHUP ended the work.
    """
    parent = beside.absolute().parent
    missing = []
    for folder in (parent, *parent.parents):
        if folder.exists():
            break
        missing.append(folder)
    made: list[Path] = []
    with _signals():
        try:
            try:
                for folder in reversed(missing):
                    folder.mkdir()
                    made.append(folder)
                made.append(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
            except OSError as error:
                what = f"no folder can be made there: {error.strerror}"
                raise DiskError(what, where=str(parent), fix="name a folder that is yours, with --out") from None
            with ExitStack() as stack:
                with suppress(UnpadError):  # locks of the disk have a check of their own
                    stack.enter_context(RunLock(made[-1]))
                yield made[-1]
        finally:
            _remove(made)


def left_behind(folder: Path) -> list[Path]:
    """Folders of killed drills beside `folder`: no process holds their lock."""
    found = []
    for path in sorted(folder.parent.glob(f"{PREFIX}*")):
        with suppress(UnpadError):
            if path != folder:
                with RunLock(path):
                    found.append(path)
    return found


def _remove(made: list[Path]) -> None:
    if made and made[-1].name.startswith(PREFIX):
        shutil.rmtree(made.pop(), ignore_errors=True)
    for folder in reversed(made):
        with suppress(OSError):  # it holds something else by now
            folder.rmdir()


@contextmanager
def _signals() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into exceptions, so that the folder is removed. During imports Ctrl-C would
    otherwise end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell's background jobs do
            interrupts = number == signal.SIGINT
            before[number] = signal.signal(number, signal.default_int_handler if interrupts else _terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    kind, name = (Terminated, "SIGTERM") if number == signal.SIGTERM else (HungUp, "SIGHUP")
    raise kind(f"stopped by {name}; the folder of the drill is removed", where=os.getcwd(), fix="drill again")


SHARING = 6  # undisturbed runs that fit into the time of a drill
CHECKPOINTS = 6  # of a run
FEWEST, MOST = 8, 60  # steps of a run
LEAST_TOKENS = 64  # of an update
SAVE_RATE = 100e6  # bytes a second, with checksums
FORWARD_SHARE = 1 / 3  # of the time of a step, for as many tokens
STAND_IN, STAND_IN_STEPS = "zh_chat", 20
SMALL = ["model.width=64", "model.blocks=1", "model.heads=2", "model.hidden=128", "plan.tokens_per_step=512"]


@dataclass(frozen=True)
class Bounded:
    """A recipe to train repeatedly; `notes` list the changes."""

    recipe: Recipe
    notes: tuple[str, ...]
    is_own: bool


@dataclass(frozen=True)
class TrainingCost:
    """Seconds per part of a training: its start, a step, an evaluation, a checkpoint."""

    start: float
    step: float
    evaluation: float
    checkpoint: float


def bounded(recipe: Recipe, cost: TrainingCost, precision: str, seconds: float, whole: int) -> Bounded:
    """Shorten a recipe to a share of `seconds`, or replace it by a small packaged recipe.

    Args:
        recipe: the user's.
        precision: fixed, because another process may choose differently by measurement.
        whole: steps of the recipe.
    """
    room = seconds / SHARING - cost.start - 2 * cost.evaluation - (CHECKPOINTS + 2) * cost.checkpoint
    most = int(room / max(cost.step, 1e-3))
    steps = min(max(most, FEWEST), MOST, whole)
    if most >= FEWEST:
        return Bounded(shortened(recipe, steps, precision), (f"killed in its first {steps} steps",), True)
    tokens = int(recipe.plan.tokens_per_step * most / FEWEST)
    if recipe.plan.batches_per_step is None and tokens >= max(LEAST_TOKENS, recipe.plan.tokens_per_step // 64):
        cut = f"killed in its first {steps} steps, with updates of {tokens:,} tokens: one takes {cost.step:.1f} s"
        return Bounded(shortened(recipe, steps, precision, tokens), (cut,), True)
    return stand_in(
        f"a start takes {cost.start:.0f} s, a step {cost.step:.1f} s, an evaluation {cost.evaluation:.0f} s; "
        "--minutes gives more time"
    )


def stand_in(why: str) -> Bounded:
    """The small packaged recipe that replaces the user's."""
    note = f"killed was the packaged recipe {STAND_IN}, made small, in place of yours: {why}"
    return Bounded(shortened(load_recipe(STAND_IN, SMALL), STAND_IN_STEPS, "fp32"), (note,), False)


def shortened(recipe: Recipe, steps: int, precision: str, tokens: int | None = None) -> Recipe:
    """The recipe with fewer steps, in one process.

    Args:
        tokens: of an update; None: as the recipe has them.
    """
    fewer: dict[str, Any] = {} if tokens is None else {"tokens_per_step": tokens, "grow": {}}
    stages = [stage.model_copy(update={"plan": {**stage.plan, **fewer}}) for stage in recipe.stages]
    whole = alone(recipe)
    return whole.model_copy(
        update={
            "plan": recipe.plan.model_copy(update=fewer),
            "stages": stages,
            "train": whole.train.model_copy(update={"max_steps": steps}),
            "checkpoint": recipe.checkpoint.model_copy(
                update={"every": max(steps // CHECKPOINTS, 1), "every_seconds": None}
            ),
            "precision": precision,
        }
    )


MINUTES = 3.0
PROBED = 0.35  # largest share of the time for reading the data and measuring a step
CALM = 0.35  # largest share of the remaining time for an undisturbed run
LAST_SECONDS = 8.0  # for imports before, and the checks after the kills
MOST_STOPS = 100


@dataclass
class _Drill:
    """A running drill.

    Args:
        folder: to work in; run: the drilled run, if the subject is one.
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
        """Write a recipe for another process to train."""
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
        out: the run directory to train in; by default the run's own, or one in runs/.
        minutes: time limit; a training that ends slowly may take some seconds more.
        train: trains a recipe in a folder, or continues its run; most_stops: largest number of kills.

    Raises:
        UnpadError: the recipe or its data cannot be trained, or no folder can be created there.
    """
    began, clock = time.monotonic(), Clock()
    run, recipe = _opened(subject, overrides)
    with working_folder(out or run or RUNS / Path(subject).stem) as folder:
        work = _Drill(folder, run, recipe, began + 60 * minutes)
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


def _disk(work: _Drill) -> Iterator[Finding]:
    yield check_mount(work.folder)
    yield from check_files(work.folder)
    yield check_names(work.folder, [stage.name for stage in work.recipe.stages])


# --------------------------------------------------------------------------- kills


def _kill(work: _Drill, measured: Probed, train: Train, most_stops: int) -> None:
    """Train a short recipe undisturbed, then kill and resume it until time is up."""
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
    plan = KillPlan(work.folder / "killed.yaml", work.folder, calm, until, most_stops, exact, train)
    tally = kill_and_compare(plan)
    work.findings.append(check_kills(tally, chosen.recipe.train.max_steps or 0, exact=exact))
    work.facts["kills"] = asdict(tally)


def _chosen(work: _Drill, measured: Probed) -> Bounded:
    """The recipe to kill: the user's if it is fast enough and fits."""
    read, stepped, needs = measured.read, measured.stepped, measured.needs(work.recipe.checkpoint.keep)
    if read is None or stepped is None or needs is None or not measured.fits:
        return stand_in(measured.why or "it does not fit into memory")
    if 2 * needs.disk_bytes > free_bytes(work.folder):
        return stand_in("the disk has no room for two such runs")
    cost = TrainingCost(
        start=read.seconds,
        step=stepped.seconds,
        evaluation=FORWARD_SHARE * stepped.seconds * read.evaluation,
        checkpoint=stepped.checkpoint_bytes / SAVE_RATE,
    )
    return bounded(work.recipe, cost, read.precision, work.left, max(read.steps, 1))


def _failed(calm: Calm) -> Finding:
    """The finding on a training that did not finish by itself."""
    if calm.code is None:
        return finding("kill, resume", "warning", f"no training ended in {calm.seconds:.0f} s", "raise --minutes")
    if isinstance(calm.error, DiskError):
        return finding("kill, resume", "fault", calm.error.what, "no run can be saved here")
    if calm.error is not None:
        raise calm.error
    told = f"a training that nobody killed ended with exit code {calm.code}: {calm.last_words}"
    return finding("kill, resume", "fault", told, "it cannot be trained here")
