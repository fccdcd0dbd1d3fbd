"""Tables and JSON of `unpad bench` hold every number that was measured."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from unpad.trials.bench.bench import CARDS, Bench, MemoryModel, Trained, memory_lines
from unpad.trials.bench.measure import Rounds, Spread, TimedTurn
from unpad.trials.bench.speed import COLUMNS, Effort, SpeedRow, _cells, row_values, table, to_row

MIB = 2**20
SLOW = SpeedRow(
    "one at a time", {"strategy": "pack"}, 12.5, 12.5, 12.5, 12.5, 0.0, 40,
    rates=[100.0, 200.0, 300.0], torch_rates=[50.0, 50.0, 50.0], shares=[0.1, 0.2, 0.3], updates=9,
    peak_bytes=11 * MIB, base_bytes=4 * MIB,
)  # fmt: skip
FAST = SpeedRow(
    "packed", {"strategy": "pack"}, 2000.4, 1000.2, 12.5, 20.0, 0.375, 4000,
    rates=[1000.0, 4000.0, 1500.0], torch_rates=[], shares=[], updates=30, peak_bytes=104 * MIB, base_bytes=4 * MIB,
)  # fmt: skip


def test_a_row_shows_every_column() -> None:
    assert dict(zip(COLUMNS, _cells(SLOW, SLOW), strict=True)) == {
        "tokens/s": "200", "quartiles": "150 to 250", "times": "1.0x", "torch": "50", "gain": "4.00x",
        "ceiling": "20.0%", "seqs/s": "16", "length": "12.5", "padding": "0.0%", "per pass": "12",
        "per update": "12", "memory": "7 MiB",
    }  # fmt: skip
    assert dict(zip(COLUMNS, _cells(FAST, SLOW), strict=True)) == {
        "tokens/s": "1,500", "quartiles": "1,250 to 2,750", "times": "10.0x", "torch": "-", "gain": "-",
        "ceiling": "-", "seqs/s": "120", "length": "20.0", "padding": "37.5%", "per pass": "1,000",
        "per update": "2,000", "memory": "100 MiB",
    }  # fmt: skip
    text = table("strategy", [SLOW, FAST])
    assert text[0].split()[0] == "strategy"
    assert all(any(cell in line for line in text) for row in (SLOW, FAST) for cell in _cells(row, SLOW))


def test_a_row_is_json_with_what_is_derived_from_it() -> None:
    own = {**asdict(SLOW), "memory_bytes": 7 * MIB, "sequences_per_second": 16.0}
    assert row_values(SLOW, SLOW) == {
        **own,
        "tokens_per_second": {"median": 200.0, "low": 150.0, "high": 250.0},
        "times_first": {"median": 1.0, "low": 1.0, "high": 1.0},
        "native_gain": {"median": 4.0, "low": 3.0, "high": 5.0},
        "ceiling_share": asdict(Spread(*np.percentile([0.1, 0.2, 0.3], [50, 25, 75]).tolist())),
    }
    values = row_values(FAST, SLOW)
    assert values["times_first"] == {"median": 10.0, "low": 7.5, "high": 15.0}
    assert (values["native_gain"], values["ceiling_share"]) == (None, None)


def test_a_row_is_made_of_its_plan_and_its_turns() -> None:
    plan = SimpleNamespace(
        real_tokens=600, padded_tokens=800, num_steps=4, num_micros=8, order=np.arange(50), pad_share=0.25,
        micro_cells=np.array([70, 130, 90]),
    )  # fmt: skip
    settings = SimpleNamespace(
        strategy="fixed", tokens_per_step=150, tokens_per_micro=99, batch_size=3, bucket_width=5, drop_last=True
    )
    variant: Any = SimpleNamespace(
        name="a", plan=plan, stage=SimpleNamespace(recipe=SimpleNamespace(plan=settings)),
        setup=SimpleNamespace(model=SimpleNamespace(config=None)),
    )  # fmt: skip
    turns = {
        "a": [TimedTurn(2, 30, 0, 3.0), TimedTurn(3, 40, 0, 2.0)],
        "a, torch": [TimedTurn(1, 10, 0, 5.0), TimedTurn(1, 10, 0, 4.0)],
        "b": [TimedTurn(9, 90, 0, 1.0)] * 2,
    }
    chosen = {
        "strategy": "fixed", "tokens_per_step": 150, "tokens_per_micro": 99, "batch_size": 3, "bucket_width": 5,
    }  # fmt: skip
    row = to_row(variant, Rounds(turns, []), (7, 3))
    assert row == SpeedRow(
        "a", plan=chosen, tokens_per_update=150.0, tokens_per_pass=75.0, sequence_tokens=12.0, padded_length=16.0,
        pad_share=0.25, largest_pass=130, rates=[10.0, 20.0], torch_rates=[2.0, 2.5], shares=[], updates=7,
        peak_bytes=7, base_bytes=3,
    )  # fmt: skip
    assert to_row(variant, Rounds({"a": turns["a"]}, []), (7, 3)).torch_rates == []


def test_all_tables_are_shown_and_are_json() -> None:
    data = {
        "sequences": 1234, "tokens": 5, "mean_tokens": 12.34, "longest": 40, "parameters": 56789, "vocabulary": 9,
        "units": ["texts", "tokens"],
    }  # fmt: skip
    machine = {
        "processor": "a processor", "cores": 3, "load": 0.25, "torch": "2.9", "precision": "bf16", "device": "cpu",
        "threads": 2, "kernels": "kernels of ours",
    }  # fmt: skip
    trained = [Trained("packed", 20, 4000, 3.25, 2.71828, 5 * MIB), Trained("alone", 20, 300, 3.0, None, MIB)]
    memory = MemoryModel(10.0 * MIB, 1536.0, 30 * MIB, 0.05)
    made = Bench(
        "mine", ["optim.lr=1"], data, machine, Effort(3, 0.5, 20, 128), [1e9, 2e9, 3e9, 4e9], [SLOW, FAST], [FAST],
        memory, trained,
    )  # fmt: skip
    assert made.to_json() == {
        "recipe": "mine", "overrides": ["optim.lr=1"], "data": data, "machine": machine,
        "effort": {"rounds": 3, "seconds": 0.5, "updates": 20, "ceiling_size": 128}, "rounds": 3, "seconds": 0.5,
        "ceilings": [1e9, 2e9, 3e9, 4e9], "memory": asdict(memory), "trained": [asdict(one) for one in trained],
        "strategies": [row_values(SLOW, SLOW), row_values(FAST, SLOW)], "batch_sizes": [row_values(FAST, FAST)],
    }  # fmt: skip
    text = " ".join(" ".join(made.lines()).split())
    for part in (
        "a processor, 3 cores, load 0.2 before; torch 2.9, bf16, cpu, threads: 2",
        "mine: 56,789 parameters; 1,234 training texts of 12.3 tokens, the longest 40",
        "3 rounds of 0.5 s: median and quartiles. Tokens are real tokens, never padding;",
        "computed by kernels of ours; the column torch",
        "ceiling: 2 GFLOP/s (2 to 3), a product of large matrices in bf16",
        "after 20 updates held-out loss tokens seconds memory",
        "memory of padded batches: 10 MiB + 1.5 KiB per token of the largest pass;",
        "at worst 5% off a row card tokens a pass sequences of 40",
        "packed 2.7183 4,000 3.2 5 MiB",
        "alone - 300 3.0 1 MiB",
        " ".join(" ".join(table("strategy", [SLOW, FAST])).split()),
        " ".join(" ".join(table("padded batches, an update each", [FAST])).split()),
    ):
        assert part in text, part


def test_cards_hold_what_memory_leaves_beside_the_libraries() -> None:
    memory = MemoryModel(10.0 * MIB, 1536.0, 30 * MIB, 0.05)
    assert memory.predict(1000) == 10 * MIB + 1536 * 1000
    assert memory.fitting_tokens(40 * MIB + 1536 * 7 + 1535) == 7
    assert memory.fitting_tokens(40 * MIB - 1) == 0
    rows = [line.split() for line in memory_lines(memory, 40)[-len(CARDS) :]]
    free = [size * 1024 * MIB - 40 * MIB for size in CARDS]
    assert rows == [
        [str(size), "GiB", f"{left // 1536:,}", f"{left // 1536 // 40:,}"]
        for size, left in zip(CARDS, free, strict=True)
    ]
