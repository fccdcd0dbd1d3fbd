"""Claims that the tokens of a corpus are what its rows say, each shown on rows that are read once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

import numpy as np

from unpad.data.family import Claim
from unpad.data.sources.example import BadRow, Example, Turn, place_of
from unpad.data.sources.files import expand, resolve_path
from unpad.data.sources.reader import TEXT_KINDS, read_rows
from unpad.data.tokens.corpus import Corpus
from unpad.data.tokens.encode import encode_examples
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from unpad.data.tokens.words import SPECIALS
from unpad.errors import SourceError
from unpad.recipes.data import Template
from unpad.recipes.recipe import Recipe

MOST = 200  # documents of a kind that are looked at, the first of their files


def claims(corpus: Corpus, recipe: Recipe) -> list[Claim]:
    """Claims on the first documents of every kind; on texts alone, those on replies are left out.

    Raises:
        SourceError: a file cannot be read any more.
    """
    tokens, tokenizer = corpus.tokens, corpus.tokenizer
    pairs = [(example, tokens.tokens(place), tokens.loss_mask(place)) for example, place in _examples(corpus, recipe)]
    said = [turn.content for example, _, _ in pairs for turn in example.every_turn]
    again = [tokenizer.decode(ids) for ids in tokenizer.encode_batch(said)]
    talks = [item for item in pairs if item[0].turns[0].role != "text"]
    wrong = [fault for item in talks for fault in _faults_of_replies(*item, tokenizer)]
    made = [_text_comes_back(said, again)]
    if talks:
        num = sum(len(_learnt(example)) for example, _, _ in talks)
        made.append(Claim("only replies are learnt, each to its end", num, tuple(wrong)))
        typed = [_typed(example, tokenizer, recipe.data.template) for example, _, _ in talks[:1]]
        made.append(Claim("special tokens that a user types stay text", len(typed), tuple(filter(None, typed))))
    return made


def _examples(corpus: Corpus, recipe: Recipe) -> Iterator[tuple[Example, int]]:
    """Rows of the first documents of every kind, read from their files, with their places in the corpus."""
    tokens = corpus.tokens
    for number, kind in enumerate(TEXT_KINDS):
        places = np.flatnonzero((tokens.kind == number) & (tokens.copy == 0))[:MOST].tolist()
        wanted = {tokens.place(place): place for place in places}
        names = {place_of(where).file for where in wanted}
        for file in expand(getattr(recipe.data, kind), partial(resolve_path, recipe.data)) if wanted else []:
            if str(file.path) not in names:
                continue
            for row in islice(read_rows(kind, file, recipe.data), 10 * MOST):
                if not isinstance(row, BadRow) and row.where in wanted:
                    yield row, wanted.pop(row.where)


def _learnt(example: Example) -> list[Turn]:
    """Replies whose tokens carry loss, in the order of the document; of a pair, these are its two."""
    if example.rejected is not None:
        return [example.turns[-1], example.rejected]
    return [turn for turn in example.turns if turn.role == "assistant" and turn.learned]


def _faults_of_replies(example: Example, ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """Runs of tokens that carry loss and are no reply of the row to its end token."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    runs, replies = [ids[start:stop].tolist() for start, stop in edges], _learnt(example)
    if len(runs) != len(replies):
        yield f"{example.where} has {len(replies)} replies to learn, and {len(runs)} runs of tokens are learnt"
        return
    for run, reply in zip(runs, replies, strict=True):
        [expected] = tokenizer.encode_batch([reply.content])
        said, learnt = _plain(tokenizer.decode(expected)), _plain(tokenizer.decode(run))
        if learnt != said if tokenizer.chat is None else said not in learnt:  # a template may write thoughts beside it
            yield f"{example.where}: a run of learnt tokens is not its reply"
        if run[-1] not in tokenizer.stop_ids:
            yield f"{example.where}: a reply is not learnt to its end"


def _plain(text: str) -> str:
    return "".join(text.split())


def _typed(example: Example, tokenizer: Tokenizer, template: Template) -> str:
    """What is wrong if a user types the names of the special tokens into the first message; "" if nothing is."""
    names = list(tokenizer.special_names().values()) if isinstance(tokenizer, LibraryTokenizer) else list(SPECIALS)
    first = replace(example.turns[0], content=" ".join([example.turns[0].content, *names]))
    try:
        with_names, _, ends, _ = encode_examples(
            [example, replace(example, turns=(first, *example.turns[1:]))], tokenizer, template
        )
    except SourceError:
        return ""  # such messages are refused
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, *tokenizer.stop_ids]
    before, after = (int(np.isin(with_names[a:b], special).sum()) for a, b in pairwise(ends.tolist()))
    return f"{after - before} of {', '.join(names)} in a message became special tokens" if after != before else ""


def _text_comes_back(said: Sequence[str], again: Sequence[str]) -> Claim:
    """The claim that texts are what their ids decode to; a tokenizer's own rule for case or white space is no fault."""
    kinds = {"case": 0, "white space": 0, "characters": 0}
    for text, other in zip(said, again, strict=True):
        if text != other:
            is_space = _plain(text) == _plain(other)
            kinds["white space" if is_space else "case" if text.casefold() == other.casefold() else "characters"] += 1
    told = {kind: f"{num} of {len(said)} texts come back with other {kind}" for kind, num in kinds.items() if num}
    wrong = [told.pop("characters")] if kinds["characters"] else []
    return Claim("text comes back from its ids", len(said), tuple(wrong), "; ".join(told.values()))
