"""The table of a drill: 80 columns, whatever is in it."""

from __future__ import annotations

import json

import pytest

from unpad.drill.findings import Drilled, attempt, finding
from unpad.errors import DiskError
from unpad.terminal.finding import Finding
from unpad.terminal.table import WIDTH, cells

OK = finding("lock", "ok", "held, refused, freed", "one training at a time")
TMPFS = finding("file system", "warning", "tmpfs at /dev/shm", "gone after a reboot")
FAULT = finding("space", "fault", "12 GiB needed, 1 GiB free", "the disk fills")


@pytest.mark.promise("drill.check")
def test_no_line_is_wider_than_80_columns() -> None:
    path = "/" + "很长的文件夹名" * 9 + "/" + "a" * 90
    drilled = Drilled(path, "zh_chat", (OK, finding("date", "ok", path, path)), (f"remove it: {path[:40]}",), 3.0)
    table = drilled.lines()[: drilled.lines().index("")]
    assert max(map(cells, table)) <= WIDTH
    assert "".join(table).count("很") == 18, "nothing is cut away"
    assert any(line.startswith(path) for line in drilled.lines()), "and where it can be copied, it is whole"


@pytest.mark.parametrize(
    ("findings", "passed", "said"),
    [
        ((OK,), True, "no fault found: zh_chat in /data, 3 s"),
        ((OK, TMPFS), True, "no fault found, 1 warning: zh_chat in /data, 3 s"),
        ((FAULT, TMPFS, FAULT), False, "2 faults found, 1 warning: zh_chat in /data, 3 s"),
    ],
)
def test_faults_fail_and_warnings_do_not(findings: tuple[Finding, ...], passed: bool, said: str) -> None:
    drilled = Drilled("/data", "zh_chat", findings, (), 3.0, {"kills": None})
    assert (drilled.passed, drilled.lines()[-1]) == (passed, said)
    shown = json.loads(json.dumps(drilled.to_json()))
    assert shown["passed"] is passed
    assert [one["verdict"] for one in shown["findings"]] == [one.severity for one in findings]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), DiskError("Input/output error")])
def test_what_the_system_refuses_is_a_fault(error: Exception) -> None:
    def refused() -> Finding:
        raise error

    found = attempt("flush", refused, "choose another disk")
    assert (found.code, found.severity, found.values["meaning"]) == ("flush", "fault", "choose another disk")
    assert "Input/output error" in found.values["measured"]
