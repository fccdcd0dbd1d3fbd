"""Progress of a run: its counters, its checkpoints, how it resumes from them, and with which recipe."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import TypedDict

from unpad import storage
from unpad.data.family import Data
from unpad.errors import CheckpointError, ResumeError, SourceError, UnlikeProcessesError
from unpad.interchange.origin import open_recipe
from unpad.models import model_config
from unpad.models.adapters import ADAPTER_FOLDER, kept_weights, peft_files
from unpad.nn.precision import DTYPES, Precision
from unpad.recipes.file import recipe_names
from unpad.recipes.recipe import Recipe, differences, may_change_on_resume
from unpad.recipes.section import kept_paths
from unpad.run import checkpoint, upgrade
from unpad.run.base import KEY, read_quantized, refuse_training
from unpad.run.checkpoint import put_weights
from unpad.run.folder import CHECKPOINTS, COMMAND, MADE_BY, OF_RUN, RECIPE, RUN_ID, STATE, read_command, run_recipe
from unpad.run.report.history import read_log
from unpad.run.saving import Saving
from unpad.storage.reading import Count, known_fields, misfit
from unpad.terminal.printing import masked
from unpad.training.auto_size import with_size
from unpad.training.optim import optimizer_tensors
from unpad.training.setup import Setup, resolved
from unpad.training.stage import StageSetup
from unpad.training.step import LossScaler

# Keys of `Setup.environment` that determine a run's bits beside its recipe and data.
DECIDE_BITS = (
    *("torch", "threads", "device", "precision", "matmul", "blas"),
    *("kernels", "cpu_capability", "processor"),
)
# How updates are drawn and added. 1: random draws by update, gradients of micro-batches added by autograd; 2: draws by
# micro-batch, gradients added as `train.sums` says; 3: draws by the place of sequences in the update.
UPDATE_RULE = 3
OTHER_DRAWS = "the run was begun by a version with other random draws"
SHARDED_AMONG = "sharded_among"  # in a checkpoint of a divided model: the number of processes


@dataclass
class Progress:
    """Counters of a run. A checkpoint holds these, the weights and the optimizer, and no generator state: every random
    number is drawn from (seed, epoch) or (seed, step)."""

    step: Count = 0  # of the whole run
    stage: Count = 0
    stage_step: Count = 0
    epoch: Count = 0
    epoch_step: Count = 0  # steps done within the epoch
    window: Count = 0  # of the epoch, if it is planned in several
    window_start: Count = 0  # steps of the epoch before its window
    best: float | None = None  # held-out loss, per stage
    best_step: Count = 0
    checks_without_progress: Count = 0
    num_skipped: Count = 0
    scaler: LossScaler = field(default_factory=LossScaler)
    most_tokens: int | None = None  # limit of a pass, learned from out-of-memory errors
    watches: dict[str, dict[str, Any]] = field(default_factory=dict)  # state of every watch of the stage, by its name

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Progress":
        """Read back `to_values`, which `check_values` has found sound."""
        counters = known_fields(cls, values)
        watches = {name: state for name, state in values.items() if name not in counters}
        scaler = LossScaler(**known_fields(LossScaler, values.get("scaler", {})))
        return cls(**{**counters, "scaler": scaler, "watches": watches})

    def to_values(self) -> dict[str, Any]:
        """JSON values for a checkpoint; the state of a watch is under its own name."""
        values: dict[str, Any] = asdict(self)
        watches: dict[str, Any] = values.pop("watches")
        return values | watches

    @property
    def window_step(self) -> int:
        """Steps done within the window."""
        return self.epoch_step - self.window_start

    def next_window(self, windows: int) -> None:
        """Begin the next of the windows of an epoch, or the next epoch."""
        self.window, self.window_start = self.window + 1, self.epoch_step
        if self.window >= windows:
            self.epoch, self.epoch_step, self.window, self.window_start = self.epoch + 1, 0, 0, 0

    def next_stage(self) -> None:
        self.stage, self.stage_step, self.epoch, self.epoch_step = self.stage + 1, 0, 0, 0
        self.window, self.window_start = 0, 0
        self.best, self.best_step, self.checks_without_progress = None, 0, 0
        self.watches = {}


class _Base(TypedDict):
    sha256: str


class _Values(TypedDict):
    """Values of a checkpoint, as `_state` writes them."""

    progress: dict[str, Any]
    data: str
    files: dict[str, str]
    environment: dict[str, Any]
    update_rule: Count
    sharded_among: NotRequired[Count]
    base: NotRequired[_Base]
    run: str


def check_values(state: checkpoint.State, where: str) -> None:
    """Check that the values of a checkpoint have the form that `_state` writes; watches check their own.

    Raises:
        CheckpointError: they have not; names the field.
    """
    fault = misfit(state.values, _Values)
    if not fault:
        progress = state.values["progress"]
        watches = {name: value for name, value in progress.items() if name not in known_fields(Progress, progress)}
        inner = misfit(progress, Progress) or misfit(watches, dict[str, dict[str, Any]])
        if not inner and progress.get("step") != state.step:
            inner = f'"step" is {progress.get("step")}, and the checkpoint is of step {state.step}'
        fault = inner and f"progress: {inner}"
    if fault:
        what = f"{STATE} is not that of a training: {fault}"
        raise CheckpointError(what, where=where, fix="use another copy of the run, or start a new one with --out")


# --------------------------------------------------------------------------- save


def save_checkpoint(
    setup: Setup, progress: Progress, optimizer: Optimizer, additional: dict[str, Tensor], *, best: bool = False
) -> Saving:
    """Begin to write everything the run needs to continue from here.

    Args:
        additional: tensors that are stored by their names.
        best: whether the weights are also saved as the final ones of the current stage. This comes after the
            checkpoint, so that they are never ahead of where a resume begins.
    """
    state = _state(setup, progress, kept_weights(setup.model))
    state.tensors |= optimizer_tensors(setup.model, optimizer) | additional
    then = partial(_save_best, setup, progress.stage) if best else None
    return setup.parallelism.save(setup.folder / CHECKPOINTS, state, setup.recipe.checkpoint.keep, then)


def save_best(setup: Setup, progress: Progress) -> None:
    """Save the current weights as the final weights of the current stage; the last stage's are the run's.

    Final adapters of the run are also written as a folder for peft.
    """
    state = _state(setup, progress, setup.parallelism.gathered(kept_weights(setup.model)))
    setup.group.of_leader(lambda: _save_best(setup, progress.stage, state))


def _save_best(setup: Setup, stage: int, state: checkpoint.State) -> None:
    """Write the weights of a state, without its other tensors, as the final ones of the stage of this number."""
    weights = checkpoint.model_weights(state.tensors)
    name = best_name(setup, setup.stages[min(stage, len(setup.stages) - 1)])
    checkpoint.save_named(setup.folder / CHECKPOINTS, name, replace(state, tensors=checkpoint.model_tensors(weights)))
    if setup.recipe.lora is not None and setup.base is not None and name == "best":
        storage.replace_folder(setup.folder / ADAPTER_FOLDER, peft_files(weights, setup.recipe.lora, setup.base.run))


def best_name(setup: Setup, stage: StageSetup) -> str:
    return "best" if stage is setup.stages[-1] else f"best-{stage.name}"


def end_stage(setup: Setup, stage: StageSetup, progress: Progress) -> None:
    """Put the final weights of a stage into the model and its `best` folder.

    The newest checkpoint still holds the end of the stage: a resumed run returns here, or continues if the end has
    moved.
    """
    if stage.keeps_best:
        if progress.best is not None:
            with setup.group.together():
                _put(setup, checkpoint.load(setup.folder / CHECKPOINTS / best_name(setup, stage), checkpoint.WEIGHTS))
    else:
        save_best(setup, progress)


def _state(setup: Setup, progress: Progress, weights: dict[str, Tensor]) -> checkpoint.State:
    tensors = checkpoint.model_tensors(weights)
    values = {
        "progress": progress.to_values(),
        "data": setup.data.fingerprint(),
        "files": dict(setup.data.table.file_hashes),
        "environment": {key: setup.environment[key] for key in DECIDE_BITS},
        "update_rule": UPDATE_RULE,
        OF_RUN: setup.run_id,
    }
    if setup.parallelism.holders > 1:
        values[SHARDED_AMONG] = setup.parallelism.holders
    if setup.base is not None:
        values[KEY] = asdict(setup.base)
    return checkpoint.State(progress.step, tensors, values)


def _put(setup: Setup, state: checkpoint.State) -> None:
    put_weights(setup.model, checkpoint.model_weights(state.tensors), str(setup.folder))


def write_run_files(setup: Setup, recipe: str, overrides: Sequence[str]) -> None:
    """Write the recipe, the command with the run's precision, and the data's files into the run directory."""
    if not setup.group.leads:
        return
    for file, content in setup.data.files.items():
        storage.write_atomic(setup.folder / file, content)
    for file, content in setup.data.secrets.items():
        storage.write_atomic(setup.folder / file, content, private=True)
    command = {"recipe": recipe, "overrides": list(map(masked, overrides)), "precision": setup.precision}
    command |= {RUN_ID: setup.run_id, "folder": str(Path.cwd())}
    storage.write_atomic(setup.folder / COMMAND, json.dumps(command, ensure_ascii=False, indent=1) + "\n")
    storage.write_atomic(setup.folder / RECIPE, setup.recipe.to_yaml())


# --------------------------------------------------------------------------- resume


def restore(setup: Setup) -> tuple[Progress, checkpoint.State | None, list[str]]:
    """Load the newest valid checkpoint.

    Returns:
        Progress of the run, its checkpoint (None if it stopped before its first), and warnings.

    Raises:
        ResumeError: the data, or the base of the adapters, changed since the run began.
        UnlikeProcessesError: the processes find different checkpoints.
        CheckpointError: no checkpoint is valid.
    """
    with setup.group.together() as talk:
        restored = _restore(setup)
        talk.own = restored[1] and restored[1].step
    if len(set(talk.told)) > 1:
        steps = ", ".join("none" if step is None else str(step) for step in talk.told)
        what = f"the processes read different checkpoints, of the steps {steps}"
        raise UnlikeProcessesError(what, where=str(setup.folder), fix="give every host the same run directory")
    if restored[1] is not None:
        _mend_best(setup, restored[0])
        with setup.group.together():
            if setup.group.leads:  # a run that ended right after its last save has not deleted the one before
                checkpoint.remove_old(setup.folder / CHECKPOINTS, restored[0].step, setup.recipe.checkpoint.keep)
    return restored


def _restore(setup: Setup) -> tuple[Progress, checkpoint.State | None, list[str]]:
    loaded = checkpoint.load_newest(setup.folder / CHECKPOINTS, setup.parallelism.held(setup.model))
    if loaded is None:
        return Progress(), None, []
    state, warnings = loaded
    check_values(state, f"{setup.folder / CHECKPOINTS}, step {state.step}")
    refuse_changes(setup, state)
    for key, value in state.values["environment"].items():
        if setup.environment.get(key) != value:
            warnings.append(
                f"{key} is {setup.environment.get(key)}, was {value}: the run continues, and its bits may differ"
            )
    if state.values["update_rule"] != UPDATE_RULE:
        warnings.append(f"{OTHER_DRAWS}: dropout and other noise differ from here on")
    were, are = state.values.get(SHARDED_AMONG, 1), setup.parallelism.holders
    if were != are:
        warnings.append(
            f"the model is divided among {are} process{'es' * (are > 1)}, was among {were}: the run continues, and its "
            "bits differ from those of one that goes on as it was"
        )
    _put(setup, state)
    return Progress.from_values(state.values["progress"]), state, warnings


def refuse_changes(setup: Setup, state: checkpoint.State) -> None:
    """Refuse data, or a base of adapters, that differs from the checkpoint's.

    Raises:
        ResumeError: names the files that changed.
    """
    refuse_changed_data(setup.data, state, setup.folder)
    if setup.base is not None and state.values[KEY]["sha256"] != setup.base.sha256:
        what = f"the weights of {setup.recipe.train.init_from} are not those that the adapters were trained on"
        raise ResumeError(what, where=str(setup.folder), fix="put that run's weights back, or start a new run")


def refuse_changed_data(data: Data, state: checkpoint.State, folder: Path) -> None:
    """Refuse data that differs from that of a checkpoint of the run in `folder`.

    Raises:
        ResumeError: names the files that changed.
    """
    if state.values["data"] != data.fingerprint():
        changed = _changed_files(state.values["files"], dict(data.table.file_hashes))
        what = f"the data changed since the run began: {changed}"
        raise ResumeError(what, where=str(folder), fix="put the files back, or start a new run with train.init_from")


def _mend_best(setup: Setup, progress: Progress) -> None:
    """Make `best` agree with the checkpoint that is now loaded.

    The best weights are written right after the checkpoint of the same step, and a kill may fall between the two. If a
    stage ends with its last weights, `best` is the end of a run that now continues.
    """
    current, last = setup.stages[min(progress.stage, len(setup.stages) - 1)], setup.stages[-1]
    if current.keeps_best and progress.best is not None and progress.best_step == progress.step:
        save_best(setup, progress)
    best = setup.folder / CHECKPOINTS / "best"
    with setup.group.together():
        if setup.group.leads and best.exists() and not last.keeps_best:
            storage.remove_folder(best)


def _changed_files(old: dict[str, str], new: dict[str, str]) -> str:
    """Files with changed content, with both hashes; files that were only moved are left out."""
    changed = []
    for path in sorted(old.keys() | new.keys()):
        was, now = old.get(path), new.get(path)
        if was != now and not (was is None and now in old.values()) and not (now is None and was in new.values()):
            hashes = [*([f"{was[:12]} in the run"] if was else []), *([f"{now[:12]} now"] if now else [])]
            changed.append(f"{path} (sha256 {', '.join(hashes)})")
    return ", ".join(changed[:5]) or "the split or the encoding differs"


ENDS = ("max_steps", "max_epochs", "min_steps")


def resumed_recipe(recipe: str | None, overrides: Sequence[str], folder: Path) -> tuple[list[str], Recipe, Recipe]:
    """Combine the overrides of the command that started the run with new ones, which come last.

    Args:
        recipe: named by the command; None for the run's saved recipe.

    Returns:
        Overrides, their resolved recipe, and the recipe that the run saved.

    Raises:
        ResumeError: a changed field is fixed during a run, or the run was not trained but derived from another.
    """
    command = read_command(folder)
    if made_by := command.get(MADE_BY):
        refuse_training(read_quantized(checkpoint.newest_weights(folder)[1], folder), folder)
        fix = f"start a new run from its weights: train.init_from={folder}"
        raise ResumeError(f'"{made_by}" made this run, which has no training to continue', where=str(folder), fix=fix)
    saved = resolved(run_recipe(folder))
    fields = {override.partition("=")[0] for override in overrides}
    began = [o for o in command["overrides"] if o.partition("=")[0] not in fields]
    kept = resolved(run_recipe(folder, overrides))
    # A packaged recipe may have been another in the version that began the run.
    if recipe is None or (recipe == command["recipe"] and recipe in recipe_names() and kept.data == saved.data):
        return [*began, *overrides], _refuse_changes(kept, saved, folder), saved
    with kept_paths():
        settings = _same_rule(resolved(open_recipe(recipe, overrides, began=began, known=saved)), saved)
        if settings.data != saved.data:  # the run may have kept packaged sources beside given ones
            with_packaged = resolved(open_recipe(recipe, overrides, began=began, keep_packaged=True, known=saved))
            with_packaged = _same_rule(with_packaged, saved)
            settings = with_packaged if with_packaged.data == saved.data else settings
    return [*began, *overrides], _refuse_changes(settings, saved, folder), saved


def _refuse_changes(settings: Recipe, saved: Recipe, folder: Path) -> Recipe:
    """The settings of a run that continues, if they may replace the saved ones."""
    changed = differences(saved, settings)
    refused = {key: values for key, values in changed.items() if not may_change_on_resume(key)}
    if refused:
        listing = "; ".join(f"{key}: {old!r} in the run, {new!r} now" for key, (old, new) in refused.items())
        raise ResumeError(listing, where=str(folder), fix="undo these changes, or start a new run with train.init_from")
    return settings


def recorded_precision(folder: Path) -> Precision | None:
    """Precision in which a run was begun; None if neither its command nor its log says."""
    recorded = read_command(folder)["precision"]
    if recorded is None:
        with suppress(SourceError):  # it ended before its log, or the log is damaged
            recorded = upgrade.precision(read_log(folder))
    return recorded if isinstance(recorded, str) and recorded in DTYPES else None


def _same_rule(settings: Recipe, saved: Recipe) -> Recipe:
    """Split by the rule of the run, unless the command names one; auto, or what the data decides, is as in the run."""
    settings = with_size(settings, saved.plan.tokens_per_micro)
    decided = {name: saved.model[name] for name in model_config(saved.model).decided if settings.model[name] is None}
    settings = settings.model_copy(update={"model": settings.model | decided})
    labels, began = settings.events.labels, saved.events.labels
    if labels is not None and began is not None and labels.censored == "auto":
        labels = labels.model_copy(update={"censored": began.censored})
        settings = settings.model_copy(update={"events": settings.events.model_copy(update={"labels": labels})})
    if "split_version" in settings.data.model_fields_set:
        return settings
    rule = {"split_version": saved.data.split_version}
    return settings.model_copy(update={"data": settings.data.model_copy(update=rule)})


def describe_changes(setup: Setup, saved: Recipe, progress: Progress) -> list[str]:
    """One line per field that changed since the run saved its recipe, with the effect of the change.

    Args:
        progress: progress in the checkpoint that the run resumes from.
    """
    changed = differences(saved, setup.recipe)
    left = [stage.recipe.optim for stage in setup.stages[progress.stage :]]
    by_length = any(o.schedule in ("cosine", "restarts") or (o.schedule == "warmup" and o.warmup > 0) for o in left)
    lines = []
    for key, (old, new) in changed.items():
        section, _, rest = key.partition(".")
        if section == "stages" and int(rest.partition(".")[0]) < progress.stage:
            effect = ": that stage is over, so nothing changes"
        else:
            effect = ": schedule recomputed" if by_length and key.endswith(ENDS) else ""
        lines.append(f"{key} is {_told(new)}, was {_told(old)}{effect}")
    return lines


def _told(value: Any) -> Any:
    return "not set" if value is None else value
