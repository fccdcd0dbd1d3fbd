"""Near-duplicates of training documents among those held out, found without a model."""

from __future__ import annotations

from unpad.data.sources.read import TEXT_KINDS
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens.corpus import split_documents
from unpad.data.tokens.corpus_files import Preparation, judge_rows, list_files
from unpad.data.tokens.corpus_leaks import find_leaks, refuse_leaks
from unpad.recipes.recipe import Recipe
from unpad.storage import cache_folder

MOST_BYTES = 1 << 27  # of text that a check keeps in memory


def near_texts(recipe: Recipe) -> list[str]:
    """Lines on near-duplicates in each held-out part of a recipe's texts, as training reports them.

    Raises:
        SourceError: a file cannot be used, or the recipe refuses near-duplicates and there are some.
    """
    work = Preparation(recipe, cache_folder(), Wanted.LEARNING)
    work.files = list_files(recipe, TEXT_KINDS)
    size = sum(file.file.path.stat().st_size for file in work.files)
    if size > MOST_BYTES:
        return [f"near-duplicate texts are not looked for: {size / 1e6:,.0f} MB are too many here; `unpad plan` does"]
    work.shards = [None] * len(work.files)
    judge_rows(work)
    split_documents(work)
    where = [example.where for index in range(len(work.files)) for example in work.rows(index).examples]
    lines = []
    for part in (Split.HOLDOUT, Split.TEST):
        leaks = find_leaks(work, part)
        if leaks is not None:
            places = [(where[leak.document], where[leak.source]) for leak in leaks.worst]
            if recipe.data.near_duplicates == "refuse":
                refuse_leaks(leaks, places)
            lines += leaks.lines(places)
    return lines
