"""Training loop of one stage: step, log, evaluate, save, stop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from unpad.batching.batch import describe_batch
from unpad.batching.plan import Micro, Plan, rows_digest
from unpad.data.measuring import Measuring
from unpad.errors import OutOfMemoryError, Stopped, needs_memory
from unpad.evaluation.family import held_out
from unpad.models.contract import HasLatent, Model
from unpad.models.cost import cells_per_token
from unpad.nn.block import compiled
from unpad.processes.sums import sum_kind
from unpad.run.checkpoint import State, step_folder
from unpad.run.folder import CHECKPOINTS
from unpad.run.kept import REFERENCE
from unpad.run.monitor import StepRecord
from unpad.run.report.history import chance
from unpad.run.timers import Timers
from unpad.terminal.printing import resume_run
from unpad.terminal.table import number_of
from unpad.training.consistency import check_weights
from unpad.training.context import RunContext, SaveClock, SavedWatches, StageRun, Watch
from unpad.training.memory import HeapKeeper, Room, used_at_most
from unpad.training.optim import Schedule, load_optimizer_tensors, make_optimizer, optimizer_tensors
from unpad.training.progress import end_stage, save_checkpoint
from unpad.training.stage import (
    StageSetup,
    epoch_plan,
    epochs_per_evaluation,
    last_step,
    num_epochs,
    prepare_model,
    stage_epochs,
)
from unpad.training.step import OPTIMIZER_FIX, StepResult, non_finite, train_step
from unpad.training.updates import LoadedUpdate, epoch_updates


def start_watches(stage: StageSetup, model: Model, saved: SavedWatches, timers: Timers) -> list[Watch]:
    """Start the watches of a stage; the time it takes counts as theirs."""
    watches: list[Watch] = []
    if isinstance(model, HasLatent):
        from unpad.training.watches.collapse import CollapseMonitor

        with timers(CollapseMonitor.subject):
            watches.append(CollapseMonitor.start(stage, model, saved))
    return watches


def run_stage(run: RunContext, setup: StageSetup, state: State | None) -> tuple[int, float | None]:
    """Train one stage to its end and leave the weights it ends with in the model.

    Returns:
        Epochs run, and the best held-out loss of the stage.
    """
    progress, name = run.progress, setup.name
    before = progress.step - progress.stage_step
    stage = _start_stage(run, setup, state, begins=progress.stage_step == 0)
    if _is_over(stage):
        message = f"{name}: it ended at step {progress.step}; {_what_ended(stage)}"
        run.monitor.log("nothing_to_do", message=message, name=name)
    end, first = run.length.last(progress.stage, before), stage.first
    about: dict[str, object] = {"epoch_steps": stage.schedule.epochs.steps[0], "frozen": stage.num_frozen}
    about |= {"windows": setup.windows, "ledger": first.ledger.to_json()}  # of the first of these
    run.monitor.stage(name, end.step, exact=end.exact, max_epochs=stage.max_epochs, **about)
    while not _is_over(stage):
        with run.timers("plan"):
            plan = _present_plan(stage)
        if progress.window == setup.windows - 1:
            run.length.learn(progress.stage, progress.epoch, progress.window_start + plan.num_steps)
        end = run.length.last(progress.stage, before)
        run.monitor.expect(end.step, end.exact)
        if plan.num_steps == 0:  # a source weight below 1 can leave an epoch empty, plan.drop_last a window
            if progress.epoch_step and progress.window == setup.windows - 1:
                _after_step(stage, True, False)
            else:
                progress.next_window(setup.windows)
            run.signals.agree(run.setup.group.exchange(run.signals.received))
        for update in epoch_updates(stage, plan):
            _one_step(stage, update)
            _after_step(stage, progress.window_step == plan.num_steps, update.is_saved)
            if progress.window_step == 0 or _is_over(stage):
                break
        if run.signals.stops is not None:  # it came after the last step of the epoch
            _save(stage, waits=True)
            run.signals.raise_if_received(run.setup.folder)
    run.saver.finish()
    if run.deadline.reached:
        message = f"{name}: train.max_minutes={run.deadline.minutes:g} are over at step {progress.step} of {end.step}"
        message += f"; {resume_run(run.setup.folder)} goes on"
        run.monitor.notice("time_limit", message=message, step=progress.step)
    end_stage(run.setup, setup, progress)
    return progress.epoch + (progress.epoch_step > 0), progress.best


def repeat_steps(run: RunContext, setup: StageSetup, state: State | None, last: int, *, goes_on: bool = False) -> State:
    """Take the steps of a stage up to step `last` of the run as `run_stage` does, without evaluations and checkpoints.

    Args:
        run: of a directory of its own, so that the original run stays as it is; it holds the run's log-probabilities of
            pairs, if the run saved those of this stage.
        state: state to continue from within the stage; None at its beginning.
        goes_on: whether further steps follow, so that watches read the model after the last one too.

    Returns:
        The state to continue from, without the weights, which are in the model.

    Raises:
        NonFiniteError, CollapseError: as training does.
    """
    progress = run.progress
    stage = _start_stage(run, setup, state, begins=not (run.setup.folder / REFERENCE).is_file())
    while progress.step < last:
        plan = _present_plan(stage)
        if plan.num_steps == 0:
            progress.next_window(setup.windows)
        for update in epoch_updates(stage, plan):
            _one_step(stage, update)
            if progress.step < last or goes_on:
                _count_epoch_and_watch(stage, progress.window_step == plan.num_steps)
            if progress.step == last or progress.window_step == 0:
                break
    return State(last, optimizer_tensors(run.setup.model, stage.optimizer) | _watch_tensors(stage), {})


def _present_plan(stage: StageRun) -> Plan:
    """The plan of the epoch, or its window, that the next step is of."""
    epoch, window = stage.run.progress.epoch, stage.run.progress.window
    return epoch_plan(stage.setup, epoch, window) if epoch or window else stage.first


def _put_reference(run: RunContext, setup: StageSetup, *, begins: bool) -> str:
    """Log-probabilities of the pairs of a stage under the weights that it starts from; a message if they were computed.

    A stage without pairs loads nothing of it.
    """
    with run.timers("reference"):
        if not setup.of_pairs:
            return ""
        from unpad.training.reference import put_reference

        return put_reference(run.setup, setup, begins=begins)


def _start_stage(run: RunContext, setup: StageSetup, state: State | None, *, begins: bool) -> StageRun:
    """Plan the first epoch of a stage, and prepare its model, its optimizer and its watches.

    Args:
        state: the checkpoint that the run resumes from within the stage.
        begins: whether the model holds the weights that the stage starts from.
    """
    with run.timers("plan"):
        first = epoch_plan(setup, 0)
        epochs = stage_epochs(setup)  # a resumed stage counts from its first step as well
    before = run.progress.step - run.progress.stage_step
    schedule = Schedule(setup.recipe.optim, epochs, last_step(setup, before, epochs) - before)
    objective, num_frozen = prepare_model(run.setup.model, setup)
    if message := _put_reference(run, setup, begins=begins):
        run.monitor.log("reference", message=message)
    model, recipe, progress, tensors = run.setup.model, setup.recipe, run.progress, state.tensors if state else {}
    with run.timers("build"), needs_memory("the optimizer's state", OPTIMIZER_FIX):
        optimizer = make_optimizer(model, recipe.optim)
        load_optimizer_tensors(model, optimizer, tensors)
    saved = SavedWatches(progress.step, before, progress.watches, tensors)
    watches = start_watches(setup, model, saved, run.timers)
    progress.watches = {watch.name: watch.values() for watch in watches}
    for watch in watches:
        if message := watch.describe():
            run.monitor.log(watch.subject, message=message)
    kind = sum_kind(recipe.train.sums, run.setup.device.type, run.setup.group.size)
    return StageRun(
        run,
        setup,
        first,
        num_frozen,
        optimizer,
        objective,
        schedule,
        watches,
        HeapKeeper(),
        SaveClock(recipe.checkpoint.every_seconds),
        sums=run.setup.parallelism.gradient_sum(kind, model),
        cells_per_token=cells_per_token(model),
        room=run.setup.parallelism.room(kind, progress.most_tokens),
        max_epochs=num_epochs(setup, epochs),
        epochs_per_evaluation=epochs_per_evaluation(setup, epochs),
    )


def _after_step(stage: StageRun, ends_plan: bool, is_saved: bool) -> None:
    """Evaluate, log and save if due after a step; stop if a signal has arrived.

    Args:
        ends_plan: whether it is the last step of the epoch or its window.
        is_saved: whether a checkpoint is due by time.
    """
    run, recipe, progress = stage.run, stage.setup.recipe, stage.run.progress
    _count_epoch_and_watch(stage, ends_plan)
    ends_epoch = progress.epoch_step == 0
    ends_epochs = ends_epoch and progress.epoch % stage.epochs_per_evaluation == 0
    evaluate = _due(recipe.train.eval_every, progress.stage_step, ends_epochs) or _is_over(stage)
    improved, stop = _evaluate(stage) if evaluate else (False, False)
    if ends_epoch:
        run.monitor.epoch(progress.step, stage.setup.name, progress.epoch)
    stopping = stop or run.signals.stops is not None
    is_saved = is_saved or _due(recipe.checkpoint.every, progress.step, ends_epochs)
    if is_saved or improved or stopping or _is_over(stage):
        _save(stage, best=improved and stage.setup.keeps_best, waits=stopping or _is_over(stage))
    if stopping:  # a signal that has come since stops the run after the next step, whose checkpoint is waited for
        run.signals.raise_if_received(run.setup.folder)
    if stop:
        what = "stopped after an evaluation, as its caller asked; everything up to here is saved"
        raise Stopped(what, where=str(run.setup.folder), fix=f"continue with {resume_run(run.setup.folder)}")


def _count_epoch_and_watch(stage: StageRun, ends_plan: bool) -> None:
    """Count a finished epoch or window, and let the due watches read the model: everything that changes later steps."""
    progress = stage.run.progress
    if ends_plan:
        progress.next_window(stage.setup.windows)
    for watch in stage.watches:
        if watch.due(progress.step):
            _consult(stage, watch)


def _consult(stage: StageRun, watch: Watch) -> None:
    """Let a watch read the model, and act on its verdict."""
    run, progress, monitor = stage.run, stage.run.progress, stage.run.monitor
    with run.timers(watch.subject):
        verdict = watch.check(progress.step)
    with run.timers("log"):
        monitor.row(watch.subject, progress.step, stage.setup.name, verdict.values)
    if verdict.changed:
        monitor.notice(watch.name, step=progress.step, light=verdict.light, message=verdict.message)
    if verdict.action == "save":
        with run.timers("save"):
            name = watch.save_healthy(run.setup.folder / CHECKPOINTS, run.setup.group).name
        monitor.log("checkpoint", step=progress.step, path=name)
    elif verdict.action == "recover":
        message = watch.recover(progress.step, stage.optimizer)
        monitor.notice(watch.name, step=progress.step, light="green", message=message)
        # The best checkpoint may itself be faulty: such weights can have the lower held-out loss.
        progress.best, progress.best_step, progress.checks_without_progress = None, 0, 0
    progress.watches[watch.name] = watch.values()
    if verdict.action == "stop":
        _save(stage, waits=True)
        raise watch.error(verdict)


def _is_over(stage: StageRun) -> bool:
    """Return whether the stage has run its epochs, the run its steps or its time, or evaluations have exhausted the
    patience."""
    train, progress = stage.setup.recipe.train, stage.run.progress
    return (
        stage.run.deadline.reached
        or (stage.max_epochs is not None and progress.epoch >= stage.max_epochs)
        or (train.max_steps is not None and progress.step >= train.max_steps)
        or (train.patience is not None and progress.checks_without_progress >= train.patience)
    )


def _what_ended(stage: StageRun) -> str:
    """Name the limit that the stage has reached and the field that raises it."""
    train, progress = stage.setup.recipe.train, stage.run.progress
    if stage.max_epochs is not None and progress.epoch >= stage.max_epochs:
        field = stage.run.setup.recipe.field_of(stage.setup.name, "train.max_epochs")
        return f"raise {field} above {stage.max_epochs} to continue"
    if train.max_steps is not None and progress.step >= train.max_steps:
        return f"raise train.max_steps above {train.max_steps} to continue"
    return f"no progress in {number_of(progress.checks_without_progress, 'evaluations')} (train.patience)"


def _due(every: int | None, step: int, at_epoch_end: bool) -> bool:
    return at_epoch_end if every is None else step % every == 0


def _one_step(stage: StageRun, loaded: LoadedUpdate) -> None:
    """Take one step and record it."""
    run, setup, progress = stage.run, stage.run.setup, stage.run.progress
    began, worked, graphs = time.perf_counter(), time.process_time(), compiled()
    with run.timers("train"), _naming_sequences(run):
        result = train_step(
            setup.model,
            loaded.micros,
            stage.optimizer,
            weights=loaded.weights,
            precision=setup.precision,
            clip=stage.setup.recipe.optim.clip,
            scaler=progress.scaler if setup.precision == "fp16" else None,
            share=loaded.share,
        )
    if stage.room is not None:
        _tell_of_memory(run, stage.room)
    if (made := compiled()) != graphs:
        num, seconds = made
        run.monitor.log("compiled", message=f"blocks compiled: {number_of(num, 'graphs')}, {seconds:.0f} s")
    if not result.updated:
        _skip_or_stop(stage, loaded.planned, result)
    progress.step += 1
    progress.stage_step += 1
    progress.epoch_step += 1
    seconds, processor = time.perf_counter() - began + loaded.waited, time.process_time() - worked
    with run.timers("log"):
        run.monitor.step(
            _record_of(stage, loaded, result),
            seconds=seconds,
            waited=loaded.waited,
            processor=processor,
            memory_bytes=stage.heap.after_step(),
            peak_bytes=used_at_most(),
        )
        if run.monitor.verbose:
            for number, batch in enumerate(loaded.micros, start=1):
                run.monitor.detail([f"micro-batch {number}: {line}" for line in describe_batch(batch)])


def _record_of(stage: StageRun, loaded: LoadedUpdate, result: StepResult) -> StepRecord:
    """Metrics record of the last step."""
    progress, counts = stage.run.progress, loaded.share.counts
    return StepRecord(
        step=progress.step,
        stage=stage.setup.name,
        epoch=progress.epoch + 1,
        rows=rows_digest(loaded.planned),
        micros=len(loaded.micros),
        sequences=sum(micro.sequences for micro in counts),
        tokens=sum(micro.tokens for micro in counts),
        padded_tokens=sum(micro.padded_tokens for micro in counts),
        targets=result.num_targets,
        loss=result.terms.get("nll", 0.0),
        lr=loaded.rate,
        grad_norm=result.grad_norm,
        terms=result.terms,
        weights=loaded.weights,
        skipped=not result.updated,
        measures=result.visual,
    )


@contextmanager
def _naming_sequences(run: RunContext) -> Iterator[None]:
    """Add the step and the sequences that do not fit into memory to the error."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.seq_ids:
            names = ", ".join(run.setup.data.where(seq_id) for seq_id in error.seq_ids[:8])
            error.where = "; ".join(part for part in (names, f"step {run.progress.step + 1}", error.where) if part)
        raise


def _tell_of_memory(run: RunContext, room: Room) -> None:
    """Log the bounds learned from out-of-memory errors in a step, and keep them for a resume."""
    for message in room.messages:
        run.monitor.notice("out_of_memory", step=run.progress.step + 1, tokens=room.most, message=message)
    room.messages.clear()
    run.progress.most_tokens = room.most


def _skip_or_stop(stage: StageRun, planned: list[Micro], result: StepResult) -> None:
    """Log a step that was skipped for a non-finite loss or gradient; or save and stop."""
    run, setup, train, progress = stage.run, stage.run.setup, stage.setup.recipe.train, stage.run.progress
    if setup.precision == "fp16" and progress.scaler.scale > 1:
        message = f"fp16 overflow; loss scale now {progress.scaler.scale:g}"
        run.monitor.log("skipped_step", step=progress.step + 1, message=message)
        return
    ids = [int(i) for micro in planned for i in micro.seq_ids]
    error = non_finite(result, progress.step + 1, [setup.data.where(i) for i in ids])
    error.is_agreed = True
    progress.num_skipped += 1
    if train.on_nonfinite == "skip" and progress.num_skipped <= train.max_skips:
        message = f"{error.what}; {progress.num_skipped} skipped so far"
        run.monitor.log("skipped_step", step=progress.step + 1, message=message)
        return
    _save(stage, waits=True)
    raise error


def _evaluate(stage: StageRun) -> tuple[bool, bool]:
    """Evaluate on held-out data; return whether the loss is the stage's best so far, and whether to end the run."""
    run, recipe, name = stage.run, stage.setup.recipe, stage.setup.name
    setup, progress, train, ids = run.setup, run.progress, recipe.train, stage.setup.held_out_ids
    if ids.size == 0:
        return False, False
    learns, measured = setup.model.mode, setup.model.modes[-1]
    mode = "" if learns == measured else f"{measured} removal; in training {learns}"
    with run.timers("evaluate"), setup.parallelism.evaluating() as group:
        result = held_out(Measuring(setup.model, setup.data, ids, recipe.plan, group))
    least = chance(result.num_targets) if train.min_delta == "auto" else train.min_delta
    improved = progress.best is None or result.loss < progress.best - least
    if improved:
        progress.best, progress.best_step, progress.checks_without_progress = result.loss, progress.step, 0
    else:
        progress.checks_without_progress += 1
    with run.timers("log"):
        run.monitor.evaluation(progress.step, name, result.values, result.num_targets, improved, result.refused, mode)
    if train.patience is not None and progress.checks_without_progress >= train.patience:
        best = f"best by more than {least:.2g}:" if least else "best"  # later ones may be lower
        message = (
            f"{name}: no progress in {number_of(train.patience, 'evaluations')}; {best} {progress.best:.4f} "
            f"at step {progress.best_step}, stopped at step {progress.step}, after epoch {progress.epoch}"
            + (f" of {stage.max_epochs}" if stage.max_epochs is not None else "")
        )
        run.monitor.log("early_stop", message=message, step=progress.step, best_step=progress.best_step)
    if run.after_evaluation is None:
        return improved, False
    run.saver.finish()  # a caller may read the files
    # Every process asks its caller; if one ends the run, it ends for all.
    return improved, any(setup.group.exchange(bool(run.after_evaluation(name, progress.step, result))))


def _save(stage: StageRun, *, best: bool = False, waits: bool = False) -> None:
    """Begin to write a checkpoint, after flushing the metrics that it relies on.

    Args:
        best: whether its weights are the best of the stage so far; waits: for it to be complete.
    """
    run, step = stage.run, stage.run.progress.step
    with run.timers("save"):
        run.saver.finish()
        check_weights(run.setup, step)
        run.monitor.sync()
        saving = save_checkpoint(run.setup, run.progress, stage.optimizer, _watch_tensors(stage), best=best)
        path = step_folder(run.setup.folder, step).name
        run.saver.begin(saving, partial(run.monitor.log, "checkpoint", step=step, path=path))
        if waits:
            run.saver.finish()
    stage.clock.saved()


def _watch_tensors(stage: StageRun) -> dict[str, Tensor]:
    return {name: tensor for watch in stage.watches for name, tensor in watch.tensors().items()}
