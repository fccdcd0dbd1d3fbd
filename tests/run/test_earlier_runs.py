"""Runs of earlier versions: `earlier/COMMIT.tar.gz` holds one of each family, three updates long, with its data.

Checkouts of these commits trained them on torch's kernels: `unpad train FAMILY.yaml optim.lr=1e-2 --out run` in the
folder of the family. Files that nothing reads again were left out: the page, TensorBoard's, `metrics.csv`, the lock and
weights of the stages before the last. 364a4b5 is 0.1.0: no `data.split_version`, precision, id, update rule, digests of
rows, peaks of memory, summary of pictures, quantiles or names of patients; the log is `events.jsonl`, and the recipe of
texts has 1 for true in a stage. 4a346e7 is from before the release of 0.2.0: no id.
"""

import json
import tarfile
from pathlib import Path

import pytest

from tests.helpers.shell import Shell
from unpad.inference.loaded import load
from unpad.run.checkpoint import load as load_checkpoint
from unpad.run.report.history import log_file, read_log

pytestmark = pytest.mark.promise("versions.earlier-runs")

KEPT = Path(__file__).parent / "earlier"
COMMITS = ("364a4b5", "4a346e7")
LONGER = {"text": "stages.tune.train.max_epochs=2", "images": "train.max_steps=5", "patients": "train.max_steps=5"}


@pytest.fixture(params=[f"{commit}-{family}" for commit in COMMITS for family in LONGER])
def kept(request: pytest.FixtureRequest, unpad: Shell, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Commit and family of a run in the working directory, under the name `run`."""
    commit, family = request.param.split("-")
    with tarfile.open(KEPT / f"{commit}.tar.gz") as archive:
        archive.extractall(filter="data")
    monkeypatch.chdir(Path(commit) / family)
    return commit, family


def test_a_kept_run_opens_evaluates_reports_and_resumes(kept, unpad):
    commit, family = kept
    run = Path("run")
    assert load("run").recipe.data.split_version == (1 if commit == "364a4b5" else 2)
    before, best = read_log(run), load_checkpoint(run / "checkpoints" / "best").values["progress"]["best"]
    metrics = (run / "metrics.jsonl").read_bytes()

    evaluated = unpad("eval", "run", "--json", code=0)
    assert json.loads(evaluated.out)["loss"]["value"] == pytest.approx(best, rel=1e-4)

    unpad("runs", "run", code=0)
    assert 'class="state finished"' in (run / "report.html").read_text(encoding="utf-8")
    listed = unpad("runs", ".").out
    assert " finished " in listed
    assert f"unpad train {family}.yaml optim.lr=1e-2\n" in listed

    assert "other random draws" in unpad("train", "--resume", "run", LONGER[family], code=0).out
    assert (run / "metrics.jsonl").read_bytes().startswith(metrics)
    assert log_file(run).name == ("events.jsonl" if commit == "364a4b5" else "log.jsonl")
    entries = read_log(run)
    assert entries[: len(before)] == before
    assert [entry["kind"] for entry in entries if entry["kind"] in ("resumed", "finished")][-2:] == [
        "resumed",
        "finished",
    ]
    command = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert (command["precision"], len(command["id"])) == ("fp32", 16)
    assert unpad("runs", "run").code == 0


def test_a_kept_run_is_resumed_by_its_recipe_as_well(kept, unpad):
    _, family = kept
    recipe = Path(f"{family}.yaml")
    recipe.write_text(recipe.read_text().replace("drop_last: 1", "drop_last: true"))  # as the refusal of 1 says
    resumed = unpad("train", f"{family}.yaml", LONGER[family], "--out", "run", "--resume", code=0)
    assert "resumed  at step 3" in resumed.out


def test_the_rows_of_a_step_of_a_kept_run_are_told_and_its_numbers_compared(kept, unpad):
    commit, _ = kept
    found = unpad("replay", "run", "--step", "2", "--json")
    assert found.code in (0, 16), found.err  # the bits are those of the machine and the version
    told = json.loads(found.out)
    assert told["micro_batches"]
    assert told["rows_recorded"] is (commit != "364a4b5")
