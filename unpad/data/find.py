"""A row of the data files by its place, as a user names it."""

from collections.abc import Callable

from unpad.data.family import Data, FoundRow
from unpad.data.sources.example import file_test, place_of
from unpad.errors import RecipeError, nearest


def find(data: Data, given: str) -> FoundRow | None:
    """Find a row of the data files, or a patient.

    Args:
        given: FILE:LINE, FILE[ELEMENT], the file of a picture, or a patient's id.

    Returns:
        The row; None if there is none at this place.
    """
    place = place_of(given)
    is_it = file_test(place.file)
    rows: dict[str, FoundRow] = {}
    for where, part in data.placed():
        one = place_of(where)
        if is_it(one.file):
            patient = one.rest if one.rest.startswith(" (") else ""
            rows.setdefault(one.item, FoundRow(f"{one.file}{one.item}{patient}", [])).parts.append(part)
    if place.item in rows:
        return rows[place.item]
    for bad in data.bad_rows:
        one = place_of(bad.where)
        if one.item == place.item and is_it(one.file):
            return FoundRow(bad.where, [], f"the row cannot be used and was left out: {bad.code} {bad.what}")
    return data.find_otherwise(given)


def find_in_all(data: Data, given: str, open_test: Callable[[], Data]) -> tuple[Data, FoundRow]:
    """Find a row in the data, or else in its test part, and the data that it is of.

    Args:
        given: as of `find`; open_test: opens the test part, where there is one.

    Raises:
        RecipeError: there is none.
    """
    row = find(data, given)
    if data.table.num_test and not (row and row.parts):
        tested = open_test()
        if (of_test := find(tested, given)) is not None and of_test.parts:
            return tested, of_test
    if row is None:
        raise no_such_row(data, given)
    return data, row


def no_such_row(data: Data, given: str) -> RecipeError:
    """The error for a place without a row. For patients it does not repeat the place, which may be an id."""
    if data.private:
        what, fix = "the run's data has no such patient, row or file", "name FILE:LINE of an event, or a patient's id"
        return RecipeError(what, where="data.events", fix=fix)
    place = place_of(given)
    is_it = file_test(place.file)
    files = list(dict.fromkeys(place_of(where).file for where, _ in data.placed()))
    items = [place_of(where).item for where, _ in data.placed() if is_it(place_of(where).file)]
    if not items:
        fix = nearest(place.file, files) if len(files) < 1000 else "name a file of the recipe's data"
        return RecipeError(f"the run's data has no rows of the file {place.file}", where=given, fix=fix)
    shown = f"{items[0]} to {items[-1]}" if items[0] else "none, as it is one itself"
    fix = f"its rows are {shown}; a row of several lines is named by its first"
    return RecipeError("no row begins there", where=given, fix=fix)
