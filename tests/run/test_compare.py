"""`unpad runs` and `unpad compare`: dates, losses and sizes of runs, and where they differ; what a run keeps."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.helpers.shell import Shell
from tests.helpers.toy import rows, run, write_toy
from unpad.run.compare import summarize
from unpad.run.report.page import write_report
from unpad.run.report.samples import EVALUATIONS, SAMPLES, keep_evaluation, keep_samples


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs."""
    root = tmp_path_factory.mktemp("compared")
    recipe = write_toy(root / "toy")
    run(recipe, root / "runs/fast", "train.max_steps=9")
    run(recipe, root / "runs/slow", "train.max_steps=6", "optim.lr=0.002", "model.hidden=32")
    return root / "runs"


@pytest.fixture
def two(unpad: Shell, tmp_path: Path, trained: Path) -> list[Path]:
    shutil.copytree(trained, tmp_path / "runs")
    return [tmp_path / "runs" / name for name in ("fast", "slow")]


@pytest.mark.promise("run.compare")
def test_runs_show_date_step_loss_and_size(unpad, two):
    head, *lines = unpad("runs").out.splitlines()
    assert head.split() == ["run", "state", "started", "step", "held", "out", "size"]
    table = {line.split()[0]: line.split() for line in lines if not line.startswith("  ")}
    for folder, steps in zip(two, ("9", "6"), strict=True):
        best = min(row["loss"] for row in rows(folder, "eval"))
        name, state, date, _, step, loss, size = table[folder.name]
        assert (name, state, step, loss) == (folder.name, "finished", steps, f"{best:.4f}")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert size.endswith(("kB", "MB"))
    assert all(len(line) <= 80 for line in [head, *table])
    assert any("optim.lr=0.002" in line for line in lines)
    total = sum(path.stat().st_size for path in two[0].rglob("*") if path.is_file())
    assert summarize(two[0]).num_bytes == total


@pytest.mark.parametrize("command", ["[]", "{}", "5", '{"recipe": 3, "overrides": []}', '{"recipe": "x"}', "no"])
def test_a_damaged_run_is_listed_as_one(unpad, two, command):
    (two[0] / "run.json").write_text(command)
    (two[1] / "metrics.jsonl").write_text("{}\n[]\nx\n")
    shown = unpad("runs", code=0)
    assert "fast                 damaged" in shown.out
    assert " 0         - " in next(line for line in shown.out.splitlines() if line.startswith("slow"))


class Checker(HTMLParser):
    """Collects the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.promise("run.compare")
def test_compared_runs_show_where_they_differ_and_what_they_reached(unpad, two):
    assert unpad("eval", "fast").code == 0
    shown = unpad("compare", "fast", "slow", "--out", "both.html", code=0)
    lines = {line.split("  ")[0]: line.split()[-2:] for line in shown.out.splitlines() if line.strip()}
    assert lines["optim.lr"] == ["0.01", "0.002"]
    assert lines["model.hidden"] == ["24", "32"]
    assert "model.width" not in lines
    assert lines["steps"] == ["9", "6"]
    best = [f"{min(row['loss'] for row in rows(folder, 'eval')):.4f}" for folder in two]
    assert lines["held-out loss, best check"] == best
    assert lines["eval loss (valid)"][1] == "-"
    assert max(cell_len(line) for line in shown.out.splitlines()) <= 80
    page = Path("both.html").read_text(encoding="utf-8")
    assert {"Held-out loss", "Training loss", "optim.lr", "0.002", *best} <= set(Checker(page).words)
    assert page.count('class="run0"') >= 3
    assert page.count('class="run1"') >= 3
    assert "<script" not in page
    assert "the evaluation is of step" not in shown.out
    values = json.loads(unpad("compare", "fast", "slow", "--json").out)
    assert values["recipes"]["optim.lr"] == ["0.01", "0.002"]


def test_held_out_losses_of_other_data_are_said_to_be_so(unpad, two, tmp_path):
    run(write_toy(tmp_path / "other", data={"holdout": 0.3}), tmp_path / "runs/third", "train.max_steps=6")
    note = "their data or its split differs: held-out losses are not of the same examples"
    assert note in unpad("compare", "fast", "third").out
    assert note not in unpad("compare", "fast", "slow").out


def test_one_run_alone_or_one_that_is_not_there_is_refused(unpad, two):
    assert unpad("compare", "fast").code == 2
    assert unpad("compare", "fast", "absent").code == 2
    assert not Path("compare.html").exists()


# --------------------------------------------------------------------------- what a run keeps


@pytest.mark.promise("run.compare")
def test_a_run_keeps_replies_at_its_end_and_every_evaluation(unpad, two):
    fast = two[0]
    kept = [json.loads(line) for line in (fast / SAMPLES).read_text(encoding="utf-8").splitlines()]
    assert 1 <= len(kept) <= 4
    assert all(row["step"] == 9 and row["prompt"] for row in kept)
    page = (fast / "report.html").read_text(encoding="utf-8")
    assert {row["prompt"] for row in kept} <= set(Checker(page).words)
    measured = json.loads(unpad("eval", "fast", "--json").out)
    assert unpad("eval", "fast").code == 0
    evaluations = [json.loads(line) for line in (fast / EVALUATIONS).read_text(encoding="utf-8").splitlines()]
    assert [one["metrics"] for one in evaluations] == [measured, measured]
    words = Checker((fast / "report.html").read_text(encoding="utf-8")).words
    assert {f"{measured['loss']['value']:.4f}", "loss"} <= set(words)


def test_replies_are_not_made_again_when_a_finished_run_is_resumed(trained, two):
    before = (two[0] / SAMPLES).read_bytes()
    run(trained.with_name("toy") / "toy.yaml", two[0], resume=True)
    assert (two[0] / SAMPLES).read_bytes() == before


def test_an_evaluation_of_a_run_that_cannot_be_written_is_still_shown(unpad, two, monkeypatch):
    (two[0] / EVALUATIONS).mkdir()
    shown = unpad("eval", "fast", code=0)
    assert "not shown on the run's page: cannot write: Is a directory" in shown.out
    assert "bits_per_char" in shown.out


@pytest.mark.promise("run.compare")
@pytest.mark.parametrize("held_out", [True, False])
def test_an_evaluation_of_earlier_weights_is_told_from_one_of_these(unpad, two, held_out):
    folder, checkpoints = two[0], two[0] / "checkpoints"
    steps = [int(json.loads((checkpoints / "best/state.json").read_text())["step"])]
    if not held_out:
        shutil.rmtree(checkpoints / "best")
        steps = [int(path.name.rpartition("-")[2]) for path in checkpoints.glob("step-*")]
    metric = {"value": 1.5, "low": 1.0, "high": 2.0, "num": 3, "part": "valid", "best_of": None}
    old = f"the evaluation is of step 2, the weights are of step {max(steps)}: evaluate them anew"
    for step, notes in ((2, [f"fast: {old}"]), (max(steps), [])):
        keep_evaluation(folder, step, {"loss": metric}, [])
        told = [
            note for note in json.loads(unpad("compare", "fast", "slow", "--json").out)["notes"] if "of step" in note
        ]
        assert told == notes
        assert (old in "".join(Checker(write_report(folder).read_text(encoding="utf-8")).words)) == bool(notes)


def test_replies_are_text_and_no_page(two):
    keep_samples(two[0], 9, [("<b>问</b>", "<script>答</script>")])
    page = write_report(two[0]).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "<script>答</script>" in "".join(Checker(page).words)


def test_a_metric_is_shown_with_its_part_and_one_that_is_refused_with_its_reason(unpad, two):
    refused = dict.fromkeys(("value", "low", "high", "best_of")) | {"num": 3, "part": "test", "reason": "it is <lossy>"}
    plain = {"value": 1.5, "low": 1.0, "high": float("nan"), "num": 3, "part": "valid", "best_of": 4}
    one_sided = {"value": 1.0, "low": None, "high": 1.0, "num": 3, "reason": "all are right"}
    keep_evaluation(two[0], 9, {"bits_per_char": refused, "loss": plain, "average_precision": one_sided}, [])
    page = write_report(two[0]).read_text(encoding="utf-8")
    assert "it is &lt;lossy&gt;" in page
    assert "<td>1.0000</td><td>- to 1.0000: all are right</td>" in page
    assert "valid, best of 4 evaluations" in page
    out = unpad("compare", "fast", "slow").out
    assert re.search(r"eval bits_per_char \(test\) +- +-", out)
    assert re.search(r"eval loss \(valid\) +1.5000 +-", out)


@pytest.mark.parametrize(
    "metrics", [5, {"loss": 3}, {"loss": {}}, {"loss": {"value": "x", "low": 1, "high": 1, "num": 1}}]
)
def test_a_damaged_evaluation_leaves_the_rest_of_the_page(unpad, two, metrics):
    (two[0] / EVALUATIONS).write_text(json.dumps({"time": "2026", "step": 1, "metrics": metrics}) + "\n")
    assert "Held-out perplexity" in write_report(two[0]).read_text(encoding="utf-8")
    assert unpad("compare", "fast", "slow").code == 0
