"""benchmarks/gpu.py runs its whole length on a processor, and keeps what it has where something fails."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.attention_cases import as_on_a_card
from unpad.nn import block

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_both_parts_run_on_a_processor_as_on_a_card():
    ended = subprocess.run([sys.executable, BENCHMARKS / "gpu.py", "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_row_that_fails_or_is_ended_leaves_the_others_and_a_broken_graph_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    gpu, rows = importlib.import_module("gpu"), importlib.import_module("gpu_rows")
    activate, save = block.activate, gpu.Results.save
    monkeypatch.setattr(block, "activate", lambda *given: (torch._dynamo.graph_break(), activate(*given))[1])
    monkeypatch.setitem(rows.SIDES, "grouped", lambda *_: 1 / 0)
    with as_on_a_card():
        for name in ("Transformers, padded, by length", "ours, dropout 0.1"):
            gpu.run_job(name, tmp_path, True)
        monkeypatch.setattr(gpu.Results, "save", lambda *given: (save(*given), sys.exit("after the first turn")))
        with pytest.raises(SystemExit):
            gpu.run_job("ours, 151,936 ids", tmp_path, True)
    kept = gpu.load(tmp_path)
    assert [len(row.turns) for row in kept.rows.values()] == [0, 0, 2, 1]
    found = "\n".join(gpu.faults(kept))
    assert "by length, 160 tokens: ZeroDivisionError" in found
    assert "4 breaks" in found
