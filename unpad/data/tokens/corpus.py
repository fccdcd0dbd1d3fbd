"""Encoded corpus of a recipe: sources, tokenizer and cache -> one TokenSet.

Every file is hashed. Files in the cache are opened; the others are read, judged together (bad rows, empty corpus,
split), and then encoded. No file is encoded twice, and a warm start reads no row.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from unpad.data.sources.bad_rows import apply_policy, refuse_empty
from unpad.data.sources.example import BadRow, Example, count_bad
from unpad.data.sources.files import SourceFile, expand, unreadable
from unpad.data.sources.leaks import Leak, LeakReport, near_pairs, report
from unpad.data.sources.places import resolve_path
from unpad.data.sources.read import TEXT_KINDS, read_file
from unpad.data.sources.split import Split, Wanted, content_key, declared_splits, divide, numbered, units
from unpad.data.tokens.augment import load_synonyms, with_copies
from unpad.data.tokens.cache import (  # fmt: skip
    Shard,
    code_key,
    make_key,
    open_shard,
    pack_bad_rows,
    pack_details,
    read_sealed,
    write_sealed,
    write_shard,
)
from unpad.data.tokens.encode import LOSS_ROLES, encode_examples, lossy_texts, reserved_texts
from unpad.data.tokens.lost import LostCharacters, commonest
from unpad.data.tokens.token_set import Part, TokenSet, build_token_set, rows_of
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer, open_tokenizer_file, train_tokenizer
from unpad.data.tokens.words import segment
from unpad.errors import SourceError
from unpad.progress import counted, progress
from unpad.recipes.recipe import Recipe
from unpad.storage import cache_folder, sha256, sha256_file

__all__ = ["CorpusReport", "TokenSet", "prepare"]


@dataclass(frozen=True)
class CorpusReport:
    """Report of `prepare`: rows read, used and quarantined, documents encoded, and leaks.

    Args:
        rows_read: rows_used + rows_quarantined.
        encoded_documents: documents encoded this time, augmented copies included.
        tokens, characters: of all documents, copies included; lost: the characters that the tokenizer lost.
        may_lose: whether the tokenizer is one of a file, which may lack characters.
        lossy_template: strings of the conversations' template of which it loses characters.
        num_system: system turns of training conversations.
        leaks: None without held-out documents.
        leak_places: places of the worst leaks of the report, in its order, and of their training documents, "" if none.
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
    num_copies: int
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
    events: list[str]
    seconds: dict[str, float]

    def lines(self) -> list[str]:
        """The report as text; bad rows are named in `bad_rows`, not here."""
        copies = f" and {self.num_copies:,} augmented copies" if self.num_copies else ""
        lines = [
            f"{self.num_files:,} files: {self.rows_read:,} rows read = {self.rows_used:,} used"
            f" + {self.rows_quarantined:,} quarantined",
            f"{self.num_train:,} training documents{copies}, {self.num_holdout:,} held out"
            + (f", {self.num_test:,} of the test part for `unpad eval` alone" if self.num_test else "")
            + f"; {self.tokens:,} tokens,"
            f" {self.characters / max(self.tokens, 1):.2f} characters each",
            f"cache: {self.cache_hits:,} hits, {self.cache_misses:,} misses, {self.encoded_documents:,} documents"
            f" encoded, {sum(self.seconds.values()):.2f} s",
        ]
        if self.lost.lost or self.may_lose:
            lines += self.lost.lines()
        if self.lossy_template:
            names = ", ".join(f'"{text}"' for text in self.lossy_template)
            what = f"warning: the tokenizer loses characters of the template, so that roles may look alike: {names}"
            lines.append(f"{what}; set data.template to strings that it can spell")
        if self.leaks is not None:
            lines.append(self.leaks.head())
            for leak, (place, source) in zip(self.leaks.worst, self.leak_places, strict=True):
                lines.append(leak.describe(place, source))
        return lines + self.events


@dataclass(frozen=True)
class _File:
    """A source file; `key` is the hash of everything that determines its examples."""

    kind: str
    file: SourceFile
    source: int
    sha256: str
    key: str


@dataclass(frozen=True)
class _Rows:
    """Rows of a file; content_key, declared and copy are columns of a Shard."""

    examples: list[Example]
    bad: list[BadRow]
    content_key: np.ndarray
    declared: np.ndarray
    copy: np.ndarray


@dataclass
class _Work:
    """State of `prepare`; `shards` has the originals of each file, None until opened or built."""

    recipe: Recipe
    folder: Path
    wanted: Wanted
    files: list[_File] = field(default_factory=list)
    read: dict[int, _Rows] = field(default_factory=dict)
    shards: list[Shard | None] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    sides: list[np.ndarray] = field(default_factory=list)
    units: list[np.ndarray] = field(default_factory=list)
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


def prepare(
    recipe: Recipe,
    *,
    tokenizer: Tokenizer | None = None,
    kinds: Sequence[str] = TEXT_KINDS,
    cache: Path | None = None,
    wanted: Wanted = Wanted.LEARNING,
) -> tuple[TokenSet, Tokenizer, CorpusReport]:
    """Read, split, tokenize and encode a recipe's data, or open it in the cache.

    Args:
        tokenizer: used as it is; None opens the recipe's, or builds it from the training documents of all `kinds`.
        kinds: some of TEXT_KINDS.
        cache: folder of the cache; default `cache_folder()`.
        wanted: NEW for files that nothing was trained on; otherwise the documents of all parts are returned.

    Raises:
        SourceError: a file is missing or unusable, bad rows are refused, or there is no example or none to train on.
        RecipeError: the tokenizer file is missing.
        DiskError: the cache cannot be written.
    """
    work = _Work(recipe, cache or cache_folder(), wanted)
    with work.stage("hash"):
        work.files = _list_files(recipe, kinds)
        work.shards = [None] * len(work.files)
    with work.stage("open"):
        tokenizer = tokenizer or _stored_tokenizer(work)
        if tokenizer is not None:
            _open_originals(work, tokenizer)
    with work.stage("read"):
        bad, rows_used = _judge_rows(work)
        _split(work)
    if tokenizer is None:
        with work.stage("tokenizer"):
            tokenizer = _build_tokenizer(work)
            _open_originals(work, tokenizer)  # shards may have outlived a damaged tokenizer
    with work.stage("encode"):
        parts = _originals(work, tokenizer) + _copies(work, tokenizer)
    with work.stage("open"):
        weights = [source.weight for kind in TEXT_KINDS for source in getattr(recipe.data, kind)]
        hashes = [(str(file.file.path), file.sha256) for file in work.files]
        tokens = build_token_set(parts, weights, hashes, _split_settings(work))
    with work.stage("leaks"):
        leaks = _leaks(work)
        leak_places = _leak_places(leaks, tokens)
        if leaks is not None and leak_places and recipe.data.near_duplicates == "refuse":
            raise _refused(leaks, leak_places)
    return tokens, tokenizer, _report(work, tokens, tokenizer, rows_used, bad, leaks, leak_places)


def _report(
    work: _Work,
    tokens: TokenSet,
    tokenizer: Tokenizer,
    rows_used: int,
    bad: list[BadRow],
    leaks: LeakReport | None,
    leak_places: list[tuple[str, str]],
) -> CorpusReport:
    originals = tokens.copy == 0
    assert int(originals.sum()) == rows_used, "a row vanished"
    characters = sum(int(part.shard.num_chars.sum(dtype=np.int64)) for part in tokens.parts)
    lost = sum(int(part.shard.lost_chars.sum(dtype=np.int64)) for part in tokens.parts)
    counts = sum((Counter(part.shard.lost_counts) for part in tokens.parts), Counter[str]())
    may_lose, has_chat = tokenizer.kind == "file", any(file.kind == "chat" for file in work.files)
    num_system = rows_of([part.shard.num_system for part in tokens.parts], np.int64)
    return CorpusReport(
        rows_read=rows_used + count_bad(bad),
        rows_used=rows_used,
        rows_quarantined=count_bad(bad),
        num_files=len(work.files),
        num_train=int((originals & (tokens.split == Split.TRAIN)).sum()),
        num_holdout=int((tokens.split == Split.HOLDOUT).sum()),
        num_test=int((tokens.split == Split.TEST).sum()),
        num_copies=int((~originals).sum()),
        tokens=int(tokens.lengths.sum()),
        characters=characters,
        lost=LostCharacters(lost, characters, commonest(counts)),
        may_lose=may_lose,
        lossy_template=lossy_texts(tokenizer, work.recipe.data.template) if may_lose and has_chat else (),
        num_system=int(num_system[originals & (tokens.split == Split.TRAIN)].sum()),
        cache_hits=work.hits,
        cache_misses=work.misses,
        encoded_documents=work.encoded,
        bad_rows=bad,
        leaks=leaks,
        leak_places=leak_places,
        events=work.events,
        seconds=work.seconds,
    )


# --------------------------------------------------------------------------- files and rows


def _list_files(recipe: Recipe, kinds: Sequence[str]) -> list[_File]:
    data = recipe.data
    files = []
    for kind in kinds:
        first = sum(len(getattr(data, before)) for before in TEXT_KINDS[: TEXT_KINDS.index(kind)])
        for file in expand(getattr(data, kind), partial(resolve_path, data)):
            digest = _hash(file.path)
            key = make_key(digest, kind, file.format, file.field, data.separator if file.format == "text" else None)
            files.append(_File(kind, file, first + file.source, digest, key))
    if not files:
        raise SourceError(
            "the recipe names no data", where="data", fix=f"set {' or '.join(f'data.{k}' for k in kinds)}"
        )
    return files


def _hash(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise unreadable(error, str(path.absolute())) from None


def _read(work: _Work, index: int) -> _Rows:
    """Read a file, once.

    Raises:
        SourceError: the file changed since it was hashed.
    """
    if index not in work.read:
        file = work.files[index]
        examples, bad = read_file(file.kind, file.file, work.recipe.data)
        if _hash(file.file.path) != file.sha256:
            where = str(file.file.path.absolute())
            raise SourceError("the file changed while it was read", where=where, fix="start again when it is complete")
        work.read[index] = _Rows(
            examples,
            bad,
            content_key=np.array([content_key(example) for example in examples], np.uint64),
            declared=declared_splits(example.split for example in examples),
            copy=np.zeros(len(examples), np.uint8),
        )
    return work.read[index]


def _judge_rows(work: _Work) -> tuple[list[BadRow], int]:
    """Read the files without a shard and judge the rows of all files together: (bad rows, number of good ones)."""
    bad: list[BadRow] = []
    used = dict.fromkeys((file.kind for file in work.files), 0)
    for index, (file, shard) in enumerate(zip(work.files, work.shards, strict=True)):
        bad += _read(work, index).bad if shard is None else shard.bad_rows(str(file.file.path))
        used[file.kind] += len(_read(work, index).examples) if shard is None else shard.num_rows
    total = sum(used.values())
    apply_policy(bad, total + count_bad(bad), work.recipe.data)
    for kind, count in used.items():
        refuse_empty(count, kind, [file.file for file in work.files if file.kind == kind])
    return bad, total


def _split(work: _Work) -> None:
    """Give every document its part of the split, kind by kind, so that every kind has held-out documents, and number
    the units of documents that belong together.

    Raises:
        SourceError: there is nothing to train on.
    """
    rows = [_read(work, index) if shard is None else shard for index, shard in enumerate(work.shards)]
    groups = _groups(work)
    sides: dict[int, np.ndarray] = {}
    together: dict[int, np.ndarray] = {}
    first = 0
    for kind in TEXT_KINDS:
        members = [index for index, file in enumerate(work.files) if file.kind == kind]
        keys = rows_of([rows[index].content_key for index in members], np.uint64)
        declared = rows_of([rows[index].declared for index in members], np.int8)
        links = [(np.arange(len(keys)), rows_of([groups[index] for index in members], np.int64))]
        if work.recipe.data.near_duplicates == "together" and work.wanted is not Wanted.NEW:
            examples = [example for index in members for example in _read(work, index).examples]
            links.append(near_pairs([_text(example) for example in examples], work.recipe.train.seed))
        split = divide(keys, declared, work.recipe.data, work.recipe.train.seed, work.wanted, links=links)
        unit = units(keys, links) + first
        first += len(keys)
        ends = np.cumsum([rows[index].declared.size for index in members])
        sides.update(zip(members, np.split(split, ends[:-1]), strict=bool(members)))
        together.update(zip(members, np.split(unit, ends[:-1]), strict=bool(members)))
    if work.wanted is not Wanted.NEW and all(side.all() for side in sides.values()):
        fix = 'declare less of it "split": "valid" or "test", or add data'
        raise SourceError("every document is held out, so there is nothing to train on", where="data", fix=fix)
    work.sides = [sides[index] for index in range(len(rows))]
    work.units = [together[index] for index in range(len(rows))]


def _groups(work: _Work) -> list[np.ndarray]:
    """Number of the group of every document, per file, (num_rows,) int64; -1 without one."""
    named = [
        [example.group for example in _read(work, index).examples] if shard is None else shard.groups
        for index, shard in enumerate(work.shards)
    ]
    numbers = numbered([name for names in named for name in names])
    return np.split(numbers, np.cumsum([len(names) for names in named])[:-1])


def _split_settings(work: _Work) -> tuple[object, ...]:
    """Everything besides the files that determines the split."""
    data, seed = work.recipe.data, work.recipe.train.seed
    if data.split_version == 1:
        return data.holdout, seed
    return data.holdout, seed, data.split_version, sha256(b"".join(side.tobytes() for side in work.sides))


# --------------------------------------------------------------------------- tokenizer


def _stored_tokenizer(work: _Work) -> Tokenizer | None:
    """Open the recipe's tokenizer file, or the tokenizer that was built from this corpus before."""
    if work.recipe.tokenizer.path is not None:
        return open_tokenizer_file(resolve_path(work.recipe.data, work.recipe.tokenizer.path))
    data, damage = read_sealed(_tokenizer_path(work))
    if damage:
        work.events.append(f"cache: the tokenizer of this corpus {damage}; it is built again")
    return load_tokenizer(data) if data is not None else None


def _build_tokenizer(work: _Work) -> Tokenizer:
    texts = (
        turn.content
        for index in range(len(work.files))
        for example, side in zip(_read(work, index).examples, work.sides[index].tolist(), strict=True)
        if side == Split.TRAIN
        for turn in example.turns
    )
    told = counted(texts, "building the vocabulary", unit="texts")
    tokenizer = train_tokenizer(work.recipe.tokenizer, told, reserved_texts(work.recipe.data.template))
    # Use the bytes that a later run will open.
    stored = tokenizer.to_bytes()
    write_sealed(_tokenizer_path(work), stored)
    return load_tokenizer(stored)


def _tokenizer_path(work: _Work) -> Path:
    settings = work.recipe.tokenizer.model_dump(mode="json")
    key = make_key("tokenizer", code_key(), settings, reserved_texts(work.recipe.data.template), _corpus_key(work))
    return work.folder / "tokenizers" / f"{key}.json"


def _corpus_key(work: _Work) -> list[object]:
    """Everything that determines the examples and their split, as JSON."""
    data = work.recipe.data
    rule = [data.split_version, data.near_duplicates == "together"]
    return [[file.key for file in work.files], data.holdout, work.recipe.train.seed, *rule]


# --------------------------------------------------------------------------- shards


def _open_originals(work: _Work, tokenizer: Tokenizer) -> None:
    """Open the shards of this tokenizer in the cache."""
    settings = [sha256(tokenizer.to_bytes()), work.recipe.data.template.model_dump(mode="json")]
    work.keys = [make_key("originals", file.key, settings) for file in work.files]
    work.shards = [_open(work, index, key) for index, key in enumerate(work.keys)]


def _originals(work: _Work, tokenizer: Tokenizer) -> list[Part]:
    parts = []
    for index, (file, key) in enumerate(zip(work.files, work.keys, strict=True)):
        shard = work.shards[index]
        if shard is None:
            shard = _store(work, key, _encode(work, index, _read(work, index), tokenizer))
        parts.append(_part(file, shard, key, work.sides[index], work.units[index]))
    return parts


def _copies(work: _Work, tokenizer: Tokenizer) -> list[Part]:
    """Build augmented copies of the training originals; held-out documents never have copies."""
    augment, seed = work.recipe.augment, work.recipe.train.seed
    if not augment.multiplier:
        return []
    named = augment.synonyms_file
    synonyms = load_synonyms(resolve_path(work.recipe.data, named) if named else None)
    settings = [augment.model_dump(mode="json", exclude={"synonyms_file"}), sorted(synonyms.items()), seed]
    parts = []
    for index, file in enumerate(work.files):
        # A document's split may depend on other files, so the splits are part of the name.
        key = make_key("copies", work.keys[index], settings, sha256(work.sides[index].tobytes()))
        shard = _open(work, index, key)
        if shard is None:
            rows, kept = _read(work, index), np.flatnonzero(work.sides[index] == Split.TRAIN)
            originals = [rows.examples[row] for row in kept]
            copies = _Rows(
                with_copies(originals, augment, segment, synonyms, seed)[len(originals) :],
                bad=[],
                content_key=np.tile(rows.content_key[kept], augment.multiplier),
                declared=np.tile(rows.declared[kept], augment.multiplier),
                copy=np.repeat(np.arange(1, augment.multiplier + 1, dtype=np.uint8), kept.size),
            )
            shard = _store(work, key, _encode(work, index, copies, tokenizer))
        unit = np.tile(work.units[index][work.sides[index] == Split.TRAIN], augment.multiplier)
        parts.append(_part(file, shard, key, np.full(shard.num_rows, Split.TRAIN, np.uint8), unit))
    return parts


def _part(file: _File, shard: Shard, data_key: str, split: np.ndarray, unit: np.ndarray) -> Part:
    return Part(shard, str(file.file.path), data_key, TEXT_KINDS.index(file.kind), file.source, split, unit)


def _open(work: _Work, index: int, data_key: str) -> Shard | None:
    shard, damage = open_shard(work.folder, make_key(code_key(), data_key))
    if damage:
        path = work.files[index].file.path
        work.events.append(f"cache: the shard of {path} {damage}; it is built again from the file")
    work.hits += shard is not None
    return shard


def _store(work: _Work, data_key: str, shard: Shard) -> Shard:
    """Write a shard and open it like a later run: mapped, so that its memory can be released."""
    work.misses += 1
    work.encoded += shard.num_rows
    key = make_key(code_key(), data_key)
    write_shard(work.folder, key, shard)
    return open_shard(work.folder, key)[0] or shard


def _encode(work: _Work, index: int, rows: _Rows, tokenizer: Tokenizer) -> Shard:
    examples, path = rows.examples, str(work.files[index].file.path)
    tokens, loss_mask, offsets, lost = encode_examples(examples, tokenizer, work.recipe.data.template)
    with_loss = ["".join(turn.content for turn in e.turns if turn.role in LOSS_ROLES) for e in examples]
    return Shard(
        tokens=tokens,
        loss_mask=loss_mask,
        offsets=offsets,
        content_key=rows.content_key,
        declared=rows.declared,
        copy=rows.copy,
        num_targets=np.add.reduceat(loss_mask, offsets[:-1], dtype=np.int32) if examples else np.zeros(0, np.int32),
        target_chars=np.array([len(text) for text in with_loss], np.int32),
        target_bytes=np.array([len(text.encode()) for text in with_loss], np.int32),
        num_chars=np.array([sum(len(turn.content) for turn in e.turns) for e in examples], np.int32),
        lost_chars=lost.chars,
        lost_target_chars=lost.target_chars,
        lost_target_bytes=lost.target_bytes,
        num_system=np.array([sum(turn.role == "system" for turn in e.turns) for e in examples], np.int32),
        details=pack_details(
            (e.where.removeprefix(path) for e in examples),
            (e.group for e in examples),
            (e.keywords for e in examples),
            lost.counts,
        ),
        bad=pack_bad_rows(rows.bad, path),
    )


# --------------------------------------------------------------------------- leaks


def _leaks(work: _Work) -> LeakReport | None:
    """Compare the held-out originals with the training ones, once per corpus and split."""
    if work.wanted is Wanted.NEW or not any((side == Split.HOLDOUT).any() for side in work.sides):
        return None
    path = work.folder / "leaks" / f"{make_key('leaks', code_key(), _corpus_key(work))}.json"
    data, damage = read_sealed(path)
    if damage:
        work.events.append(f"cache: the leak report of this corpus {damage}; it is made again")
    if data is not None:
        values = json.loads(data)
        return LeakReport(**{**values, "worst": [Leak(**leak) for leak in values["worst"]]})
    examples = [example for index in range(len(work.files)) for example in _read(work, index).examples]
    texts = [_text(example) for example in examples]
    groups = [example.group for example in examples]
    with progress("looking for held-out texts in training"):
        leaks = report(texts, np.concatenate(work.sides), groups, work.recipe.train.seed)
    write_sealed(path, json.dumps(asdict(leaks)).encode())
    return leaks


def _text(example: Example) -> str:
    """Text of a document as it is compared with others."""
    return "\n".join(turn.content for turn in example.turns)


def _leak_places(leaks: LeakReport | None, tokens: TokenSet) -> list[tuple[str, str]]:
    """Places of the worst leaks and of the training documents that they occur in, "" for one that is spread."""
    found = leaks.worst if leaks else []
    return [(tokens.where(leak.document), tokens.where(leak.source) if leak.source >= 0 else "") for leak in found]


def _refused(leaks: LeakReport, places: list[tuple[str, str]]) -> SourceError:
    number = leaks.num_exact + leaks.num_near
    first = leaks.worst[0].describe(*places[0]).strip()
    fix = "set data.near_duplicates to together or report, or declare the parts of these rows with split"
    what = f"E_LEAK {number:,} held-out documents are near-duplicates of training ones, such as {first}"
    return SourceError(what, where="data.near_duplicates", fix=fix)
