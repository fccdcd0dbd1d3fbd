"""Recipe sections on data: sources, tables of events, tokenizer, augmentation and image sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import UTC, date, datetime
from itertools import pairwise
from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from unpad.errors import nearest
from unpad.recipes.section import Section, UserPath


class Source(Section):
    """Files to read, their format, and their weight in an epoch."""

    path: UserPath
    """File, folder or glob."""
    weight: float = Field(1.0, gt=0)
    """Epochs of this source per epoch of the run; 0.5 draws half of it."""
    format: Literal["auto", "text", "json", "jsonl", "parquet", "csv"] = "auto"
    """auto: by the file's ending."""
    field: str | None = None
    """Field or column that holds the text; default `text` or `messages`."""
    ignore: list[str] = Field([])
    """Fields of rows and of their messages that are left out knowingly."""


# Paths of data that comes with the package or is drawn by it; other paths are the user's.
PACKAGED = ("unpad:", "drawn:", "simulated:")


def is_packaged(path: str) -> bool:
    """True if a path of a recipe leads to the package's own data."""
    return path.startswith(PACKAGED)


def as_sources(value: Any) -> Any:
    """Convert a path, a mapping or a list of them to a list of mappings; anything else stays unchanged."""
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


Sources = Annotated[list[Source], BeforeValidator(as_sources)]


class ChatSource(Source):
    """Files of conversations, or of requests and replies in fields or columns of any name."""

    prompt: str | None = None
    """Field or column of the request; default `instruction`, `prompt` or `question`."""
    reply: str | None = None
    """Field or column of the reply; default `output`, `completion`, `response` or `answer`."""

    @model_validator(mode="after")
    def _of_one_form(self) -> ChatSource:
        if self.field is not None and (self.prompt or self.reply):
            raise ValueError("field names whole conversations, and prompt and reply the two halves of one; set one")
        return self


class QuestionSource(Source):
    """Files of questions with their answers, or a file of questions and one of annotations, as VQAv2 has them."""

    annotations: UserPath | None = None
    """The answers, in JSON as VQAv2 publishes it; `path` is then the file of its questions."""
    images: UserPath | None = None
    """Folder of their images, named by image_id: COCO_train2014_000000000009.jpg or 9.jpg."""
    part: Literal["train", "valid", "test"] | None = None
    """Part of all their questions; null: data.holdout divides them."""

    @model_validator(mode="after")
    def _in_two_files(self) -> QuestionSource:
        if (self.annotations is None) != (self.images is None):
            raise ValueError("annotations and images go together: a file of answers, and the folder of the images")
        if self.annotations is None and self.part is not None:
            raise ValueError("part goes with annotations; rows have a field split of their own")
        if self.annotations is not None and (self.field is not None or self.format != "auto"):
            raise ValueError("field and format do not go with annotations, whose fields are those of VQAv2")
        return self

    @property
    def beside(self) -> dict[str, str]:
        """Paths beside the questions, by the field that names each."""
        paths = {"annotations": self.annotations, "images": self.images}
        return {field: path for field, path in paths.items() if path is not None}


def _sound_format(layout: str) -> str:
    """Refuse a format that strptime cannot read, or that lacks the day."""
    moment = datetime(2023, 11, 25, 13, 47, tzinfo=UTC)
    try:
        read = datetime.strptime(moment.strftime(layout), layout)
    except ValueError as error:
        raise ValueError(f"the format cannot be read: {error}") from None
    if read.date() != moment.date():
        raise ValueError("the format needs a year, a month and a day, such as %d.%m.%Y")
    return layout


TimeFormat = Annotated[str, AfterValidator(_sound_format)]


Decimal = Literal[".", ","]
Limits = Literal["error", "bound", "half"]


def as_word(value: object) -> str:
    """A value of a recipe or of a column as they are compared: stripped, in lower case, and 2.0 as 2, as programs that
    know no missing whole number write it."""
    return re.sub(r"^(-?[0-9]+)\.0*$", r"\1", str(value).strip().casefold())


def _as_words(value: Any) -> Any:
    """Keys of a map, or members of a list, as they are compared."""
    if isinstance(value, list):
        return [as_word(one) for one in value]
    if not isinstance(value, dict):
        return value
    words = {as_word(one): label for one, label in value.items()}
    twice = [as_word(one) for one, label in value.items() if words[as_word(one)] != label]
    if twice:
        raise ValueError(f'"{twice[0]}" has two meanings')
    return words


def _as_map(value: Any) -> Any:
    """A map of words to labels, with words as they are compared."""
    words = _as_words(value)
    for word, label in words.items() if isinstance(words, dict) else ():
        if label not in (0, 1, None):
            shown = f'"{label}"' if isinstance(label, str) else label
            raise ValueError(f'"{word}" in map means {shown}, expected 0, 1, or null for no label')
    return words


class EventSource(Section):
    """A table of patients' events, in one file or several of the same form, and the meaning of its columns.

    Columns named `auto` have the names of the layout: table `id, time, code, value`; meds `subject_id, time, code,
    numeric_value`; patients, one file per patient, named by the id, `minute, variable, value`.
    """

    path: UserPath
    """File, folder or glob."""
    layout: Literal["auto", "table", "patients", "meds"] = "auto"
    """auto: meds if its columns are present, patients if there is no column for the id, else table."""
    id: str = "auto"
    """Column of the patient's id."""
    time: str = "auto"
    """Column of the time."""
    code: str = "auto"
    """Column of the code."""
    value: str | None = "auto"
    """Column of the value; null: events without a value, such as diagnoses."""
    set: str | None = "auto"
    """Column of the event's set number; auto: set_index, if present."""
    value_unit: str | None = "auto"
    """Column of the unit of the value, which becomes a part of the code, as in glucose [mmol/l]; auto: where a column
    such as unit or valueuom has two units for a code, they are named; null: they are not."""
    words: Literal["error", "code", "skip"] = "error"
    """Texts such as NEG in the column of values, or in text_value of meds; code: the event's code becomes code=text;
    skip: the event has no value."""
    decimal: Decimal | None = None
    """Sign before the decimals of numbers in texts, the other one being between thousands: "," reads 1.250,5; null:
    a point, and commas are refused."""
    limits: Limits = "error"
    """Values such as <5 and >100; bound: 5 and 100; half: 2.5 and 100."""
    static: list[str] = Field([])
    """Columns of a table with one row per patient; they become the patient's first set."""
    unit: Literal["auto", "minutes", "hours", "days", "timestamp"] = "auto"
    """Unit of the time; auto: from the column's name or type."""
    format: TimeFormat | None = None
    """Layout of dates in texts, in the letters of strptime, such as "%d.%m.%Y %H:%M"; null: as 2024-01-31 12:30:00."""
    negative: Literal["auto", "allow", "error"] = "auto"
    """Times below 0; auto: an error in the layout patients, which counts from admission."""

    @model_validator(mode="after")
    def _fits(self) -> EventSource:
        if self.format is not None and self.unit not in ("auto", "timestamp"):
            raise ValueError(f"a format reads dates, so the unit is timestamp, not {self.unit}")
        if self.layout == "patients" and self.id != "auto":
            raise ValueError("layout: patients has the id in the name of each file, so id names no column")
        return self


def _refuse_words(words: list[str], taken: Collection[str], what: str, why_taken: str) -> None:
    """Refuse words of a list that are empty, named twice or have a meaning already."""
    for place, word in enumerate(words):
        twice = word in words[:place]
        if twice or word in taken or not word:
            why = "is no value" if not word else "is named twice" if twice else why_taken
            raise ValueError(f'"{word}" among the {what} {why}')


class EventLabels(Section):
    """Prediction targets, one row per patient and landmark: `label`, or `event` and `duration`."""

    path: UserPath
    """File of the table."""
    id: str = "auto"
    """Column of the patient's id."""
    label: str | None = None
    """Column of 0 and 1, or of words that map or classes names."""
    map: Annotated[dict[str, Literal[0, 1] | None], BeforeValidator(_as_map)] | None = None
    """Label of every word in the column label or event, such as {alive: 0, dead: 1}; null: not known."""
    classes: Annotated[list[str], BeforeValidator(_as_words)] = Field([])
    """Values of the column label, numbers or words, each a class of its own, in this order, such as [home, rehab,
    died]; two are an outcome of label 0 and 1."""
    time: str | None = None
    """Column of the time at which the label was known; later events are refused."""
    event: str | None = None
    """Column of 0 and 1: 1 if observation ended with the outcome; or of values in competing."""
    competing: Annotated[list[str], BeforeValidator(_as_words)] = Field([])
    """Values of the column event, numbers or words, each for another event that ended observation and after which the
    outcome cannot come, such as [2] or [discharged, transferred]."""
    duration: str | None = None
    """Column of the time at which observation ended, on the clock of the events."""
    format: TimeFormat | None = None
    """Layout of dates in texts, in the letters of strptime, such as "%d.%m.%Y %H:%M"; null: as 2024-01-31 12:30:00."""
    decimal: Decimal | None = None
    """Sign before the decimals of its times, as in `data.events`."""
    horizon: float | None = Field(None, gt=0)
    """Time from the landmark within which the outcome makes the label 1."""
    censored: Literal["auto", "exclude", "keep"] = "auto"
    """Patients with an observation that ended before the horizon; keep: unlabelled; auto: keep if model.bins are there,
    which learn from them, else exclude."""
    missing: Literal["error", "exclude", "keep"] = "error"
    """Patients with events but no label, or without a duration beside it; keep: unlabelled."""

    @model_validator(mode="after")
    def _one_way(self) -> EventLabels:
        if (self.event is None) != (self.duration is None):
            raise ValueError("event and duration go together")
        if (self.label is None) == (self.event is None):
            raise ValueError("give either label, or event and duration")
        if self.horizon is not None and self.event is None:
            raise ValueError("a horizon goes with event and duration")
        if self.competing and self.event is None:
            raise ValueError("competing events are values of the column event, which goes with duration")
        taken = {"0", "1", "true", "false", *(self.map or {})}
        _refuse_words(self.competing, taken, "competing events", "has a meaning as 0, 1 or in map")
        if self.time is not None and self.label is None:
            raise ValueError("time goes with label; duration says when the outcome was")
        return self

    @model_validator(mode="after")
    def _of_classes(self) -> EventLabels:
        if self.classes and self.label is None:
            raise ValueError("classes are values of the column label; events of several kinds with times are competing")
        if len(self.classes) == 1:
            raise ValueError(f'"{self.classes[0]}" alone is no choice; name every class, or leave classes out')
        if self.classes and any(label is not None for label in (self.map or {}).values()):
            raise ValueError(
                "map gives labels 0 and 1, and classes name their own; with them it only has words for null"
            )
        _refuse_words(self.classes, self.map or {}, "classes", "is no known class in map")
        return self

    @property
    def several(self) -> tuple[str, ...]:
        """Names of the classes where there are more than two; () for an outcome that comes or does not."""
        return tuple(self.classes) if len(self.classes) > 2 else ()


DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class EventSettings(Section):
    """Conversion of patients' events to histories, and the prediction target."""

    labels: EventLabels | None = None
    """The table of outcomes."""
    landmark: float | str | list[float] | None = None
    """Time of the prediction, or a column of the table of labels; later events are not read. Of several times, or rows
    of a patient, each gives an example. null: the last event of each patient."""

    @field_validator("landmark", mode="before")
    @classmethod
    def _landmark_is_no_date(cls, value: object) -> object:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, date) or (isinstance(one, str) and DATE.match(one)):
                raise ValueError("one date for all is no landmark; give the labels a column of dates and name it")
        if isinstance(value, list) and not all(_is_time(one) for one in value):
            raise ValueError("several landmarks are finite numbers, such as [24, 48, 72]")
        return value

    @field_validator("landmark", mode="after")
    @classmethod
    def _landmarks_rise(cls, value: float | str | list[float] | None) -> float | str | list[float] | None:
        if isinstance(value, list) and not (value and all(a < b for a, b in pairwise([*value, math.inf]))):
            raise ValueError("landmarks are finite times that rise, such as [24, 48, 72]")
        return value

    unit: Literal["auto", "minutes", "hours", "days"] = "auto"
    """Unit of landmark, horizon, duration and window; auto: unit of the events, days for timestamps."""
    split: UserPath | None = None
    """Table of id and split (train, valid or test); patients outside of it are left out."""
    window: float | None = Field(None, gt=0)
    """Events in a window of this length form a set; null: events of equal time."""
    duplicates: Literal["drop", "keep", "error"] = "drop"
    """Handling of events with equal columns."""
    unsorted: Literal["sort", "error"] = "sort"
    """Handling of a patient's rows that go back in time."""
    unknown_codes: Literal["unknown", "skip", "error"] = "unknown"
    """Codes that are missing or rare among training patients; unknown: one code for all of them."""
    min_count: int = Field(1, ge=1)
    """Codes with fewer occurrences in training are unknown."""
    scale: Literal["standard", "log", "rank"] = "standard"
    """Values of every code as the model reads them, by those of training patients; standard: in standard deviations;
    log: their logarithms so, for codes with values above 0 alone; rank: normal scores of their ranks."""
    std_floor: float = Field(1e-3, gt=0)
    """Smallest standard deviation of a code, as a share of its mean."""
    code_embeddings: UserPath | None = None
    """Table of vectors per code: column Key, and numeric columns."""
    max_events: int | None = Field(None, ge=1)
    """Maximum of events per patient, facts included; whole sets are dropped and counted. Facts and one set with a time
    always stay, however many events that is. null keeps all."""
    keep: Literal["latest", "earliest"] = "latest"
    """Sets that max_events keeps."""

    @property
    def landmarks(self) -> list[float]:
        """Times of the prediction that hold for all patients, in `unit`; none where a column, or the last event of each
        patient, gives them."""
        if isinstance(self.landmark, list):
            return self.landmark
        return [self.landmark] if isinstance(self.landmark, float) else []

    @property
    def tables(self) -> dict[str, str]:
        """Paths of the tables beside the events, by the field that names each."""
        labels = self.labels.path if self.labels else None
        paths = {"labels.path": labels, "split": self.split, "code_embeddings": self.code_embeddings}
        return {field: path for field, path in paths.items() if path is not None}

    @model_validator(mode="after")
    def _fits(self) -> EventSettings:
        if isinstance(self.landmark, str) and self.labels is None:
            raise ValueError("a landmark column needs events.labels: the column is in its table")
        if self.labels is not None and self.labels.horizon is not None and self.landmark is None:
            raise ValueError("a horizon counts from a landmark; set events.landmark")
        if isinstance(self.landmark, list) and (self.labels is None or self.labels.event is None):
            raise ValueError(
                "several landmarks need labels with event and duration, as a label is the same at each of them; labels "
                "of the landmarks' own are rows of a table, of which landmark names the column"
            )
        return self


class Template(Section):
    """Text form of a conversation: a prefix per role, a separator between messages, EOS after each reply."""

    system: str = "系统："
    """Prefix of a system message."""
    user: str = "用户："
    """Prefix of a user's message."""
    assistant: str = "助手："
    """Prefix of a reply."""
    separator: str = ""
    """Text between messages."""
    thinking: bool | None = None
    """Value of `enable_thinking` for the chat template of an imported model, in training and in prompts; default: none,
    the template's own default."""


# Templates that a recipe may have without the user's choice: the default, and that of the packaged recipe `chat`.
PACKAGED_TEMPLATES = (Template(), Template(system="<|system|>", user="<|user|>", assistant="<|assistant|>"))


class DataSettings(Section):
    """Sources by kind of data, the held-out share, and the handling of bad rows."""

    text: Sources = Field([])
    """Plain text, or rows with `text`."""
    chat: Annotated[list[ChatSource], BeforeValidator(as_sources)] = Field([])
    """Conversations: rows with `messages`, `conversations`, `instruction` and `output`, or `prompt` and `completion`;
    or strings."""
    pairs: Sources = Field([])
    """Pairs of replies, to learn from preferences (DPO): rows with `messages` or `prompt`, `chosen` and `rejected`."""
    images: Sources = Field([])
    """A folder per class, a manifest in JSON lines or CSV, or parquet with bytes."""
    vqa: Annotated[list[QuestionSource], BeforeValidator(as_sources)] = Field([])
    """JSONL of image, question and answer, or of image and caption; or questions and annotations of VQAv2."""
    events: Annotated[list[EventSource], BeforeValidator(as_sources)] = Field([])
    """Tables of patients' events, joined by the patients' ids."""
    root: UserPath | None = None
    """Folder that relative paths start from; default: the working directory."""
    holdout: float = Field(0.05, ge=0, lt=1)
    """Share of the rows without a `split` of their own that is held out: round(holdout x rows), in every class its
    share, groups whole, chosen by content and seed."""
    near_duplicates: Literal["report", "together", "refuse"] = "report"
    """Texts, conversations and pictures that are alike; report: count and name those of valid and test that are like
    training ones; together: keep them in one part, unless rows declare theirs; refuse: end if some are in training and
    in another part. Patients are not compared."""
    split_version: Literal[1, 2, 3] = 3
    """Rule of the split, for runs of earlier versions; 1: about the share, without groups; 2: a book as any other text;
    3: the end of a book, one plain text of many short paragraphs, is held out."""
    separator: str = "auto"
    """End of a document in plain text; auto: <|endoftext|> if it occurs, else a blank line."""
    join: int = Field(0, ge=0)
    """Least bytes of a document of plain text, such as a book, whose paragraphs are joined; its end is held out."""
    unwrap: bool = False
    """Join hard-wrapped lines of texts by a space, in scripts without spaces by nothing; blank lines stay, and lines
    before indented ones."""
    template: Template = Template()
    """Text around the messages of a conversation."""
    on_bad_row: Literal["stop", "quarantine"] = "stop"
    """stop: list all bad rows and end; quarantine: skip them, up to max_bad."""
    max_bad: float = Field(0.01, ge=0, le=1)
    """Largest share of rows that may be quarantined."""

    @property
    def converses(self) -> bool:
        """True if some of the data are conversations."""
        return bool(self.chat or self.pairs)

    def sources(self, kind: str) -> list[Source | EventSource]:
        """The sources of one kind of data."""
        return list(self.__dict__[kind])


# Kinds of data: the fields of `data` that list sources.
KINDS = tuple(name for name, field in DataSettings.model_fields.items() if get_origin(field.annotation) is list)


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f'there is no kind of data "{kind}"; {nearest(kind, list(KINDS))}')
    return kind


Kind = Annotated[str, AfterValidator(_known_kind), WithJsonSchema({"enum": list(KINDS), "type": "string"})]


class TokenizerSettings(Section):
    """Tokenizer of texts and conversations."""

    kind: Literal["auto", "words", "bpe", "file"] = "words"
    """auto: words for mostly Chinese text, with room for 8,000 at least, else bpe. words: Chinese words of your text,
    the longest at each place, else characters and bytes. bpe: byte-level, trained on your text. file: a
    tokenizer.json."""
    vocab_size: int = Field(8000, ge=300, le=1_000_000)
    """Maximum size of the trained vocabulary."""
    min_count: int = Field(1, ge=1)
    """Words with fewer occurrences are split into characters."""
    path: UserPath | None = None
    """A tokenizer.json, for kind: file."""

    @model_validator(mode="after")
    def _path_with_file(self) -> TokenizerSettings:
        if self.kind == "file" and self.path is None:
            raise ValueError("tokenizer.kind=file needs tokenizer.path, a tokenizer.json")
        if self.kind != "file" and self.path is not None:
            raise ValueError("tokenizer.path needs tokenizer.kind=file")
        return self


class AugmentSettings(Section):
    """Augmentation of Chinese training texts; off while `multiplier` is 0."""

    multiplier: int = Field(0, ge=0, le=20)
    """Augmented copies per original."""
    synonyms: float = Field(0.1, ge=0, le=1)
    """Probability that a word with a known synonym is replaced."""
    synonyms_file: UserPath | None = None
    """Dictionary of synonyms: one group of words per line, separated by spaces."""
    delete: float = Field(0.0, ge=0, lt=1)
    """Probability that a word is dropped."""
    insert: float = Field(0.0, ge=0, le=1)
    """Probability that a function word is inserted at a word boundary."""
    insert_words: list[str] = Field(["的", "了"])
    """Function words that `insert` draws from."""
    reorder: float = Field(0.0, ge=0, le=1)
    """Probability that the clauses of a text are reordered."""


# Augmentations of a training image, drawn anew every epoch.
CHANGES = ("flip", "shift", "scale", "zoom", "color", "erase")


class ImageSettings(Section):
    """Size at which images are cut into patches, scaling of their colours, and augmentation."""

    size: Literal["native", "square", "letterbox", "adaptive"] = "native"
    """native: the image's own size; square: one size, ignoring the aspect; letterbox: one size, keeping the aspect;
    adaptive: smaller than its own size for images with little detail."""
    square: int = Field(64, ge=1)
    """Side of square and letterbox, in pixels; a multiple of the patch."""
    min_tokens: int = Field(1, ge=1)
    """Minimum of patches per image: native enlarges smaller images, adaptive leaves room for as many."""
    max_tokens: int = Field(256, ge=1)
    """Maximum of patches per image of native and adaptive."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from the colours (RGB, 0 to 1)."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Divisor after the subtraction."""
    grey_bits: int = Field(16, ge=8, le=16)
    """Bits that the samples of grey pictures of 16 bits use, such as 12."""
    cache_mib: int = Field(1024, ge=0)
    """Memory for decoded images, in MiB."""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability that a training image is mirrored in an epoch."""
    shift: float = Field(0.0, ge=0, lt=1)
    """Largest shift of a training image, as a share of its sides."""
    scale: float = Field(0.0, ge=0, le=3)
    """Training images of native are resized by a factor drawn every epoch, up to 1 + scale times larger or smaller."""
    zoom: float = Field(0.0, ge=0, le=3)
    """The content of a training image is zoomed by up to 1 + zoom, in or out, at unchanged size."""
    color: float = Field(0.0, ge=0, lt=1)
    """Largest change of a training image's hue (1: half a turn), saturation and brightness."""
    erase: float = Field(0.0, ge=0, le=1)
    """Largest side of an erased rectangle, as a share of a training image's side."""

    @property
    def augments(self) -> bool:
        """True if training images are augmented."""
        return any(getattr(self, name) for name in CHANGES)

    @property
    def draws_sizes(self) -> bool:
        """True if every epoch draws the sizes of training images."""
        return self.scale > 0 and self.size == "native"

    def identity(self) -> str:
        """Text that identifies the pixels these settings give, unchanged by fields that later versions add."""
        return self.model_dump_json(exclude={"cache_mib"}, exclude_defaults=True)

    def plain(self) -> ImageSettings:
        """The same settings without augmentation."""
        return self.model_copy(update=dict.fromkeys(CHANGES, 0.0))

    @model_validator(mode="after")
    def _ranges(self) -> ImageSettings:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if min(self.mean) < 0 or max(self.mean) > 1:
            raise ValueError("mean must be between 0 and 1")
        if min(self.std) <= 0:
            raise ValueError("std must be more than 0")
        return self


class DataSections(Section):
    """Sections of a recipe on data; a new family adds its section here."""

    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    augment: AugmentSettings = AugmentSettings()
    images: ImageSettings = ImageSettings()
    events: EventSettings = EventSettings()
