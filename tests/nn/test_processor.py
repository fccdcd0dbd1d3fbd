"""The processor has the name that the system gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unpad.nn import processor
from unpad.nn.processor import full_processor_name, processor_name


@pytest.mark.parametrize(
    ("info", "named", "name"),
    [
        ("model name\t: A 9000\ncpu family\t: 6\nmodel\t\t: 143\n", "x86", "A 9000 (family 6, model 143)"),
        ("model name : A 9000\n", "x86", "A 9000"), ("Features : neon\n", "arm", "arm"), (None, "arm", "arm"),
        (None, "", "machine"),
    ],
)  # fmt: skip
def test_a_processor_has_the_name_that_the_system_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: str | None, named: str, name: str
) -> None:
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(processor, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "processor", lambda: named)
    monkeypatch.setattr(processor.platform, "machine", lambda: "machine")
    assert full_processor_name() == name
    assert processor_name() == name.partition(" (")[0]
