"""Encoding of examples as tokens and a loss mask, by one rule for texts, conversations and prompts.

    text   BOS text EOS                                   loss on the text and its EOS
    chat   BOS prefix message [separator prefix message]  EOS after every reply; loss on replies and their EOS

Prefixes, separators and messages are encoded separately, so no tokenizer can merge across them. Only this module adds
special ids: text that looks like a special token is ordinary text. A tokenizer with a chat template of its own encodes
conversations by that (`chat_template.py`).
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.chat_template import THOUGHTS_IN_TEXT, Marked
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from unpad.errors import OutOfMemoryError, RecipeError, SourceError
from unpad.machine import cores
from unpad.recipes.data import PACKAGED_TEMPLATES, Template
from unpad.terminal.progress import progress


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
        tokenizer.refuse_special([example.given])
        marked = tokenizer.chat.told(thinking).given(example.given).marked(example.turns)
        texts = [text for turn in example.turns for text in (turn.content, turn.thoughts)]
        ids, places = _encode_marked(marked, texts, tokenizer)
    except SourceError as error:
        raise SourceError(error.what, where=error.where or example.where, fix=error.fix) from None
    said = [turn for turn in example.turns if turn.role == "assistant"]
    replies = [reply for reply, turn in zip(marked.replies, said, strict=True) if turn.learned]
    return ids, bytes(any(reply.start <= place.start < reply.stop for reply in replies) for place in places)


def _encode_marked(marked: Marked, texts: list[str], tokenizer: LibraryTokenizer) -> tuple[list[int], list[slice]]:
    """Ids of the text of a conversation, and the characters of each; no token reaches into or out of a reply.

    Args:
        texts: of the messages, which spell no special token where the template does not show their places.
    """
    if marked.messages is None:
        tokenizer.refuse_special(texts)
    bounds = {bound for reply in marked.replies for bound in (reply.start, reply.stop)}
    return tokenizer.encode_marked(marked.text, marked.messages or (), bounds)


EXAMPLES_AT_ONCE = 4000  # lists of ids take ten times the memory of their arrays; fewer for long examples:
CHARS_AT_ONCE = 500_000
THREADS = 2  # the tokenizer encodes one part, without the interpreter's lock, while another becomes arrays
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to get when the parent ends
WORTH_A_PROCESS = 2_000_000  # characters; fewer are encoded before another process has started

ExampleSpan = tuple[int, int]  # first example of a part, and the end of the part


@dataclass(frozen=True, eq=False)
class LostText:
    """Characters of examples that the tokenizer lost.

    Args:
        num: (3, num_examples) int32, characters of all messages, and characters and UTF-8 bytes of those that carry
            loss.
        counts: the characters -> how often they were lost.
    """

    num: np.ndarray
    counts: Counter[str]


@dataclass(frozen=True)
class Encoded:
    """A part: tokens and loss_mask (num_tokens,), the length of every example, and what was lost."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: list[int]
    lost: LostText


@dataclass(frozen=True)
class _Job:
    """Inputs that the encoding of every part shares."""

    examples: Sequence[Example]
    tokenizer: Tokenizer
    template: Template
    fixed: dict[str, list[int]]


_inherited: _Job | None = None  # set in a process that encodes, when it is forked


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest type for every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, template: Template
) -> tuple[np.ndarray, np.ndarray, np.ndarray, LostText]:
    """Encode examples, every message once.

    Returns:
        tokens (num_tokens,) uint16 or uint32; loss_mask (num_tokens,) bool, True where predicting this token counts;
        offsets (num_examples + 1,) int64; what the tokenizer lost of the messages.

    Raises:
        RecipeError: the tokenizer has a chat template, and `template` is one that the user chose; or it has none, or
            one that does not ask for it, and `template` says whether the model is to think.
        SourceError: a text is not valid Unicode, or the chat template refuses a conversation; names its place.
    """
    _check_template(tokenizer, template)
    job = _Job(examples, tokenizer, template, _encode_fixed(tokenizer, template))
    nothing = Encoded(np.zeros(0, token_dtype(tokenizer.vocab_size)), np.zeros(0, np.bool_), [0], _lost_text([], []))
    spans, num_chars = _spans(examples)
    with _workers(job, min(num_chars // WORTH_A_PROCESS, len(spans))) as (pool, encode):
        parts = [nothing]
        with progress("encoding", len(examples), "documents") as bar:
            for (first, end), part in zip(spans, pool.map(encode, spans), strict=True):
                parts.append(part)
                bar.advance(end - first)
    offsets = np.cumsum(np.concatenate([part.lengths for part in parts]), dtype=np.int64)
    num = np.concatenate([part.lost.num for part in parts], 1)
    lost = LostText(num, sum((part.lost.counts for part in parts), Counter()))
    tokens, masks = [part.tokens for part in parts], [part.loss_mask for part in parts]
    return np.concatenate(tokens), np.concatenate(masks), offsets, lost


def encode_prompt(turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> list[int]:
    """Encode a conversation up to the beginning of the next reply, exactly as in training.

    Raises:
        SourceError: the chat template of the tokenizer refuses the conversation.
    """
    if tokenizer.chat is not None:
        assert isinstance(tokenizer, LibraryTokenizer), "words have no chat template"
        marked = tokenizer.chat.told(template.thinking).prompted(turns)
        return _encode_marked(marked, [turn.content for turn in turns], tokenizer)[0]
    fixed = _encode_fixed(tokenizer, template)
    job, ids = _Job((), tokenizer, template, fixed), list[int]()
    contents, _ = _encode_contents(job, [turn.content for turn in turns])
    _append(job, turns, iter(contents), ids, bytearray())
    return ids + (fixed[template.separator] if turns else []) + fixed[template.assistant]


def _check_template(tokenizer: Tokenizer, template: Template) -> None:
    if tokenizer.chat is not None:
        if template.model_copy(update={"thinking": None}) not in PACKAGED_TEMPLATES:
            what = "the tokenizer of the imported model has a chat template, and the recipe another one"
            raise RecipeError(what, where="data.template", fix="leave data.template out")
        tokenizer.chat.told(template.thinking)
    elif template.thinking is not None:
        what = "there is no chat template that asks whether the model is to think"
        raise RecipeError(what, where="data.template.thinking", fix="leave data.template.thinking out")


def _refuse_more_than_messages(example: Example) -> None:
    if example.given:
        what = "E_FIELD the row has tools or chat_template_kwargs, and the tokenizer no chat template"
        fix = "take them out of the row, or name them in `ignore` of the source"
        raise SourceError(what, where=example.where, fix=fix)
    if any(turn.thoughts for turn in example.turns):
        what = "a reply has its thoughts in a field, and the template of the recipe has no place for them"
        raise SourceError(what, where=example.where, fix=THOUGHTS_IN_TEXT)


def _encode_fixed(tokenizer: Tokenizer, template: Template) -> dict[str, list[int]]:
    texts = template_texts(template)
    return {"": [], **dict(zip(texts, tokenizer.encode_batch(texts), strict=True))}


def reserved_texts(template: Template) -> list[str]:
    """Strings of the template that may have an id of their own; single characters never do."""
    return [text for text in template_texts(template) if len(text) > 1]


def template_texts(template: Template) -> list[str]:
    """Strings of a conversation besides its messages, without empty ones."""
    texts = (template.system, template.user, template.assistant, template.separator)
    return [text for text in dict.fromkeys(texts) if text]


def _spans(examples: Sequence[Example]) -> tuple[list[ExampleSpan], int]:
    """Return the first example and the end of every part, and the number of characters."""
    chars = np.cumsum([sum(len(turn.content) for turn in example.turns) for example in examples], dtype=np.int64)
    total = int(chars[-1]) if len(chars) else 0
    by_size = np.searchsorted(chars, np.arange(0, total, CHARS_AT_ONCE), "right")
    bounds = np.unique([*range(0, len(examples), EXAMPLES_AT_ONCE), *by_size, len(examples)]).tolist()
    return list(pairwise(bounds)), total


@contextmanager
def _workers(job: _Job, most: int) -> Iterator[tuple[Executor, Callable[[ExampleSpan], Encoded]]]:
    """Executor that encodes parts: processes if they can be forked, which share neither the interpreter's lock nor the
    library's, otherwise threads."""
    is_off = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() in ("", "off", "false", "f", "no", "n", "0")
    num = 1 if is_off or sys.platform != "linux" else min(cores(), most)
    if num < 2:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="unpad-tokenizer") as pool:
            yield pool, partial(_encode_part, job)
        return
    try:
        with (
            _environment("TOKENIZERS_PARALLELISM", "false"),  # every process has one core
            ProcessPoolExecutor(num, multiprocessing.get_context("fork"), _begin_process, (job,)) as pool,
        ):
            yield pool, _encode_inherited
    except BrokenProcessPool:
        raise OutOfMemoryError(
            "a process that encodes was ended from outside, most likely for want of memory",
            fix="free memory, or set TOKENIZERS_PARALLELISM=false to encode in this process alone",
        ) from None


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _begin_process(job: _Job) -> None:
    # Forked, so that the job is not copied through a pipe. The parent handles interrupts; if killed, it takes its
    # processes along.
    global _inherited
    _inherited = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _encode_inherited(span: ExampleSpan) -> Encoded:
    assert _inherited is not None, "set when this process began"
    return _encode_part(_inherited, span)


def _encode_part(job: _Job, span: ExampleSpan) -> Encoded:
    part = job.examples[slice(*span)]
    contents, lost = _encode_contents(job, [turn.content for example in part for turn in example.turns])
    ids: list[int] = []
    loss, lengths, following = bytearray(), [], iter(contents)
    for example in part:
        before = len(ids)
        if job.tokenizer.chat is None or example.turns[0].role == "text":
            _refuse_more_than_messages(example)
            _append(job, example.turns, following, ids, loss)
        else:
            chat_ids, counts = encode_chat(example, job.tokenizer, job.template.thinking)
            ids += chat_ids
            loss += counts
            for _ in example.turns:
                next(following)
        lengths.append(len(ids) - before)
    tokens = np.array(ids, token_dtype(job.tokenizer.vocab_size))
    return Encoded(tokens, np.frombuffer(loss, np.bool_), lengths, _lost_text(part, lost))


def _lost_text(examples: Sequence[Example], lost: Sequence[str]) -> LostText:
    """Sum up what was lost of every message, message by message of all examples."""
    num, following, counts = np.zeros((3, len(examples)), np.int32), iter(lost), Counter[str]()
    for row, example in enumerate(examples):
        for turn in example.turns:
            gone = next(following)
            counts.update(gone)
            num[0, row] += len(gone)
            if turn.has_loss:
                num[1:, row] += len(gone), len(gone.encode())
    return LostText(num, counts)


def _encode_contents(job: _Job, texts: list[str]) -> tuple[list[list[int]], list[str]]:
    """Encode messages, and collect what is lost of each; a message equal to a role's prefix is spelled out, so that it
    does not get the prefix's id."""
    encoded, lost = job.tokenizer.encode_counted(texts)
    for position, text in enumerate(texts):
        if text in job.fixed:
            letters, gone = job.tokenizer.encode_counted(list(text))
            encoded[position], lost[position] = [id for ids in letters for id in ids], "".join(gone)
    return encoded, lost


def _append(job: _Job, turns: Sequence[Turn], contents: Iterator[list[int]], ids: list[int], loss: bytearray) -> None:
    ids.append(job.tokenizer.bos_id)
    loss.append(0)
    for position, turn in enumerate(turns):
        if turn.role != "text":
            lead = (job.fixed[job.template.separator] if position else []) + job.fixed[getattr(job.template, turn.role)]
            ids += lead
            loss += bytes(len(lead))
        content = next(contents)
        ids += content
        is_reply = turn.role in ("text", "assistant")
        ids += [job.tokenizer.eos_id] * is_reply
        loss += (b"\1" if turn.has_loss else b"\0") * (len(content) + is_reply)
