"""Text of one answer while its tokens come: whole characters, up to a stop text, with log probabilities if wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unpad.data.tokens.tokenizer import DecodeStream, Tokenizer
from unpad.inference.engine import NewToken
from unpad.inference.generate import StopTexts
from unpad.serving.protocol import Spelled


class Speech:
    """One answer of the engine as text.

    Args:
        stops: texts before which it ends.
        reports: whether tokens are handed on with the text that they begin in.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, reports: bool) -> None:
        self._tokenizer, self._reports = tokenizer, reports
        self._decoder, self._stops = DecodeStream(tokenizer), StopTexts(stops)
        self._held: list[Spelled] = []
        self._num_decoded = self._num_said = 0  # characters

    @property
    def is_over(self) -> bool:
        """True once a stop text was found."""
        return self._stops.found

    def echo(self, tokens: Iterable[NewToken]) -> tuple[str, tuple[Spelled, ...]]:
        """Text and tokens of the prompt, which begin the answer; no stop text is looked for in them."""
        decoder, said, spelled = DecodeStream(self._tokenizer), "", []
        for step in tokens:
            spelled.append(self._spelled(step, len(said)))
            said += decoder.push(step.token)
        said += decoder.flush()
        self._num_decoded = self._num_said = len(said)
        return said, tuple(spelled)

    def push(self, step: NewToken) -> tuple[str, tuple[Spelled, ...]]:
        """Add a token; return the text that is certain by now, and the tokens that begin in the text so far."""
        if self._reports:
            self._held.append(self._spelled(step, self._num_decoded))
        return self._said(self._decoder.push(step.token), is_last=False)

    def rest(self) -> tuple[str, tuple[Spelled, ...]]:
        """The rest of text and tokens at the end of the answer."""
        return self._said(self._decoder.flush(), is_last=True)

    def _said(self, text: str, *, is_last: bool) -> tuple[str, tuple[Spelled, ...]]:
        self._num_decoded += len(text)
        said = "" if self.is_over else self._stops.push(text)
        if is_last and not self.is_over:
            said += self._stops.rest()
        self._num_said += len(said)
        everything = is_last and not self.is_over
        ready = [one for one in self._held if everything or one.offset < self._num_said]
        self._held = self._held[len(ready) :]
        return said, tuple(ready)

    def _spelled(self, step: NewToken, offset: int) -> Spelled:
        top = tuple(Spelled(*self._spelling(id), logprob) for id, logprob in step.top)
        return Spelled(*self._spelling(step.token), step.logprob, top, offset)

    def _spelling(self, id: int) -> tuple[str, bytes]:
        """Name and bytes of a token; one without text has a name alone."""
        tokenizer = self._tokenizer
        names = {tokenizer.eos_id: "<|eos|>", tokenizer.bos_id: "<|bos|>", tokenizer.pad_id: "<|pad|>"}
        if id >= tokenizer.vocab_size:
            return f"<|{id}|>", b""
        text = tokenizer.pieces[id] if tokenizer.pieces is not None else tokenizer.decode([id]).encode()
        return names.get(id, f"<|{id}|>"), text
