"""Precision and recall of near-duplicates among short texts, against pairs that were judged by reading.

    apt-get install fortunes fortunes-min       # the English texts
    python benchmarks/near_duplicates.py        # the Chinese ones are in ../shared/data/zh
    python benchmarks/near_duplicates.py --show # the pairs, to be judged

Two samples of 50 pairs are drawn from each set of texts: pairs that the rule reports, for precision, and for recall
pairs that share many words (of Chinese, pairs of characters), by a measure that has nothing to do with the rule's
windows. `near_duplicates.json` has the verdicts by a hash of the two texts: true where one text is the other in other
words, a part of it, or a revision, so that a model that has learnt one is no longer measured by the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from unpad.data.sources.leaks import TextSearch, near_sets, plain, report

FORTUNES = Path("/usr/share/games/fortunes")
SHARED = Path(__file__).parents[2] / "shared/data/zh"
VERDICTS = Path(__file__).with_suffix(".json")
SAMPLE = 50
COMMON = 200  # words in more texts than this find no pairs
FORM = 30  # pairs of characters in more texts than this are of a form, such as a disclaimer, and are not counted
LEAST = 0.4  # share of the words of both texts together that a pair of the second sample shares
FEWEST = 5  # words of its shorter text
Pair = tuple[int, int]


def english() -> list[str]:
    """Short English texts: the fortunes of Debian, white space made one space."""
    files = [file for file in sorted(FORTUNES.glob("*")) if file.is_file() and file.suffix not in (".dat", ".u8")]
    parts = [part for file in files for part in file.read_text("utf-8", "replace").split("\n%\n")]
    return _different([" ".join(part.strip().strip("%").split()) for part in parts])


def chinese() -> list[str]:
    """Poems, proverbs and notes, and short sentences and exchanges."""
    lines = (SHARED / "sayings.jsonl").read_text("utf-8").splitlines() if SHARED.is_dir() else []
    files = sorted(SHARED.glob("pretraining/*.json")) + sorted(SHARED.glob("chat/*.json"))
    return _different(
        [json.loads(line)["text"] for line in lines] + [t for f in files for t in json.loads(f.read_text("utf-8"))]
    )


def _different(texts: list[str]) -> list[str]:
    """The texts that differ as they are compared, the first of each."""
    first: dict[str, str] = {}
    for text in texts:
        if text:
            first.setdefault(plain(text), text)
    return list(first.values())


def words(text: str) -> set[str]:
    """Words in letters, or pairs of Chinese characters."""
    return set("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def bigrams(text: str) -> set[str]:
    """Pairs of neighbouring characters."""
    whole = plain(text)
    return {whole[i : i + 2] for i in range(len(whole) - 1)}


def reported(texts: list[str]) -> list[Pair]:
    """Every pair that the rule calls near-duplicates."""
    plains = [plain(text) for text in texts]
    search = TextSearch(plains)
    search.count(plains)
    return sorted({(near.text, near.other) for near in search.match(plains) if near.text < near.other})


def overlapping(texts: list[str], units: Callable[[str], set[str]]) -> list[Pair]:
    """Every pair that shares LEAST of its units (Jaccard)."""
    sets = [units(text) for text in texts]
    if units is bigrams:
        number = Counter(unit for own in sets for unit in own)
        sets = [{unit for unit in own if number[unit] <= FORM} for own in sets]
    holders: dict[str, list[int]] = defaultdict(list)
    for index, own in enumerate(sets):
        for unit in own:
            holders[unit].append(index)
    common = {unit for unit, those in holders.items() if len(those) > COMMON}
    found = []
    for index, own in enumerate(sets):
        near = Counter(other for unit in own - common for other in holders[unit] if other > index)
        for other in near:
            shared = len(own & sets[other])
            if min(len(own), len(sets[other])) >= FEWEST and shared >= LEAST * len(own | sets[other]):
                found.append((index, other))
    return sorted(found)


def name(texts: list[str], pair: Pair) -> str:
    """Hash of a pair of texts."""
    return blake2b("\0".join(sorted(texts[i] for i in pair)).encode(), digest_size=6).hexdigest()


def draw(pairs: list[Pair], seed: int) -> list[Pair]:
    """A sample of pairs."""
    order = np.random.default_rng(seed).permutation(len(pairs))[:SAMPLE]
    return [pairs[i] for i in order.tolist()]


def samples() -> Iterator[tuple[str, list[str], set[Pair], dict[str, list[Pair]]]]:
    """Of each language: its texts, the pairs that the rule reports, and the two samples."""
    for language, read, units in (("english", english, words), ("chinese", chinese, bigrams)):
        texts = read()
        if not texts:
            print(f"{language}: its texts are not here", file=sys.stderr)
            continue
        found = reported(texts)
        yield (
            language,
            texts,
            set(found),
            {"reported": draw(found, 1), "overlapping": draw(overlapping(texts, units), 2)},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the pairs instead of the figures")
    show = parser.parse_args().show
    known = json.loads(VERDICTS.read_text("utf-8")) if VERDICTS.exists() else {}
    for language, texts, found, drawn in samples():
        if show:
            for kind, pairs in drawn.items():
                for pair in pairs:
                    short, long = sorted((texts[i] for i in pair), key=len)
                    print(json.dumps([language, kind, name(texts, pair), short, long], ensure_ascii=False))
            continue
        verdicts = known.get(language, {})
        right = {kind: [p for p in pairs if verdicts.get(name(texts, p))] for kind, pairs in drawn.items()}
        unjudged = sum(name(texts, pair) not in verdicts for pairs in drawn.values() for pair in pairs)
        caught = sum(pair in found for pair in right["overlapping"])
        print(f"{language}: {len(texts):,} texts, {len(found):,} pairs reported; {unjudged} of the samples not judged")
        print(f"  precision {len(right['reported'])}/{len(drawn['reported'])}")
        print(f"  recall {caught}/{len(right['overlapping'])}")
        held = (np.random.default_rng(0).random(len(texts)) < 0.05).astype(np.uint8)
        sets = near_sets(texts)
        together = (np.random.default_rng(0).random(int(sets.max()) + 1) < 0.05).astype(np.uint8)[sets]
        for rule, split in (("report", held), ("together", together)):
            print(f"  {rule}: {report(texts, split, [''] * len(texts)).head()}")


if __name__ == "__main__":
    main()
