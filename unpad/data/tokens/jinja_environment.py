"""Environment of chat templates: Jinja in a sandbox, with what templates of Hugging Face may call, at a bounded cost.

Whatever is not listed here is refused: filters and methods that multiply a text by a number, such as `center`,
`wordwrap` or `format`, have no place in a conversation. `jinja_budget.py` says what the rest may cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import date
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unpad.data.tokens.jinja_budget import (
    CALL,
    ELEMENT,
    JOINED,
    MADE,
    MOST_CALLS,
    SEARCHED,
    TICK,
    WEIGHED,
    Budget,
    ExcessError,
    metered,
    number,
)

TODAY = date(2024, 7, 26)  # which Llama's templates write where they have no clock
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # characters that no text may have, around what {% generation %} encloses
MOST_WIDTH = 100  # of an indentation, in characters
MOST_DIGITS = 15
_DATE = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,200}")  # without widths, such as %1000000d
GLOBALS = ("range", "dict", "namespace")
# Filters by what they look at: whole values, the elements of the first one, or no part of it.
WHOLE = (
    *("abs", "capitalize", "dictsort", "e", "escape", "float", "groupby", "int", "lower", "max", "min", "sort"),
    *("string", "title", "unique", "upper", "wordcount"),
)
ELEMENTS = ("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
NOTHING = ("attr", "count", "d", "default", "first", "last", "length", "safe")
COMPARING = (
    *("!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le"),
    *("lessthan", "lower", "lt", "ne", "upper"),
)
_TEXT_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle
    isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
"""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    LoopContext: frozenset(("changed", "cycle")),
}


class _Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}, which marks what the model is to say."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if not _DATE.fullmatch(form):
        raise TemplateError("the form of a date is too long, or has a width")
    return TODAY.strftime(form)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template. For templates it is always `TODAY`, so that a conversation has the same ids
    every day.

    `budget` is to begin before each rendering; one that spends it raises `ExcessError`.
    """

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols],
            finalize=pass_context(lambda _, value: value if type(value) is str else self._shown(value)),
        )  # fmt: skip
        self.concat = self.budget.joined  # type: ignore[method-assign]  # of what blocks and macros have written
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        tests: Mapping[str, Any] = self.tests
        self.filters = self._filters(self.filters)
        self.tests |= {name: self._bounded(tests[name], self.budget.look) for name in COMPARING}

    def read(self, source: str) -> Callable[..., str]:
        """Compile a template; it is called with the conversation's names.

        Raises:
            Exception: whatever Jinja and Python find wrong with it.
        """
        tree = metered(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree).render

    # What templates compute is in the methods that the sandbox calls for it.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # by far the most frequent
            self.budget.spend(len(left) + len(right))
            return left + right
        if isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            if operator == "%":
                raise TemplateError("the operator % on a text is not covered")
            times = right if isinstance(right, int) else left if isinstance(left, int) else 1
            for side in (left, right):
                if isinstance(side, str | list | tuple):
                    self.budget.spend((1 if isinstance(side, str) else ELEMENT) * len(side) * max(times, 1))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            number(1 << min(left.bit_length() * max(right, 0) // 2, 64))  # half as many bits as it may have
        return number(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja's
        budget = __self.budget
        budget.spend(CALL)
        if isinstance(__obj, Macro):
            if budget.calls >= MOST_CALLS:
                raise ExcessError("it calls macros in each other without end")
            budget.calls += 1
            try:
                return super().call(__context, __obj, *args, **kwargs)
            finally:
                budget.calls -= 1
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Macro):
                budget.look(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            budget.spend(len(owner) + _growth(owner, __obj.__name__, args))
        elif isinstance(owner, list | tuple | dict) and __obj.__name__ in ("copy", "count", "index"):
            budget.look(owner)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, argument if isinstance(argument, str | int) else self.budget.look(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if callable(value) and not isinstance(value, Undefined | Macro):
            kind = next((kind for kind in METHODS if isinstance(obj, kind)), None)
            return kind is not None and attr in METHODS[kind]
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        return None  # `is_safe_attribute` decides on this method as on the others

    # Filters.

    def _shown(self, value: Any) -> str:
        return str(self.budget.look(value))

    def _bounded(self, function: Callable[..., Any], cost: Callable[[Any], Any] | None) -> Callable[..., Any]:
        """A filter or a test that spends what its values cost first, and what it makes afterwards."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # before the values comes the environment
        budget = self.budget

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            budget.spend(CALL)
            if cost is budget.look:
                for value in (*args[first:], *kwargs.values()):
                    budget.look(value)
            elif cost is not None:
                cost(args[first])
            return budget.made(function(*args, **kwargs))

        return run

    def _filters(self, known: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        budget = self.budget
        filters = {name: self._bounded(known[name], budget.look) for name in WHOLE}
        filters |= {name: self._bounded(known[name], budget.count) for name in ELEMENTS}
        filters |= {name: self._bounded(known[name], None) for name in NOTHING}
        checks: dict[str, Callable[..., None]] = {
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "sum": _sum,
            "trim": self._trim,
        }
        for name, check in checks.items():
            filters[name] = self._bounded(_checked(known[name], check), budget.look)
        filters["tojson"] = self._bounded(self._to_json, budget.look)
        marks: dict[str, Callable[..., Any]] = {
            TICK: budget.tick,
            WEIGHED: budget.look,
            SEARCHED: lambda value: value if isinstance(value, dict) else budget.look(value),
            MADE: budget.made,
            JOINED: lambda values: budget.joined(map(str, budget.look(values))),
        }
        return filters | marks

    def _indent(self, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
        columns = len(width) if isinstance(width, str) else width
        if columns > MOST_WIDTH:
            raise TemplateError(f"an indentation is wider than {MOST_WIDTH}")
        self.budget.spend(columns * len(str(text).splitlines()))

    def _join(self, values: Any, between: Any = "", *_: Any, **__: Any) -> None:
        self.budget.spend(len(str(between)) * len(values) if hasattr(values, "__len__") else 0)

    def _replace(self, text: Any, old: Any, new: Any, *_: Any) -> None:
        self.budget.spend(str(text).count(str(old)) * len(str(new)))

    def _trim(self, text: Any, characters: Any = None) -> None:
        self.budget.spend(len(str(text)) * len(str(characters or "")))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it, without the escapes for web pages."""
        for item in (indent, *(separators or ())):
            if (len(item) if isinstance(item, str) else item or 0) > MOST_WIDTH:
                raise TemplateError(f"an indentation or separator of tojson is wider than {MOST_WIDTH}")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = list[str]()
        for piece in encoder.iterencode(value):  # each with an indentation of its own
            self.budget.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)


def _growth(text: str, method: str, args: tuple[Any, ...]) -> int:
    """Units that a method of a text costs beside its characters: parts that it makes, and texts that it repeats."""
    if method == "replace" and len(args) > 1:
        return text.count(str(args[0])) * len(str(args[1]))
    if method in ("strip", "lstrip", "rstrip") and args:  # each character is looked for among those to remove
        return len(text) * len(str(args[0]))
    if method == "join" and args and hasattr(args[0], "__len__"):
        return len(text) * len(args[0])
    if method in ("split", "rsplit") and args and isinstance(args[0], str) and args[0]:
        return ELEMENT * text.count(args[0])
    return ELEMENT // 2 * len(text) if method in ("split", "rsplit", "splitlines") else 0


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter that checks its arguments first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args[first:], **{_NAMES.get(name, name): value for name, value in kwargs.items()})
        return function(*args, **kwargs)

    return run


_NAMES = {"chars": "characters", "d": "between", "s": "text"}  # of parameters of Jinja's filters


def _round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if abs(precision) > MOST_DIGITS:
        raise TemplateError(f"round has more than {MOST_DIGITS} digits")


def _sum(values: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateError("sum of something else than numbers is not covered")
