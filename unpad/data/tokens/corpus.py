"""Encoded corpus of a recipe: sources, tokenizer and cache -> one TokenSet.

Every file is hashed. Files in the cache are opened; the others are read, judged together (bad rows, empty corpus,
split), and then encoded. No file is encoded twice, and a warm start reads no row.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from unpad.data.sources.example import BadRow, Example, Unread
from unpad.data.sources.files import resolve_path
from unpad.data.sources.reader import PAIRS, TEXT_KINDS
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens import cache as shards
from unpad.data.tokens import corpus_files
from unpad.data.tokens.cache import Shard, make_key
from unpad.data.tokens.chat_template import has_thoughts
from unpad.data.tokens.corpus_files import CorpusFile, CorpusReport, FileRows, Preparation
from unpad.data.tokens.encode import encode_examples, reserved_texts
from unpad.data.tokens.lost import LostCharacters, commonest
from unpad.data.tokens.token_set import CorpusShard, TokenSet, build_token_set, rows_of
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer, open_tokenizer_file, train_tokenizer
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.storage import cache_folder, sha256
from unpad.terminal.progress import counted


def both_replies(examples: Sequence[Example]) -> list[Example]:
    """Every pair as two conversations, one with the chosen and one with the rejected reply at its end."""
    every = []
    for example in examples:
        assert example.rejected is not None, "an example of a pair"
        every += [example, replace(example, turns=(*example.turns[:-1], example.rejected))]
    return every


def keep_last_reply(examples: Sequence[Example], loss_mask: np.ndarray, offsets: np.ndarray) -> None:
    """Leave loss on the last reply of every conversation alone, in place; those before it belong to the prompt.

    Args:
        loss_mask: (num_tokens,) bool; offsets: (num_examples + 1,) int64.

    Raises:
        SourceError: the tokens with loss of one of several replies are not in one run.
    """
    for example, (start, stop) in zip(examples, pairwise(offsets.tolist()), strict=True):
        mask, num_replies = loss_mask[start:stop], sum(turn.has_loss for turn in example.turns)
        if num_replies == 1:
            continue
        begins = np.flatnonzero(mask[1:] & ~mask[:-1]) + 1  # the first token, BOS or of a prompt, carries no loss
        if len(begins) != num_replies:
            what = f"{num_replies} replies have {len(begins)} runs of tokens to learn, so the last reply is not known"
            fix = "use prompts with one message, or another chat template"
            raise SourceError(f"E_TEMPLATE {what}", where=example.where, fix=fix)
        mask[: begins[-1]] = False


__all__ = ["Corpus", "CorpusReport", "TokenSet", "open_corpus"]


@dataclass
class Corpus:
    """An encoded corpus. `compare` looks for other parts' documents in training, which may take longer than all else.

    Args:
        report: of all but that comparison.
        work: what is known of the files, without their rows; None where nothing is to be compared.
    """

    tokens: TokenSet
    tokenizer: Tokenizer
    report: CorpusReport
    work: Preparation | None

    def compare(self) -> CorpusReport:
        """Compare documents of valid and test with those trained on, once, and return the report of both.

        Raises:
            SourceError: near-duplicates are refused, or a file has changed.
        """
        if self.work is not None:
            work, self.work = self.work, None
            began = time.perf_counter()
            leaks = corpus_files.find_leaks(work, self.tokens.where)
            work.read.clear()
            work.seconds += time.perf_counter() - began
            self.report = replace(self.report, leaks=leaks)
        return self.report


def open_corpus(
    recipe: Recipe,
    *,
    tokenizer: Tokenizer | None = None,
    kinds: Sequence[str] = TEXT_KINDS,
    cache: Path | None = None,
    wanted: Wanted = Wanted.LEARNING,
) -> Corpus:
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
    began, work = time.perf_counter(), Preparation(recipe, cache or cache_folder(), wanted)
    work.list_files(kinds)
    tokenizer = tokenizer or stored_tokenizer(work)
    if tokenizer is not None:
        open_originals(work, tokenizer)
    bad, rows_used = corpus_files.judge_rows(work)
    corpus_files.split_documents(work)
    if tokenizer is None:
        tokenizer = _build_tokenizer(work)
        open_originals(work, tokenizer)  # shards may have outlived a damaged tokenizer
    parts = _originals(work, tokenizer) + _copies(work, tokenizer)
    weights = [source.weight for kind in TEXT_KINDS for source in getattr(recipe.data, kind)]
    hashes = [(str(file.file.path), file.sha256) for file in work.files]
    tokens = build_token_set(parts, weights, hashes, corpus_files.split_settings(work))
    work.read.clear()  # the rows take several times the memory of their tokens
    work.seconds = time.perf_counter() - began
    return Corpus(tokens, tokenizer, report_of(work, tokens, tokenizer, rows_used, bad), work)


def report_of(
    work: Preparation, tokens: TokenSet, tokenizer: Tokenizer, rows_used: int, bad: list[BadRow]
) -> CorpusReport:
    """Count rows, documents, tokens and lost characters; nothing is compared yet."""
    originals, trained = tokens.copy == 0, tokens.split == Split.TRAIN
    assert int(originals.sum()) == rows_used, "a row vanished"
    characters, lost, counts = 0, 0, Counter[str]()
    for shard in (part.shard for part in tokens.parts):
        characters += int(shard.num_chars.sum(dtype=np.int64))
        lost += int(shard.lost_chars.sum(dtype=np.int64))
        counts += Counter(shard.lost_counts)
    num_system = rows_of([part.shard.num_system for part in tokens.parts], np.int64)
    return CorpusReport(
        work=work,
        rows_used=rows_used,
        bad_rows=bad,
        num_train=int((originals & trained).sum()),
        num_holdout=int((tokens.split == Split.HOLDOUT).sum()),
        num_test=int((tokens.split == Split.TEST).sum()),
        num_copies=int((~originals).sum()),
        num_unchanged=_count_unchanged(tokens.parts),
        num_tokens=int(tokens.lengths.sum()),
        lost=LostCharacters(lost, characters, commonest(counts)),
        may_lose=tokenizer.kind == "file",
        num_system=int(num_system[originals & trained].sum()),
        unread=Unread.of([part.shard.unread_fields for part in tokens.parts if not part.shard.copy.any()]),
    )


def _count_unchanged(parts: Sequence[CorpusShard]) -> int:
    """Copies that augmentation left equal to their originals."""
    originals, num = {(part.path, part.kind, part.source): part for part in reversed(parts)}, 0
    for part in parts:
        original = originals[part.path, part.kind, part.source]
        if part is not original:
            rows = np.resize(np.flatnonzero(original.split == Split.TRAIN), part.shard.num_rows).tolist()
            pairs = ((original.shard.row(row), part.shard.row(copy)) for copy, row in enumerate(rows))
            num += sum(np.array_equal(first, second) for first, second in pairs)
    return num


# --------------------------------------------------------------------------- tokenizer


def stored_tokenizer(work: Preparation) -> Tokenizer | None:
    """Open the recipe's tokenizer file, or the tokenizer that was built from this corpus before."""
    if work.recipe.tokenizer.path is not None:
        return open_tokenizer_file(resolve_path(work.recipe.data, work.recipe.tokenizer.path))
    data, damage = shards.read_sealed(_tokenizer_path(work))
    if damage:
        work.events.append(f"cache: the tokenizer of this corpus {damage}; it is built again")
    return load_tokenizer(data) if data is not None else None


def _build_tokenizer(work: Preparation) -> Tokenizer:
    texts = (
        turn.content
        for index in range(len(work.files))
        for example, side in zip(work.rows(index).examples, work.sides[index].tolist(), strict=True)
        if side == Split.TRAIN
        for turn in example.every_turn
    )
    counted_texts = counted(texts, "building the vocabulary", unit="texts")
    tokenizer = train_tokenizer(work.recipe.tokenizer, counted_texts, reserved_texts(work.recipe.data.template))
    # Use the bytes that a later run will open.
    stored = tokenizer.to_bytes()
    shards.write_sealed(_tokenizer_path(work), stored)
    return load_tokenizer(stored)


def _tokenizer_path(work: Preparation) -> Path:
    settings = work.recipe.tokenizer.model_dump(mode="json")
    reserved, corpus = reserved_texts(work.recipe.data.template), corpus_files.corpus_key(work)
    key = make_key("tokenizer", shards.code_key(), settings, reserved, corpus)
    return work.folder / "tokenizers" / f"{key}.json"


# --------------------------------------------------------------------------- shards


def open_originals(work: Preparation, tokenizer: Tokenizer) -> None:
    """Open the shards of this tokenizer in the cache."""
    # Without the fields of later versions that are not set: a run goes on if its data has the key that it had.
    settings = [sha256(tokenizer.to_bytes()), work.recipe.data.template.model_dump(mode="json", exclude_none=True)]
    work.keys = [make_key("originals", file.key, settings) for file in work.files]
    work.shards = [_open(work, index, key) for index, key in enumerate(work.keys)]


def _originals(work: Preparation, tokenizer: Tokenizer) -> list[CorpusShard]:
    parts = []
    for index, (file, key) in enumerate(zip(work.files, work.keys, strict=True)):
        shard = work.shards[index]
        if shard is None:
            shard = _store(work, index, key, encode_rows(work, index, work.rows(index), tokenizer))
        parts.append(part_of(file, shard, key, work.sides[index], work.units[index]))
    return parts


def _copies(work: Preparation, tokenizer: Tokenizer) -> list[CorpusShard]:
    """Build augmented copies of the training originals; held-out documents and pairs never have copies."""
    augment = work.recipe.augment
    if not augment.multiplier:
        return []
    settings, parts = work.copy_settings(), []
    for index, file in enumerate(work.files):
        if file.kind == PAIRS:
            continue
        # A document's split may depend on other files, so the splits are part of the name.
        key = make_key("copies", work.keys[index], settings, sha256(work.sides[index].tobytes()))
        shard = _open(work, index, key)
        if shard is None:
            trained = np.flatnonzero(work.sides[index] == Split.TRAIN)
            originals = work.rows(index).take(np.tile(trained, augment.multiplier))
            copy = np.repeat(np.arange(1, augment.multiplier + 1, dtype=np.uint8), trained.size)
            copies = replace(originals, examples=work.copies(index), copy=copy)
            shard = _store(work, index, key, encode_rows(work, index, copies, tokenizer))
        unit = np.tile(work.units[index][work.sides[index] == Split.TRAIN], augment.multiplier)
        parts.append(part_of(file, shard, key, np.full(shard.num_rows, Split.TRAIN, np.uint8), unit))
    return parts


def part_of(file: CorpusFile, shard: Shard, data_key: str, split: np.ndarray, unit: np.ndarray) -> CorpusShard:
    """Describe a shard of a file as the corpus uses it."""
    return CorpusShard(shard, str(file.file.path), data_key, TEXT_KINDS.index(file.kind), file.source, split, unit)


def _shard_name(work: Preparation, index: int, data_key: str) -> str:
    """Name of a shard in the cache. A file without a declared format may be refused where one with a format is read."""
    return make_key(shards.code_key(), data_key, work.files[index].file.by_ending)


def _open(work: Preparation, index: int, data_key: str) -> Shard | None:
    shard, damage = shards.open_shard(work.folder, _shard_name(work, index, data_key))
    if damage:
        path = work.files[index].file.path
        work.events.append(f"cache: the shard of {path} {damage}; it is built again from the file")
    work.hits += shard is not None
    return shard


def _store(work: Preparation, index: int, data_key: str, shard: Shard) -> Shard:
    """Write a shard and open it like a later run: mapped, so that its memory can be released."""
    work.misses += 1
    work.encoded += shard.num_rows
    key = _shard_name(work, index, data_key)
    shards.write_shard(work.folder, key, shard)
    return shards.open_shard(work.folder, key)[0] or shard


def _learned(example: Example, targets: np.ndarray, tokenizer: Tokenizer) -> str:
    """Text that carries loss, from the messages; with thoughts from the ids, as templates may write only a part."""
    if tokenizer.chat is not None and any(map(has_thoughts, example.turns)):
        return tokenizer.decode(targets.tolist())
    return "".join(turn.content for turn in example.turns if turn.has_loss)


def encode_rows(work: Preparation, index: int, rows: FileRows, tokenizer: Tokenizer) -> Shard:
    """Encode rows of a file; a pair becomes its chosen reply, then its rejected one."""
    path, is_pair = str(work.files[index].file.path), work.files[index].kind == PAIRS
    examples = both_replies(rows.examples) if is_pair else rows.examples
    tokens, loss_mask, offsets, lost = encode_examples(examples, tokenizer, work.recipe.data.template)
    if is_pair:
        keep_last_reply(examples, loss_mask, offsets)
    with_loss = [
        _learned(example, tokens[start:stop][loss_mask[start:stop]], tokenizer)
        for example, (start, stop) in zip(examples, pairwise(offsets.tolist()), strict=True)
    ]
    each = 2 if is_pair else 1  # conversations of a row

    def of_rows(counts: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.asarray(np.array(counts, np.int32).reshape(-1, each).sum(1, dtype=np.int32))

    return Shard(
        tokens=tokens,
        loss_mask=loss_mask,
        offsets=offsets[::each],
        content_key=rows.content_key,
        declared=rows.declared,
        copy=rows.copy,
        num_targets=np.add.reduceat(loss_mask, offsets[:-1:each], dtype=np.int32),
        target_chars=of_rows([len(text) for text in with_loss]),
        target_bytes=of_rows([len(text.encode()) for text in with_loss]),
        num_chars=of_rows([sum(len(turn.content) for turn in e.turns) for e in examples]),
        **dict(zip(("lost_chars", "lost_target_chars", "lost_target_bytes"), map(of_rows, lost.num), strict=True)),
        num_system=np.array([sum(turn.role == "system" for turn in e.turns) for e in rows.examples], np.int32),
        num_chosen=np.diff(offsets)[::2].astype(np.int32) if is_pair else np.zeros(len(rows.examples), np.int32),
        details=shards.pack_details(
            (e.where.removeprefix(path) for e in rows.examples),
            (e.group for e in rows.examples),
            (e.keywords for e in rows.examples),
            lost.counts,
        ),
        faults=shards.pack_faults(rows.bad, work.files[index].file.unread, path),
    )
