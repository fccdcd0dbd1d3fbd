"""Clocks that go back, jump, or differ from the disk's are found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unpad.drill import clock
from unpad.drill.clock import Clock
from unpad.terminal.finding import Finding

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _few_readings(monkeypatch: Patch) -> None:
    monkeypatch.setattr(clock, "READINGS", 200)


def findings(started: Clock, folder: Path, run: Path | None = None) -> dict[str, Finding]:
    return {one.code: one for one in started.findings(folder, run)}


def test_sound_clocks_pass(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").touch()
    assert [one.severity for one in findings(Clock(), tmp_path, run).values()] == ["ok", "ok"]


def stepping_back() -> Callable[[], float]:
    """Stands for a clock that goes on by 1 s a reading, and once back by half a second."""

    def readings() -> Iterator[float]:
        now = 1000.0
        while True:
            now += -0.5 if now == 1100.0 else 1.0
            yield now

    return readings().__next__


@pytest.mark.promise("drill.clock")
def test_a_clock_that_goes_back_is_a_fault(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(time, "monotonic", stepping_back())
    found = findings(Clock(), tmp_path)["steady clock"]
    assert (found.severity, found.values["measured"]) == ("fault", "it went back by 0.500 s")


@pytest.mark.promise("drill.clock")
@pytest.mark.parametrize(
    ("shift", "says"), [(-10 * 86400.0, "days before the package"), (-300.0, "5 min before the run's newest file")]
)
def test_a_date_before_the_newest_file_is_a_warning(
    tmp_path: Path, monkeypatch: Patch, shift: float, says: str
) -> None:
    real, run = time.time, tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    built = tmp_path / "built"
    built.mkdir()
    (built / "api.py").touch()
    os.utime(built / "api.py", (real() - 86400 if "run" in says else real() + 5,) * 2)
    monkeypatch.setattr(clock, "BUILT", built)
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    found = findings(Clock(), tmp_path, run)["date"]
    assert found.severity == "warning"
    assert says in found.values["measured"]
    assert "timedatectl" in found.values["meaning"]


def test_a_date_that_jumps_during_the_drill_is_a_warning(tmp_path: Path, monkeypatch: Patch) -> None:
    started, real = Clock(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    monkeypatch.setattr(clock, "_file_time", lambda folder: real() + 3600)
    found = findings(started, tmp_path)["date"]
    assert (found.severity, found.values["measured"][:18]) == ("warning", "it jumped by +3600")


@pytest.mark.promise("drill.clock")
@pytest.mark.parametrize(("skew", "says"), [(7500.0, "2 h ahead"), (-90.0, "90.0 s behind")])
def test_a_disk_whose_files_have_other_times_is_a_warning(
    tmp_path: Path, monkeypatch: Patch, skew: float, says: str
) -> None:
    monkeypatch.setattr(clock, "_file_time", lambda folder: time.time() + skew)
    found = findings(Clock(), tmp_path)["date"]
    assert found.severity == "warning"
    assert says in found.values["measured"]
