"""Base class of recipe sections, and the reading of their validation errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from unpad.errors import RecipeError, nearest

SectionType = TypeVar("SectionType", bound=BaseModel)
NOT_A_NUMBER = PydanticCustomError("not_a_number", "Input should be a number, not true or false")


class Section(BaseModel):
    """A frozen section that refuses unknown fields, non-finite numbers, and true or false for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _no_truth_for_numbers(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(values)
        if isinstance(values, dict):
            faults = [
                InitErrorDetails(type=NOT_A_NUMBER, loc=path, input=value)
                for name, given in values.items()
                if name in made.__dict__
                for path, value in _became_numbers(given, made.__dict__[name], (name,))
            ]
            if faults:
                raise ValidationError.from_exception_data(cls.__name__, faults)
        return made


def _became_numbers(given: Any, made: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Places, and values, where true or false was read as 1 or 0; sections inside look after themselves."""
    if isinstance(given, bool):
        if isinstance(made, int | float) and not isinstance(made, bool):
            yield path, given
    elif isinstance(given, dict) and isinstance(made, dict):
        by_name = {str(key): value for key, value in made.items()}  # keys of text may have become numbers
        for key, inner in given.items():
            yield from _became_numbers(inner, by_name.get(str(key)), (*path, str(key)))
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple):
        for index, (inner, value) in enumerate(zip(given, made, strict=False)):
            yield from _became_numbers(inner, value, (*path, index))


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
        raise RecipeError(f"{fault.name}: {fault.message}", fix="correct this value") from None
