"""Models by their names on a hub, here a server on this machine: brought once, resumed, and read without a network."""

import errno
import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from tests.helpers.hub_server import COMMIT, HubServer, hub_server
from tests.interchange.theirs import tiny_folder
from unpad.cli.options import check_recipe
from unpad.errors import CheckpointError, DiskError, Interrupted, RecipeError, SourceError
from unpad.inference.loaded import load
from unpad.interchange import folder as folders
from unpad.interchange.families import FAMILIES
from unpad.interchange.folder import INDEX, load_model
from unpad.interchange.hub import Snapshot
from unpad.interchange.origin import open_recipe
from unpad.interchange.runs import import_folder
from unpad.run.compare import describe_runs
from unpad.training.loop import train

hub_library = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a repository: a tiny Llama in several weight files, code, and pickled weights besides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "SHARD_BYTES", 20_000)
        folder = tiny_folder(tmp_path_factory.mktemp("made") / "llama")
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "MANIFEST.json"}
    assert INDEX in found
    others = {"README.md": b"#", "modeling_mine.py": b"raise SystemExit(99)", "pytorch_model.bin": b"pickled"}
    return {**found, **others, "consolidated.safetensors": b"of another format", "onnx/model.onnx": b"x"}


@pytest.fixture(scope="module")
def served(contents: dict[str, bytes]) -> Iterator[HubServer]:
    with hub_server() as hub:
        hub.repositories["owner/tiny"] = contents
        hub.repositories["owner/pickled"] = {"config.json": contents["config.json"], "pytorch_model.bin": b""}
        hub.repositories["owner/other"] = {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b""}
        hub.repositories["owner/empty"] = {"README.md": b"#"}
        hub.gated.add("owner/gated")
        yield hub


@pytest.fixture
def hub(served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.address)
    template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    served.asked.clear()
    served.breaks.clear()
    return served


@pytest.mark.promise("models.hub")
def test_a_name_is_imported_with_its_commit_and_no_other_files_come(hub, contents, monkeypatch):
    lines = import_folder("owner/tiny", Path("runs/tiny"))
    assert lines[0] == f"owner/tiny at commit {COMMIT}"
    expected = [name for name in contents if name.endswith((".json", ".safetensors")) and "consolidated" not in name]
    assert sorted(hub.got()) == sorted(expected)
    assert hub.got()[0] == "config.json"
    said = json.loads(Path("runs/tiny/run.json").read_text())
    assert (said["repository"], said["commit"]) == ("owner/tiny", COMMIT)
    assert said["made_by"] == f"unpad import owner/tiny@{COMMIT}"
    assert " imported " in describe_runs()[1]
    assert load("tiny").generate(["what"], max_new_tokens=2)
    hub.asked.clear()
    import_folder("owner/tiny@v1", Path("runs/again"))
    assert hub.got() == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert import_folder("owner/tiny", Path("runs/offline"))[0] == lines[0]


@pytest.mark.promise("models.hub")
@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (KeyboardInterrupt(), Interrupted, "was stopped"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskError, "No space left"),
        (OSError("Consistency check failed: file should be of size 9"), CheckpointError, "did not come whole"),
    ],
)
def test_a_command_that_was_ended_goes_on_with_the_file_it_was_at(fault, kind, said, hub, monkeypatch):
    brings = hub_library.HfApi.hf_hub_download

    def ends(api: object, name: str, file: str, **given: str) -> str:
        if file.startswith("model-00002"):
            raise fault
        return str(brings(api, name, file, **given))

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", ends)
    with pytest.raises(kind, match=said) as caught:
        import_folder("owner/tiny", Path("runs/tiny"))
    assert "same command again" in caught.value.fix
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", brings)
    hub.asked.clear()
    import_folder("owner/tiny", Path("runs/tiny"))
    assert all(name.startswith("model-0000") and not name.startswith("model-00001") for name in hub.got())


@pytest.mark.promise("models.hub")
@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("owner/none", "no file or folder", "correct the name"),
        ("owner/tiny@v9", 'no revision "v9"', "follows the @"),
        ("owner/gated", "owner/gated is gated", "HF_TOKEN"),
        ("owner/pickled", "no safetensors; pickled weights are not read", "convert"),
        ("owner/other", "mamba", ""),
        ("owner/empty", "holds no config.json", "of transformers"),
    ],
)
def test_what_a_hub_does_not_give_is_said(name, what, fix, hub):
    with pytest.raises(CheckpointError, match=what) as caught:
        import_folder(name, Path("runs/x"))
    assert fix in caught.value.fix
    assert set(hub.got()) <= {"config.json"}
    assert not Path("runs/x").exists()


@pytest.mark.promise("models.hub")
def test_without_a_network_and_a_cache_the_folder_is_asked_for(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match="the hub cannot be reached") as caught:
        Snapshot("owner/tiny", SourceError)
    assert caught.value.fix.startswith("name the folder")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RecipeError, match="not installed") as caught_too:
        import_folder("owner/tiny", Path("runs/x"))
    assert "pip install 'unpad[hf]'" in caught_too.value.fix


@pytest.mark.promise("models.hub")
def test_a_recipe_may_name_a_model_of_a_hub_and_a_resume_asks_no_hub(hub):
    Path("mine.yaml").write_text("model: {from: owner/tiny}\n")
    first = open_recipe("mine.yaml")
    assert Path(first.train.init_from).parts[-2:] == ("snapshots", COMMIT)
    hub.asked.clear()
    assert open_recipe("mine.yaml", known=first) == first
    assert hub.asked == []


@pytest.mark.promise("proof.names")
def test_train_init_from_names_a_model_of_a_hub_as_well(hub):
    text = "Alpha beta gamma. " * 20
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i in range(30)))
    recipe = "model: {from: owner/tiny}\ndata: {text: texts.jsonl, holdout: 0.1}\ntrain: {max_steps: 1, threads: 1}\n"
    Path("mine.yaml").write_text(recipe)
    model = open_recipe("mine.yaml").model
    Path("mine.yaml").write_text(yaml.safe_dump({**yaml.safe_load(recipe), "model": model}))
    hub.asked.clear()
    given = ["train.init_from=owner/tiny"]
    first = open_recipe("mine.yaml", given)
    assert Path(first.train.init_from).parts[-2:] == ("snapshots", COMMIT)
    assert open_recipe("mine.yaml", given, known=first) == first
    hub.asked.clear()
    check_recipe("mine.yaml", given)
    assert hub.asked == []
    run = train("mine.yaml", Path("runs/mine"), [*given, "optim.lr=1e-30"], console=Console(file=StringIO()))
    started = load(str(run.folder)).model.state_dict()
    snapshot = Path(first.train.init_from)
    theirs = load_model(snapshot, FAMILIES["llama"], json.loads((snapshot / "config.json").read_text()))
    assert all(torch.equal(started[name], value) for name, value in theirs.state_dict().items())
