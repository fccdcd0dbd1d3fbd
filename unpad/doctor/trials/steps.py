"""A few steps as training takes them: the time of each part, of saving and evaluating, and the use of the machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unpad.doctor.subject import Subject, TimeBudget, Trial
from unpad.machine.load import Load, busy_seconds, cores, own_seconds, quota
from unpad.machine.memory import swapped_bytes
from unpad.models.adapters import kept_weights
from unpad.run.checkpoint import State, model_tensors, save
from unpad.terminal.finding import Finding, Value
from unpad.terminal.progress import counted
from unpad.training.optim import optimizer_tensors

STEPS, LEAST_STEPS = 9, 3  # the first is not timed: it prepares kernels and memory
SLOW_LOAD = 1.5  # times the computation
KEPT_EPOCHS = 3  # from which on a load is timed that follows another of the same sequences
MUCH_SAVING, FEW_BETWEEN, LONG_RUN = 0.3, 10, 60.0
MUCH_EVALUATING = 0.5
FORWARD_SHARE = 1 / 3  # of a step's computation
MUCH_PADDING, SOME_PADDING = 0.4, 0.15


@dataclass(frozen=True)
class Steps:
    """Some steps of the recipe.

    Args:
        norms: of the gradients, per step.
        load, forward, backward, optimize: median seconds of a step; load is beside the others, in another thread.
        save: seconds of a checkpoint, in a temporary folder.
        unmoved: names of parameters that no step changed.
    """

    norms: list[float]
    load: float
    forward: float
    backward: float
    optimize: float
    save: float
    unmoved: list[str]

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimize


class _Watch:
    """Seconds of the parts of one step."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.forward, self.optimize = now, 0.0, 0.0
        self._began = 0.0

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        """Time forward passes and the optimizer inside."""
        losses = trial.model.losses

        def timed(batch: object) -> object:
            began = self.now()
            try:
                return losses(batch)  # type: ignore[arg-type]
            finally:
                self.forward += self.now() - began

        def begin(*_: object) -> None:
            self._began = self.now()

        def end(*_: object) -> None:
            self.optimize += self.now() - self._began

        hooks = [trial.optimizer.register_step_pre_hook(begin), trial.optimizer.register_step_post_hook(end)]
        object.__setattr__(trial.model, "losses", timed)
        try:
            yield
        finally:
            object.__delattr__(trial.model, "losses")
            for hook in hooks:
                hook.remove()


def take_steps(subject: Subject, seconds: float) -> Steps:
    """Take up to 9 steps of the plan, as many as `seconds` allow, and save once."""
    trial, clock = Trial(subject), subject.clock
    norms, times, began, updated = list[float](), list[tuple[float, ...]](), clock.now(), 0
    for step in counted(range(STEPS), "taking steps", STEPS, "steps"):
        if step >= LEAST_STEPS and clock.now() - began > seconds:
            break
        planned = subject.plan.step(step % subject.plan.num_steps)
        if subject.num_steps >= KEPT_EPOCHS * subject.plan.num_steps:
            for micro in planned:  # most loads find the pictures of an earlier epoch in memory
                subject.load(micro)
        start = clock.now()
        micros = [subject.load(micro) for micro in planned]
        loaded, watch = clock.now(), _Watch(clock.now)
        with watch.on(trial):
            result = trial.step(micros)
        whole = clock.now() - loaded
        norms.append(result.grad_norm)
        updated += result.updated
        times.append((loaded - start, watch.forward, whole - watch.forward - watch.optimize, watch.optimize))
    load, forward, backward, optimize = np.median(np.array(times[1:] or times), axis=0).tolist()
    before = dict(subject.setup.model.named_parameters())
    unmoved = [
        name
        for name, parameter in trial.model.named_parameters()
        if updated and parameter.requires_grad and torch.equal(parameter, before[name])
    ]
    saved = save_seconds(trial, clock)
    return Steps(norms, load, forward, backward, optimize, saved, unmoved)


def save_seconds(trial: Trial, clock: TimeBudget) -> float:
    """Seconds that a checkpoint takes, written to a temporary folder."""
    tensors = model_tensors(kept_weights(trial.model)) | optimizer_tensors(trial.model, trial.optimizer)
    with tempfile.TemporaryDirectory(prefix="unpad-doctor-") as folder:
        began = clock.now()
        save(Path(folder), State(1, tensors, {}), 2)
        return clock.now() - began


def check_times(subject: Subject, steps: Steps) -> list[Finding]:
    """Findings on loading, saving, evaluating and padding."""
    return [
        *_loading(steps),
        *_saving(subject, steps),
        *_evaluating(subject),
        *_padding(subject),
    ]


def _loading(steps: Steps) -> list[Finding]:
    ratio = steps.load / max(steps.compute, 1e-9)
    if ratio < SLOW_LOAD:
        return []
    values: dict[str, Value] = {"load": steps.load, "compute": steps.compute}
    return [Finding("loader", "warning", ratio, ("data", "images.cache_mib"), values)]


def _saving(subject: Subject, steps: Steps) -> list[Finding]:
    every = subject.setup.recipe.checkpoint.every or subject.plan.num_steps
    share = steps.save / (steps.save + every * steps.compute)
    lost = steps.save * subject.num_steps / every
    if share < MUCH_SAVING or (every >= FEW_BETWEEN and lost < LONG_RUN):
        return []
    usual = max(int(20 * steps.save / max(steps.compute, 1e-9)), 100)
    field = "checkpoint.every"
    values: dict[str, Value] = {"seconds": steps.save, "every": every, "step": steps.compute, "usual": usual}
    return [Finding("saving", "warning", share, (field,), {**values, "field": field})]


def _evaluating(subject: Subject) -> list[Finding]:
    """Estimate the time of evaluations from the lengths: a forward pass over what is held out."""
    table, held_out = subject.data.table, subject.stage.held_out_ids
    every = subject.recipe.train.eval_every or subject.plan.num_steps
    tokens = int(table.positions[held_out].sum())
    trained = every * subject.plan.padded_tokens / subject.plan.num_steps
    share = tokens * FORWARD_SHARE / max(tokens * FORWARD_SHARE + trained, 1e-9)
    if share < MUCH_EVALUATING:
        return []
    field = subject.field("train.eval_every")
    usual = max(int(10 * every * share / (1 - share)), 1)
    values: dict[str, Value] = {"tokens": tokens, "unit": subject.units[1], "every": every, "usual": usual}
    return [Finding("evaluating", "warning", share, (field,), {**values, "field": field})]


def _padding(subject: Subject) -> list[Finding]:
    share = subject.plan.pad_share
    if share < SOME_PADDING:
        return []
    field = subject.field("plan.strategy")
    values: dict[str, Value] = {"strategy": subject.plan.strategy, "field": field}
    return [Finding("padding", "warning" if share >= MUCH_PADDING else "note", share, (field,), values)]


@dataclass(frozen=True)
class System:
    """Readings of the machine; `now` is the clock that everything is timed by, in seconds."""

    cores: Callable[[], int] = cores
    quota: Callable[[], float | None] = quota
    threads: Callable[[], int] = torch.get_num_threads
    busy_seconds: Callable[[], float | None] = busy_seconds
    own_seconds: Callable[[], float] = own_seconds
    swapped_bytes: Callable[[], int] = swapped_bytes
    now: Callable[[], float] = time.perf_counter


FIELD = "train.threads"
BUSY = 0.25  # of the cores, from which on others make times too long
QUIET = 0.1  # of a core: others that use more may need the cores that are idle just now
LEAST_SECONDS = 0.5  # the system counts in hundredths
GIB, SWAPPED_GIB = 1 << 30, 0.1


def check_threads(subject: Subject, system: System, load: Load | None) -> list[Finding]:
    """Compare threads with the cores that this process may use.

    Args:
        load: of the cores while steps were tried; more threads are advised only where it says that others rest.
    """
    if subject.setup.device.type != "cpu":
        return []
    threads, here, quota = system.threads(), system.cores(), system.quota()
    usable = here if quota is None else min(float(here), quota)
    if threads > max(usable, 1):
        why = "" if quota is None or quota >= here else f" (cgroup: {quota:g})"
        known: dict[str, Value] = {"threads": threads, "cores": usable, "why": why, "field": FIELD}
        return [Finding("too_many_threads", "warning", max(int(usable), 1), (FIELD,), known)]
    if threads < int(usable) and load is not None and load.others < QUIET:
        chosen = subject.setup.recipe.profile == "low_power"
        values: dict[str, Value] = {"threads": threads, "cores": int(usable), "field": FIELD}
        idle = 1 - threads / usable
        field = "profile" if chosen else FIELD
        return [Finding("threads", "note" if chosen else "warning", idle, (field,), values)]
    return []


def check_neighbours(load: Load | None, cores: int) -> list[Finding]:
    """A finding where other processes use a quarter of the cores or more.

    Args:
        load: of the cores while steps were tried.
    """
    if load is None or load.others < BUSY * cores:
        return []
    values: dict[str, Value] = {"cores": cores, "own": load.own}
    return [Finding("neighbour", "warning", load.others, ("/proc/stat",), values)]


def check_memory(system: System) -> list[Finding]:
    """Memory of this process on the disk."""
    swapped = system.swapped_bytes() / GIB
    return [Finding("swap", "warning", swapped, ("plan.tokens_per_micro",))] if swapped >= SWAPPED_GIB else []
