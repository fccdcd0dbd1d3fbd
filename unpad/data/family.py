"""Families of data: one file each in this folder, and the interface of their sequences.

A model names its family (`DATA = "text"`): the module `data/text.py` has the members of `Family` and opens a `Data`;
`evaluation/text.py` measures a model on it.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from unpad.batching.batch import RaggedBatch, concatenate
from unpad.batching.plan import Micro
from unpad.data.replies import Replies
from unpad.data.sources.example import BadRow, file_test, place_of
from unpad.data.sources.split import Split, Wanted
from unpad.errors import RecipeError, nearest
from unpad.models import model_config, model_module
from unpad.models.contract import Model, ModelConfig
from unpad.recipes.data import KINDS, is_packaged
from unpad.recipes.recipe import Recipe, stages_of

if TYPE_CHECKING:
    from unpad.data.show import Shown


@dataclass(frozen=True)
class NearDuplicates:
    """New rows that are near-duplicates of training rows of a run.

    Args:
        unit: what is compared: documents or pictures.
        num: number of these; num_equal: equal to a training one; num_near: other near-duplicates.
        pairs: places of some of these and of their training rows.
        lines: the same as text.
        reason: why nothing was compared, or "".
    """

    unit: str
    num: int
    num_equal: int
    num_near: int
    pairs: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        """Fields by name; the counts are null where nothing was compared."""
        known = not self.reason
        return {
            "unit": self.unit,
            "compared": self.num if known else None,
            "equal": self.num_equal if known else None,
            "near": self.num_near if known else None,
            "found": [{"row": row, "training_row": source} for row, source in self.pairs],
            "reason": self.reason or None,
        }


def not_compared(unit: str, reason: str) -> NearDuplicates:
    """Say that near-duplicates were not looked for, and why."""
    line = f"near-duplicates of training {unit} are not looked for: {reason}"
    return NearDuplicates(unit, 0, 0, 0, (), (line,), reason)


# Optional file of a run: the random key of the pseudonyms of the people in its data.
NAMES_KEY = "names.key"
# Optional file of a run: modes and sizes of the pictures in training.
PICTURES = "pictures.json"
OPTIONAL_FILES = (NAMES_KEY, PICTURES)


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Facts that plans and stages need about the sequences of a run, one row per sequence; see `sequence_table`.

    Arrays are (num_sequences,), integers.

    Args:
        positions: positions the model sees.
        split: of `Split`. A run trains on TRAIN and chooses by HOLDOUT; only evaluation reads rows of TEST.
        num_targets: targets that carry loss.
        kind: index into `Data.kinds`.
        source: index into `weights`.
        weights: epochs of each source per epoch of the run.
        file_hashes: (path, sha256) of every source file.
        attended: number of vectors that attend to each other, if it differs from `positions`, otherwise None. The
            model's context is then only a bound, and a plan cannot count the cells of attention.
        num_test: rows of the test part that the table leaves out.
        group: unit that is independent of others, such as a document group, a picture, or a patient; sequences of one
            number belong together, and confidence intervals are taken over these.
        bundle: number of the sequences that one micro-batch must hold together, such as the two replies of a pair; -1
            for a sequence by itself, and None where all are.
    """

    positions: np.ndarray
    split: np.ndarray
    num_targets: np.ndarray
    kind: np.ndarray
    source: np.ndarray
    group: np.ndarray
    weights: tuple[float, ...] = (1.0,)
    file_hashes: tuple[tuple[str, str], ...] = ()
    attended: np.ndarray | None = None
    num_test: int = 0
    bundle: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.positions)


def sequence_table(positions: np.ndarray, split: np.ndarray, **others: Any) -> SequenceTable:
    """Build a table; by default every sequence has one target and is a group of its own, and all are of one kind and
    one source.

    Args:
        others: fields of the table; None, or none, stands for the default.
    """
    num = len(positions)
    default = {
        "num_targets": np.ones(num, np.int64),
        "kind": np.zeros(num, np.uint8),
        "source": np.zeros(num, np.int16),
        "group": np.arange(num),
    }
    given = {name: values for name, values in others.items() if values is not None}
    return SequenceTable(positions, split, **{**default, **given})


@dataclass(frozen=True)
class RowSpan:
    """A row of the data files, or the part of it that is in a piece of a sequence.

    Args:
        where: its place.
        start, stop: tokens of the row that the model reads, or patches, or events.
        targets: those of its labels that count in the piece.
    """

    where: str
    start: int
    stop: int
    targets: int


@dataclass(frozen=True)
class FoundRow:
    """A row of the data files that was asked for by its place.

    Args:
        where: its place; parts: the sequences that hold it, as (number, start, stop) in positions; none for a row in no
            sequence.
        remark: the reason for that, or what else is to be said of it.
    """

    where: str
    parts: list[tuple[int, int, int]]
    remark: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim about rows.

    Args:
        tried: number of texts or replies that were looked at; wrong: what is otherwise in some of them; beside: what a
            reader should know of the others.
    """

    name: str
    tried: int
    wrong: tuple[str, ...] = ()
    beside: str = ""


def digest_of(*parts: bytes | str | np.ndarray | None) -> str:
    """sha256 of texts and arrays, these as int64 or float64, end to end; None stands for nothing."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).astype("<f8" if part.dtype.kind == "f" else "<i8").tobytes()
        digest.update(part.encode() if isinstance(part, str) else part or b"")
    return digest.hexdigest()


class Data(ABC):
    """Sequences of a run.

    Attributes:
        family: name of the file in `data/` and in `evaluation/`.
        kinds: sections of the recipe's `data` that the family reads; a stage may use some of them.
        private: whether the data is about people, so that only the owner may read what is made of it.
        compares: whether near-duplicates are looked for, so that `data.near_duplicates` applies.
        label_fields: fields of the recipe that set the targets; () where the rows of the data have them.
        least_content: positions below which equal sequences may be so by chance, and are no copies.
        least_updates: updates that a model which begins at random usually needs.
        augmentation: section of the recipe with the changes of training sequences that epochs draw; "" for none.
        table: one row per sequence.
        replies: sequences of data with pairs, one per reply; None for other data.
    """

    family: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    private: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    label_fields: ClassVar[tuple[str, ...]] = ()
    least_content: ClassVar[int] = 1
    least_updates: ClassVar[int] = 0
    augmentation: ClassVar[str] = ""
    table: SequenceTable
    replies: Replies | None = None

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Channels of the model's head."""

    @property
    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Files that a run keeps so that it can be used without its data, by name."""

    @property
    def unit(self) -> str:
        """Name of a sequence, plural, where it is not the first of the family's UNITS; by default ""."""
        return ""

    @property
    def secrets(self) -> dict[str, bytes]:
        """Further files that a run keeps, drawn at random and for its owner alone; by default there are none."""
        return {}

    def load(self, micro: Micro) -> RaggedBatch:
        """Load one micro-batch of a plan; called from the loader's own thread. By default joins its pieces as `alone`
        builds them; a family with many small pieces has a faster way."""
        spans = np.stack([micro.seq_ids, micro.starts, micro.stops, micro.first_target], 1)
        batch = concatenate([self.alone(*span) for span in spans.tolist()])
        return batch.pad(pad_to=micro.pad_to) if micro.pad_to else batch

    @abstractmethod
    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        """Build a batch of one piece without `load` or a plan; the ground truth of the proof."""

    def show(self, micro: Micro) -> "Shown":
        """The only piece of a micro-batch as `load` gives it to the model; by default its length alone."""
        from unpad.data.show import Shown

        return Shown(self.where(int(micro.seq_ids[0])), (f"{int(micro.stops[0] - micro.starts[0]):,} positions",))

    @abstractmethod
    def where(self, seq_id: int) -> str:
        """Place of a sequence in its file."""

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of all sequences, their content and their split."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Counts of rows that were read, used, quarantined and held out, as text."""

    @abstractmethod
    def describe_outputs(self) -> str:
        """Channels of the head in words, such as "vocabulary 3,000"."""

    def lengths(self, epoch_seed: tuple[int, int]) -> np.ndarray:
        """Positions per sequence in the epoch of this (seed, epoch); another number only where epochs draw sizes."""
        return self.table.positions

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Count the targets inside spans of sequences, (n,) int64; by default of sequences that are never cut."""
        return np.where(np.asarray(starts) == 0, self.table.num_targets[seq_ids], 0)

    def row_spans(self, seq_id: int, start: int, stop: int, first_target: int) -> list[RowSpan]:
        """Rows of the data files in a piece of a sequence; by default a sequence is a row."""
        targets = self.count_targets(np.array([seq_id]), np.array([first_target]), np.array([stop]))
        return [RowSpan(self.where(seq_id), start, stop, int(targets[0]))]

    def placed(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Every row of the data files that is in a sequence, by its place: the sequence, and the first position there
        and the one after the last; by default a sequence is a row."""
        for seq_id, stop in enumerate(self.table.positions.tolist()):
            yield self.where(seq_id), (seq_id, 0, stop)

    @property
    def bad_rows(self) -> Sequence[BadRow]:
        """Rows that cannot be used and were left out."""
        return ()

    def find_otherwise(self, given: str) -> FoundRow | None:
        """A row that `placed` does not name, such as an event of a patient; by default there is none.

        Args:
            given: as a user names it.
        """
        return None

    def class_labels(self) -> tuple[np.ndarray, tuple[str, ...]] | None:
        """Class of every sequence, (num_sequences,) int64, -1 where it is unknown, and the names of the classes; None
        for data without classes, as by default."""
        return None

    def claims(self) -> list[Claim]:
        """Claims that the sequences are what the rows say, for the certificate; by default none.

        Raises:
            SourceError: a file cannot be read any more.
        """
        return []

    def check_trainable(self) -> None:
        """Refuse data that would teach a model next to nothing; by default nothing is refused.

        Raises:
            SourceError: with the reason.
        """
        return None

    def compare(self) -> list[str]:
        """Compare sequences of valid and test with those trained on, once, and return lines on it; by default none.

        Families with a slow comparison leave it out of their `open_data`; the one in this file adds it.

        Raises:
            SourceError: the recipe refuses what was found.
        """
        return []

    def near_training(self, run: "Data", seq_ids: np.ndarray) -> NearDuplicates | None:
        """Near-duplicates of training rows among new rows, which this data holds; None if they are not compared.

        Args:
            run: the data of a run, of the same family.
            seq_ids: (n,) rows to compare.

        Raises:
            SourceError: a file of the run cannot be read.
        """
        return None

    def identities(self) -> list[str] | None:
        """Identity of each row, such as the id of a patient, (num_rows,); None where rows have no identity. Never for
        a message."""
        return None

    def single_row(self, recipe: Recipe, kind: str) -> tuple[str, str] | None:
        """Cause and remedy where the only row of a kind is a file that was not divided; by default it was meant so."""
        return None

    def facts(self) -> dict[str, Any]:
        """What the run's log and a plan keep of the data, by name; by default nothing."""
        return {}

    def complete(self, config: ModelConfig) -> ModelConfig:
        """Fill in the fields of a new model's config that the data decides, its `decided`; by default there are none.

        Raises:
            RecipeError: the config has another value of such a field.
        """
        return config

    def initialize(self, model: Model) -> None:
        """Load into a new model the parameters that come with the data; by default there are none."""
        return None

    def begin(self, model: Model) -> None:
        """Fit parameters of a new model that do not begin at random; by default there are none."""
        return None


def source_lines(recipe: Recipe) -> list[str]:
    """A line per source of a recipe, for the screen, with the package's own marked.

    Files in folders are not listed: there may be thousands, and their names may be patients' ids.
    """
    sources = [(f"data.{kind}", source.path) for kind in KINDS for source in recipe.data.sources(kind)]
    sources += [(f"data.vqa.{field}", path) for one in recipe.data.vqa for field, path in one.beside.items()]
    if recipe.data.events:
        sources += [(f"events.{field}", path) for field, path in recipe.events.tables.items()]
    return [f"reads {field}: {path}" + " (comes with unpad)" * is_packaged(path) for field, path in sources]


class Family(Protocol):
    """Members of a module such as `data/text.py`; `next_command` and `folder_files` may be absent.

    Attributes:
        KINDS: sections of the recipe's `data` that the family reads.
        UNITS: names of a sequence and of a unit of its length, plural.
        FILES: names of the files that a run keeps.
        NO_TEXT: error message and fix when text generation is requested of a run; None where it generates text.
        next_command: command that uses a trained run of a recipe; without it, that is `unpad eval`.
        folder_files: the files that a run keeps, from a folder of Hugging Face; a family of other models has none.
    """

    KINDS: tuple[str, ...]
    UNITS: tuple[str, str]
    FILES: tuple[str, ...]
    NO_TEXT: tuple[str, str] | None

    def num_outputs(self, files: dict[str, bytes]) -> int:
        """Channels of the head of a run that kept `files`."""

    def open_data(self, recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted) -> Data:
        """Read the rows of a recipe's data that `wanted` asks for; `kept` are the files of an earlier run, None makes
        them from the data."""

    def near_duplicates(self, recipe: Recipe) -> list[str]:
        """Lines on rows of valid and test that are near-duplicates of training rows, found without a model.

        Raises:
            SourceError: the data cannot be used, or the recipe refuses near-duplicates and there are some.
            RecipeError: as `check_near_duplicates`.
        """


def family_name(recipe: Recipe) -> str:
    """Name of the family that the recipe's model reads."""
    return model_module(recipe.model["kind"]).DATA


def family_of(recipe: Recipe) -> Family:
    """Return the module of `data/` that reads what the recipe's model takes."""
    return import_module(f"unpad.data.{family_name(recipe)}")


def open_data(
    recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted = Wanted.LEARNING, *, compare: bool = True
) -> Data:
    """Read a recipe's data.

    Args:
        kept: files of an earlier run of the same kind; None makes them from the data.
        wanted: rows to return; those of the test part only if they are asked for.
        compare: whether held-out sequences are compared with those trained on, before anything is returned.

    Raises:
        RecipeError: the recipe or a stage names data that its model does not read.
        SourceError: the data cannot be used.
    """
    family = family_of(recipe)
    kinds = [name for name in KINDS if getattr(recipe.data, name)]
    for name in kinds:
        if name not in family.KINDS:
            kind = recipe.model["kind"]
            fix = f"a {kind} reads " + " and ".join(f"data.{kind}" for kind in family.KINDS)
            raise RecipeError(f"a model of kind {kind} does not read data.{name}", where=f"data.{name}", fix=fix)
    for stage in recipe.stages:
        for name in stage.use or ():
            if name not in family.KINDS:
                fix = "this model reads " + " and ".join(family.KINDS)
                raise RecipeError(f'stage {stage.name} uses "{name}"', where="stages", fix=fix)
    data = family.open_data(recipe if wanted is Wanted.LEARNING else recipe.plain(), kept, wanted)
    if compare:
        data.compare()
    return data


def folder_files(recipe: Recipe) -> Callable[[Path], dict[str, bytes]] | None:
    """Reader of the files that a run keeps, from a folder of Hugging Face; None for a family of other models."""
    return getattr(family_of(recipe), "folder_files", None)


def next_command(recipe: Recipe, run: str) -> str:
    """Command that uses a trained run."""
    command: Callable[[Recipe, str], str] = getattr(
        family_of(recipe), "next_command", lambda recipe, run: f"unpad eval {run}"
    )
    return command(recipe, run)


def check_near_duplicates(recipe: Recipe, data: type[Data] | Data) -> None:
    """Refuse a rule for near-duplicates that nothing would follow.

    Raises:
        RecipeError: `data.near_duplicates` is together or refuse, and the family compares no rows or the split has a
            rule that knows no groups.
    """
    rule = recipe.data.near_duplicates
    if rule == "report":
        return
    if not data.compares:
        what = f"{rule} does not apply: near-duplicates are looked for among texts and pictures, not in {data.family}"
        fix = "leave data.near_duplicates at report; declare what belongs together with split or group"
        raise RecipeError(what, where="data.near_duplicates", fix=fix)
    if rule == "together" and recipe.data.split_version == 1:
        what = "together does not apply to data.split_version=1, which splits every row by itself"
        raise RecipeError(what, where="data.near_duplicates", fix="set data.split_version=2")


def refuse_cuts(recipe: Recipe, most: int, what: str, why: str, fix: str) -> None:
    """Refuse plans that would cut the longest sequence; with plan.overflow=drop it is dropped and counted instead.

    Args:
        most: positions of the longest sequence.
        what: the sequence and its length, `{}` for the number; why it is never cut; how to make it shorter, `{}` for
            the limit.
    """
    longest = model_config(recipe.model).longest
    for settings in [recipe.plan, *(stage.recipe.plan for stage in stages_of(recipe))]:
        limit = min(longest, settings.max_tokens or longest)
        if most > limit and settings.overflow not in ("error", "drop"):
            raise RecipeError(
                f"{what.format(f'{most:,}')}, more than {limit:,}, and {why}",
                where="plan.overflow",
                fix=f"{fix.format(limit)}, or set plan.overflow=drop, which counts what it leaves out",
            )


DECLARE = 'add others, or declare "split": "valid"'


class Cause(NamedTuple):
    """Cause for which nothing is held out of a kind of data, and its remedy."""

    what: str
    fix: str


def notes(recipe: Recipe, data: Data) -> list[str]:
    """List the kinds of data with no held-out rows although `data.holdout` > 0, each with a fix."""
    if recipe.data.holdout == 0:
        return []
    return [
        f"note: {cause.what}, so nothing says how good the model is on new data; {cause.fix}"
        for kind in data.kinds
        if (cause := not_held_out(recipe, data, kind)) is not None
    ]


def not_held_out(recipe: Recipe, data: Data, kind: str) -> Cause | None:
    """Find the cause if nothing of a kind of data is held out; None where something is, or there is none of it."""
    table = data.table
    rows = table.kind == data.kinds.index(kind)
    num = int(rows.sum())
    if num == 0 or (table.split[rows] == Split.HOLDOUT).any():
        return None
    if recipe.data.holdout == 0:
        return Cause("data.holdout is 0, so nothing is held out", "set data.holdout=0.05")
    if num == 1 and (cause := data.single_row(recipe, kind)) is not None:
        return Cause(*cause)
    unit = family_of(recipe).UNITS[0]
    return Cause(
        f"nothing of data.{kind} is held out, of {num:,} {unit if num != 1 else unit.removesuffix('s')}", DECLARE
    )


def find_in_all(data: Data, given: str, open_test: Callable[[], Data]) -> tuple[Data, FoundRow]:
    """Find a row in the data, or else in its test part, and the data that it is of.

    Args:
        given: FILE:LINE, FILE[ELEMENT], the file of a picture, or a patient's id.
        open_test: opens the test part, where there is one.

    Raises:
        RecipeError: there is none.
    """
    row = _find(data, given)
    if data.table.num_test and not (row and row.parts):
        tested = open_test()
        if (of_test := _find(tested, given)) is not None and of_test.parts:
            return tested, of_test
    if row is None:
        raise _no_such_row(data, given)
    return data, row


def _find(data: Data, given: str) -> FoundRow | None:
    """Find a row of the data files, or a patient; None if there is none at this place."""
    place = place_of(given)
    is_it = file_test(place.file)
    rows: dict[str, FoundRow] = {}
    for where, part in data.placed():
        one = place_of(where)
        if is_it(one.file):
            patient = one.rest if one.rest.startswith(" (") else ""
            rows.setdefault(one.item, FoundRow(f"{one.file}{one.item}{patient}", [])).parts.append(part)
    if place.item in rows:
        return rows[place.item]
    for bad in data.bad_rows:
        one = place_of(bad.where)
        if one.item == place.item and is_it(one.file):
            return FoundRow(bad.where, [], f"the row cannot be used and was left out: {bad.code} {bad.what}")
    return data.find_otherwise(given)


def _no_such_row(data: Data, given: str) -> RecipeError:
    """The error for a place without a row. For patients it does not repeat the place, which may be an id."""
    if data.private:
        what, fix = "the run's data has no such patient, row or file", "name FILE:LINE of an event, or a patient's id"
        return RecipeError(what, where="data.events", fix=fix)
    place = place_of(given)
    is_it = file_test(place.file)
    files = list(dict.fromkeys(place_of(where).file for where, _ in data.placed()))
    items = [place_of(where).item for where, _ in data.placed() if is_it(place_of(where).file)]
    if not items:
        fix = nearest(place.file, files) if len(files) < 1000 else "name a file of the recipe's data"
        return RecipeError(f"the run's data has no rows of the file {place.file}", where=given, fix=fix)
    shown = f"{items[0]} to {items[-1]}" if items[0] else "none, as it is one itself"
    fix = f"its rows are {shown}; a row of several lines is named by its first"
    return RecipeError("no row begins there", where=given, fix=fix)
