"""`unpad eval --rows` has the numbers that metrics are computed from, and `unpad compare --rows` pairs them."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.families import Finished
from tests.helpers.toy import quiet, write_toy
from unpad.errors import SourceError
from unpad.evaluation import binary
from unpad.evaluation.metrics import draws, student
from unpad.evaluation.paired import Paired, paired
from unpad.evaluation.patients import ALONE, OF_OUTCOME, _of_classes
from unpad.evaluation.rows import ExampleRows, Ratio, objects
from unpad.evaluation.run import evaluate_new, evaluate_run
from unpad.training.loop import train

Table = dict[str, np.ndarray]


def of_text(rows: Table, prefix: str = "") -> dict[str, float]:
    nats = rows["loss"].sum()
    loss = nats / rows["num_targets"].sum()
    found = {"loss": loss, "perplexity": math.exp(loss)}
    found |= {f"bits_per_{unit}": nats / math.log(2) / rows[f"num_{unit}s"].sum() for unit in ("char", "byte")}
    return {prefix + name: value for name, value in found.items()}


def of_text_and_chats(rows: Table) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("text", "chat"):
        chosen = (rows["kind"] == kind) & np.isfinite(rows["loss"].astype(float))
        found |= of_text({name: column[chosen] for name, column in rows.items()}, f"{kind}_")
    return found


def of_pairs(rows: Table) -> dict[str, float]:
    assert (rows["right"] == (rows["margin"] > 0)).all()
    return {"loss": rows["loss"].mean(), "accuracy": rows["right"].mean(), "margin": rows["margin"].mean()}


def of_images(rows: Table) -> dict[str, float]:
    classes = [name.removeprefix("probability_") for name in rows if name.startswith("probability_")]
    p = np.stack([rows[f"probability_{name}"] for name in classes], 1)
    label = np.array([classes.index(name) for name in rows["label"]])
    assert (p.argmax(1) == [classes.index(name) for name in rows["prediction"]]).all()
    right, sure = p.argmax(1) == label, p.max(1)
    bins = np.minimum((sure * 10).astype(int), 9)
    of_class = {f"accuracy_{name}": float(right[rows["label"] == name].mean()) for name in set(rows["label"])}
    return {
        "loss": float(-np.log(p[np.arange(len(p)), label]).mean()),
        "accuracy": float(right.mean()),
        "commonest_class": max(float((rows["label"] == name).mean()) for name in set(rows["label"])),
        "balanced_accuracy": float(np.mean(list(of_class.values()))),
        "calibration_error": sum(abs((sure - right)[bins == b].sum()) for b in range(10)) / len(p),
        **of_class,
    }


def of_questions(rows: Table) -> dict[str, float]:
    loss = rows["loss"].sum() / rows["num_targets"].sum()
    asked = rows["kind"] == "question"
    found = {"loss": loss, "perplexity": math.exp(loss), "accuracy": rows["right"][asked].mean()}
    for question in set(rows["question"][asked]):
        found[f"accuracy: {question}"] = rows["right"][rows["question"] == question].mean()
    for kind in ("question", "caption"):
        mine = rows["kind"] == kind
        found[f"{kind}_loss"] = rows["loss"][mine].sum() / rows["num_targets"][mine].sum()
    told = rows["kind"] == "caption"
    found["caption_bits_per_char"] = rows["loss"][told].sum() / math.log(2) / rows["num_chars"][told].sum()
    found["caption_choice_of_20"] = np.nan  # there are fewer; `test_captions.py` has more
    return found | {"caption_accuracy": rows["right"][told].mean()}


def of_patients(rows: Table) -> dict[str, float]:
    label, p = rows["label"].astype(int), rows["probability"]
    return {
        "loss": rows["loss"].sum() / rows["num_targets"].sum(),
        "auroc": float((p[label == 1][:, None] > p[label == 0]).mean()),
        "average_precision": float(binary.average_precision(label, p)),
        "brier": ((p - label) ** 2).mean(),
        "accuracy": ((p > 0.5) == label).mean(),
        "concordance": float(binary.concordance(rows["risk"], rows["duration"], rows["observed"].astype(bool))),
        "prevalence": label.mean(),
        "calibration_error": float(binary.calibration_error(label, p)),
        "calibration_slope": float(binary.calibration_slope(label, p)),
        "calibration_intercept": float(binary.calibration_intercept(label, p)),
    }


RECOMPUTED: dict[str, Callable[[Table], dict[str, float]]] = {
    "text": of_text_and_chats, "conversations": of_text, "pairs": of_pairs, "images": of_images,
    "questions": of_questions, "patients": of_patients,
}  # fmt: skip


def copied(finished: Finished, family: str, to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of its own, which reads the cache of all."""
    made = finished(family)
    monkeypatch.setenv("UNPAD_CACHE", str(made.cache))
    return Path(shutil.copytree(made.run, to))


def read(path: Path) -> Table:
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


@pytest.mark.promise("run.rows")
@pytest.mark.parametrize("family", list(RECOMPUTED))
def test_metrics_are_those_of_the_rows(family, unpad, finished, tmp_path, monkeypatch):
    run = copied(finished, family, tmp_path / "run", monkeypatch)
    done = unpad("eval", run, "--json", "--rows", tmp_path / "rows.parquet", code=0)
    printed, rows = json.loads(done.out), read(tmp_path / "rows.parquet")
    assert next(iter(rows)) == ("id" if family == "patients" else "where")
    scored = rows["part"] == "valid"
    found = RECOMPUTED[family]({name: column[scored] for name, column in rows.items()})
    for name in [name for name in printed if name.startswith("keywords_")]:
        found[name] = np.nanmean(rows[name].astype(float))
    printed = {name: one for name, one in printed.items() if not name.startswith("simple_")}  # tested in test_simple.py
    values = {name: math.nan if one["value"] is None else one["value"] for name, one in printed.items()}
    assert found == pytest.approx(values, nan_ok=True)
    groups = {one["num_groups"] or one["num"] for name, one in printed.items() if name.endswith("loss")}
    of_kind = [rows["kind"] == kind for kind in set(rows.get("kind", []))]
    of_loss = {"text": of_kind, "questions": [scored, *of_kind]}.get(family, [scored])
    assert {len(np.unique(rows["group"][scored & mine])) for mine in of_loss} == groups


def test_rows_of_new_data_are_json_lines_if_the_file_is_named_so(finished, tmp_path, monkeypatch):
    run = copied(finished, "images", tmp_path / "run", monkeypatch)
    out, data = tmp_path / "rows.jsonl", finished("images").recipe.parent / "pictures"
    found = evaluate_new(str(run), 0, None, data, out)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert found.lines[-1] == f"{len(rows)} rows: {out}"
    assert {row["part"] for row in rows} == {str(data)}
    assert np.mean([row["right"] for row in rows]) == pytest.approx(found.metrics["accuracy"].value)


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [("rows.csv", 2, "the file will be parquet"), ("", 2, "is a folder"), ("nowhere/rows.parquet", 6, "cannot write")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_evaluation(
    name, code, told, unpad, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr("unpad.evaluation.run.evaluate_own", lambda *_: pytest.fail("it was evaluated"))
    refused = unpad("eval", finished("images").run, "--rows", tmp_path / name, code=code)
    assert told in refused.err
    assert "Traceback" not in refused.err


def test_rows_of_patients_are_for_their_owner(finished, tmp_path, monkeypatch):
    run, folder = copied(finished, "patients", tmp_path / "run", monkeypatch), tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    evaluate_run(str(run), rows=folder / "rows.parquet")
    assert (folder / "rows.parquet").stat().st_mode & 0o077 == 0


# --------------------------------------------------------------------------- pairs of runs


def rows_of(places: list[str], loss: list[float], targets: list[int], groups: list[int], **columns: Any) -> ExampleRows:
    given = {name: objects(values) for name, values in columns.items()}
    return ExampleRows(
        {
            "where": objects(places), "group": np.array(groups), "part": objects(["valid"] * len(places)),
            "loss": np.array(loss), "num_targets": np.array(targets), **given,
        },
        {"loss": Ratio("loss", "num_targets"), **({"auroc": OF_OUTCOME["auroc"]} if columns else {})},
    )  # fmt: skip


def pair(a: ExampleRows, b: ExampleRows) -> Paired:
    return paired("a", "b", [a], [b])


@pytest.mark.promise("run.rows")
def test_rows_are_paired_by_place_and_drawn_by_group():
    """Of one place several rows may be; they are taken in order."""
    a = rows_of(["x:1", "x:2", "x:2", "x:3", "x:9"], [4.0, 6, 9, 8, 100], [2, 2, 3, 4, 1], [0, 0, 1, 1, 2])
    b = rows_of(["x:3", "x:2", "y:1", "x:2", "x:1"], [4.0, 2, 50, 9, 2], [4, 2, 1, 3, 2], [5, 6, 7, 8, 9])
    found = pair(a, b)
    assert (found.common, found.only_first, found.only_second) == (4, 1, 1)
    loss = found.differences["loss"]
    assert loss.value == pytest.approx((2 + 2 + 9 + 4 - 4 - 6 - 9 - 8) / 11)
    # Two groups: a resample is one of them twice, or both.
    drawn = {(2, 0): (2 + 2 - 4 - 6) / 4, (1, 1): loss.value, (0, 2): (9 + 4 - 9 - 8) / 7}
    reach = student(1) * np.std([drawn[tuple(times.tolist())] for times in draws(2)]) * math.sqrt(2)
    assert (loss.low, loss.high) == pytest.approx((loss.value - reach, loss.value + reach))
    assert (loss.num, loss.num_groups, loss.part) == (4, 2, "valid")
    scaled = (replace(one, measures={"bits": Ratio("loss", "num_targets", scale=2.0)}) for one in (a, b))
    bits = pair(*scaled).differences["bits"]
    assert (bits.value, bits.low, bits.high) == pytest.approx((2 * loss.value, 2 * loss.low, 2 * loss.high))
    assert "1 row of a alone; 1 row of b alone" in " ".join(found.lines())
    assert pair(rows_of(["x:1"], [0.0], [0], [0]), b).differences == {}, "it has no target"
    with pytest.raises(SourceError, match="no row in common"):
        pair(a, rows_of(["z:1"], [1.0], [1], [0]))


def test_runs_of_several_seeds_have_intervals_over_rows_and_over_seeds():
    rng, places = np.random.default_rng(0), [f"x:{i}" for i in range(40)]
    losses = 2 + rng.normal(size=(6, 40)) * 0.1 + np.array([0, 0.3, 0.1, 0.2, 0.5, 0.4])[:, None]
    runs = [rows_of(places, row.tolist(), [1] * 40, list(range(40))) for row in losses]
    found = paired("a and 2 other seeds", "b and 2 other seeds", runs[:3], runs[3:])
    of_rows, of_seeds = found.differences["loss"], found.of_seeds["loss"]
    means = losses.mean(1)
    assert of_rows.value == of_seeds.value == pytest.approx(means[3:].mean() - means[:3].mean())
    reach = 2.776 * math.sqrt(means[3:].var(ddof=1) / 3 + means[:3].var(ddof=1) / 3)  # Student's t of four degrees
    assert of_seeds.high - of_seeds.value == of_seeds.value - of_seeds.low == pytest.approx(reach, rel=1e-3)
    assert of_rows.high - of_rows.value < reach / 3
    assert "over seeds they are:" in " ".join(found.lines())
    assert "6 runs" in found.lines()[-1]
    lone = pair(runs[0], runs[3])
    assert lone.of_seeds == {}
    assert "other seeds may change the sign" in " ".join(lone.lines())


def test_ranks_are_compared_on_the_same_draws():
    """The second run ranks as the first: no draw differs; where the first is at chance, the second is above it."""
    label = [0, 1, None, 1, 0, 0, 1, 0]
    places, ones, groups = [f"x:{i}" for i in range(8)], [1] * 8, list(range(8))
    good = [0.1, 0.8, 0.5, 0.9, 0.3, 0.2, 0.7, 0.4]

    def run(probability: list[float]) -> ExampleRows:
        return rows_of(places, [1.0] * 8, ones, groups, label=label, probability=probability)

    fair = [*good[:6], 0.25, good[7]]  # which some draws are without
    same = pair(run(fair), run([p / 2 for p in fair])).differences["auroc"]
    assert (same.value, same.num, math.isnan(same.low)) == (0, 7, True)
    better = pair(run([0.5] * 8), run(good)).differences["auroc"]
    assert better.value == 0.5
    lone = rows_of(places, [1.0] * 8, ones, groups, label=[1] * 8, probability=good)
    shown = "\n".join(pair(lone, lone).lines())
    assert "auroc" in shown
    assert "the rows of both do not allow it   of 8" in shown
    assert " to -" not in shown


def test_a_measure_of_one_kind_is_compared_on_rows_of_that_kind():
    of_chats = {"chat_loss": Ratio("loss", "num_targets", kind="chat")}
    a, b = (
        replace(
            rows_of(["x:1", "x:2", "x:3"], loss, [1, 1, 1], [0, 1, 2], kind=["text", "chat", "chat"]), measures=of_chats
        )
        for loss in ([1.0, 5.0, 7.0], [9.0, 6.0, 9.0])
    )
    found = pair(a, b).differences["chat_loss"]
    assert (found.value, found.num) == (1.5, 2)


def of_classes(labels: Sequence[str | None], classes: tuple[str, ...], best: list[str]) -> ExampleRows:
    """Rows of several classes, of which `best` is the likeliest."""
    num = len(labels)
    known = [int(label is not None) for label in labels]
    p = {f"probability_{name}": [0.9 if name == one else 0.1 for one in best] for name in classes}
    right = [one == label for one, label in zip(best, labels, strict=True)]
    rows = rows_of([f"x:{i}" for i in range(num)], [1.0] * num, known, list(range(num)), label=labels, **p, right=right)
    return replace(rows, measures={name: one for name, one in _of_classes(classes).items() if name not in ALONE})


def test_runs_of_other_classes_are_compared_where_both_know_the_class():
    """Either run is measured by the names of its own classes, in its own order; one has a class that the other has
    not."""
    labels = ["home", "died", "ward", "home", "died", "lost"]
    a = of_classes(labels, ("home", "died", "ward", "lost"), ["home", "home", "ward", "died", "died", "lost"])
    b = of_classes([*labels[:5], None], ("ward", "home", "died"), ["home", "died", "ward", "home", "died", "ward"])
    for first, second, sign in ((a, b, 1), (b, a, -1)):
        found = pair(first, second).differences
        assert set(found) == {"loss", "accuracy", "auroc", "brier", "auroc_home", "auroc_died", "auroc_ward"}
        assert found["accuracy"].value == pytest.approx(sign * 2 / 5)
        # Of the first, home: 1 of 2 above 2 of 3 others, all else equal; died: likewise; and ward is told apart.
        by_hand = {"home": 1 - 7 / 12, "died": 1 - 7 / 12, "ward": 0}
        for name, value in by_hand.items():
            assert found[f"auroc_{name}"].value == pytest.approx(sign * value), name
        assert found["auroc"].value == pytest.approx(sign * np.mean(list(by_hand.values())))
        assert found["auroc"].num == 5
    nobody = pair(a.only(np.arange(2)), b.only(np.arange(2))).differences["auroc_ward"]
    assert nobody.to_json().items() >= {"value": None, "reason": "the rows of both do not allow it"}.items()


def test_runs_of_other_outcomes_are_not_compared():
    places, ones = ["x:1", "x:2", "x:3"], [1, 1, 1]
    binary = rows_of(places, [1.0] * 3, ones, [0, 1, 2], label=[0, 1, None], probability=[0.1, 0.9, 0.5])
    later = rows_of(places, [1.0] * 3, ones, [0, 1, 2], label=[1, 1, 0], probability=[0.1, 0.9, 0.5])
    for other in (later, of_classes(["home", "home", "died"], ("home", "died", "ward"), ["home"] * 3)):
        other = replace(other, columns=other.columns | {"where": objects(places)})
        with pytest.raises(SourceError, match=r"a and b have different labels on [12] rows? of 2") as caught:
            pair(binary, other)
        assert caught.value.fix


@pytest.mark.promise("run.rows")
def test_runs_are_compared_on_the_rows_that_both_hold_out(unpad, finished, tmp_path, monkeypatch):
    other = copied(finished, "images", tmp_path / "other", monkeypatch)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    run = finished("images").run
    plain = json.loads(unpad("compare", run, other, "--json").out)
    assert set(plain) == {"runs", "recipes", "measures", "notes"}
    found = json.loads(unpad("compare", run, other, "--json", "--rows").out)
    assert set(found) == {*plain, "rows"}
    (beside,) = found["rows"]
    assert (beside["only_first"], beside["only_second"], beside["differences"]["loss"]["value"]) == (0, 0, 0)
    assert beside["common"] == beside["differences"]["accuracy"]["num"]
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before, "nothing is written"
    shown = unpad("compare", run, other, "--rows").out
    assert f"other less run, on {beside['common']} rows that both hold out" in shown


def test_runs_of_two_families_are_not_compared_by_rows(unpad, finished, tmp_path):
    refused = unpad("compare", finished("images").run, finished("conversations").run, "--rows", code=2)
    assert "rows of several families cannot be compared" in refused.err
    assert not (tmp_path / "compare.html").exists()


@pytest.mark.promise("run.compare")
def test_runs_of_other_tokenizers_compare_bits_per_character_on_a_file_spelt_in_two_ways(unpad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = str(write_toy(tmp_path / "toy", stages=[], train={"threads": 1, "max_steps": 2}))
    train(recipe, tmp_path / "a", console=quiet())
    relative = ["data.root=toy", "data.text=texts.jsonl", "data.chat=chats.jsonl", "tokenizer.vocab_size=300"]
    train(recipe, tmp_path / "b", ["tokenizer.kind=bpe", *relative], console=quiet())
    (beside,) = json.loads(unpad("compare", "a", "b", "--rows", "--json").out)["rows"]
    assert (beside["only_first"], beside["only_second"]) == (0, 0)
    assert next(iter(beside["differences"])) == "text_bits_per_char"
    assert beside["left_out"] == ["text_loss", "chat_loss"]
    train(recipe, tmp_path / "c", ["tokenizer.kind=bpe", "tokenizer.vocab_size=300"], console=quiet())
    told = json.loads(unpad("compare", "a", "c", "--json").out)
    assert ["their tokenizers differ" in note for note in told["notes"]] == [True], "and data is not blamed"
    assert "bits per char" in next(iter(told["measures"]))
    here = unpad("eval", tmp_path / "b", "--json", code=0).out
    monkeypatch.chdir("/")
    assert unpad("eval", tmp_path / "b", "--json", code=0).out == here, "paths start where the run was trained"
    written = tmp_path / "b" / "run.json"
    written.write_text(written.read_text().replace(json.dumps(str(tmp_path)), '"/gone"'))
    assert "no such file or folder" in unpad("eval", tmp_path / "b", code=3).err
