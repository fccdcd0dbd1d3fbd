"""Checkpoints that several processes write: exact for any number of readers, complete or absent."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from tests.conftest import random_batch
from tests.helpers.faults import at_operation, fail_full, kill, names_in, operations
from tests.helpers.processes import in_child
from tests.helpers.ranks import forbid_pickles, run_ranks
from unpad import storage
from unpad.errors import CheckpointError, DiskError, UnpadError
from unpad.models.adapters import kept_weights
from unpad.models.decoder import Config, Decoder
from unpad.processes.divided import is_divided, whole_tensor
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import OptimSettings
from unpad.run import checkpoint
from unpad.run.checkpoint import State, model_tensors, model_weights, places, put_weights
from unpad.storage import disk
from unpad.training.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from unpad.training.parallel import sharding as module
from unpad.training.parallel.sharding import Sharding

torch.set_num_threads(1)  # a forked child must not wait for threads that did not come along

VALUES = {"stage": "调", "best": 0.1 + 0.2}


def divided(group: Group, seed: int) -> tuple[Sharding, torch.optim.Optimizer]:
    """A model whose 51 rows of embeddings, 26 of feed-forward and 18 of norms divide by neither 2 nor 4."""
    torch.manual_seed(seed)
    model = Decoder(Config(width=18, blocks=1, heads=3, hidden=26, context=64), 51)
    sharding = Sharding(model, random_batch([]), group, torch.device("cpu"))
    return sharding, make_optimizer(model, OptimSettings(lr=1e-2))


def trained(group: Group) -> tuple[Sharding, torch.optim.Optimizer]:
    sharding, optimizer = divided(group, seed=0)
    sharding.model.losses(random_batch([5, 9]))["cross_entropy"][0].backward()
    optimizer.step()
    return sharding, optimizer


def state_of(sharding: Sharding, optimizer: torch.optim.Optimizer, step: int) -> State:
    weights = model_tensors(kept_weights(sharding.model))
    return State(step, weights | optimizer_tensors(sharding.model, optimizer), VALUES)


def save_shards(folder: Path, state: State, keep: int, group: Group) -> None:
    module.save_shards(folder, state, keep, group).finish()


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 of all names and values; collective if they are divided."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + whole_tensor(tensors[name].detach()).numpy().tobytes())
    return found.hexdigest()


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except UnpadError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoint of two processes, whose attempts to write two later ones failed; and what each of them told."""
    folder = tmp_path_factory.mktemp("saved")

    def work(group: Group) -> Any:
        forbid_pickles()
        sharding, optimizer = trained(group)
        first = state_of(sharding, optimizer, 1)
        save_shards(folder / "checkpoints", first, 2, group)
        sums = digest(first.tensors)
        patch = pytest.MonkeyPatch()
        if group.rank == 1:
            patch.setattr(disk, "operation", at_operation(0, fail_full))
        full = error_of(lambda: save_shards(folder / "checkpoints", state_of(sharding, optimizer, 2), 2, group))
        patch.undo()
        local = next(sharding.model.parameters()).to_local()
        if group.rank == 1:
            with torch.no_grad():
                local[0, 0] = torch.nan
        wrong = error_of(lambda: save_shards(folder / "checkpoints", state_of(sharding, optimizer, 3), 2, group))
        return [sums, full, wrong]

    return folder / "checkpoints", run_ranks(folder / "ranks", 2, work)


def test_a_fault_in_one_process_is_an_error_in_all_and_leaves_nothing_behind(saved):
    folder, told = saved
    for _, full, wrong in told:
        assert full.startswith("DiskError: No space left on device")
        assert wrong.startswith("NonFiniteError: the parameter embed.weight holds NaN")
    assert names_in(folder) == ["step-00000001"]


def test_files_are_plain_safetensors_and_json(saved):
    path = saved[0] / "step-00000001"
    shards = [f"{part}-0000{number}-of-00002.safetensors" for part in ("model", "optim") for number in (1, 2)]
    assert names_in(path) == ["MANIFEST.json", *shards, "state.json"]
    storage.read_folder(path)
    first, second = (tensors_from_bytes((path / shard).read_bytes()) for shard in shards[:2])
    assert [len(part["embed.weight"]) for part in (first, second)] == [26, 25]


def test_one_process_reads_what_two_wrote_to_the_bit(saved):
    state, messages = checkpoint.load_newest(saved[0])
    assert messages == []
    assert (state.step, state.values) == (1, VALUES)
    assert {digest(state.tensors)} == {told[0] for told in saved[1]}
    weights = checkpoint.load(saved[0] / "step-00000001", checkpoint.WEIGHTS).tensors
    assert weights.keys() == {name for name in state.tensors if name.startswith("model.")}


@pytest.mark.promise("processes.shard")
def test_three_processes_read_what_two_wrote_to_the_bit(saved, tmp_path):
    def work(group: Group) -> str:
        forbid_pickles()
        sharding, optimizer = divided(group, seed=1)
        held = state_of(sharding, optimizer, 0).tensors
        own = {name: one for name, one in held.items() if name.startswith(checkpoint.PREFIX)}
        moments = {f"optim.{name.removeprefix(checkpoint.PREFIX)}.exp_avg": one for name, one in own.items()}
        state = checkpoint.load(saved[0] / "step-00000001", held=(own | moments).get)
        assert {name for name, one in state.tensors.items() if is_divided(one)} == {*own, *moments}
        wrong = {"model.embed.weight": own["model.norm.weight"]}
        unlike = error_of(lambda: checkpoint.load(saved[0] / "step-00000001", held=wrong.get))
        assert "model.embed.weight has the shape (51, 18) there, (18,) in the model" in unlike
        put_weights(sharding.model, model_weights(state.tensors), "")
        load_optimizer_tensors(sharding.model, optimizer, state.tensors)
        now = state_of(sharding, optimizer, 1).tensors
        assert all(is_divided(tensor) for name, tensor in now.items() if not name.endswith(".step"))
        return digest(now)

    assert set(run_ranks(tmp_path / "three", 3, work)) == {saved[1][0][0]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reader_of_torch_opens_the_folder(saved):
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as load_by_torch

    path = saved[0] / "step-00000001"
    expected = checkpoint.load(path).tensors
    found: dict[str, Any] = {
        name.removeprefix(checkpoint.PREFIX): torch.zeros_like(one) for name, one in expected.items()
    }
    load_by_torch(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(found[name.removeprefix(checkpoint.PREFIX)], one) for name, one in expected.items())


# --------------------------------------------------------------------------- one process, as a group of one


def small(step: int) -> State:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    return State(step, {"model.w": weight, "optim.w.step": torch.tensor(1.0)}, {"step": step})


def test_a_writer_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch):
    save_shards(tmp_path / "counted", small(1), 2, ALONE)
    steps = operations(lambda: save_shards(tmp_path / "counted", small(2), 2, ALONE), monkeypatch)
    assert {"mkdir", "write", "fsync", "rename"} <= set(steps)
    for number in range(len(steps)):
        folder = tmp_path / str(number)
        save_shards(folder, small(1), 2, ALONE)
        monkeypatch.setattr(disk, "operation", at_operation(number, kill))
        assert in_child(lambda folder=folder: save_shards(folder, small(2), 2, ALONE)) == -9
        monkeypatch.undo()
        found = checkpoint.load_newest(folder)
        assert found[0].step in (1, 2)
        assert torch.equal(found[0].tensors["model.w"], small(found[0].step).tensors["model.w"])
        save_shards(folder, small(3), 2, ALONE)
        assert all(name.startswith("step-") for name in names_in(folder)), "leftovers are cleaned"


def test_the_oldest_checkpoints_are_deleted(tmp_path):
    for step in (1, 2, 3):
        save_shards(tmp_path, small(step), 2, ALONE)
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]


def shards(
    *files: tuple[dict[str, Tensor], dict[str, int]], num_shards: int = 2, header: bool = True
) -> dict[str, Any]:
    content = {
        f"{part}-{number:05d}-of-{num_shards:05d}.safetensors": tensors_to_bytes(
            tensors, places(tensors, rows) if header else None
        )
        for part in ("model", "optim")
        for number, (tensors, rows) in enumerate(files, start=1)
    }
    state = {"format": 2, "step": 1, "shards": num_shards, "values": {}}
    return {**content, "state.json": json.dumps(state).encode()}


TWO, THREE = torch.ones(2, 3), torch.ones(3, 3)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a file is missing": (shards(({"w": TWO}, {})), "model-00002-of-00002.safetensors is missing"),
    "rows are missing": (shards(({"w": TWO}, {}), ({"w": THREE}, {"w": 3})), "row 2 of model.w is in no file"),
    "rows are twice there": (shards(({"w": TWO}, {}), ({"w": THREE}, {"w": 1})), "row 2 of model.w is in no file"),
    "unlike shapes": (shards(({"w": TWO}, {}), ({"w": torch.ones(3, 2)}, {"w": 2})), "unlike types or shapes"),
    "a number twice": (shards(({"w": TWO[0, 0]}, {}), ({"w": TWO[0, 0]}, {})), "of model.w is in no file, or rows"),
    "no places": (shards(({"w": TWO}, {}), ({"w": THREE}, {"w": 2}), header=False), "does not say which rows of w"),
    "no number of shards": (shards(num_shards=0), "no valid number of shards"),
}


@pytest.mark.parametrize(("files", "said"), BAD.values(), ids=BAD.keys())
def test_a_folder_without_the_whole_tensors_is_refused(tmp_path, files, said):
    files.setdefault("model.safetensors", b"")
    files.setdefault("optim.safetensors", b"")
    storage.write_folder(tmp_path / "bad", files)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path / "bad")


def test_a_full_disk_is_an_error_of_one_process_too(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "operation", at_operation(1, fail_full))
    with pytest.raises(DiskError, match="No space left"):
        save_shards(tmp_path, small(1), 2, ALONE)
    monkeypatch.undo()
    assert names_in(tmp_path) == []
