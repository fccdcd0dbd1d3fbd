"""The accuracy of VQA (Antol et al. 2015, arXiv 1505.00468; Goyal et al. 2017, arXiv 1612.00837).

Answers are compared as wholes after normalising, so "a cat on a mat" earns nothing for "cat". With several people's
answers, each is left out once and the given answer earns min(1, matches among the others / 3); the mean of that counts.
Of fewer than four people all the others must agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

COUNTED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS = {"none": "0", **{word: str(number) for number, word in enumerate(COUNTED)}}
ARTICLES = ("a", "an", "the")
PUNCTUATION = re.compile(r"[;/\[\]\"{}()=+\\_\-><@`,?!。，、？！；：“”（）《》]")
NUMBER_COMMA = re.compile(r"(?<=\d),(?=\d)")
PERIOD = re.compile(r"\.(?!\d)")
# Contractions written without their apostrophe mean the same.
CONTRACTIONS = {
    word.replace("'", ""): word
    for word in [
        "ain't",
        "aren't",
        "can't",
        "couldn't",
        "didn't",
        "doesn't",
        "don't",
        "hadn't",
        "hasn't",
        "haven't",
        "he's",
        "isn't",
        "it's",
        "she's",
        "shouldn't",
        "that's",
        "there's",
        "they're",
        "wasn't",
        "weren't",
        "what's",
        "won't",
        "wouldn't",
        "you're",
    ]
}
NEEDED = 3  # people who must agree for a full point


def normalise(answer: str) -> str:
    """An answer in lower case, without punctuation and articles, number words as digits."""
    text = answer.replace("\n", " ").replace("\t", " ").strip().lower()
    text = PUNCTUATION.sub(" ", NUMBER_COMMA.sub("", text))
    text = PERIOD.sub("", text)
    words = [NUMBERS.get(word, word) for word in text.split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def vqa_accuracy(given: str, answers: Sequence[str]) -> float:
    """Score of one given answer, from 0 to 1.

    Args:
        answers: of people, usually ten; a single answer must be matched.
    """
    wanted, mine = [normalise(answer) for answer in answers], normalise(given)
    if len(wanted) == 1:
        return float(mine == wanted[0])
    matches = sum(answer == mine for answer in wanted)
    needed = min(NEEDED, len(wanted) - 1)  # of fewer people all the others must agree
    scores = [min(1.0, (matches - (answer == mine)) / needed) for answer in wanted]
    return sum(scores) / len(scores)
