"""Texts and conversations as sequences of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.batching.loader import load_micro
from unpad.batching.plan import Micro
from unpad.data.family import Data, Sample, SequenceTable, sequence_table
from unpad.data.near_duplicates import NearDuplicates, not_compared
from unpad.data.sources.read import TEXT_KINDS
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens.corpus import Corpus, CorpusReport, open_corpus
from unpad.data.tokens.corpus_leaks import compare_new
from unpad.data.tokens.corpus_sample import sample_corpus
from unpad.data.tokens.token_set import TokenSet
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer
from unpad.recipes.recipe import Recipe

KINDS = TEXT_KINDS
UNITS = ("sequences", "tokens")
TOKENIZER = "tokenizer.json"
FILES = (TOKENIZER,)
NO_TEXT = None
MOST_CHARACTERS = 1 << 27  # of a run's data that new texts are compared with, for about a minute or two
SYSTEM_TURNS = "system_turns"  # of the training conversations, in `facts`


@dataclass(frozen=True, eq=False)
class TextData(Data):
    """Encoded sequences of a run.

    A sequence of n tokens has n - 1 positions: the input of position i is token i, its label token i + 1.
    """

    table: SequenceTable
    tokens: TokenSet
    tokenizer: Tokenizer
    corpus: Corpus
    recipe: Recipe
    compares: ClassVar[bool] = True
    family: ClassVar[str] = "text"
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @property
    def report(self) -> CorpusReport:
        return self.corpus.report

    @property
    def num_outputs(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def files(self) -> dict[str, bytes]:
        return {TOKENIZER: self.tokenizer.to_bytes()}

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        return self.tokens.count_targets(seq_ids, starts, stops)

    def load(self, micro: Micro) -> RaggedBatch:
        return load_micro(self.tokens, micro, self.tokenizer.pad_id)

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        ids = self.tokens.tokens(seq_id)[start : stop + 1]
        counts = self.tokens.loss_mask(seq_id)[start : stop + 1].copy()
        counts[: first_target - start + 1] = False
        return from_sequences([ids.tolist()], [counts.tolist()])

    def where(self, seq_id: int) -> str:
        return self.tokens.where(seq_id)

    def fingerprint(self) -> str:
        return self.tokens.fingerprint()

    def lines(self) -> list[str]:
        return self.report.lines()

    def compare(self) -> list[str]:
        return self.corpus.compare().leak_lines()

    def check_trainable(self) -> None:
        self.report.lost.refuse("tokenizer")

    def near_training(self, run: Data, seq_ids: np.ndarray) -> NearDuplicates:
        assert isinstance(run, TextData), "data of one family"
        if run.report.characters > MOST_CHARACTERS:
            return not_compared("documents", f"{run.report.characters:,} characters of the run's data are too many")
        leaks, places = compare_new(run.recipe, run.tokens, self.recipe, self.tokens, seq_ids)
        counts = leaks.num_holdout, leaks.num_exact, leaks.num_near
        return NearDuplicates("documents", *counts, tuple(places), tuple(leaks.lines(places)))

    def facts(self) -> dict[str, int]:
        report = self.report
        return {
            "characters": report.characters,
            "lost_characters": report.lost.lost,
            SYSTEM_TURNS: report.num_system,
        }

    def describe_outputs(self) -> str:
        return f"vocabulary {self.num_outputs:,}"


def num_outputs(files: dict[str, bytes]) -> int:
    """Size of the vocabulary of a run."""
    return load_tokenizer(files[TOKENIZER]).vocab_size


def next_command(recipe: Recipe, run: str) -> str:
    """Command that uses a trained run."""
    return f"unpad chat {run}" if recipe.data.chat else f"unpad generate {run} --prompt TEXT"


def open_data(recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted = Wanted.LEARNING) -> TextData:
    """Read and encode a recipe's texts; with plan.cross_documents its documents are joined end to end.

    Documents of the test part are always in the table, whose `split` sets them apart: a file is encoded as a whole.

    Raises:
        SourceError, RecipeError: as `open_corpus`.
    """
    tokenizer = load_tokenizer(kept[TOKENIZER]) if kept is not None else None
    return _text_data(recipe, open_corpus(recipe, tokenizer=tokenizer, wanted=wanted), wanted)


def open_sample(recipe: Recipe) -> Sample | None:
    """Encode some training documents of a large corpus that the cache does not know; None for any other, and where all
    documents are joined to one sequence."""
    sampled = None if recipe.plan.cross_documents else sample_corpus(recipe)
    if sampled is None:
        return None
    note = ", with a vocabulary learned from them alone" if sampled.learned else ""
    return Sample(_text_data(recipe, sampled.corpus, Wanted.LEARNING), sampled.num_documents, "documents", note)


def _text_data(recipe: Recipe, corpus: Corpus, wanted: Wanted) -> TextData:
    tokens = corpus.tokens.joined() if recipe.plan.cross_documents else corpus.tokens
    table = sequence_table(
        np.maximum(tokens.lengths - 1, 0),
        tokens.split,
        num_targets=tokens.num_targets,
        kind=tokens.kind,
        source=tokens.source,
        weights=tokens.weights,
        file_hashes=tokens.file_hashes,
        num_test=int((tokens.split == Split.TEST).sum()) if wanted is Wanted.LEARNING else 0,
        group=tokens.unit,
    )
    return TextData(table, tokens, corpus.tokenizer, corpus, recipe)
