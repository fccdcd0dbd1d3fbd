"""A damaged journal of a search is told of by name."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.damage import mutations
from unpad.errors import SourceError
from unpad.storage import finite
from unpad.trials.search.journal import Journal, open_study

optuna = pytest.importorskip("optuna")
SETTINGS = {"name": "toy", "fields": ["optim.lr=1..2"], "metric": "loss", "recipe": {}}


def test_a_journal_that_no_search_wrote_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    with closing(Journal(path)) as journal:
        study = open_study(journal)
        study.set_user_attr("settings", SETTINGS)
        for number in range(3):
            trial = study.ask()
            trial.suggest_float("optim.lr", 1e-3, 1e-1, log=True)
            trial.report(0.5, 1)
            study.tell(trial, 0.1 * number)
    lines = path.read_text().splitlines()
    refused = 0
    for index, line in enumerate(lines[:9]):
        for name, changed in [*mutations(json.loads(line), depth=2), ("gone", {})]:
            path.write_text("\n".join([*lines[:index], json.dumps(finite(changed)), *lines[index + 1 :]]) + "\n")
            try:
                with closing(Journal(path)) as journal:
                    open_study(journal).get_trials()
            except SourceError as error:
                refused += 1
                if "search.jsonl" not in str(error):
                    raise AssertionError(name) from error
    assert refused > 40
