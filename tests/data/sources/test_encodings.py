"""A file that is not UTF-8 has one encoding, guessed from all of it: one message with one command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.helpers.shell import Shell

TEXTS = {
    "WINDOWS-1252": "She hesitated;—“it was serious”, said the naïve café owner’s wife…",
    "GB18030": "院子里的桂花开了，风一吹，满地都是。",
    "KOI8-R": "Мороз и солнце; день чудесный! Ещё ты дремлешь, друг прелестный",
}


def rows(text: str, num: int = 400) -> list[str]:
    """Rows with little of a text each, most of them with one character that is not ASCII."""
    drawn, words = random.Random(0), list(text)
    return [f"plain words {number} {''.join(drawn.sample(words, 3))} and more of them" for number in range(num)]


FORMS = {
    "txt": "\n\n".join,
    "jsonl": lambda texts: "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts),
    "json": lambda texts: json.dumps(texts, ensure_ascii=False),
    "csv": lambda texts: "\n".join(["text", *(f'"{text}"' for text in texts)]),
}


@pytest.mark.promise("data.check")
@pytest.mark.parametrize("head", ["short", "long"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", TEXTS)
def test_a_file_has_one_encoding(unpad: Shell, tmp_path: Path, encoding: str, form: str, head: str) -> None:
    """With a long head of ASCII alone, the rows are bad ones, and not the file."""
    plain = [f"only ascii in row {number} " + "x" * 150 for number in range(600 if head == "long" else 0)]
    path = tmp_path / f"a.{form}"
    path.write_bytes(FORMS[form](plain + rows(TEXTS[encoding])).encode(encoding))
    told = unpad("data", "check", path, code=3).out
    fixes = [line for line in told.splitlines() if line.startswith("  do: ")]
    assert len(fixes) == 1, fixes
    if encoding == "KOI8-R":
        assert "iconv" not in told
    else:
        assert f"iconv -f {encoding} -t UTF-8 FILE > NEW" in fixes[0]
    if encoding == "WINDOWS-1252" and form in ("txt", "jsonl"):
        found = [line for line in told.splitlines() if line.startswith("  found: ")]
        assert "\\x" not in "".join(found)


def test_a_few_rows_of_another_encoding_leave_the_file_utf8(unpad: Shell, tmp_path: Path) -> None:
    good = [f"{text} voilà" for text in rows("plain")]
    path = tmp_path / "a.txt"
    path.write_bytes("\n\n".join(good).encode() + "\n\nnaïve owner".encode("cp1252"))
    told = unpad("data", "check", path, code=3).out
    assert ("E_UTF8" in told, "iconv" in told) == (True, False)


@pytest.mark.parametrize("mark", [b"ftypheic", b"ftypqt  ", b"moov", b"mdat"])
@pytest.mark.parametrize("name", ["IMG_2001.HEIC", "a clip.mov"])
def test_photos_and_films_that_are_not_read_are_known_by_their_bytes(unpad, tmp_path, name, mark):
    (tmp_path / name).write_bytes(b"\0\0\0\x18" + mark + bytes(range(256)) * 20)
    told = unpad("data", "check", tmp_path / name, code=3).out
    assert "it seems to be HEIC, AVIF or a film" in told
    assert "do: save a photo as JPEG" in told
