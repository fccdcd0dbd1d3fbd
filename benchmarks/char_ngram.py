"""Bits per character of character n-grams on the split of a run of `unpad train llm`: the number a model has to beat.

    python benchmarks/char_ngram.py RUN

Interpolated modified Kneser-Ney: Chen and Goodman (1999), "An empirical study of smoothing techniques for language
modeling", section 4.1.6. Fitted on the run's training documents, augmented copies left out; measured on the documents
it holds out, with the convention of `unpad eval`: the bits of every character and of the document's end, divided by
the characters. Where the run has a checkpoint, its own number follows, and the difference on the same documents: long
documents make each interval wide, and the difference much less so.

The symbols are the characters of training, END, and UNKNOWN for every other character. Below the single characters
lies a uniform distribution over all symbols, so each has a probability everywhere. A character that training lacks
costs the bits of UNKNOWN and 8 for each of its UTF-8 bytes; no UTF-8 character is the beginning of another, so the
whole is a proper code and its bits compare with those of any other model.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from unpad.data.measuring import Measuring
from unpad.data.sources.files import expand, resolve_path
from unpad.data.sources.reader import read_file
from unpad.data.sources.split import Split
from unpad.data.text import open_data
from unpad.data.tokens.token_set import TokenSet
from unpad.evaluation.metrics import Metric, ratio_of
from unpad.evaluation.text import DocumentSums, document_nll, summarise
from unpad.inference.loaded import load
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RECIPE, find_run
from unpad.run.kept import open_files

ORDERS = (3, 4, 5, 8)
# Surrogates are no characters, so no text holds them.
START, END, UNKNOWN = "\ud800", "\udfff", "\udc00"


@dataclass(frozen=True)
class CharNgram:
    """A fitted model; index k of a list belongs to n-grams of k + 1 symbols.

    Args:
        alphabet: the characters of training and END; UNKNOWN is not among them.
        counts: n-gram -> its count.
        contexts: context -> (sum of the counts of its n-grams, share of the mass that goes to the shorter context).
        discounts: what is taken from a count of 0, 1, 2, and 3 or more.
    """

    order: int
    alphabet: frozenset[str]
    counts: list[Counter[str]]
    contexts: list[dict[str, tuple[int, float]]]
    discounts: list[tuple[float, float, float, float]]

    def probability(self, symbol: str, context: str) -> float:
        """Probability of a symbol of the alphabet, or of UNKNOWN, after a context that begins with START."""
        context = context[-(self.order - 1) :] if self.order > 1 else ""
        value = 1.0 / (len(self.alphabet) + 1)
        for size in range(len(context) + 1):
            shorter = context[len(context) - size :]
            if shorter not in self.contexts[size]:
                break  # nor is any longer one
            total, rest = self.contexts[size][shorter]
            count = self.counts[size][shorter + symbol]
            value = (count - self.discounts[size][min(count, 3)]) / total + rest * value
        return value

    def bits(self, text: str) -> float:
        """Bits of a document: its characters and its END."""
        return -sum(math.log2(self.probability(*pair)) for pair in self._symbols(text)) + sum(
            8 * len(char.encode()) for char in text if char not in self.alphabet
        )

    def _symbols(self, text: str) -> list[tuple[str, str]]:
        """Every symbol of a document with the context it is coded in."""
        whole, reach = START + text + END, self.order - 1
        return [
            (symbol if symbol in self.alphabet else UNKNOWN, whole[max(0, i - reach) : i])
            for i, symbol in enumerate(whole)
            if i
        ]


def fit(texts: Sequence[str], order: int) -> CharNgram:
    """Count, discount, and give what was discounted to the shorter contexts."""
    counts = _counts([START + text + END for text in texts], order)
    discounts = [_discounts(level) for level in counts]
    contexts: list[dict[str, tuple[int, float]]] = []
    for level, taken in zip(counts, discounts, strict=True):
        sums: dict[str, list[float]] = {}
        for ngram, count in level.items():
            entry = sums.setdefault(ngram[:-1], [0, 0.0])
            entry[0] += count
            entry[1] += taken[min(count, 3)]
        contexts.append({context: (int(total), lost / total) for context, (total, lost) in sums.items()})
    alphabet = frozenset(char for text in texts for char in text) | {END}
    return CharNgram(order, alphabet, counts, contexts, discounts)


def _counts(documents: Sequence[str], order: int) -> list[Counter[str]]:
    """Counts of the n-grams of 1 to `order` symbols.

    The longest are counted as they occur; a shorter one by the different symbols that precede it, and as it occurs
    where it begins a document, as nothing precedes it there. START itself is never coded, so it is no n-gram.
    """
    longest = Counter(doc[i : i + order] for doc in documents for i in range(len(doc) - order + 1))
    levels = [longest]
    for size in range(order - 1, 0, -1):
        level = Counter(ngram[1:] for ngram in levels[0])
        level.update(doc[:size] for doc in documents if len(doc) >= size)
        levels.insert(0, level)
    del levels[0][START]
    return levels


def _discounts(level: Counter[str]) -> tuple[float, float, float, float]:
    """Discounts for counts of 0, 1, 2, 3+ (Chen and Goodman, equation 26); fixed ones where too little was counted."""
    n = Counter(count for count in level.values() if count <= 4)
    if all(n[count] for count in (1, 2, 3, 4)):
        share = n[1] / (n[1] + 2 * n[2])
        one, two, more = (count - (count + 1) * share * n[count + 1] / n[count] for count in (1, 2, 3))
        if min(one, two, more) > 0:
            return (0.0, one, two, more)
    return (0.0, 0.5, 1.0, 1.5)


def measure(model: CharNgram, texts: Sequence[str]) -> DocumentSums:
    """Nats, symbols, characters and bytes of every document."""
    return DocumentSums(
        nll=np.array([model.bits(text) for text in texts]) * math.log(2),
        targets=np.array([len(text) + 1 for text in texts]),
        chars=np.array([len(text) for text in texts]),
        num_bytes=np.array([len(text.encode()) for text in texts]),
    )


def read_texts(recipe: Recipe, tokens: TokenSet) -> list[str]:
    """The texts of the originals of a corpus, in the order of its sequences; "" for an augmented copy."""
    found = {
        example.where: "".join(turn.content for turn in example.turns)
        for file in expand(recipe.data.text, partial(resolve_path, recipe.data))
        for example in read_file("text", file, recipe.data)[0]
    }
    return ["" if tokens.copy[i] else found[tokens.where(i)] for i in range(len(tokens))]


def difference(ours: DocumentSums, theirs: DocumentSums) -> Metric:
    """Bits per character of one model less those of another on the same documents, resampled together."""
    bits = (ours.nll - theirs.nll) / math.log(2)
    return ratio_of(bits, ours.chars)


def main(name: str) -> None:
    folder = find_run(name)
    recipe = load_recipe(str(folder / RECIPE))
    if recipe.data.chat or recipe.data.pairs:
        sys.exit(f"{name} also learnt conversations, whose bits are those of replies: name a run of data.text alone")
    data = open_data(recipe, open_files(recipe, folder))
    tokens = data.tokens
    texts = read_texts(recipe, tokens)
    held_out = np.flatnonzero(tokens.split == Split.HOLDOUT)
    train = [texts[i] for i in np.flatnonzero((tokens.split == Split.TRAIN) & (tokens.copy == 0))]
    test = [texts[i] for i in held_out]
    print(
        f"{len(train):,} training documents of {sum(map(len, train)):,} characters; "
        f"{len(test):,} held out of {sum(map(len, test)):,}"
    )
    measured = {order: measure(fit(train, order), test) for order in ORDERS}
    for order, sums in measured.items():
        print(_line(f"order {order}", summarise(sums)["bits_per_char"]))
    if (folder / "checkpoints").is_dir():
        run = load(name)
        sums = document_nll(Measuring(run.model, data, held_out, recipe.plan))
        print(_line(f"the run at step {run.step}", summarise(sums)["bits_per_char"]))
        best = min(ORDERS, key=lambda order: measured[order].nll.sum())
        print(_line(f"the run less order {best}, document by document", difference(sums, measured[best])))


def _line(label: str, metric: Metric) -> str:
    return f"{label}: {metric.value:.4f} bits per character, 95 % {metric.low:.4f} to {metric.high:.4f}"


if __name__ == "__main__":
    main(sys.argv[1])
