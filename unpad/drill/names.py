"""Names and permissions that a disk supports: capitals, Chinese, long names, files only for their owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from unpad.drill.findings import attempt, finding
from unpad.terminal.finding import Finding

NEEDED_BYTES = 100  # of a name: `best-STAGE` of 40 letters, and temporary names
LENGTHS = (255, 143, NEEDED_BYTES)  # of most file systems, of encrypted folders, and needed
CHINESE = "语料-模型 é"


MEANING = "such names cannot be written: choose another disk by --out"


def check_names(folder: Path, stages: Sequence[str]) -> Finding:
    """Check lengths of names, capitals and Chinese.

    Args:
        stages: names of the recipe's stages, used as folder names.
    """
    place = folder / "names"
    place.mkdir()
    return attempt("names", lambda: _names(place, stages), MEANING)


def check_permissions(folder: Path, *, private: bool) -> Finding:
    """Check that a file can be restricted to its owner.

    Args:
        private: whether the data is about people, so that only the owner may read the run.
    """
    place = folder / "permissions"
    place.mkdir()
    return attempt("permissions", lambda: _permissions(place, private), MEANING)


def _names(folder: Path, stages: Sequence[str]) -> Finding:
    longest = next((length for length in LENGTHS if _can_make(folder / ("n" * length))), 0)
    if longest < NEEDED_BYTES:
        told = f"none of {NEEDED_BYTES} bytes"
        return finding("names", "fault", told, "checkpoints cannot be written: choose another disk by --out")
    (folder / "Case").touch()
    tells_case = not (folder / "case").exists()
    alike = [one for one in stages if sum(one.lower() == other.lower() for other in stages) > 1]
    keeps_chinese = _can_make(folder / CHINESE) and CHINESE in os.listdir(folder)
    measured = f"to {longest} bytes; capitals {'differ' if tells_case else 'do not count'}"
    measured += "; Chinese is kept" if keeps_chinese else "; Chinese is changed"
    if alike and not tells_case:
        told = f"the stages {', '.join(alike)} would share a checkpoint: rename one"
        return finding("names", "fault", measured, told)
    if not keeps_chinese:
        return finding("names", "warning", measured, "name runs and files in Latin letters")
    return finding("names", "ok", measured, "all that a run makes")


def _can_make(path: Path) -> bool:
    try:
        path.touch()
    except (OSError, UnicodeError):
        return False
    return True


def _permissions(folder: Path, private: bool) -> Finding:
    path = folder / "private"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    mode = stat.S_IMODE(path.stat().st_mode)
    inner = folder / "inner"
    inner.mkdir(0o700)
    inner_mode = stat.S_IMODE(inner.stat().st_mode)
    measured = f"a private file {mode:03o}, folder {inner_mode:03o}"
    if not (mode | inner_mode) & 0o077:
        return finding("permissions", "ok", measured, "private data stays its owner's")
    if private:
        return finding("permissions", "fault", measured, "others can read this run about people: choose another disk")
    return finding("permissions", "warning", measured, "others can read whatever is written here")
