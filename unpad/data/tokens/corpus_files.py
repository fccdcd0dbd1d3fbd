"""Source files of a corpus, their rows, and what is known of them while the corpus is prepared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from unpad.data.sources.bad_rows import apply_policy, refuse_empty
from unpad.data.sources.example import BadRow, Example, count_bad
from unpad.data.sources.files import SourceFile, expand, resolve_path, unreadable
from unpad.data.sources.rows import TEXT_KINDS, read_file
from unpad.data.sources.split import Wanted, content_key, declared_splits
from unpad.data.tokens.cache import Shard, make_key
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256_file


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
