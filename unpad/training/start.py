"""The directory that a training takes: whether its run is new or goes on, with which recipe, and its lock."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from unpad import storage
from unpad.interchange.origin import is_folder, keep_origin, open_recipe, starting_weights
from unpad.processes.group import Group
from unpad.processes.worker import keep_log
from unpad.recipes.recipe import Recipe, differences
from unpad.run.checkpoint import State, put_weights
from unpad.run.folder import CHECKPOINTS, holds_run, new_id, read_command, refuse_new_run, run_id
from unpad.run.kept import open_files
from unpad.run.loggers import check_loggers
from unpad.run.monitor import Monitor
from unpad.run.timers import Timers
from unpad.training import progress as run_progress
from unpad.training.consistency import check_alike, check_folder, check_recipe, check_weights
from unpad.training.parallel.divisions import parallelism_class, parallelism_of
from unpad.training.setup import Setup, check_stages, divide, prepare_setup, resolved


@dataclass
class RunFolder:
    """A run directory that a training has taken, by the processes that train together.

    Every method is collective: all processes call it at the same point, and an error of one is raised in all.

    Args:
        path: the directory.
        group: the processes.
        timers: measure the seconds of every part.
        recipe: its name, as the run's command keeps it.
        overrides: those that the run began with, and those of the command.
        settings: the recipe with them.
        saved: recipe that the run saved; None for a new run.
        notes: on how the run begins; warnings, advice: messages for its log.
    """

    path: Path
    group: Group
    timers: Timers
    recipe: str
    overrides: list[str]
    settings: Recipe
    saved: Recipe | None
    notes: list[str]
    warnings: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)  # the lock
    _is_locked: bool = False

    @classmethod
    @contextmanager
    def opened(
        cls, recipe: str | None, path: Path, overrides: Sequence[str], timers: Timers, group: Group, *, resume: bool
    ) -> "Iterator[RunFolder]":
        """Find out what the directory holds, and lock it if it is there; in the block, processes tell each other of
        their errors. Arguments and errors are those of `train`."""
        with ExitStack() as telling, ExitStack() as held:
            with group.together():
                is_locked = path.exists()  # a new one is made once the data has been read
                if is_locked and group.leads:
                    held.enter_context(storage.RunLock(path))
                if not resume:
                    refuse_new_run(path)
                saved, notes = None, ["no run to resume here: this is a new run"] if resume else []
                if holds_run(path):
                    began, settings, saved = run_progress.resumed_recipe(recipe, overrides, path)
                    overrides, notes = began, []
                name = read_command(path)["recipe"] if recipe is None else recipe
                if saved is None:
                    settings = resolved(open_recipe(name, overrides))
                check_loggers(settings.log)
            telling.enter_context(parallelism_of(settings, group).telling(group))
            group.limit(settings.train.timeout)
            check_recipe(group, path, settings, exists=saved is not None)
            yield cls(path, group, timers, name, [*overrides], settings, saved, notes, _held=held, _is_locked=is_locked)

    @property
    def goes_on(self) -> bool:
        """True if the directory held a run, which continues."""
        return self.saved is not None

    def prepare(self, *, fit: bool) -> Setup:
        """Read the data, build the model and check every stage.

        Args:
            fit: as `fit_processes` of `train`.
        """
        settings, timers = self.settings, self.timers
        with self.group.together():
            files = open_files(settings, self.path) if self.goes_on else None
            recorded = run_progress.recorded_precision(self.path) if self.goes_on else None
            setup = prepare_setup(settings, self.path, files, timers, recorded=recorded, group=self.group)
            with timers("build"):
                check_stages(setup)
                parallelism_class(settings).check_model(settings, setup.model, self.group.size, goes_on=self.goes_on)
            self.advice += [setup.auto.line] if setup.auto else []
            if fit or self.group.size > 1:
                setup = self._share_out(setup, fit=fit)
        check_alike(setup)
        return setup

    def _share_out(self, setup: Setup, *, fit: bool) -> Setup:
        """Advise on processes without work, or cut micro-batches so that all have some."""
        from unpad.training.fit import share_out

        with self.timers("plan"):
            setup, changes, advice = share_out(setup, self.overrides, fit=fit and not self.goes_on)
        self.overrides += changes
        self.advice += advice
        if self.goes_on and fit:
            self.advice.append("--fit-processes is for new runs; this one keeps its micro-batches")
        return setup

    def take(self, setup: Setup) -> Setup:
        """Make and lock the directory of a new run, give the run its id, and divide its model among the processes."""
        group, private = self.group, setup.data.private
        with group.together():
            if group.leads:
                self._make(private=private)
        check_folder(group, self.path, self.settings.train.timeout)
        setup = replace(setup, run_id=group.of_leader(lambda: (self.goes_on and run_id(self.path)) or new_id()))
        with group.together():
            keep_log(self.path, private=private)
        with self.timers("build"):
            if not parallelism_of(self.settings, group).replicates:
                check_weights(setup, 0)  # later no process holds them whole
            return divide(setup)

    def _make(self, *, private: bool) -> None:
        """Make and lock the directory, and delete partial files left by a killed run.

        Args:
            private: whether only the owner may enter it.
        """
        storage.make_folder(self.path.parent)
        storage.make_folder(self.path, private=private)
        if not self._is_locked:
            self._held.enter_context(storage.RunLock(self.path))
            refuse_new_run(self.path)  # another process may have started a run there meanwhile
        if private:
            storage.make_private(self.path)
        for path in (self.path, self.path / CHECKPOINTS):
            if path.is_dir():
                storage.clean_leftovers(path, alone=path != self.path)  # `unpad eval` writes beside the checkpoints

    def begin(self, setup: Setup) -> tuple[run_progress.Progress, State | None]:
        """Restore the newest checkpoint of a run that goes on, or the weights that a new one starts from, and write the
        run's files.

        Returns:
            Progress of the run, and the checkpoint; None before the first.
        """
        progress, state = run_progress.Progress(), None
        if self.saved is not None:
            progress, state, self.warnings = run_progress.restore(setup)
            self.notes += run_progress.describe_changes(setup, self.saved, progress)
        origin = self.settings.train.init_from
        with self.group.together():
            if state is None and origin and setup.base is None:
                self.notes.append(start_from(setup, origin))
            with self.timers("save"):
                if self.group.leads and not self.goes_on:  # first: a run with a recipe resumes without the model
                    keep_origin(origin, self.path)
                run_progress.write_run_files(setup, self.recipe, self.overrides)
        check_weights(setup, progress.step)
        return progress, state

    def describe(self, monitor: Monitor, progress: run_progress.Progress) -> None:
        """Cut the metrics of a run that goes on back to its progress, and log how the run starts."""
        if self.goes_on:
            monitor.resume(progress.step, progress.epoch_step)
        for message in self.warnings:
            monitor.log("warning", message=message)
        if self.saved is not None:
            message = "; ".join([f"at step {progress.step}", *self.notes])
            changed = differences(self.saved, self.settings)  # with them the log tells the recipe of every step
            monitor.log("resumed", step=progress.step, message=message, changed=changed)
        else:
            (monitor.notice if self.notes else monitor.log)("started", message="; ".join(self.notes) or "a new run")
        for message in self.advice:
            monitor.notice("note", message=message)


def start_from(setup: Setup, start: str) -> str:
    """Load another model's weights and return a log message. Parameters that it lacks keep their initial values."""
    weights, where = starting_weights(start, setup.recipe.train.new_head)
    missing = put_weights(setup.model, weights, where, setup.model.additions)
    parts = ", ".join(sorted({name.partition(".")[0] for name in missing}))
    lacking = f"as that {'folder' if is_folder(start) else 'run'} lacks them"
    return f"from the weights of {where}" + (f"; initialized, {lacking}: {parts}" if missing else "")
