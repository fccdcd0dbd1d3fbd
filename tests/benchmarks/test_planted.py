"""The planted faults are still edits of one place each."""

import pytest

from benchmarks.planted import COMMANDS, FAULTS, PACKAGE


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_one_place(fault):
    source = (PACKAGE / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    assert fault.command in COMMANDS
