"""Characters that a tokenizer loses: those that become its unknown token, and those that become no token at all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unpad.errors import SourceError
from unpad.terminal.table import number_of

MOST_IN_SILENCE = 0.01  # a larger lost share is a warning, and there are no bits per character
MOST_TRAINED = 0.9  # a larger lost share leaves nothing to train on or to measure
MOST_OF_PROMPT = 0.5  # a larger lost share leaves a prompt mostly unknown
NUM_NAMED = 8  # lost characters that a message names
FIX = "use a tokenizer that can spell the text, such as tokenizer.kind=bpe or words"
FIX_OF_RUN = "name text in a language of the run's data, or train a run with a tokenizer that can spell this one"


@dataclass(frozen=True)
class LostCharacters:
    """Count of the characters that a tokenizer lost, of `total`; `common` are the commonest of them."""

    lost: int = 0
    total: int = 0
    common: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        return self.lost / max(self.total, 1)

    def describe(self) -> str:
        """The count in words."""
        such = f", such as {' '.join(map(_shown, self.common[:NUM_NAMED]))}" if self.common else ""
        characters = number_of(self.total, "characters")
        return f"{self.lost:,} of {characters} ({self.share:.2%}) are lost to unknown tokens{such}"

    def lines(self) -> list[str]:
        """The count as lines of a report, a warning above MOST_IN_SILENCE."""
        if self.share > MOST_IN_SILENCE:
            return [f"warning: {self.describe()}; {FIX}"]
        return [f"tokenizer: {self.describe()}" + ("; bits per character are of the others" if self.lost else "")]

    def why_no_bits(self) -> str:
        """Reason why there are no bits per character; "" if there are."""
        if self.share <= MOST_IN_SILENCE:
            return ""
        return f"{self.share:.1%} of the characters are lost to unknown tokens"

    def refuse(self, where: str, fix: str = FIX) -> None:
        """Refuse text to train on or to measure on if nearly all of it is lost.

        Raises:
            SourceError: more than MOST_TRAINED is lost.
        """
        if self.share > MOST_TRAINED:
            raise SourceError(f"next to nothing of the text survives: {self.describe()}", where=where, fix=fix)


def commonest(lost: Counter[str]) -> tuple[str, ...]:
    """Characters by descending count, equal counts by code point."""
    return tuple(sorted(lost, key=lambda character: (-lost[character], character)))


def uncovered(
    text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], unknown: int | None, spaces_count: bool
) -> str:
    """Return the characters of a text that no token but the unknown one covers.

    Args:
        offsets: first character of each token, and the end of its characters.
        spaces_count: whether white space without any token is lost; tokenizers that cut at it leave it to the decoder.
    """
    known, strange = bytearray(len(text)), bytearray(len(text))
    for id, (start, stop) in zip(ids, offsets, strict=True):
        covered = strange if id == unknown else known
        covered[start:stop] = b"\1" * (stop - start)
    if all(known):
        return ""
    return "".join(
        character
        for character, is_known, is_strange in zip(text, known, strange, strict=True)
        if not is_known and (is_strange or spaces_count or not character.isspace())
    )


def _shown(character: str) -> str:
    return character if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"
