"""A checkpoint is exact, complete or absent, and its damage is seen."""

import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.faults import at_operation, fail_full, kill, names_in, operations
from tests.helpers.processes import in_child
from unpad import storage
from unpad.errors import CheckpointError, DiskError, NonFiniteError, OutOfMemoryError
from unpad.run import checkpoint
from unpad.run.checkpoint import State, load, load_newest, save, save_named
from unpad.storage import disk, folders

torch.set_num_threads(1)  # a forked child must not wait for threads that did not come along


def state(step: int) -> State:
    """A state in which every byte depends on the step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(4, 6, generator=generator)
    return State(
        step=step,
        tensors={
            "model.embed.weight": weight,
            "model.head.weight": weight,  # tied
            "model.half": torch.randn(5, generator=generator).bfloat16(),
            "model.exact": torch.randn(3, dtype=torch.float64, generator=generator),
            "model.transposed": torch.randn(2, 3, generator=generator).T,
            "model.scalar": torch.tensor(0.5 + step),
            "model.none": torch.zeros(0, 3),
            "optim.embed.weight.exp_avg": torch.randn(4, 6, generator=generator),
            "optim.embed.weight.step": torch.tensor(step, dtype=torch.int64),
            "rng.cpu": generator.get_state(),
        },
        values={"stage": "调", "epoch": 2, "plan": {"position": step}, "best": 0.1 + 0.2, "rng": [2**127 + step]},
    )


def assert_same(found: State, expected: State) -> None:
    assert (found.step, found.values) == (expected.step, expected.values)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name


def newest(folder: Path) -> tuple[State, list[str]]:
    found = load_newest(folder)
    assert found is not None
    return found


# --------------------------------------------------------------------------- round trip


def test_a_checkpoint_reads_back_bit_exact(tmp_path):
    path = save(tmp_path / "checkpoints", state(120), keep=2)
    assert path == tmp_path / "checkpoints/step-00000120"
    assert names_in(path) == ["MANIFEST.json", "model.safetensors", "optim.safetensors", "state.json"]
    found, messages = newest(tmp_path / "checkpoints")
    assert messages == []
    assert_same(found, state(120))
    found.tensors["model.embed.weight"].add_(1)  # one's own memory, even where weights were tied
    assert torch.equal(found.tensors["model.head.weight"], state(120).tensors["model.head.weight"])


def test_equal_states_give_equal_files(tmp_path):
    first, second = save(tmp_path / "a", state(7), keep=2), save(tmp_path / "b", state(7), keep=2)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


def test_the_model_alone_loads_without_the_optimizer(tmp_path):
    path = save_named(tmp_path, "best", state(5))
    (path / "optim.safetensors").unlink()
    expected = state(5)
    expected.tensors = {name: tensor for name, tensor in expected.tensors.items() if name.startswith("model.")}
    assert_same(load(path, names=["model.*"]), expected)
    assert set(load(path, names=["model.half"]).tensors) == {"model.half"}
    with pytest.raises(CheckpointError, match=r"optim\.safetensors is missing"):
        load(path)


def test_a_copied_checkpoint_is_valid(tmp_path):
    path = save(tmp_path / "a", state(5), keep=2)
    shutil.copytree(path, tmp_path / "有 空格" / path.name, copy_function=shutil.copyfile)
    assert_same(newest(tmp_path / "有 空格")[0], state(5))


def test_no_checkpoint_at_all_is_none_and_not_an_error(tmp_path):
    assert load_newest(tmp_path / "missing") is None
    (tmp_path / "notes").mkdir()
    assert load_newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        load(tmp_path / "best")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_parameter_is_never_saved(tmp_path, value):
    save(tmp_path, state(1), keep=2)
    bad = state(2)
    bad.tensors["model.half"] = bad.tensors["model.half"].clone()
    bad.tensors["model.half"][3] = value
    with pytest.raises(NonFiniteError, match="the parameter half"):
        save(tmp_path, bad, keep=2)
    with pytest.raises(NonFiniteError):
        save_named(tmp_path, "best", bad)
    bad = state(2)
    bad.values["best"] = value
    with pytest.raises(NonFiniteError):
        save(tmp_path, bad, keep=2)
    assert names_in(tmp_path) == ["step-00000001"]


# --------------------------------------------------------------------------- which are kept


@pytest.mark.promise("run.checkpoints")
def test_the_newest_are_kept_by_number_whatever_their_times(tmp_path):
    for number, step in enumerate([8, 9, 10, 11, 99_998, 99_999, 100_000, 99_999_999, 100_000_000]):
        os.utime(save(tmp_path, state(step), keep=2), (10**9 - number, 10**9 - number))
        assert newest(tmp_path)[0].step == step
    assert names_in(tmp_path) == ["step-100000000", "step-99999999"]


@pytest.mark.promise("run.checkpoints")
def test_the_best_checkpoint_is_never_deleted(tmp_path):
    save_named(tmp_path, "best", state(1))
    for step in range(1, 6):
        save(tmp_path, state(step), keep=2)
    assert names_in(tmp_path) == ["best", "step-00000004", "step-00000005"]


def test_a_run_that_fell_back_keeps_what_it_writes(tmp_path):
    for step in (100, 110, 120):
        save(tmp_path, state(step), keep=2)
    (tmp_path / "step-00000120/model.safetensors").write_bytes(b"")
    (tmp_path / "step-00000110/model.safetensors").write_bytes(b"")
    save(tmp_path, state(105), keep=2)
    found, messages = newest(tmp_path)
    assert found.step == 105
    assert len(messages) == 2
    save(tmp_path, state(120), keep=2)  # in place of the damaged one
    assert_same(newest(tmp_path)[0], state(120))
    assert newest(tmp_path)[1] == []
    assert names_in(tmp_path) == ["step-00000110", "step-00000120"]


def test_a_checkpoint_whose_replacement_was_cut_short_counts_and_goes_in_turn(tmp_path):
    save(tmp_path, state(1), keep=2)
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001")
    assert_same(newest(tmp_path)[0], state(1))
    save(tmp_path, state(2), keep=2)
    assert names_in(tmp_path) == [".old-step-00000001", "step-00000002"]
    save(tmp_path, state(3), keep=2)
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]


# --------------------------------------------------------------------------- damage


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with checkpoints 100 and 120, and the path of the newer."""
    save(tmp_path, state(100), keep=2)
    return tmp_path, save(tmp_path, state(120), keep=2)


def assert_falls_back(folder: Path, *words: str) -> None:
    found, messages = newest(folder)
    assert_same(found, state(100))
    assert len(messages) == 1
    assert messages[0].startswith("checkpoint step-00000120 is damaged: ")
    assert messages[0].endswith("; using step-00000100")
    assert all(word in messages[0] for word in words), messages


def test_the_message_names_file_and_fault(two):
    folder, path = two
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert newest(folder)[1] == [
        "checkpoint step-00000120 is damaged: model.safetensors sha256 mismatch; using step-00000100"
    ]


def test_every_shortened_or_lengthened_file_is_found(two):
    folder, path = two
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for size in sorted({0, 1, len(data) - 1, *(len(data) * part // 16 for part in range(16))}):
            file.write_bytes(data[:size])
            assert_falls_back(folder, file.name)
        if file.name != "MANIFEST.json":
            file.write_bytes(data + b"\0")
            assert_falls_back(folder, file.name, f"has size {len(data) + 1}, expected {len(data)}")
        file.unlink()
        assert_falls_back(folder, f"{file.name} is missing")
        file.write_bytes(data)
    assert_same(newest(folder)[0], state(120))


def test_every_flipped_bit_is_found(two):
    folder, path = two
    chance = random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(200):
        file = chance.choice(files)
        data = bytearray(good := file.read_bytes())
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        assert_falls_back(folder)
        file.write_bytes(good)
    assert_same(newest(folder)[0], state(120))


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"])
def test_files_of_another_checkpoint_are_found(two, name):
    folder, path = two
    shutil.copyfile(folder / "step-00000100" / name, path / name)
    assert_falls_back(folder)


def test_swapped_files_and_swapped_folders_are_found(two):
    folder, path = two
    (path / "model.safetensors").rename(path / "swap")
    (path / "optim.safetensors").rename(path / "model.safetensors")
    (path / "swap").rename(path / "optim.safetensors")
    assert_falls_back(folder)
    shutil.rmtree(path)
    shutil.copytree(folder / "step-00000100", path)
    assert_falls_back(folder, "it holds step 100")


def test_when_all_are_damaged_each_is_named(two):
    folder, path = two
    (path / "state.json").unlink()
    (folder / "step-00000100/MANIFEST.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        load_newest(folder)
    assert caught.value.exit_code == 4
    assert "step-00000120 is damaged: state.json is missing" in caught.value.what
    assert "step-00000100 is damaged: MANIFEST.json is not usable JSON" in caught.value.what


# --------------------------------------------------------------------------- hostile folders


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_planted_pickle_is_never_read(tmp_path):
    marker = tmp_path / "executed"
    payload = pickle.dumps(Bomb(marker))
    path = save_named(tmp_path / "run", "best", state(1))
    for name in (".metadata", "model.pt", "pytorch_model.bin", "state.pkl", "__init__.py"):
        (path / name).write_bytes(payload)
    assert_same(load(path), state(1))
    for name in ("model.safetensors", "optim.safetensors", "state.json"):
        storage.write_folder(tmp_path / f"bad-{name}", {**storage.read_folder(path), name: payload})
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / f"bad-{name}")
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": 1, "step": 1}',
        '{"format": 1, "step": -1, "values": {}}',
        '{"format": 1, "step": true, "values": {}}',
        '{"format": 1, "step": 1' + "0" * 30 + ', "values": {}}',
        '{"format": 1, "step": ' + "9" * 5000 + ', "values": {}}',
        '{"format": 1, "step": 1, "values": {"a": NaN}}',
        '{"format": 1, "step": 1, "values": ' + '{"a":' * 100_000,
        '{"format": 2, "step": 1, "values": {}}',
    ],
    ids=range(10),
)
def test_a_hostile_state_is_refused(tmp_path, text):
    path = save(tmp_path / "good", state(1), keep=2)
    storage.write_folder(tmp_path / "bad", {**storage.read_folder(path), "state.json": text.encode()})
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load(tmp_path / "bad")


def hostile_tensors() -> list[bytes]:
    """Headers that lie, and 300 random changes to a good file."""
    good = checkpoint.tensor_files(state(1))["model.safetensors"]

    def file(header: object, data: bytes = b"") -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def one(dtype: str, shape: list[int], ends: list[int]) -> dict[str, object]:
        return {"a": {"dtype": dtype, "shape": shape, "data_offsets": ends}}

    files = [
        b"",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        file(one("F32", [2**40], [0, 4]), b"0000"),
        file(one("F32", [2**62, 2**62], [0, 4]), b"0000"),
        file(one("F32", [0, 2**62], [0, 0])),
        file(one("F32", [0, 2**62, 2**62], [0, 0])),
        file(one("F32", [1], [0, 8]), b"00000000"),
        file(one("X99", [1], [0, 4]), b"0000"),
        file(one("F8_E8M0", [4], [0, 4]), b"0000"),
        file(one("F4", [8], [0, 4]), b"0000"),
        file(one("F32", [-1], [0, 4]), b"0000"),
    ]
    chance = random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 900))] = chance.choice(b'0123456789[]{},:"\\x\0\xff')
        files.append(bytes(data))
    return files


def test_hostile_tensors_are_refused_or_harmless(tmp_path):
    files = storage.read_folder(save(tmp_path / "good", state(1), keep=2))
    refused = 0
    for number, data in enumerate(hostile_tensors()):
        bad = tmp_path / str(number)
        bad.mkdir()
        content = {**files, "model.safetensors": data}
        entries = {name: folders._entry(part) for name, part in content.items()}
        for name, part in {**content, "MANIFEST.json": folders._manifest(entries)}.items():
            (bad / name).write_bytes(part)
        try:
            load(bad)
        except CheckpointError as error:
            assert "model.safetensors is not usable" in error.what  # noqa: PT017
            refused += 1
    assert refused > 100


# --------------------------------------------------------------------------- kills and full disks


def folder_with_two(folder: Path) -> Path:
    for step in (1, 2):
        save(folder, state(step), keep=2)
        save_named(folder, "best", state(step))
    return folder


SAVES: dict[str, Callable[[Path], Path]] = {
    "next": lambda folder: save(folder, state(3), keep=2),
    "again": lambda folder: save(folder, State(2, state(3).tensors, {}), keep=2),
    "best": lambda folder: save_named(folder, "best", state(3)),
}


def assert_old_or_new(folder: Path, kind: str) -> bool:
    """Check that what loads is the old or the new checkpoint to the bit; tell whether it is the new one."""
    expected_best, expected = state(2), state(2)
    found, messages = newest(folder)
    best = load(folder / "best")
    assert messages == []
    new = {"next": found.step == 3, "again": found.values == {}, "best": best.step == 3}[kind]
    if new:
        expected = {"next": state(3), "again": State(2, state(3).tensors, {}), "best": state(2)}[kind]
        expected_best = state(3) if kind == "best" else state(2)
    assert_same(found, expected)
    assert_same(best, expected_best)
    return new


@pytest.mark.slow
@pytest.mark.promise("run.checkpoints")
@pytest.mark.parametrize("kind", SAVES)
def test_a_kill_at_every_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch, kind):
    count = len(operations(lambda: SAVES[kind](folder_with_two(tmp_path / "count")), monkeypatch))
    base = len(operations(lambda: folder_with_two(tmp_path / "base"), monkeypatch))
    outcomes = []
    for number in range(count - base):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "base", folder)

        def killed(number: int = number, folder: Path = folder) -> None:
            disk.operation = at_operation(number, kill)
            SAVES[kind](folder)

        assert in_child(killed) == -signal.SIGKILL
        outcomes.append(assert_old_or_new(folder, kind))
        SAVES[kind](folder)
        assert assert_old_or_new(folder, kind)
        assert not [name for name in names_in(folder) if name.startswith((".tmp-", ".old-"))]
        shutil.rmtree(folder)
    assert outcomes == sorted(outcomes)
    assert {False, True} == set(outcomes)


@pytest.mark.parametrize("kind", SAVES)
def test_a_full_disk_at_every_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch, kind):
    folder_with_two(tmp_path / "base")
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "base", folder)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "operation", at_operation(number, fail_full))
            try:
                SAVES[kind](folder)
            except DiskError as error:
                assert "No space left on device" in error.what  # noqa: PT017
            else:
                break
        assert_old_or_new(folder, kind)
        assert not [name for name in names_in(folder) if name.startswith(".tmp-")]
    assert number > 10


def test_a_file_size_limit_is_exit_code_6_and_spares_the_old(tmp_path):
    folder_with_two(tmp_path / "run")
    before = names_in(tmp_path / "run")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        for kind in SAVES:
            with pytest.raises(DiskError, match=r"File too large: needs [\d,]+ bytes; [\d,]+ are free, but") as caught:
                SAVES[kind](tmp_path / "run")
            assert caught.value.exit_code == 6

    assert in_child(limited) == 0
    assert not assert_old_or_new(tmp_path / "run", "next")
    assert names_in(tmp_path / "run") == before


def test_a_disk_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    folder_with_two(tmp_path / "run")
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)

    def refused() -> None:
        with pytest.raises(DiskError, match=r"needs [\d,]+ bytes, 1,000 are free"):
            SAVES["next"](tmp_path / "run")

    assert operations(refused, monkeypatch) == ["fsync"]  # of the folder's name: nothing is written


def test_a_reader_beside_a_writer_always_finds_a_whole_best(tmp_path):
    save_named(tmp_path, "best", state(0))

    def write() -> None:
        for step in range(1, 41):
            save_named(tmp_path, "best", State(step, state(0).tensors, {"step": step}))

    pid = os.fork()
    if pid == 0:
        write()
        os._exit(0)
    steps = []
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        found = load(tmp_path / "best")
        assert found.values.get("step", 0) == found.step
        steps.append(found.step)
    assert load(tmp_path / "best").step == 40
    assert steps == sorted(steps)
    assert len(steps) > 5


def test_the_memory_of_a_copy_is_asked_for_before_anything_is_copied(tmp_path, monkeypatch):
    size = sum(tensor.numel() * tensor.element_size() for tensor in state(1).tensors.values())
    empty = torch.empty

    def short(*shape: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") == torch.uint8 and isinstance(shape[0], int) and shape[0] >= size:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes")
        return empty(*shape, **kwargs)

    monkeypatch.setattr(torch, "empty", short)
    with pytest.raises(OutOfMemoryError, match="does not fit into memory"):
        save(tmp_path, state(1), keep=1)
    assert names_in(tmp_path) == []


def test_a_folder_that_came_into_the_place_of_another_with_its_number_is_another(tmp_path):
    folder = tmp_path / "best"
    folder.mkdir()
    before = checkpoint._identity(folder)
    (folder / "file").touch()  # as a folder of the same inode number that was made later
    assert checkpoint._identity(folder) != before
    folder.rename(tmp_path / "away")
    assert checkpoint._identity(folder) is None
