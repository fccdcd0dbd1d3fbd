"""Conversations: `messages`, ShareGPT `conversations`, and strings such as `用户：…助手：…`."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from unpad.data.sources.example import BadRow, Example, Turn
from unpad.data.sources.files import SourceFile
from unpad.data.sources.jsonlines import RowFault, excerpt, missing, type_name
from unpad.data.sources.rows import collect, examples, optional_fields, require_text
from unpad.recipes.data import DataSettings

Role = Literal["system", "user", "assistant"]

FIELDS = ("messages", "conversations", "text")
ROLES: dict[object, Role] = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
}  # fmt: skip

# A string keeps the language it begins with, so that "User:" in a Chinese reply does not begin a turn.
_MARKERS = (re.compile(r"(系统|用户|助手)[：:]"), re.compile(r"(?<![^\W_])(System|User|Assistant)[:：]"))
_MARKED: dict[str, Role] = {
    "系统": "system", "用户": "user", "助手": "assistant", "System": "system", "User": "user", "Assistant": "assistant",
}  # fmt: skip


def check(file: SourceFile, data: DataSettings) -> tuple[int, list[BadRow]]:
    """Count the usable rows of a file, and return the others."""
    used, bad = collect(read(file, data), file.path)
    return len(used), bad


def read(file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield each conversation of a file, or its bad row.

    A conversation may begin with a system message; then user and assistant take turns, with at least one reply.
    Contents of messages are kept exactly; turns of a string lose the white space around them.
    """
    fields = (file.field,) if file.field else FIELDS

    def convert(where: str, value: Any) -> Example:
        if type(value) is not dict:
            return Example(where, _turns(value, "the conversation"))
        name = next((name for name in fields if name in value), None)
        if name is None:
            raise missing(fields, list(value))
        turns = _turns(value[name], f'"{name}"')
        return Example(where, turns) if len(value) == 1 else Example(where, turns, *optional_fields(value))

    return examples(file, data, fields, convert)


def looks_like_chat(value: object) -> bool:
    """Guess whether a row, well-formed or not, is meant as a conversation."""
    if isinstance(value, dict):
        return "messages" in value or "conversations" in value or looks_like_chat(value.get("text"))
    return isinstance(value, str) and any(marker.match(value.lstrip()) for marker in _MARKERS)


def _turns(value: object, name: str) -> tuple[Turn, ...]:
    if type(value) is list:
        turns = [_message(message, name, index) for index, message in enumerate(value)]
    else:
        turns = _parse(require_text(value, name))
    if not turns:
        raise RowFault("E_EMPTY", f"{name} has no messages")
    first = 1 if turns[0].role == "system" else 0
    for index in range(first, len(turns)):
        expected = "assistant" if (index - first) % 2 else "user"
        if turns[index].role != expected:
            raise RowFault("E_ROLE", f"turn {index + 1} is of the {turns[index].role}, expected the {expected}")
    if len(turns) < first + 2:
        raise RowFault("E_NO_TARGET", "no turn of the assistant, so there is nothing to learn")
    return tuple(turns)


def _message(message: object, name: str, index: int) -> Turn:
    if type(message) is not dict:
        raise RowFault("E_TYPE", f"{name}[{index}] is {type_name(message)}, expected an object")
    role_key, content_key = ("role", "content") if "role" in message else ("from", "value")
    if role_key not in message or content_key not in message:
        raise missing((content_key,) if role_key in message else ("role", "from"), list(message))
    role = message[role_key]
    if type(role) is not str or role not in ROLES:
        known = ", ".join(str(role) for role in ROLES)
        raise RowFault("E_ROLE", f"{name}[{index}] has the unknown role {excerpt(role)}", f"known roles: {known}")
    return Turn(ROLES[role], require_text(message[content_key], f'{name}[{index}]."{content_key}"'))


def _parse(text: str) -> list[Turn]:
    """Split `用户：…助手：…` or `User: …Assistant: …` into turns."""
    text = text.strip()
    marker = next((marker for marker in _MARKERS if marker.match(text)), None)
    if marker is None:
        raise RowFault("E_ROLE", "the text does not begin with 用户： or User:", "begin with the speaker")
    parts = marker.split(text)[1:]  # role, content, role, content, ...
    return [
        Turn(_MARKED[role], require_text(content, f"what follows {role}:").strip())
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]
