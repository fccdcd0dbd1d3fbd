"""Conversation with a model, at a terminal or through a pipe."""

import json
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from unpad.data.sources.example import Turn
from unpad.data.tokens.encode import encode_prompt
from unpad.data.tokens.lost import LostCharacters
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.errors import RecipeError, UnpadError, nearest
from unpad.inference.engine import Engine
from unpad.inference.generate import stream, until
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.inference.prompts import check_system, lost_of, plain_note, prompt_warning, system_note
from unpad.models.contract import Generates
from unpad.nn.precision import Precision
from unpad.recipes.data import Template
from unpad.recipes.training import GenerateSettings
from unpad.storage import write_atomic
from unpad.storage.paths import new_path
from unpad.terminal.printing import print_lines, print_text
from unpad.terminal.table import number_of

COMMANDS = {
    "/clear": "forget the conversation",
    "/system TEXT": "set the system text, from the next message on; without TEXT, remove it",
    "/save FILE": "write the conversation to FILE, as one JSON line that training can read",
    "/help": "show this",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops a reply",
}
NAMES = [command.split()[0] for command in COMMANDS]
Answer = Callable[[Sequence[int], int], Generator[str, None, None]]  # of token ids and a seed, piece by piece


def fit(
    turns: Sequence[Turn], template: Template, tokenizer: Tokenizer, longest: int, reserve: int
) -> tuple[list[int], int]:
    """Encode the newest part of a conversation that leaves room for a reply, up to where the reply begins.

    Args:
        turns: optionally a system turn, which always stays, then user and assistant alternating, a user turn last.
        longest: the model's context, in tokens.
        reserve: tokens to leave for the reply; a long last message alone may leave fewer.

    Returns:
        Token ids, and the number of old turns that are left out.

    Raises:
        RecipeError: the last message alone exceeds the context.
    """
    first = next(i for i, turn in enumerate(turns) if turn.role != "system")
    starts = [i for i in range(first, len(turns)) if turns[i].role == "user"]
    ids: list[int] = []
    left_out = 0
    # From the newest exchange backwards: the work is bounded by the context, not by the length of the history.
    for start in reversed(starts):
        longer = encode_prompt([*turns[:first], *turns[start:]], tokenizer, template)
        if ids and len(longer) + reserve > longest:
            break
        ids, left_out = longer, start - first
    if len(ids) > longest:
        what = f"the message makes a prompt of {number_of(len(ids), 'tokens')}, the model's context is {longest}"
        raise RecipeError(what, fix="shorten it")
    return ids, left_out


def room_for_reply(settings: GenerateSettings, longest: int) -> int:
    """Tokens of the context that the oldest turns make way for: those of the longest reply, but at most half."""
    return min(settings.max_new_tokens, longest // 2)


class Conversation:
    """Turns so far, and the model that replies.

    Args:
        system: first turn, which trimming and `clear` leave in place.
        advance_seed: whether every reply draws with the next seed; if not, all draw with that of the settings.
        answer: continues a prompt where the model itself does not.

    `num_forgotten` counts the turns of the history that did not fit into the last prompt; `lost` has the characters of
    the last message that the tokenizer lost.
    """

    def __init__(
        self,
        model: Generates,
        tokenizer: Tokenizer,
        template: Template,
        settings: GenerateSettings,
        *,
        precision: Precision = "fp32",
        system: str = "",
        advance_seed: bool = True,
        answer: Answer | None = None,
    ) -> None:
        self._tokenizer, self._template, self._settings = tokenizer, template, settings
        self._longest, self._advance_seed = model.config.longest, advance_seed
        engine = Engine(model, precision=precision)  # keeps the conversation so far, but for the last reply
        self._answer = answer or (lambda ids, seed: stream(model, tokenizer, ids, settings, precision, seed, engine))
        self._opening = [Turn("system", system)] if system else []
        self._saved: set[Path] = set()
        self._num_replies = 0
        self.lost = LostCharacters()
        self.clear()

    def clear(self) -> None:
        """Forget everything except the system turn."""
        self.history: list[Turn] = list(self._opening)
        self.num_forgotten = 0

    def set_system(self, text: str) -> None:
        """Set the system text of the conversation so far; "" removes it."""
        rest = self.history[len(self._opening) :]
        self._opening = [Turn("system", text)] if text else []
        self.history = [*self._opening, *rest]

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yield the reply to a message as it appears.

        Message and reply enter the history when the reply ends or is closed, incomplete or not; an empty reply
        leaves no trace. The reply ends when the model begins to speak for the user. A repeated question is answered
        with another seed, so with a temperature the answer may differ.

        Raises:
            RecipeError: the message alone exceeds the model's context.
        """
        turns = [*self.history, Turn("user", text)]
        reserve = room_for_reply(self._settings, self._longest)
        ids, self.num_forgotten = fit(turns, self._template, self._tokenizer, self._longest, reserve)
        self.lost = lost_of(self._tokenizer, [text])
        seed = self._settings.seed + (self._num_replies if self._advance_seed else 0)
        self._num_replies += 1
        pieces = self._answer(ids, seed)
        said = ""
        try:
            with closing(pieces):  # frees the row where the text ends early
                for piece in until(pieces, speaker_stops(self._tokenizer, self._template)):
                    said += piece
                    yield piece
        finally:
            if said:
                self.history = [*turns, Turn("assistant", said)]

    def save(self, path: Path) -> None:
        """Write the conversation as one JSON line with `messages`.

        Raises:
            RecipeError: nothing has been said, or the file exists and is not an earlier save of this conversation.
            DiskError: the file cannot be written.
        """
        if len(self.history) == len(self._opening):
            raise RecipeError("there is nothing to save yet", where=str(path))
        if path.exists() and path.resolve() not in self._saved:
            raise RecipeError("the file exists", where=str(path), fix="choose another name")
        messages = [{"role": turn.role, "content": turn.content} for turn in self.history]
        write_atomic(path, json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        self._saved.add(path.resolve())


def speaker_stops(tokenizer: Tokenizer, template: Template) -> list[str]:
    """Texts with which the model begins to speak for the user; none for a chat template, which has stop ids instead."""
    user = "" if tokenizer.chat is not None else template.user
    return [user, template.separator + user] if user else []


@dataclass(frozen=True)
class Terminal:
    """A conversation at a terminal, or through a pipe.

    Without `interactive` every line of input is a conversation of its own and gets one line of reply, with line breaks
    inside it as `\\n`; no prompts and no remarks. Commands work there too, and print a line of their own.

    Args:
        read_line: shows its argument and returns a line without its end, or raises EOFError: `input`.
        write: shows text at once.
        warn: shows a line about a message with characters that the tokenizer lost.
        check_system: refuses a system text that the model cannot read; otherwise returns a remark on it, or "".
    """

    conversation: Conversation
    read_line: Callable[[str], str]
    write: Callable[[str], None]
    interactive: bool
    warn: Callable[[str], None] = lambda line: None
    check_system: Callable[[str], str] = lambda text: ""

    def run(self) -> None:
        """Read messages and write replies until the input ends or /quit.

        Raises:
            UnpadError: not interactive, and a message cannot be answered or a command fails.
        """
        if self.interactive:
            self.write("Type a message, or /help.\n")
        while True:
            try:
                line = self.read_line("> " if self.interactive else "").strip()
                if line == "/quit":
                    return
                self._handle(line)
            except EOFError:
                self.write("\n" if self.interactive else "")
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.write("\nCtrl-D or /quit leaves.\n")
            except UnpadError as error:
                if not self.interactive:
                    raise
                self.write(f"{error}\n")

    def _handle(self, line: str) -> None:
        """Carry out one line of input."""
        if re.fullmatch(r"/[A-Za-z]+( .*)?", line):
            self.write(self._command(line))
            return
        if not self.interactive:
            self.conversation.clear()
            reply = "".join(self.conversation.reply(line)) if line else ""
            self.write(reply.replace("\n", "\\n") + "\n")
        elif line:
            self._answer(line)
        if line and (warning := prompt_warning(self.conversation.lost)):
            self.warn(warning)

    def _command(self, line: str) -> str:
        """Carry out a command and return its message."""
        name, _, argument = line.partition(" ")
        argument, done = argument.strip(), ""
        if name == "/help":
            return "".join(f"{command:14}{what}\n" for command, what in COMMANDS.items())
        if name == "/clear":
            self.conversation.clear()
            done = "forgotten"
        elif name == "/system":
            remark = self.check_system(argument)
            self.conversation.set_system(argument)
            done = "; ".join(filter(None, ["system text set" if argument else "no system text", remark]))
        elif name == "/save":
            if not argument:
                raise RecipeError("/save needs the name of a file", fix="write for example /save talk.jsonl")
            path = new_path(argument)
            self.conversation.save(path)
            done = f"saved to {path}"
        else:
            return f"unknown command {name}; {nearest(name, NAMES)}\n"
        return f"{done}\n" if self.interactive else ""

    def _answer(self, line: str) -> None:
        """Write the reply as it is generated; Ctrl-C ends it."""
        had_forgotten = self.conversation.num_forgotten > 0
        with closing(self.conversation.reply(line)) as pieces:  # closing adds the partial reply to the history
            try:
                for piece in pieces:
                    self.write(piece)
            except KeyboardInterrupt:
                self.write(" [stopped]")
        self.write("\n")
        if self.conversation.num_forgotten and not had_forgotten:
            self.write("(the oldest messages no longer fit into the model's context and are left out)\n")


def chat_with_run(run: LoadedRun, advances: bool, system: str = "", answer: Answer | None = None) -> None:
    """Chat with a run at the terminal, or answer the lines of the standard input.

    Args:
        advances, answer: as `advance_seed` and `answer` of `Conversation`.

    Raises:
        RecipeError: the run reads no system text, and `system` is one.
    """

    def check(text: str) -> str:
        check_system(run.recipe, run.tokenizer, text)
        return system_note(run.num_system) if text else ""

    def warn(line: str) -> None:
        print_lines([line], to_errors=True)

    for remark in (plain_note(run.recipe), check(system)):
        if remark:
            warn(f"note: {remark}")
    template, settings = run.recipe.data.template, run.recipe.generate
    precision = generation_precision(settings, run.model.device)
    conversation = Conversation(
        run.generator, run.tokenizer, template, settings, precision=precision, system=system, advance_seed=advances,
        answer=answer,
    )  # fmt: skip
    Terminal(conversation, input, print_text, sys.stdin.isatty(), warn, check).run()
