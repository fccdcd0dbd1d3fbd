"""Encoding of conversations by the chat template that came with a tokenizer.

The text of a template becomes special tokens where it spells them, and so do the marks of thoughts in a reply; other
text of a message never does. The loss is on what the template lets the model say: its replies, with the token that
ends each.
"""

from __future__ import annotations

from collections.abc import Sequence

from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from unpad.errors import SourceError


def encode_chat(example: Example, tokenizer: Tokenizer, thinking: bool | None) -> tuple[list[int], bytes]:
    """Ids of a conversation, and 1 for each that counts in the loss.

    A prompt ends where its reply begins, so no token reaches across that place.

    Args:
        thinking: of `data.template`, which the template may ask for.

    Raises:
        SourceError: the template refuses the conversation, or does not tell what a reply is; names its place.
    """
    assert isinstance(tokenizer, LibraryTokenizer), "words have no chat template"
    assert tokenizer.chat is not None, "asked before"
    try:
        marked = tokenizer.chat.told(thinking).marked(example.turns)
        if marked.messages is None:
            tokenizer.refuse_special([text for turn in example.turns for text in (turn.content, turn.thoughts)])
        bounds = {bound for reply in marked.replies for bound in (reply.start, reply.stop)}
        ids, places = tokenizer.encode_marked(marked.text, marked.messages or (), bounds)
    except SourceError as error:
        raise SourceError(error.what, where=error.where or example.where, fix=error.fix) from None
    counts = bytes(any(reply.start <= place.start < reply.stop for reply in marked.replies) for place in places)
    return ids, counts


def encode_chat_prompt(turns: Sequence[Turn], tokenizer: Tokenizer, thinking: bool | None) -> list[int]:
    """Ids of a conversation up to the beginning of the next reply, as `encode_chat` encodes them.

    Raises:
        SourceError: the template refuses the conversation.
    """
    assert isinstance(tokenizer, LibraryTokenizer), "words have no chat template"
    assert tokenizer.chat is not None, "asked before"
    marked = tokenizer.chat.told(thinking).prompted(turns)
    if marked.messages is None:
        tokenizer.refuse_special([turn.content for turn in turns])
    bounds = {bound for reply in marked.replies for bound in (reply.start, reply.stop)}
    return tokenizer.encode_marked(marked.text, marked.messages or (), bounds)[0]
