"""One kind of bad input, or of odd input that must be read."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

UNKNOWN = -1  # rows that nobody can count


@dataclass(frozen=True)
class Bad:
    """A case of the table.

    Args:
        kind: letter and number of the kind; a further word tells cases of one kind apart.
        files: contents by name; the first is checked, or the folder that it is in if `folder`.
        reads: section of a recipe's `data` that reads it; "recipe" for a recipe that is checked, "train" for one that
            is refused before data is read.
        code: of the fault; "" for input that is used whole.
        place: end of the place of the first fault, such as "a.jsonl:2".
        used, bad: rows; `bad` is UNKNOWN where the file is refused as a whole.
        exit_code: of `unpad data check`.
        folder: folder to check in place of the first file.
        make: makes what no bytes can be, such as links and pipes.
    """

    kind: str
    files: dict[str, bytes]
    reads: str
    code: str = ""
    place: str = ""
    used: int = 0
    bad: int = 0
    exit_code: int = 3
    folder: str = ""
    make: Callable[[Path], object] | None = field(default=None, compare=False)

    def write(self, root: Path) -> Path:
        """Write the files, and return the path to check."""
        for name, content in self.files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        if self.make is not None:
            self.make(root)
        return root / (self.folder or next(iter(self.files)))


def row(**fields: object) -> bytes:
    """One line of JSON."""
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
