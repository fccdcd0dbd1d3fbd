"""The list of runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from unpad.run.folder import COMMAND
from unpad.run.summary import summarize


def test_the_command_of_a_run_can_be_typed_again(tmp_path: Path) -> None:
    override = "data.text=[a.jsonl, {path: b.csv, field: body}]"
    (tmp_path / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": [override]}))
    (tmp_path / "log.jsonl").write_text("")
    assert shlex.split(summarize(tmp_path).command) == ["unpad", "train", "llm", override]
