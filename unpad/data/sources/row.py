"""A row of a file, and checks of its fields."""

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from unpad.data.sources.example import SPLIT_NAMES, SplitName
from unpad.data.sources.faults import FieldFault, RowFault, missing, type_name

# White space besides what str.strip() removes: zero-width space, joiners, word joiner, byte order mark.
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"


SEVERAL = "write one text, or a row for each; a picture goes into a row of image, question and answer"
UNSEEN = object()  # value of a field that was not read from the file


class Row:
    """A row of a file, which knows those of its fields that nobody read.

    Attributes:
        where: "file:line", or "file[element]" for an element of a JSON array; 1-based lines, 0-based elements.
        value: its JSON value: an object with fields, a string of an array, a document of plain text, or anything else.
        doubts: what is wrong with each field that changes what the row means and that is not read.
        within: fields of its messages that nobody reads: the values, and whether only some of a speaker's have it.
    """

    __slots__ = ("_others", "_read", "doubts", "place", "value", "where", "within")

    def __init__(
        self, where: str, value: Any, others: Sequence[str] = (), place: tuple[int, int] | None = None
    ) -> None:
        """Args:
        others: fields that the file has beside those of `value`, which the reader left out.
        place: row group of a parquet file, and the row in it from 0.
        """
        self.place = place
        self.where = where
        self.value = value
        self._others = others
        self._read: list[str] = []
        self.doubts: dict[str, str] = {}
        self.within: dict[str, tuple[list[Any], bool]] = {}

    def __contains__(self, name: object) -> bool:
        return type(self.value) is dict and name in self.value

    def __getitem__(self, name: str) -> Any:
        self._read.append(name)
        return self.value[name]

    def get(self, name: str) -> Any:
        """The value of a field; None where it is null or absent."""
        self._read.append(name)
        return self.value.get(name) if type(self.value) is dict else None

    def one_of(self, names: Sequence[str], what: str, alike: Callable[[str], Any] | None = None) -> str | None:
        """The filled field of several that hold the same, else the first that there is; None where there is none.

        Args:
            what: they hold, such as "a reply"; alike: what is compared of two that are filled, by their names.

        Raises:
            FieldFault: two are filled, and differ.
        """
        filled = [name for name in names if name in self and not is_blank(self.value[name])]
        alike = alike or self.__getitem__
        for other in filled[1:]:
            if alike(other) != alike(filled[0]):
                raise FieldFault({other: f'"{filled[0]}" and "{other}" both hold {what}, and only one is read'})
        return filled[0] if filled else next((name for name in names if name in self), None)

    @property
    def names(self) -> list[str]:
        """Names of the fields."""
        return list(self.value) if type(self.value) is dict else []

    def unread(self) -> dict[str, Any]:
        """Fields that nobody asked for; UNSEEN is the value of those that the reader left out."""
        value = self.value if type(self.value) is dict else {}
        fields = value | {name: UNSEEN for name in self._others if name not in value}
        return {name: value for name, value in fields.items() if name not in self._read}

    def doubt(self, field: str, what: str) -> None:
        """Note a field that changes what the row means, and that is not read."""
        self.doubts.setdefault(field, what)

    def leave_out(self, names: Collection[str]) -> set[str]:
        """Drop fields of the row, an object, and of objects in its lists; returns those that there were."""
        present = {name for name in (*self.names, *self._others) if name in names}
        value = {}
        for name, cell in self.value.items():
            items = listed(cell)
            if type(items) is list and any(type(item) is dict and not item.keys().isdisjoint(names) for item in items):
                present |= {name for item in items if type(item) is dict for name in item if name in names}
                cell = [_without(item, names) for item in items]
            value[name] = cell
        self.value, self._others = _without(value, names), [name for name in self._others if name not in names]
        return present

    def require(self, *names: str) -> "Row":
        """Return the row, which is an object with these fields.

        Raises:
            RowFault: it is another value, or lacks one of them.
        """
        if type(self.value) is not dict:
            raise RowFault("E_NOT_OBJECT", f"the row is {type_name(self.value)}, expected an object")
        for name in names:
            if name not in self.value:
                raise missing((name,), self.value)
        return self

    def text(self, name: str) -> str:
        """The text of a field; see `require_text`.

        Raises:
            RowFault: the row is no object, or the field is absent, no string or blank.
        """
        return require_text(self.require(name)[name], f'"{name}"')

    def declared(self) -> tuple[SplitName | None, str, tuple[str, ...]]:
        """The split, the group and the keywords that a row declares; null is the same as absent.

        Raises:
            RowFault: a value has the wrong type.
        """
        split, group, keywords = self.split(), self.group(), self.get("keywords")
        if keywords is not None and not (isinstance(keywords, list) and all(isinstance(one, str) for one in keywords)):
            raise RowFault("E_TYPE", '"keywords" is not a list of strings')
        return split, group, tuple(keywords or ())

    def split(self) -> SplitName | None:
        """The part that a row declares by a name of SPLIT_NAMES; None leaves it to the seed.

        Raises:
            RowFault: it is no such name.
        """
        name = self.get("split")
        if name is None:
            return None
        split = SPLIT_NAMES.get(name.strip().lower()) if type(name) is str else None
        if split is None:
            raise RowFault("E_SPLIT", f'"split" is {name!r:.60}, expected "train", "valid" or "test"')
        return split

    def group(self) -> str:
        """The group of a row (also called fact), "" without one; rows of a group stay in one part of the split.

        Raises:
            RowFault: it is neither text nor a whole number.
        """
        group = self.get("group")
        group = self.get("fact") if group is None else group
        if group is not None and type(group) not in (str, int):
            raise RowFault("E_TYPE", f'"group" is {type_name(group)}, expected a string')
        return "" if group is None else str(group)


def is_blank(value: object) -> bool:
    """True for null, a text of white space, and an empty list or object: a field that is not filled."""
    if type(value) is dict:
        return all(map(is_blank, value.values()))
    return value is None or value == [] or (type(value) is str and not value.strip())


def listed(value: object) -> Any:
    """The list or object that a text holds in JSON, as tables have them; any other value as it is."""
    if type(value) is str and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def are_messages(value: object) -> bool:
    """True for a list, and for a text that holds a list of objects in JSON."""
    items = listed(value)
    return type(value) is list or (type(items) is list and bool(items) and all(type(item) is dict for item in items))


def _without(value: Any, names: Collection[str]) -> Any:
    return {name: cell for name, cell in value.items() if name not in names} if type(value) is dict else value


def require_text(value: object, name: str) -> str:
    """Return `value` if it is a text with content.

    Raises:
        RowFault: it is null, not a string, blank, or contains a NUL.
    """
    if type(value) is not str:
        if value is None:
            raise RowFault("E_NULL", f"{name} is null, expected a string")
        fix = SEVERAL if type(value) is list else "write the text that it stands for"
        raise RowFault("E_TYPE", f"{name} is {type_name(value)}, expected a string", fix)
    if not value.strip().strip(_ZERO_WIDTH):
        raise RowFault("E_EMPTY", f"{name} is {'blank' if value else 'empty'}")
    if "\0" in value:
        raise RowFault("E_NUL", f"{name} holds a NUL character")
    return value
