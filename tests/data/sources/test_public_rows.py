"""Rows with the columns of public sets and of bug reports: read as they are meant, refused by name, or named."""

import json
from pathlib import Path
from typing import Any

import pytest

from unpad.data.check import check
from unpad.data.sources.example import Example
from unpad.data.sources.files import expand
from unpad.data.sources.reader import read_rows
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

# A row of a set each, and the code of its refusal, words of its fault, or its turns and what is not read of it.
CASES = [json.loads(line) for line in Path(__file__).with_name("public_rows.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_no_row_is_learnt_as_something_else(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(case["row"]) + "\n", encoding="utf-8")
    if "refused" in case:
        with pytest.raises(SourceError, match=case["refused"]):
            check(path)
        return
    report = check(path)
    if "fault" in case:
        assert case["fault"] in report.bad[0].what
        return
    assert not report.bad
    assert report.to_json()["files"][0]["not_read"] == case["not_read"]
    if "turns" in case:
        (file,) = expand([Source(path=str(path))], Path)
        (example,) = read_rows(str(report.files[0].kind), file, DataSettings())
        assert isinstance(example, Example)
        assert [turn.content for turn in example.turns] == case["turns"]
