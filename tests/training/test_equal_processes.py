"""Any number of processes writes the same bytes: metrics, weights and optimizer of whole runs, of every family."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import unpad
from benchmarks import equal_processes
from benchmarks.equal_processes import CASES, digests, train_case, write_small
from tests.helpers.paths import on
from tests.helpers.ranks import run_processes
from tests.helpers.toy import write_toy
from tests.helpers.turns import in_turns
from unpad.errors import RecipeError
from unpad.receipts.replay import replay

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in CASES}
# With several processes of the system, and with such that take turns; the script has all cases.
REAL, IN_TURNS = ["zh_chat", "events", "images", "vqa_hard"], ["bpe", "dpo", "lora", "vqa_soft"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data, for all tests."""
    made = tmp_path_factory.mktemp("equal")
    write_small(made / "data")
    return made


def trained(name: str, folder: Path, size: int, *, native: bool = True) -> dict[str, str]:
    """Digests of a run of `size` processes that take turns."""
    runs = folder / f"{'native' if native else 'torch'}-{size}"

    def work(group: object) -> None:
        with on("native" if native else "torch"):
            train_case(BY_NAME[name], runs, group, folder / "data")

    in_turns(size, work)
    return digests(runs / name)


@pytest.mark.promise("processes.bytes")
def test_texts_and_conversations_are_equal_at_every_number_of_processes(folder):
    expected = trained("zh_chat", folder, 1)
    for size in (2, 3, 4):
        assert trained("zh_chat", folder, size) == expected, size


@pytest.mark.promise("processes.bytes")
@pytest.mark.parametrize("name", IN_TURNS)
def test_runs_of_other_kinds_are_equal(name, folder):
    if BY_NAME[name].starts:
        for size in (1, 2):
            if not (folder / f"native-{size}" / "zh_chat").exists():
                trained("zh_chat", folder, size)
    assert trained(name, folder, 1) == trained(name, folder, 2)


@pytest.mark.nightly
@pytest.mark.promise("receipts.replay")
def test_one_process_takes_a_step_of_several_again(folder):
    """With adapters, pairs and removed visual tokens."""
    for name in IN_TURNS:
        for start in ["zh_chat"] * bool(BY_NAME[name].starts) + [name]:
            if not (folder / "native-2" / start).exists():
                trained(start, folder, 2)
        receipt = replay(folder / "native-2" / name)
        assert receipt.equal, receipt.lines()


@pytest.mark.nightly
@pytest.mark.promise("processes.bytes")
def test_processes_of_the_system_write_equal_bytes_for_all_families(folder, tmp_path, capsys):
    assert equal_processes.compare(REAL, [1, 3], "native", tmp_path, folder / "data") == 0
    said = capsys.readouterr().out
    assert said.count("3 processes") == said.count("  equal\n") == len(REAL)


@pytest.mark.promise("processes.joins")
@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_a_group_that_exists_is_joined_and_left_alive(backend, tmp_path):
    """One as of Ray Train, and one of a program's own that serves no processor, without the variables of torchrun."""
    recipe, fields = str(write_toy(tmp_path)), ["train.max_steps=5"]

    def work() -> tuple[int, int]:
        dist.init_process_group(backend)
        if backend != "gloo":
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                del os.environ[name]
        groups = dist.distributed_c10d._world.pg_map.copy()
        run = unpad.train(recipe, *fields, out=tmp_path / "two", quiet=True)
        assert dist.distributed_c10d._world.pg_map == groups
        with pytest.raises(RecipeError, match="each choose"):
            unpad.train(recipe, *fields, quiet=True)
        return run.step, dist.get_world_size()

    assert run_processes(tmp_path / "ranks", 2, work) == [[5, 2]] * 2
    unpad.train(recipe, *fields, out=tmp_path / "one", quiet=True)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
