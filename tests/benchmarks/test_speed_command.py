"""The speed benchmark's command line, and its tables from a measurement to the Markdown."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unpad.models.decoder import Config
from unpad.recipes.training import PlanSettings

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def speed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("speed")
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)


LONGEST: list[str] = []  # sides that took a step with the longest batch


class _Here:
    """`Apart` without a process: side and memory are those of the tests."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        self.make, self.arguments = make, arguments

    def build(self, warm_seconds: float) -> Any:
        self.made = self.make(*self.arguments)
        self.made.longest_next = lambda longest=self.made.longest_next: LONGEST.append(self.arguments[1]) or longest()
        self.made.warm(warm_seconds)
        return sys.modules["apart"].Memory(1 << 20, 1 << 20)

    def turn(self, *arguments: Any) -> Any:
        return self.made.side.turn(*arguments)

    def peak(self, seconds: float, min_steps: int) -> int:
        self.made.longest_next()
        self.made.side.turn(seconds, min_steps)
        return int(self.made.base_bytes) + (3 << 20)

    def describe(self) -> Any:
        return self.made.describe()

    def close(self) -> None:
        pass


def _small(name: str, data: Path) -> Any:
    workloads = sys.modules["workloads"]
    config = Config(norm="layernorm", activation="gelu", positions="learned", width=16, heads=2, hidden=32, context=24)
    lengths = workloads.log_normal_lengths(300, 9, 0.8, 2, 40)
    return workloads.decoder_workload(name, config, 50, lengths, PlanSettings(tokens_per_step=128))


class _Padded:
    """A peer without packages: our step, with batches of its own."""

    def __init__(self, made: Any, *, bf16: bool, grouped: bool = False, batch_size: int = 8) -> None:
        workloads = sys.modules["workloads"]
        self.ours = workloads.Ours(made, precision="bf16" if bf16 else "fp32", native=False)
        self.bf16, self.losses, self.workload = bf16, self.ours.losses, made
        self.set_batches(batch_size, grouped)

    def set_batches(self, size: int, grouped: bool, strata: int = 8) -> None:
        self.batches = sys.modules["batches"].Batches(self.workload.lengths.tolist(), size, grouped, strata)

    def step(self) -> Any:
        next(self.batches)
        return self.ours.step()


def _measure(speed: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(speed, "Apart", _Here)
    monkeypatch.setattr(speed, "workload", _small)
    monkeypatch.setattr(speed, "keep_freed_memory", lambda: True)  # it cannot be undone
    monkeypatch.setattr(speed, "ceiling_size", lambda dtype: 64)
    monkeypatch.setattr(speed.peers, "TrainerSide", _Padded)
    monkeypatch.setattr(speed.library, "target", lambda: "avx2")
    options = speed.read_command_line(["W1", *arguments])
    result = {
        **speed.about(options, "so it is"),
        "load_after": 0.5,
        "minutes": 0.1,
        "workloads": {"W1": speed.measure_all("W1", options)},
    }
    return result, speed.markdown(result)


def test_a_quick_table_has_the_sides_of_the_gates_and_verdicts_of_intervals(
    speed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, text = _measure(speed, monkeypatch, "--quick", "--force", "avx2", "--seconds", "0.01", "--rounds", "3")
    part = result["workloads"]["W1"]["default"]
    names = [
        "ours",
        "ours, torch kernels",
        "one at a time, torch",
        "our products alone",
        "peer, defaults",
        "peer, best",
    ]
    assert list(part["sides"]) == names
    assert {side["precision"] for side in part["sides"].values()} == {"fp32"}, "forced to AVX2"
    assert part["kind"] == "AVX2, fp32"
    what = ["step over products alone", "against the peer's best", "against our torch kernels"]
    assert [gate["what"] for gate in part["gates"]] == what
    assert len(part["sides"]["ours"]["rates"]) == 3
    assert list(part["sides"]["peer, best"]["tuned"]) == [f"fp32, {size}" for size in (8, 16, 32, 64)]
    assert "forced to AVX2\n" in text
    assert "Forced to AVX2, as is seen: so it is." in text
    assert "Ceiling: a product of 64 cubed in fp32" in text
    assert "| against our torch kernels | ours, torch kernels |" in text
    assert "at most 1.15" in text
    assert "faster than the ceiling" not in text
    part["sides"]["ours"]["shares"][0] = 1.2
    assert "faster than the ceiling" in speed.markdown(result)


def test_groups_and_memory_stand_in_the_table(speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "available_memory", lambda: 0)  # never room for a second side beside ours
    sides = ["ours, torch kernels", "our products alone", "peer, our tokens per step", "TRL packing"]
    monkeypatch.setattr(sys.modules["peers"], "find_spec", lambda name: None)
    short = ["--seconds", "0.01", "--rounds", "2", "--allocator", "default", "--precision", "fp32"]
    result, text = _measure(speed, monkeypatch, *short, "--sides", *sides)
    parts = result["workloads"]["W1"]
    groups = [group["sides"] for group in parts["default"]["groups"]]
    assert LONGEST[:2] == ["ours", "ours, torch kernels"], "while they are built, to know how many fit"
    assert groups == [["ours", side] for side in sides[:2]] + [["ours", "peer, our tokens per step"]]
    assert "| 3 |" in text
    assert "Left out: TRL packing needs transformers" in text
    assert parts["default"]["sides"]["peer, our tokens per step"]["times"]["ours"], "within its group"
    assert parts["memory_gate"]["added"] == 1.0
    peaks = {name for name, side in parts["default"]["sides"].items() if "peak_bytes" in side}
    assert peaks == {"ours", "ours, torch kernels", "peer, our tokens per step"}
    assert "Not judged, as their sides were not measured together: against the peer's best" not in text
    judged, _ = _measure(speed, monkeypatch, *short, "--sides", "our products alone")
    assert judged["workloads"]["W1"]["default"]["not_judged"] == [
        "against the peer's best",
        "against our torch kernels",
    ]


def test_quick_writes_nothing_unless_it_is_told_where(
    speed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speed.read_command_line(["W1"]).out == BENCHMARKS / "speed"
    options = speed.read_command_line(["W1", "--quick"])
    assert (options.out, options.allocator, options.memory, options.tuning.seconds) == (None, "default", False, 25)
    result = {**speed.about(options, None), "workloads": {}}
    before = sorted((BENCHMARKS / "speed").iterdir())
    speed.write_result("W1", dict(result), options)
    assert sorted((BENCHMARKS / "speed").iterdir()) == before
    options = speed.read_command_line(["W1", "--quick", "--force", "avx2", "--out", str(tmp_path)])
    speed.write_result("W1", dict(result), options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["W1-avx2.json", "W1-avx2.md"]
    assert "# Training speed" in capsys.readouterr().out


def test_a_command_line_that_cannot_be_measured_is_refused(speed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["W9"], ["--forc", "avx2"], ["--force", "avx2", "--precision", "bf16"]):
        with pytest.raises(SystemExit):
            speed.read_command_line(arguments)
    assert "avx2 has no products in bf16" in capsys.readouterr().err
    options = speed.read_command_line(["W1", "--sides", "peer, bset"])
    with pytest.raises(SystemExit, match="there is no side 'peer, bset'; there are ours, "):
        speed.chosen_sides(["ours", "peer, best"], options)


@pytest.mark.parametrize(("precision", "loops"), [("auto", {"fp32"}), ("fp32", {"fp32"}), ("bf16", {"bf16"})])
def test_the_precision_is_that_of_every_side(speed: Any, precision: str, loops: set[str]) -> None:
    small = _small("W1", Path())
    sides, theirs = speed.all_sides(small, speed.Tuning(precision))
    assert sides["one at a time, torch"]().precision in loops
    assert theirs.tuning.precision == precision
    if precision != "auto":
        names = [name for name in sides if name.startswith("ours") or name == speed.PRODUCTS]
        assert {sides[name]().precision for name in names} == {precision}
        assert theirs.tuning.settings() == [precision == "bf16"]
        assert [name for name in names if "one at a time" in name] == [f"ours, one at a time, {precision}"]


def test_products_of_the_forced_check_are_counted(speed: Any) -> None:
    side = sys.modules["forced"].Product()
    side.warm(0.0)
    turn = side.side.turn(0.0)
    assert turn.operations == 2 * 1024**3
    assert side.describe()["torch"] == torch.backends.cpu.get_cpu_capability()


def test_a_workload_without_its_corpora_is_left_out_and_overwrites_no_table(
    speed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "chat.md"
    table.write_text("measured earlier")
    monkeypatch.setattr(sys, "argv", ["speed.py", "chat", "--data", str(tmp_path / "no"), "--out", str(tmp_path)])
    speed.main()
    out, err = capsys.readouterr()
    assert out == ""
    assert "chat is left out: there is no folder" in err
    assert table.read_text() == "measured earlier"
    assert list(tmp_path.iterdir()) == [table]
