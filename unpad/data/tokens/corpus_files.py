"""Source files of a corpus and their rows: what is known of them while it is prepared, their split, and documents of
other parts that occur in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources import split as splits
from unpad.data.sources.bad_rows import apply_policy, fault_lines, refuse_empty
from unpad.data.sources.documents import Shape, describe_book
from unpad.data.sources.example import BadRow, Example, Unread, count_bad
from unpad.data.sources.files import SourceFile, expand, resolve_path, unreadable
from unpad.data.sources.leaks import NEW, Document, Leak, LeakReport, compare, near_sets, plain, refused, report
from unpad.data.sources.reader import PAIRS, TEXT_KINDS, read_file, read_rows, reading, refuse_given
from unpad.data.sources.split import PARTS, Split, Wanted, content_key, units
from unpad.data.tokens.augment import copies_of, load_synonyms
from unpad.data.tokens.cache import Shard, code_key, make_key, noted_sha256, read_sealed, write_sealed
from unpad.data.tokens.lost import LostCharacters
from unpad.data.tokens.token_set import TokenSet, rows_of
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256
from unpad.terminal.progress import counted, progress
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

    def take(self, index: np.ndarray) -> FileRows:
        """Some of the rows, (num,) int64, without the bad ones."""
        columns = self.content_key[index], self.declared[index], self.copy[index]
        return FileRows([self.examples[row] for row in index.tolist()], [], *columns)


@dataclass
class Preparation:
    """State of `open_corpus`, and what its report tells of it.

    Args:
        shards: the originals of each file, None until opened or built.
        num_followed: rows without a split that are of the test part, as a row of their group or a copy declares it.
        held_groups: named groups with a document of valid; shared_groups: those also with one of train.
        book: description of a text whose end is held out, as it is one in paragraphs.
        events: damaged files that were rebuilt.
        encoded: documents encoded this time, augmented copies included.
        seconds: that all of it took.
    """

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
    book: Shape | None = None
    events: list[str] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    encoded: int = 0
    seconds: float = 0.0

    def list_files(self, kinds: Sequence[str]) -> None:
        """Take the files of some kinds, hashed and unread."""
        self.files = list_files(self.recipe, kinds)
        self.shards = [None] * len(self.files)

    def rows(self, index: int) -> FileRows:
        """Read a file, once.

        Raises:
            SourceError: the file changed since it was hashed.
        """
        if index not in self.read:
            file = self.files[index]
            examples, bad = read_file(file.kind, file.file, self.recipe.data)
            if self.recipe.tokenizer.path is None and (refused := refuse_given(file.kind, file.file, examples)):
                bad += refused
                examples = [example for example in examples if not example.given]
            if hash_file(file.file.path) != file.sha256:
                where = str(file.file.path.absolute())
                fix = "start again when it is complete"
                raise SourceError("the file changed while it was read", where=where, fix=fix)
            self.read[index] = FileRows(
                examples,
                bad,
                content_key=np.array([content_key(example) for example in examples], np.uint64),
                declared=splits.declared_splits(example.split for example in examples),
                copy=np.zeros(len(examples), np.uint8),
            )
        return self.read[index]

    def kept(self, path: Path, what: str, make: Callable[[], bytes]) -> bytes:
        """Bytes of a file of the cache, made where it has none; a damaged one is an event.

        Args:
            what: name of its content, singular.
        """
        data, damage = read_sealed(path)
        if damage:
            self.events.append(f"cache: {what} of this corpus {damage}; it is made again")
        if data is None:
            data = make()
            write_sealed(path, data)
        return data

    def copy_settings(self) -> list[object]:
        """Everything but the documents that determines their augmented copies, as JSON."""
        augment = self.recipe.augment.model_dump(mode="json", exclude={"synonyms_file"})
        return [augment, sorted(self._synonyms.items()), self.recipe.train.seed]

    def copies(self, index: int) -> list[Example]:
        """Augmented copies of a file's training documents, round after round; of pairs there are none."""
        if self.files[index].kind == PAIRS or not self.recipe.augment.multiplier:
            return []
        originals = [self.rows(index).examples[row] for row in np.flatnonzero(self.sides[index] == Split.TRAIN)]
        return copies_of(originals, self.recipe.augment, self._synonyms, self.recipe.train.seed)

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
            separator = data.separator if file.format == "text" else None
            settings = ["join", data.join] if data.join and separator else []
            settings += ["unwrap"] if data.unwrap and kind == "text" else []
            # Without the fields of later versions that are not set: a run goes on if its data has the key that it had.
            further = [named] if any(named := (file.prompt, file.reply, file.ignore)) else []
            key = make_key(digest, kind, file.format, file.field, separator, *further, *settings)
            files.append(CorpusFile(kind, file, first + file.source, digest, key))
    if not files:
        fix = f"set {' or '.join(f'data.{kind}' for kind in kinds)}"
        raise SourceError("the recipe names no data", where="data", fix=fix)
    return files


def hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return noted_sha256(file)
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
    apply_policy(bad, total + count_bad(bad), work.recipe.data, files=[file.file for file in work.files])
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
        num_tokens: of all documents, copies included; lost: their characters that the tokenizer lost.
        may_lose: whether the tokenizer is one of a file, which may lack characters.
        num_unchanged: augmented copies that are equal to their originals.
        num_system: system turns of training conversations.
        unread: fields of the rows that nobody read.
        leaks: as `find_leaks` has them; None until valid and test are compared with training.
    """

    work: Preparation
    rows_used: int
    bad_rows: list[BadRow]
    num_train: int
    num_holdout: int
    num_test: int
    num_copies: int
    num_unchanged: int
    num_tokens: int
    lost: LostCharacters
    may_lose: bool
    num_system: int
    unread: Unread
    leaks: dict[Split, LeakReport] | None = None

    def lines(self) -> list[str]:
        """The report as text."""
        copies = f" and {number_of(self.num_copies, 'augmented copies')}" if self.num_copies else ""
        copies += f", {self.num_unchanged:,} of them equal to their originals" if self.num_unchanged else ""
        work, num_bad = self.work, count_bad(self.bad_rows)
        lines = [
            f"{number_of(len(work.files), 'files')}: {number_of(self.rows_used + num_bad, 'rows')} read"
            f" = {self.rows_used:,} used + {num_bad:,} quarantined",
            f"{self._parts(copies)}; {number_of(self.num_tokens, 'tokens')},"
            f" {self.lost.total / max(self.num_tokens, 1):.2f} characters each",
            f"cache: {number_of(work.hits, 'hits')}, {work.misses:,} missed,"
            f" {number_of(work.encoded, 'documents')} encoded, {work.seconds:.2f} s",
        ]
        lines += self.unread.lines()
        if work.book:
            held = f"  its end is held out, {number_of(self.num_holdout, 'documents')}"
            lines += [f"note: {work.book.what}", f"  do: {work.book.fix}", held]
        if work.num_followed:
            lines.append(f"  {describe_followed(work.num_followed)}")
        if self.lost.lost or self.may_lose:
            lines += self.lost.lines()
        lines += [*self.group_lines(), *self.leak_lines(), *work.events]
        return lines + fault_lines(self.bad_rows, "  quarantined: ")

    def group_lines(self) -> list[str]:
        """Remark on a valid part that is made of whole groups, such as facts, that training never saw."""
        if not self.work.held_groups or self.work.shared_groups:
            return []
        what = f"held out {number_of(self.work.held_groups, 'groups')} absent from training"
        what += ": this measures other facts than those that are learnt"
        return [f'{what}; to measure other phrasings of the same facts, declare "split" in rows of each group']

    def leak_lines(self) -> list[str]:
        """The leaks of every part as text; empty where nothing was compared."""
        return [line for leaks in (self.leaks or {}).values() for line in leaks.lines()]

    def _parts(self, copies: str) -> str:
        if self.num_test and not self.num_train + self.num_holdout:  # new data
            return f"{number_of(self.num_test, 'documents')} to evaluate"
        test = f", {self.num_test:,} of the test part for `unpad eval` alone" if self.num_test else ""
        return f"{number_of(self.num_train, 'training documents')}{copies}, {self.num_holdout:,} held out{test}"


def describe_followed(number: int) -> str:
    """Describe rows that are of the test part for another row's sake, with the remedy."""
    are = "is" if number == 1 else "are"
    why = f"{are} of the test part, since a row of their group or a copy declares it"
    return f'{number_of(number, "rows")} without a split {why}; declare "split": "train" in those to train on'


# --------------------------------------------------------------------------- split


def split_documents(work: Preparation) -> None:
    """Give every document its part of the split, kind by kind, so that every kind has held-out documents, and number
    the units of documents that belong together.

    Raises:
        SourceError: there is nothing to train on.
    """
    rows = [work.rows(index) if shard is None else shard for index, shard in enumerate(work.shards)]
    sizes = [row.declared.size for row in rows]
    keys = rows_of([row.content_key for row in rows], np.uint64)
    declared = rows_of([row.declared for row in rows], np.int8)
    groups = _groups(work)
    kinds = np.repeat([TEXT_KINDS.index(file.kind) for file in work.files], sizes)
    # A group ties the rows of one kind: texts on the facts of conversations have their own share held out.
    links = [(np.arange(len(keys)), np.where(groups < 0, -1, groups * len(TEXT_KINDS) + kinds))]
    if work.recipe.data.near_duplicates == "together" and work.wanted is not Wanted.NEW:
        links.append((np.arange(len(keys)), near_documents(work)))
    unit, work.book = units(keys, links), _book(work)
    split = _divide_kinds(work, keys, declared, kinds, unit)
    if work.wanted is not Wanted.NEW:
        work.num_followed = int(((split == Split.TEST) & (declared == Split.UNDECLARED)).sum())
        if (split != Split.TRAIN).all():
            fix = 'declare less of it "split": "valid" or "test", or add data'
            if work.num_followed:
                fix = f"{describe_followed(work.num_followed)}; {fix}"
            raise SourceError("every document is held out, so there is nothing to train on", where="data", fix=fix)
    mine = kinds != TEXT_KINDS.index(PAIRS)  # pairs of one prompt are a group that no row names
    held = np.setdiff1d(groups[mine & (split == Split.HOLDOUT)], [-1])
    work.held_groups = len(held)
    work.shared_groups = int(np.isin(held, groups[split == Split.TRAIN]).sum())
    ends = np.cumsum(sizes)[:-1]
    work.sides, work.units = np.split(split, ends), np.split(unit, ends)


def _divide_kinds(
    work: Preparation, keys: np.ndarray, declared: np.ndarray, kinds: np.ndarray, unit: np.ndarray
) -> np.ndarray:
    """Part of every document, (num_documents,) uint8 of `Split`. Each kind is divided by itself; what is near
    documents of other kinds follows these. Of a book, or a text that is joined, the end is held out."""
    follows = work.recipe.data.split_version > 1 and work.wanted is not Wanted.NEW
    texts = [file.file.format for file in work.files if file.kind == "text"]
    in_order = work.book or (work.recipe.data.join and texts == ["text"] and work.wanted is not Wanted.NEW)
    known = np.full(int(unit.max(initial=-1)) + 1, Split.UNDECLARED, np.int8)  # (num_units,)
    for value in (Split.TEST, Split.HOLDOUT, Split.TRAIN):
        known[unit[declared == value]] = value
    split = np.zeros(len(keys), np.uint8)
    for kind in np.unique(kinds):
        mine = np.flatnonzero(kinds == kind)
        declared_split = declared[mine]
        if follows:
            declared_split = np.where(declared_split == Split.UNDECLARED, known[unit[mine]], declared_split)
        ties = [(np.arange(len(mine)), unit[mine])]
        if in_order and TEXT_KINDS[kind] == "text" and (declared_split == Split.UNDECLARED).all():
            split[mine] = splits.assign_end(unit[mine], work.recipe.data.holdout)
        else:
            split[mine] = splits.divide(
                keys[mine], declared_split, work.recipe.data, work.recipe.train.seed, work.wanted, links=ties
            )
        free = known[unit[mine]] == Split.UNDECLARED
        known[unit[mine][free]] = split[mine][free]
    return split


def _book(work: Preparation) -> Shape | None:
    """Describe the only file of texts if it is a book; None also where the rule of the split knows of no books."""
    texts = [index for index, file in enumerate(work.files) if file.kind == "text"]
    if len(texts) != 1 or work.recipe.data.split_version < 3 or work.wanted is Wanted.NEW:
        return None
    (index,) = texts
    shard = work.shards[index]
    characters = shard.num_chars.tolist() if shard else [len(one.turns[0].content) for one in work.rows(index).examples]
    return describe_book(work.files[index].file, work.recipe.data, characters)


def _groups(work: Preparation) -> np.ndarray:
    """Number of the group of every document, (num_documents,) int64; -1 without one."""
    named = [
        [example.group for example in work.rows(index).examples] if shard is None else shard.groups
        for index, shard in enumerate(work.shards)
    ]
    return splits.numbered([name for names in named for name in names])


def split_settings(work: Preparation) -> tuple[object, ...]:
    """Everything besides the files that determines the split."""
    data, seed = work.recipe.data, work.recipe.train.seed
    if data.split_version == 1:
        return data.holdout, seed
    return data.holdout, seed, min(data.split_version, 2), sha256(b"".join(side.tobytes() for side in work.sides))


# --------------------------------------------------------------------------- documents that occur in training


def find_leaks(work: Preparation, where: Callable[[int], str]) -> dict[Split, LeakReport]:
    """Compare the originals of valid and test with the training ones; a part without any has no entry.

    Args:
        where: place of a document by its number.

    Raises:
        SourceError: E_LEAK, there are some and `data.near_duplicates` is refuse.
    """
    found: dict[Split, LeakReport] = {}
    for part in (Split.HOLDOUT, Split.TEST):
        leaks = _leaks_of(work, part)
        if leaks is not None:
            places = [(where(leak.document), where(leak.source)) for leak in leaks.worst]
            if places and work.recipe.data.near_duplicates == "refuse":
                first = leaks.worst[0].describe(*places[0]).strip()
                raise refused(leaks.part, leaks.num_exact + leaks.num_near, "documents", first)
            found[part] = replace(leaks, places=places)
    return found


def _leaks_of(work: Preparation, part: Split) -> LeakReport | None:
    """Compare a part with the training documents, once per corpus and split; None if it has no documents."""
    if work.wanted is Wanted.NEW or not any((side == part).any() for side in work.sides):
        return None
    copied = [work.copy_settings()] if work.recipe.augment.multiplier else []
    path = work.folder / "leaks" / f"{make_key('leaks', code_key(), corpus_key(work), PARTS[part], *copied)}.json"

    def made() -> bytes:
        examples = [example for index in range(len(work.files)) for example in work.rows(index).examples]
        texts, groups = [text_of(example) for example in examples], [example.group for example in examples]
        with progress(f"looking for texts of {PARTS[part]} in training"):
            leaks = report(texts, np.concatenate(work.sides), groups, part, _copies(work))
        return json.dumps(asdict(leaks)).encode()

    values = json.loads(work.kept(path, "the leak report", made))
    return LeakReport(**{**values, "worst": [Leak(**leak) for leak in values["worst"]]})


def _copies(work: Preparation) -> dict[str, int]:
    """Augmented copies as `plain` has them -> index of their document."""
    sources, first = dict[str, int](), 0
    for index, side in enumerate(work.sides):
        trained = np.flatnonzero(side == Split.TRAIN) + first
        for number, copy in enumerate(work.copies(index)):
            sources.setdefault(plain(text_of(copy)), int(trained[number % len(trained)]))
        first += len(side)
    return sources


def near_documents(work: Preparation) -> NDArray[np.int64]:
    """Sets of near-duplicates among all documents as `near_sets` has them, looked for once per set of files."""
    key = make_key("near sets", code_key(), [file.key for file in work.files])
    path = work.folder / "near" / f"{key}.bin"

    def made() -> bytes:
        texts = [text_of(example) for index in range(len(work.files)) for example in work.rows(index).examples]
        with progress("looking for near-duplicates"):
            return near_sets(texts).astype("<i8").tobytes()

    return np.frombuffer(work.kept(path, "the list of near-duplicates", made), "<i8").astype(np.int64)


def compare_new(recipe: Recipe, tokens: TokenSet, new_recipe: Recipe, new: TokenSet, seq_ids: np.ndarray) -> LeakReport:
    """Compare new documents with the training originals of a run, read from its files as a stream.

    Args:
        recipe, tokens: recipe and tokens of the run; new_recipe, new: those of the new documents.
        seq_ids: (n,) sequences of `new` with the documents to compare.

    Raises:
        SourceError: a file of the run cannot be read, or changed.
    """
    spans = [new.documents[new.first_document[i] : new.first_document[i + 1]] for i in seq_ids.tolist()]
    numbers = np.sort(np.concatenate([np.zeros(0, np.int64), *spans])).tolist()
    asked = set(numbers)
    documents = [example for number, example in enumerate(_stream(new_recipe, new)) if number in asked]
    split = rows_of([part.split for part in tokens.parts], np.uint8)

    def corpus() -> Iterator[Document]:
        trained = counted(_stream(recipe, tokens), "looking for the new texts in training", len(split), "documents")
        for number, example in enumerate(trained):
            yield Document(number, text_of(example), example.group, bool(split[number] == Split.TRAIN))

    texts, groups = [text_of(example) for example in documents], [example.group for example in documents]
    leaks = compare(texts, groups, corpus, NEW, numbers=numbers)
    return replace(leaks, places=[(new.place(leak.document), tokens.place(leak.source)) for leak in leaks.worst])


def _stream(recipe: Recipe, tokens: TokenSet) -> Iterator[Example]:
    """Read the originals of a corpus again, in the order of its documents."""
    hashes, number = dict(tokens.file_hashes), 0
    for file in list_files(recipe, TEXT_KINDS):
        path = file.file.path
        if hashes.get(str(path)) != file.sha256:
            raise SourceError("the file changed while it was read", where=str(path), fix="start again")
        with reading(path):
            for row in read_rows(file.kind, file.file, recipe.data):
                if isinstance(row, Example):
                    number += 1
                    yield row
    assert number == sum(part.shard.num_rows for part in tokens.parts if not part.shard.copy.any()), "a row vanished"


def text_of(example: Example) -> str:
    """Text of a document to compare with others; without system messages, which many conversations share."""
    turns = [turn.content for turn in example.turns if turn.role != "system"]
    return "\n".join(turns or [turn.content for turn in example.turns])
