"""Evaluation of answers about images: their accuracy, the loss of the right ones, and the visual tokens kept."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.data.tokens.lost import FIX_OF_RUN, LostCharacters
from unpad.data.vqa import VqaData
from unpad.evaluation.family import Prompt, evenly, token_sums
from unpad.evaluation.metrics import HeldOut, Metric, NewFacts, extremes, mean_of, perplexity, ratio_of, refused
from unpad.evaluation.rows import KIND, Columns, Evaluation, ExampleRows, Measures, Ratio, objects, placed
from unpad.evaluation.simple import Guesses
from unpad.inference.images import answer, answer_counted
from unpad.inference.loaded import LoadedRun

COUNTED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS = {"none": "0", **{word: str(number) for number, word in enumerate(COUNTED)}}
ARTICLES = ("a", "an", "the")
# Kept are signs before a number, as in -5 and <5, and after a word, as in O- and C++.
PUNCTUATION = re.compile(
    r"((?<!\w)(?:-|[<>]=?\s?)(?=\.?\d)|(?<=\w)[+-]+(?![\w+-]))|[;/\[\]\"{}()=+\\_\-><@`,?!。，、？！；：“”（）《》]"
)
NUMBER_COMMA = re.compile(r"(?<=\d),(?=\d)")
PERIOD = re.compile(r"\.(?!\d)")
# Contractions written without their apostrophe mean the same.
CONTRACTIONS = {
    word.replace("'", ""): word
    for word in (
        "ain't", "aren't", "can't", "couldn't", "didn't", "doesn't", "don't", "hadn't", "hasn't", "haven't", "he's",
        "isn't", "it's", "she's", "shouldn't", "that's", "there's", "they're", "wasn't", "weren't", "what's",
        "won't", "wouldn't", "you're",
    )
}  # fmt: skip
NEEDED = 3  # people who must agree for a full point


def normalise(answer: str) -> str:
    """An answer in lower case, without punctuation and articles if it has more, number words as digits."""
    given = answer.replace("\n", " ").replace("\t", " ").strip().lower()
    text = PUNCTUATION.sub(lambda mark: mark[1].strip() if mark[1] else " ", NUMBER_COMMA.sub("", given))
    words = [CONTRACTIONS.get(word, NUMBERS.get(word, word)) for word in PERIOD.sub("", text).split()]
    return " ".join([word for word in words if word not in ARTICLES] or words) or given


def vqa_accuracy(given: str, answers: Sequence[str]) -> float:
    """Score of one given answer, from 0 to 1; an empty one is never right.

    Args:
        answers: of people, usually ten; a single answer must be matched.
    """
    wanted, mine = [normalise(answer) for answer in answers], normalise(given)
    if not mine:
        return 0.0
    if len(wanted) == 1:
        return float(mine == wanted[0])
    matches = sum(answer == mine for answer in wanted)
    needed = min(NEEDED, len(wanted) - 1)  # of fewer people all the others must agree
    scores = [min(1.0, (matches - (answer == mine)) / needed) for answer in wanted]
    return sum(scores) / len(scores)


MAX_QUESTIONS = 12  # different questions with an accuracy of their own


QUESTION, CAPTION = "question", "caption"  # kinds of rows
ACCURACIES = {"accuracy": QUESTION, "caption_accuracy": CAPTION}


def held_out(over: Measuring[VqaData]) -> HeldOut:
    """Loss per target; of questions and captions together also `question_loss` and `caption_loss`."""
    nll, targets = token_sums(over)
    parts = {"loss": np.ones(len(nll), np.bool_)} | _losses(_kinds(over.data, over.seq_ids))
    values = {name: float(nll[mine].sum() / max(int(targets[mine].sum()), 1)) for name, mine in parts.items()}
    return HeldOut(values["loss"], values, int(targets.sum()))


def evaluate(run: LoadedRun, over: Measuring[VqaData], num_shown: int) -> Evaluation:
    """`accuracy` of the answers generated greedily, and the accuracy of every frequent question; of captions
    `caption_accuracy` and the metrics of `CaptionScores`. `loss` and `perplexity` are of both, and where there are
    both, `question_loss` and `caption_loss` of one kind each.

    Intervals are bootstraps over pictures, with all rows about one and those of its group. All of these are in the
    model's own mode. A model with other modes also has `accuracy_MODE` of the questions in each, and the numbers of
    visual tokens of `kept_metrics`.

    Args:
        over: the rows to measure on.
        num_shown: number of questions to show with the model's answer.
    """
    ids, data = over.seq_ids, over.data
    groups, kinds = data.table.group[ids], _kinds(data, ids)
    asked, told = kinds[QUESTION], kinds[CAPTION]
    nll, targets = token_sums(over)
    answers, num_given, num_kept = answer_counted(run, data, ids)
    right = _judge(data, ids, answers)
    of_captions = score_captions(replace(over, seq_ids=ids[told]), nll[told]) if told.any() else None
    loss = ratio_of(nll, targets, groups)
    metrics = dict[str, Metric]()
    for name, kind in ACCURACIES.items():
        if kinds[kind].any():
            metrics[name] = mean_of(right[kinds[kind]], groups[kinds[kind]], share=True)
    metrics |= of_captions.metrics() if of_captions else {}
    metrics["loss"] = loss
    metrics |= {name: ratio_of(nll[mine], targets[mine], groups[mine]) for name, mine in _losses(kinds).items()}
    metrics["perplexity"] = perplexity(loss)
    questions = np.array([data.examples[i].question for i in ids])
    names, counts = np.unique(questions[asked], return_counts=True)
    for question in names[np.argsort(-counts, kind="stable")][:MAX_QUESTIONS]:
        mine = asked & (questions == question)  # which may be that of captions
        metrics[f"accuracy: {question}"] = mean_of(right[mine], groups[mine], share=True)
    order = np.random.default_rng(run.recipe.train.seed).permutation(len(ids))
    by_mode = dict[str, np.ndarray]()
    if len(run.model.modes) > 1:
        if asked.any():
            by_mode = _scores_by_mode(run, data, ids, right, asked)
            metrics |= mode_metrics(by_mode, groups[asked])
        metrics |= kept_metrics(data.num_patches[ids], num_given, num_kept, groups)
    lines = data.rows.lost.lines() if data.rows.lost.lost else []
    lines += [
        f"{data.where(int(ids[i]))}: {questions[i]} -> {answers[i]} ({data.examples[ids[i]].answer})"
        for i in order[:num_shown]
    ]
    columns = _columns(data, ids, told) | {"prediction": objects(answers), "right": right}
    columns |= {"loss": nll, "num_targets": targets.astype(np.int64)}
    partial = [(told, {} if of_captions is None else of_captions.columns())]
    partial.append((asked, {f"right_{mode}": scores for mode, scores in by_mode.items()}))
    for mine, values in partial:
        for name, column in values.items():
            columns[name] = np.full(len(ids), np.nan)
            columns[name][mine] = column
    if len(run.model.modes) > 1:
        columns |= {"num_patches": data.num_patches[ids], "num_given": num_given}
        columns |= {f"num_kept_block_{block}": column for block, column in enumerate(num_kept.T)}
    measures: Measures = {"loss": Ratio("loss", "num_targets")}
    measures |= {name: Ratio("right", None, kind, share=True) for name, kind in ACCURACIES.items() if name in metrics}
    measures |= {name: Ratio("loss", "num_targets", name.removesuffix("_loss")) for name in _losses(kinds)}
    measures |= {} if of_captions is None else of_captions.measures(CAPTION)
    measures |= {f"accuracy_{mode}": Ratio(f"right_{mode}", share=True) for mode in by_mode}
    return Evaluation(metrics, lines, rows=ExampleRows(columns, measures))


def simple(training: VqaData, over: Measuring[VqaData], rows: ExampleRows) -> list[Guesses]:
    """The commonest answer of training to the same question, or else to all questions."""
    if "accuracy" not in rows.measures:
        return []
    answers = defaultdict[str, Counter[str]](Counter)
    for one in (training.examples[i] for i in np.flatnonzero(training.table.split == Split.TRAIN)):
        for question in () if one.caption else ("", normalise(one.question)):
            answers[question][one.answer] += 1
    questions = [normalise(over.data.examples[i].question) for i in over.seq_ids]
    guesses = [answers[one if one in answers else ""].most_common(1)[0][0] for one in questions]
    right = np.where(_kinds(over.data, over.seq_ids)[QUESTION], _judge(over.data, over.seq_ids, guesses), np.nan)
    return [Guesses("accuracy", "the commonest answer to the same question", {"right": right})]


def _kinds(data: VqaData, seq_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of each kind, (num_rows,) bool."""
    told = np.array([data.examples[i].caption for i in seq_ids.tolist()], np.bool_)
    return {QUESTION: ~told, CAPTION: told}


def _losses(kinds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of the losses of one kind, (num_rows,) bool by name; there are none where all rows are of one kind."""
    return {f"{kind}_loss": mine for kind, mine in kinds.items() if 0 < mine.sum() < len(mine)}


def _columns(data: VqaData, seq_ids: np.ndarray, told: np.ndarray) -> Columns:
    """Columns of rows before they are answered: `kind`, `question`, and as `label` the commonest answer."""
    return placed(data, seq_ids) | {
        KIND: objects([CAPTION if one else QUESTION for one in told]),
        "question": objects([data.examples[i].question for i in seq_ids]),
        "label": objects([data.examples[i].answer for i in seq_ids]),
    }


def held_out_prompts(data: VqaData, most: int) -> list[Prompt]:
    """Questions with their images."""
    rows = evenly(np.flatnonzero(data.table.split == Split.HOLDOUT), data.num_patches, most)
    return [data.prompts([row]) for row in rows]


def check_new(data: VqaData, path: Path) -> NewFacts:
    """Refuse new questions if the run's tokenizer loses nearly all of their text; otherwise return lines on images of a
    mode or size that training did not have. `data.lines()` counts the lost characters.

    Raises:
        SourceError: as `LostCharacters.refuse`.
    """
    data.rows.lost.refuse(str(path), FIX_OF_RUN)
    return data.album.unlike_training()


def _judge(data: VqaData, seq_ids: np.ndarray, answers: list[str]) -> np.ndarray:
    """Score of every answer, (num_rows,)."""
    pairs = zip(answers, seq_ids, strict=True)
    return np.array([vqa_accuracy(reply, data.examples[seq].answers) for reply, seq in pairs], np.float64)


def _scores_by_mode(
    run: LoadedRun, data: VqaData, seq_ids: np.ndarray, right: np.ndarray, chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """Scores of the chosen rows, (num_rows,) bool, in every mode of answers; `right` are all in the model's own."""
    model, scores = run.model, {}
    current = model.mode
    for mode in model.modes:
        if mode == "relevance":  # for heads to learn by
            continue
        model.mode = mode
        ids = seq_ids[chosen]
        scores[mode] = right[chosen] if mode == current else _judge(data, ids, answer(run, data, ids))
    model.mode = None
    return scores


# --------------------------------------------------------------------------- fewer visual tokens


def mode_metrics(right: dict[str, np.ndarray], groups: np.ndarray | None = None) -> dict[str, Metric]:
    """`accuracy_MODE` of every mode, and `soft_to_hard_gap`, the accuracy of hard removal less that of soft.

    Args:
        right: for every mode the scores of the same rows, (num_rows,).
        groups: (num_rows,) as in `metrics.resample`.
    """
    metrics = {f"accuracy_{mode}": mean_of(scores, groups, share=True) for mode, scores in right.items()}
    if "soft" in right and "hard" in right:  # of the same rows: the interval is that of the difference
        gap = right["hard"] - right["soft"]
        metrics["soft_to_hard_gap"] = mean_of(gap, groups)
        if not gap.any():  # no resample differs; the mean is at most the share of rows with different answers
            reach = mean_of(gap, groups, share=True)
            metrics["soft_to_hard_gap"] = replace(reach, low=-reach.high)
    return metrics


def kept_metrics(
    patches: np.ndarray, num_given: np.ndarray, num_kept: np.ndarray, groups: np.ndarray | None = None
) -> dict[str, Metric]:
    """Numbers of visual tokens of rows, over the rows with images.

    `visual_tokens` counts the patches of their images, `kept_block_N` the tokens that enter block N, `kept_average` is
    the mean over the blocks, and `kept_final` counts the tokens that enter the last: each the mean, the least and the
    most of a row.
    `keep_ratio_merge` is the number after merging over patches; `keep_ratio_average` and `keep_ratio_final` are the
    average and the final number over the number after merging; these are ratios of totals, with 95 % confidence
    intervals.

    Args:
        patches: (num_rows,) int64.
        num_given: (num_rows,) int64, visual tokens before any was removed; fewer than patches where they were merged.
        num_kept: (num_rows, blocks) int64, visual tokens that entered each block.
        groups: (num_rows,) as in `metrics.resample`.
    """
    seen = patches > 0
    groups = np.arange(len(patches)) if groups is None else groups
    patches, num_given, num_kept, groups = patches[seen], num_given[seen], num_kept[seen], groups[seen]
    if not len(patches) or not num_kept.shape[1]:
        return {}
    final, average = num_kept[:, -1], num_kept.mean(1)
    counts = {"visual_tokens": patches}
    counts |= {f"kept_block_{block}": column for block, column in enumerate(num_kept.T)}
    counts |= {"kept_average": average, "kept_final": final}
    metrics = {name: extremes(values) for name, values in counts.items()}
    ratios = {"merge": (num_given, patches), "average": (average, num_given), "final": (final, num_given)}
    return metrics | {f"keep_ratio_{name}": ratio_of(part, whole, groups) for name, (part, whole) in ratios.items()}


# --------------------------------------------------------------------------- captions


NUM_CHOICES = 20
SEED = 0  # of the draw of candidates, the same in every run: runs with equal held-out captions have equal candidates
BITS, CHOICE, CHANCE = "caption_bits_per_char", "caption_choice_of_20", "caption_choice_chance"
BITS_IN_NAT = 1 / math.log(2)


@dataclass(frozen=True)
class CaptionScores:
    """Scores of captions, arrays (num_captions,).

    Args:
        nll: nats of the text and its end.
        chars: characters of the text that the tokenizer did not lose.
        choice: score of the choice among candidates, see `choose_captions`; nan without candidates.
        group: as in `resample`.
        lost: characters of the texts that became unknown tokens, and are not in `chars`.
    """

    nll: np.ndarray
    chars: np.ndarray
    choice: np.ndarray
    group: np.ndarray
    lost: LostCharacters

    def metrics(self) -> dict[str, Metric]:
        """`caption_choice_of_20` of the captions that have candidates, beside the chance of a guess, and
        `caption_bits_per_char`; refused where no caption has candidates, or where the tokenizer loses characters."""
        chosen, num = np.isfinite(self.choice), len(self.nll)
        metrics: dict[str, Metric] = {}
        if chosen.any():
            metrics[CHOICE] = mean_of(self.choice[chosen], self.group[chosen], share=True)
            guess = replace(metrics[CHOICE], value=1 / NUM_CHOICES, low=math.nan, high=math.nan)
            metrics[CHANCE] = replace(guess, note=f"a guess among {NUM_CHOICES}")
        else:
            metrics[CHOICE] = refused(num, f"fewer than {NUM_CHOICES} different captions of unlike pictures")
        if why := self.lost.why_no_bits():
            metrics[BITS] = refused(num, why)
        else:
            metrics[BITS] = ratio_of(self.nll, self.chars, self.group, scale=BITS_IN_NAT)
        return metrics

    def columns(self) -> Columns:
        """Columns of the captions' rows."""
        return {"num_chars": self.chars.astype(np.float64), CHOICE: self.choice}

    def measures(self, kind: str) -> Measures:
        """Metrics that can be compared row by row, of rows of this kind."""
        measures: Measures = {CHOICE: Ratio(CHOICE, None, kind, share=True)}
        return measures if self.lost.why_no_bits() else measures | {BITS: Ratio("loss", "num_chars", kind, BITS_IN_NAT)}


def score_captions(over: Measuring[VqaData], nll: np.ndarray) -> CaptionScores:
    """Score captions.

    Args:
        over: captions alone.
        nll: (num_seqs,) nats of each.
    """
    data, ids = over.data, over.seq_ids
    chars, lost = np.array([len(data.examples[i].answer) for i in ids]), data.rows.lost_targets[ids]
    count = LostCharacters(int(lost.sum()), int(chars.sum()))
    return CaptionScores(nll, chars - lost, choose_captions(over), data.table.group[ids], count)


# --------------------------------------------------------------------------- the choice among candidates


@dataclass(frozen=True, eq=False)
class Candidates:
    """Captions to choose from.

    Args:
        shown: (num,) int64, captions with images; each is to be found.
        told: (num, NUM_CHOICES) int64, captions with the texts to choose from; the right one is the first.
    """

    shown: np.ndarray
    told: np.ndarray


def draw_candidates(data: VqaData, seq_ids: np.ndarray, longest: int) -> Candidates:
    """Draw the candidates of captions: to each its own text, and 19 different texts of others, every text as likely as
    any other however often it is told.

    No candidate is a text that its own group tells: another caption of the picture, of a copy or of another size of it
    may be as right. Texts are equal if the tokenizer makes them so. A text that with the images would be longer than
    `longest` is no candidate. Captions without images, and those to which fewer than 19 texts are left, have none.

    Args:
        seq_ids: (num_captions,) int64.
    """
    captions = seq_ids[data.num_patches[seq_ids] > 0]
    numbers = dict[bytes, int]()
    tokens = [data.tokens_of(i).tobytes() for i in captions.tolist()]
    text = np.array([numbers.setdefault(one, len(numbers)) for one in tokens], np.int64)
    _, first = np.unique(text, return_index=True)  # (num_texts,) a caption with each
    positions, group = data.rows.lengths()[captions[first]] - 1, data.table.group[captions]
    rng = np.random.default_rng(SEED)
    shown, told = list[int](), [np.zeros((0, NUM_CHOICES), np.int64)]
    for caption, mine in zip(captions.tolist(), group.tolist(), strict=True):
        texts = rng.permutation(len(first))
        usable = ~np.isin(texts, text[group == mine]) & (positions[texts] + data.num_patches[caption] <= longest)
        others = texts[usable][: NUM_CHOICES - 1]
        if len(others) == NUM_CHOICES - 1:
            shown.append(caption)
            told.append(np.array([[caption, *captions[first[others]]]]))
    return Candidates(np.array(shown, np.int64), np.concatenate(told))


def candidate_losses(over: Measuring[VqaData], candidates: Candidates) -> np.ndarray:
    """Negative log-likelihood of every candidate, in nats per token of its text and end, (num, NUM_CHOICES) float64.

    They are measured as other rows are: packed without padding, in batches of the run's size, each as alone.
    """
    data = over.data.retold(np.repeat(candidates.shown, NUM_CHOICES), candidates.told.flatten())
    settings = over.settings.model_copy(update={"max_tokens": None})  # a limit of training, not of the model
    nll, targets = token_sums(replace(over, data=data, seq_ids=np.arange(len(data.table)), settings=settings))
    return np.reshape(nll / targets, (-1, NUM_CHOICES))


def choice_scores(losses: np.ndarray) -> np.ndarray:
    """1 where the first of several candidates, (num, candidates), is the likeliest, and 0 where it is not; of a tie
    between several likeliest ones, it has its share, so that a model which tells none apart is at chance."""
    likeliest = losses == losses.min(1, keepdims=True)
    return likeliest[:, 0] / np.maximum(likeliest.sum(1), 1)


def choose_captions(over: Measuring[VqaData]) -> np.ndarray:
    """Score of the choice of every caption among its candidates, (num_seqs,); nan for rows without candidates.

    Candidates are compared by likelihood per token, not by that of the whole text: of texts of different lengths the
    shortest would be the likeliest, whatever the picture shows.
    """
    candidates = draw_candidates(over.data, over.seq_ids, over.model.config.longest)
    scores = np.full(len(over.seq_ids), np.nan)
    if len(candidates.shown):
        scores[over.places()[candidates.shown]] = choice_scores(candidate_losses(over, candidates))
    return scores
