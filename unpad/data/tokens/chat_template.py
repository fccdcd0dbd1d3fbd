"""Chat templates of Hugging Face: the text of a conversation, and the parts of it that are replies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from unpad.data.sources.chat import THOUGHT_KEYS
from unpad.data.sources.example import Turn
from unpad.errors import RecipeError, SourceError

# Stand for parts of messages in a second rendering, which shows where the template puts each.
_MARK, _MARK_END = "\ufdd2", "\ufdd3"
_MARKED = re.compile(f"({_MARK}[^{_MARK_END}]*{_MARK_END})")
NONCHARACTERS = frozenset("\ufdd0\ufdd1\ufdd2\ufdd3")
OWN_VALUES = ("messages", "add_generation_prompt")  # that no row gives
THINK, END_THINK = "<think>", "</think>"
THINKING = "enable_thinking"  # the name by which templates ask whether the model is to think
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # where a prompt ends: the model is to think, or not to
_NO_THOUGHTS = re.compile(r"(?:\s*<think>\s*</think>)?")
_BEFORE_STOP = re.compile(r"\s*(?:</think>\s*)?")
_TOKEN = re.compile(r"<[^<>\s]{1,60}>")  # a special token, as its text shows
MOST_SOURCE = 1 << 17  # characters of a template; those of released models have up to 30,000
# Most characters of a conversation's text: a constant, and a multiple of the characters of its messages.
MOST_TEXT, MOST_GROWTH = 1 << 18, 10
OTHER_TEMPLATE = "correct the chat template in its file, or take chat_template out of the folder and import it again"
AMBIGUOUS = "mark replies with {% generation %} in the chat template, or leave such conversations out"
REFUSED = "leave such conversations out, or correct the chat template"
NO_THOUGHTS = (
    "begin the reply with its thoughts between <think> and </think>, which may be empty, or tell the template that the"
    " model does not think, by data.template.thinking=false where it can"
)
THOUGHTS = "take the thoughts out of the reply, or set data.template.thinking=true"
THOUGHTS_IN_TEXT = "write them into the content, as <think>...</think> before the answer"


class UnusableTemplateError(SourceError):
    """A chat template that no conversation can be written with, or that costs more than a conversation may."""


@dataclass(frozen=True)
class Marked:
    """Text of a conversation.

    Args:
        replies: what the model is to say, with the token that ends it; in order.
        messages: what the messages themselves say, in order, without the marks of thoughts and the white space around
            them; None if the template changes one, and marks replies itself.
    """

    text: str
    replies: tuple[slice, ...]
    messages: tuple[slice, ...] | None


class _Placed(NamedTuple):
    """One message in the text.

    Args:
        parts: its thoughts and its answer, those that the template writes; none for an empty message.
        is_thoughtless: True where the template leaves its thoughts out.
    """

    parts: tuple[slice, ...]
    is_thoughtless: bool


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template in Jinja, run in a sandbox. Needs jinja2, of the extra `hf`.

    Args:
        source: the template.
        names: special tokens by the names that the template calls them by, such as bos_token.
        stops: texts of the tokens that end a reply.
        values: what a row gives it besides, and whether the model is to think, by name.
    """

    source: str
    names: Mapping[str, str]
    stops: Sequence[str]
    values: Mapping[str, Any] = field(default_factory=dict)

    def told(self, thinking: bool | None) -> ChatTemplate:
        """The template of a model that is to think, or not to; None: as the template has it by itself.

        Raises:
            RecipeError: the template does not ask for it.
        """
        if thinking is None:
            return self
        if THINKING not in self.source:
            what = f"the chat template does not read {THINKING}"
            raise RecipeError(what, where="data.template.thinking", fix="leave data.template.thinking out")
        return replace(self, values={THINKING: thinking})

    def given(self, values: str) -> ChatTemplate:
        """The template with what a row gives it beside the messages, such as tools, as `apply_chat_template` takes it.

        Args:
            values: as `Example.given`.

        Raises:
            SourceError: the template does not read one of them.
        """
        if not values:
            return self
        more: dict[str, Any] = json.loads(values)
        unread = [name for name in more if name in OWN_VALUES or not re.search(rf"\b{re.escape(name)}\b", self.source)]
        if unread:
            fix = "take it out of the row, or name its field in `ignore` of the source"
            raise SourceError(f'E_FIELD the row gives "{unread[0]}", which the chat template does not read', fix=fix)
        return replace(self, values={**self.values, **more})

    def prompted(self, turns: Sequence[Turn]) -> Marked:
        """Text up to the beginning of the next reply; earlier replies are marked as far as they are known.

        Raises:
            SourceError: the template refuses the conversation.
        """
        _refuse_noncharacters(turns)
        text, generated = self._render(turns, prompt=True)
        try:
            placed = self._places(turns, text, prompt=True)
            replies = generated or self._replies(turns, text, placed, prompt=True)
        except SourceError:
            return Marked(text, tuple(generated), None)
        return Marked(text, tuple(replies), _parts(placed))

    def marked(self, turns: Sequence[Turn]) -> Marked:
        """Text of a conversation with its replies marked, by {% generation %} or by the prompts that lead to them.

        A reply is what the model says after the prompt for it, its thoughts as the template writes them. Earlier
        replies stand as they do in the prompt for the last one: their thoughts may be left out, and what is left of
        such a reply begins with its answer. If the template leaves out the thoughts of the last reply although its
        prompt opens them, the reply is written after that prompt.

        Raises:
            SourceError: the template refuses the conversation, changes a message, or does not tell what a reply is.
        """
        _refuse_noncharacters(turns)
        text, generated = self._render(turns, prompt=False)
        num_replies = sum(turn.role == "assistant" for turn in turns)
        if generated and len(generated) != num_replies:
            marks = f"the chat template marks {len(generated)} parts with generation"
            raise SourceError(f"{marks}, and there are {num_replies} replies", fix="correct the template")
        try:
            placed = self._places(turns, text, prompt=False)
        except SourceError:
            if not generated or has_thoughts(turns[-1]):
                raise
            return Marked(text, tuple(generated), None)
        if turns[-1].role == "assistant" and placed[-1].is_thoughtless:
            return self._continued(turns, text, is_marked=bool(generated))
        replies = generated or self._replies(turns, text, placed, prompt=False)
        if END_THINK in text:
            _refuse_more_thoughts(turns, text, replies)
        return Marked(text, tuple(replies), _parts(placed))

    def trial(self) -> str:
        """Write a question, and a question with its reply; why one of them cannot be written, "" where both can.

        Raises:
            UnusableTemplateError: no conversation can be written with the template.
            RecipeError: jinja2 is not installed.
        """
        turns = [Turn("user", "What is this?"), Turn("assistant", "This is a reply.")]
        try:
            self.prompted(turns[:1])
            self.marked(turns)
        except UnusableTemplateError:
            raise
        except SourceError as error:
            return f"{error.what}; {error.fix}"
        return ""

    def _places(self, turns: Sequence[Turn], text: str, *, prompt: bool) -> list[_Placed]:
        """Place of every message in the text, by a rendering in which marks stand for what the messages say."""
        stand_ins, contents = _stand_ins(turns)
        around, _ = _without_marks(self._run(stand_ins, prompt))
        pieces = _MARKED.split(around)
        marks = pieces[1::2]
        missing = contents.keys() - set(marks)
        if marks != [mark for mark in contents if mark not in missing] or any(mark[1] not in "ft" for mark in missing):
            raise SourceError("the chat template changes a message, moves it or leaves it out", fix=AMBIGUOUS)
        pieces[1::2] = [contents[mark] for mark in marks]
        if "".join(pieces) != text:
            what = "the chat template changes a message, or depends on the messages beyond their places"
            raise SourceError(what, fix=AMBIGUOUS)
        ends = list(accumulate(map(len, pieces)))
        parts = [list[slice]() for _ in turns]
        for mark, start, stop in zip(marks, ends[::2], ends[1::2], strict=False):
            parts[_turn_of(mark)].append(slice(start, stop))
        lost = {_turn_of(mark) for mark in missing}
        return [_Placed(tuple(of_turn), index in lost) for index, of_turn in enumerate(parts)]

    def _replies(self, turns: Sequence[Turn], text: str, placed: Sequence[_Placed], *, prompt: bool) -> list[slice]:
        """Span from the end of a prompt to the end-of-turn token of the reply."""
        replies: list[slice] = []
        messages = _messages(turns)
        for index, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            parts, is_earlier = placed[index].parts, prompt or index + 1 < len(turns)
            begin = _begin(text, self._run(messages[:index], True), parts, is_earlier)
            replies.append(slice(begin, self._stop(text, max(begin, parts[-1].stop if parts else 0))))
        return replies

    def _stop(self, text: str, end: int) -> int:
        """Find where the end-of-turn token of a reply ends; the last letter of the reply is before `end`."""
        between = _BEFORE_STOP.match(text, end)
        assert between is not None, "it matches nothing as well"
        end = between.end()
        stop = next((stop for stop in self.stops if text.startswith(stop, end)), None)
        if stop is None and (token := _TOKEN.match(text, end)):
            what = f"the chat template ends a reply with {token[0]}, and eos_token is {' and '.join(self.stops)}"
            raise SourceError(what, fix=f"set eos_token to {token[0]} in tokenizer_config.json, and import it again")
        if stop is None:
            raise SourceError("the chat template ends a reply with no token that ends one", fix=AMBIGUOUS)
        return end + len(stop)

    def _continued(self, turns: Sequence[Turn], shown: str, *, is_marked: bool) -> Marked:
        """A conversation with the last reply after its prompt, thoughts included, as a model in use generates it.

        For templates that leave the thoughts of every reply out, since they write what a model has to read.

        Args:
            shown: the text that the template makes of the conversation.
        """
        *earlier, last = turns
        asked, _ = self._render(earlier, prompt=True)
        stand_in = Turn("assistant", f"{_MARK}0{_MARK_END}")
        around, _ = self._render([*earlier, stand_in], prompt=False)
        before, _, after = around.partition(stand_in.content)
        tail = asked[len(before) :] if asked.startswith(before) else ""
        opens = tail.strip() == THINK
        if last.thoughts or is_marked or not opens:
            what = "the chat template leaves out the thoughts of the last reply"
            raise SourceError(what, fix=THOUGHTS_IN_TEXT if last.thoughts else AMBIGUOUS)
        said = last.content.lstrip()
        said = said.removeprefix(THINK).lstrip("\n") if said.startswith(THINK) else said
        if not shown.endswith(said.partition(END_THINK)[2].lstrip() + after):
            said = said.rstrip()  # the template cuts the white space after a message
        text = asked + said + after
        placed = self._places(earlier, asked, prompt=True)
        replies = self._replies(earlier, asked, placed, prompt=True)
        thoughts, _, answer = said.partition(END_THINK)
        ends = len(asked) + len(thoughts) + len(END_THINK)
        last_parts = [_stripped(thoughts, len(asked)), _stripped(answer, ends)]
        reply = slice(len(asked), self._stop(text, len(asked) + len(said.rstrip())))
        return Marked(
            text, (*replies, reply), (*_parts(placed), *(part for part in last_parts if part.start < part.stop))
        )

    def _render(self, turns: Sequence[Turn], *, prompt: bool) -> tuple[str, list[slice]]:
        return _without_marks(self._run(_messages(turns), prompt))

    def _run(self, messages: list[dict[str, str]], prompt: bool) -> str:
        try:
            from unpad.data.tokens import jinja_process
        except ImportError:
            what = "a chat template needs jinja2, which is not installed"
            raise RecipeError(what, fix="pip install unpad[hf]") from None
        if len(self.source) > MOST_SOURCE:
            what = f"the chat template has {len(self.source):,} characters; at most {MOST_SOURCE:,} are read"
            raise UnusableTemplateError(what, fix=OTHER_TEMPLATE)
        values = {**self.names, **self.values, "messages": messages, "add_generation_prompt": prompt}
        most = MOST_TEXT + MOST_GROWTH * sum([len(message["content"]) for message in messages])
        kind, text = jinja_process.render(self.source, values, most)
        if kind in (jinja_process.NO_TEMPLATE, jinja_process.EXCESS):
            what = "is no Jinja" if kind == jinja_process.NO_TEMPLATE else "is not usable"
            raise UnusableTemplateError(f"the chat template {what}: {text}", fix=OTHER_TEMPLATE)
        if kind != jinja_process.TEXT:
            verb = "refuses" if kind == jinja_process.REFUSED else "fails on"
            raise SourceError(f"the chat template {verb} a conversation: {text}", fix=REFUSED)
        return text


def _refuse_noncharacters(turns: Sequence[Turn]) -> None:
    # A search for each is several times as fast as one pass over the characters of a text.
    if any(character in turn.content or character in turn.thoughts for turn in turns for character in NONCHARACTERS):
        what = "a message has a character that Unicode keeps out of texts, one of U+FDD0 to U+FDD3"
        raise SourceError(what, fix="remove it")


def _refuse_more_thoughts(turns: Sequence[Turn], text: str, replies: Sequence[slice]) -> None:
    """Refuse a template that takes thoughts from a field alone, and writes empty ones before those of the content."""
    for turn, reply in zip([turn for turn in turns if turn.role == "assistant"], replies, strict=True):
        if END_THINK in turn.content and text.count(END_THINK, reply.start, reply.stop) > turn.content.count(END_THINK):
            what = "the chat template writes thoughts of its own before the thoughts of a reply"
            raise SourceError(what, fix=f"give them in a field {THOUGHT_KEYS[0]} of the message, beside the content")


def _message(role: str, content: str, thoughts: str) -> dict[str, str]:
    message = {"role": role, "content": content}
    return message | dict.fromkeys(THOUGHT_KEYS, thoughts) if thoughts else message


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [_message(turn.role, turn.content, turn.thoughts) for turn in turns]


def has_thoughts(turn: Turn) -> bool:
    """True for a reply with thoughts; a template may write only a part of them."""
    return turn.role == "assistant" and (bool(turn.thoughts) or END_THINK in turn.content)


def _stand_ins(turns: Sequence[Turn]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Messages with a mark for everything that they say, and what each mark stands for, in order.

    White space around a message and the marks of thoughts stay, so that the template treats both conversations alike.
    """
    contents: dict[str, str] = {}

    def stand_in(text: str, kind: str, index: int) -> str:
        content = text.strip()
        if not content:
            return text
        mark = f"{_MARK}{kind}{index}{_MARK_END}"
        contents[mark] = content
        return mark if len(content) == len(text) else text.replace(content, mark, 1)

    messages = []
    for index, turn in enumerate(turns):
        marked_thoughts = stand_in(turn.thoughts, "f", index) if turn.thoughts else ""
        if turn.role != "assistant" or END_THINK not in turn.content:
            content = stand_in(turn.content, "a", index)
        else:
            inside, _, answer = turn.content.partition(END_THINK)
            before, opened, thoughts = inside.partition(THINK) if THINK in inside else ("", "", inside)
            content = stand_in(before, "b", index) + opened + stand_in(thoughts, "t", index) + END_THINK
            content += stand_in(answer, "a", index)
        messages.append(_message(turn.role, content, marked_thoughts))
    return messages, contents


def _turn_of(mark: str) -> int:
    return int(mark[2:-1])


def _stripped(text: str, start: int) -> slice:
    """Place of a text without the white space around it, in one where the text begins at `start`."""
    begin = start + len(text) - len(text.lstrip())
    return slice(begin, max(begin, start + len(text.rstrip())))


def _parts(placed: Sequence[_Placed]) -> tuple[slice, ...]:
    return tuple(part for message in placed for part in message.parts)


def _begin(text: str, asked: str, parts: Sequence[slice], is_earlier: bool) -> int:
    """Find where a reply begins: after its prompt; an earlier one may stand without the thoughts that it opens."""
    first = parts[0].start if parts else len(text)
    if text.startswith(asked) and len(asked) <= first:
        return len(asked)
    opened = _OPENED.search(asked)
    if opened is None or not text.startswith(asked[: opened.start()]):
        what = "the chat template writes the beginning of a reply otherwise than the prompt for it"
        raise SourceError(what, fix=AMBIGUOUS)
    if not is_earlier:
        what = f"the prompt for a reply ends with {opened[0].strip()!r}, and the last reply does not go on from there"
        raise SourceError(what, fix=THOUGHTS if END_THINK in opened[0] else NO_THOUGHTS)
    no_thoughts = _NO_THOUGHTS.match(text, opened.start())
    assert no_thoughts is not None, "it matches nothing as well"
    if text[no_thoughts.end() : first].strip():
        what = "the chat template writes the beginning of an earlier reply otherwise than the prompt for it"
        raise SourceError(what, fix=AMBIGUOUS)
    return no_thoughts.end()


def _without_marks(enclosed: str) -> tuple[str, list[slice]]:
    """The text without the marks of {% generation %}, and what they enclose."""
    first, *marked = enclosed.split("\ufdd0")
    pieces, spans, position = [first], list[slice](), len(first)
    for text in marked:
        inside, _, outside = text.partition("\ufdd1")
        spans.append(slice(position, position + len(inside)))
        pieces += [inside, outside]
        position += len(inside) + len(outside)
    return "".join(pieces), spans
