"""Evaluation of answers about images: their accuracy, and the loss of the right ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from unpad.data.measuring import Measuring
from unpad.data.tokens.lost import FIX_OF_RUN
from unpad.data.vqa import VqaData
from unpad.evaluation import vqa_kept
from unpad.evaluation.metrics import Evaluation, HeldOut, Metric, NewFacts, interval, mean_of, resample
from unpad.evaluation.per_sequence import token_sums
from unpad.evaluation.vqa_accuracy import vqa_accuracy
from unpad.evaluation.vqa_kept import kept_metrics, mode_metrics
from unpad.inference.answers import answer, answer_counted, answer_shown
from unpad.inference.loaded import LoadedRun
from unpad.models.vision_language.model import VisionLanguage
from unpad.run.report.kept_patches import Kept
from unpad.run.report.vqa import to_json

MAX_QUESTIONS = 12  # different questions with an accuracy of their own
NUM_PICTURES = 3  # held-out images with their kept patches on the run's page
HIGHER_IS_BETTER: dict[str, bool | None] = {
    "loss": False,
    "perplexity": False,
    "accuracy": True,
    "accuracy: *": True,
    "caption_accuracy": True,
    **vqa_kept.HIGHER_IS_BETTER,
}


def held_out(over: Measuring[VqaData]) -> HeldOut:
    """Loss per target."""
    nll, targets = token_sums(over)
    loss = float(nll.sum() / max(int(targets.sum()), 1))
    return HeldOut(loss, {"loss": loss}, int(targets.sum()))


def evaluate(run: LoadedRun, over: Measuring[VqaData], num_shown: int) -> Evaluation:
    """`loss`, `perplexity`, `accuracy` of the answers generated greedily, and of every question that occurs often.

    Intervals are bootstraps over pictures, with all rows about one and those of its group. Captions count in the loss;
    `caption_accuracy` is their accuracy. All of these are in the model's own mode. A model with other modes also has
    `accuracy_MODE` of the questions in each, and the numbers of visual tokens of `kept_metrics`; the page draws both.

    Args:
        over: the rows to measure on.
        num_shown: number of questions to show with the model's answer.
    """
    ids, data = over.seq_ids, over.data
    groups = data.table.group[ids]
    nll, targets = token_sums(over)
    answers, given, kept = answer_counted(run, data, ids)
    right = _judge(data, ids, answers)
    sums = resample([nll, targets], 0, groups)
    samples = sums[0] / np.maximum(sums[1], 1)
    loss = interval(nll.sum() / max(targets.sum(), 1), samples, len(ids), len(np.unique(groups)))
    perplexity = replace(loss, value=math.exp(loss.value), low=math.exp(loss.low), high=math.exp(loss.high))
    metrics = {"loss": loss, "perplexity": perplexity}
    captions = np.array([data.examples[i].caption for i in ids])
    for name, chosen in (("accuracy", ~captions), ("caption_accuracy", captions)):
        if chosen.any():
            metrics[name] = mean_of(right[chosen], groups[chosen], share=True)
    questions = np.array([data.examples[i].question for i in ids])
    names, counts = np.unique(questions[~captions], return_counts=True)
    for question in names[np.argsort(-counts, kind="stable")][:MAX_QUESTIONS]:
        mine = questions == question
        metrics[f"accuracy: {question}"] = mean_of(right[mine], groups[mine], share=True)
    order = np.random.default_rng(run.recipe.train.seed).permutation(len(ids))
    drawn = None
    if len(run.model.modes) > 1:
        metrics |= _mode_metrics(run, data, ids, right, ~captions)
        metrics |= kept_metrics(data.num_patches[ids], given, kept, groups)
        about_one = [int(i) for i in ids[order] if not data.examples[i].caption and len(data.examples[i].images) == 1]
        drawn = to_json(metrics, _pictures(run, data, about_one[:NUM_PICTURES]))
    lines = data.rows.lost.lines() if data.rows.lost.lost else []
    lines += [
        f"{data.where(int(ids[i]))}: {questions[i]} -> {answers[i]} ({data.examples[ids[i]].answer})"
        for i in order[:num_shown]
    ]
    return Evaluation(metrics, lines, drawn)


def check_new(data: VqaData, path: Path) -> NewFacts:
    """Refuse new questions of which next to nothing survives the run's tokenizer; lines on images whose mode or size
    training had not. `data.lines()` counts what is lost.

    Raises:
        SourceError: as `LostCharacters.refuse`.
    """
    data.rows.lost.refuse(str(path), FIX_OF_RUN)
    return data.album.unlike_training()


def _pictures(run: LoadedRun, data: VqaData, rows: list[int]) -> list[tuple[Kept, str]]:
    """Kept patches of these rows, with the right answers; none if a token does not represent one patch."""
    model = run.model
    if not isinstance(model, VisionLanguage) or model.config.merge is not None or model.config.prune is None:
        return []
    shown = answer_shown(run, data, np.array(rows, np.int64))
    return [(one, data.examples[row].answer) for one, row in zip(shown, rows, strict=True)]


def _judge(data: VqaData, seq_ids: np.ndarray, answers: list[str]) -> np.ndarray:
    """Score of every answer, (num_rows,)."""
    pairs = zip(answers, seq_ids, strict=True)
    return np.array([vqa_accuracy(given, data.examples[seq].answers) for given, seq in pairs], np.float64)


def _mode_metrics(
    run: LoadedRun, data: VqaData, seq_ids: np.ndarray, right: np.ndarray, chosen: np.ndarray
) -> dict[str, Metric]:
    """`mode_metrics` of the chosen rows, (num_rows,) bool; `right` are all scores in the model's own mode."""
    if not chosen.any():
        return {}
    model, scores = run.model, {}
    own = model.mode
    for mode in model.modes:
        model.mode = mode
        scores[mode] = (
            right[chosen] if mode == own else _judge(data, seq_ids[chosen], answer(run, data, seq_ids[chosen]))
        )
    model.mode = None
    return mode_metrics(scores, data.table.group[seq_ids[chosen]])
