import json
import math
import re
from html import unescape
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as some
from rich.console import Console

from tests.helpers.run_folders import run_directory
from unpad.errors import SourceError
from unpad.evaluation.metrics import Metric
from unpad.run.monitor import Monitor
from unpad.run.report.history import load_metrics, read_rows
from unpad.run.report.page import write_report
from unpad.run.report.samples import keep_evaluation
from unpad.run.report.section import family_section, part_note
from unpad.run.report.svg import MAX_POINTS, Curve, plot, running_mean, thin, tick_labels, ticks


def text_of(page: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", page.split("</style>")[1]))


def test_page_needs_no_network_and_no_scripts(tmp_path):
    page = write_report(run_directory(tmp_path / "run")).read_text()
    assert page.startswith("<!doctype html>")
    for outside in ("http:", "https:", "<script", "<link", "src=", "@import", "url("):
        assert outside not in page, outside
    assert page.count("<svg") == page.count("</svg>") == 7
    assert "nan" not in page.split("</style>")[1].lower().replace("finance", "")


@pytest.mark.promise("run.metrics")
def test_key_figures_equal_those_counted_from_the_files(tmp_path):
    folder = run_directory(tmp_path / "run")
    rows, timing = load_metrics(folder), list(read_rows(folder / "timing.jsonl"))
    train = [row for row in rows if row["kind"] == "train"]
    best = min((row for row in rows if row["kind"] == "eval" and row["stage"] == "tune"), key=lambda row: row["loss"])
    page = write_report(folder).read_text()
    tiles = dict(re.findall(r"<div class=tile><span>([^<]*)</span><b>([^<]*)</b>", page))
    tokens = sum(row["tokens"] for row in train)
    assert tiles == {
        "Steps": "60",
        "Real tokens trained": f"{tokens / 1000:.3g}k",
        "Held-out loss": f"{best['loss']:#.4g}",
        "Held-out perplexity": f"{math.exp(best['loss']):#.4g}",
        "Speed": f"{np.median([row['tokens_per_second'] for row in timing]):,.0f}",
        "Padding": f"{1 - tokens / 60_000:.1%}",
        "Peak memory": "0.60 GB",
        "Waiting for data": "20.0%",
    }


@pytest.mark.parametrize(
    ("losses", "weights", "sentence"),
    [
        ([2.0, 1.0, 1.4, 1.9], 30, "stopped falling at step 40 of 60, while the training loss"),
        ([2.0, 1.0, 1.4, 1.9], 60, "The weights in use are those of step 60, of loss 1.900."),
        ([2.0, 1.0, 1.4, 1.9], 40, "The weights in use are the best ones."),
        ([2.0, 2.1, 2.2, 2.1], 60, "did not fall in 4 checks: unpad doctor looks"),
        ([4.0, 3.0, 2.0, 1.0], 60, "was still falling at the end"),
        ([4.0, 1.001, 1.0, 1.001], 60, "has hardly changed since step 40"),
    ],
)
def test_the_page_begins_with_a_judgement_and_shows_the_weights_in_use(tmp_path, losses, weights, sentence):
    folder = run_directory(tmp_path / "run")
    rows = [row for row in load_metrics(folder) if row["kind"] != "eval" and row["stage"] == "tune"]
    check = next(row for row in load_metrics(folder) if row["kind"] == "eval")
    places = (32, 40, 50, 60)
    rows += [{**check, "stage": "tune", "step": step, "loss": loss} for step, loss in zip(places, losses, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = folder / "checkpoints" / "best"
    best.mkdir(parents=True, exist_ok=True)
    (best / "state.json").write_text(json.dumps({"step": weights}))
    page = write_report(folder).read_text()
    assert sentence in page.split("<p class=judgement>")[1].split("</p>")[0]
    [(shown, note)] = [(value, note) for name, value, note in TILE.findall(page) if name == "Held-out loss"]
    used = dict(zip(places, losses, strict=True)).get(weights, min(losses))
    assert shown == f"{used:#.4g}"
    assert ("in use; best" in note) == (used != min(losses))


TILE = re.compile(r"<div class=tile><span>([^<]*)</span><b>([^<]*)</b><small>([^<]*)</small>")


@pytest.mark.promise("run.metrics")
def test_the_page_begins_with_what_the_model_is_worth_beside_a_guess(tmp_path):
    folder = run_directory(tmp_path / "run")
    (folder / "recipe.yaml").write_text("model: {kind: vit}\ndata: {images: a}\n")
    assert [name for name, _, _ in TILE.findall(write_report(folder).read_text())][:3] == [
        "Held-out loss", "Held-out perplexity", "Steps",
    ]  # fmt: skip
    log = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    (folder / "metrics.jsonl").write_text(log.replace('"bits_per_char": 2.5', '"accuracy": null'), encoding="utf-8")
    assert TILE.findall(write_report(folder).read_text())[0][0] == "Held-out loss", "nothing of which it could be told"
    (folder / "metrics.jsonl").write_text(log.replace('"bits_per_char": 2.5', '"accuracy": 0.75'), encoding="utf-8")
    assert TILE.findall(write_report(folder).read_text())[0] == ("Accuracy", "75.0%", "of valid, step 60")
    measured = {name: Metric(value, value - 0.1, value + 0.1, 40, part="test").to_json()
                for name, value in (("accuracy", 0.7), ("commonest_class", 0.25))}  # fmt: skip
    keep_evaluation(folder, 50, measured, [])
    told = "always the commonest class 25.0%; 95 %: 60.0% to 80.0%; of test, step 50"
    assert TILE.findall(write_report(folder).read_text())[0] == ("Accuracy", "70.0%", told)

    (folder / "recipe.yaml").write_text("model: {kind: set_sequence}\ndata: {events: a}\n")
    refused = Metric(math.nan, math.nan, math.nan, 40, "no patient has the outcome").to_json()
    values = {"auroc": Metric(0.8, math.nan, math.nan, 40).to_json(), "concordance": refused}
    keep_evaluation(folder, 50, json.loads(json.dumps(values).replace("NaN", "null")), [])
    tiles = TILE.findall(write_report(folder).read_text())
    assert tiles[0] == ("AUROC", "0.800", "by chance 0.500; of the evaluation, step 50")
    assert tiles[1][0] == "Held-out loss"

    (folder / "recipe.yaml").write_text("model: {kind: vision_language}\ndata: {vqa: a}\n")
    values = {name: Metric(value, math.nan, math.nan, 40).to_json()
              for name, value in (("caption_choice_of_20", 0.4), ("caption_choice_chance", 0.05))}  # fmt: skip
    keep_evaluation(folder, 50, json.loads(json.dumps(values).replace("NaN", "null")), [])
    told = "a guess among 20 5.0%; of the evaluation, step 50"
    assert TILE.findall(write_report(folder).read_text())[1] == ("Right caption of 20", "40.0%", told)


def test_the_times_of_a_resumed_run_name_the_steps_that_they_cover(tmp_path):
    folder = run_directory(tmp_path / "run")
    log = (folder / "log.jsonl").read_text(encoding="utf-8")
    assert "Where the time went Part" in " ".join(text_of(write_report(folder).read_text()).split())
    again = '{"time": "2026-01-01T00:00:00+00:00", "kind": "resumed", "step": 40}\n'
    (folder / "log.jsonl").write_text(log + again, encoding="utf-8")
    assert "Where the time went in its last process to finish" in text_of(write_report(folder).read_text())
    steps = log.replace('"kind": "timers"', '"kind": "timers", "after_step": 40, "step": 60')
    (folder / "log.jsonl").write_text(steps + again, encoding="utf-8")
    page = text_of(write_report(folder).read_text())
    assert "Where the time went in the process that took steps 41 to 60 of the run" in page


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """Cells of every table of a page, by the heading before it."""
    found = re.findall(r"<(?:h2|summary)>(.*?)</(?:h2|summary)><div class=box><table>(.*?)</table>", page, re.S)
    return {
        text_of(f"</style>{title}").strip(): [
            [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
            for row in re.findall(r"<tr[^>]*>(.*?)</tr>", table)
        ]
        for title, table in found
    }


def test_tables_hold_every_row_and_every_column_of_the_files(tmp_path):
    folder = run_directory(tmp_path / "run")
    page = write_report(folder).read_text()
    tables = tables_of(page)
    held = [row for row in load_metrics(folder) if row["kind"] == "eval"]
    head, *shown = tables["Held-out evaluations of the part valid"]
    assert head == ["Stage", "Step", "Epoch", "Loss", "Perplexity", "Bits per char", "Targets", "Weights"]
    assert [row[:4] + row[5:] for row in shown] == [
        [row["stage"], str(row["step"]), str(row["epoch"]), f"{row['loss']:#.4g}", "2.500", "4,212", best]
        for row, best in zip(held, ["", "", "best of the stage", "", "best of the stage", "in use"], strict=True)
    ]
    assert [float(row[4].replace(",", "")) for row in shown] == pytest.approx(
        [row["perplexity"] for row in held], rel=1e-3
    )
    assert page.count("<tr class=best>") == 1
    assert tables["Where the time went"] == [["Part", "Seconds", "Share"], ["train", "6.0", "75.0%"]]
    assert tables["Environment"] == [
        ["Name", "Value"], ["torch", "2.13.0"], ["threads", "2"], ["kernel", "native bf16"],
    ]  # fmt: skip
    log = list(read_rows(folder / "log.jsonl"))
    head, *entries = tables["Log"]
    assert head == ["Time", "Entry", "Details"]
    told = [entry for entry in log if entry["kind"] not in ("environment", "timers")]
    assert [row[0] for row in entries] == [entry["time"][:19].replace("T", " ") for entry in told]
    assert [row[1] for row in entries] == [entry["kind"] for entry in told]
    assert entries[0][2] == "recipe zh_chat"
    assert [row[2] for row in entries if row[1] == "warning"] == [
        entry["message"] for entry in told if entry["kind"] == "warning"
    ]


def test_a_long_log_shows_its_newest_entries_and_says_how_many_there_are(tmp_path):
    folder = run_directory(tmp_path / "run")
    with (folder / "log.jsonl").open("a") as log:
        for number in range(300):
            log.write(f'{{"time": "2026-01-01T00:00:00+00:00", "kind": "noted", "number": {number}}}\n')
    total = len(list(read_rows(folder / "log.jsonl"))) - 2
    [(title, table)] = [(t, rows) for t, rows in tables_of(write_report(folder).read_text()).items() if "Log" in t]
    assert " ".join(title.split()) == f"Log the newest 200 of {total}"
    assert [row[2] for row in table[1:]] == [f"number {number}" for number in range(100, 300)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"part": None, "best_of": None}, ""),
        ({"part": "test", "best_of": None}, "These figures are of the part test."),
        (
            {"part": "valid", "best_of": 4},
            "These figures are of the part valid, by which the weights were chosen: they are the best of 4 checks of "
            "the same rows.",
        ),
    ],
)
def test_figures_name_their_part_and_how_often_it_was_looked_at(found, expected):
    assert part_note(found) == expected


@pytest.mark.parametrize(("title", "unit", "value"), [("Waiting for data", "ms per step", 20), ("Memory", "GB", 0.6)])
def test_axes_hold_what_was_measured_in_their_unit(tmp_path, title, unit, value):
    page = write_report(run_directory(tmp_path / "run")).read_text()
    figure = page.split(f"<b>{title}</b>")[1].split("</figure>")[0]
    highest = float(re.findall(r"<text class=end[^>]*>([^<]+)<", figure)[-1])
    assert unit in figure
    assert value <= highest <= 2 * value


def test_words_of_the_run_are_escaped(tmp_path):
    folder = run_directory(tmp_path / "a&b<i>", stage="<b>x</b>")
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"time": "2026-01-01T00:00:00", "kind": "<script>", "name": "<script>alert(1)</script>"}\n')
    page = write_report(folder).read_text()
    assert "<script" not in page
    assert "<b>x</b>" not in page
    assert "<i>" not in page
    assert "&lt;secret&gt; &amp; 语料" in page


def test_a_page_of_patients_has_no_perplexity_and_says_how_to_evaluate(tmp_path):
    folder = run_directory(tmp_path / "run")
    texts = text_of(write_report(folder).read_text())
    assert "Held-out perplexity" in texts
    assert "Perplexity" in texts
    assert "unpad eval" not in texts
    (folder / "recipe.yaml").write_text("model:\n  kind: set_sequence\n")
    patients = text_of(write_report(folder).read_text())
    assert "perplexity" not in patients.lower()
    assert "unpad eval run adds calibration" in patients
    (folder / "evaluation.json").write_text('{"family": "events", "counts": {"patients": 3}}')
    assert "unpad eval" not in text_of(write_report(folder).read_text())
    earlier = {"family": "events", "counts": {"with_event": 1}, "roc": [[0, 0], [1, 1]], "precision_recall": [[0, 1]]}
    (folder / "evaluation.json").write_text(json.dumps(earlier))
    assert "unpad eval run adds calibration" in text_of(write_report(folder).read_text())


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_state_is_how_the_run_said_it_ended(tmp_path, ending):
    assert f"state {ending}" in write_report(run_directory(tmp_path / "run", ending=ending)).read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl", "log.jsonl"])
def test_missing_and_damaged_files_are_named(tmp_path, name):
    folder = run_directory(tmp_path / "run")
    (folder / name).write_text((folder / name).read_text().replace("}\n", "\n", 1))
    with pytest.raises(SourceError, match=rf"{name}:1\b"):
        write_report(folder)
    (folder / name).unlink()
    with pytest.raises(SourceError, match=f"there is no {name}"):
        write_report(folder)


def test_a_run_without_steps_has_no_report(tmp_path):
    Monitor(tmp_path, log_every=1, grad_norm_warning=1, console=Console(quiet=True), total_steps=1).close()
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(SourceError, match="not taken a step"):
        write_report(tmp_path)


def test_a_line_still_being_written_is_left_out(tmp_path):
    folder = run_directory(tmp_path / "run")
    before = len(load_metrics(folder))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "kind": "tra')
    assert len(load_metrics(folder)) == before
    write_report(folder)


def test_a_run_that_is_not_evaluated_says_so(tmp_path):
    page = write_report(run_directory(tmp_path / "run", steps=9)).read_text()
    assert "not evaluated yet" in page
    assert "No held-out row was checked" in page
    assert "held out</span>" not in page


def test_long_runs_are_thinned_without_losing_a_spike():
    x, y = np.arange(1, 100_001, dtype=float), np.random.default_rng(0).normal(size=100_000)
    y[77_777], y[33_333], y[5] = 50.0, -40.0, math.nan
    tx, ty = thin(x, y)
    assert len(tx) <= MAX_POINTS
    assert (ty.min(), ty.max()) == (-40.0, 50.0)
    assert np.all(np.diff(tx) > 0)
    drawn = plot("Speed", [Curve("main", [(x, y)])])
    assert drawn.count("L") <= MAX_POINTS
    assert ">100,000<" in drawn


@limits(deadline=None)
@given(some.floats(-1e5, 1e5), some.floats(1e-6, 1e6), some.integers(3, 8))
def test_ticks_are_round_and_enclose_the_data(low, width, target):
    high = low + width
    marks = ticks(low, high, target)
    slack = 1e-6 * width + 1e-15 * max(abs(low), abs(high))  # no float lies nearer than that
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack
    assert 2 <= len(marks) <= 2 * target + 2
    step = marks[1] - marks[0]
    leading = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(leading - factor) for factor in (1, 2, 5, 10)) < 1e-2
    assert len(set(tick_labels(marks))) == len(marks) or abs(low) > 1e3 * width  # no two marks read alike


def test_ticks_begin_and_end_at_data_that_is_round():
    """0.3 / 0.1 is less than 3 in floats."""
    assert ticks(0.3, 0.8) == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert ticks(-0.8, -0.3) == pytest.approx([-0.8, -0.7, -0.6, -0.5, -0.4, -0.3])


@limits(deadline=None)
@given(
    some.lists(some.floats(-10, 10) | some.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=30),
    some.integers(1, 9),
)
def test_running_mean_equals_the_mean_of_its_neighbours(values, width):
    y, w = np.array(values), np.arange(1.0, len(values) + 1)
    got = running_mean(y, w, width | 1)
    for i in range(len(y)):
        near = slice(max(0, i - width // 2), i + width // 2 + 1)
        real = np.isfinite(y[near])
        expected = np.average(y[near][real], weights=w[near][real]) if real.any() else math.nan
        assert got[i] == pytest.approx(expected, nan_ok=True, abs=1e-9)


def test_a_plot_of_one_point_or_of_nothing_is_drawn():
    one = np.ones(1)
    assert "<circle" in plot("Loss", [Curve("main", [(one, one)])])
    assert "nothing was measured" in plot("Loss", [Curve("main", [(one, one * math.nan)])])
    assert "nothing was measured" in plot("Loss", [])


def test_a_few_large_values_make_the_axis_logarithmic():
    x, y = np.arange(1.0, 101), np.ones(100)
    y[50] = 1000.0
    drawn = plot("Gradient norm", [Curve("main", [(x, y)])])
    assert [label for label in re.findall(r">([\d.]+)</text>", drawn)][:4] == ["1", "10", "100", "1000"]


def test_tick_labels_read_alike():
    assert tick_labels([0.0, 5000.0, 10000.0]) == ["0", "5k", "10k"]
    assert tick_labels([0.0, 2e-4, 4e-4]) == ["0", "2e-4", "4e-4"]
    assert tick_labels([1.0, 1.5, 2.0]) == ["1.0", "1.5", "2.0"]


def test_a_family_counts_the_same_units_on_its_page_as_in_its_data():
    for family in ("text", "images", "vqa", "patients"):
        assert family_section(family).length_unit == import_module(f"unpad.data.{family}").UNITS[1], family
