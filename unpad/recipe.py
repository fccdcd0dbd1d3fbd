"""Recipe: everything a run depends on. Load, override, validate, save.

A recipe is a YAML file of the sections below. `key.sub=value` on the command line overrides one field, and every field
has a default, so a recipe states only what it changes. Model sections are validated by the model's own file
(`models/<kind>.py`), because only that file knows its sizes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from unpad.errors import RecipeError, nearest

PACKAGE = Path(__file__).parent
RECIPES = PACKAGE / "recipes"
MAX_RECIPE_BYTES = 1 << 20
KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
NUMBER_TAG = "tag:yaml.org,2002:int"
MAX_YAML_NODES = 20_000  # an alias bomb of 300 bytes expands to millions


SectionType = TypeVar("SectionType", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# --------------------------------------------------------------------------- data


class Source(Section):
    """Files to read: a file, a folder or a glob, and how often to draw from it."""

    path: str
    weight: float = Field(1.0, gt=0, description="Epochs of this source per epoch of the run; 0.5 draws half of it.")
    format: Literal["auto", "text", "json", "jsonl", "parquet"] = "auto"
    field: str | None = Field(None, description="Field or column that holds the text; default `text` or `messages`.")


def _as_sources(value: Any) -> Any:
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


Sources = Annotated[list[Source], BeforeValidator(_as_sources)]


class EventSource(Section):
    """A table of events of patients, or several of one kind: a file, a folder or a glob; and what its columns mean.

    Names of columns that are `auto` are those of the layout: `id, time, code, value`; of MEDS `subject_id, time, code,
    numeric_value`; of files of one patient each, named by its id, `minute, variable, value`.
    """

    path: str
    layout: Literal["auto", "table", "patients", "meds"] = Field(
        "auto", description="auto: meds where its columns are, patients where there is none for the id, else table."
    )
    id: str = "auto"
    time: str = "auto"
    code: str = "auto"
    value: str | None = Field("auto", description="null: events of this table have no value, as diagnoses.")
    set: str | None = Field("auto", description="Number of the set of an event; auto: set_index where there is one.")
    static: list[str] = Field(
        [], description="Columns of a table with one row per patient; they become the patient's first set."
    )
    unit: Literal["auto", "minutes", "hours", "days", "timestamp"] = Field(
        "auto", description="Of the time; auto: by the name of the column, or by its type."
    )
    negative: Literal["auto", "allow", "error"] = Field(
        "auto", description="Times below 0; auto: a fault in files of one patient each, which count from admission."
    )


class EventLabels(Section):
    """A table with one row per patient that says what is to be predicted: `label`, or `event` and `duration`."""

    path: str
    id: str = "auto"
    label: str | None = Field(None, description="Column of 0 and 1.")
    time: str | None = Field(None, description="Column: when the label was known; events after it are refused.")
    event: str | None = Field(None, description="Column of 0 and 1: whether observation ended with the event.")
    duration: str | None = Field(None, description="Column: when observation ended, on the clock of the events.")
    horizon: float | None = Field(
        None, gt=0, description="Time from the landmark within which the event makes the label 1."
    )
    censored: Literal["exclude", "keep"] = Field(
        "exclude", description="Patients whose observation ended before the horizon; keep: without a label."
    )
    missing: Literal["error", "exclude", "keep"] = Field(
        "error", description="Patients who have events and no label; keep: without one."
    )

    @model_validator(mode="after")
    def _one_way(self) -> EventLabels:
        if (self.event is None) != (self.duration is None):
            raise ValueError("event and duration go together")
        if (self.label is None) == (self.event is None):
            raise ValueError("give either label, or event and duration")
        if self.horizon is not None and self.event is None:
            raise ValueError("a horizon goes with event and duration")
        if self.time is not None and self.label is None:
            raise ValueError("time goes with label; duration says when the event was")
        return self


class EventSettings(Section):
    """How events of patients become histories, and what is predicted from them."""

    labels: EventLabels | None = None
    landmark: float | str | None = Field(
        None,
        description="Where the prediction is made: a time, or a column of the table of labels; events after it are not "
        "read. null: the last event of each patient.",
    )
    unit: Literal["auto", "minutes", "hours", "days"] = Field(
        "auto", description="Of landmark, horizon, duration and window; auto: that of the events, days of timestamps."
    )
    split: str | None = Field(
        None, description="Table of id and split: train, holdout or test. Who is not in it takes no part."
    )
    window: float | None = Field(
        None, gt=0, description="Events of one window of this length form a set; null: events of one time."
    )
    duplicates: Literal["drop", "keep", "error"] = Field("drop", description="Events that are equal in everything.")
    unsorted: Literal["sort", "error"] = Field("sort", description="Rows of a patient that go back in time.")
    unknown_codes: Literal["unknown", "skip", "error"] = Field(
        "unknown", description="Codes that training patients do not have, or seldom; unknown: one code for all."
    )
    min_count: int = Field(1, ge=1, description="Codes that occur less often in training are unknown.")
    std_floor: float = Field(1e-3, gt=0, description="Smallest standard deviation of a code, as a share of its mean.")
    code_embeddings: str | None = Field(None, description="Table of vectors: a column Key, the others numbers.")
    max_events: int | None = Field(
        None, ge=1, description="Most events of a patient; whole sets are left out and counted. null keeps all."
    )
    keep: Literal["latest", "earliest"] = Field("latest", description="Which sets stay under max_events.")

    @model_validator(mode="after")
    def _fits(self) -> EventSettings:
        if isinstance(self.landmark, str) and self.labels is None:
            raise ValueError("a landmark that is a column needs labels, whose table has it")
        if self.labels is not None and self.labels.horizon is not None and self.landmark is None:
            raise ValueError("a horizon counts from a landmark; set events.landmark")
        return self


class Template(Section):
    """How a conversation becomes one text: a prefix per role, a separator between messages, EOS after each reply."""

    system: str = "系统："
    user: str = "用户："
    assistant: str = "助手："
    separator: str = ""


class Data(Section):
    text: Sources = []
    chat: Sources = []
    images: Sources = Field([], description="A folder per class, a JSONL manifest, or parquet with bytes.")
    vqa: Sources = Field([], description="JSONL of image, question and answer, or of image and caption.")
    events: Annotated[list[EventSource], BeforeValidator(_as_sources)] = Field(
        [], description="Tables of events of patients, which are joined by the patients' ids."
    )
    root: str | None = Field(None, description="Folder that relative paths start from; default the working directory.")
    holdout: float = Field(
        0.05, ge=0, lt=1, description="Share of documents held out, chosen by their content and seed."
    )
    separator: str = Field(
        "auto",
        description="What ends a document in plain text; auto: <|endoftext|> where it occurs, else a blank line.",
    )
    template: Template = Template()
    on_bad_row: Literal["stop", "quarantine"] = "stop"
    max_bad: float = Field(0.01, ge=0, le=1, description="Largest share of rows that quarantine may set aside.")


class Tokenizer(Section):
    kind: Literal["words", "bpe", "file"] = "words"
    vocab_size: int = Field(8000, ge=300, le=1_000_000, description="Upper limit of the vocabulary that is built.")
    min_count: int = Field(1, ge=1, description="Words seen less often are spelled in characters.")
    path: str | None = Field(None, description="A tokenizer.json, for kind: file.")

    @model_validator(mode="after")
    def _path_with_file(self) -> Tokenizer:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError("tokenizer.path belongs to tokenizer.kind=file, and only there")
        return self


class Augment(Section):
    """Chinese text augmentation of the training part; off while `multiplier` is 0."""

    multiplier: int = Field(0, ge=0, le=20, description="Changed copies added per original.")
    synonyms: float = Field(0.1, ge=0, le=1, description="Probability that a word with a known synonym is replaced.")
    synonyms_file: str | None = Field(None, description="Your dictionary: one group of words per line, space between.")
    delete: float = Field(0.0, ge=0, lt=1, description="Probability that a word is left out.")
    insert: float = Field(0.0, ge=0, le=1, description="Probability of a function word at a word boundary.")
    insert_words: list[str] = ["的", "了"]
    reorder: float = Field(0.0, ge=0, le=1, description="Probability that the clauses of a text change places.")


CHANGES = ("flip", "shift", "scale", "zoom", "color", "erase")  # what a training image goes through, every epoch anew


class ImageSettings(Section):
    """At which size images become patches, and how their colours are scaled."""

    size: Literal["native", "square", "letterbox", "adaptive"] = Field(
        "native",
        description="native: its own size; square: one size, the aspect is lost; letterbox: one size, the aspect kept; "
        "adaptive: less than its own size where there is little to see.",
    )
    square: int = Field(64, ge=1, description="Side of square and letterbox in pixels, a multiple of the patch.")
    min_tokens: int = Field(
        1,
        ge=1,
        description="Least patches of an image: native enlarges a smaller one, adaptive leaves room for as many.",
    )
    max_tokens: int = Field(256, ge=1, description="Most patches of an image of native and adaptive.")
    mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="Subtracted from RGB in 0 to 1.")
    std: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="What the rest is divided by.")
    cache_mib: int = Field(1024, ge=0, description="Memory for images that were decoded before, in MiB.")
    flip: float = Field(0.0, ge=0, le=1, description="Probability that a training image is mirrored, every epoch anew.")
    shift: float = Field(0.0, ge=0, lt=1, description="Largest shift of a training image, as a share of its sides.")
    scale: float = Field(
        0.0,
        ge=0,
        le=3,
        description="Training images of native become patches at a size drawn anew every epoch, up to 1 + scale times "
        "larger or smaller than their own.",
    )
    zoom: float = Field(
        0.0, ge=0, le=3, description="A training image is shown larger or smaller by up to 1 + zoom, its size stays."
    )
    color: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Largest change of a training image's hue (1: half a turn), saturation and brightness.",
    )
    erase: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Largest side of a rectangle that is hidden, as a share of a training image's side.",
    )

    @property
    def augments(self) -> bool:
        """Whether training images are changed."""
        return any(getattr(self, name) for name in CHANGES)

    @property
    def draws_sizes(self) -> bool:
        """Whether every epoch draws the sizes of training images."""
        return self.scale > 0 and self.size == "native"

    def plain(self) -> ImageSettings:
        """The same without any change of training images."""
        return self.model_copy(update=dict.fromkeys(CHANGES, 0.0))

    @model_validator(mode="after")
    def _ranges(self) -> ImageSettings:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if min(self.mean) < 0 or max(self.mean) > 1:
            raise ValueError("mean is of colours between 0 and 1")
        if min(self.std) <= 0:
            raise ValueError("std must be more than 0")
        return self


# --------------------------------------------------------------------------- plan, optimisation, training


def strategy_names() -> list[str]:
    """Names of the batching strategies: the files of plan/strategies/."""
    return sorted(path.stem for path in (PACKAGE / "plan" / "strategies").glob("[a-z]*.py"))


def _known_strategy(name: str) -> str:
    if name not in strategy_names():
        raise ValueError(f'there is no strategy "{name}"; {nearest(name, strategy_names())}')
    return name


class PlanSettings(Section):
    strategy: Annotated[str, AfterValidator(_known_strategy), WithJsonSchema({"enum": strategy_names()})] = Field(
        "pack", description="A file of plan/strategies/."
    )
    tokens_per_step: int = Field(2048, ge=1, description="Real tokens per optimizer update.")
    grow: dict[Annotated[int, Field(ge=2)], Annotated[int, Field(ge=1)]] = Field(
        {}, description="Other tokens_per_step from an epoch of the stage on: {3: 4096, 6: 8192}; the first is 1."
    )
    tokens_per_micro: int = Field(
        4096, ge=1, description="Tokens per forward pass; limits memory, never changes results."
    )
    batch_size: int = Field(8, ge=1, description="Sequences per forward pass of fixed, dynamic and bucket.")
    bucket_width: int = Field(16, ge=1)
    row_tokens: int = Field(512, ge=1, description="Length of a row of the strategy rows.")
    max_tokens: int | None = Field(None, ge=1, description="Longest sequence; default the model's context.")
    overflow: Literal["error", "split", "truncate_right", "truncate_left", "drop"] = Field(
        "split", description="What happens to a longer sequence; nothing is lost silently, the ledger counts it."
    )
    stride: int | None = Field(
        None, ge=1, description="Windows of split start every `stride` tokens; default no overlap."
    )
    cross_documents: bool = Field(False, description="Join documents before windows are cut, as fixed blocks do.")
    drop_last: bool = Field(False, description="Leave out a last step smaller than tokens_per_step.")

    def at_epoch(self, epoch: int) -> PlanSettings:
        """The settings of one epoch of a stage, counted from 0: with the tokens per update that hold then."""
        begun = [first for first in self.grow if first <= epoch + 1]
        return self.model_copy(update={"tokens_per_step": self.grow[max(begun)], "grow": {}}) if begun else self


class Ramp(Section):
    """A number that changes from `start` to `end` as a stage goes on, and stays there."""

    start: float = 0.0
    end: float
    steps: int | None = Field(None, ge=1, description="Updates that it takes.")
    share: float | None = Field(None, gt=0, le=1, description="Instead of steps: the share of the stage's updates.")
    shape: Literal["linear", "cosine"] = Field("linear", description="cosine: along half a cosine, as loss ramps do.")

    @model_validator(mode="after")
    def _one_length(self) -> Ramp:
        if (self.steps is None) == (self.share is None):
            raise ValueError("a ramp takes either steps or share")
        return self

    def at(self, step: int, total_steps: int) -> float:
        """The number for one update of a stage of `total_steps`, counted from 0."""
        length = self.share * total_steps if self.share is not None else float(self.steps or 1)
        done = min(step / length, 1.0) if length > 0 else 1.0
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start * (1 - done) + self.end * done


# What Discriminator puts into the path of an error begins with a bracket, and `_validate` takes it out again.
Weight = Annotated[
    Annotated[float, Tag("(number)")] | Annotated[Ramp, Tag("(ramp)")],
    Discriminator(lambda value: "(ramp)" if isinstance(value, dict | Ramp) else "(number)"),
]


class ParameterGroup(Section):
    """Parameters that learn at a rate of their own."""

    parameters: list[str] = Field(min_length=1, description="Name patterns (fnmatch).")
    lr_scale: float = Field(1.0, ge=0, description="Factor on the learning rate.")
    weight_decay: float | None = Field(None, ge=0, description="Default optim.weight_decay.")
    clip: float | None = Field(
        None, gt=0, description="Largest norm of this group's own gradients; default: clipped with all the others."
    )


class Optim(Section):
    lr: float = Field(1e-3, gt=0)
    lr_scale: float = Field(1.0, gt=0, description="Factor on lr, so that a stage follows a changed lr.")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0, description="On matrices; never on biases, norms and embeddings.")
    clip: float | None = Field(1.0, gt=0, description="Largest global gradient norm.")
    schedule: Literal["constant", "exponential", "warmup", "cosine", "restarts"] = "cosine"
    per: Literal["update", "epoch"] = Field("update", description="When the learning rate steps.")
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the stage spent warming up.")
    floor: float = Field(0.01, ge=0, le=1, description="Lowest learning rate, as a share of the peak.")
    restarts: int = Field(2, ge=0)
    decay: float = Field(0.95, gt=0, le=1, description="exponential: lr = peak * decay ** (epoch / decay_epochs).")
    decay_epochs: float = Field(10.0, gt=0)
    groups: list[ParameterGroup] = Field(
        [], description="Parameters with rates of their own; each belongs to the first group that names it."
    )


class Train(Section):
    max_steps: int | None = Field(None, ge=0, description="The run ends after this many updates, all stages together.")
    max_epochs: int | None = Field(None, ge=0, description="Each stage ends after this many epochs; 0 skips it.")
    seed: int = Field(0, ge=0, lt=2**31)
    init_from: str | None = Field(None, description="A run whose weights and tokenizer this one starts from.")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    freeze: list[str] = Field([], description="Name patterns (fnmatch) of parameters that stay as they are.")
    eval_every: int | None = Field(None, ge=1, description="Updates between held-out checks; default every epoch.")
    log_every: int = Field(10, ge=1, description="Updates between lines on the screen; the files get every update.")
    patience: int | None = Field(None, ge=1, description="Held-out checks without progress before a stage stops early.")
    min_delta: float = Field(0.0, ge=0)
    weights: Literal["best", "last"] = Field(
        "best", description="What a stage ends with: the weights of its best held-out check, or its last."
    )
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = Field(10, ge=0)
    grad_norm_warning: float = Field(10.0, gt=0)
    threads: int | None = Field(None, ge=1, le=1024, description="Processor threads; default all cores.")
    allocator: Literal["auto", "system", "keep"] = Field(
        "auto", description="keep: freed memory stays with the process, faster and larger; auto where it pays."
    )


class CollapseSettings(Section):
    """How closely the latent of a model that has one is watched, and what follows when it is not used any more."""

    policy: Literal["off", "warn", "save", "stop", "recover"] = Field(
        "warn",
        description="What follows a confirmed collapse. save: the weights of the last healthy reading are kept aside; "
        "recover: training goes on from them with less weight on the KL term.",
    )
    every: int = Field(100, ge=1, description="Updates between readings; fewer see a collapse sooner and cost more.")
    window: int = Field(256, ge=2, description="Sets that a reading rests on.")
    patience: int = Field(3, ge=1, description="Readings in a row that confirm a collapse.")
    warmup: int = Field(500, ge=0, description="Updates of a stage, or after a recovery, before readings can count.")
    active_variance: float = Field(0.01, gt=0, description="A unit is active when its mean varies more over sets.")
    active_share: float = Field(0.1, ge=0, le=1, description="Fewer active units are a sign of collapse.")
    dead_kl: float = Field(0.01, gt=0, description="A dimension is dead when its KL is smaller, in nats.")
    dead_share: float = Field(0.9, ge=0, le=1, description="More dead dimensions are a sign of collapse.")
    probe_gap: float = Field(
        0.02, gt=0, description="It is a sign of collapse when latents of other sets cost a smaller share more."
    )
    factor: float = Field(0.5, gt=0, lt=1, description="What recover multiplies the weight of the KL term by.")
    recoveries: int = Field(3, ge=1, description="The next collapse after so many recoveries stops the run.")


class Checkpoint(Section):
    every: int | None = Field(None, ge=1, description="Updates between checkpoints; default every epoch.")
    keep: int = Field(2, ge=2, description="Newest checkpoints kept besides the best; at least 2, one may be damaged.")


class Generate(Section):
    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0, le=100, description="0 is greedy.")
    top_k: int = Field(0, ge=0, description="0 is off.")
    top_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    beams: int = Field(1, ge=1, le=64)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="auto: as training chooses.")
    seed: int = Field(0, ge=0, lt=2**31)


class Stage(Section):
    """One stage of a run: which data it uses, and what it changes of plan, optim, losses and train."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    use: list[Literal["text", "chat", "images", "vqa", "events"]] | None = Field(
        None, description="Which of the run's data; default all."
    )
    plan: dict[str, Any] = {}
    optim: dict[str, Any] = {}
    losses: dict[str, Weight] = {}
    train: dict[str, Any] = {}


def checked(section: type[SectionType], values: dict[str, Any]) -> SectionType:
    """Build one section from values that a caller of the Python interface gave.

    Raises:
        RecipeError: a field is unknown or its value does not fit.
    """
    try:
        return section(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise RecipeError(f'unknown field "{name}"', fix=nearest(name, list(section.model_fields))) from None
        raise RecipeError(f"{name}: {first['msg'].removeprefix('Value error, ')}", fix="correct this value") from None


STAGE_TRAIN_KEYS = {
    "max_epochs", "label_smoothing", "freeze", "eval_every", "patience", "min_delta", "grad_norm_warning", "weights",
}  # fmt: skip


Model = Annotated[dict[str, Any], AfterValidator(lambda section: {"kind": "decoder", **section})]


class _StageError(ValueError):
    """A field of a stage does not fit its section; `path` leads to it from the top of the recipe."""

    def __init__(self, index: int, error: ValidationError) -> None:
        self.first = error.errors()[0]
        section = {"PlanSettings": "plan", "Optim": "optim", "Train": "train"}[error.title]
        self.path = ("stages", index, section, *self.first["loc"])
        super().__init__(self.first["msg"])


class Recipe(Section):
    """Everything a run depends on."""

    data: Data = Data()
    tokenizer: Tokenizer = Tokenizer()
    augment: Augment = Augment()
    images: ImageSettings = ImageSettings()
    events: EventSettings = EventSettings()
    model: Model = Field({"kind": "decoder"}, description="`kind` names the file in models/; the rest is its.")
    plan: PlanSettings = PlanSettings()
    optim: Optim = Optim()
    losses: dict[str, Weight] = Field(
        {}, description="Weight of each loss term of the model, or a ramp; default what the model says."
    )
    stages: list[Stage] = []
    train: Train = Train()
    collapse: CollapseSettings = CollapseSettings()
    checkpoint: Checkpoint = Checkpoint()
    generate: Generate = Generate()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    profile: Literal["standard", "low_power"] = Field(
        "standard", description="low_power: one thread, micro-batches of 512 tokens, fp32, for small machines."
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages share a name: {names}")
        for index, stage in enumerate(self.stages):
            wrong = [f"train.{key}" for key in sorted(set(stage.train) - STAGE_TRAIN_KEYS)]
            wrong += ["plan.cross_documents"] if "cross_documents" in stage.plan else []
            if wrong:
                raise ValueError(f"stage {stage.name}: {wrong[0]} belongs to the whole run, not to a stage")
            try:
                self.for_stage(stage)
            except ValidationError as error:
                raise _StageError(index, error) from None
        return self

    def for_stage(self, stage: Stage) -> Recipe:
        """Return this recipe with the stage's own plan, optim, losses and train fields put in, and without stages.

        `train.max_epochs` of the run is a limit on every stage: the smaller of the two holds.
        """
        merged = {
            name: {**getattr(self, name).model_dump(), **getattr(stage, name)} for name in ("plan", "optim", "train")
        }
        limits = [n for n in (self.train.max_epochs, stage.train.get("max_epochs")) if n is not None]
        merged["train"]["max_epochs"] = min(limits, default=None)
        return self.model_copy(
            update={
                "plan": PlanSettings(**merged["plan"]),
                "optim": Optim(**merged["optim"]),
                "losses": {**self.losses, **stage.losses},
                "train": Train(**merged["train"]),
                "stages": [],
            }
        )

    def resolve_path(self, path: str) -> Path:
        """Turn a path of the recipe into one of this machine.

        `unpad:` starts inside the package; `drawn:shapes.jsonl` is a small set of pictures, `simulated:patients` one of
        patients, each made when it is first asked for.
        """
        if path.startswith("simulated:"):
            from unpad.sources.simulated_events import simulated_folder

            return simulated_folder() / path.removeprefix("simulated:")
        if path.startswith("drawn:"):
            from unpad.images.drawn import drawn_folder

            return drawn_folder() / path.removeprefix("drawn:")
        if path.startswith("unpad:"):
            return PACKAGE / path.removeprefix("unpad:")
        expanded = Path(path).expanduser()
        if expanded.is_absolute() or self.data.root is None:
            return expanded
        return Path(self.data.root).expanduser() / expanded

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), allow_unicode=True, sort_keys=False)


# --------------------------------------------------------------------------- loading


# PyYAML lets through the ValueError of a date or a number that cannot be.
YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError)


class _LineLoader(yaml.SafeLoader):
    """YAML that refuses duplicate keys and bombs, and remembers the line of every key."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[tuple[str | int, ...], int] = {}

    def load(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return {}
        self._walk(node, (), [0])
        return self.construct_document(node)

    def _walk(self, node: yaml.Node, path: tuple[str | int, ...], visited: list[int]) -> None:
        visited[0] += 1
        if visited[0] > MAX_YAML_NODES or len(path) > 50:
            raise yaml.MarkedYAMLError(
                problem="too large or too deeply nested for a recipe", problem_mark=node.start_mark
            )
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if key.tag == NUMBER_TAG:  # what has numbers for names, as epochs, reads them from text
                    key.tag = KEY_TAGS[0]
                if key.tag not in KEY_TAGS:  # `on` is no text in YAML
                    raise yaml.MarkedYAMLError(problem="a key is not a name; quote it", problem_mark=key.start_mark)
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f'the key "{key.value}" occurs twice', problem_mark=key.start_mark
                    )
                seen.add(key.value)
                self._walk(value, (*path, key.value), visited)
                self.lines[(*path, key.value)] = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._walk(value, (*path, index), visited)


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Find a packaged recipe by name, or a YAML file by path.

    Raises:
        RecipeError: neither exists.
    """
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        path = RECIPES / f"{name}.yaml"
        if path.is_file():
            return path
        raise RecipeError(f'there is no recipe "{name}"', fix=nearest(name, recipe_names()))
    path = Path(name)
    if not path.is_file():
        raise RecipeError(f"there is no file {name}", fix="check the path, or see `unpad recipes`")
    return path


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by packaged name or path and apply `key.sub=value` overrides.

    Raises:
        RecipeError: unknown recipe or key, wrong type or value; names the file and line, or the override.
    """
    path = find_recipe(name)
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise RecipeError("the recipe is larger than 1 MB", where=str(path), fix="a recipe is a short YAML file")
    try:
        loader = _LineLoader(path.read_text(encoding="utf-8"))
        values = loader.load()
    except YAML_FAULTS as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f"{path}:{line + 1}" if line is not None else str(path)
        raise RecipeError(
            str(getattr(error, "problem", None) or error).splitlines()[0], where=where, fix="mend the YAML"
        ) from None
    if not isinstance(values, dict):
        raise RecipeError("a recipe is a mapping of sections", where=str(path), fix="see `unpad recipes copy`")
    overridden = {_override(values, text) for text in overrides or []}
    return _validate(values, str(path), loader.lines, overridden)


def parse_recipe(values: dict[str, Any]) -> Recipe:
    """Build a recipe from a dictionary, as the Python API and run directories do.

    Raises:
        RecipeError: a key or value does not fit.
    """
    return _validate(values, "recipe", {}, set())


def _override(values: dict[str, Any], text: str) -> tuple[str | int, ...]:
    """Put one `key.sub=value` into `values`; stages may be addressed by name. Return the path that was set."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise RecipeError(f'"{text}" is not key=value', where="command line", fix="write for example optim.lr=1e-4")
    try:
        value = _LineLoader(raw).load() if raw.strip() else ""
    except YAML_FAULTS:
        raise RecipeError(f'"{raw[:80]}" is not a YAML value', where=f"command line: {key}", fix="quote it") from None
    parts: list[str | int] = []
    here: Any = values
    names = key.split(".")
    for position, name in enumerate(names):
        last = position == len(names) - 1
        step: str | int = name
        if isinstance(here, list):
            step = _list_index(here, name, key)
        elif not isinstance(here, dict):
            raise RecipeError(
                f'"{".".join(names[:position])}" holds a value, not a section', where=f"command line: {key}"
            )
        parts.append(step)
        if last:
            here[step] = value
        else:
            if isinstance(here, dict) and not isinstance(here.get(step), dict | list):
                here[step] = {}
            here = here[step]
    return tuple(parts)


def _list_index(items: list[Any], name: str, key: str) -> int:
    names = [str(item.get("name", i)) if isinstance(item, dict) else str(i) for i, item in enumerate(items)]
    if name in names:
        return names.index(name)
    if name.isdigit() and int(name) < len(items):
        return int(name)
    raise RecipeError(f'there is no "{name}" here', where=f"command line: {key}", fix=nearest(name, names))


def _validate(
    values: dict[str, Any], origin: str, lines: dict[tuple[str | int, ...], int], overridden: set[tuple[str | int, ...]]
) -> Recipe:
    try:
        return Recipe(**values)
    except ValidationError as error:
        first = error.errors()[0]
        fault = first.get("ctx", {}).get("error")
        first, path = (fault.first, fault.path) if isinstance(fault, _StageError) else (first, tuple(first["loc"]))
        path = tuple(part for part in path if not str(part).startswith("("))
        dotted = ".".join(str(part) for part in path)
        if any(path[: len(o)] == o or o[: len(path)] == path for o in overridden if path):
            where = f"command line: {dotted}"
        else:
            line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
            where = f"{origin}:{line}: {dotted}" if line else f"{origin}: {dotted}".removesuffix(": ")
        if first["type"] == "extra_forbidden":
            known = _known_keys(path[2:-1] if isinstance(fault, _StageError) else path[:-1])
            raise RecipeError(f'unknown key "{path[-1]}"', where=where, fix=nearest(str(path[-1]), known)) from None
        message = first["msg"].removeprefix("Value error, ")
        got = (
            ""
            if first["type"] == "value_error"
            else f", got {json.dumps(first['input'], ensure_ascii=False, default=str)[:80]}"
        )
        raise RecipeError(message + got, where=where, fix="correct this field") from None


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    """Field names of the section at `path`, found by walking the schema."""
    schema = Recipe.model_json_schema()
    node: dict[str, Any] = schema
    for part in path:
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = node.get("allOf", [node])[0]
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


# --------------------------------------------------------------------------- what resume may change

RESUMABLE = (
    "train.max_steps", "train.max_epochs", "train.log_every", "train.eval_every", "train.grad_norm_warning",
    "train.allocator", "images.cache_mib", "collapse.policy", "checkpoint.every", "checkpoint.keep", "generate",
)  # fmt: skip
STAGE_RESUMABLE = ("max_epochs", "eval_every", "grad_norm_warning")


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} of every field whose values differ."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def may_change_on_resume(key: str) -> bool:
    """Whether a resumed run accepts another value of the dotted key."""
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
