"""Held-out perplexity, bits per byte and per character, from sums that no batching can change, and replies with scores
by the keywords of each question.

Training calls `held_out` and `keepsakes`, `unpad eval` calls `evaluate`, for runs of texts and conversations.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from unpad.data.measuring import Measuring
from unpad.data.sources.reader import PAIRS
from unpad.data.sources.split import PARTS, Split
from unpad.data.text import TextData
from unpad.data.tokens.lost import FIX_OF_RUN, LostCharacters
from unpad.data.tokens.token_set import TokenSet
from unpad.data.tokens.tokenizer import TOKENIZER, load_tokenizer
from unpad.errors import SourceError
from unpad.evaluation import preferences
from unpad.evaluation import rows as example_rows
from unpad.evaluation.family import Prompt, TrainedModel, evenly, token_sums
from unpad.evaluation.metrics import HeldOut, Metric, NewFacts, mean_of, perplexity, refused
from unpad.evaluation.rows import KIND, PART, WHERE, Columns, Evaluation, ExampleRows, Measures, Ratio, named, objects
from unpad.evaluation.simple import START, Guesses, ngram_bits, of_rows, sampled
from unpad.inference.generate import complete
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.models.contract import Generates
from unpad.recipes.recipe import Recipe
from unpad.run.report.samples import has_samples, keep_samples
from unpad.terminal.progress import progress
from unpad.terminal.table import number_of

MAX_QUESTIONS = 400
MOST_TOKENS = 1 << 20  # of a part that n-grams read: some seconds
OPENING_TOKENS = 12
SHORTEST = 2 * OPENING_TOKENS  # text that is long enough to be cut
NUM_SAMPLES, MAX_TOKENS = 4, 60


@dataclass(frozen=True)
class JudgedReply:
    """A question of the data, the model's reply, and whether the reply holds every keyword."""

    question: str
    reply: str
    right: bool


def answer(run: LoadedRun, tokens: TokenSet, seq_ids: np.ndarray) -> list[JudgedReply]:
    """Answer the first question of each conversation greedily and look for its keywords."""
    prompts = [question(tokens, int(i)) for i in seq_ids]
    settings = run.recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1})
    with progress(f"answering {number_of(len(prompts), 'questions')}"):
        completions = complete(run.generator, run.tokenizer, prompts, settings)
    replies = []
    for i, prompt, completion in zip(seq_ids, prompts, completions, strict=True):
        right = all(word in completion.text for word in tokens.keywords(int(i)))
        replies.append(JudgedReply(run.tokenizer.decode(prompt), completion.text, right))
    return replies


def with_keywords(tokens: TokenSet, seq_ids: np.ndarray, seed: int, most: int = MAX_QUESTIONS) -> np.ndarray:
    """Those of some sequences that are original conversations and name keywords, at most `most`, drawn by seed."""
    ids = seq_ids[(tokens.kind[seq_ids] == 1) & (tokens.copy[seq_ids] == 0)]
    ids = np.array([i for i in ids if tokens.keywords(int(i))], np.int64)
    return ids if len(ids) <= most else np.sort(np.random.default_rng(seed).permutation(ids)[:most])


def question(tokens: TokenSet, index: int) -> list[int]:
    """The tokens before the first one that carries loss: the conversation up to its first reply."""
    ids, loss = tokens.tokens(index), tokens.loss_mask(index)
    return ids[: int(np.argmax(loss))].tolist()


def opening(tokens: TokenSet, index: int) -> list[int]:
    """The first tokens of a text."""
    return tokens.tokens(index)[: OPENING_TOKENS + 1].tolist()


def held_out_prompts(data: TextData, most: int) -> list[Prompt]:
    """Conversations up to their first reply, and first halves of texts."""
    tokens = data.tokens
    rows = evenly(np.flatnonzero(tokens.split == Split.HOLDOUT), tokens.lengths, most)
    return [
        question(tokens, i) if tokens.kind[i] == 1 else tokens.tokens(i)[: max(int(tokens.lengths[i]) // 2, 1)].tolist()
        for i in rows
    ]


def sample_replies(model: Generates, data: TextData, recipe: Recipe, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """Prompts of held-out data, drawn by the run's seed, each with the model's likeliest continuation.

    Args:
        kinds: parts of the data to draw from, the later first.
    """
    tokens, tokenizer = data.tokens, load_tokenizer(data.files[TOKENIZER])
    draw, prompts = np.random.default_rng(recipe.train.seed), list[list[int]]()
    for kind in reversed(kinds):
        chosen = (tokens.split == Split.HOLDOUT) & (tokens.kind == data.kinds.index(kind)) & (tokens.copy == 0)
        ids = np.flatnonzero(chosen & ((kind != "text") | (tokens.lengths >= SHORTEST)))
        for index in draw.permutation(ids)[: NUM_SAMPLES - len(prompts)].tolist():
            prompts.append(question(tokens, index) if kind != "text" else opening(tokens, index))
    room = model.config.longest // 2  # for the prompt, and for the reply
    prompts = [prompt for prompt in prompts if 0 < len(prompt) <= room]
    if not prompts:
        return []
    limit = min(recipe.generate.max_new_tokens, MAX_TOKENS, room)
    settings = recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1, "max_new_tokens": limit})
    was_training = model.training
    model.eval()
    replies = complete(model, tokenizer, prompts, settings, generation_precision(settings, model.device))
    model.train(was_training)
    return [(tokenizer.decode(prompt), reply.text) for prompt, reply in zip(prompts, replies, strict=True)]


@dataclass(frozen=True)
class DocumentSums:
    """Per document: nats, targets, and the characters and UTF-8 bytes the targets spell; each (num_docs,).

    Args:
        lost: characters of the documents that became unknown tokens, and are not in `chars`.
    """

    nll: np.ndarray
    targets: np.ndarray
    chars: np.ndarray
    num_bytes: np.ndarray
    lost: LostCharacters = field(default_factory=LostCharacters)

    def columns(self) -> Columns:
        """Columns of the documents' rows."""
        counts = {"num_targets": self.targets, "num_chars": self.chars, "num_bytes": self.num_bytes}
        return {"loss": self.nll, **counts}

    def mean_nll(self) -> float:
        return float(self.nll.sum() / max(int(self.targets.sum()), 1))


def held_out(over: Measuring[TextData]) -> HeldOut:
    """Loss per target and bits per character, which are refused where the tokenizer loses characters; of pairs as in
    `preferences.py`."""
    if over.data.replies is not None and (over.data.replies.pair[over.seq_ids] >= 0).any():
        return preferences.held_out(over)
    sums = document_nll(over)
    loss, num_targets = sums.mean_nll(), int(sums.targets.sum())
    if why := sums.lost.why_no_bits():
        return HeldOut(loss, {"loss": loss}, num_targets, {"bits_per_char": why})
    bits = float(sums.nll.sum()) / math.log(2) / max(int(sums.chars.sum()), 1)
    return HeldOut(loss, {"loss": loss, "bits_per_char": bits}, num_targets)


def evaluate(run: LoadedRun, over: Measuring[TextData], num_shown: int) -> Evaluation:
    """`loss`, `perplexity`, `bits_per_char` and `bits_per_byte`; `text_` or `chat_` before them when there are both. Of
    pairs `loss`, `accuracy` and `margin`, `pairs_` before them when there are others.

    `keywords_heldout` is the share of questions with every required word in the reply, `keywords_trained` the same
    share of the run's training questions.

    Args:
        over: the documents to measure on.
        num_shown: number of trained and of held-out questions to show, picked by the run's seed.
    """
    data, seq_ids, metrics, measured_kinds = over.data, over.seq_ids, dict[str, Metric](), list[_Kind]()
    lines = data.report.lost.lines() if data.report.lost.lost else []
    kinds = [kind for number, kind in enumerate(data.kinds) if (data.table.kind[seq_ids] == number).any()]
    is_own = data.fingerprint() == run.fingerprint
    if is_own and (data.table.split[seq_ids] == Split.HOLDOUT).all():
        lines += data.report.group_lines()
    for kind in kinds:
        ids = seq_ids[data.table.kind[seq_ids] == data.kinds.index(kind)]
        prefix = f"{kind}_" if len(kinds) > 1 else ""
        if kind == PAIRS:
            preferences.put_reference(run, data, ids, is_own=is_own)
            pairs = preferences.margins(replace(over, seq_ids=ids))
            numbers = pairs.columns() | {example_rows.GROUP: pairs.group}
            measured = {name: one.metric(numbers) for name, one in OF_PAIRS.items()}
            measured_kinds.append((kind, prefix, pairs.chosen, numbers))
        else:
            sums = document_nll(replace(over, seq_ids=ids))
            measured = summarise(sums, groups=data.table.group[ids])
            measured_kinds.append((kind, prefix, ids, sums.columns()))
        metrics |= {prefix + key: metric for key, metric in measured.items()}
    trained = np.flatnonzero(data.table.split == Split.TRAIN) if is_own else np.zeros(0, np.int64)
    others = np.setdiff1d(seq_ids, trained)
    if data.replies is not None:
        trained, others = (ids[data.replies.pair[ids] < 0] for ids in (trained, others))
    asked = list[_Asked]()
    for candidates, label, part in ((trained, "trained", PARTS[Split.TRAIN]), (others, "heldout", None)):
        ids = with_keywords(data.tokens, candidates, run.recipe.train.seed)
        if ids.size:
            replies = answer(run, data.tokens, ids)
            share = mean_of(np.array([reply.right for reply in replies]), data.table.group[ids], share=True)
            metrics[f"keywords_{label}"] = replace(share, part=part)
            asked.append((label, ids, replies))
            for pick in np.random.default_rng(run.recipe.train.seed).permutation(len(replies))[:num_shown]:
                chosen = replies[pick]
                lines += [f"{label + ' question':<18}{chosen.question}", f"{'reply':<18}{chosen.reply}"]
    return Evaluation(metrics, lines, rows=_rows(data, measured_kinds, asked, metrics))


def simple(training: TextData, over: Measuring[TextData], rows: ExampleRows) -> list[Guesses]:
    """Bits of n-grams of characters, and of pairs the longer or the shorter reply."""
    data, start, guesses = over.data, 0, list[Guesses]()
    for number in np.unique(data.table.kind[over.seq_ids]).tolist():  # in the order of the rows
        ids, is_pairs = over.seq_ids[data.table.kind[over.seq_ids] == number], data.kinds[number] == PAIRS
        ids = preferences.chosen_of(over.model, data, ids) if is_pairs else ids
        name, column = ("accuracy", "right") if is_pairs else ("bits_per_char", "loss")
        name = f"{data.kinds[number]}_{name}" if f"{data.kinds[number]}_loss" in rows.measures else name
        if name in rows.measures:
            answer = preferences.by_length if is_pairs else _ngram_nats
            method, values = answer(training, over, ids)
            every = np.full(len(rows), np.nan)
            every[start : start + len(ids)] = values
            guesses.append(Guesses(name, method, {column: every}))
        start += len(ids)
    return guesses


def _ngram_nats(training: TextData, over: Measuring[TextData], seq_ids: np.ndarray) -> tuple[str, np.ndarray]:
    """Nats of documents by n-grams of the order that suits the valid part, (num,), nan beyond a sample; the method."""
    tokens, chosen, spelled = training.tokens, list[np.ndarray](), list[np.ndarray]()
    mine = (tokens.kind == over.data.tokens.kind[seq_ids[0]]) & (tokens.copy == 0)
    learnt, valid = (np.flatnonzero(mine & (tokens.split == one)) for one in (Split.TRAIN, Split.HOLDOUT))
    for number, (data, ids) in enumerate(((training, learnt), (training, valid), (over.data, seq_ids))):
        chosen.append(sampled(ids, data.tokens.lengths[ids], MOST_TOKENS))
        for place, i in enumerate(chosen[-1].tolist()):
            symbols, counts = _spelled(data, i, None if number else MOST_TOKENS)
            spelled.append(np.stack([symbols, np.where(counts, number, -1), np.full(len(symbols), place)]))
    symbols, role, place = np.concatenate(spelled, 1)
    bits = ngram_bits(symbols, role == 0, role > 0)
    place, role = place[role > 0], role[role > 0]
    order = min(bits, key=lambda one: float(bits[one][role == 1].sum()))
    nats = np.full(len(seq_ids), np.nan)
    nats[np.isin(seq_ids, chosen[2])] = np.bincount(place[role == 2], bits[order][role == 2], len(chosen[2])) / BITS
    return of_rows(f"n-gram of order {order}", chosen[0], learnt), nats


def _spelled(data: TextData, seq_id: int, most: int | None) -> np.ndarray:
    """Symbols of a sequence as `ngram_bits` takes them, and whether each is learnt, (2, num), of so many tokens."""
    start = int(data.tokens.tokens(seq_id)[0] == data.tokenizer.bos_id)  # START is that
    ids, learnt = (of(seq_id)[start:most] for of in (data.tokens.tokens, data.tokens.loss_mask))
    parts, special = [np.array([[START], [0]])], np.isin(ids, list(data.tokenizer.specials))
    cuts = np.flatnonzero((np.diff(learnt) != 0) | special[1:] | special[:-1]) + 1
    for some, mine, marks in zip(*(np.split(one, cuts) for one in (ids, learnt, special)), strict=True):
        text = b"" if marks.all() else data.tokenizer.decode(some.tolist()).encode("utf-32-le")
        symbols = START + 1 + some if marks.all() else np.frombuffer(text, "<u4").astype(np.int64)
        parts.append(np.stack([symbols, np.full(len(symbols), mine.any())]))
    return np.concatenate(parts, 1)


_Kind = tuple[str, str, np.ndarray, Columns]  # kind, prefix of its metrics, sequences, and columns of these
_Asked = tuple[str, np.ndarray, list[JudgedReply]]  # end of the metric's name, sequences, and their replies
BITS = 1 / math.log(2)  # in a nat
OF_PAIRS = {"loss": Ratio("loss", "num_targets"), "accuracy": Ratio("right", share=True), "margin": Ratio("margin")}
OF_DOCUMENTS = {
    "loss": Ratio("loss", "num_targets"),
    "bits_per_char": Ratio("loss", "num_chars", scale=BITS),
    "bits_per_byte": Ratio("loss", "num_bytes", scale=BITS),
}


def _rows(data: TextData, kinds: list[_Kind], asked: list[_Asked], metrics: dict[str, Metric]) -> ExampleRows:
    """The rows that were measured, and the training questions that were asked; of pairs a row each.

    `kind`; `loss` in nats, `num_targets`, and of documents `num_chars` and `num_bytes`, of pairs `margin` and `right`;
    of questions with keywords `reply`, and `keywords_heldout` or `keywords_trained`, 1 if it has all of them.
    """
    used = np.concatenate([ids for _, _, ids, _ in kinds])
    tables = [_named(data, ids) | values for _, _, ids, values in kinds]
    for _, ids, _ in asked:
        others = np.setdiff1d(ids, used)  # of the training part, beside another that was measured
        tables.append(_named(data, others) | {PART: objects([PARTS[Split.TRAIN]] * len(others))})
        used = np.concatenate([used, others])
    columns = example_rows.joined(tables)
    place = {seq_id: row for row, seq_id in enumerate(used.tolist())}
    if asked:
        columns["reply"] = objects([None] * len(used))
    for label, ids, replies in asked:
        mine = [place[seq_id] for seq_id in ids.tolist()]
        columns["reply"][mine] = [reply.reply for reply in replies]
        columns[f"keywords_{label}"] = np.full(len(used), np.nan)
        columns[f"keywords_{label}"][mine] = [reply.right for reply in replies]
    measures: Measures = {}
    for kind, prefix, _, _ in kinds:
        for name, one in (OF_PAIRS if kind == PAIRS else OF_DOCUMENTS).items():
            if not math.isnan(metrics[prefix + name].value):
                measures[prefix + name] = one._replace(kind=kind if prefix else None)
    return ExampleRows(
        columns, measures | {f"keywords_{label}": Ratio(f"keywords_{label}", share=True) for label, _, _ in asked}
    )


def _named(data: TextData, seq_ids: np.ndarray) -> Columns:
    """First columns of the rows of sequences; a pair has the place of its document."""
    documents = seq_ids if data.replies is None else data.replies.document[seq_ids]
    places = objects([data.tokens.where(document) for document in documents.tolist()])
    kinds = objects([data.kinds[number] for number in data.table.kind[seq_ids].tolist()])
    return named(data, seq_ids, WHERE, places) | {KIND: kinds}


def check_new(data: TextData, path: Path) -> NewFacts:
    """Refuse new text if the run's tokenizer loses nearly all of it; `data.lines()` counts the lost characters.

    Raises:
        SourceError: as `LostCharacters.refuse`.
    """
    data.report.lost.refuse(str(path), FIX_OF_RUN)
    return [], {}


def keepsakes(ended: TrainedModel[TextData]) -> None:
    """Keep replies to held-out prompts."""
    if isinstance(ended.model, Generates) and ended.wants(has_samples):
        keep_samples(ended.folder, ended.step, sample_replies(ended.model, ended.data, ended.recipe, ended.kinds))


def heldout_openings(run: LoadedRun, num: int) -> list[str]:
    """The first tokens of held-out texts, picked by the run's seed, to see how a model continues unseen text.

    Raises:
        SourceError: no held-out text is long enough to be cut.
    """
    data = run.data()
    if not isinstance(data, TextData):
        raise SourceError("the run holds no texts out", where=str(run.folder), fix="see `unpad eval`")
    tokens = data.tokens
    ids = np.flatnonzero((tokens.split == Split.HOLDOUT) & (tokens.kind == 0) & (tokens.lengths >= SHORTEST))
    if ids.size == 0:
        fix = "give openings yourself with --prompt"
        raise SourceError(f"no held-out text has {SHORTEST} tokens", where="data.holdout", fix=fix)
    chosen = np.random.default_rng(run.recipe.train.seed).permutation(ids)[:num]
    return [run.tokenizer.decode(opening(tokens, int(i))) for i in chosen]


def document_nll(over: Measuring[TextData]) -> DocumentSums:
    """Sum the negative log-likelihood of every document, in the model's own precision (fp32 unless it was converted).

    A document longer than the context is cut into windows; `settings.stride` decides how much context a window's first
    targets see. No target is left out and none counts twice.
    """
    nll, targets = token_sums(replace(over, overflow="split"))
    tokens, seq_ids = over.data.tokens, over.seq_ids
    chars, lost = tokens.target_chars[seq_ids], tokens.lost_target_chars[seq_ids]
    num_bytes = tokens.target_bytes[seq_ids] - tokens.lost_target_bytes[seq_ids]
    count = LostCharacters(int(lost.sum(dtype=np.int64)), int(chars.sum(dtype=np.int64)))
    return DocumentSums(nll, targets, chars - lost, num_bytes, count)


def summarise(sums: DocumentSums, groups: np.ndarray | None = None) -> dict[str, Metric]:
    """Loss (nats per target), perplexity, bits per byte and bits per character.

    Where the tokenizer lost characters, there are no bits: an unknown token is easy to predict.

    Args:
        groups: (num_docs,) as in `metrics.bootstrap`.
    """
    columns = sums.columns() | {example_rows.GROUP: np.arange(len(sums.nll)) if groups is None else groups}
    metrics = dict[str, Metric]()
    for name, one in OF_DOCUMENTS.items():
        why = "" if name == "loss" else sums.lost.why_no_bits()
        metrics[name] = refused(len(sums.nll), why) if why else one.metric(columns)
    return metrics | {"perplexity": perplexity(metrics["loss"])}
