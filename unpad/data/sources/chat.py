"""Conversations: `messages`, ShareGPT `conversations`, instruction and output, prompt and completion, and strings such
as `用户：…助手：…`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from unpad.data.sources.example import BadRow, Example, Turn
from unpad.data.sources.faults import RowFault, excerpt, missing, spelled, type_name
from unpad.data.sources.fields import MESSAGES, REPLIES, REQUESTS
from unpad.data.sources.files import SourceFile
from unpad.data.sources.reader import examples
from unpad.data.sources.row import Row, are_messages, is_blank, listed, require_text
from unpad.data.sources.unread import doubt_unread, pass_over, read_marks
from unpad.recipes.data import DataSettings

Role = Literal["system", "user", "assistant"]

CONTEXTS = ("input", "context", "passage", "document", "article", "background")  # texts that complete a request
SYSTEMS = ("system", "system_prompt")
TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")  # as trainers have them
FIELDS = (*MESSAGES, *REQUESTS, *CONTEXTS, *REPLIES, "text", *SYSTEMS, "history", *TEMPLATE_FIELDS)
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # by which rows and chat templates call thoughts
CALLS = ("tool_calls", "function_call")
_READ = frozenset(("role", "content", "from", "value", *THOUGHT_KEYS, *CALLS))
ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant",
}  # fmt: skip

# A string keeps the language and the capitals that it begins with, so that "User:" in a Chinese reply does not begin a
# turn, nor "user:" in a reply of one that begins with "User:".
_NAMES = ("System|User|Assistant", "system|user|assistant", "SYSTEM|USER|ASSISTANT")
_MARKERS = (
    re.compile(r"(系统|用户|助手)[：:]"),
    *(re.compile(rf"(?<![^\W_])({names})[:：]") for names in _NAMES),
    # With blank lines, as the sets of Anthropic have them, or else at the begin of a line, as BELLE's has them.
    re.compile(r"(?s:\A(?=.*\n\n(?:Human|Assistant):)|\n\n)(Human|Assistant):"),
    re.compile(r"(?:\A|\n)(Human|Assistant):"),
)
TOOLS = ("tool", "function", "observation", "ipython")  # words of roles of the messages of tools
NO_TOOLS = "tools' messages are not covered"
_PAIR: tuple[Role, Role] = ("user", "assistant")
_ROLES_OF_TEXTS: dict[str, Role] = {**ROLES, "系统": "system", "用户": "user", "助手": "assistant"}


def read(file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield each conversation of a file, or its bad row.

    A conversation may begin with a system message; then user and assistant take turns, with at least one reply.
    Contents of messages are kept exactly; turns of a string lose the white space around them.

    A row with a request and a reply may also have `input`, which follows the request on a line of its own, `system`,
    and `history`, a list of earlier requests with their replies. A blank one of these is none, and of several names of
    one thing the filled one counts.
    """

    def convert(row: Row) -> Example:
        if type(row.value) is not dict:
            name = "the conversation"
            return Example(row.where, in_turns(messages_of(row, row.value, name), name))
        turns = _turns_of_row(row, file)
        example = Example(row.where, turns, *row.declared(), given=given_of(row))
        doubt_unread(row, turns)
        return example

    named = (*file.fields.values(), "system") if file.field else (*file.fields.values(), *FIELDS)
    return examples(file, data, named, convert, "chat")


def _turns_of_row(row: Row, file: SourceFile) -> tuple[Turn, ...]:
    def parsed(name: str) -> list[Turn]:
        return messages_of(row, row[name], f'"{name}"')

    whole = (file.field,) if file.field else () if file.prompt or file.reply else MESSAGES
    requests = () if file.field else (file.prompt,) if file.prompt else REQUESTS
    replies = (file.reply,) if file.reply else REPLIES
    texts = ("text",) if whole == MESSAGES else ()
    name = row.one_of(whole, "the messages", parsed)
    if name is None or is_blank(row.value[name]):
        request = row.one_of(requests, "a request")
        if request is None and requests == REQUESTS and "input" in row and any(reply in row for reply in replies):
            request = "input"
        if request is not None:
            reply = row.one_of(replies, "a reply")
            if reply is None:
                raise missing(replies, row.value)
            return in_turns(with_system(row, [*asked(row, request), *said_in(row, reply)]), f'"{request}"')
        name = next((text for text in texts if text in row), name)
    if name is None:
        raise missing((*whole, *requests, *texts), row.value)
    return in_turns(with_system(row, parsed(name)), f'"{name}"')


def with_system(row: Row, messages: list[Turn]) -> list[Turn]:
    """Messages after the system text of the row, unless they begin with one."""
    system = row.one_of(SYSTEMS, "a system text")
    if system is None or is_blank(row.value[system]) or (messages and messages[0].role == "system"):
        return messages
    return [Turn("system", row.text(system)), *messages]


def said_in(row: Row, name: str) -> list[Turn]:
    """Messages of a field that holds a reply, or a list that ends with one."""
    if are_messages(row[name]):
        return messages_of(row, row[name], f'"{name}"')
    return [Turn("assistant", row.text(name))]


def asked(row: Row, request: str) -> list[Turn]:
    """Messages of a request: a list, or its text and what completes it after the earlier ones of `history`.

    Raises:
        RowFault: they are something else, or two fields complete it.
    """
    if are_messages(row[request]):
        return messages_of(row, row[request], f'"{request}"')
    more = row.one_of(CONTEXTS, "what completes the request")
    parts = [name for name in dict.fromkeys((request, more)) if name and not is_blank(row.get(name))] or [request]
    text = "\n".join(row.text(name) for name in parts)
    if (turns := _up_to_reply(text)) is not None:
        return turns
    earlier = [] if is_blank(row.get("history")) else listed(row["history"])
    if type(earlier) is not list or not all(type(pair) is list and len(pair) == 2 for pair in earlier):
        raise RowFault("E_TYPE", '"history" is not a list of requests with their replies')
    said = [
        Turn(role, require_text(content, '"history"'))
        for pair in earlier
        for role, content in zip(_PAIR, pair, strict=True)
    ]
    return [*said, Turn("user", text)]


def given_of(row: Row) -> str:
    """What a chat template is given beside the messages, as `Example` has it.

    Raises:
        RowFault: it is of another type.
    """
    tools, more = (listed(row.get(name)) for name in TEMPLATE_FIELDS)
    if not is_blank(tools) and not (type(tools) is list and all(type(tool) is dict for tool in tools)):
        raise RowFault("E_TYPE", f'"{TEMPLATE_FIELDS[0]}" is {type_name(tools)}, expected a list of objects')
    if not is_blank(more) and type(more) is not dict:
        raise RowFault("E_TYPE", f'"{TEMPLATE_FIELDS[1]}" is {type_name(more)}, expected an object')
    given = ({} if is_blank(tools) else {"tools": tools}) | ({} if is_blank(more) else more)
    return json.dumps(given, ensure_ascii=False) if given else ""


def looks_like_chat(value: object) -> bool:
    """Guess whether a row, well-formed or not, is meant as a conversation."""
    if isinstance(value, dict):
        pairs = any(name in value for name in (*REQUESTS, "input")) and any(name in value for name in REPLIES)
        return pairs or any(name in value for name in MESSAGES) or looks_like_chat(value.get("text"))
    return isinstance(value, str) and any(marker.match(value.lstrip()) for marker in _MARKERS)


def messages_of(row: Row, value: object, name: str) -> list[Turn]:
    """Messages of a list of objects, also of one in a text of JSON, or of a string with the names of the speakers.

    Args:
        row: that they are of; it notes fields of messages that nobody reads.
        name: of the value.

    Raises:
        RowFault: it is neither.
    """
    value = listed(value)
    if type(value) is list:
        turns = [_message(row, message, f"{name}[{index}]") for index, message in enumerate(value)]
        if not all(message.keys() <= _READ for message in value):
            pass_over(row, value, _READ, f"{name}[]".replace('"', ""))
        return turns
    if not (parts := _parts(require_text(value, name))):
        raise RowFault("E_ROLE", "the text does not begin with 用户： or User:", "begin with the speaker")
    return _said(parts)


def in_turns(turns: list[Turn], name: str) -> tuple[Turn, ...]:
    """Refuse messages that are not a conversation with a reply.

    Raises:
        RowFault: with the turn.
    """
    if not turns:
        raise RowFault("E_EMPTY", f"{name} has no messages")
    refuse_order([turn.role for turn in turns])
    if len(turns) < (3 if turns[0].role == "system" else 2):
        raise RowFault("E_NO_TARGET", "no turn of the assistant, so there is nothing to learn")
    if not any(turn.learned for turn in turns if turn.role == "assistant"):
        raise RowFault("E_NO_TARGET", f"{name} marks every reply as one that is not learned", "remove the row")
    return tuple(turns)


def refuse_order(roles: Sequence[str]) -> None:
    """Refuse messages that are not in their turn: after a system text, if there is one, user and assistant take turns.

    Raises:
        RowFault: names the message.
    """
    first = 1 if roles[:1] == ["system"] else 0
    for place, role in enumerate(roles[first:]):
        if role != _PAIR[place % 2]:
            what = f"turn {first + place + 1} is of the {role}, expected the {_PAIR[place % 2]}"
            raise RowFault("E_ROLE", what)


def _up_to_reply(text: str) -> list[Turn] | None:
    """Messages of a text with the names of the speakers that ends where the reply begins; None for another text."""
    *before, role, content = ["", *_parts(text)] if _parts(text) else ["", "", ""]
    is_open = _ROLES_OF_TEXTS.get(role.lower()) == "assistant" and not content.strip()
    return _said(before[1:]) if is_open and len(before) > 1 else None


def _message(row: Row, message: object, place: str) -> Turn:
    if type(message) is not dict:
        fix = 'write a text, or a list of messages with "role" and "content"'
        raise RowFault("E_TYPE", f"{place} is {type_name(message)}, expected a message", fix)
    if not ({"role", "content"} <= message.keys() or {"from", "value"} <= message.keys()):
        message = spelled(message, ("role", "content", "from", "value"))
    if any(message.get(key) for key in CALLS):
        raise RowFault("E_TYPE", f"{place} calls tools, and {NO_TOOLS}", "write the call into the content")
    role_key, content_key = ("role", "content") if "role" in message else ("from", "value")
    if role_key not in message or content_key not in message:
        wanted = (content_key,) if role_key in message else ("role", "from")
        raise missing(wanted, list(message), fix="give every message its role and its content")
    role = message[role_key]
    known = ROLES.get(role.strip().lower()) if type(role) is str else None
    if type(role) is str and any(word in role.lower() for word in TOOLS):
        raise RowFault("E_ROLE", f"{place} has the role {excerpt(role)}, and {NO_TOOLS}", "leave the conversation out")
    if known is None:
        fix = f"known roles, with or without capitals: {', '.join(ROLES)}"
        raise RowFault("E_ROLE", f"{place} has the unknown role {excerpt(role)}", fix)
    content = require_text(message[content_key], f'{place}."{content_key}"')
    is_reply = known == "assistant"
    learned = message.keys() <= _READ or read_marks(row, message, _READ, place, is_reply) or not is_reply
    return Turn(known, content, _thoughts(message, known, place), learned)


def _thoughts(message: dict[str, Any], role: Role, place: str) -> str:
    """Thoughts of a reply that are beside its content, "" for none."""
    thoughts = {key: message[key] for key in THOUGHT_KEYS if not is_blank(message.get(key))}
    texts = {require_text(text, f'{place}."{key}"') for key, text in thoughts.items()}
    if not texts:
        return ""
    keys = " and ".join(thoughts)
    if role != "assistant":
        raise RowFault("E_TYPE", f"{place} is of the {role} and has {keys}", "leave thoughts to the assistant")
    if len(texts) > 1:
        raise RowFault("E_TYPE", f"{place} has different {keys}", "keep one of them")
    return texts.pop()


def _parts(text: str) -> list[str]:
    """Speaker, content and so on of `用户：…助手：…` or `User: …Assistant: …`; empty for another text."""
    text = text.strip()
    marker = next((marker for marker in _MARKERS if marker.match(text)), None)
    return marker.split(text)[1:] if marker else []


def _said(parts: Sequence[str]) -> list[Turn]:
    return [
        Turn(_ROLES_OF_TEXTS[role.lower()], require_text(content, f"what follows {role}:").strip())
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]
