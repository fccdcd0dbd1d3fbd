"""Too little memory is exit code 8 with the setting to lower, wherever it is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.shell import Shell
from tests.helpers.toy import run, write_toy
from unpad.data.text import TextData
from unpad.errors import OutOfMemoryError, is_memory_error, needs_memory
from unpad.run import checkpoint

pytestmark = pytest.mark.slow

HUGE = ("model.width=1000000", "model.heads=2", "model.hidden=1000000")
# The data is read first; then at most this much more address space is left than is in use.
LIMITED = """
import resource, sys
from unpad.cli.main import main
from unpad.data import family
opened, room = family.open_data, int(sys.argv.pop(1))
def limited(*given, **known):
    data = opened(*given, **known)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
    return data
import unpad.training.setup as setup
setup.open_data = limited
main()
"""


@pytest.mark.parametrize("verb", ["train", "plan", "prove"])
def test_a_model_that_no_memory_holds_names_its_sizes(unpad: Shell, tmp_path: Path, verb: str) -> None:
    outcome = unpad(verb, write_toy(tmp_path / "toy"), *HUGE)
    assert outcome.code == 8
    what, do = outcome.err.strip().splitlines()
    assert what.startswith("OutOfMemoryError: a model of kind decoder with")
    assert do == "  do: lower model.width or model.blocks or model.hidden"
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are of Linux")
@pytest.mark.parametrize(
    ("verb", "room_mib"), [("train", 100), ("plan", 100), ("prove", 100), ("train", 260), ("plan", 260), ("prove", 260)]
)
def test_memory_that_ends_in_the_middle_is_code_8(tmp_path: Path, verb: str, room_mib: int) -> None:
    """The weights take 200 MiB: with less room the model is not built, with more a copy, gradients or moments fail."""
    recipe = write_toy(tmp_path / "toy")
    sizes = ["model.width=2048", "model.hidden=4096", "model.blocks=1", "model.heads=2", "train.max_steps=2"]
    command = [sys.executable, "-c", LIMITED, str(room_mib << 20), verb, str(recipe), *sizes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 8, done.stderr[-2000:]
    assert done.stderr.startswith("OutOfMemoryError: ")
    assert "  do: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_and_a_checkpoint_without_room_are_code_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    recipe = write_toy(tmp_path / "toy")

    def nothing_left(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TextData, "load", nothing_left)
        with pytest.raises(OutOfMemoryError, match="the next batch") as caught:
            run(recipe, tmp_path / "a")
    assert caught.value.fix == "lower plan.tokens_per_step"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_reserve", lambda num_bytes: torch.empty(num_bytes << 40))
        with pytest.raises(OutOfMemoryError, match="a copy of weights and optimizer"):
            run(recipe, tmp_path / "b")
    assert not list((tmp_path / "b/checkpoints").glob("*"))
    run(recipe, tmp_path / "b", "train.max_steps=3", resume=True)


def test_only_errors_of_memory_are_converted() -> None:
    no_memory = pytest.raises(OutOfMemoryError, match="this does not fit into memory: MemoryError")
    with no_memory, needs_memory("this", "lower that"):
        raise MemoryError
    with pytest.raises(RuntimeError, match="shape"), needs_memory("this", "lower that"):
        raise RuntimeError("shape")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_memory_error(caught.value)
