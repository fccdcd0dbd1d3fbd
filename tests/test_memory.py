"""Too little memory is exit code 8 with the setting to lower, wherever it is noticed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import events, run, write_toy
from unpad.data.text import TextData
from unpad.errors import OutOfMemoryError
from unpad.run import checkpoint

HUGE = ("model.width=1000000000000", "model.heads=2")  # its first tensor already: a smaller one would be written
# Runs commands in forked children. The data is read first; then at most so much more address space is left as in use.
LIMITED = """
import json, os, resource, sys, tempfile
from unpad.cli.main import main
import unpad.proof.recipe, unpad.training.loop, unpad.trials.preview
import unpad.training.setup as setup
opened = setup.open_data
def limited(room):
    def open_data(*given, **known):
        data = opened(*given, **known)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
        return data
    return open_data
told = []
for room, *words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
            setup.open_data = limited(room)
            sys.argv = ["unpad", *words]
            main()
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        told.append((code, errors.read().decode()))
print(json.dumps(told))
"""


def with_room(folder: Path, *commands: list[object]) -> list[tuple[int, str]]:
    """Exit code and standard error of commands, each of them after the bytes that it may take."""
    # Each arena takes 64 MiB of the space; a heap that keeps freed memory would leave none for the stack of a thread.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    return [(code, errors) for code, errors in json.loads(done.stdout)]


@pytest.mark.promise("memory.sequence")
@pytest.mark.parametrize("verb", ["train", "plan", "prove"])
def test_a_model_that_no_memory_holds_names_its_sizes(unpad, tmp_path, verb):
    what, do = unpad(verb, write_toy(tmp_path / "toy"), *HUGE, code=8).err.strip().splitlines()
    assert what.startswith("OutOfMemoryError: a model of kind decoder with")
    assert do == "  do: lower model.width or model.blocks or model.hidden"
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.nightly
@pytest.mark.promise("memory.sequence")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are of Linux")
def test_memory_that_ends_in_the_middle_is_code_8(tmp_path):
    """The weights take 200 MiB: with less room the model is not built, with more a copy, gradients or moments fail."""
    recipe = write_toy(tmp_path / "toy")
    sizes = ["model.width=2048", "model.hidden=4096", "model.blocks=1", "model.heads=2", "train.max_steps=2"]
    verbs = [(room, verb) for room in (100 << 20, 260 << 20) for verb in ("train", "plan", "prove")]
    ends = with_room(tmp_path, *([room, verb, str(recipe), *sizes] for room, verb in verbs))
    for given, (code, errors) in zip(verbs, ends, strict=True):
        assert code == 8, (given, errors[-2000:])
        assert errors.startswith("OutOfMemoryError: "), given
        assert "  do: " in errors, given
        assert "Traceback" not in errors, given


@pytest.mark.nightly
@pytest.mark.promise("memory.cut")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are of Linux")
def test_a_run_goes_on_in_parts_where_memory_ends(tmp_path):
    """The largest micro-batch takes about a gigabyte: with 600 MiB it is computed in two parts, and the run ends."""
    recipe = write_toy(tmp_path / "toy", stages=[], data={"chat": []})
    texts = tmp_path / "toy/texts.jsonl"
    texts.write_text(texts.read_text(encoding="utf-8") * 8, encoding="utf-8")
    sizes = ["model.width=64", "model.hidden=4096", "model.blocks=2", "model.heads=2", "train.max_steps=2"]
    sizes += ["plan.tokens_per_step=6400", "plan.tokens_per_micro=6400", "train.allocator=system"]
    ((code, errors),) = with_room(tmp_path, [600 << 20, "train", str(recipe), *sizes, "--out", str(tmp_path / "run")])
    assert code == 0, errors[-2000:]
    found = events(tmp_path / "run", "out_of_memory")
    assert 1 <= len(found) <= 2
    assert found[-1]["tokens"] < 4000


@pytest.mark.promise("memory.sequence")
def test_a_batch_and_a_checkpoint_without_room_are_code_8(tmp_path, monkeypatch):
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
