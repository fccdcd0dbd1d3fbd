"""The planted faults and the mutants are still edits of one place each."""

import json

import pytest

from benchmarks.planted import COMMANDS, FAULTS, PACKAGE


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_one_place(fault):
    source = (PACKAGE / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    assert fault.command in COMMANDS


def test_every_mutant_changes_one_place():
    root = PACKAGE.parent
    mutants = json.loads((root / "benchmarks" / "mutants.json").read_text(encoding="utf-8"))
    places = {one["name"]: (root / one["file"]).read_text(encoding="utf-8").count(one["old"]) for one in mutants}
    assert [name for name, count in places.items() if count != 1] == []
