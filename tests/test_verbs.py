"""What a verb asks of its function, and where it prints what comes back."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.helpers.shell import Shell
from unpad.trials.bench.bench import FULL, QUICK, Effort


@pytest.mark.parametrize(("options", "effort"), [([], FULL), (["--quick"], QUICK)])
def test_bench_takes_less_time_only_if_it_is_asked_to(
    unpad: Shell, monkeypatch: pytest.MonkeyPatch, options: list[str], effort: Effort
) -> None:
    asked = list[Effort]()

    def bench(recipe: str, overrides: list[str], effort: Effort) -> SimpleNamespace:
        asked.append(effort)
        return SimpleNamespace(lines=lambda: [f"{recipe} {overrides}"])

    monkeypatch.setattr("unpad.trials.bench.bench.bench", bench)
    assert unpad("bench", "zh_chat", *options).out == "zh_chat []\n"
    assert asked == [effort]


@pytest.mark.parametrize(("options", "said"), [([], ""), (["--data", "new.jsonl"], "5 rows read\n")])
def test_the_json_of_an_evaluation_is_json_alone_and_rows_of_new_data_are_told_beside_it(
    unpad: Shell, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setattr("unpad.evaluation.run.evaluate_run", lambda *_: ({}, ["5 rows read"]))
    told = unpad("eval", "any", "--json", *options)
    assert (told.code, json.loads(told.out), told.err) == (0, {}, said)
