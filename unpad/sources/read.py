"""Read files of either kind, decide what bad rows mean, and report on data before it is used."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from unpad.errors import SourceError
from unpad.recipe import Data, Source
from unpad.sources import chat, text
from unpad.sources.example import BadRow, Example
from unpad.sources.files import SourceFile, expand
from unpad.sources.jsonlines import count_blank_lines
from unpad.sources.rows import rows

Kind = Literal["text", "chat"]

MAX_SHOWN = 20
PEEK_ROWS = 20


def read_file(kind: Kind, file: SourceFile, data: Data) -> tuple[list[Example], list[BadRow]]:
    """Read one file to the end; every row is in exactly one of the two lists.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    used: list[Example] = []
    bad: list[BadRow] = []
    try:
        for item in (chat if kind == "chat" else text).read(file, data):
            if isinstance(item, Example):
                used.append(item)
            else:
                bad.append(item)
    except OSError as error:
        raise SourceError(
            f"cannot be read: {error.strerror or error}",
            where=str(file.path.absolute()),
            fix="check the file's permissions",
        ) from None
    return used, bad


def apply_policy(bad: list[BadRow], num_rows: int, data: Data) -> None:
    """Refuse bad rows as the recipe says; returning means that they are set aside.

    Args:
        num_rows: rows read, good and bad.

    Raises:
        SourceError: the policy is `stop` and there is a bad row, or more than `data.max_bad` of the rows are bad.
    """
    share = len(bad) / max(num_rows, 1)
    if not bad or (data.on_bad_row == "quarantine" and share <= data.max_bad):
        return
    path = re.sub(r"(:\d+|\[\d+\])$", "", bad[0].where)
    lines = [f"{len(bad)} of {num_rows} rows cannot be used:"]
    lines += [f"  {row.where}: {row.code} {row.what}" for row in bad[:MAX_SHOWN]]
    if len(bad) > MAX_SHOWN:
        lines.append(f"  ... and {len(bad) - MAX_SHOWN} more")
    fix = f"`unpad data check {path}` shows each with its fix"
    if data.on_bad_row == "stop":
        fix += "; data.on_bad_row=quarantine goes on without them"
    else:
        lines.append(f"  that is {share:.2%}, more than data.max_bad={data.max_bad:.2%}")
        fix += "; or raise data.max_bad"
    raise SourceError("\n".join(lines), where=bad[0].where, fix=fix)


def refuse_empty(num_examples: int, kind: str, files: Sequence[SourceFile]) -> None:
    """Refuse a corpus without any example.

    Raises:
        SourceError: `num_examples` is 0.
    """
    if num_examples == 0:
        names = ", ".join(str(file.path) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise SourceError(
            f"no usable {kind} example in {len(files)} files",
            where=names,
            fix=f"see `unpad data check`, or set data.{kind}",
        )


# --------------------------------------------------------------------------- unpad data check


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Counts of one file: rows read, rows used, and blank lines, which are not rows."""

    path: Path
    kind: Kind
    num_rows: int
    num_used: int
    num_blank: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `unpad data check` found."""

    files: tuple[FileCheck, ...]
    bad: tuple[BadRow, ...]

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def num_used(self) -> int:
        return sum(file.num_used for file in self.files)

    @property
    def passed(self) -> bool:
        return not self.bad and self.num_used > 0

    def lines(self) -> list[str]:
        """The report as text: every bad row with its fix, every file, the sum."""
        lines = [line for row in self.bad for line in _bad_lines(row)]
        for file in self.files:
            blank = f", {file.num_blank} blank lines" if file.num_blank else ""
            lines.append(f"{file.path}: {file.kind}, {file.num_used} of {file.num_rows} rows usable{blank}")
        lines.append(f"rows read {self.num_rows} = rows used {self.num_used} + bad rows {len(self.bad)}")
        if self.num_used == 0:
            lines.append("E_EMPTY there is no usable row")
        return lines


def check(path: Path) -> CheckReport:
    """Read a file, folder or glob with default settings and report every row that cannot be used.

    Raises:
        SourceError: there is no such file, or it cannot be read.
    """
    data = Data()
    files: list[FileCheck] = []
    every_bad: list[BadRow] = []
    for file in expand([Source(path=str(path))], Path):
        kind = _guess_kind(file, data)
        used, bad = read_file(kind, file, data)
        blank = count_blank_lines(file.path) if file.format == "jsonl" else 0
        files.append(FileCheck(file.path, kind, len(used) + len(bad), len(used), blank))
        every_bad += bad
    return CheckReport(tuple(files), tuple(every_bad))


def _guess_kind(file: SourceFile, data: Data) -> Kind:
    try:
        first = list(islice(rows(file, data, chat.FIELDS), PEEK_ROWS))
    except OSError:
        return "text"  # reading it names the fault
    values = [row[1] for row in first if not isinstance(row, BadRow)]
    return "chat" if 2 * sum(map(chat.looks_like_chat, values)) > len(values) else "text"


def _bad_lines(row: BadRow) -> list[str]:
    found = [f"  found: {row.excerpt}"] if row.excerpt else []
    return [f"{row.where}: {row.code} {row.what}", *found, f"  do: {row.fix}"]
