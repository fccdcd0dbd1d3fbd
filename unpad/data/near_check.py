"""Near-duplicates of training rows in other parts of a recipe's data, found without a model, for `unpad data check`."""

from __future__ import annotations

from unpad.data import images, vqa
from unpad.data.family import check_near_duplicates
from unpad.data.images import ImageData
from unpad.data.patients import EventData
from unpad.data.sources.read import TEXT_KINDS
from unpad.data.sources.split import Split, Wanted
from unpad.data.text import TextData
from unpad.data.tokens.corpus import split_documents
from unpad.data.tokens.corpus_files import Work, judge_rows, list_files
from unpad.data.tokens.corpus_leaks import find_leaks, refuse_leaks
from unpad.data.vqa import VqaData
from unpad.recipes.recipe import Recipe
from unpad.storage import cache_folder

MOST_BYTES = 1 << 27  # of text that a check keeps in memory


def near_duplicate_lines(recipe: Recipe) -> list[str]:
    """Lines on rows of valid and test that are near-duplicates of training rows, as training reports them.

    Raises:
        SourceError: the data cannot be used, or the recipe refuses near-duplicates and there are some.
        RecipeError: the recipe has a rule for near-duplicates that its data does not follow.
    """
    data, lines = recipe.data, list[str]()
    if data.events:
        check_near_duplicates(recipe, EventData)
    if data.text or data.converses:
        check_near_duplicates(recipe, TextData)
        lines += _of_texts(recipe)
    for given, family, open_pictures in (
        (data.images, ImageData, images.open_pictures),
        (data.vqa, VqaData, vqa.open_pictures),
    ):
        if given:
            check_near_duplicates(recipe, family)
            pictures = open_pictures(recipe)
            pictures.refuse()
            lines += pictures.lines()
    return lines


def _of_texts(recipe: Recipe) -> list[str]:
    work = Work(recipe, cache_folder(), Wanted.LEARNING)
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
