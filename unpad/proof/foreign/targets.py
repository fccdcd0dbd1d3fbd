"""The tokens that a loss learns a label from, determined by what moves it."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from unpad.proof.foreign.update import IGNORE, LabelledSequence

# Loss of a sequence alone by its number, from other token ids and labels.
Loss = Callable[[int, list[int], list[int]], float]
Taken = Literal["next", "itself", "later", "inputs", "unclear"]

MOST_TRIED = 4  # labels
SAME = 1e-6  # relative difference of two losses that are the same


def taken_by(sequences: Sequence[LabelledSequence], loss: Loss) -> Taken:
    """The target that a loss takes at a position.

    One label is left. What the loss learns of it does not move with the label's own token, and does with the one before
    it.

    Returns:
        "next" for the usual target; "itself" where a label is learnt from its own token; "later" where the token before
        it says nothing; "inputs" where the loss reads targets from the token ids; "unclear" where no label shows it.
    """
    number = max(range(len(sequences)), key=lambda one: sum(label != IGNORE for label in sequences[one].labels))
    ids, labels = sequences[number].ids, sequences[number].labels
    tokens = sorted({token for one in sequences for token in one.ids})
    places = [at for at, label in enumerate(labels) if label != IGNORE and 0 < at < len(ids) - 1]
    middle = max(0, (len(places) - MOST_TRIED) // 2)
    counts: Counter[Taken] = Counter()
    for at in places[middle : middle + MOST_TRIED]:
        with suppress(IndexError, ValueError):  # of a loss that takes no label of -100, as where it ignores padding
            counts[_taken_at(at, ids, tokens, partial(loss, number))] += 1
    del counts["unclear"]
    (best, num), *_ = [*counts.most_common(1), ("unclear", 0)]
    return best if 2 * num > counts.total() else "unclear"


def _taken_at(at: int, ids: list[int], tokens: list[int], loss: Callable[[list[int], list[int]], float]) -> Taken:
    """The target that a loss takes, by one label."""

    def exchanged(place: int) -> list[int]:
        half = len(tokens) // 2  # special tokens stand at the ends
        other = next((token for token in tokens[half:] + tokens[:half] if token != ids[place]), ids[place])
        return [*ids[:place], other, *ids[place + 1 :]]

    label, another = ([IGNORE] * at + [row[at]] + [IGNORE] * (len(ids) - at - 1) for row in (ids, exchanged(at)))
    size = SAME * abs(loss(ids, label))
    reads_labels = abs(loss(ids, label) - loss(ids, another)) > size

    def learnt(given: list[int]) -> float:
        return loss(given, label) - (loss(given, another) if reads_labels else 0)  # without what is so for any label

    plain = learnt(ids)
    by_itself, by_last = (abs(learnt(exchanged(place)) - plain) > size for place in (at, at - 1))
    if not math.isfinite(plain) or not (by_itself or by_last or reads_labels):
        return "unclear"
    if by_itself:
        return "itself" if reads_labels else "inputs"
    return "next" if by_last else "later"
