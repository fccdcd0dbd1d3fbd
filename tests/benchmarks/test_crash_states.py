"""No power cut loses what was saved, planted faults of durable writing are found, and calls may fail."""

import builtins
import io
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from benchmarks.reliability.calls import BY_FILE, BY_PATH, BY_PATH_READ, Calls
from benchmarks.reliability.disk_model import MODES, Disk
from benchmarks.reliability.failing import failing
from benchmarks.reliability.faults import FAULTS
from benchmarks.reliability.oracle import Oracle
from benchmarks.reliability.recording import Recording, record, record_small
from benchmarks.reliability.states import Found, Place, examine
from benchmarks.reliability.victim import unlike

pytestmark = pytest.mark.slow

LOST_AND_KEPT = MODES.index(("lost", "kept"))
FEW = [MODES.index(mode) for mode in (("lost", "lost"), ("lost", "kept"), ("lost", "some"), ("hole", "some"))]
BEFORE_THE_NAME_IS_FLUSHED = 3  # operation of a run: its directory is made, and its name not yet flushed


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An empty folder in memory, where flushes cost nothing."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def states(recording: Recording, folder: Path, passes: Iterable[int], resume_every: int = 0) -> Found:
    """Examine the states of a recording; resume some of them."""
    (folder / "scratch").mkdir()
    passes, num = list(passes), 0

    def resume(left: Place) -> None:
        nonlocal num
        num += 1
        if resume_every and num % resume_every == 0:
            recording.resume(left.copy())

    oracle, left = Oracle(recording.end, folder / "scratch"), Place(folder / "place")
    return examine(recording.operations, oracle, left, lambda done: passes, begin=recording.begin, resume=resume)


@pytest.mark.promise("run.power-cut")
def test_functions_of_storage_keep_what_they_promise(place):
    found = states(record_small(place), place, range(len(MODES)))
    assert found.faults == {}
    assert found.distinct > 500


@pytest.mark.promise("run.power-cut")
@pytest.mark.parametrize(
    ("kind", "passes"), [("images", [*FEW, MODES.index(("any", "first"))]), ("patients", [LOST_AND_KEPT, FEW[-1]])]
)
def test_a_power_cut_loses_nothing_of_a_run(place, kind, passes):
    found = states(record(kind, place), place, passes, resume_every=200)
    assert found.faults == {}
    assert found.distinct > 200


@pytest.mark.promise("run.power-cut")
def test_a_power_cut_loses_nothing_of_a_run_that_was_killed_before_and_resumed(place):
    recording = record("images", place, BEFORE_THE_NAME_IS_FLUSHED)
    assert 0 < recording.begin < len(recording.operations)
    assert states(recording, place, FEW[:1]).faults == {}


@pytest.mark.promise("run.power-cut")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(place, fault):
    passes = FEW
    if fault.recording == "small":
        recording = record_small(place, fault)
    elif fault.recording == "killed":
        recording, passes = record("images", place, BEFORE_THE_NAME_IS_FLUSHED, fault.plant), FEW[:1]
    else:
        recording, passes = record(fault.recording, place, None, fault.plant), [LOST_AND_KEPT]
    assert states(recording, place, passes).faults


@pytest.mark.promise("run.calls")
def test_a_call_that_fails_ends_a_run_with_an_error_of_its_own_and_a_resume_is_the_same(place):
    runs = failing("images", place)
    for name, error in (("listdir", "EIO"), ("fsync", "ENOSPC"), ("rename", "EROFS")):
        numbers = [number for number, call in enumerate(runs.names) if call.startswith(f"{name} run/checkpoints")]
        assert runs.attempt(numbers[-1], error).code == 6


def test_calls_on_a_file_elsewhere_are_left_alone_though_it_has_the_number_of_one_inside(tmp_path):
    (tmp_path / "root").mkdir()
    seen: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in (*BY_PATH, *BY_PATH_READ, *BY_FILE):
            patch.setattr(os, name, getattr(os, name))
        patch.setattr(io, "open", io.open)
        patch.setattr(builtins, "open", builtins.open)
        Calls(tmp_path / "root", after=lambda name, path, *_: seen.append((name, path))).install()
        inside = open(tmp_path / "root" / "inside", "w", opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115
        number = inside.fileno()
        inside.close()  # unseen
        elsewhere = os.open(tmp_path, os.O_RDONLY)
        os.fsync(elsewhere)
        os.close(elsewhere)
    assert elsewhere == number
    assert seen == [("open", "inside")]


def test_a_disk_keeps_what_was_flushed_and_may_lose_all_else():
    disk = Disk()
    for operation in (
        ("create", "a", 0),
        ("write", 0, 0, b"kept"),
        ("flush", 0),
        ("flush names", ""),
        ("write", 0, 4, b"more"),
        ("create", "b", 1),
        ("rename", "a", "c"),
    ):
        disk.apply(operation)
    assert disk.tree() == {"b": b"", "c": b"keptmore"}
    assert {name for seed in range(40) for name in left(disk, "some", seed)} == {"a", "b", "c"}
    assert left(disk, "lost") == {"a": b"kept"}
    assert left(disk, "kept") == {"b": b"", "c": b"kept"}
    torn = {left(disk, "lost", seed, "torn")["a"] for seed in range(40)}
    assert torn == {b"kept" + b"more"[:size] for size in range(5)}
    assert all(content.startswith(b"kept") for content in torn)
    zeros = {left(disk, "lost", seed, "hole")["a"] for seed in range(40)}
    assert {b"kept\0ore", b"keptmo\0e"} <= zeros


def left(disk: Disk, names: str, seed: int = 0, contents: str = "lost") -> dict[str, bytes | None]:
    return disk.after_power_cut(contents, names, random.Random(seed))[0]


@pytest.mark.promise("run.calls")
def test_a_run_that_a_signal_had_save_elsewhere_differs_in_old_checkpoints_alone():
    whole = {"metrics.jsonl": "m", "checkpoints/step-04/a": "4", "checkpoints/step-06/a": "6"}
    elsewhere = {"metrics.jsonl": "m", "checkpoints/step-05/a": "5", "checkpoints/step-06/a": "6"}
    assert unlike(elsewhere, whole) == ["checkpoints/step-04/a", "checkpoints/step-05/a"]
    assert unlike(elsewhere, whole, saved_elsewhere=True) == []
    for changed in ({"metrics.jsonl": "x"}, {"checkpoints/step-06/a": "x"}, {".tmp-1-00000000-1": ""}):
        assert unlike({**elsewhere, **changed}, whole, saved_elsewhere=True) == list(changed)
