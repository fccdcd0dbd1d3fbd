"""The steps of a row, from plans alone, are those in which the loader gave it to training; or the reason is told."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.toy import LOOP, quiet, rows, run, write_toy
from unpad.batching.plan import Micro
from unpad.data.family import Data
from unpad.errors import RecipeError
from unpad.examples.drawn import draw_patients
from unpad.receipts.trace import Trace, open_history, trace_row
from unpad.training.loop import train

pytestmark = pytest.mark.slow

Given = list[list[tuple[Data, Micro]]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Micro-batches of every step, as the loader was asked for them."""
    steps: Given = []
    take: Callable[..., None] = LOOP._one_step

    def noting(stage: Any, loaded: Any) -> None:
        steps.append([(stage.run.setup.data, micro) for micro in loaded.planned])
        take(stage, loaded)

    monkeypatch.setattr(LOOP, "_one_step", noting)
    return steps


def recount(steps: Given, named: str) -> list[tuple[int, int, int, int]]:
    """(step, micro-batch, start, stop) in what was loaded of the row whose place ends so."""
    return [
        (step, number, start, stop)
        for step, micros in enumerate(steps, start=1)
        for number, (data, micro) in enumerate(micros, start=1)
        for seq_id, start, stop in zip(micro.seq_ids.tolist(), micro.starts.tolist(), micro.stops.tolist(), strict=True)
        if data.where(seq_id).endswith(named)
    ]


def places(found: Trace) -> list[tuple[int, int, int, int]]:
    return [(one.step, one.micro, one.start, one.stop) for one in found.learnt]


@pytest.mark.promise("receipts.trace")
def test_rows_of_every_kind_of_text_are_those_of_the_loader(tmp_path, given):
    """Split documents and drawn ones, in windows; a stopped run of two stages."""
    recipe = write_toy(
        tmp_path,
        data={"text": [{"path": str(tmp_path / "texts.jsonl"), "weight": 1.5}]},
        plan={"tokens_per_step": 200, "tokens_per_micro": 90, "max_tokens": 20, "stride": 15, "window": 20},
    )
    run(recipe, tmp_path / "run", "train.max_steps=24")
    history = open_history(tmp_path / "run")
    texts = [trace_row(history, f"{tmp_path}/texts.jsonl:{line}") for line in range(1, 61)]
    for line, found in enumerate(texts, start=1):
        assert places(found) == recount(given, f"texts.jsonl:{line}"), line
    assert sum(len({one.step for one in found.learnt}) for found in texts) > 60
    whys = " ".join(why for found in texts for why in found.why)
    assert "did not draw it" not in whys  # 1.5 draws each once at least
    assert "stage tune does not use data.text" in whys
    assert "it is held out: training never reads it" in whys
    chats = [trace_row(history, f"chats.jsonl:{line}") for line in range(1, 41)]
    for line, found in enumerate(chats, start=1):
        assert places(found) == recount(given, f"chats.jsonl:{line}"), line
    assert any("in a later step than the run took" in why for found in chats for why in found.why)
    targets = sum(one.targets for found in (*texts, *chats) for one in found.learnt)
    assert targets == sum(row["targets"] for row in rows(tmp_path / "run", "train"))


@pytest.mark.promise("receipts.never-learnt")
def test_every_reason_for_not_learning_from_a_row_is_told(tmp_path):
    recipe = write_toy(
        tmp_path,
        data={
            "text": [{"path": str(tmp_path / "texts.jsonl"), "weight": 0.3}],
            "on_bad_row": "quarantine",
            "max_bad": 0.5,
        },
        plan={"tokens_per_step": 200, "max_tokens": 40, "overflow": "drop", "drop_last": True},
        stages=[],
    )
    path = tmp_path / "texts.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = '{"text": ""}'
    lines[5] = json.dumps({"text": "很长" * 50, "split": "train"}, ensure_ascii=False)
    lines[6] = json.dumps({"text": "测试的一篇", "split": "test"}, ensure_ascii=False)
    path.write_text("\n".join(lines) + "\n")
    run(recipe, tmp_path / "run", "train.max_epochs=4")
    history = open_history(tmp_path / "run")
    found = {line: trace_row(history, f"{path}:{line}") for line in range(1, 61)}
    whys = {line: list(one.why) for line, one in found.items()}
    assert found[5].row.remark.startswith("the row cannot be used and was left out: E_EMPTY")
    assert any("longer than 40 (plan.overflow=drop)" in why for why in whys[6]) or "did not draw" in whys[6][0]
    assert whys[7] == ["`unpad eval` alone reads it"]
    said = " ".join(why for one in whys.values() for why in one)
    for reason in ("did not draw it, as its source has the weight 0.3", "held out", "plan.drop_last"):
        assert reason in said
    for one in found.values():
        assert one.learnt or one.why or one.row.remark
    with pytest.raises(RecipeError, match="no row begins there"):
        trace_row(history, f"{path}:61")
    with pytest.raises(RecipeError, match="no rows of the file other"):
        trace_row(history, "other.jsonl:1")


@pytest.mark.promise("receipts.trace")
def test_patients_are_found_by_event_label_and_id_which_is_not_repeated(tmp_path, unpad):
    for name, table in zip(("events", "patients"), draw_patients(30, np.random.default_rng(5)), strict=True):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    model = [f"model.{size}" for size in ("width=16", "blocks=1", "heads=2", "hidden=24", "levels=1", "inducing=2")]
    data = [f"data.events.0.path={tmp_path}/events.parquet", f"data.events.1.path={tmp_path}/patients.parquet"]
    short = [
        "train.max_steps=3", "model.latent=4", "collapse.policy=off", f"events.labels.path={tmp_path}/patients.parquet",
    ]  # fmt: skip
    train("events", tmp_path / "run", [*model, *data, *short, "train.threads=1", "precision=fp32"], console=quiet())
    events, patients = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("events", "patients"))
    owner, ids = events.column(0).to_pylist(), patients.column(0).to_pylist()
    history = open_history(tmp_path / "run")
    found = {person: trace_row(history, str(person)) for person in ids[:12]}
    mine = [row for row, person in enumerate(owner, start=1) if person in found]
    for row in mine[:: len(mine) // 12]:
        event = trace_row(history, f"events.parquet:{row}")
        whose = found[owner[row - 1]]
        assert event.row.remark.startswith(("in the history of ", "no history has it", "it is of no patient"))
        if event.row.parts:
            assert event.learnt == whose.learnt
            assert event.part == whose.part
    number = next(number for number, person in enumerate(ids) if found[person].learnt)
    assert trace_row(history, f"patients.parquet:{number + 1}").learnt == found[ids[number]].learnt
    secret = "no-such-patient-4711"
    outcome = unpad("trace", tmp_path / "run", secret, code=2)
    assert secret not in outcome.out + outcome.err


@pytest.mark.promise("receipts.trace")
def test_a_row_is_traced_without_a_model_and_without_a_change(tmp_path, unpad):
    run(write_toy(tmp_path), tmp_path / "run", "train.max_steps=2")
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    outcome = unpad("trace", tmp_path / "run", "texts.jsonl:2", "--json", code=0)
    assert json.loads(outcome.out)["steps"] == 2
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
