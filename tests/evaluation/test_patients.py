"""Measures of a model of patients: right against plain loops, whatever the batches, and nobody left out unsaid."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.evaluation.scikit_learn import FILE, sample_classes
from tests.helpers.run_folders import html_of, run_directory
from tests.helpers.untrained_patients import CODES, Guess, Patients, draw
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.evaluation import binary
from unpad.evaluation import patients as measures
from unpad.evaluation.metrics import draws, metric_lines
from unpad.evaluation.run import evaluate_run
from unpad.evaluation.sets import SetScores, score_sets, set_columns, summarise_sets
from unpad.inference.patients import UNKNOWN, PatientPredictions, predict
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.training import PlanSettings
from unpad.run.report.patients import section

KNOWN = json.loads(FILE.read_text(encoding="utf-8"))  # made by scikit-learn
ONE, MANY = PlanSettings(tokens_per_micro=1), PlanSettings(tokens_per_micro=300)


def alone(data: Patients, seq: int) -> RaggedBatch:
    stop = data.table.positions[seq : seq + 1]
    return data.load(Micro(np.array([seq]), 0 * stop, stop, 0 * stop, 0, 0))


def test_predictions_do_not_depend_on_batches_and_stand_where_they_belong():
    data, model = draw(), Guess()
    ids = np.flatnonzero(data.table.split == Split.HOLDOUT)[::-1]
    many, one = predict(Measuring(model, data, ids, MANY)), predict(Measuring(model, data, ids, ONE))
    for name in ("log_p", "risk"):
        assert getattr(many, name) == pytest.approx(getattr(one, name), abs=1e-6)
    for row, seq in enumerate(ids.tolist()):
        batch = alone(data, seq)
        assert many.p[row] == pytest.approx(float(model.classify(batch).double().softmax(-1)[0, 1]), abs=1e-6)
        hazard = model.hazards(batch)
        assert many.risk[row] == pytest.approx(-float((1 - hazard.double().sigmoid()).log().sum()), rel=1e-5)
        assert many.labels[row] == data.labels[seq]
        assert (many.durations[row], many.cause[row]) == data.outcome(seq)
        assert many.num_sets[row] == len(data.set_sizes[seq])


def test_risk_is_the_probability_where_there_are_no_hazards():
    data = draw()
    found = predict(Measuring(Guess(hazards=False), data, np.arange(40), MANY))
    assert np.array_equal(np.argsort(found.risk), np.argsort(found.p))


@pytest.mark.promise("patients.outcomes")
def test_patients_of_unknown_outcome_are_left_out_and_counted():
    data, model = draw(), Guess()
    found = predict(Measuring(model, data, np.arange(40), MANY))
    known = np.flatnonzero(found.labels >= 0)
    metrics = measures.outcome_rows(found, True, True).metrics()
    assert metrics["auroc"].num == metrics["loss"].num == len(known) == 34
    assert metrics["concordance"].num == 40
    counts = measures.count(found, labelled=True)
    assert sum(list(counts.values())[:3]) == sum(list(counts.values())[3:]) == 40
    assert counts["of_unknown_outcome"] == 6
    assert counts["observed_until_the_outcome"] == sum(data.outcome(seq)[1] for seq in range(40)) > 0
    assert {metrics[name].num_censored for name in metrics.keys() - {"loss", "concordance"}} == {6}
    assert "of 34, 6 more censored" in " ".join(metric_lines(metrics))
    labels, p = found.labels[known], found.p[known]
    weights = stands_for(found.durations, found.labels >= 0)[known]
    assert metrics["auroc"].value == pytest.approx(binary.auroc(labels, p, weights), abs=1e-12)
    assert metrics["prevalence"].value == pytest.approx((weights * labels).sum() / weights.sum(), abs=1e-12)
    assert metrics["loss"].value == pytest.approx(-np.log(np.where(labels, p, 1 - p)).mean(), abs=1e-9)
    assert metrics["loss"].low < metrics["loss"].value < metrics["loss"].high


def test_outcomes_that_a_probability_separates_have_limits_and_reasons():
    p, labels = np.linspace(0.1, 0.9, 40), np.repeat([0, 1], 20)
    log_p, durations, ones = np.log(np.stack([1 - p, p], 1)), np.where(labels == 1, 1.0, 2.0), np.ones(40, np.int64)
    found = PatientPredictions(log_p, log_p[:, 2:], labels, p, durations, labels, ones, np.arange(40))
    metrics = measures.outcome_rows(found, True, True).metrics()
    assert metrics["auroc"].value == metrics["average_precision"].value == metrics["concordance"].value == 1
    assert metrics["auroc"].low == pytest.approx(0.025 ** (1 / 20))
    assert 0 < metrics["concordance"].low < 1
    assert math.isnan(metrics["average_precision"].low)
    told = " ".join(" ".join(metric_lines(metrics)).split())
    assert "calibration_slope - a threshold separates the outcomes" in told
    assert "1.0000 to 1.0000" not in told
    slope = metrics["calibration_slope"].to_json()
    assert (slope["value"], slope["low"], slope["high"]) == (None, None, None)
    never = replace(found, cause=np.zeros(40, np.int64))
    assert math.isnan(measures.outcome_rows(never, True, True).metrics()["concordance"].value)


def test_certain_and_right_probabilities_and_perfect_ranks_of_codes_have_exact_limits():
    labels = np.repeat([0, 1], 20)
    log_p = np.where(np.stack([1 - labels, labels], 1) > 0, 0.0, -1000.0)  # probabilities of exactly 0 and 1
    nothing = np.full(40, np.nan)
    sets, each = np.ones(40, np.int64), np.arange(40)
    found = PatientPredictions(log_p, log_p[:, 2:], labels, log_p[:, 1], nothing, labels, sets, each)
    assert measures.outcome_rows(found, True, True).metrics()["brier"].high == pytest.approx(1 - 0.025 ** (1 / 40))
    sets, none = np.arange(20), np.zeros(0, np.int64)
    above = np.where(sets % 2, 0, -1)  # the second set of each of ten patients, expected rightly
    ranks = SetScores(
        10, 5, sets // 2, np.zeros(0), none, none, np.zeros(0), sets, sets % 5, above, np.ones_like(sets), sets * 0.1
    )
    area = summarise_sets(ranks, CODES)["next_set_auroc"]
    assert (area.value, area.high, area.num) == (1, 1, 10)
    assert area.low == pytest.approx(0.025 ** (1 / 10))
    in_pairs = summarise_sets(ranks, CODES, groups=np.arange(10) // 2)["next_set_auroc"]
    assert in_pairs.low == pytest.approx(0.025 ** (1 / 5)), "of five patients of two examples"


def test_without_labels_or_times_there_is_nothing_to_say_of_them():
    untimed = measures.outcome_rows(
        predict(Measuring(Guess(), draw(timed=False), np.arange(40), MANY)), True, True
    ).metrics()
    assert "concordance" not in untimed
    unlabelled = measures.outcome_rows(
        predict(Measuring(Guess(), draw(labelled=False), np.arange(40), MANY)), False, True
    ).metrics()
    assert list(unlabelled) == ["concordance"]
    found = predict(Measuring(Guess(), draw(labelled=False), np.arange(40), MANY))
    assert list(measures.count(found, labelled=False)) == ["observed_until_the_outcome", "censored"]
    found = predict(Measuring(Guess(), draw(labelled=False, timed=False), np.arange(40), MANY))
    assert measures.count(found, labelled=False) == {}


@pytest.mark.parametrize(
    ("weights", "labelled", "expected"),
    [
        ({"classification": 1.0}, True, {"loss", "concordance"}),
        ({"classification": 1.0}, False, set()),  # what ranks by an untrained head would mean nothing
        ({"hazard": 1.0}, True, {"concordance"}),
        ({"hazard": 1.0, "classification": 1.0}, False, {"concordance"}),
        ({"reconstruction": 1.0}, True, {"reconstruction"}),
        ({"next_code": 1.0}, True, {"next_set_loss"}),
    ],
)
def test_only_what_was_trained_is_measured(weights, labelled, expected):
    run: Any = SimpleNamespace(recipe=SimpleNamespace(plan=MANY), model=Guess(**weights))
    data = draw(labelled=labelled)
    found = measures.evaluate(
        run, Measuring(run.model, data, np.flatnonzero(data.table.split == Split.HOLDOUT), MANY), 3
    ).metrics
    assert expected <= found.keys()
    assert not found.keys() & ({"loss", "concordance", "reconstruction", "next_set_loss"} - expected)


def test_training_is_judged_by_what_it_trains():
    data, ids = draw(), np.arange(40)
    judged = measures.held_out(Measuring(Guess(), data, ids, MANY))
    found = predict(Measuring(Guess(), data, ids, MANY))
    assert judged.loss == judged.values["loss"] == pytest.approx(found.nll.mean())
    assert judged.num_targets == 34
    assert judged.values["auroc"] == measures.outcome_rows(found, True, False).metrics()["auroc"].value
    rebuilt = score_sets(Measuring(Guess(), data, ids, MANY), True, False)
    for model, patients in ((Guess(classification=0.0, reconstruction=1.0), data), (Guess(), draw(labelled=False))):
        judged = measures.held_out(Measuring(model, patients, ids, MANY))
        assert judged.loss == pytest.approx(rebuilt.reconstruction.mean(), rel=1e-5)
        assert judged.num_targets == len(rebuilt.patient)
        assert judged.values == {"loss": judged.loss, "reconstruction": judged.loss}


def test_patients_with_nothing_to_judge_by_are_an_error():
    with pytest.raises(SourceError, match="have no target"):
        measures.held_out(Measuring(Guess(hazard=1.0), draw(timed=False), np.arange(40), MANY))


@pytest.mark.promise("patients.next-set")
def test_the_next_set_is_compared_with_what_came_and_never_with_another_patient():
    data, model = draw(), Guess()
    found = score_sets(Measuring(model, data, np.arange(40), MANY), True, True)
    metrics = summarise_sets(found, CODES)
    of_rows = set_columns(found, CODES)
    ratios = {name: of_rows[name].sum() / of_rows[f"num_{name}"].sum() for name in metrics}
    assert ratios == pytest.approx({name: metric.value for name, metric in metrics.items()})
    assert [of_rows["num_reconstruction"][seq] for seq in range(40)] == [len(sizes) for sizes in data.set_sizes]
    recalls: dict[int, list[float]] = {5: [], 10: []}
    areas, nats, rebuilt = [], [], []
    for seq in range(40):
        batch = alone(data, seq)
        scores = model.next_codes(batch).double()
        rebuilt += model.reconstruct(batch).tolist()
        bounds = batch.require(EventSets).members.cu_seqlens.tolist()
        for at in range(len(data.set_sizes[seq]) - 1):
            came = sorted(set(batch.input_ids[bounds[at + 1] : bounds[at + 2]].tolist()))
            order = scores[at].argsort(descending=True).tolist()
            for k, values in recalls.items():
                values.append(len(set(order[:k]) & set(came)) / len(came))
            nats += (-scores[at].log_softmax(-1)[came]).tolist()
            if len(came) < len(CODES):
                areas.append(float(binary.auroc(np.isin(np.arange(len(CODES)), came), scores[at].numpy())))
    assert metrics["next_set_recall@5"].value == pytest.approx(np.mean(recalls[5]), abs=1e-6)
    assert "next_set_recall@10" not in metrics  # there are seven codes
    assert metrics["next_set_auroc"].value == pytest.approx(np.mean(areas), abs=1e-6)
    assert metrics["next_set_loss"].value == pytest.approx(np.mean(nats), abs=1e-6)
    assert metrics["reconstruction"].value == pytest.approx(np.mean(rebuilt), rel=1e-5)
    assert metrics["reconstruction"].num == 40
    one = score_sets(Measuring(model, data, np.arange(40), ONE), True, True)
    assert summarise_sets(one, CODES)["next_set_auroc"].value == pytest.approx(metrics["next_set_auroc"].value)


def test_codes_that_were_rebuilt_are_told_apart():
    data, model = draw(12), Guess()
    metrics = summarise_sets(score_sets(Measuring(model, data, np.arange(12), MANY), True, False), CODES)
    assert "next_set_loss" not in metrics
    every = [], []  # type: tuple[list[int], list[float]]
    for seq in range(12):
        batch = alone(data, seq)
        every[0].extend(batch.input_ids.tolist())
        every[1].extend(model.code_nll(batch).tolist())
    codes, nats = map(np.array, every)
    assert metrics["made_code"].value == pytest.approx(nats.mean(), rel=1e-5)
    assert metrics["made_code: heart rate"].value == pytest.approx(nats[codes == 2].mean(), rel=1e-5)
    assert "made_code: unknown" not in metrics


def test_patients_of_one_set_have_no_next():
    data = Patients([[2], [1], [3]], np.array([0, 1, 0]))
    found = score_sets(Measuring(Guess(), data, np.arange(3), MANY), True, True)
    assert not (found.above >= 0).any()
    assert "next_set_loss" not in summarise_sets(found, CODES)


def test_evaluation_leaves_what_the_report_draws_and_names_nobody(tmp_path, monkeypatch):
    folder = run_directory(tmp_path / "run")
    (folder / "recipe.yaml").write_text("model: {kind: set_sequence}")
    data, recipe = draw(80), SimpleNamespace(plan=MANY, stages=[], train=SimpleNamespace(weights="last"))
    recipe.model, recipe.data = {"kind": "set_sequence"}, SimpleNamespace(events=["of a test"])
    run = SimpleNamespace(
        folder=folder, model=Guess(), recipe=recipe, step=7, data=lambda: data, quantized=None, notes=[]
    )
    monkeypatch.setattr("unpad.evaluation.run.load", lambda name: run)
    metrics, lines = evaluate_run(str(folder), 2)
    assert list(metrics)[:6] == ["auroc", "average_precision", "prevalence", "brier", "accuracy", "loss"]
    mine = data.labels[data.table.split == Split.HOLDOUT]
    assert 0 < abs(metrics["prevalence"].value - mine[mine >= 0].mean()) < 0.1
    assert "next_set_recall@5" in metrics
    assert lines[0].startswith("evaluated: 60 patients, ")
    assert "of unknown outcome" in lines[0]
    assert len(lines) == 3
    assert lines[1].startswith("patients.parquet:")
    written = (folder / "evaluation.json").read_text()
    left = json.loads(written)
    assert left["family"] == "events"
    assert left["roc"][0] == [0, 0]
    assert left["roc"][-1] == [1, 1]
    held = data.table.split == Split.HOLDOUT
    assert sum(row["patients"] for row in left["calibration"]) == sum(data.labels[held] >= 0)
    for name in data.ids.tolist():
        assert name not in written
    assert "Receiver operating" in (folder / "report.html").read_text()


def test_curves_are_thinned_to_what_a_picture_shows():
    few = np.stack([np.linspace(0, 1, 7), np.linspace(0, 1, 7) ** 2], 1)
    assert measures._thin(few) == few.round(6).tolist()
    many = np.stack([np.linspace(0, 1, 5000), np.linspace(0, 1, 5000)], 1)
    thin = np.array(measures._thin(many))
    assert len(thin) == 200
    assert (thin[0].tolist(), thin[-1].tolist()) == ([0, 0], [1, 1])
    assert np.diff(thin[:, 0]).max() < 1.1 / 199


def test_what_is_drawn_of_calibration_has_the_intervals_of_wilson():
    found = predict(Measuring(Guess(), draw(80), np.arange(80), MANY))
    drawn = measures.describe(found)
    assert list(drawn) == ["calibration", "roc", "precision_recall"]
    labels, p = found.labels[found.known], found.p[found.known]
    bins, weights = binary.calibration_bins(p), stands_for(found.durations, found.known)[found.known]
    assert len(drawn["calibration"]) == len(np.unique(bins)) == 10
    for b, row in zip(np.unique(bins), drawn["calibration"], strict=True):
        share, num, z = np.average(labels[bins == b], weights=weights[bins == b]), int((bins == b).sum()), 1.96
        # The limits are the shares from which the observed one is z standard errors away.
        for limit in (row["low"], row["high"]):
            assert abs(share - limit) == pytest.approx(z * math.sqrt(limit * (1 - limit) / num), abs=1e-4)
        assert row["low"] <= share <= row["high"]
        assert (row["patients"], row["observed"]) == (num, pytest.approx(share, abs=1e-6))
        assert row["predicted"] == pytest.approx(np.average(p[bins == b], weights=weights[bins == b]), abs=1e-6)
    assert drawn["roc"] == binary.roc_points(labels, p, weights).round(6).tolist()
    points = binary.precision_recall_points(labels, p, weights).round(6).tolist()
    assert (drawn["precision_recall"][0], drawn["precision_recall"][-1]) == (points[0], points[-1])
    assert [point for point in drawn["precision_recall"] if point not in points] == []


def test_the_surest_mistakes_are_shown_and_no_patient_that_is_right_or_unknown():
    run: Any = SimpleNamespace(recipe=SimpleNamespace(plan=MANY), model=Guess(classification=1.0))
    data, ids = draw(), np.arange(40)
    found = predict(Measuring(Guess(), data, ids, MANY))
    wrong = [i for i in range(40) if found.labels[i] >= 0 and abs(found.p[i] - found.labels[i]) > 0.5]
    wrong.sort(key=lambda i: -abs(found.p[i] - found.labels[i]))
    said = {0: "an outcome that did not come", 1: "an outcome that came"}
    expected = [f"{data.where(i)}: {found.p[i]:.0%} for {said[int(found.labels[i])]}" for i in wrong]
    assert {0, 1} == {int(found.labels[i]) for i in wrong}
    for num in (0, 3, 40):
        evaluated = measures.evaluate(run, Measuring(run.model, data, ids, MANY), num)
        assert evaluated.lines[1:] == expected[:num]
    counts = {"patients": 40, **measures.count(found, labelled=True)}
    assert evaluated.drawn["counts"] == counts
    said_first = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items())
    assert evaluated.lines[0] == f"evaluated: {said_first}"


def test_one_outcome_alone_has_no_curve():
    data = Patients([[2, 1]] * 12, np.zeros(12, np.int64))
    found = predict(Measuring(Guess(), data, np.arange(12), MANY))
    assert list(measures.describe(found)) == ["calibration"]
    assert math.isnan(measures.outcome_rows(found, True, True).metrics()["auroc"].value)
    shown = metric_lines({"auroc": measures.outcome_rows(found, True, True).metrics()["auroc"]})[0]
    assert "nan" not in shown
    assert shown.split()[:2] == ["auroc", "-"]
    assert "no patient has the outcome" in shown
    judged = measures.held_out(Measuring(Guess(), data, np.arange(12), MANY))
    assert set(judged.refused) == {"auroc", "average_precision"}
    assert not set(judged.refused) & set(judged.values)


# --------------------------------------------------------------------------- several classes


NAMES = ("home", "rehab", "ward", "died", "lost")


def of_classes(labels: np.ndarray, p: np.ndarray) -> PatientPredictions:
    num = len(labels)
    nothing = np.full(num, np.nan)
    cause, sets, each = np.zeros(num, np.int64), np.ones(num), np.arange(num)
    return PatientPredictions(np.log(p), np.zeros((num, 0)), labels, nothing, nothing, cause, sets, each, NAMES)


@pytest.mark.promise("patients.ready-labels")
@pytest.mark.parametrize(("kind", "absent"), [("classes", None), ("absent", 2)])
def test_measures_of_several_classes_equal_those_of_scikit_learn(kind, absent):
    known = KNOWN[kind]
    labels, p = sample_classes(300, absent)
    labels, p = np.append(labels, [UNKNOWN, UNKNOWN]), np.concatenate([p, p[:2]])  # whom no measure counts
    found = of_classes(labels, p)
    metrics = measures.outcome_rows(found, True, True).metrics()
    assert metrics["accuracy"].value == pytest.approx(known["accuracy"], abs=1e-12)
    assert metrics["loss"].value == pytest.approx(known["log_loss"], abs=1e-12)
    assert metrics["commonest_class"].value == max(np.bincount(labels[:300])) / 300
    errors = [binary.calibration_error(labels[:300] == place, p[:300, place]) for place in range(5)]
    assert metrics["calibration_error"].value == pytest.approx(np.mean(errors), abs=1e-12)
    assert metrics["calibration_error"].note.startswith("perfect probabilities: ")
    assert metrics["brier"].value == pytest.approx(known["brier"], abs=1e-12)
    assert metrics["brier"].low < known["brier"] < metrics["brier"].high
    areas = {int(place): area for place, area in known["auroc_of"].items()}
    for place, name in enumerate(NAMES):
        metric = metrics[f"auroc_{name}"]
        if place in areas:
            assert metric.value == pytest.approx(areas[place], abs=1e-12)
            assert metric.low < metric.value < metric.high
        else:
            assert math.isnan(metric.value)
            assert metric.note == "no patient has the class"
    mean = np.mean(list(areas.values())) if known["auroc"] is None else known["auroc"]
    assert metrics["auroc"].value == pytest.approx(mean, abs=1e-12)
    assert metrics["auroc"].low < metrics["auroc"].value < metrics["auroc"].high
    assert {metric.num for metric in metrics.values()} == {300}
    assert "NaN" not in json.dumps({name: metric.to_json() for name, metric in metrics.items()})
    judged = measures._judged(found.only(found.known))
    assert judged.values == pytest.approx({name: metrics[name].value for name in ("loss", "accuracy", "auroc")})
    assert judged.num_targets == 300
    columns = measures.outcome_rows(found, True, True).columns
    assert columns["label"].tolist()[-1] is None
    assert columns.keys().isdisjoint({"risk", "duration", "observed", "probability"})


def test_the_interval_of_a_mean_over_classes_is_that_of_patients_drawn_again():
    labels, p = sample_classes(40, 2, seed=3)
    labels[labels == 4] = 0
    labels[7] = 4  # of a class that many resamples lack
    times = np.stack(list(draws(40, 0))[:30])
    again = [
        np.mean([binary.auroc(labels[i] == c, p[i, c]) for c in np.unique(labels[i])])
        for i in (np.repeat(np.arange(40), row) for row in times)
    ]
    assert binary.mean_auroc(labels, p, times) == pytest.approx(np.array(again), abs=1e-12)
    repeated = [np.repeat(np.arange(40), row) for row in times]
    squares = [binary.class_brier(labels[i], p[i]) for i in repeated]
    assert binary.class_brier(labels, p, times) == pytest.approx(np.array(squares), abs=1e-12)


def test_one_class_alone_has_no_area_and_perfect_ones_have_the_limits_of_the_rarest():
    p = np.full((12, 5), 0.1) + 0.5 * np.eye(5)[np.arange(12) % 5]
    alone = measures.outcome_rows(of_classes(np.zeros(12, np.int64), p), True, True).metrics()
    assert {name: metric.note for name, metric in alone.items() if math.isnan(metric.value)} == {
        "auroc": "all have one class", "auroc_home": "all have one class",
        **{f"auroc_{name}": "no patient has the class" for name in NAMES[1:]},
    }  # fmt: skip
    judged = measures._judged(of_classes(np.zeros(12, np.int64), p))
    assert judged.refused == {"auroc": "all have one class"}
    assert "auroc" not in judged.values
    perfect = measures.outcome_rows(of_classes(np.arange(12) % 5, p), True, True).metrics()
    assert (perfect["auroc"].value, perfect["auroc"].high) == (1, 1)
    assert perfect["auroc"].low == pytest.approx(0.025 ** (1 / 2)), "of a class of two patients"
    assert perfect["accuracy"].low == pytest.approx(0.025 ** (1 / 12))


@pytest.mark.promise("patients.ready-labels")
def test_an_evaluation_of_several_classes_counts_draws_and_shows_each():
    rng, base = np.random.default_rng(2), draw(60, timed=False)
    labels = np.where(np.arange(60) % 7 == 3, -1, rng.integers(0, 3, 60))
    data = replace(base, labels=labels, classes=NAMES[:4])
    model = Guess(classes=4, classification=1.0)
    labels_of = SimpleNamespace(several=NAMES[:4])
    run: Any = SimpleNamespace(recipe=SimpleNamespace(plan=MANY, events=SimpleNamespace(labels=labels_of)), model=model)
    over = Measuring(model, data, np.arange(60), MANY)
    found = measures.evaluate(run, over, 60)
    predictions = predict(over)
    for row in (0, 17):
        wanted = model.classify(alone(data, row)).double().log_softmax(1)
        assert predictions.log_p[row] == pytest.approx(wanted[0].numpy(), abs=1e-6)
    assert predictions.classes == NAMES[:4]
    counts = {f"of_class_{name}": int((labels == place).sum()) for place, name in enumerate(NAMES[:4])}
    assert found.drawn["counts"] == {"patients": 60, **counts, "of_unknown_class": int((labels < 0).sum())}
    confusion: Any = found.drawn["confusion"]
    for true in range(4):
        for said in range(4):
            mine = (labels == true) & (predictions.log_p.argmax(1) == said)
            assert confusion[true][said] == mine.sum()
    p = np.exp(predictions.log_p)
    wrong = np.flatnonzero((labels >= 0) & (p.argmax(1) != labels))
    surest = wrong[np.argsort(-p[wrong].max(1), kind="stable")]
    assert found.lines[1:] == [
        f"{data.where(int(i))}: {p[i].max():.0%} for {NAMES[p[i].argmax()]}, it is {NAMES[labels[i]]}" for i in surest
    ]
    assert measures.held_out(over).loss == pytest.approx(predictions.nll.mean())
    page = html_of(section, {"family": "events", "part": None, "best_of": None, **found.drawn})
    assert page.count("<figure") == 1


# --------------------------------------------------------------------------- competing events


def timed_only(risk: np.ndarray, durations: np.ndarray, cause: np.ndarray) -> PatientPredictions:
    """Predictions of patients of whom only times are known."""
    num = len(risk)
    nothing = np.full(num, UNKNOWN)
    competing, each = np.zeros((num, 1)), np.arange(num)
    return PatientPredictions(np.zeros((num, 2)), competing, nothing, risk, durations, cause, nothing, each)


def ranked(predictions: PatientPredictions) -> float:
    return measures.outcome_rows(predictions, False, True).metrics()["concordance"].value


@pytest.mark.promise("patients.competing")
def test_who_had_a_competing_event_stays_at_risk_for_ever():
    """Wolbers et al. (2014): a pair counts if the outcome of one came before that of the other, which never comes after
    a competing event, however early that was."""
    rng = np.random.default_rng(5)
    num = 60
    risk, durations, cause = rng.integers(0, 9, num), rng.integers(1, 15, num).astype(float), rng.integers(0, 4, num)
    right, comparable = 0.0, 0
    for i in np.flatnonzero(cause == 1):
        for j in range(num):
            later = durations[j] > durations[i] or (durations[j] == durations[i] and cause[j] == 0)
            if later or cause[j] >= 2:
                comparable += 1
                right += (risk[i] > risk[j]) + (risk[i] == risk[j]) / 2
    assert ranked(timed_only(risk, durations, cause)) == pytest.approx(right / comparable, abs=1e-12)
    # By hand: the outcome on day 5, a competing event on day 2, and a censored patient on day 3, who does not count.
    days, ended = np.array([5.0, 2.0, 3.0]), np.array([1, 2, 0])
    assert ranked(timed_only(np.array([0.2, 0.9, 0.9]), days, ended)) == 0
    assert ranked(timed_only(np.array([0.9, 0.2, 0.9]), days, ended)) == 1


def stands_for(durations: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Number of patients that each known one stands for: the inverse of Kaplan and Meier's share not yet censored."""
    found = np.zeros(len(durations))
    for i in np.flatnonzero(known):
        free = 1.0
        for day in {
            days for days, is_known in zip(durations, known, strict=True) if not is_known and days < durations[i]
        }:
            left = (durations == day) & ~known
            free *= 1 - left.sum() / ((durations > day) | left).sum()
        found[i] = 1 / free
    return found


@pytest.mark.promise("patients.competing")
def test_every_competing_event_is_measured_as_the_outcome_is():
    rng = np.random.default_rng(7)
    num, horizon, names = 50, 9.1, ("moved", "died", "never")
    durations, cause = rng.integers(1, 15, num).astype(np.float32), rng.integers(0, 4, num)
    durations[:5] = horizon
    p = rng.integers(0, 9, (num, 3)) / 40
    label = np.where((cause > 0) & (durations <= np.float32(horizon)), cause == 1, np.where(durations > 9, 0, UNKNOWN))
    given = timed_only(p[:, 0], durations.astype(np.float64), cause)
    given = replace(given, labels=label, competing=p)
    known = label != UNKNOWN
    weights = stands_for(durations, known)
    found = measures.outcome_rows(given, False, False, names, horizon).metrics()
    for place, name in enumerate(names[:2]):
        right, comparable, came = 0.0, 0, np.zeros(num, bool)
        for i in range(num):
            if label[i] != UNKNOWN:
                came[i] = cause[i] == 2 + place and (durations[i] <= 9 or i < 5)
            for j in range(num):
                later = durations[j] > durations[i] or (durations[j] == durations[i] and cause[j] == 0)
                if cause[i] == 2 + place and (later or cause[j] not in (0, 2 + place)):
                    comparable += 1
                    right += (p[i, place] > p[j, place]) + (p[i, place] == p[j, place]) / 2
        assert found[f"concordance_{name}"].value == pytest.approx(right / comparable, abs=1e-12)
        squares = weights * (p[:, place] - came) ** 2
        assert found[f"brier_{name}"].value == pytest.approx(squares.sum() / num, abs=1e-12)
        assert (found[f"brier_{name}"].num, found[f"brier_{name}"].num_censored) == (known.sum(), (~known).sum())
        with_it, without = p[came, place][:, None], p[known & ~came, place]
        pairs = weights[came][:, None] * weights[known & ~came]
        wins = (pairs * ((with_it > without) + (with_it == without) / 2)).sum() / pairs.sum()
        assert found[f"auroc_{name}"].value == pytest.approx(wins, abs=1e-12)
        assert found[f"auroc_{name}"].low < wins < found[f"auroc_{name}"].high
    assert found["concordance_never"].to_json()["reason"] == "no never came before another patient's observation ended"
    assert found["auroc_never"].to_json()["reason"] == "no patient has never by the horizon"


def test_competing_events_are_counted_and_told_in_rows_where_there_are_any():
    cause, days = np.array([0, 1, 2, 3, 2, 0]), np.array([5.0, 2.0, 3.0, 4.0, 5.0, np.nan])
    some = timed_only(np.zeros(6), days, cause)
    expected = {"observed_until_the_outcome": 1, "observed_until_a_competing_event": 3, "censored": 1}
    assert measures.count(some, labelled=False) == expected
    columns = measures.outcome_rows(some, False, True).columns
    assert columns["observed"].tolist() == [False, True, False, False, False, None]
    assert columns["competing"].tolist() == [False, False, True, True, True, None]
    one = measures.outcome_rows(replace(some, cause=np.minimum(cause, 2)), False, True, ("moved",)).columns
    assert one["competing_event"].tolist() == [None, None, "moved", "moved", "moved", None]
    assert "competing" not in measures.outcome_rows(replace(some, cause=np.minimum(cause, 1)), False, True).columns
