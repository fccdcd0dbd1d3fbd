"""Sections of a recipe that say what is read: files, tables, templates, tokens, and the sizes of images."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from unpad.errors import nearest
from unpad.recipes.section import Section


class Source(Section):
    """Files to read: a file, a folder or a glob, and how often to draw from it."""

    path: str = Field(description="File, folder or glob.")
    weight: float = Field(1.0, gt=0, description="Epochs of this source per epoch of the run; 0.5 draws half of it.")
    format: Literal["auto", "text", "json", "jsonl", "parquet"] = Field(
        "auto", description="auto: by the file's ending."
    )
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

    path: str = Field(description="File, folder or glob.")
    layout: Literal["auto", "table", "patients", "meds"] = Field(
        "auto", description="auto: meds where its columns are, patients where there is none for the id, else table."
    )
    id: str = Field("auto", description="Column of the patient's id.")
    time: str = Field("auto", description="Column of the time.")
    code: str = Field("auto", description="Column of the code.")
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

    path: str = Field(description="File of the table.")
    id: str = Field("auto", description="Column of the patient's id.")
    label: str | None = Field(None, description="Column of 0 and 1.")
    time: str | None = Field(None, description="Column: when the label was known; events after it are refused.")
    event: str | None = Field(None, description="Column of 0 and 1: whether observation ended with the outcome.")
    duration: str | None = Field(None, description="Column: when observation ended, on the clock of the events.")
    horizon: float | None = Field(
        None, gt=0, description="Time from the landmark within which the outcome makes the label 1."
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
            raise ValueError("time goes with label; duration says when the outcome was")
        return self


class EventSettings(Section):
    """How events of patients become histories, and what is predicted from them."""

    labels: EventLabels | None = Field(None, description="The table of outcomes.")
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

    system: str = Field("系统：", description="Prefix of a system message.")
    user: str = Field("用户：", description="Prefix of a user's message.")
    assistant: str = Field("助手：", description="Prefix of a reply.")
    separator: str = Field("", description="Text between messages.")


class DataSettings(Section):
    text: Sources = Field([], description="Plain text, or rows with `text`.")
    chat: Sources = Field([], description="Conversations: rows with `messages` or `conversations`, or strings.")
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
    template: Template = Field(Template(), description="Text around the messages of a conversation.")
    on_bad_row: Literal["stop", "quarantine"] = Field(
        "stop", description="stop: list all bad rows and end; quarantine: skip them, up to max_bad."
    )
    max_bad: float = Field(0.01, ge=0, le=1, description="Largest share of rows that quarantine may set aside.")


# Kinds of data: the fields of `data` that list sources.
KINDS = tuple(name for name, field in DataSettings.model_fields.items() if get_origin(field.annotation) is list)


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f'there is no kind of data "{kind}"; {nearest(kind, list(KINDS))}')
    return kind


Kind = Annotated[str, AfterValidator(_known_kind), WithJsonSchema({"enum": list(KINDS), "type": "string"})]


class TokenizerSettings(Section):
    kind: Literal["words", "bpe", "file"] = Field(
        "words",
        description="words: Chinese words; unknown ones fall back to characters and bytes. bpe: byte-level, trained on "
        "your text. file: a tokenizer.json.",
    )
    vocab_size: int = Field(8000, ge=300, le=1_000_000, description="Upper limit of the vocabulary that is built.")
    min_count: int = Field(1, ge=1, description="Words seen less often are spelled in characters.")
    path: str | None = Field(None, description="A tokenizer.json, for kind: file.")

    @model_validator(mode="after")
    def _path_with_file(self) -> TokenizerSettings:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError("tokenizer.path belongs to tokenizer.kind=file, and only there")
        return self


class AugmentSettings(Section):
    """Chinese text augmentation of the training part; off while `multiplier` is 0."""

    multiplier: int = Field(0, ge=0, le=20, description="Changed copies added per original.")
    synonyms: float = Field(0.1, ge=0, le=1, description="Probability that a word with a known synonym is replaced.")
    synonyms_file: str | None = Field(None, description="Your dictionary: one group of words per line, space between.")
    delete: float = Field(0.0, ge=0, lt=1, description="Probability that a word is left out.")
    insert: float = Field(0.0, ge=0, le=1, description="Probability of a function word at a word boundary.")
    insert_words: list[str] = Field(["的", "了"], description="Function words that `insert` draws from.")
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

    def identity(self) -> str:
        """What these settings make of an image, as text that a field added by a later version leaves as it is."""
        return self.model_dump_json(exclude={"cache_mib"}, exclude_defaults=True)

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


class DataSections(Section):
    """Sections of a recipe on its data; those of a new family go here."""

    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    augment: AugmentSettings = AugmentSettings()
    images: ImageSettings = ImageSettings()
    events: EventSettings = EventSettings()
