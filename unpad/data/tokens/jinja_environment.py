"""Environment of chat templates: Jinja in a sandbox, with what templates of Hugging Face may call."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TODAY = date(2024, 7, 26)  # which Llama's templates write where they have no clock
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # characters that no text may have, around what {% generation %} encloses


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


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """The environment. For templates it is always `TODAY`, so that a conversation has the same ids every day."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    return environment
