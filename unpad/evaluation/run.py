"""`unpad eval`: metrics of a run on a part of its data or on new data, and the part of its page on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.data.check import guess_kind
from unpad.data.family import Data, NearDuplicates, family_of, not_compared, open_data
from unpad.data.measuring import Measuring
from unpad.data.sources.split import PARTS, Split, Wanted
from unpad.errors import DiskError, RecipeError, SourceError, UnpadError
from unpad.evaluation.family import check_new, measures_of, per_sequence
from unpad.evaluation.metrics import Metric, NewFacts, perplexity, ratio_of, too_good
from unpad.evaluation.rows import Evaluation, ExampleRows, write_rows
from unpad.evaluation.simple import Guesses, beside
from unpad.inference.embed import moved
from unpad.inference.loaded import LoadedRun, load
from unpad.models.contract import Classifies, Generates, Model
from unpad.recipes.data import Source
from unpad.recipes.recipe import Recipe
from unpad.run.base import fingerprint, places_of, run_weights
from unpad.run.folder import run_id
from unpad.run.kept import refuse_without_data
from unpad.run.report.history import METRICS, load_metrics
from unpad.run.report.page import EVALUATION, write_report
from unpad.run.report.samples import keep_evaluation
from unpad.storage import write_atomic
from unpad.terminal.table import number_of


def recipe_for(recipe: Recipe, path: Path) -> Recipe:
    """Point a run's recipe at the data of `path`.

    Args:
        path: file, folder or glob in the form of the run's data. Of patients: a folder that holds all tables of the
            recipe under their names, its labels among them, or the one table that the recipe reads.

    Raises:
        RecipeError: there is nothing at `path`, or a table is missing there.
        SourceError: the kind of the data cannot be told.
    """
    kinds = family_of(recipe).KINDS
    if kinds == ("events",):
        return moved(recipe, path, labelled=True)
    if not path.exists() and not any(path.parent.glob(path.name)):
        raise RecipeError("there is no such file", where=str(path), fix="name a file or folder of labelled data")
    used = [kind for kind in kinds if getattr(recipe.data, kind)]
    kind = used[0] if len(used) == 1 else guess_kind(path)
    if kind not in kinds:
        fix = "this run reads " + " and ".join(kinds)
        raise RecipeError(f"the data looks like {kind}", where=str(path), fix=fix)
    sources = getattr(recipe.data, kind) or [Source(path=".")]
    named = [one.model_dump(include={"field", "prompt", "reply", "ignore"}) for one in sources]
    alike = named[0] if all(one == named[0] for one in named) else {}
    source = type(sources[0])(path=str(path.resolve()), **alike)
    nothing: dict[str, list[Source]] = {each: [] for each in kinds}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=nothing | {kind: [source]})})


SPLITS = {name: split for split, name in PARTS.items()}


def evaluate_run(
    run: str, num_shown: int = 0, part: str | None = None, data: Path | None = None, rows: Path | None = None
) -> tuple[dict[str, Metric], list[str]]:
    """Evaluate a run, in fp32, so that no number depends on batching or hardware format.

    Of the run's own data the evaluation covers the kinds that the last stage trained on; `evaluation/<family>.py` has
    the metrics. Every metric names its part, and those of the part by which the weights were chosen say of how many
    evaluations they are the best; `simple_X` is X of a simple method. Metrics of valid and test are added to
    `evaluations.jsonl`; what the page draws of them is written to `evaluation.json`.

    Args:
        num_shown: number of examples to show with the model's output.
        part: train, valid or test; None is test if the data has a test part, otherwise valid. Of new data only rows
            that declare the part are measured, or all of them with None.
        data: new labelled data, instead of the run's own.
        rows: file for a row per example; see `write_rows`.

    Returns:
        Metrics, and lines: of new data the counts of its rows by what became of them, and the examples.

    Raises:
        SourceError: the part has no rows, the data cannot be used, or the run knows nothing of new data.
        RecipeError: `data` does not have the form of the run's.
        DiskError: a file cannot be written.
    """
    evaluation = evaluate_new(run, num_shown, part, data, rows) if data else evaluate_own(run, num_shown, part, rows)
    return evaluation.metrics, evaluation.lines


def evaluate_own(run: str, num_shown: int = 0, part: str | None = None, rows: Path | None = None) -> Evaluation:
    """Evaluate a part of a run's own data, and keep what was measured in the run; see `evaluate_run`."""
    scored = score(run, num_shown, part, simply=True)
    loaded, part, evaluation = scored.loaded, scored.part, scored.evaluation
    lines = evaluation.lines
    if part != PARTS[Split.TRAIN]:
        if run_id(loaded.folder) == scored.id:
            lines = _keep(loaded, scored.data, evaluation, part, scored.best_of)
        else:
            lines = [*lines, "not kept: the directory holds another run by now, or none"]
    return replace(evaluation, lines=[*loaded.notes, *lines, *_write(rows, scored.data, evaluation, part)])


@dataclass(frozen=True, eq=False)
class ScoredRun:
    """Evaluation of a part of a run's own data.

    Args:
        id: that the directory had when the run was opened.
        best_of: as that of `Metric`.
    """

    loaded: LoadedRun
    id: str
    data: Data
    part: str
    best_of: int | None
    evaluation: Evaluation


def score(run: str, num_shown: int = 0, part: str | None = None, *, simply: bool = False) -> ScoredRun:
    """Evaluate a part of a run's own data, and write nothing; see `evaluate_run`.

    Args:
        simply: whether to put a simple method beside the model, on rows that neither trained on.
    """
    loaded = load(run)
    measured = run_id(loaded.folder)
    refuse_without_data(loaded.recipe, loaded.folder, f"measure it on yours: unpad eval {run} --data FILE")
    # Also for the test part: data that changed may have moved rows there from training.
    own_data = training = _own_data(loaded)
    part = part or (PARTS[Split.TEST] if own_data.table.num_test else PARTS[Split.HOLDOUT])
    if part == PARTS[Split.TEST] and own_data.table.num_test:
        own_data = loaded.test_data()
    elif part == PARTS[Split.TRAIN]:
        own_data = open_data(loaded.recipe.plain(), loaded.files, compare=False)
    used = (loaded.recipe.stages[-1].use if loaded.recipe.stages else None) or own_data.kinds
    of_use = np.isin(own_data.table.kind, [number for number, kind in enumerate(own_data.kinds) if kind in used])
    seq_ids = np.flatnonzero((own_data.table.split == SPLITS[part]) & of_use)
    if not len(seq_ids):
        raise _no_rows(part)
    best_of = _checks(loaded) if part == PARTS[Split.HOLDOUT] else None
    learnt = training if simply and part != PARTS[Split.TRAIN] else None
    over = Measuring(loaded.model, own_data, seq_ids, loaded.recipe.plan)
    evaluation = _measure(loaded, over, num_shown, part, best_of, learnt)
    return ScoredRun(loaded, measured, own_data, part, best_of, evaluation)


def _own_data(loaded: LoadedRun) -> Data:
    try:
        return loaded.data()
    except SourceError as error:
        fix = f"{error.fix}; or measure new data with --data FILE"
        raise SourceError(error.summary, where=error.where, fix=fix, details=error.details) from None


def rows_of(evaluation: Evaluation, data: Data, part: str) -> ExampleRows:
    """The rows that were measured.

    Raises:
        RecipeError: the family gives none.
    """
    if evaluation.rows is None:
        fix = f"give the Evaluation of unpad/evaluation/{data.family}.py its rows"
        raise RecipeError(f"the family {data.family} has no rows of an evaluation", where="--rows", fix=fix)
    return evaluation.rows.of_part(part)


def _write(out: Path | None, data: Data, evaluation: Evaluation, part: str) -> list[str]:
    """Write the rows that were measured, if a file is named for them; returns a line on them."""
    if out is None:
        return []
    rows = rows_of(evaluation, data, part)
    write_rows(out, rows, private=data.private)
    return [f"{number_of(len(rows), 'rows')}: {out}"]


def _keep(loaded: LoadedRun, data: Data, evaluation: Evaluation, part: str, best_of: int | None) -> list[str]:
    """Keep an evaluation in the run and draw its page; returns the lines to show."""
    if evaluation.drawn is not None:
        drawn = json.dumps({**evaluation.drawn, "part": part, "best_of": best_of}, ensure_ascii=False)
        write_atomic(loaded.folder / EVALUATION, drawn, private=data.private)
    try:
        keep_evaluation(loaded.folder, loaded.step, evaluation.to_json(), evaluation.lines)
        write_report(loaded.folder)
    except (DiskError, SourceError) as error:  # the run may be read-only, or without its metrics
        return [*evaluation.lines, f"not shown on the run's page: {error.what}"]
    return evaluation.lines


def evaluate_new(
    run: str, num_shown: int, part: str | None, path: Path, rows: Path | None = None, overrides: Sequence[str] = ()
) -> Evaluation:
    """Evaluate all rows of new data, or those that declare a part; see `evaluate_run`.

    Args:
        overrides: of the recipe, such as data.on_bad_row=quarantine.

    Returns:
        The evaluation; its lines begin with the counts of the rows and what sets them apart from the training data.
    """
    loaded = load(run, overrides)
    new = open_data(recipe_for(loaded.recipe, path), loaded.files, Wanted.NEW)
    seq_ids = np.arange(len(new.table)) if part is None else np.flatnonzero(new.table.split == SPLITS[part])
    if not len(seq_ids):
        raise SourceError(f"no row declares the part {part}", where=str(path), fix="leave --split out to measure all")
    name = str(path) if part is None else f"{path}, {part}"
    unknown = check_new(new, path)
    training = _training(loaded)
    near, known = _near_training(training, new, seq_ids), _known(loaded, training, new, seq_ids)
    lines = [*loaded.notes, *new.lines(), *unknown[0], *(near.lines if near is not None else ()), *known[0]]
    facts = unknown[1] | ({} if near is None else {"near_duplicates": near.to_json()}) | known[1]
    facts |= {"bad_rows": len(new.bad_rows)} if new.bad_rows else {}
    over = Measuring(loaded.model, new, seq_ids, loaded.recipe.plan)
    evaluation = _measure(loaded, over, num_shown, name, None, None if isinstance(training, str) else training)
    lines += [*(line for line in evaluation.lines if line not in lines), *_write(rows, new, evaluation, name)]
    return replace(evaluation, lines=lines, facts=facts)


def _training(loaded: LoadedRun) -> Data | str:
    """The data that a run was trained on, or why it cannot be read."""
    try:
        return loaded.data()
    except (DiskError, RecipeError, SourceError) as error:  # the run may be used without its data
        where = f" ({error.where})" if error.where else ""
        return f"the run's own data cannot be read{where}: {error.what}"


def _near_training(training: Data | str, new: Data, seq_ids: np.ndarray) -> NearDuplicates | None:
    """Near-duplicates of the run's training rows among new rows; None for a family that is not compared."""
    if not new.compares:
        return None
    try:
        return not_compared("rows", training) if isinstance(training, str) else new.near_training(training, seq_ids)
    except (DiskError, SourceError) as error:
        return not_compared("rows", f"the run's own data cannot be read: {error.what}")


def _known(loaded: LoadedRun, training: Data | str, new: Data, seq_ids: np.ndarray) -> NewFacts:
    """Count new rows, such as patients, that the run's data has by their identity, part by part; nothing for a family
    of rows without one."""
    mine = new.identities()
    if mine is None:
        return [], {}
    if isinstance(training, str):
        return [f"not compared by id with those of the run: {training}"], {"known_ids": {"reason": training}}
    known = loaded.ids_by_part()
    asked = {mine[i] for i in seq_ids.tolist()}
    counts = {name: len(asked & ids) for name, ids in known.items()}
    facts: dict[str, object] = {"known_ids": {"compared": len(asked), **counts, "reason": None}}
    if not any(counts.values()):
        return [f"new data, {number_of(len(asked), 'ids')}: none is of the run's data"], facts
    by_part = ", ".join(f"{number:,} of {name}" for name, number in counts.items() if number)
    what = f"the run's data has {sum(counts.values()):,} of them, {by_part}"
    lines = [f"new data, {number_of(len(asked), 'ids')}: {what}"]
    if counts["train"]:
        lines.append("  do: leave out those of train, whom the model has seen, unless others have the same ids here")
    return lines, facts


def _measure(
    loaded: LoadedRun, over: Measuring[Data], num_shown: int, part: str, best_of: int | None, training: Data | None
) -> Evaluation:
    """Measure the model, and name the part in every metric that does not name one itself.

    Args:
        training: what a simple method learns from, which is then measured beside the model; None for no such method.
    """
    evaluation = measures_of(over.data.family).evaluate(loaded, over, num_shown)
    if loaded.quantized is not None:
        compared, lines = against_original(loaded, over)
        metrics = evaluation.metrics | compared
        evaluation = replace(evaluation, metrics=metrics, lines=[*evaluation.lines, *lines])
    metrics = {
        name: metric if metric.part else replace(metric, part=part, best_of=best_of)
        for name, metric in evaluation.metrics.items()
    }
    warning = too_good(metrics)
    lines = [f"warning: {warning}: unpad doctor {loaded.folder}"] if warning else []
    evaluation = replace(evaluation, metrics=metrics, lines=[*lines, *evaluation.lines])
    return evaluation if training is None else _beside(evaluation, training, over, part)


def _beside(evaluation: Evaluation, training: Data, over: Measuring[Data], part: str) -> Evaluation:
    """Add what a simple method gets on the same rows, below each measure that it has."""
    guess: Callable[..., list[Guesses]] | None = getattr(measures_of(over.data.family), "simple", None)
    if guess is None or evaluation.rows is None:
        return evaluation
    simple = {one.measure: beside(evaluation.rows, one) for one in guess(training, over, evaluation.rows)}
    metrics = dict[str, Metric]()
    for name, metric in evaluation.metrics.items():
        metrics[name] = metric
        if name in simple:
            metrics[f"simple_{name}"] = replace(simple[name].theirs, part=part)
    judged = {f"simple_{name}": one.to_json() for name, one in simple.items()}
    return replace(evaluation, metrics=metrics, simple=judged)


def _checks(loaded: LoadedRun) -> int | None:
    """Number of evaluations from which the best weights were selected; None if they were not selected so."""
    stage = loaded.recipe.stages[-1].train if loaded.recipe.stages else {}
    weights = stage.get("weights", loaded.recipe.train.weights)
    if weights != "best" or not (loaded.folder / METRICS).is_file():
        return None
    num = sum(row["kind"] == "eval" and row["loss"] is not None for row in load_metrics(loaded.folder))
    return num if num > 1 else None


def _no_rows(part: str) -> SourceError:
    if part == PARTS[Split.TEST]:
        fix = 'write "split": "test" into rows before training, or evaluate new ones with --data FILE'
        return SourceError("the data has no test part", where="--split", fix=fix)
    if part == PARTS[Split.TRAIN]:
        return SourceError("the last stage trained on no rows", where="--split", fix="use --split valid or test")
    return SourceError("the run holds nothing out", where="data.holdout", fix="train with data.holdout=0.05")


# --------------------------------------------------------------------------- quantized weights beside their original

SCORED_ROWS = 512  # whose scores are held at a time
QUANTIZED_VALUES = ("nll", "moved", "kept", "targets")


def against_original(run: LoadedRun, over: Measuring[Any]) -> tuple[dict[str, Metric], list[str]]:
    """Compare a run of quantized weights with its original, if this is there and as it was.

    Returns:
        `original_perplexity` of token models, `divergence`, the mean of KL(original || quantized) in nats over targets
        or rows, and `likeliest_kept`, the share of them of which the original's likeliest token or class is the
        likeliest still; or else a line with the reason.
    """
    assert run.quantized is not None, "a run of quantized weights"
    folder = next(iter(places_of(run.quantized.original, run.folder)), None)
    if folder is None:
        return {}, [f"not compared with the original: {run.quantized.original} is gone"]
    try:
        if fingerprint(run_weights(folder)[0]) != run.quantized.sha256:
            return {}, [f"not compared with the original: the weights of {folder} have changed"]
        original = load(folder, device=over.model.device).model
    except UnpadError as error:
        return {}, [f"not compared with the original: {error.what}"]
    if not isinstance(run.model, Classifies | Generates):
        return {}, [f"not compared with the original: a model of kind {run.model.config.kind} predicts no distribution"]
    original.mode = run.model.mode
    of_tokens = isinstance(run.model, Generates)
    values = _compare(original, replace(over, overflow="split") if of_tokens else over)
    groups = over.data.table.group[over.seq_ids]

    def of(name: str, share: bool = False) -> Metric:
        return ratio_of(values[name], values["targets"], groups, share=share)

    metrics = {"divergence": of("moved"), "likeliest_kept": of("kept", share=True)}
    return ({"original_perplexity": perplexity(of("nll"))} if of_tokens else {}) | metrics, []


@torch.no_grad()
def _compare(original: Model, over: Measuring[Any]) -> dict[str, np.ndarray]:
    """Sums over the targets of every sequence, (num_seqs,) each: the original's negative log-likelihood, divergence, 1
    where the likeliest stays, and 1."""

    def compare(batch: RaggedBatch) -> dict[str, np.ndarray]:
        if isinstance(over.model, Generates) and isinstance(original, Generates):
            labels = batch.labels.index_select(0, batch.target_index)
            hidden = [model.target_hidden(batch).split(SCORED_ROWS) for model in (original, over.model)]
            parts = [
                _moved(original.logits(before), over.model.logits(after), wanted)
                for before, after, wanted in zip(*hidden, labels.split(SCORED_ROWS), strict=True)
            ]
            columns = torch.cat([torch.zeros(3, 0, dtype=torch.float64), *parts], 1)
            sums = [per_sequence(column, batch) for column in columns]
            return dict(zip(QUANTIZED_VALUES, [*(values for values, _ in sums), sums[0][1]], strict=True))
        assert isinstance(over.model, Classifies)
        assert isinstance(original, Classifies)
        scores = original.classify(batch)
        columns = _moved(scores, over.model.classify(batch), scores.argmax(1))
        return dict(zip(QUANTIZED_VALUES, [*columns.numpy(), np.ones(len(scores))], strict=True))

    over.model.eval()
    original.eval()
    return over.collect(compare)


def _moved(before: Tensor, after: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of the labels before, divergence, and 1 where the likeliest stays, (3, num) float64.

    Args:
        before: scores, (num, num_classes); after: the same of the quantized model.
    """
    log_p, log_q = (scores.double().log_softmax(-1) for scores in (before, after))
    moved = (log_p.exp() * (log_p - log_q)).sum(-1)
    kept = log_p.argmax(-1) == log_q.argmax(-1)
    return torch.stack([-log_p.gather(1, labels[:, None])[:, 0], moved, kept.double()])
