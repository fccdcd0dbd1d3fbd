"""Printed tables fit 80 columns with the long names of real work; NO_COLOR and --version."""

import sys
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
from unpad.doctor.machine import RunNeeds, check_memory
from unpad.doctor.trials import Overfit, Sweep, lr_high
from unpad.evaluation.metrics import EXTREMES, Metric, metric_lines
from unpad.machine import MemoryLimit
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.run.screen import open_console
from unpad.terminal.progress import progress
from unpad.terminal.table import WIDTH, cells, described
from unpad.training.loop import train
from unpad.training.rehearsal import StepCost
from unpad.trials.preview import StagePreview, _table, _with_places, trial_line
from unpad.trials.strategy_table import StrategyRow, Units

STRATEGIES = strategy_names()


def too_wide(lines: list[str]) -> list[str]:
    return [line for part in lines for line in part.splitlines() if cells(line) > WIDTH]


def test_the_help_of_every_verb_fits(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    shown = {name: Shell(monkeypatch, capsys)(*name.split(), "--help").out for name in VERBS}
    assert {name: wide for name, text in shown.items() if (wide := too_wide([text]))} == {}


def test_the_plan_of_a_large_corpus_fits():
    ledger = Ledger()
    numbers = {"real_tokens": 10**12, "padded_tokens": 2 * 10**12, "steps": 123_456_789, "micros": 10**9}
    numbers |= {"attention_cells_needed": 10**12, "attention_cells_computed": 123 * 10**12}
    rows = [StrategyRow(name, length_correlation=-0.123, ledger=ledger, **numbers) for name in STRATEGIES]
    rows[0] = StrategyRow(STRATEGIES[0], refused="a sequence of 512 tokens does not fit")
    trials = {name: StepCost(10**6, 1e5, 123 << 30, 1 << 30) for name in STRATEGIES}
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
def test_no_color_takes_every_control_sequence_away(no_color, tmp_path, monkeypatch):
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


@pytest.mark.promise("proof.narrow")
@pytest.mark.parametrize("width", [40, 55, 72])
def test_tables_follow_a_narrower_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    metrics: dict[str, Metric] = {
        "kept_visual_tokens_after_the_last_layer": Metric(1234.5, 1.0, 4321.0, 1_234_567, EXTREMES),
        "loss": Metric(2.0, 1.0, 3.0, 4, num_groups=3, part="valid", best_of=7),
    }
    overfit = Overfit(4, 60, 5.0, 9.0, None)
    subject: Any = SimpleNamespace(rate=0.3, field=str)
    (trouble,) = lr_high(subject, overfit, Sweep(np.ones(1), np.ones(1), 1e-4, 1e-3))
    (lack,) = check_memory("a name of a recipe " * 5, RunNeeds(2, 2), MemoryLimit(1, "left to the container"))
    shown = [
        *metric_lines(metrics),
        *lack.lines(1, "en"),
        *trouble.lines(1, "en"),
        *trouble.lines(1, "zh"),
        *described(["threads"], ["one word and another " * 9]),
        *FileCheck(Path("my.jsonl"), "text", 30_000, 20_000, 5000, np.array([9])).line().splitlines(),
        *_with_places("  dropped   long   1,000", "a.jsonl:1, " * 30),
    ]
    assert [line for line in shown if cells(line) > width] == []
