"""Held-out documents of a corpus that occur in its training part."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np

from unpad.data.sources.example import Example
from unpad.data.sources.leaks import Leak, LeakReport, report
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens.cache import code_key, make_key, read_sealed, write_sealed
from unpad.data.tokens.corpus_files import Work, corpus_key
from unpad.data.tokens.token_set import TokenSet
from unpad.errors import SourceError
from unpad.terminal.progress import progress


def find_leaks(work: Work) -> LeakReport | None:
    """Compare the held-out originals with the training ones, once per corpus and split."""
    if work.wanted is Wanted.NEW or not any((side == Split.HOLDOUT).any() for side in work.sides):
        return None
    path = work.folder / "leaks" / f"{make_key('leaks', code_key(), corpus_key(work))}.json"
    data, damage = read_sealed(path)
    if damage:
        work.events.append(f"cache: the leak report of this corpus {damage}; it is made again")
    if data is not None:
        values = json.loads(data)
        return LeakReport(**{**values, "worst": [Leak(**leak) for leak in values["worst"]]})
    examples = [example for index in range(len(work.files)) for example in work.rows(index).examples]
    texts = [text_of(example) for example in examples]
    groups = [example.group for example in examples]
    with progress("looking for held-out texts in training"):
        leaks = report(texts, np.concatenate(work.sides), groups, work.recipe.train.seed)
    write_sealed(path, json.dumps(asdict(leaks)).encode())
    return leaks


def text_of(example: Example) -> str:
    """Text of a document as it is compared with others."""
    return "\n".join(turn.content for turn in example.turns)


def leak_places(leaks: LeakReport | None, tokens: TokenSet) -> list[tuple[str, str]]:
    """Places of the worst leaks and of the training documents that they occur in, "" for one that is spread."""
    found = leaks.worst if leaks else []
    return [(tokens.where(leak.document), tokens.where(leak.source) if leak.source >= 0 else "") for leak in found]


def refused_leaks(leaks: LeakReport, places: list[tuple[str, str]]) -> SourceError:
    number = leaks.num_exact + leaks.num_near
    first = leaks.worst[0].describe(*places[0]).strip()
    fix = "set data.near_duplicates to together or report, or declare the parts of these rows with split"
    what = f"E_LEAK {number:,} held-out documents are near-duplicates of training ones, such as {first}"
    return SourceError(what, where="data.near_duplicates", fix=fix)
