"""Prompts for a run of texts or conversations, and the replies to them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unpad.data.sources.example import Turn
from unpad.data.text import SYSTEM_TURNS
from unpad.data.tokens.encode import encode_prompt
from unpad.data.tokens.lost import MOST_OF_PROMPT, LostCharacters, commonest
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.errors import RecipeError
from unpad.inference.engine import Finished
from unpad.recipes.recipe import Recipe

NO_PICTURE = "no picture is given; `unpad infer RUN --image FILE --question TEXT` shows one"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Args:
        text: as given; system: the system text before it, or "".
        ids: encoded exactly as training encoded its kind.
        lost: characters of both that the tokenizer lost.
    """

    text: str
    system: str
    ids: list[int]
    lost: LostCharacters


@dataclass(frozen=True)
class Reply:
    """A reply to a prompt: its text, its number of tokens without EOS, why it ended, and the seed of its draws."""

    prompt: Prompt
    text: str
    num_tokens: int
    finished: Finished
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Fields by name; `unknown_characters` are those of prompt and system text that the tokenizer lost."""
        prompt = self.prompt
        return {
            "prompt": prompt.text,
            "system": prompt.system,
            "reply": self.text,
            "prompt_tokens": len(prompt.ids),
            "tokens": self.num_tokens,
            "finished": self.finished,
            "seed": self.seed,
            "unknown_characters": prompt.lost.lost,
            "mostly_unknown": is_mostly_unknown(prompt.lost),
        }


def encode(recipe: Recipe, tokenizer: Tokenizer, text: str, system: str = "") -> Prompt:
    """Encode a text to continue or, if the run was trained on conversations, a user's message.

    Args:
        system: system text of the conversation; "" leaves it out.

    Raises:
        RecipeError: there is a system text, and the run's prompts have no place for one.
        SourceError: the chat template of an imported model refuses the conversation.
    """
    lost = lost_of(tokenizer, [text, system])
    if not reads_chat(recipe, tokenizer):
        check_system(recipe, tokenizer, system)
        return Prompt(text, "", [tokenizer.bos_id, *tokenizer.encode_batch([text])[0]], lost)
    turns = opening(recipe, tokenizer, system)
    return Prompt(text, system, encode_prompt([*turns, Turn("user", text)], tokenizer, recipe.data.template), lost)


def reads_chat(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """True if prompts are messages of a conversation: in a run trained on conversations or on questions, or an imported
    chat model that was not trained on other data."""
    return recipe.data.converses or bool(recipe.data.vqa) or (tokenizer.chat is not None and not recipe.data.text)


def opening(recipe: Recipe, tokenizer: Tokenizer, system: str) -> list[Turn]:
    """The system turn that begins a conversation; no turn without a text.

    Raises:
        RecipeError: as `check_system`.
    """
    check_system(recipe, tokenizer, system)
    return [Turn("system", system)] if system else []


def check_system(recipe: Recipe, tokenizer: Tokenizer, system: str) -> None:
    """Refuse a system text if prompts have no place for it.

    Raises:
        RecipeError: the run continues plain texts, or its template has no prefix for system messages.
        SourceError: the chat template of an imported model refuses it.
    """
    template = recipe.data.template
    if system and reads_chat(recipe, tokenizer) and tokenizer.chat is not None:
        tokenizer.chat.prompted([Turn("system", system), Turn("user", "?")])
        return
    if system and not recipe.data.converses:
        what, fix = "this run was trained on no conversations, so it reads no system text", "leave the system text out"
        raise RecipeError(what, where="data.chat", fix=fix)
    if system and template.system in ("", template.user):
        same = "an empty prefix" if not template.system else "the prefix of user messages"
        fix = "leave the system text out, or train with another data.template.system"
        raise RecipeError(f"the template gives system messages {same}", where="data.template.system", fix=fix)


def system_note(num_system: int | None) -> str:
    """Remark on how well a run can follow a system text; "" if it was trained on system texts.

    Args:
        num_system: system turns of the training conversations; None if the run does not say.
    """
    if num_system is None:
        return "this run does not record whether it was trained on system turns; without them it may ignore the text"
    if num_system == 0:
        return "no conversation that this run was trained on has a system turn, so it may ignore the text"
    return ""


def count_system_turns(log: Sequence[dict[str, Any]]) -> int | None:
    """System turns of the training conversations, by a run's log; None if it does not say."""
    counts = [entry[SYSTEM_TURNS] for entry in log if entry["kind"] == "data" and SYSTEM_TURNS in entry]
    return int(counts[-1]) if counts else None


def lost_of(tokenizer: Tokenizer, texts: Sequence[str]) -> LostCharacters:
    """Count the characters of texts that the tokenizer loses."""
    lost = Counter("".join(tokenizer.encode_counted(texts)[1]))
    return LostCharacters(lost.total(), sum(map(len, texts)), commonest(lost))


def is_mostly_unknown(lost: LostCharacters) -> bool:
    """True if most of a prompt is lost, so that a reply to it is meaningless."""
    return lost.share > MOST_OF_PROMPT


def prompt_warning(lost: LostCharacters) -> str:
    """Warning on a prompt of which characters are lost; "" for others."""
    part = "the prompt is mostly" if is_mostly_unknown(lost) else "a part of the prompt is"
    return f"warning: {part} unknown: {lost.describe()}" if lost.lost else ""


def plain_note(recipe: Recipe) -> str:
    """Remark for a conversation with a run trained on plain text or pictures; "" for a run trained on conversations."""
    if recipe.data.vqa:
        return NO_PICTURE
    if recipe.data.converses or not recipe.data.text:
        return ""
    return "this run was trained on plain text: it continues the text rather than answering"


def gives_seed(overrides: Sequence[str]) -> bool:
    """True if one of the recipe fields on a command line is the seed of sampling."""
    return any(text.partition("=")[0].strip() == "generate.seed" for text in overrides)
