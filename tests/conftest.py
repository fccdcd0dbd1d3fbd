"""Shared small models and ragged data. One thread, so that bit-equal means bit-equal on every machine."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.models import random_model
from tests.helpers.shell import Shell, shell
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.models.decoder import Decoder
from unpad.nn import product_speed
from unpad.nn.native import library

if TYPE_CHECKING:
    from tests.helpers.families import Finished

VOCAB = 50
WORKERS = pytest.StashKey[list[float]]()  # seconds of each worker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--set", choices=("all", "quick", "rest"), default="all", help="tests of `make test`, or the rest")


def pytest_configure(config: pytest.Config) -> None:
    """Hide a GPU from all but the tests that are of one: the suite means the same everywhere."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests of `make test`: all but those marked nightly, and of slow functions the first case.

    The first test of a promise that no other test shows then stays. The longest test begins first.
    """
    items.sort(key=lambda item: "test_every_command" not in item.nodeid)
    if config.getoption("--set") == "all":
        return
    quick, functions, promises = set[pytest.Item](), set[str](), set[str]()
    for every in (False, True):  # then those that the rule leaves out
        for item in items:
            ids = {name for mark in item.iter_markers("promise") for name in mark.args}
            function = item.nodeid.partition("[")[0]
            nightly = item.get_closest_marker("nightly") is not None
            again = item.get_closest_marker("slow") is not None and function in functions
            if not ids <= promises if every else not (nightly or again):
                quick.add(item)
                functions.add(function)
                promises |= ids
    asked = config.getoption("--set") == "quick"
    config.hook.pytest_deselected(items=[item for item in items if (item in quick) != asked])
    items[:] = [item for item in items if (item in quick) == asked]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before all tests, import the later files of them first in every worker but one, each from a place of its own.

    What is imported for the first time is compiled, which takes most of the time before the first test: workers that
    begin at one place compile every file at the same time, each for itself. What fails here fails in collection again.
    """
    gc.disable()  # what is imported stays: a sixth of the time until the first test goes by looking it through
    worker: dict[str, object] = getattr(session.config, "workerinput", {})
    number, num_workers = int(str(worker.get("workerid", "gw0"))[2:]), int(str(worker.get("workercount", 1)))
    root = Path(__file__).parents[1]
    files = sorted(root.glob("tests/**/test_*.py")) if session.config.args == ["tests"] else []
    for path in files[len(files) * number // num_workers :] if number else []:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Garbage is collected from here on."""
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it took; where UNPAD_HOLD_SECONDS is set, a run above the ceiling fails."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = sum(os.times()[:4])
    elif os.environ.get("UNPAD_HOLD_SECONDS") == "1" and _seconds(session.config) > _ceiling():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_setup() -> None:
    """Before a test and its fixtures, one thread, whatever the test before it asked for."""
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(WORKERS, []).append(getattr(node, "workeroutput", {}).get("seconds", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    above = f" of at most {_ceiling():,}" if os.environ.get("UNPAD_HOLD_SECONDS") == "1" else ""
    terminalreporter.write_line(f"{_seconds(config):,.0f} seconds of processor time{above}")


def _seconds(config: pytest.Config) -> float:
    """Processor time of this process, and of workers with all their children."""
    workers = config.stash.get(WORKERS, [])
    return sum(os.times()[: 2 if workers else 4]) + sum(workers)


def _ceiling() -> int:
    from benchmarks.size import CEILINGS

    return CEILINGS["processor seconds of make test"]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may be left out
def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores: for a quarter of their time tests wait, for processes, the disk or a clock."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What is there before a module's tests is not searched for garbage again, as after every run of a trainer."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_flushes() -> Iterator[None]:
    """No power cut is waited for: a run of a few steps flushes 165 times, which takes longer than its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_progress() -> None:
    """No line of progress in the output of tests, which would depend on how long they take."""
    os.environ["UNPAD_PROGRESS"] = "0"


@pytest.fixture(autouse=True, scope="session")
def _signals() -> None:
    """Hang-ups and Ctrl-C end programs of tests, also where nohup or a script's `&` has them ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _fixed_precision() -> Iterator[None]:
    """bf16 where the processor has it, whatever its speed; fp32 where a variable limits the instructions."""
    best = ("0", "1", *library.BF16_TARGETS)
    limited = any(os.environ.get(name, "1") not in best for name in product_speed.VARIABLES)
    speed = product_speed.Speed(fp32_seconds=1.0 if limited else 2.0, bf16_seconds=2.0 if limited else 1.0)
    speeds = product_speed.Speeds(training=speed, decoding=speed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_speed, "product_speeds", lambda: speeds)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Finished runs of the families, one of each for all tests of this process: a test that writes copies its own."""
    from tests.helpers.families import Finished

    made = Finished(tmp_path_factory.mktemp("families"))
    yield made
    assert made.changed() == []


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the package keeps between runs is kept apart for every test file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNPAD_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture
def unpad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """The command in an empty working directory with a cache of its own."""
    return shell(tmp_path, monkeypatch, capsys)


def tiny_model(dtype: torch.dtype = torch.float64, **fields: object) -> Decoder:
    """A two-block decoder small enough to compare every gradient of."""
    sizes = {"width": 16, "blocks": 2, "heads": 4, "hidden": 24, "context": 64, **fields}
    return random_model(sizes, VOCAB).to(dtype)


def random_sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, n).tolist() for n in lengths]


def random_batch(lengths: list[int], seed: int = 0, share: float = 0.7) -> RaggedBatch:
    """Sequences of random tokens, of which a random share counts in the loss."""
    generator = np.random.default_rng(seed + 1)
    sequences = random_sequences(lengths, seed)
    return from_sequences(sequences, [(generator.random(len(s)) < share).tolist() for s in sequences])
