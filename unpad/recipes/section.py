"""Base class of recipe sections, and the reading of their validation errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from unpad.errors import RecipeError, nearest
from unpad.storage.paths import path_fault

SectionType = TypeVar("SectionType", bound=BaseModel)
NOT_A_NUMBER = PydanticCustomError("not_a_number", "Input should be a number, not true or false")
NOT_A_TRUTH = PydanticCustomError("not_a_truth", "Input should be true or false")
FIXES = {"not_a_number": "write a number"} | dict.fromkeys(
    ("not_a_truth", "bool_parsing", "bool_type"), "write true or false, without quotes"
)
_reads_earlier = ContextVar("reads_earlier", default=False)


@contextmanager
def earlier_versions() -> Iterator[None]:
    """Inside, also read 1 or "yes" as true, as recipes and commands of runs of earlier versions may have it."""
    token = _reads_earlier.set(True)
    try:
        yield
    finally:
        _reads_earlier.reset(token)


def _sound_path(path: str) -> str:
    """Refuse a path that no machine could open. Runs of earlier versions may keep one, of data that has gone since."""
    if not _reads_earlier.get() and (fault := path_fault(path)):
        raise ValueError(fault)
    return path


UserPath = Annotated[str, AfterValidator(_sound_path)]  # field of a recipe that names a file or folder of the user


class Section(BaseModel):
    """A frozen section that refuses unknown fields, non-finite numbers, and numbers and booleans for one another."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _booleans_are_no_numbers(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(values)
        if isinstance(values, dict):
            faults = [
                InitErrorDetails(type=kind, loc=path, input=value)
                for name, given in values.items()
                if name in made.__dict__
                for path, kind, value in _misread(given, made.__dict__[name], (name,))
                if kind is NOT_A_NUMBER or not _reads_earlier.get()
            ]
            if faults:
                raise ValidationError.from_exception_data(cls.__name__, faults)
        return made


def _misread(
    given: Any, made: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], PydanticCustomError, Any]]:
    """Places, faults and values where true or false was read as 1 or 0, or something else as true or false.

    Sections inside look after themselves.
    """
    if isinstance(given, bool):
        if isinstance(made, int | float) and not isinstance(made, bool):
            yield path, NOT_A_NUMBER, given
    elif isinstance(made, bool):
        yield path, NOT_A_TRUTH, given
    elif isinstance(given, dict) and isinstance(made, dict):
        by_name = {str(key): value for key, value in made.items()}  # keys of text may have become numbers
        for key, inner in given.items():
            yield from _misread(inner, by_name.get(str(key)), (*path, str(key)))
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple):
        for index, (inner, value) in enumerate(zip(given, made, strict=False)):
            yield from _misread(inner, value, (*path, index))


@dataclass(frozen=True)
class Fault:
    """One fault of a section.

    Args:
        path: keys and list indices that lead to the field; empty for the section as a whole.
        message: description of the fault.
        is_unknown: whether the section has no such field.
        given: ", got " and the refused value; "" if the message names it.
        fix: the user's next step; "" for the usual one.
    """

    path: tuple[str | int, ...]
    message: str
    is_unknown: bool
    given: str
    fix: str = ""

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.path)


class FaultError(ValueError):
    """A validator's own error about one field."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


def first_fault(error: ValidationError) -> Fault:
    """The first fault that validation found."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, FaultError):
        return inner.fault
    given = f", got {json.dumps(first['input'], ensure_ascii=False, default=str)[:80]}"
    return Fault(
        # A part in brackets is a tag of `Weight`, not a key.
        path=tuple(part for part in first["loc"] if not str(part).startswith("(")),
        message=first["msg"].removeprefix("Value error, "),
        is_unknown=first["type"] == "extra_forbidden",
        given="" if first["type"] == "value_error" else given,
        fix=FIXES.get(first["type"], ""),
    )


def checked(section: type[SectionType], values: dict[str, Any]) -> SectionType:
    """Build one section from values of the Python interface.

    Raises:
        RecipeError: a field is unknown or its value does not fit.
    """
    try:
        return section(**values)
    except ValidationError as error:
        fault = first_fault(error)
        if fault.is_unknown:
            what, fix = f'unknown field "{fault.name}"', nearest(fault.name, list(section.model_fields))
            raise RecipeError(what, fix=fix) from None
        raise RecipeError(f"{fault.name}: {fault.message}", fix=fault.fix or "correct this value") from None
