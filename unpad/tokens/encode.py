"""Example -> tokens and loss mask, by one rule for texts, conversations and prompts.

    text   BOS text EOS                                   loss on the text and its EOS
    chat   BOS prefix message [separator prefix message]  EOS after every reply; loss on replies and their EOS

Prefixes, separators and messages are encoded apart from each other, so no tokenizer can merge across them, and special
ids are placed here alone: text that looks like a special token is ordinary text.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from unpad.errors import SourceError
from unpad.recipe_data import Template
from unpad.sources.example import Example, Turn
from unpad.tokens.tokenizer import Tokenizer

LOSS_ROLES = ("text", "assistant")
EXAMPLES_AT_ONCE = 4000  # lists of ids take ten times the memory of the arrays they become
THREADS = 2  # one part is in the tokenizer's hands, where it leaves the interpreter's lock, as another becomes arrays
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to get when the parent is gone
WORTH_A_PROCESS = 2_000_000  # characters; fewer are encoded before another process has begun

Encoded = tuple[np.ndarray, np.ndarray, list[int]]  # tokens, loss_mask and the length of every example


@dataclass(frozen=True)
class _Job:
    """What every part is encoded with."""

    examples: Sequence[Example]
    tokenizer: Tokenizer
    template: Template
    fixed: dict[str, list[int]]


# A process that is forked from this one finds its job here; nothing of it goes through a pipe.
_job: _Job | None = None


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
    job = _Job(examples, tokenizer, template, _encode_fixed(tokenizer, template))
    firsts = range(0, len(examples), EXAMPLES_AT_ONCE)
    nothing = np.zeros(0, token_dtype(tokenizer.vocab_size)), np.zeros(0, np.bool_), [0]
    with _workers(job) as (pool, encode):
        parts = [nothing, *pool.map(encode, firsts)]
    tokens, masks, lengths = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(masks), np.cumsum(np.concatenate(lengths), dtype=np.int64)


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


@contextmanager
def _workers(job: _Job) -> Iterator[tuple[Executor, Callable[[int], Encoded]]]:
    """What encodes the part that begins at an example: processes where there is enough to do and a process can be
    forked, which share neither the interpreter's lock nor the library's; else threads."""
    global _job
    num = _num_processes(job.examples)
    if num < 2:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="unpad-tokenizer") as pool:
            yield pool, partial(_encode_part, job)
        return
    _job = job
    try:
        with ProcessPoolExecutor(num, multiprocessing.get_context("fork"), _begin_process) as pool:
            yield pool, _encode_inherited
    except BrokenProcessPool:
        raise SourceError(
            "a process that encodes was ended from outside, most likely for want of memory",
            fix="free memory, or set TOKENIZERS_PARALLELISM=false to encode in this process alone",
        ) from None
    finally:
        _job = None


def _num_processes(examples: Sequence[Example]) -> int:
    if sys.platform != "linux" or os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "off", "no"):
        return 1
    num_chars = sum(len(turn.content) for example in examples for turn in example.turns)
    return min(len(os.sched_getaffinity(0)), num_chars // WORTH_A_PROCESS, -(-len(examples) // EXAMPLES_AT_ONCE))


def _begin_process() -> None:
    # The parent acts on signals, and killed it takes its processes along; every process has one core.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_inherited(first: int) -> Encoded:
    assert _job is not None, "set before this process was forked"
    return _encode_part(_job, first)


def _encode_part(job: _Job, first: int) -> Encoded:
    """Encode the examples from this one on, as many as are done at once."""
    part = job.examples[first : first + EXAMPLES_AT_ONCE]
    contents = _encode_contents(job.tokenizer, [turn.content for example in part for turn in example.turns], job.fixed)
    ids: list[int] = []
    loss, lengths = bytearray(), []
    for example in part:
        before = len(ids)
        _append(ids, loss, example.turns, contents, job.fixed, job.tokenizer, job.template)
        lengths.append(len(ids) - before)
    return np.array(ids, token_dtype(job.tokenizer.vocab_size)), np.frombuffer(loss, np.bool_), lengths


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
