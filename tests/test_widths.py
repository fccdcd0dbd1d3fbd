"""Printed tables fit 80 columns with the long names of real work; NO_COLOR and --version."""

from __future__ import annotations

import sys
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.shell import Shell
from tests.helpers.toy import write_toy
from tests.helpers.verbs import VERBS
from unpad.batching.ledger import Ledger
from unpad.data.check_report import FileCheck
from unpad.doctor.examine import fact_lines
from unpad.doctor.machine import RunNeeds, check_memory
from unpad.doctor.trials import Overfit, Sweep, lr_high
from unpad.evaluation.metrics import Extremes, Metric, Refused, metric_lines
from unpad.machine.memory import MemoryLimit
from unpad.proof.line import Certificate, Line
from unpad.recipes.file import describe_recipes
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.run.compare import HEAD, RunSummary
from unpad.run.screen import open_console
from unpad.terminal.progress import progress
from unpad.terminal.table import WIDTH, cells
from unpad.training.loop import train
from unpad.training.rehearsal import StepCost
from unpad.trials.preview import StagePreview, _table, _with_places, trial_line
from unpad.trials.strategy_table import StrategyRow, Units

STRATEGIES = strategy_names()


def too_wide(lines: list[str]) -> list[str]:
    return [line for part in lines for line in part.splitlines() if cells(line) > WIDTH]


def test_the_help_of_every_verb_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    shown = {name: Shell(monkeypatch, capsys)(*name.split(), "--help").out for name in VERBS}
    assert {name: wide for name, text in shown.items() if (wide := too_wide([text]))} == {}


def test_the_list_of_recipes_fits() -> None:
    lines = describe_recipes()
    assert too_wide(lines) == []
    assert "zh_chat" in {line.split()[0] for line in lines}


def test_a_certificate_fits() -> None:
    kernels = "group matmul, group sdpa, padded sdpa"
    lines = [
        Line("labels stay within their sequence", "", 0.0, 0.0, True),
        Line("the same batch twice is bit-equal (no dropout left on)", "", 0.0, 0.0, True),
        Line("hard: split into micro-batches, one empty = plain reference", kernels, 1.23e-16, 1e-10, True),
        Line("bf16 gradient error over that of torch's kernels", "native", 1.15, 1.2, True),
        Line("plan pack = alone", kernels, 9.6e-06, 1e-10, False),
        Line("attention of this run's longer or shorter sequences", "group sdpa", None, None, None),
    ]
    text = Certificate(tuple(lines)).text()
    assert too_wide(text) == []
    assert all(any(line.name in shown for shown in text) for line in lines)
    assert sum("group sdpa" in shown for shown in text) == 3


def test_metrics_fit() -> None:
    metrics = {
        "bits_per_character_of_chinese_documents": Metric(12345.6789, 12345.1234, 12346.1234, 1_234_567),
        "kept_visual_tokens_after_the_last_layer": Extremes(1234.5, 1.0, 4321.0, 1_234_567),
        "bits_per_char": Refused(
            float("nan"), float("nan"), float("nan"), 12, "34.2 % of the characters are lost " * 3
        ),
        "auroc: 病人在一年内死亡的风险": Metric(0.79, 0.7, 0.85, 400),
    }
    lines = metric_lines(metrics)
    assert too_wide(lines) == []
    assert "\n".join(lines).count("of 1234567, unless the line says otherwise") == 1


def test_checked_files_fit_beside_their_paths() -> None:
    path = Path("data/conversations_of_the_second_quarter/chat_with_everything_in_it.jsonl")
    checked = FileCheck(path, "chat", 1_234_567, 1_234_000, 1234, 12_345, np.array([1, 20_000, 1_000_000]))
    assert too_wide([checked.line()]) == []
    assert FileCheck(Path("a.jsonl"), "chat", 3, 2, 0).line() == "a.jsonl: chat, 2 of 3 rows usable"


def test_runs_fit() -> None:
    fields = " ".join(["data.text=my_corpus/texts_of_the_year/*.jsonl", "stages.pretrain.train.max_epochs=100"] * 3)
    for name in ("zh_chat-1", "a-run-whose-name-says-everything-about-it"):
        run = RunSummary(name, "interrupted", "2026-11-22T15:00:00+00:00", 123_456, 12.3456, 123 << 30, fields)
        lines = run.lines()
        assert too_wide([HEAD, *lines]) == []
        assert lines[0].startswith(name)
        assert " ".join(line.strip() for line in lines[-4:]).endswith(fields[-80:])


def test_the_plan_of_a_large_corpus_fits() -> None:
    ledger = Ledger()
    numbers = {"real_tokens": 10**12, "padded_tokens": 2 * 10**12, "steps": 123_456_789, "micros": 10**9}
    numbers |= {"attention_cells_needed": 10**12, "attention_cells_computed": 123 * 10**12}
    rows = [
        StrategyRow(name, pad_share=0.999, length_correlation=-0.123, ledger=ledger, **numbers) for name in STRATEGIES
    ]
    rows[0] = StrategyRow(STRATEGIES[0], refused="a sequence of 512 tokens does not fit")
    trials = {name: StepCost(10**6, 1e5, 10**6, 123 << 30, 1 << 30) for name in STRATEGIES}
    for units, attends in ((Units(), True), (Units("questions about images", "visual tokens"), False)):
        stage = StagePreview("tune", np.array([9]), rows, trials, 1000, PlanSettings(), units, attends)
        assert too_wide(_table(stage)) == []
        assert too_wide([trial_line(stage, row) for row in rows[1:]]) == []
    where = ", ".join(f"data/texts_of_the_year/number_{i}.jsonl:123456" for i in range(3))
    shown = _with_places(f"  dropped   too_long       {10**9:>12,} tokens  12.3% of 1,234,567 sequences", where)
    assert too_wide(shown) == []
    assert " ".join(part.strip() for part in shown[1:]) == where


# --------------------------------------------------------------------------- the terminal


class Terminal(StringIO):
    """A terminal that shows colours."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_takes_every_control_sequence_away(
    no_color: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.delenv("UNPAD_PROGRESS", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    train(str(write_toy(tmp_path)), tmp_path / "run", ["train.max_steps=3", "train.log_every=1"])
    shown = terminal.getvalue()
    assert ("\x1b" in shown) is (no_color == "")
    assert "step 3/3" in shown if no_color else "3/3" in shown
    assert open_console().is_terminal is (no_color == "")
    monkeypatch.setattr(sys, "stderr", terminal)
    with (tmp_path / "errors").open("wb") as errors:
        monkeypatch.setattr(terminal, "fileno", errors.fileno)
        with progress("reading", 10):
            pass
    assert (b"reading" in (tmp_path / "errors").read_bytes()) is (no_color == "")


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Shell(monkeypatch, capsys)("--version")
    assert (outcome.code, outcome.out) == (0, f"unpad {version('unpad')}\n")


@pytest.mark.promise("proof.narrow")
@pytest.mark.parametrize("width", [40, 55, 72])
def test_tables_follow_a_narrower_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    metrics: dict[str, Metric] = {
        "kept_visual_tokens_after_the_last_layer": Extremes(1234.5, 1.0, 4321.0, 1_234_567),
        "loss": Metric(2.0, 1.0, 3.0, 4, num_groups=3, part="valid", best_of=7),
    }
    overfit = Overfit(4, 60, 5.0, 9.0, None)
    subject: Any = SimpleNamespace(rate=0.3, field=str)
    (trouble,) = lr_high(subject, overfit, Sweep(np.ones(1), np.ones(1), 1e-4, 1e-3))
    (lack,) = check_memory("a name of a recipe " * 5, RunNeeds(1, 1, 1, 2), MemoryLimit(1, "left to the container"))
    shown = [
        *metric_lines(metrics),
        *lack.lines(1, "en"),
        *trouble.lines(1, "en"),
        *trouble.lines(1, "zh"),
        *fact_lines([("threads", "one word and another " * 9)]),
        *FileCheck(Path("my.jsonl"), "text", 30_000, 20_000, 10_000, 5000, np.array([9])).line().splitlines(),
        *_with_places("  dropped   long   1,000", "a.jsonl:1, " * 30),
    ]
    assert [line for line in shown if cells(line) > width] == []
