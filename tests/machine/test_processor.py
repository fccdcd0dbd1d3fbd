"""The processor has the name that the system gives it."""

import pytest

from unpad import machine
from unpad.machine import full_processor_name, processor_name


@pytest.mark.parametrize(
    ("info", "named", "name"),
    [
        ("model name\t: A 9000\ncpu family\t: 6\nmodel\t\t: 143\n", "x86", "A 9000 (family 6, model 143)"),
        ("model name : A 9000\n", "x86", "A 9000"), ("Features : neon\n", "arm", "arm"), (None, "arm", "arm"),
        (None, "", "machine"),
    ],
)  # fmt: skip
def test_a_processor_has_the_name_that_the_system_gives(tell, monkeypatch, info, named, name):
    tell({} if info is None else {"proc/cpuinfo": info})
    monkeypatch.setattr(machine.platform, "processor", lambda: named)
    monkeypatch.setattr(machine.platform, "machine", lambda: "machine")
    assert full_processor_name() == name
    assert processor_name() == name.partition(" (")[0]
