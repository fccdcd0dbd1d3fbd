"""A system whose files a test writes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from unpad import machine

Tell = Callable[..., None]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Writes files of the system by name; nothing else is told."""
    monkeypatch.setattr(machine, "ROOT", tmp_path / "root")

    def tell(texts: dict[str, object]) -> None:
        for name, text in texts.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="utf-8")

    return tell
