"""Set-up of a run before its first step: data, model, stages, device and precision."""

import os
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unpad.data.family import DECLARE, Cause, Data, check_near_duplicates, not_held_out, notes, open_data, source_lines
from unpad.errors import PlanError, RecipeError, needs_memory
from unpad.interchange.origin import starting_files
from unpad.machine import processor_name
from unpad.models import build_model, lower_sizes, model_config
from unpad.models.adapters import adapt, adapter_names, lower_base
from unpad.models.contract import Model
from unpad.models.objective import set_objective
from unpad.nn.block import compile_blocks, recompute_blocks
from unpad.nn.kernel import HALF, runs_native
from unpad.nn.native import library
from unpad.nn.precision import DTYPES, Precision, computing_device
from unpad.nn.product_speed import choose_precision
from unpad.processes.group import ALONE, Group
from unpad.recipes.recipe import LOW_POWER, Recipe, ResolvedStage, stages_of
from unpad.recipes.training import LoraSettings
from unpad.run.base import Base, fingerprint, start_weights
from unpad.run.checkpoint import put_weights
from unpad.run.timers import Timers
from unpad.storage import cache_folder
from unpad.terminal.table import number_of
from unpad.training.auto_size import AutoSize, asks, resolved_size
from unpad.training.memory import choose_allocator
from unpad.training.optim import Schedule, freeze, make_optimizer
from unpad.training.parallel.divisions import parallelism_of
from unpad.training.parallel.parallelism import ONE_PROCESS, Parallelism, Replicas
from unpad.training.stage import StageSetup, last_step, length_lines, make_stage, stage_epochs
from unpad.training.step import OPTIMIZER_FIX


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same during a run."""

    recipe: Recipe
    folder: Path
    stages: list[StageSetup]
    data: Data
    model: Model
    device: torch.device
    precision: str
    environment: dict[str, Any]
    base: Base | None = None  # of the model's adapters
    parallelism: Parallelism = ONE_PROCESS
    auto: AutoSize | None = None  # the size of micro-batches that was found for `auto`
    run_id: str = ""  # of the run that is trained

    @property
    def group(self) -> Group:
        """The processes that train."""
        return self.parallelism.group


def prepare_setup(
    recipe: Recipe,
    folder: Path,
    files: dict[str, bytes] | None,
    timers: Timers | None = None,
    *,
    compare: bool = True,
    recorded: Precision | None = None,
    group: Group = ALONE,
) -> Setup:
    """Read the data and build the model, without writing to the run directory.

    Args:
        files: files of its data that the run kept when it started; None for a new run.
        timers: measure the seconds of reading and building.
        compare: whether held-out data is compared with training data; see `open_data`.
        recorded: precision in which a continued run began; see `choose_precision`.
        group: the processes that train; one of each host builds caches, which the others find.
    """
    timers = timers or Timers()
    config = model_config(recipe.model)
    for stage in stages_of(recipe):
        _check_lengths_given(stage)
        if files is None:
            _check_low_power(stage.recipe)
    low_power = recipe.profile == "low_power"
    torch.set_num_threads(1 if low_power else recipe.train.threads or torch.get_num_threads())
    device = computing_device()
    asked: str = "fp32" if low_power else recipe.precision
    # By measurement, which may come out differently in every process.
    precision, reason = group.of_leader(lambda: choose_precision(asked, device, recorded))
    may_keep = device.type == "cpu" and not low_power
    allocator, allocator_reason = choose_allocator(recipe.train.allocator, may_keep=may_keep)
    is_new = files is None
    if recipe.train.init_from and files is None:
        files = starting_files(recipe, recipe.train.init_from)
    with timers("read"):
        # One process reports the findings of the comparison; all refuse.
        data = group.first_of_host_first(lambda: open_data(recipe, files, compare=compare and group.leads))
    if is_new:  # runs of earlier versions may name a rule that they did not follow
        check_near_duplicates(recipe, data)
        config = data.complete(config)
        recipe = recipe.model_copy(update={"model": config.model_dump(mode="json")})
    torch.manual_seed(recipe.train.seed)
    with timers("build"):
        model = build_model(config, data.num_outputs)
        data.initialize(model)
        if not recipe.train.init_from:
            data.begin(model)
        base = None if recipe.lora is None else _adapt(model, recipe, recipe.lora, precision)
        with needs_memory("the model", lower_sizes(config)):
            # A model that is divided goes to the device block by block.
            model = model.to(device if parallelism_of(recipe, group).replicates else "cpu")
    environment = {
        "version": version("unpad"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "precision": precision,
        "precision_reason": reason,
        "matmul": "oneDNN" if torch.backends.mkldnn.is_available() else "plain",
        "blas": _blas(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_name(),
        "kernels": _kernels(device, precision, model.head_dim or 0),
        "allocator": allocator,
        "allocator_reason": allocator_reason,
    }
    stages = stages_of(recipe)
    resolved_stages, auto = [make_stage(stage, data, config.longest) for stage in stages], None
    if asks(recipe):
        with timers("plan"):
            recipe, resolved_stages, auto = resolved_size(recipe, resolved_stages, model, device, precision, group)
    return Setup(
        recipe, folder, resolved_stages, data, model, device, precision, environment, base, Replicas(group), auto
    )


APPLE_GPU = "Apple's GPU is not used: MPS has no fp64, in which rotary angles are computed, and nothing was tried there"


def divide(setup: Setup) -> Setup:
    """Divide the model among the processes as the recipe says: collective.

    Raises:
        RecipeError: a stage cannot train a divided model.
    """
    division = parallelism_of(setup.recipe, setup.group)
    half = setup.device.type == "cuda" and setup.precision == "bf16"
    model, parallelism = division.divide(setup.recipe, setup.model, setup.stages, setup.group, setup.device, half)
    if setup.recipe.train.checkpoint_blocks:
        recompute_blocks(model)
    if compiles(setup.recipe, setup.device, setup.precision):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))  # a resume reads them again
        compile_blocks(model)
    return replace(setup, model=model, parallelism=parallelism)


def compiles(recipe: Recipe, device: torch.device, precision: str) -> bool:
    """Whether blocks are compiled: where attention is one kernel, and no loop over groups of other sizes each time."""
    return recipe.train.compile == "auto" and device.type == "cuda" and DTYPES[precision] in HALF


def _check_low_power(recipe: Recipe) -> None:
    """Refuse settings of a new run, or of a stage, that contradict its profile.

    Raises:
        RecipeError: names the field.
    """
    if recipe.profile != "low_power":
        return
    plan, rows = recipe.plan, f"set it to at most {LOW_POWER}"
    wrong = {
        "precision": (recipe.precision not in ("auto", "fp32"), recipe.precision, "leave it out"),
        "train.threads": (recipe.train.threads not in (None, 1), recipe.train.threads, "leave it out"),
        "plan.strategy": (plan.strategy in ("fixed", "dynamic", "bucket"), plan.strategy, "use pack, budget or rows"),
        "plan.row_tokens": (plan.strategy == "rows" and plan.row_tokens > LOW_POWER, plan.row_tokens, rows),
    }
    for name, (is_wrong, value, fix) in wrong.items():
        if is_wrong:
            what = f"profile=low_power has fp32, one thread and {LOW_POWER} tokens at a time, not {name}={value}"
            raise RecipeError(what, where=name, fix=f"{fix}, or leave out profile=low_power")


def _adapt(model: Model, recipe: Recipe, settings: LoraSettings, precision: Precision) -> Base:
    """Load the weights of the run that the recipe starts from, and add adapters to the model."""
    folder, weights = start_weights(recipe)
    put_weights(model, weights, str(folder))
    adapt(model, settings)
    lowered = lower_base(model, DTYPES[precision])
    return Base(str(folder.resolve()), fingerprint(weights), settings.scaling, precision, lowered)


def _kernels(device: torch.device, precision: str, head_dim: int) -> str:
    """Name the kernels that training will run, with the reason if they are not the native ones."""
    if device.type != "cpu":
        return "torch kernels"
    dtype = DTYPES[precision]
    if library.enabled() and not library.computes(dtype):
        return f"torch kernels (native ones here do not compute in {precision})"
    attention = library.enabled() and head_dim > 0 and not runs_native(dtype, device, head_dim)
    return library.describe() + (f", attention through torch for heads of {head_dim}" if attention else "")


def _blas() -> str:
    config = torch.__config__.show()
    names = ("MKL", "OpenBLAS", "Accelerate")
    return next((name for name in names if f"BLAS_INFO={name.lower()}" in config), "built in")


def resolved(recipe: Recipe) -> Recipe:
    """Write out every field of a recipe's model section, so that a run keeps it when a default changes.

    Raises:
        RecipeError: the model section does not fit.
    """
    return recipe.model_copy(update={"model": model_config(recipe.model).model_dump(mode="json")})


def check_stages(setup: Setup) -> None:
    """Check all stages, so that none is refused after hours of training.

    Raises:
        RecipeError: freezing, losses, parameter groups, schedule or patience of a stage are invalid.
        PlanError: the plan of a stage has no step.
        SourceError: the data has almost nothing to learn from.
    """
    setup.data.check_trainable()
    check_patience(setup)
    before = 0
    for stage in setup.stages:
        recipe = stage.recipe
        if stage.train_ids.size == 0 or recipe.train.max_epochs == 0:
            continue
        field = partial(setup.recipe.field_of, stage.name)
        freeze(setup.model, recipe.train.freeze)
        set_objective(setup.model, recipe, of_pairs=stage.of_pairs)
        if stage.of_pairs and recipe.train.label_smoothing >= 0.5:
            raise RecipeError(
                "half of the pairs or more would be labelled the wrong way round, so that nothing is preferred",
                where="train.label_smoothing",
                fix=f"set {field('train.label_smoothing')} below 0.5",
            )
        if stage.of_pairs and recipe.train.init_from is None and before == 0:
            raise RecipeError(
                f"stage {stage.name} compares replies under the weights it starts from, and these are random",
                where="model.from",
                fix="name a model that has learned to answer, model.from=RUN, or add a stage before it",
            )
        with needs_memory("the optimizer", OPTIMIZER_FIX):
            make_optimizer(setup.model, recipe.optim)
        epochs = stage_epochs(stage)
        if 0 in epochs.steps:
            fix = f"lower {field('plan.tokens_per_step')}, or set {field('plan.drop_last')}=false and "
            fix += f"{field('plan.overflow')}=split"
            begin = epochs.first[epochs.steps.index(0)]
            what = f"stage {stage.name} has no step" + (f" from epoch {begin + 1} on" if begin else "")
            raise PlanError(f"{what}: the plan drops every token", where="plan", fix=fix)
        last = last_step(stage, before, epochs)
        if last > before:
            Schedule(recipe.optim, epochs, last - before).check()
        before = max(last, before)


def check_patience(setup: Setup) -> None:
    """Refuse a stage with early stopping but without held-out data.

    Raises:
        RecipeError: names the cause first.
    """
    for stage in setup.stages:
        train = stage.recipe.train
        trains = stage.train_ids.size and train.max_epochs != 0
        if trains and train.patience is not None and stage.held_out_ids.size == 0:
            raise _nothing_to_stop_by(setup, stage)


def _nothing_to_stop_by(setup: Setup, stage: StageSetup) -> RecipeError:
    """Error of a stage with early stopping but without held-out data; names the cause first."""
    causes = {kind: cause for kind in setup.data.kinds if (cause := not_held_out(setup.recipe, setup.data, kind))}
    kind, cause = next(iter(causes.items()), ("", Cause(f"nothing is held out of stage {stage.name}", DECLARE)))
    where = f"data.{kind}" if kind else f"stage {stage.name}"
    patience = setup.recipe.field_of(stage.name, "train.patience")
    return RecipeError(cause.what, where=where, fix=f"{cause.fix}; or {patience}=null, to go on to the last epoch")


def _check_lengths_given(stage: ResolvedStage) -> None:
    recipe = stage.recipe
    if recipe.train.max_epochs is None and recipe.train.max_steps is None:
        raise RecipeError(
            f"stage {stage.name} has no end", where="train.max_epochs", fix="set train.max_epochs or train.max_steps"
        )


def describe(setup: Setup, *, verbose: bool = False) -> list[str]:
    """Describe a run before it starts: its files and data, and its choices with their reasons.

    Args:
        verbose: also how the process handles freed memory.
    """
    environment, threads = setup.environment, setup.environment["threads"]
    processes = f"{setup.group.size} processes of " if setup.group.size > 1 else ""
    parameters = sum(p.numel() for p in setup.model.parameters())
    weights, adapters = "weights and optimizer in fp32", list[str]()
    fitted = [f"{key}={value}" for key, value in setup.recipe.fitted().items()]
    if setup.base is not None:
        num = sum(setup.model.get_parameter(name).numel() for name in adapter_names(setup.model))
        share = f"{num:,} parameters, {num / parameters:.1%}"
        adapters = [f"adapters on the weights of {setup.recipe.train.init_from}: {share}"]
        weights = f"its base in {setup.base.precision}, adapters and optimizer in fp32"
    return [
        *source_lines(setup.recipe),
        *setup.data.lines(),
        *notes(setup.recipe, setup.data),
        f"model {setup.recipe.model.get('preset') or setup.recipe.model['kind']}: {parameters:,} parameters, "
        f"{setup.data.describe_outputs()}, context {setup.model.config.longest}",
        *([f"for text below {min(setup.recipe.by_size):,} kB: {' '.join(fitted)}"] if fitted else []),
        *adapters,
        *setup.parallelism.describe(),
        *length_lines(setup.stages, setup.recipe.field_of),
        f"computing in {environment['precision']} ({environment['precision_reason']}), {weights}; "
        f"{environment['device']}, {processes}{number_of(threads, 'threads')}, "
        f"{environment['matmul']} and {environment['blas']}, "
        f"{environment['kernels']}",
        *([APPLE_GPU] if torch.backends.mps.is_available() else []),
        *([f"freed memory: {environment['allocator']} ({environment['allocator_reason']})"] if verbose else []),
    ]
