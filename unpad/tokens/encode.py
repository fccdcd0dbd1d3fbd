"""Example -> tokens and loss mask, by one rule for texts, conversations and prompts.

    text   BOS text EOS                                   loss on the text and its EOS
    chat   BOS prefix message [separator prefix message]  EOS after every reply; loss on replies and their EOS

Prefixes, separators and messages are encoded apart from each other, so no tokenizer can merge across them, and special
ids are placed here alone: text that looks like a special token is ordinary text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from unpad.recipe_data import Template
from unpad.sources.example import Example, Turn
from unpad.tokens.tokenizer import Tokenizer

LOSS_ROLES = ("text", "assistant")
EXAMPLES_AT_ONCE = 4000  # lists of ids take ten times the memory of the arrays they become
AHEAD = 2  # parts in the tokenizer's hands while the one before becomes arrays: it leaves the interpreter's lock


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, template: Template
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode examples; every message is given to the tokenizer once.

    Returns:
        tokens (num_tokens,) uint16 or uint32; loss_mask (num_tokens,) bool, True where predicting this token counts;
        offsets (num_examples + 1,) int64.
    """
    fixed = _encode_fixed(tokenizer, template)
    dtype = token_dtype(tokenizer.vocab_size)
    tokens, masks, lengths = [np.zeros(0, dtype)], [np.zeros(0, np.bool_)], [0]
    for part, contents in _encoded_parts(examples, tokenizer, fixed):
        ids: list[int] = []
        loss = bytearray()
        for example in part:
            before = len(ids)
            _append(ids, loss, example.turns, contents, fixed, tokenizer, template)
            lengths.append(len(ids) - before)
        tokens.append(np.array(ids, dtype))
        masks.append(np.frombuffer(loss, np.bool_))
    return np.concatenate(tokens), np.concatenate(masks), np.cumsum(lengths, dtype=np.int64)


def encode_prompt(turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> list[int]:
    """Encode a conversation up to where the next reply begins, exactly as training shows it."""
    fixed = _encode_fixed(tokenizer, template)
    ids: list[int] = []
    contents = _encode_contents(tokenizer, [turn.content for turn in turns], fixed)
    _append(ids, bytearray(), turns, contents, fixed, tokenizer, template)
    return ids + (fixed[template.separator] if turns else []) + fixed[template.assistant]


def _encode_fixed(tokenizer: Tokenizer, template: Template) -> dict[str, list[int]]:
    texts = template_texts(template)
    return {"": [], **dict(zip(texts, tokenizer.encode_batch(texts), strict=True))}


def reserved_texts(template: Template) -> list[str]:
    """The template's strings that a tokenizer may give ids of their own; a single character stays what it is."""
    return [text for text in template_texts(template) if len(text) > 1]


def template_texts(template: Template) -> list[str]:
    """The strings that a conversation holds besides its messages; none empty."""
    texts = (template.system, template.user, template.assistant, template.separator)
    return [text for text in dict.fromkeys(texts) if text]


def _encoded_parts(
    examples: Sequence[Example], tokenizer: Tokenizer, fixed: dict[str, list[int]]
) -> Iterator[tuple[Sequence[Example], Iterator[list[int]]]]:
    """Parts of the examples in order, each with the ids of its messages; the next ones are encoded meanwhile."""

    def encode(part: Sequence[Example]) -> Iterator[list[int]]:
        return _encode_contents(tokenizer, [turn.content for example in part for turn in example.turns], fixed)

    parts = [examples[first : first + EXAMPLES_AT_ONCE] for first in range(0, len(examples), EXAMPLES_AT_ONCE)]
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="unpad-tokenizer") as pool:
        waiting = deque(pool.submit(encode, part) for part in parts[:AHEAD])
        for number, part in enumerate(parts):
            contents = waiting.popleft().result()
            if number + AHEAD < len(parts):
                waiting.append(pool.submit(encode, parts[number + AHEAD]))
            yield part, contents


def _encode_contents(tokenizer: Tokenizer, texts: list[str], fixed: dict[str, list[int]]) -> Iterator[list[int]]:
    """Encode messages; one that equals a role's prefix is spelled, or it would get the prefix's own id."""
    encoded = tokenizer.encode_batch(texts)
    for position, text in enumerate(texts):
        if text in fixed:
            encoded[position] = [id for ids in tokenizer.encode_batch(list(text)) for id in ids]
    return iter(encoded)


def _append(
    ids: list[int],
    loss: bytearray,
    turns: Sequence[Turn],
    contents: Iterator[list[int]],
    fixed: dict[str, list[int]],
    tokenizer: Tokenizer,
    template: Template,
) -> None:
    ids.append(tokenizer.bos_id)
    loss.append(0)
    for position, turn in enumerate(turns):
        if turn.role != "text":
            lead = (fixed[template.separator] if position else []) + fixed[getattr(template, turn.role)]
            ids += lead
            loss += bytes(len(lead))
        content = next(contents)
        ids += content
        if turn.role in LOSS_ROLES:
            ids.append(tokenizer.eos_id)
            loss += b"\1" * (len(content) + 1)
        else:
            loss += bytes(len(content))
