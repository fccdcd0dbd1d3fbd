"""The training loop: step, log, evaluate, save, stop. One loop for every recipe."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console

from unpad import checkpoint, storage
from unpad.batch import RaggedBatch
from unpad.errors import Interrupted, PlanError, RecipeError, ResumeError, Terminated, UnpadError
from unpad.evaluate.text import document_nll
from unpad.loader import load_steps
from unpad.memory import process_memory
from unpad.models import model_config
from unpad.monitor import Monitor, StepRecord, Timers
from unpad.optim import check_schedule, freeze, learning_rate, load_optimizer_tensors, make_optimizer, optimizer_tensors
from unpad.plan.plan import Plan
from unpad.recipe import Recipe, Stage, differences, load_recipe, may_change_on_resume
from unpad.run import COMMAND, RECIPE, RUNS, TOKENIZER, open_tokenizer, put_weights, read_command
from unpad.setup import Setup, describe, epoch_plan, prepare_setup, stage_sequences
from unpad.step import WEIGHTS, LossScaler, StepResult, non_finite, train_step


@dataclass
class Progress:
    """Where a run stands. Together with weights and optimizer this is all a checkpoint holds: every random number is
    drawn from (seed, epoch) or (seed, step), so there is no generator state to keep."""

    step: int = 0  # updates of the whole run
    stage: int = 0
    stage_step: int = 0
    epoch: int = 0
    epoch_step: int = 0  # updates done within the epoch
    best: float | None = None  # held-out loss, per stage
    best_step: int = 0
    checks_without_progress: int = 0
    num_skipped: int = 0
    scaler: LossScaler = field(default_factory=LossScaler)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Progress:
        return cls(**{**values, "scaler": LossScaler(**values["scaler"])})

    def next_stage(self) -> None:
        self.stage, self.stage_step, self.epoch, self.epoch_step = self.stage + 1, 0, 0, 0
        self.best, self.best_step, self.checks_without_progress = None, 0, 0


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    epochs: int
    heldout_loss: float | None
    lines: list[str]


class Signals:
    """Ctrl-C and SIGTERM ask for a stop after the step; a second one stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def listen(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self.received = number
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

        try:
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the caller owns the signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def raise_if_received(self, folder: Path) -> None:
        if self.received is None:
            return
        kind, name = (Interrupted, "Ctrl-C") if self.received == signal.SIGINT else (Terminated, "SIGTERM")
        raise kind(
            f"stopped by {name}; everything up to here is saved", where=str(folder), fix="continue with --resume"
        )


# --------------------------------------------------------------------------- the run


def train(
    name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    console: Console | None = None,
    verbose: bool = False,
) -> Result:
    """Train a recipe into a run directory, or continue one.

    Args:
        name: packaged recipe or YAML file.
        folder: the run directory; must not hold a run unless `resume`.
        overrides: `key=value` changes.

    Raises:
        UnpadError: with the exit code of what went wrong; the directory then holds everything up to there.
    """
    timers, began = Timers(), time.perf_counter()
    recipe = load_recipe(name, list(overrides))
    model_config(recipe.model)
    storage.make_folder(folder)
    with storage.RunLock(folder):
        for place in (folder, folder / "checkpoints"):
            if place.is_dir():
                storage.clean_leftovers(place)
        exists = (folder / RECIPE).is_file()
        if exists and not resume:
            fix = "continue it with --resume, or choose another --out"
            raise RecipeError("the directory holds a run already", where=str(folder), fix=fix)
        notes: list[str] = []
        if exists:
            overrides, recipe, notes = _resumed_recipe(name, list(overrides), folder)
        tokenizer = open_tokenizer(folder) if exists else None
        setup = prepare_setup(recipe, folder, tokenizer, timers)
        progress, state, warnings = _restore(setup) if exists else (Progress(), None, [])
        with timers("save"):
            _write_run_files(setup, name, overrides)
        monitor = Monitor(
            folder,
            log_every=recipe.train.log_every,
            grad_norm_warning=recipe.train.grad_norm_warning,
            console=console or Console(),
            total_steps=recipe.train.max_steps,
            verbose=verbose,
        )
        try:
            if exists:
                monitor.resume(progress.step)
                for message in warnings:
                    monitor.event("warning", message=message)
                monitor.event("resumed", step=progress.step, message="; ".join([f"at step {progress.step}", *notes]))
            return _run_stages(setup, progress, state, monitor, timers, began)
        except UnpadError as error:
            monitor.event("stopped", message=error.what, exit_code=error.exit_code)
            raise
        finally:
            monitor.close()


def _resumed_recipe(name: str, overrides: list[str], folder: Path) -> tuple[list[str], Recipe, list[str]]:
    """The overrides and recipe of a resumed run: those of the command that began it, the new ones after them.

    Returns:
        Overrides, recipe, and a line for each field that changed.

    Raises:
        ResumeError: a field differs that a run cannot change on its way.
    """
    saved = load_recipe(str(folder / RECIPE))
    together = [*(o for o in read_command(folder)["overrides"] if o not in overrides), *overrides]
    recipe = load_recipe(name, together)
    changed = differences(saved, recipe)
    refused = {key: values for key, values in changed.items() if not may_change_on_resume(key)}
    if refused:
        listing = "; ".join(f"{key}: {old!r} in the run, {new!r} now" for key, (old, new) in refused.items())
        raise ResumeError(listing, where=str(folder), fix="undo these changes, or start anew with train.init_from")
    ends = ("max_steps", "max_epochs")
    notes = [
        f"{key} is {new}, was {old}" + (": schedule recomputed" if key.endswith(ends) else "")
        for key, (old, new) in changed.items()
    ]
    return together, recipe, notes


def _restore(setup: Setup) -> tuple[Progress, checkpoint.State | None, list[str]]:
    """Find the newest sound checkpoint, None when the run stopped before its first; also what to warn of."""
    loaded = checkpoint.load_newest(setup.folder / "checkpoints")
    if loaded is None:
        return Progress(), None, []
    state, warnings = loaded
    if state.values["data"] != setup.tokens.fingerprint():
        changed = _changed_files(state.values["files"], dict(setup.tokens.file_hashes))
        raise ResumeError(
            f"the data changed since the run began: {changed}",
            where=str(setup.folder),
            fix="put the files back, or start anew with train.init_from",
        )
    for key, value in state.values["environment"].items():
        if setup.environment.get(key) != value:
            warnings.append(
                f"{key} is {setup.environment.get(key)}, was {value}: the run continues, but not bit for bit as before"
            )
    weights = {k.removeprefix("model."): v for k, v in state.tensors.items() if k.startswith("model.")}
    put_weights(setup.model, weights, str(setup.folder))
    return Progress.from_values(state.values["progress"]), state, warnings


def _changed_files(old: dict[str, str], new: dict[str, str]) -> str:
    names = [path for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path)]
    return ", ".join(names[:5]) or "the split or the encoding differs"


def _write_run_files(setup: Setup, name: str, overrides: Sequence[str]) -> None:
    storage.write_atomic(setup.folder / TOKENIZER, setup.tokenizer.to_bytes())
    command = {"recipe": name, "overrides": list(overrides)}
    storage.write_atomic(setup.folder / COMMAND, json.dumps(command, ensure_ascii=False, indent=1) + "\n")
    storage.write_atomic(setup.folder / RECIPE, setup.recipe.to_yaml())


def _run_stages(
    setup: Setup, progress: Progress, state: checkpoint.State | None, monitor: Monitor, timers: Timers, began: float
) -> Result:
    with timers("log"):
        monitor.event("environment", **setup.environment)
        monitor.start(describe(setup))
    signals = Signals()
    heldout, epochs, has_best = progress.best, progress.epoch, False
    with signals.listen():
        while progress.stage < len(setup.stages):
            stage = setup.stages[progress.stage]
            has_best = False
            if _has_work(setup, stage, progress, monitor):
                epochs, heldout = _run_stage(setup, stage, progress, state, monitor, timers, signals)
                has_best = progress.best is not None
            state = None
            progress.next_stage()
    if not has_best:  # the last stage held nothing out or had nothing to do: the weights as they are
        checkpoint.save_named(setup.folder / "checkpoints", "best", _state(setup, progress, None))
    monitor.event("finished", step=progress.step, heldout_loss=heldout)
    with timers("log"):
        monitor.close()
    summary = timers.summary(time.perf_counter() - began)
    lines = [f"{row['name']:<12}{row['seconds']:8.1f} s {row['share']:6.1%}" for row in summary]
    return Result(setup.folder, progress.step, epochs, heldout, lines)


def _has_work(setup: Setup, stage: Stage, progress: Progress, monitor: Monitor) -> bool:
    """Whether a stage has data, epochs and steps left; says why when not."""
    train = setup.recipe.for_stage(stage).train
    if stage_sequences(setup, stage, 0).size == 0:
        reason = "no data: " + " and ".join(f"data.{kind}" for kind in stage.use) + " hold nothing to train on"
    elif train.max_epochs == 0:
        reason = "max_epochs is 0"
    elif train.max_steps is not None and progress.step >= train.max_steps and progress.stage_step == 0:
        reason = f"the run's {train.max_steps} steps are done"
    else:
        return True
    monitor.event("stage_skipped", message=f"{stage.name}: {reason}", name=stage.name)
    return False


# --------------------------------------------------------------------------- one stage


def _run_stage(
    setup: Setup,
    stage: Stage,
    progress: Progress,
    state: checkpoint.State | None,
    monitor: Monitor,
    timers: Timers,
    signals: Signals,
) -> tuple[int, float | None]:
    """Train one stage to its end and leave its best weights in the model.

    Returns:
        Epochs run, and the best held-out loss.
    """
    recipe = setup.recipe.for_stage(stage)
    frozen = freeze(setup.model, recipe.train.freeze)
    setup.model.label_smoothing = recipe.train.label_smoothing
    with timers("build"):
        optimizer = make_optimizer(setup.model, recipe.optim)
    if state is not None:
        load_optimizer_tensors(setup.model, optimizer, state.tensors)
    with timers("plan"):
        first = epoch_plan(setup, stage, 0)
    epoch_steps = first.num_steps  # the schedule counts in these wherever the stage stands: epochs differ in length
    if epoch_steps == 0:
        fix = "lower plan.tokens_per_step, or set plan.drop_last=false and plan.overflow=split"
        raise PlanError(f"stage {stage.name} has no step: the plan drops every token", where="plan", fix=fix)
    before = progress.step - progress.stage_step
    last = _last_step(recipe, before, epoch_steps)
    check_schedule(recipe.optim, last - before, epoch_steps)
    monitor.stage(stage.name, last, epoch_steps=epoch_steps, frozen=frozen, ledger=first.ledger.to_json())
    while not _is_over(recipe, progress):
        with timers("plan"):
            current = epoch_plan(setup, stage, progress.epoch) if progress.epoch else first
        for waited, micros in _epoch_steps(setup, current, progress, timers):
            position = progress.epoch * epoch_steps if recipe.optim.per == "epoch" else progress.stage_step
            rate = learning_rate(recipe.optim, position, last - before, epoch_steps)
            _one_step(setup, stage, recipe, progress, optimizer, micros, rate, waited, monitor, timers)
            ends_epoch = progress.epoch_step == current.num_steps
            if ends_epoch:
                progress.epoch, progress.epoch_step = progress.epoch + 1, 0
            if _due(recipe.train.eval_every, progress.stage_step, ends_epoch) or _is_over(recipe, progress):
                _evaluate(setup, stage, recipe, progress, monitor, timers)
            if ends_epoch:
                monitor.epoch(progress.step, stage.name, progress.epoch)
            is_over, stopping = _is_over(recipe, progress), signals.received is not None
            if _due(recipe.checkpoint.every, progress.step, ends_epoch) or stopping or is_over:
                with timers("save"):
                    monitor.sync()
                    _save(setup, progress, optimizer, monitor)
            signals.raise_if_received(setup.folder)
            if ends_epoch or is_over:
                break
    _best_weights_back(setup, stage, progress)
    return progress.epoch + (progress.epoch_step > 0), progress.best


def _last_step(recipe: Recipe, before: int, epoch_steps: int) -> int:
    """The last step of a stage that began after step `before` of the run."""
    train = recipe.train
    by_epochs = None if train.max_epochs is None else before + epoch_steps * train.max_epochs
    return min(end for end in (by_epochs, train.max_steps) if end is not None)


def _is_over(recipe: Recipe, progress: Progress) -> bool:
    """Whether the stage has had its epochs, the run its steps, or the held-out value its patience."""
    train = recipe.train
    return (
        (train.max_epochs is not None and progress.epoch >= train.max_epochs)
        or (train.max_steps is not None and progress.step >= train.max_steps)
        or (train.patience is not None and progress.checks_without_progress >= train.patience)
    )


def _due(every: int | None, step: int, at_epoch_end: bool) -> bool:
    return at_epoch_end if every is None else step % every == 0


def _epoch_steps(
    setup: Setup, current: Plan, progress: Progress, timers: Timers
) -> Iterator[tuple[float, list[RaggedBatch]]]:
    """The rest of an epoch's steps, each with the seconds spent waiting for it."""
    steps = load_steps(setup.tokens, current, setup.tokenizer.pad_id, setup.device, progress.epoch_step)
    while True:
        began = time.perf_counter()
        with timers("load"):
            micros = next(steps, None)
        if micros is None:
            return
        yield time.perf_counter() - began, micros


def _one_step(
    setup: Setup,
    stage: Stage,
    recipe: Recipe,
    progress: Progress,
    optimizer: torch.optim.AdamW,
    micros: list[RaggedBatch],
    rate: float,
    waited: float,
    monitor: Monitor,
    timers: Timers,
) -> None:
    """One update and its record."""
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler = progress.scaler if setup.precision == "fp16" else None
    with timers("train"):
        # Dropout draws from (seed, step), so a resumed run drops the same values.
        torch.manual_seed(_step_seed(recipe.train.seed, progress.step))
        setup.model.train()
        result = train_step(
            setup.model, micros, optimizer,
            weights=WEIGHTS, precision=setup.precision, clip=recipe.optim.clip, scaler=scaler,
        )  # fmt: skip
    if not result.updated:
        _skip_or_stop(setup, recipe, progress, optimizer, micros, result, scaler, monitor)
    progress.step += 1
    progress.stage_step += 1
    progress.epoch_step += 1
    sequences, tokens = _count_real(micros)
    record = StepRecord(
        step=progress.step,
        stage=stage.name,
        epoch=progress.epoch + 1,
        micros=len(micros),
        sequences=sequences,
        tokens=tokens,
        padded_tokens=sum(batch.total_tokens for batch in micros),
        targets=result.num_targets,
        loss=result.terms.get("nll", 0.0),
        lr=rate,
        grad_norm=result.grad_norm,
        terms=result.terms,
        skipped=not result.updated,
    )
    seconds = time.perf_counter() - began + waited
    with timers("log"):
        monitor.step(record, seconds=seconds, waited=waited, memory_bytes=process_memory())


def _count_real(micros: list[RaggedBatch]) -> tuple[int, int]:
    """Sequences of the corpus and their tokens; the filler that completes a row is neither."""
    sequences = tokens = 0
    for batch in micros:
        lengths = batch.layout.lengths()
        real = torch.ones_like(lengths, dtype=torch.bool) if batch.seq_ids is None else batch.seq_ids >= 0
        sequences, tokens = sequences + int(real.sum()), tokens + int(lengths[real].sum())
    return sequences, tokens


def _step_seed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed},{step}".encode(), digest_size=7).digest(), "little")


def _skip_or_stop(
    setup: Setup,
    recipe: Recipe,
    progress: Progress,
    optimizer: torch.optim.AdamW,
    micros: list[RaggedBatch],
    result: StepResult,
    scaler: LossScaler | None,
    monitor: Monitor,
) -> None:
    """A step whose loss or gradient was not finite changed nothing; go on without it, or save and stop."""
    if scaler is not None and scaler.scale > 1:
        monitor.event("skipped_step", step=progress.step + 1, message=f"fp16 overflow; loss scale now {scaler.scale:g}")
        return
    ids = [int(i) for batch in micros if batch.seq_ids is not None for i in batch.seq_ids if i >= 0]
    error = non_finite(result, progress.step + 1, [setup.tokens.where(i) for i in ids])
    progress.num_skipped += 1
    if recipe.train.on_nonfinite == "skip" and progress.num_skipped <= recipe.train.max_skips:
        monitor.event(
            "skipped_step", step=progress.step + 1, message=f"{error.what}; {progress.num_skipped} skipped so far"
        )
        return
    monitor.sync()
    _save(setup, progress, optimizer, monitor)
    raise error


def _evaluate(setup: Setup, stage: Stage, recipe: Recipe, progress: Progress, monitor: Monitor, timers: Timers) -> None:
    """Measure the held-out loss and keep the best weights."""
    ids = stage_sequences(setup, stage, 1)
    if ids.size == 0:
        return
    with timers("evaluate"):
        sums = document_nll(
            setup.model, setup.tokens, ids,
            settings=recipe.plan, pad_id=setup.tokenizer.pad_id, device=setup.device,
        )  # fmt: skip
    loss = sums.mean_nll()
    improved = progress.best is None or loss < progress.best - recipe.train.min_delta
    if improved:
        progress.best, progress.best_step, progress.checks_without_progress = loss, progress.step, 0
        with timers("save"):
            checkpoint.save_named(setup.folder / "checkpoints", _best_name(setup, stage), _state(setup, progress, None))
    else:
        progress.checks_without_progress += 1
    values = {"loss": loss, "bits_per_char": float(sums.nll.sum()) / np.log(2) / max(int(sums.chars.sum()), 1)}
    with timers("log"):
        monitor.evaluation(progress.step, stage.name, values, int(sums.targets.sum()), improved)
    if recipe.train.patience is not None and progress.checks_without_progress >= recipe.train.patience:
        message = (
            f"{stage.name}: no progress in {recipe.train.patience} checks; best {progress.best:.4f} "
            f"at step {progress.best_step}, stopped at step {progress.step}, epoch {progress.epoch} "
            f"of {recipe.train.max_epochs}"
        )
        monitor.event("early_stop", message=message, step=progress.step, best_step=progress.best_step)


def _best_name(setup: Setup, stage: Stage) -> str:
    return "best" if stage is setup.stages[-1] else f"best-{stage.name}"


def _best_weights_back(setup: Setup, stage: Stage, progress: Progress) -> None:
    """Give the model the best weights of the stage; the newest stay where nothing was held out.

    The newest checkpoint still holds the end of the stage: a resume comes back here, or goes on if the end has moved.
    """
    if progress.best is not None:
        folder = setup.folder / "checkpoints"
        best = checkpoint.load(folder / _best_name(setup, stage), ["model.*"])
        put_weights(setup.model, {k.removeprefix("model."): v for k, v in best.tensors.items()}, str(folder))


def _state(setup: Setup, progress: Progress, optimizer: torch.optim.AdamW | None) -> checkpoint.State:
    tensors = {f"model.{name}": value for name, value in setup.model.state_dict().items()}
    if optimizer is not None:
        tensors |= optimizer_tensors(setup.model, optimizer)
    values = {
        "progress": asdict(progress),
        "data": setup.tokens.fingerprint(),
        "files": dict(setup.tokens.file_hashes),
        "environment": {key: setup.environment[key] for key in ("torch", "threads", "device", "precision")},
    }
    return checkpoint.State(progress.step, tensors, values)


def _save(setup: Setup, progress: Progress, optimizer: torch.optim.AdamW | None, monitor: Monitor) -> None:
    path = checkpoint.save(
        setup.folder / "checkpoints", _state(setup, progress, optimizer), setup.recipe.checkpoint.keep
    )
    monitor.event("checkpoint", step=progress.step, path=path.name)


def free_folder(name: str, resume: bool) -> Path:
    """The next free runs/<recipe>-<n>, or the newest one there is when resuming."""
    stem = Path(name).stem
    taken = [int(p.name.rpartition("-")[2]) for p in RUNS.glob(f"{stem}-*") if p.name.rpartition("-")[2].isdigit()]
    return RUNS / f"{stem}-{max(taken, default=0) + (0 if resume and taken else 1)}"
