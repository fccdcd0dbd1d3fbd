"""Base class of recipe sections, and the reading of their validation errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from unpad.errors import RecipeError, nearest

SectionType = TypeVar("SectionType", bound=BaseModel)


class Section(BaseModel):
    """A frozen section that refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Fault:
    """One fault of a section.

    Args:
        path: keys and list indices that lead to the field; empty for the section as a whole.
        message: description of the fault.
        is_unknown: whether the section has no such field.
        given: ", got " and the refused value; "" if the message names it.
    """

    path: tuple[str | int, ...]
    message: str
    is_unknown: bool
    given: str

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
