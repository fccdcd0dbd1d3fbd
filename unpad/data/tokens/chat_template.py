"""Chat templates of Hugging Face: the text of a conversation, and the parts of it that are replies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

from unpad.data.sources.example import Turn
from unpad.errors import RecipeError, SourceError

# Stand for messages in a second rendering, which shows where the template puts each.
_MARK, _MARK_END = "\ufdd2", "\ufdd3"
NONCHARACTERS = frozenset("\ufdd0\ufdd1\ufdd2\ufdd3")
# White space that templates leave out around a message.
_CUTS = (
    str.strip, str.lstrip, str.rstrip,
    lambda text: text.strip("\n"), lambda text: text.lstrip("\n"), lambda text: text.rstrip("\n"),
)  # fmt: skip
MOST_SOURCE = 1 << 17  # characters of a template; those of released models have up to 30,000
# Characters of a conversation's text, beside those of its messages so many times.
MOST_TEXT, MOST_GROWTH = 1 << 18, 10
OTHER_TEMPLATE = "correct the chat template in its file, or take chat_template out of the folder and import it again"
AMBIGUOUS = "mark replies with {% generation %} in the chat template, or leave such conversations out"


class UnusableTemplateError(SourceError):
    """A chat template that no conversation can be written with, or that costs more than a conversation may."""


@dataclass(frozen=True)
class Marked:
    """Text of a conversation.

    Args:
        replies: what the model is to say, with the token that ends it; in order.
        messages: the content of each message, in order; None if the template changes one, and marks replies itself.
    """

    text: str
    replies: tuple[slice, ...]
    messages: tuple[slice, ...] | None


class ChatTemplate:
    """A template in Jinja, run in a sandbox. Needs jinja2, of the extra `hf`.

    Args:
        source: the template.
        names: special tokens by the names that the template calls them by, such as bos_token.
        stops: texts of the tokens that end a reply.
    """

    def __init__(self, source: str, names: Mapping[str, str], stops: Sequence[str]) -> None:
        self.source, self.names, self.stops = source, dict(names), tuple(stops)

    def prompted(self, turns: Sequence[Turn]) -> Marked:
        """Text up to the beginning of the next reply; earlier replies are marked as far as they are known.

        Raises:
            SourceError: the template refuses the conversation.
        """
        _refuse_noncharacters(turns)
        text, generated = _without_marks(self._render(turns, prompt=True))
        try:
            messages = self._messages(turns, text, prompt=True)
            replies = generated or self._replies(turns, text, messages)
        except SourceError:
            return Marked(text, tuple(generated), None)
        return Marked(text, tuple(replies), tuple(messages))

    def marked(self, turns: Sequence[Turn]) -> Marked:
        """Text of a conversation with its replies marked, by {% generation %} or by the prompts that lead to them.

        Raises:
            SourceError: the template refuses the conversation, changes a message, or does not tell what a reply is.
        """
        _refuse_noncharacters(turns)
        text, generated = _without_marks(self._render(turns, prompt=False))
        num_replies = sum(turn.role == "assistant" for turn in turns)
        if generated and len(generated) != num_replies:
            what = (
                f"the chat template marks {len(generated)} parts with generation, and there are {num_replies} replies"
            )
            raise SourceError(what, fix="correct the template")
        try:
            messages = self._messages(turns, text, prompt=False)
        except SourceError:
            if not generated:
                raise
            return Marked(text, tuple(generated), None)
        return Marked(text, tuple(generated or self._replies(turns, text, messages)), tuple(messages))

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
            return error.what
        return ""

    def _messages(self, turns: Sequence[Turn], text: str, *, prompt: bool) -> list[slice]:
        """Place of the content of every message in the text."""
        stand_ins = [Turn(turn.role, f"{_MARK}{index}{_MARK_END}") for index, turn in enumerate(turns)]
        around, _ = _without_marks(self._render(stand_ins, prompt=prompt))
        rest, pieces = around, list[str]()
        for turn in stand_ins:
            before, found, rest = rest.partition(turn.content)
            if not found or _MARK in before:
                raise SourceError("the chat template leaves a message out or moves it", fix=AMBIGUOUS)
            pieces.append(before)
        pieces.append(rest)
        position, places = 0, list[slice]()
        for turn, before, after in zip(turns, pieces, pieces[1:], strict=False):
            start = position + len(before)
            contents = (turn.content, *(cut(turn.content) for cut in _CUTS))
            fits = [one for one in contents if text.startswith(one + after, start)]
            if not text.startswith(before, position) or not fits:
                raise SourceError(f"the chat template changes a message of role {turn.role}", fix=AMBIGUOUS)
            places.append(slice(start, start + len(fits[0])))
            position = places[-1].stop
        if position + len(pieces[-1]) != len(text):
            raise SourceError("the chat template depends on the messages beyond their places", fix=AMBIGUOUS)
        return places

    def _replies(self, turns: Sequence[Turn], text: str, messages: Sequence[slice]) -> list[slice]:
        """From where a prompt ends to the token that ends the reply."""
        replies: list[slice] = []
        for index, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            prompt = self._render(turns[:index], prompt=True)
            if not text.startswith(prompt) or len(prompt) > messages[index].start:
                what = "the chat template writes the beginning of a reply otherwise than the prompt for it"
                raise SourceError(what, fix=AMBIGUOUS)
            end = messages[index].stop
            end += len(text[end:]) - len(text[end:].lstrip())
            stop = next((stop for stop in self.stops if text.startswith(stop, end)), None)
            if stop is None:
                raise SourceError("the chat template ends a reply with no token that ends one", fix=AMBIGUOUS)
            replies.append(slice(len(prompt), end + len(stop)))
        return replies

    def _render(self, turns: Sequence[Turn], *, prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return self._run(messages, prompt)

    @cached_property
    def _run(self) -> Callable[[list[dict[str, str]], bool], str]:
        try:
            from jinja2 import TemplateError

            from unpad.data.tokens.jinja_budget import ExcessError
            from unpad.data.tokens.jinja_environment import ChatEnvironment
        except ImportError:
            what = "a chat template needs jinja2, which is not installed"
            raise RecipeError(what, fix="pip install unpad[hf]") from None
        if len(self.source) > MOST_SOURCE:
            what = f"the chat template has {len(self.source):,} characters; at most {MOST_SOURCE:,} are read"
            raise UnusableTemplateError(what, fix=OTHER_TEMPLATE)
        environment, one_at_a_time = ChatEnvironment(), Lock()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python, about what Jinja made of the template
                render = environment.read(self.source)
        except Exception as error:  # Jinja parses, and Python compiles: both end on odd texts in many ways
            raise UnusableTemplateError(
                f"the chat template is no Jinja: {_reason(error)}", fix=OTHER_TEMPLATE
            ) from None

        def run(messages: list[dict[str, str]], prompt: bool) -> str:
            given = sum(len(message["content"]) for message in messages)
            try:
                with one_at_a_time:
                    environment.budget.begin(len(messages), given)
                    text = render(messages=messages, add_generation_prompt=prompt, **self.names)
                if len(text) > MOST_TEXT + MOST_GROWTH * given:
                    raise ExcessError
                return text
            except ExcessError as error:
                what = f"the chat template is not usable: {_reason(error)}"
                raise UnusableTemplateError(what, fix=OTHER_TEMPLATE) from None
            except TemplateError as error:
                what = f"the chat template refuses a conversation: {_reason(error)}"
                raise SourceError(what, fix=AMBIGUOUS) from None
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                what = f"the chat template fails on a conversation: {_reason(error)}"
                raise SourceError(what, fix=AMBIGUOUS) from None

        return run


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _refuse_noncharacters(turns: Sequence[Turn]) -> None:
    if any(not NONCHARACTERS.isdisjoint(turn.content) for turn in turns):
        what = "a message has a character that Unicode keeps out of texts, one of U+FDD0 to U+FDD3"
        raise SourceError(what, fix="remove it")


def _without_marks(enclosed: str) -> tuple[str, list[slice]]:
    """The text without the marks of {% generation %}, and what they enclose."""
    first, *marked = enclosed.split("\ufdd0")
    pieces, spans, position = [first], list[slice](), len(first)
    for one in marked:
        inside, _, outside = one.partition("\ufdd1")
        spans.append(slice(position, position + len(inside)))
        pieces += [inside, outside]
        position += len(inside) + len(outside)
    return "".join(pieces), spans
