"""Pairs of replies to one prompt, for preferences: `messages` or `prompt`, with `chosen` and `rejected`.

Each of the two is a reply as a string, a list of messages with one reply, or the whole conversation with it at the end,
as public sets and trainers have them. Without a prompt of its own, it is what both conversations begin with.
"""

from collections.abc import Iterator
from hashlib import blake2b

from unpad.data.sources import chat
from unpad.data.sources.example import BadRow, Example, Turn
from unpad.data.sources.faults import RowFault, missing
from unpad.data.sources.fields import REQUESTS
from unpad.data.sources.files import SourceFile
from unpad.data.sources.reader import examples
from unpad.data.sources.row import Row
from unpad.data.sources.unread import doubt_unread
from unpad.recipes.data import DataSettings

PROMPTS = ("messages", *REQUESTS)
CHOSEN, REJECTED = REPLIES = ("chosen", "rejected")
FIELDS = (*REPLIES, *PROMPTS, *chat.CONTEXTS, *chat.SYSTEMS, "history", *chat.TEMPLATE_FIELDS)


def read(file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield each pair of a file, or its bad row.

    `field` of the source names the prompt. Pairs of one prompt are a group, unless their rows name others, so that no
    prompt is both in training and held out.
    """

    def convert(row: Row) -> Example:
        if type(row.value) is not dict:
            raise RowFault("E_TYPE", "the row is no object", 'write an object with "prompt", "chosen" and "rejected"')
        prompt, replies = _pair_of_row(row, file.field)
        turns = chat.in_turns([*prompt, replies[CHOSEN]], "the pair")
        if not (replies[CHOSEN].learned and replies[REJECTED].learned):
            raise RowFault("E_NO_TARGET", "the pair has a reply that is marked as not learned", "remove the row")
        split, group, keywords = row.declared()
        given = chat.given_of(row)
        doubt_unread(row, (*turns, replies[REJECTED]))
        return Example(row.where, turns, split, group or _name(prompt), keywords, replies[REJECTED], given)

    return examples(file, data, (*REPLIES, file.field, "system") if file.field else FIELDS, convert, "pairs")


def _pair_of_row(row: Row, field: str | None) -> tuple[list[Turn], dict[str, Turn]]:
    """The messages of the prompt, and the two replies by name."""
    row.require(*REPLIES)
    whole = [row[name] for name in REPLIES]  # one of them may stand once more in the field of the prompt
    names = (field,) if field else [name for name in PROMPTS if name not in row or row[name] not in whole]
    named = row.one_of(names, "the prompt")
    if field and named is None:
        raise missing((field,), row.value)
    spoken = [name for name in REPLIES if type(row.value[name]) is str and row.text(name).lstrip().startswith("Human:")]
    conversations = {
        name: chat.messages_of(row, row[name], f'"{name}"') if name in spoken else chat.said_in(row, name)
        for name in REPLIES
    }
    prompt = _common(conversations) if named is None else chat.asked(row, named)
    if not prompt:
        raise missing(PROMPTS, row.value)
    replies = {name: _reply(turns, prompt, name) for name, turns in conversations.items()}
    if replies[CHOSEN] == replies[REJECTED]:
        raise RowFault("E_EQUAL", '"chosen" and "rejected" are the same reply', "remove the row")
    return chat.with_system(row, prompt), replies


def _common(conversations: dict[str, list[Turn]]) -> list[Turn]:
    """Messages that both conversations begin with, without their last ones."""
    chosen, rejected = conversations.values()
    most = min(len(chosen), len(rejected)) - 1
    num = next((i for i in range(most) if chosen[i] != rejected[i]), max(most, 0))
    return chosen[:num]


def _reply(turns: list[Turn], prompt: list[Turn], name: str) -> Turn:
    """The one reply of a list of messages, which may begin with the prompt."""
    for start in (prompt, prompt[1:] if prompt[0].role == "system" else prompt):
        if len(turns) > len(start) and turns[: len(start)] == start:
            turns = turns[len(start) :]
            break
    if len(turns) != 1 or turns[0].role != "assistant":
        roles = ", ".join(turn.role for turn in turns) or "nothing"
        fix = f'let "{name}" be one reply of the assistant, or the whole conversation that begins with the prompt'
        raise RowFault("E_ROLE", f'"{name}" holds {roles} after the prompt, expected one reply of the assistant', fix)
    return turns[0]


def _name(prompt: list[Turn]) -> str:
    """Name of the group of the pairs of a prompt."""
    content = "\0".join(part for turn in prompt for part in (turn.role, turn.content, *filter(None, [turn.thoughts])))
    return f"prompt {blake2b(content.encode(), digest_size=8).hexdigest()}"
