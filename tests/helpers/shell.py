"""The command line inside a test."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from unpad.cli.main import main
from unpad.storage.remote import fetched

LONG_HELP = {"COLUMNS": "200", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Shell:
    """Runs `unpad ...` in this process, as the installed command does in one of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture

    def __call__(self, *arguments: object, stdin: str = "", code: int | None = None) -> Outcome:
        """What the command printed, and its exit code, which has to be `code` where that is given."""
        self._patch.setattr(sys, "argv", ["unpad", *map(str, arguments)])
        self._patch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capture.readouterr()
        fetched.cache_clear()
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = int(end.code or 0)
        out, err = self._capture.readouterr()
        assert code in (None, ended), f"exit code {ended}\n{out}{err}"
        return Outcome(ended, out, err)


def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """The command in an empty working directory with a cache of its own."""
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    for name, value in LONG_HELP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return Shell(monkeypatch, capsys)
