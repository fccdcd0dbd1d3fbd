"""`benchmarks/gpu.py --check` runs on a processor what it can, finds what is wrong, and names what it did not run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("gpu", "gpu_check", "gpu_measure", "gpu_sides")
Make = Callable[[Any, torch.device], Any]


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
        for name in MODULES:
            sys.modules.pop(name, None)


def found(make: Make | None = None) -> tuple[dict[str, bool], bool, list[str]]:
    """Verdicts by finding of a check of ours beside another way of it, which stands for the compiled blocks; tracing
    those takes 20 seconds."""
    sides = importlib.import_module("gpu_sides").SIDES
    ours, other = sides["ours"], sides["compiled"][0]
    chosen = {"ours": ours, "compiled": (other, make or ours[1])}
    lines, good = importlib.import_module("gpu_check").check(chosen)
    verdicts = {line[8:]: line.startswith("ok") for line in lines if not line.startswith("not run")}
    return verdicts, good, [line for line in lines if line.startswith("not run")]


def test_the_check_passes_and_names_what_only_a_gpu_runs(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts, good, not_run = found()
    assert good
    assert all(verdicts.values())
    text = "\n".join(verdicts)
    for part in ("parameters", "at first", "updates of the same", "positions", "losses of", "table of a card", "flash"):
        assert part in text
    assert sum("without a GPU: " in line for line in not_run) == len(not_run) >= 8


def broken(change: Callable[[Any], None]) -> Make:
    """Makes ours with a change."""

    def make(sizes: Any, device: torch.device) -> Any:
        side = importlib.import_module("gpu_sides").SIDES["ours"][1](sizes, device)
        change(side)
        return side

    return make


def start_far_off(side: Any) -> None:
    side.model.embed.weight.data.mul_(40)


def never_learn(side: Any) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] = 0.0


def end_in_nan(side: Any) -> None:
    update, losses = side.update, iter([5.3, 5.2, 5.1, 5.0, float("nan"), 4.0])

    def changed() -> Any:
        lengths = update()
        side.loss = next(losses, 4.0)
        return lengths

    side.update = changed


def see_less(side: Any) -> None:
    update = side.update
    side.update = lambda: update()[:-1]


def test_a_side_with_another_model_fails() -> None:
    def larger(sizes: Any, device: torch.device) -> Any:
        return importlib.import_module("gpu_sides").SIDES["ours"][1](replace(sizes, hidden=sizes.hidden + 1), device)

    verdicts, good, _ = found(larger)
    assert not good
    assert any("parameters" in text for text, verdict in verdicts.items() if not verdict)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (start_far_off, ["at first", "losses of the same batches"]),
        (never_learn, ["updates of the same tokens", "losses of the same batches"]),
        (end_in_nan, ["updates of the same tokens", "losses of the same batches"]),
        (see_less, ["positions in each update"]),
    ],
)
def test_a_side_that_does_something_else_fails(change: Callable[[Any], None], parts: list[str]) -> None:
    verdicts, good, _ = found(broken(change))
    assert not good
    bad = [text for text, verdict in verdicts.items() if not verdict]
    for part in parts:
        assert any(part in text for text in bad), bad


def test_a_side_without_its_packages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sides, check = importlib.import_module("gpu_sides"), importlib.import_module("gpu_check")
    monkeypatch.setitem(sides.PACKAGES, "ours", ("no_such_package",))
    lines, good = check.check({"ours": sides.SIDES["ours"]})
    assert good
    assert lines[0] == "not run ours, flat runs: no_such_package not installed: pip install unpad[bench]"


@pytest.mark.parametrize(("verdict", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_that_of_the_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verdict: bool, code: int
) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "check", lambda sides: ([", ".join(sides)], verdict))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--check", "--sides", "ours,trl"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == code
    assert capsys.readouterr().out == "ours, trl\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "nothing was run" in capsys.readouterr().err
