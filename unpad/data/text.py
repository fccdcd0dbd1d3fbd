"""Texts, conversations and pairs of replies as sequences of tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from unpad.batching.batch import RaggedBatch, from_sequences, required
from unpad.batching.loader import load_micro
from unpad.batching.plan import Micro
from unpad.data import family as families
from unpad.data.meaning import claims
from unpad.data.replies import Replies
from unpad.data.show import Shown, spans_of
from unpad.data.sources.documents import single_document
from unpad.data.sources.example import BadRow
from unpad.data.sources.files import expand, resolve_path
from unpad.data.sources.reader import PAIRS, TEXT_KINDS
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens import corpus_files
from unpad.data.tokens.corpus import Corpus, CorpusReport, open_corpus
from unpad.data.tokens.token_set import TokenSet
from unpad.data.tokens.tokenizer import TOKENIZER, Tokenizer, kept_tokenizer
from unpad.errors import RecipeError
from unpad.recipes.recipe import Recipe, stages_of
from unpad.storage import cache_folder

KINDS = TEXT_KINDS
UNITS = ("sequences", "tokens")
FILES = (TOKENIZER,)
NO_TEXT = None
MOST_CHARACTERS = 1 << 27  # of a run's data that new texts are compared with, for about a minute or two
MOST_BYTES = 1 << 27  # of text that a check keeps in memory
SYSTEM_TURNS = "system_turns"  # of the training conversations, in `facts`


@dataclass(frozen=True, eq=False)
class TextData(families.Data):
    """Encoded sequences of a run.

    A sequence of n tokens has n - 1 positions: the input of position i is token i, its label token i + 1.

    Args:
        tokens: documents; the sequences are these, unless some are pairs.
        replies: sequences of data with pairs, one per reply; None for other data.
    """

    table: families.SequenceTable
    tokens: TokenSet
    tokenizer: Tokenizer
    corpus: Corpus
    recipe: Recipe
    replies: Replies | None
    compares: ClassVar[bool] = True
    least_content: ClassVar[int] = 8
    least_updates: ClassVar[int] = 1000
    augmentation: ClassVar[str] = "augment"
    family: ClassVar[str] = "text"
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @property
    def report(self) -> CorpusReport:
        return self.corpus.report

    @property
    def _sequences(self) -> TokenSet | Replies:
        return self.tokens if self.replies is None else self.replies

    @property
    def num_outputs(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def files(self) -> dict[str, bytes]:
        return {TOKENIZER: self.tokenizer.to_bytes()}

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        return self._sequences.count_targets(seq_ids, starts, stops)

    def load(self, micro: Micro) -> RaggedBatch:
        batch = load_micro(self._sequences, micro, self.tokenizer.pad_id)
        return batch if self.replies is None else self.replies.with_pairs(batch)

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        replies = self.replies
        document, first = (seq_id, 0) if replies is None else replies.place(seq_id)
        span = slice(first + start, first + stop + 1)
        ids, counts = self.tokens.tokens(document)[span], self.tokens.loss_mask(document)[span].copy()
        counts[: first_target - start + 1] = False
        if replies is None:
            return from_sequences([ids.tolist()], [counts.tolist()])
        return replies.with_pairs(from_sequences([ids.tolist()], [counts.tolist()], np.array([seq_id])))

    def show(self, micro: Micro) -> Shown:
        """Its tokens with the last one, which is a label only."""
        batch = self.load(micro)
        last = int(self.tokens_of(int(micro.seq_ids[0]))[int(micro.stops[0])])
        ids, learnt = [*required(batch.input_ids).tolist(), last], [False, *batch.loss_mask.tolist()]
        seq_id, side = micro.seq_ids[:1], ""
        if self.replies is not None and self.replies.pair[seq_id] >= 0:
            side = f" as the {'better' if self.replies.is_chosen(seq_id) else 'worse'} reply"
        return Shown(
            self.where(int(seq_id[0])),
            (f"{len(ids):,} tokens, {sum(learnt):,} learnt{side}",),
            spans_of(self.tokenizer, ids, learnt),
        )

    def tokens_of(self, seq_id: int) -> np.ndarray:
        """Tokens of a sequence, those that are labels only included, (length,) int64."""
        if self.replies is None:
            return self.tokens.tokens(seq_id)
        document, first = self.replies.place(seq_id)
        return self.tokens.tokens(document)[first : first + int(self.replies.lengths[seq_id])]

    def where(self, seq_id: int) -> str:
        return self.tokens.where(seq_id) if self.replies is None else self.replies.where(seq_id)

    def row_spans(self, seq_id: int, start: int, stop: int, first_target: int) -> list[families.RowSpan]:
        if not self.recipe.plan.cross_documents:
            return super().row_spans(seq_id, start, stop, first_target)
        documents, begins = self.tokens.documents_in(seq_id, start, stop + 1)
        first = np.maximum(begins[:-1] - 1, first_target)  # a label is one position before its token
        last = np.maximum(np.minimum(begins[1:] - 1, stop), first)
        targets = self.tokens.count_targets(np.full(len(documents), seq_id), first, last)
        places, begin = [self.tokens.place(document) for document in documents.tolist()], begins[:-1]
        until = np.maximum(np.minimum(stop, begins[1:]), begin)
        spans = np.stack([np.maximum(start, begin) - begin, until - begin, targets], 1)
        return [families.RowSpan(place, *span) for place, span in zip(places, spans.tolist(), strict=True)]

    def placed(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        if self.replies is not None:
            replies = zip(self.replies.document.tolist(), self.replies.lengths.tolist(), strict=True)
            for seq_id, (document, length) in enumerate(replies):
                yield self.tokens.place(document), (seq_id, 0, length - 1)
            return
        for document, seq_id, start, stop in self.tokens.documents_of_sequences():
            last = int(self.table.positions[seq_id])  # the last token of all is a label only
            yield self.tokens.place(document), (seq_id, max(start - 1, 0), min(stop, last))

    @property
    def bad_rows(self) -> Sequence[BadRow]:
        return self.report.bad_rows

    def fingerprint(self) -> str:
        return self.tokens.fingerprint()

    def lines(self) -> list[str]:
        return self.report.lines()

    def compare(self) -> list[str]:
        return self.corpus.compare().leak_lines()

    def check_trainable(self) -> None:
        self.report.lost.refuse("tokenizer")

    def claims(self) -> list[families.Claim]:
        return claims(self.corpus, self.recipe)

    def near_training(self, run: families.Data, seq_ids: np.ndarray) -> families.NearDuplicates:
        assert isinstance(run, TextData), "data of one family"
        if run.report.lost.total > MOST_CHARACTERS:
            reason = f"{run.report.lost.total:,} characters of the run's data are too many"
            return families.not_compared("documents", reason)
        documents = seq_ids if self.replies is None else np.unique(self.replies.document[seq_ids])
        leaks = corpus_files.compare_new(run.recipe, run.tokens, self.recipe, self.tokens, documents)
        counts = leaks.num_holdout, leaks.num_exact, leaks.num_near
        return families.NearDuplicates("documents", *counts, tuple(leaks.places), tuple(leaks.lines()))

    def single_row(self, recipe: Recipe, kind: str) -> tuple[str, str] | None:
        files = expand(recipe.data.text, partial(resolve_path, recipe.data)) if kind == "text" else []
        documents = [document for file in files if (document := single_document(file, recipe.data, 1))]
        return (f"{documents[0].what}, so nothing can be held out", documents[0].fix) if documents else None

    def facts(self) -> dict[str, Any]:
        report = self.report
        counts = {"characters": report.lost.total, "lost_characters": report.lost.lost, SYSTEM_TURNS: report.num_system}
        return {**counts, **report.unread.facts}

    def describe_outputs(self) -> str:
        return f"vocabulary {self.num_outputs:,} ({self.tokenizer.kind})"


def num_outputs(files: dict[str, bytes]) -> int:
    """Size of the vocabulary of a run."""
    return kept_tokenizer(files).vocab_size


def next_command(recipe: Recipe, run: str) -> str:
    """Command that uses a trained run."""
    return f"unpad chat {run}" if recipe.data.converses else f"unpad generate {run} --prompt TEXT"


def near_duplicates(recipe: Recipe) -> list[str]:
    """Lines on held-out documents that are near-duplicates of training ones; see `Family`."""
    families.check_near_duplicates(recipe, TextData)
    work = corpus_files.Preparation(recipe, cache_folder(), Wanted.LEARNING)
    work.list_files(TEXT_KINDS)
    size = sum(file.file.path.stat().st_size for file in work.files)
    if size > MOST_BYTES:
        return [f"near-duplicate texts are not looked for: {size / 1e6:,.0f} MB are too many here; `unpad plan` does"]
    corpus_files.judge_rows(work)
    corpus_files.split_documents(work)
    places = [example.where for index in range(len(work.files)) for example in work.rows(index).examples]
    return [line for leaks in corpus_files.find_leaks(work, places.__getitem__).values() for line in leaks.lines()]


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files that a run keeps, from a folder of Hugging Face.

    Raises:
        SourceError: as `folder_tokenizer`.
    """
    from unpad.data.tokens.folder_tokenizer import folder_tokenizer

    return {TOKENIZER: folder_tokenizer(folder)}


def open_data(recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted = Wanted.LEARNING) -> TextData:
    """Read and encode a recipe's texts; with plan.cross_documents its documents are joined end to end.

    Documents of the test part are always in the table, set apart by its `split`: a file is encoded as a whole.

    Raises:
        SourceError: as `open_corpus`.
        RecipeError: likewise; or a stage mixes pairs with other data, or would join or cut them.
    """
    _check_pairs(recipe)
    tokenizer = kept_tokenizer(kept) if kept is not None else None
    return _text_data(recipe, open_corpus(recipe, tokenizer=tokenizer, wanted=wanted), wanted)


def _check_pairs(recipe: Recipe) -> None:
    """Refuse stages that mix pairs with other data, and plans that join documents when some are pairs."""
    kinds = [kind for kind in KINDS if recipe.data.sources(kind)]
    if PAIRS not in kinds:
        return
    if recipe.plan.cross_documents:
        what, fix = "the replies of pairs are never joined", "set plan.cross_documents=false"
        raise RecipeError(what, where="plan.cross_documents", fix=fix)
    for stage in stages_of(recipe):
        used = [kind for kind in stage.use or kinds if kind in kinds]
        if PAIRS in used and len(used) > 1:
            others = " and ".join(kind for kind in used if kind != PAIRS)
            what = f"stage {stage.name} uses pairs with {others}, but their losses differ"
            fix = f"give each a stage: use: [{used[0]}], and use: [pairs]; or leave data.{used[0]} out"
            raise RecipeError(what, where="stages", fix=fix)


def _text_data(recipe: Recipe, corpus: Corpus, wanted: Wanted) -> TextData:
    tokens = corpus.tokens.joined() if recipe.plan.cross_documents else corpus.tokens
    replies, num_targets = Replies.of(tokens), tokens.num_targets
    lengths, document, bundle = tokens.lengths, np.arange(len(tokens)), None
    if replies is not None:
        lengths, document, bundle, num_targets = replies.lengths, replies.document, replies.pair, replies.num_targets
        most, what = int(lengths[bundle >= 0].max()) - 1, "a reply with its prompt has {} tokens"
        families.refuse_cuts(recipe, most, what, "pairs are never cut", "use ones of up to {}")
    table = families.sequence_table(
        np.maximum(lengths - 1, 0),
        tokens.split[document],
        num_targets=num_targets,
        kind=tokens.kind[document],
        source=tokens.source[document],
        weights=tuple(tokens.weights),
        file_hashes=tokens.file_hashes,
        num_test=int((tokens.split == Split.TEST).sum()) if wanted is Wanted.LEARNING else 0,
        group=tokens.unit[document],
        bundle=bundle,
    )
    return TextData(table, tokens, corpus.tokenizer, corpus, recipe, replies)
