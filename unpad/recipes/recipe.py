"""Recipe: everything that a run depends on, and the differences between two recipes.

`data.py` has the sections on what is read, `training.py` those on what is done with it. Every field has a default, so a
recipe states only what it changes. The `model` section is validated by the model's own file (`models/<kind>.py`), which
alone knows its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from unpad.recipes import training
from unpad.recipes.data import DataSections, Kind
from unpad.recipes.lines import to_yaml
from unpad.recipes.section import Fault, FaultError, Section, first_fault, kept_paths

STAGE_TRAIN_KEYS = {
    "max_epochs", "min_steps", "label_smoothing", "beta", "freeze", "eval_every", "patience", "min_delta",
    "grad_norm_warning", "weights",
}  # fmt: skip

# Sections that a stage may change, and their fields that belong to the whole run.
STAGE_SECTIONS = ("plan", "optim", "losses", "train")
SETTINGS: dict[str, type[Section]] = {
    "plan": training.PlanSettings, "optim": training.OptimSettings, "train": training.TrainSettings,
}  # fmt: skip
RUN_ONLY = {"plan": {"cross_documents"}, "train": set(training.TrainSettings.model_fields) - STAGE_TRAIN_KEYS}


def stage_fields(section: str) -> list[str]:
    """Fields of one of `STAGE_SECTIONS` that a stage may set; none for losses, where the model names the terms."""
    settings = SETTINGS.get(section)
    return [name for name in settings.model_fields if name not in RUN_ONLY.get(section, ())] if settings else []


Model = Annotated[
    dict[str, Any], AfterValidator(lambda section: section if "from" in section else {"kind": "decoder", **section})
]


class Stage(Section):
    """One stage of a run: the data it uses, and its changes of plan, optim, losses and train."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Name of the stage in overrides and messages."""
    use: list[Kind] | None = None
    """Kinds of the run's data that the stage uses; default all."""
    plan: dict[str, Any] = Field({})
    """Fields of `plan` that the stage changes."""
    optim: dict[str, Any] = Field({})
    """Fields of `optim` that the stage changes."""
    losses: dict[str, training.Weight] = Field({})
    """Weights of `losses` that the stage changes."""
    train: dict[str, Any] = Field({})
    """Fields of `train` that the stage changes."""

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Fields that the stage sets, by section."""
        return {"plan": self.plan, "optim": self.optim, "losses": dict(self.losses), "train": self.train}


LOW_POWER = 512  # most tokens of a micro-batch of `profile=low_power`


class Recipe(DataSections):
    """Everything that a run depends on."""

    model: Model = Field({"kind": "decoder"})
    """`kind` names the file in models/, which defines the other fields; `from` names a run or a Hugging Face folder
    that section, weights and tokenizer come from, and other fields replace those of its section; null: that of
    train.init_from."""
    lora: training.LoraSettings | None = None
    """Adapters to train in place of the model's weights, which are those of train.init_from."""
    plan: training.PlanSettings = training.PlanSettings()
    optim: training.OptimSettings = training.OptimSettings()
    losses: dict[str, training.Weight] = Field({})
    """Weight of each loss term of the model, or a ramp; default: the model's own."""
    stages: list[Stage] = Field([])
    """Stages in order; if empty, the whole run is one stage."""
    train: training.TrainSettings = training.TrainSettings()
    collapse: training.CollapseSettings = training.CollapseSettings()
    checkpoint: training.CheckpointSettings = training.CheckpointSettings()
    log: training.LogSettings = training.LogSettings()
    generate: training.GenerateSettings = training.GenerateSettings()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of matrix products; auto: the faster of bf16 and fp32, by a measurement on processors."""
    by_size: dict[Annotated[int, Field(ge=1)], dict[str, Any]] = Field({})
    """Settings in place of the recipe's for less text, by the kB of its files below which they hold: {1500:
    {model.width: 128}}; smaller sizes and overrides come after."""
    profile: Literal["standard", "low_power"] = "standard"
    """low_power, for small machines: one thread, fp32, 512 tokens at a time or one longer sequence."""

    def plain(self) -> Recipe:
        """The same recipe without augmentation, as models are measured."""
        augment = self.augment.model_copy(update={"multiplier": 0})
        return self.model_copy(update={"images": self.images.plain(), "augment": augment})

    @model_validator(mode="after")
    def _blocks_can_be_computed_again(self) -> Recipe:
        if self.train.checkpoint_blocks and self.lora is not None and self.lora.dropout:
            what = "train.checkpoint_blocks computes blocks again, and lora.dropout would draw anew"
            raise FaultError(Fault(("lora", "dropout"), what, fix="set one of them only"))
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages share a name: {names}")
        for index, stage in enumerate(self.stages):
            for section, changes in stage.changes.items():
                for key in sorted(RUN_ONLY.get(section, set()) & changes.keys()):
                    what = f"stage {stage.name}: {section}.{key} belongs to the whole run, not to a stage"
                    raise FaultError(Fault(("stages", index, section, key), what, fix="set it outside of stages"))
            try:
                self._merged(stage)
            except ValidationError as error:
                section = next(name for name, settings in SETTINGS.items() if settings.__name__ == error.title)
                fault = first_fault(error)
                raise FaultError(replace(fault, path=("stages", index, section, *fault.path))) from None
        return self

    def field_of(self, stage: str, name: str) -> str:
        """Name of a field in an override for one stage: the stage's own field if the stage sets it."""
        section, _, key = name.partition(".")
        own = next((one for one in self.stages if one.name == stage), None)
        return f"stages.{stage}.{name}" if own is not None and key in own.changes.get(section, {}) else name

    def for_stage(self, stage: Stage) -> Recipe:
        """Merge the stage's fields of plan, optim, losses and train into a copy of this recipe without stages.

        `train.max_epochs` of the run limits every stage: the smaller of the two applies.
        """
        with kept_paths():  # the fields were checked as the recipe was read
            return self._merged(stage)

    def _merged(self, stage: Stage) -> Recipe:
        train = training.TrainSettings(**{**self.train.model_dump(), **stage.train})
        limits = [epochs for epochs in (self.train.max_epochs, train.max_epochs) if epochs is not None]
        plan = training.PlanSettings(**{**self.plan.model_dump(), **stage.plan})
        if self.profile == "low_power":
            tokens = plan.tokens_per_micro
            plan = plan.model_copy(
                update={"tokens_per_micro": LOW_POWER if tokens == training.AUTO else min(tokens, LOW_POWER)}
            )
        return self.model_copy(
            update={
                "plan": plan,
                "optim": training.OptimSettings(**{**self.optim.model_dump(), **stage.optim}),
                "losses": {**self.losses, **stage.losses},
                "train": train.model_copy(update={"max_epochs": min(limits, default=None)}),
                "stages": [],
            }
        )

    def fitted(self) -> dict[str, Any]:
        """The settings that the size of the text chose, by `by_size`, where no override took their place."""
        chosen: dict[str, Any] = {key: value for settings in self.by_size.values() for key, value in settings.items()}
        values = _flatten(self.model_dump(mode="json"))
        return {key: value for key, value in chosen.items() if values.get(key) == value}

    def to_yaml(self) -> str:
        return to_yaml(self.model_dump(mode="json"))


@dataclass(frozen=True)
class ResolvedStage:
    """A stage with its recipe: the run's recipe with the stage's own fields. `use` is None for all data."""

    name: str
    use: tuple[str, ...] | None
    recipe: Recipe

    @property
    def of_pairs(self) -> bool:
        """True if the stage learns from pairs of replies, which it then uses alone."""
        return bool(self.recipe.data.pairs) and (self.use is None or "pairs" in self.use)


def stages_of(recipe: Recipe) -> list[ResolvedStage]:
    """Resolve the stages of a recipe; a recipe without stages is one stage named "train"."""
    return [
        ResolvedStage(stage.name, tuple(stage.use) if stage.use else None, recipe.for_stage(stage))
        for stage in recipe.stages or [Stage(name="train")]
    ]


RESUMABLE = (
    "train.max_steps", "train.max_epochs", "train.max_minutes", "train.min_steps", "train.log_every",
    "train.eval_every", "train.grad_norm_warning", "train.allocator", "train.threads", "train.sums", "train.shard",
    "train.timeout", "images.cache_mib", "collapse.policy", "checkpoint.every", "checkpoint.every_seconds",
    "checkpoint.keep", "log", "generate",
)  # fmt: skip
STAGE_RESUMABLE = ("max_epochs", "min_steps", "eval_every", "grad_norm_warning")


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} of every field that differs."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def may_change_on_resume(key: str) -> bool:
    """True if a resumed run accepts a changed value of the dotted key."""
    parts = key.split(".")
    if parts[0] == "stages":
        return len(parts) == 4 and parts[2] == "train" and parts[3] in STAGE_RESUMABLE
    return key in RESUMABLE or parts[0] in RESUMABLE


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = {str(i): item for i, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in _flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()}
