"""One process uses nothing of torch.distributed; older runs are told what changes in updates of many micro-batches."""

import json

import pytest
import torch.distributed as dist

from tests.helpers.toy import events, quiet, rows, run, write_toy
from unpad.processes.group import joined
from unpad.storage import replace_folder
from unpad.training.loop import train
from unpad.training.progress import UPDATE_RULE

USED = ("init_process_group", "new_group", "all_reduce", "gather", "broadcast", "barrier", "TCPStore")


@pytest.mark.promise("processes.one")
def test_one_process_uses_nothing_of_torch_distributed(tmp_path, monkeypatch):
    def refused(*given: object, **options: object) -> None:
        raise AssertionError("torch.distributed was used")

    for name in USED:
        assert callable(getattr(dist, name))
        monkeypatch.setattr(dist, name, refused)
    with joined() as group:
        train(str(write_toy(tmp_path)), tmp_path / "run", ["train.max_steps=4"], console=quiet(), group=group)
    assert rows(tmp_path / "run", "train")[-1]["step"] == 4
    assert not dist.is_initialized()


def test_a_run_of_an_earlier_version_is_told_that_its_draws_change(tmp_path):
    """Once: from then on its checkpoints have the new rule."""
    recipe, folder = write_toy(tmp_path), tmp_path / "run"
    run(recipe, folder, "train.max_steps=3")
    (newest,) = (folder / "checkpoints").glob("step-*3")
    state = json.loads((newest / "state.json").read_text())
    assert state["values"].pop("update_rule") == UPDATE_RULE
    files = {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "MANIFEST.json"}
    replace_folder(newest, files | {"state.json": json.dumps(state).encode()})
    for last in (4, 5):
        run(recipe, folder, f"train.max_steps={last}", resume=True)
    warned = [entry["message"] for entry in events(folder, "warning") if "random draws" in entry["message"]]
    assert len(warned) == 1
