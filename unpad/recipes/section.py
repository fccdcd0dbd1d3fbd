"""What every section of a recipe is made from, and how one is built from a caller's values."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from unpad.errors import RecipeError, nearest

SectionType = TypeVar("SectionType", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def checked(section: type[SectionType], values: dict[str, Any]) -> SectionType:
    """Build one section from values that a caller of the Python interface gave.

    Raises:
        RecipeError: a field is unknown or its value does not fit.
    """
    try:
        return section(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise RecipeError(f'unknown field "{name}"', fix=nearest(name, list(section.model_fields))) from None
        raise RecipeError(f"{name}: {first['msg'].removeprefix('Value error, ')}", fix="correct this value") from None
