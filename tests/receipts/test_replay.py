"""A step taken again has the bits that the run recorded, in every family; what changed is refused or named."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.equal_processes import CASES, write_small
from tests.helpers.faults import NO_MEMORY
from tests.helpers.shell import Shell
from tests.helpers.toy import LOOP, events, quiet, rows, run, write_toy
from unpad.batching.batch import RaggedBatch
from unpad.data.sources.example import place_of
from unpad.errors import REPLAY_DIFFERS, CheckpointError, RecipeError, ResumeError, SourceError
from unpad.models.decoder import Decoder
from unpad.receipts import replay as replaying
from unpad.receipts.replay import of_memory, replay
from unpad.receipts.starts import Cut, Session
from unpad.receipts.trace import trace
from unpad.run import checkpoint
from unpad.run.checkpoint import State
from unpad.training.loop import train
from unpad.training.step import StepResult

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in CASES}
PLAN = {"tokens_per_step": 200, "tokens_per_micro": 90}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages with dropout and updates of several micro-batches, and checkpoints of the second alone."""
    folder = tmp_path_factory.mktemp("receipts")
    run(write_toy(folder), folder / "run", "checkpoint.every=4", "train.max_steps=18", "checkpoint.keep=2")
    return folder


def state_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Time of change and contents of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def copied(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "run", tmp_path / "run"))


def alter_checkpoint(path: Path, factor: float = 1 + 1e-6) -> None:
    """Change the weights, by default a little; the folder verifies all the same."""
    state = checkpoint.load(path)
    for weight in checkpoint.model_weights(state.tensors).values():
        weight *= factor
    shutil.rmtree(path)
    checkpoint.save(path.parent, state, 99)


@pytest.mark.promise("receipts.replay")
def test_a_step_of_every_start_is_equal_and_the_run_stays_as_it_is(place):
    """By default the step after a checkpoint; a later one of the same; after the first stage; from the seed."""
    before = state_of(place / "run")
    first = [row["stage"] for row in rows(place / "run", "train")].index("tune") + 1
    found = {step: replay(place / "run", step) for step in (None, 18, first, 1, 3)}
    for step, receipt in found.items():
        assert receipt.equal, receipt.lines()
        assert step in (None, receipt.step)
        assert len(receipt.micros) > 1
    assert [(one.step, one.start.after, one.num_computed) for one in found.values()] == [
        (17, 16, 1), (18, 16, 2), (first, first - 1, 1), (1, 0, 1), (3, 0, 3),
    ]  # fmt: skip
    assert "best-pretrain" in found[first].start.name
    assert "seed" in found[3].start.name
    assert state_of(place / "run") == before


@pytest.mark.promise("receipts.rows")
def test_the_rows_are_those_that_the_loader_gave_to_training(tmp_path, monkeypatch):
    given: list[list[tuple[list[int], list[int]]]] = []
    take = LOOP.train_step

    def counting(model: object, micros: list, *rest: object, **options: object) -> StepResult:
        given.append([(b.layout.lengths().tolist(), [b.num_targets]) for b in micros])
        result: StepResult = take(model, micros, *rest, **options)
        return result

    monkeypatch.setattr(LOOP, "train_step", counting)
    run(write_toy(tmp_path), tmp_path / "run", "train.max_steps=6", "plan.window=20")
    trained = list(given)
    for step in (2, 6):
        learnt = replay(tmp_path / "run", step).micros
        assert [([r.stop - r.start for r in m], [sum(r.targets for r in m)]) for m in learnt] == trained[step - 1]


@pytest.mark.promise("receipts.rows")
def test_joined_documents_are_named_one_by_one(tmp_path):
    recipe = write_toy(tmp_path, plan={**PLAN, "cross_documents": True}, model={"context": 40}, stages=[])
    run(recipe, tmp_path / "run", "train.max_steps=2")
    receipt = replay(tmp_path / "run", 2)
    row = rows(tmp_path / "run", "train")[1]
    spans = [span for micro in receipt.micros for span in micro]
    assert receipt.equal
    assert sum(span.stop - span.start for span in spans) == row["tokens"]
    assert sum(span.targets for span in spans) == row["targets"]
    assert len({span.where for span in spans}) > row["sequences"]


@pytest.mark.promise("receipts.resume")
def test_steps_on_both_sides_of_a_resume_that_changed_the_rate_are_equal(tmp_path):
    recipe = write_toy(tmp_path, stages=[], optim={"lr": 0.01, "schedule": "cosine"}, checkpoint={"every": 100})
    run(recipe, tmp_path / "run", "train.max_steps=4")
    run(recipe, tmp_path / "run", "train.max_steps=8", resume=True)
    assert events(tmp_path / "run", "resumed")[0]["changed"] == {"train.max_steps": [4, 8]}
    for path in (tmp_path / "run/checkpoints").glob("step-*4"):
        shutil.rmtree(path)
    for step in (3, 6):  # both from the seed; the second goes on with another recipe after step 4
        assert replay(tmp_path / "run", step).equal
    log = tmp_path / "run/log.jsonl"
    kept = log.read_text()
    log.write_text(kept.replace('"changed": {"train.max_steps"', '"changed": {"train.max_steps.x"'))
    with pytest.raises(SourceError, match="not those of its recipe"):
        replay(tmp_path / "run", 3)
    log.write_text(kept)
    # As a version that did not keep the old values writes it:
    log.write_text(log.read_text().replace('"changed"', '"forgotten"'))
    receipt = replay(tmp_path / "run", 3)
    assert not receipt.equal
    assert receipt.differing[0][0] == "lr"
    assert "train.max_steps is 8, was 4" in receipt.why[0]


@pytest.mark.promise("receipts.changed", "receipts.moved")
def test_moved_data_is_taken_from_its_new_place_and_changed_data_refused(tmp_path, unpad):
    run(write_toy(tmp_path), tmp_path / "run", "train.max_steps=2")
    path, moved = tmp_path / "texts.jsonl", tmp_path / "elsewhere/moved.jsonl"
    moved.parent.mkdir()
    path.rename(moved)
    for verb in (("replay", tmp_path / "run"), ("trace", tmp_path / "run", f"{moved}:1")):
        told = unpad(*verb, code=3)
        assert "data.text=NEW" in told.err
        assert str(tmp_path / "run") in told.err
        assert unpad(*verb, f"data.text={moved}").code == 0
        assert unpad(*verb, f"data.text.0.path={moved}").code == 0
        told = unpad(*verb, f"data.text={moved}", "optim.lr=1", code=2)
        assert "optim.lr is not the place of a file" in told.err
    was = hashlib.sha256(moved.read_bytes()).hexdigest()[:12]
    moved.write_text(moved.read_text().replace("第3篇", "第x篇"))
    now = hashlib.sha256(moved.read_bytes()).hexdigest()[:12]
    for verb in (("replay", tmp_path / "run"), ("trace", tmp_path / "run", f"{moved}:1")):
        told = unpad(*verb, f"data.text={moved}", code=9)
        assert f"{path} (sha256 {was} in the run)" in told.err
        assert f"{moved} (sha256 {now} now)" in told.err
    moved.rename(path)
    with pytest.raises(ResumeError, match=rf"the data changed .*texts\.jsonl \(sha256 {was} in the run, {now} now\)"):
        replay(tmp_path / "run")


@pytest.mark.promise("receipts.changed")
def test_altered_weights_and_another_rate_are_found_with_exit_code_16(place, tmp_path, monkeypatch, capsys):
    shell, altered = Shell(monkeypatch, capsys), copied(place, tmp_path)
    alter_checkpoint(altered / "checkpoints/step-00000016")
    outcome = shell("replay", altered, "--json")
    shown = json.loads(outcome.out)
    assert (outcome.code, shown["verdict"], shown["first_differing_step"]) == (REPLAY_DIFFERS, "differs", 17)
    different = [column["name"] for column in shown["columns"] if not column["equal"]]
    assert different[:2] == ["cross_entropy", "nll"]
    assert "a checkpoint or a row of metrics.jsonl was altered" in shown["likely_reasons"][0]
    values = yaml.safe_load((altered / "recipe.yaml").read_text())
    values["optim"]["lr"] *= 1.01
    (altered / "recipe.yaml").write_text(yaml.safe_dump(values))
    outcome = shell("replay", altered, "--step", 1)
    assert outcome.code == REPLAY_DIFFERS
    assert "differs in" in outcome.out
    assert replay(altered, 1).differing[0][0] == "lr"


@pytest.mark.promise("receipts.changed")
def test_a_step_that_fails_is_said_and_nothing_is_written(place, tmp_path):
    """Training would save where a loss is not finite."""
    altered = copied(place, tmp_path)
    alter_checkpoint(altered / "checkpoints/step-00000016", 1e30)
    before = state_of(altered)
    receipt = replay(altered, 17)
    assert not receipt.equal
    assert receipt.failure.endswith("gradient norm nan at step 17, where the run went on")
    assert receipt.micros == []
    assert "failed" in "\n".join(receipt.lines())
    assert state_of(altered) == before


@pytest.mark.promise("receipts.changed")
def test_another_machine_is_named_as_the_reason(place, tmp_path):
    altered = copied(place, tmp_path)
    log = altered / "log.jsonl"
    log.write_text(log.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0"'))
    assert replay(altered, 1).equal
    alter_checkpoint(altered / "checkpoints/step-00000016")
    assert replay(altered).why == [f"torch is {torch.__version__}, was 2.0"]


@pytest.mark.promise("receipts.resume")
def test_a_run_is_replayed_with_its_own_threads(tmp_path, monkeypatch):
    run(write_toy(tmp_path, train={"threads": None}), tmp_path / "run", "train.max_steps=1")
    used, take = list[int](), replaying.repeat_steps

    def noting(*given: Any, **options: Any) -> State:
        used.append(torch.get_num_threads())
        return take(*given, **options)

    monkeypatch.setattr(replaying, "repeat_steps", noting)
    torch.set_num_threads(2)
    assert replay(tmp_path / "run").equal
    assert (used, torch.get_num_threads()) == ([1], 2)


@pytest.mark.promise("receipts.rows")
def test_other_rows_than_recorded_are_the_first_difference(place, tmp_path):
    altered = copied(place, tmp_path)
    path = altered / "metrics.jsonl"
    last = rows(altered, "train")[16]["rows"]
    path.write_text(path.read_text().replace(last, "0" * 16))
    assert replay(altered).differing == [("rows", "0" * 16, last)]


@pytest.mark.promise("receipts.changed")
def test_damaged_checkpoints_are_passed_over_and_missing_ones_said(place, tmp_path):
    altered = copied(place, tmp_path)
    model = altered / "checkpoints/step-00000016/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    receipt = replay(altered, 17)
    assert receipt.equal
    assert "best-pretrain" in receipt.start.name
    assert "step-00000016 is damaged" in receipt.damages[0]
    shutil.rmtree(altered / "checkpoints/best-pretrain")
    with pytest.raises(CheckpointError, match="step-00000016 is damaged"):
        replay(altered, 17)


@pytest.mark.promise("receipts.changed")
def test_steps_without_a_record_and_divided_models_are_refused(place, tmp_path):
    with pytest.raises(RecipeError, match="no record of step 99; its last one is 18"):
        replay(place / "run", 99)
    divided = copied(place, tmp_path)
    values = yaml.safe_load((divided / "recipe.yaml").read_text())
    values["train"]["shard"] = "full"
    (divided / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert replay(divided, 1).equal  # one process, which held the whole model
    log = divided / "log.jsonl"
    log.write_text(log.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ResumeError, match="divided among processes"):
        replay(divided, 1)


@pytest.mark.promise("receipts.replay")
def test_a_skipped_step_is_skipped_again(tmp_path, monkeypatch):
    take = LOOP.train_step

    def failing(*given: object, **options: object) -> StepResult:
        seed = options["share"].seed
        if seed[1] == 1:  # the second step
            given[2].param_groups[0]["lr"] = 0.0
            for parameter in given[0].parameters():
                parameter.register_hook(lambda gradient: gradient * float("nan"))
                break
        result: StepResult = take(*given, **options)
        return result

    monkeypatch.setattr(LOOP, "train_step", failing)
    run(write_toy(tmp_path, train={"on_nonfinite": "skip"}), tmp_path / "run", "train.max_steps=2")
    assert rows(tmp_path / "run", "train")[1]["skipped"]
    assert replay(tmp_path / "run", 2).equal


@pytest.mark.promise("receipts.memory")
def test_steps_that_memory_cut_are_computed_in_the_same_parts(tmp_path, monkeypatch):
    """Memory ends once in step 3, in its second pass; later micro-batches are cut, earlier ones are not."""
    compute, calls = Decoder.losses, list[int]()

    def ends(self: Decoder, batch: RaggedBatch, *given: Any) -> Any:
        calls.append(int(self.training))
        if self.training and sum(calls) == failing:
            raise RuntimeError(NO_MEMORY)
        return compute(self, batch, *given)

    recipe, folder = write_toy(tmp_path, plan=PLAN, stages=[], checkpoint={"every": 5}), tmp_path / "run"
    failing = 0
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "losses", ends)
        run(recipe, tmp_path / "whole", "train.max_steps=2")
        failing, calls[:] = sum(calls) + 2, []
        run(recipe, folder, "train.max_steps=8")
    (event,) = events(folder, "out_of_memory")
    assert event["step"] == 3
    for step, cut in ((2, None), (3, event), (4, event), (6, event)):
        receipt = replay(folder, step)
        assert receipt.equal, receipt.lines()
        assert receipt.to_json()["cut"] == (cut and {"step": 3, "tokens": cut["tokens"]})
    assert f"micro-batches of more than {event['tokens']:,} tokens, as memory ended in step 3" in "\n".join(
        receipt.lines()
    )
    log = folder / "log.jsonl"
    kept = [line for line in log.read_text().splitlines() if '"out_of_memory"' not in line]
    log.write_text("\n".join([*kept, ""]))
    receipt = replay(folder, 4)  # some kernels give parts the same bits
    assert receipt.equal or "in parts, from a step on that its log does not name" in receipt.why[0]
    assert replay(folder, 6).equal, "its checkpoint knows"


@pytest.mark.promise("receipts.memory")
@pytest.mark.parametrize(
    ("processes", "after", "most", "says"),
    [
        (2, 4, 80, "memory ended in step 5, which 2 processes cut each in its own parts"),
        (2, 5, 80, None),  # from a checkpoint of all processes, which agree on the parts by then
        (1, 4, 80, None),
        (2, 4, 40, "computed in parts of at most 40 tokens"),
    ],
)
def test_the_step_in_which_memory_ended_may_differ_for_several_processes(processes, after, most, says):
    recipe: Any = "any"
    found = of_memory(Session(0, recipe, {"processes": processes}), [Cut(5, 80)], after, most, None)
    assert [says in one for one in found] == [True] if says else found == []


@pytest.mark.nightly
@pytest.mark.promise("receipts.replay", "receipts.trace")
@pytest.mark.parametrize("name", ["events", "images", "vqa_hard"])
def test_other_families_are_equal(name, place):
    """Patients with recoveries of a collapsed latent on the way, augmented images, questions with removed tokens; the
    trace of a row has the step."""
    if not (place / "data").exists():
        write_small(place / "data", num=24)
    case = BY_NAME[name]
    overrides = [*case.overrides(place, place / "data"), "train.max_steps=4", "checkpoint.every=3"]
    train(case.recipe, place / name, overrides, console=quiet())
    for step in (3, 4):
        receipt = replay(place / name, step)
        assert receipt.equal, receipt.lines()
        assert receipt.num_computed == (1 if step == 4 else 3)
        row = receipt.micros[-1][0]
        found = trace(place / name, "".join(place_of(row.where)[:2]))
        spans = [(one.step, one.micro, one.start, one.stop, one.targets) for one in found.learnt]
        assert (step, len(receipt.micros), row.start, row.stop, row.targets) in spans
