"""Damages of every kind to a file."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WRONG: tuple[Any, ...] = (None, "x", -1, 10**400, [], {"a": [1]}, True, "\ud800", 1.5)
DEEP = b"[" * 100_000


def damage(path: Path, content: bytes | str | None) -> None:
    """Replace a file: by bytes, nothing (None), a "folder", a "pipe", a "device", or a link to itself ("loop")."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match content:
        case bytes():
            path.write_bytes(content)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)


def damages(path: Path) -> Iterator[tuple[str, bytes | str | None]]:
    """Names and contents of damages to a file: every way of not being a readable text, and every field of its JSON."""
    data = path.read_bytes()
    wholes = {"empty": b"", "junk": bytes(range(256)), "deep": DEEP, "half": data[: len(data) // 2], "gone": None}
    yield from wholes.items()
    yield from ((kind, kind) for kind in ("folder", "pipe", "device", "loop"))
    if path.suffix == ".json":
        for name, value in mutations(json.loads(data)):
            yield name, json.dumps(value).encode()
    elif path.suffix == ".jsonl":
        lines, kinds = data.splitlines(keepends=True), set()
        for index, line in enumerate(lines):
            row = json.loads(line)
            if row.get("kind") not in kinds:
                kinds.add(row.get("kind"))
                for name, value in mutations(row, depth=2):
                    changed = [*lines[:index], json.dumps(value).encode() + b"\n", *lines[index + 1 :]]
                    yield f"{row.get('kind')} {name}", b"".join(changed)


def mutations(value: Any, depth: int = 3, turn: int = 0) -> Iterator[tuple[str, Any]]:
    """Names and results of changes to a JSON value: fields that are missing, and fields with a wrong value."""
    wrong = WRONG[turn % len(WRONG)]
    yield repr(wrong)[:10], wrong
    if depth == 0:
        return
    if isinstance(value, dict):
        for index, key in enumerate(value):
            yield f"without {key}", {name: one for name, one in value.items() if name != key}
            for name, inner in mutations(value[key], depth - 1, turn + index):
                yield f"{key}.{name}", {**value, key: inner}
    elif isinstance(value, list) and value:
        yield "shorter", value[:-1]
        for name, inner in mutations(value[-1], depth - 1, turn + 1):
            yield f"[-1].{name}", [*value[:-1], inner]
