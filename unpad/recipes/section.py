"""Base class of recipe sections, and the reading of their validation errors."""

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from unpad.errors import RecipeError, nearest
from unpad.storage.paths import path_fault
from unpad.storage.reading import describe, expected_of, fix_of, shown
from unpad.storage.remote import address_of

SectionType = TypeVar("SectionType", bound=BaseModel)
NOT_A_NUMBER = PydanticCustomError("not_a_number", "is not a number")
NOT_A_TRUTH = PydanticCustomError("not_a_truth", "is not true or false")
UNION_TAGS = ("float", "str", "list[float]")  # of a field that takes a number, a text or numbers
_keeps_paths = ContextVar("keeps_paths", default=False)


@contextmanager
def kept_paths() -> Iterator[None]:
    """Inside, keep paths that no machine could open: a run may name such, of data that it does not read any more."""
    token = _keeps_paths.set(True)
    try:
        yield
    finally:
        _keeps_paths.reset(token)


def _sound_path(path: str) -> str:
    """Refuse a path that no machine could open; an address loses its secrets."""
    address = address_of(path)
    if not address and not _keeps_paths.get() and (fault := path_fault(path)):
        raise ValueError(fault)
    return address or path


UserPath = Annotated[str, AfterValidator(_sound_path)]  # field of a recipe that names a file or folder of the user


class Section(BaseModel):
    """A frozen section that refuses unknown fields, non-finite numbers, and numbers and booleans for one another.

    The docstring below a field is its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        for name, field in handler.resolve_ref_schema(schema)["properties"].items():
            if name in (texts := descriptions(cls)):
                field["description"] = texts[name]
        return schema

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
            ]
            if faults:
                raise ValidationError.from_exception_data(cls.__name__, faults)
        return made


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Descriptions of a section's fields, inherited ones included: the docstring below each, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        for field, below in pairwise(_bodies(base.__module__).get(base.__qualname__, [])):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


@cache
def _bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Statements of the classes at the top of a module, read only when a schema is asked for."""
    top = ast.parse(inspect.getsource(sys.modules[module])).body if module.startswith("unpad.") else []
    return {node.name: node.body for node in top if isinstance(node, ast.ClassDef)}


def _misread(
    given: Any, made: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], PydanticCustomError, Any]]:
    """Places, faults and values where a boolean was read as a number, or another value as a boolean.

    Nested sections check themselves.
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
        message: description of the fault, with the refused value.
        is_unknown: whether the section has no such field.
        fix: the user's next step; "" for the usual one.
    """

    path: tuple[str | int, ...]
    message: str
    is_unknown: bool = False
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
    return all_faults(error)[0]


def all_faults(error: ValidationError) -> list[Fault]:
    """The faults that validation found, one per field; for nested fields only the outer one."""
    found: dict[tuple[str | int, ...], list[Any]] = {}
    for one in error.errors():
        # A part in brackets is a tag of `Weight`, not a key; the last part is a type for a
        # field that takes several.
        path = tuple(part for part in one["loc"] if not str(part).startswith("("))
        found.setdefault(path[:-1] if path and path[-1] in UNION_TAGS else path, []).append(one)
    return [_fault(path, errors) for path, errors in found.items()]


def _fault(path: tuple[str | int, ...], errors: list[Any]) -> Fault:
    inner = errors[0].get("ctx", {}).get("error")
    if isinstance(inner, FaultError):
        return inner.fault
    if len(errors) > 1 and all(map(expected_of, errors)):
        kinds = " or ".join(dict.fromkeys(map(expected_of, errors)))
        return Fault(path, f"{shown(errors[0]['input'])} is not {kinds}", fix=fix_of(expected_of(errors[0])))
    if errors[0]["type"] == "extra_forbidden":
        return Fault(path, f'unknown key "{path[-1]}"', is_unknown=True)
    message, fix = describe(errors[0])
    return Fault(path, message, fix=fix)


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
