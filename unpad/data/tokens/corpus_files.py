"""Source files of a corpus, their rows, and what is known of them while it is prepared, with the report of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from unpad.data.sources.bad_rows import apply_policy, fault_lines, refuse_empty
from unpad.data.sources.example import BadRow, Example, count_bad
from unpad.data.sources.files import SourceFile, expand, resolve_path, unreadable
from unpad.data.sources.leaks import LeakReport
from unpad.data.sources.reader import PAIRS, TEXT_KINDS, read_file
from unpad.data.sources.split import Split, Wanted, content_key, declared_splits
from unpad.data.tokens.augment import load_synonyms, with_copies
from unpad.data.tokens.cache import Shard, make_key
from unpad.data.tokens.lost import LostCharacters
from unpad.data.tokens.words import segment
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256_file
from unpad.terminal.table import number_of


@dataclass(frozen=True)
class CorpusFile:
    """A source file; `key` is the hash of everything that determines its examples."""

    kind: str
    file: SourceFile
    source: int
    sha256: str
    key: str


@dataclass(frozen=True)
class FileRows:
    """Rows of a file; content_key, declared and copy are columns of a Shard."""

    examples: list[Example]
    bad: list[BadRow]
    content_key: np.ndarray
    declared: np.ndarray
    copy: np.ndarray


@dataclass
class Preparation:
    """State of `prepare`; `shards` has the originals of each file, None until opened or built."""

    recipe: Recipe
    folder: Path
    wanted: Wanted
    files: list[CorpusFile] = field(default_factory=list)
    read: dict[int, FileRows] = field(default_factory=dict)
    shards: list[Shard | None] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    sides: list[np.ndarray] = field(default_factory=list)
    units: list[np.ndarray] = field(default_factory=list)
    num_followed: int = 0
    held_groups: int = 0
    shared_groups: int = 0
    events: list[str] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    encoded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def rows(self, index: int) -> FileRows:
        """Read a file, once.

        Raises:
            SourceError: the file changed since it was hashed.
        """
        if index not in self.read:
            file = self.files[index]
            examples, bad = read_file(file.kind, file.file, self.recipe.data)
            if hash_file(file.file.path) != file.sha256:
                where = str(file.file.path.absolute())
                fix = "start again when it is complete"
                raise SourceError("the file changed while it was read", where=where, fix=fix)
            self.read[index] = FileRows(
                examples,
                bad,
                content_key=np.array([content_key(example) for example in examples], np.uint64),
                declared=declared_splits(example.split for example in examples),
                copy=np.zeros(len(examples), np.uint8),
            )
        return self.read[index]

    def copy_settings(self) -> list[object]:
        """Everything but the documents that determines their augmented copies, as JSON."""
        augment = self.recipe.augment.model_dump(mode="json", exclude={"synonyms_file"})
        return [augment, sorted(self._synonyms.items()), self.recipe.train.seed]

    def copies(self, index: int) -> list[Example]:
        """Augmented copies of a file's training documents, round after round; of pairs there are none."""
        if self.files[index].kind == PAIRS or not self.recipe.augment.multiplier:
            return []
        originals = [self.rows(index).examples[row] for row in np.flatnonzero(self.sides[index] == Split.TRAIN)]
        seed = self.recipe.train.seed
        return with_copies(originals, self.recipe.augment, segment, self._synonyms, seed)[len(originals) :]

    @cached_property
    def _synonyms(self) -> Mapping[str, Sequence[str]]:
        named = self.recipe.augment.synonyms_file
        return load_synonyms(resolve_path(self.recipe.data, named) if named else None)


def list_files(recipe: Recipe, kinds: Sequence[str]) -> list[CorpusFile]:
    data = recipe.data
    files = []
    for kind in kinds:
        first = sum(len(getattr(data, before)) for before in TEXT_KINDS[: TEXT_KINDS.index(kind)])
        for file in expand(getattr(data, kind), partial(resolve_path, data)):
            digest = hash_file(file.path)
            key = make_key(digest, kind, file.format, file.field, data.separator if file.format == "text" else None)
            files.append(CorpusFile(kind, file, first + file.source, digest, key))
    if not files:
        raise SourceError(
            "the recipe names no data", where="data", fix=f"set {' or '.join(f'data.{k}' for k in kinds)}"
        )
    return files


def hash_file(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise unreadable(error, str(path.absolute())) from None


def judge_rows(work: Preparation) -> tuple[list[BadRow], int]:
    """Read the files without a shard and judge the rows of all files together: (bad rows, number of good ones)."""
    bad: list[BadRow] = []
    used = dict.fromkeys((file.kind for file in work.files), 0)
    for index, (file, shard) in enumerate(zip(work.files, work.shards, strict=True)):
        bad += work.rows(index).bad if shard is None else shard.bad_rows(str(file.file.path))
        used[file.kind] += len(work.rows(index).examples) if shard is None else shard.num_rows
    total = sum(used.values())
    apply_policy(bad, total + count_bad(bad), work.recipe.data)
    for kind, count in used.items():
        refuse_empty(count, kind, [file.file for file in work.files if file.kind == kind])
    return bad, total


def corpus_key(work: Preparation) -> list[object]:
    """Everything that determines the examples and their split, as JSON."""
    data = work.recipe.data
    rule = [data.split_version, data.near_duplicates == "together"]
    return [[file.key for file in work.files], data.holdout, work.recipe.train.seed, *rule]


@dataclass(frozen=True)
class CorpusReport:
    """Report of a corpus: rows read, used and quarantined, documents encoded, and leaks once it is compared.

    Args:
        rows_read: rows_used + rows_quarantined.
        encoded_documents: documents encoded this time, augmented copies included.
        tokens, characters: counts of all documents, copies included; lost: the characters that the tokenizer lost.
        may_lose: whether the tokenizer is one of a file, which may lack characters.
        lossy_template: strings of the conversations' template that lose characters in it.
        num_unchanged: augmented copies that are equal to their originals.
        num_followed: rows without a split that are of the test part, as a row of their group or a copy declares it.
        held_groups: named groups with a document of valid; shared_groups: those also with one of train.
        num_system: system turns of training conversations.
        leaks: None without held-out documents, and until they are compared with training.
        leak_places: places of the worst leaks of the report, in its order, and of their training documents.
        test_leaks: None without documents of the test part; test_leak_places likewise.
        events: damaged files that were rebuilt.
        seconds: per stage; the stages add up to the whole.
    """

    rows_read: int
    rows_used: int
    rows_quarantined: int
    num_files: int
    num_train: int
    num_holdout: int
    num_test: int
    num_followed: int
    held_groups: int
    shared_groups: int
    num_copies: int
    num_unchanged: int
    tokens: int
    characters: int
    lost: LostCharacters
    may_lose: bool
    lossy_template: tuple[str, ...]
    num_system: int
    cache_hits: int
    cache_misses: int
    encoded_documents: int
    bad_rows: list[BadRow]
    leaks: LeakReport | None
    leak_places: list[tuple[str, str]]
    test_leaks: LeakReport | None
    test_leak_places: list[tuple[str, str]]
    events: list[str]
    seconds: dict[str, float]

    def lines(self) -> list[str]:
        """The report as text."""
        copies = f" and {number_of(self.num_copies, 'augmented copies')}" if self.num_copies else ""
        copies += f", {self.num_unchanged:,} of them equal to their originals" if self.num_unchanged else ""
        lines = [
            f"{number_of(self.num_files, 'files')}: {number_of(self.rows_read, 'rows')} read = {self.rows_used:,} used"
            f" + {self.rows_quarantined:,} quarantined",
            f"{self._parts(copies)}; {number_of(self.tokens, 'tokens')},"
            f" {self.characters / max(self.tokens, 1):.2f} characters each",
            f"cache: {number_of(self.cache_hits, 'hits')}, {self.cache_misses:,} missed,"
            f" {number_of(self.encoded_documents, 'documents')} encoded, {sum(self.seconds.values()):.2f} s",
        ]
        if self.num_followed:
            lines.append(f"  {describe_followed(self.num_followed)}")
        if self.lost.lost or self.may_lose:
            lines += self.lost.lines()
        if self.lossy_template:
            names = ", ".join(f'"{text}"' for text in self.lossy_template)
            what = f"warning: the tokenizer loses characters of the template, so that roles may look alike: {names}"
            lines.append(f"{what}; set data.template to strings that it can spell")
        return [
            *lines,
            *self.group_lines(),
            *self.leak_lines(),
            *self.events,
            *fault_lines(self.bad_rows, "  quarantined: "),
        ]

    def group_lines(self) -> list[str]:
        """Remark on a valid part that is made of whole groups, such as facts, that training never saw."""
        if not self.held_groups or self.shared_groups:
            return []
        groups = "1 group" if self.held_groups == 1 else f"{self.held_groups:,} groups"
        what = f"held out {groups} absent from training: this measures other facts than those that are learnt"
        return [f'{what}; to measure other phrasings of the same facts, declare "split" in rows of each group']

    def leak_lines(self) -> list[str]:
        """The leaks of every part as text; empty where nothing was compared."""
        reports = (self.leaks, self.leak_places), (self.test_leaks, self.test_leak_places)
        return [line for leaks, places in reports if leaks is not None for line in leaks.lines(places)]

    def _parts(self, copies: str) -> str:
        if self.num_test and not self.num_train + self.num_holdout:  # new data
            return f"{number_of(self.num_test, 'documents')} to evaluate"
        test = f", {self.num_test:,} of the test part for `unpad eval` alone" if self.num_test else ""
        return f"{number_of(self.num_train, 'training documents')}{copies}, {self.num_holdout:,} held out{test}"


def describe_followed(number: int) -> str:
    """Describe rows that are of the test part for another row's sake, with the remedy."""
    are = "is" if number == 1 else "are"
    return (
        f"{number_of(number, 'rows')} without a split {are} of the test part, since a row of their group or a copy "
        "declares it; "
        'declare "split": "train" in those to train on'
    )
