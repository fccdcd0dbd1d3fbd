"""What a simple method gets on the rows that a model was measured on, and what that says of the model.

Methods learn from the training part, and are chosen by the valid part. A family calls them in its `simple`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from unpad.evaluation.metrics import Metric, measured, written
from unpad.evaluation.rows import GROUP, Columns, ExampleRows
from unpad.terminal.table import number_of

MOST_ROWS, MOST_SYMBOLS, MOST_PIXELS = 5000, 1 << 22, 1 << 28  # of rows that a method reads: some seconds


VERDICTS = {
    "model": "better than a simple method", "simple": "a simple method is better on these rows",
    "neither": "not shown to be better than a simple method",
}  # fmt: skip


class Guesses(NamedTuple):
    """Answers of a simple method to rows.

    Args:
        measure: of the rows; method: in words.
        columns: in place of the model's; nan in a row without an answer.
    """

    measure: str
    method: str
    columns: Columns


@dataclass(frozen=True)
class Simple:
    """A simple method beside the model.

    Args:
        ours: the model's measure; theirs: the method's; gap: ours less theirs. All are of the same rows.
    """

    measure: str
    method: str
    ours: float
    theirs: Metric
    gap: Metric

    @property
    def better(self) -> str:
        """Which is better by more than chance: model, simple, or neither."""
        low, high = self.gap.low, self.gap.high
        if self.measure.endswith("bits_per_char"):
            low, high = -high, -low
        return "model" if low > 0 else "simple" if high < 0 else "neither"

    def sentence(self) -> str:
        """Both measures, their difference, and what that says of the model."""
        gap = f"difference {written(self.gap.value)}, {self.gap.bounds()}"
        ours = f"{self.measure.replace('_', ' ')} {written(self.ours)}"
        return f"{ours}, {self.method} {written(self.theirs.value)} ({gap}): {VERDICTS[self.better]}"

    def to_json(self) -> dict[str, Any]:
        """What stands beside the method's measure."""
        better = {"better": self.better, "sentence": self.sentence()}
        return {"method": self.method, "difference": self.gap.to_json()} | better


def beside(rows: ExampleRows, guesses: Guesses) -> Simple:
    """Compare a model and a simple method on the rows that both answer."""
    measure, others = rows.measures[guesses.measure], replace(rows, columns=rows.columns | guesses.columns)
    both = measure.has(rows.columns) & measure.has(others.columns)
    ours, theirs = rows.only(both).columns, others.only(both).columns
    gap = measured(lambda weights: measure.of(ours, weights) - measure.of(theirs, weights), both.sum(), ours[GROUP])
    if measure.share:  # of two shares
        gap = replace(gap, low=float(np.clip(gap.low, -1, 1)), high=float(np.clip(gap.high, -1, 1)))
    return Simple(guesses.measure, guesses.method, float(measure.of(ours, None)), measure.metric(theirs), gap)


def sampled(rows: np.ndarray, sizes: np.ndarray, most: int) -> np.ndarray:
    """Rows of a fixed draw, in order: the first to fill `most` with their sizes, and at least one.

    Args:
        sizes: of the rows, (num_rows,).
    """
    order = np.random.default_rng(0).permutation(len(rows))
    fits = np.cumsum(np.asarray(sizes, np.int64)[order]) <= most
    fits[:1] = True
    return np.asarray(rows[np.sort(order[fits])])


def of_rows(method: str, used: np.ndarray, rows: np.ndarray) -> str:
    """A method in words, with what it learnt from where that is a sample of the training rows."""
    return method if len(used) == len(rows) else f"{method} of {len(used):,} of {number_of(len(rows), 'rows')}"


# --------------------------------------------------------------------------- n-grams

ORDERS = (3, 4, 5, 6, 7)
START = 1 << 21  # of a text; beyond it special tokens, and below it characters


class _Level(NamedTuple):
    """N-grams of one size, each by a number.

    Args:
        ids: (num,) n-gram that ends at each symbol, -1 where the text is too short.
        first: (num_ngrams,) end of the first of each.
        context: (num,) n-gram of the symbols before each symbol.
        counts: (num_ngrams,) in training.
    """

    ids: np.ndarray
    first: np.ndarray
    context: np.ndarray
    counts: np.ndarray

    def mixed(self, counts: np.ndarray, shorter: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Probabilities of the symbols `asked` by discounted counts of the n-grams, and by the shorter ones' (num,)."""
        taken = discounts(counts)[np.minimum(counts, 3)]
        context, ids = self.context[asked], self.ids[asked]
        size = len(self.context) + 1  # numbers of contexts are smaller
        total, spare = (np.bincount(self.context[self.first], each, size)[context] for each in (counts, taken))
        mixed = (np.append(counts - taken, 0.0)[ids] + spare * shorter) / np.maximum(total, 1)
        return np.where((ids >= 0) & (total > 0), mixed, shorter)


def ngram_bits(symbols: np.ndarray, trained: np.ndarray, asked: np.ndarray) -> dict[int, np.ndarray]:
    """Bits of symbols by n-grams of each of ORDERS, from the symbols before them in their text.

    Interpolated modified Kneser-Ney: Chen and Goodman (1999), "An empirical study of smoothing techniques for language
    modeling", section 4.1.6. Below the single symbols lies a uniform distribution over those of training and one more
    for all others, of which a character costs 8 bits a byte besides, so that the whole is a code.

    Args:
        symbols: (num,) int64, texts one after the other, each after START.
        trained, asked: (num,) bool, symbols that are counted, and whose bits are asked for.

    Returns:
        (num_asked,) float64 by order.
    """
    place = np.arange(len(symbols))
    place -= np.maximum.accumulate(np.where(symbols == START, place, 0))
    alphabet, codes = np.unique(symbols, return_inverse=True)
    context, level, bits = np.zeros(len(symbols), np.int64), None, dict[int, np.ndarray]()
    new = ~np.isin(symbols[asked], symbols[trained])
    width = (alphabet[:, None] >= (0, 0x80, 0x800, 0x10000)).sum(1) * (alphabet < START)
    escape = 8 * width[codes[asked]] * new
    p = np.full(len(escape), 1 / (len(np.unique(codes[trained])) + 1))
    for size in range(1, max(ORDERS) + 1):
        whole = np.flatnonzero(place >= size - 1)
        pairs = context[whole] * len(alphabet) + codes[whole]
        _, first, numbers = np.unique(pairs, return_index=True, return_inverse=True)
        first, ids = whole[first], np.full(len(symbols), -1)
        ids[whole] = numbers
        counts = np.bincount(numbers[trained[whole]], minlength=len(first))
        if level is not None:  # shorter n-grams count the symbols before them, unless these are always a mark
            before = np.bincount(level.ids[first[counts > 0]], minlength=len(level.first))
            marked = (symbols[level.first - size + 2] >= START) & (size > 2)
            p = level.mixed(np.where(marked, level.counts, before), p, asked)
        level = _Level(ids, first, context, counts)
        if size in ORDERS:
            bits[size] = escape - np.log2(level.mixed(counts, p, asked))
        context = np.append(0, ids[:-1])
    return bits


def discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of counts of 0, 1, 2, 3+ (equation 26 there); fixed ones where too little was counted."""
    n = np.bincount(counts[(counts > 0) & (counts < 5)], minlength=5)
    if n[1:].all():
        share = n[1] / (n[1] + 2 * n[2])
        found = [count - (count + 1) * share * n[count + 1] / n[count] for count in (1, 2, 3)]
        if min(found) > 0:
            return np.array([0.0, *found])
    return np.array([0.0, 0.5, 1.0, 1.5])


# --------------------------------------------------------------------------- pictures

SIDES = (8, 16)
NEIGHBOURS = (1, 5)
PENALTIES = tuple(10.0**power for power in range(-2, 4))


def thumbnails(pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pictures as squares of each of SIDES and shares of 64 colours, (num, values) float32 each.

    Args:
        pictures: (height, width, 3) uint8.
    """
    squares = [
        np.stack([np.asarray(Image.fromarray(one).resize((side, side), Image.Resampling.BOX)) for one in pictures])
        for side in SIDES
    ]
    bins = [((one // 64).astype(np.int64) @ (16, 4, 1)).ravel() for one in pictures]
    colours = np.stack([np.sqrt(np.bincount(each, minlength=64) / len(each)) for each in bins])
    return [*(each.reshape(len(each), -1).astype(np.float32) / 255 for each in squares), colours.astype(np.float32)]


def neighbours(x: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> list[np.ndarray]:
    """The commonest class among the nearest rows of (num_rows, values), or the nearest's, for each of NEIGHBOURS."""
    distances, most = (x**2).sum(1) - 2 * asked @ x.T, min(max(NEIGHBOURS), len(x))
    nearest = np.argpartition(distances, most - 1, 1)[:, :most]
    nearest = np.take_along_axis(nearest, np.take_along_axis(distances, nearest, 1).argsort(1, kind="stable"), 1)
    votes = np.eye(labels.max() + 1)[labels[nearest]]
    votes[:, 0] *= 1.5  # among equals the nearest decides
    return [votes[:, :num].sum(1).argmax(1) for num in NEIGHBOURS]


def ridge(x: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> list[np.ndarray]:
    """The classes of rows by ridge regression on a column per class (Hoerl and Kennard 1970), for each of PENALTIES."""
    mean, targets = x.mean(0, np.float64), np.eye(labels.max() + 1)[labels]
    values, v = np.linalg.eigh((x - mean).T @ (x - mean))
    ours, theirs = v.T @ ((x - mean).T @ (targets - targets.mean(0))), (asked - mean) @ v
    return [(theirs / (values + penalty) @ ours + targets.mean(0)).argmax(1) for penalty in PENALTIES]


Looks = list[np.ndarray]  # of `thumbnails`


def classify(
    trained: Looks, labels: np.ndarray, valid: Looks, right: np.ndarray, asked: Looks
) -> tuple[str, np.ndarray]:
    """Classify pictures by the method that is right most often on the valid ones; returns it, and the classes.

    Args:
        labels, right: classes of the trained and the valid pictures.
    """
    others, tried = [np.concatenate(pair) for pair in zip(valid, asked, strict=True)], []
    for x, other in zip(trained[:-1], others[:-1], strict=True):
        tried += [("nearest neighbours", classes) for classes in neighbours(x, labels, other)]
        with_colours = np.hstack([x, trained[-1]]), labels, np.hstack([other, others[-1]])
        tried += [("ridge regression on small squares", classes) for classes in ridge(*with_colours)]
    method, classes = max(tried, key=lambda one: (one[1][: len(right)] == right).sum())
    return method, classes[len(right) :]
