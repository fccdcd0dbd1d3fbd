"""Commands that the pages show with their output, run and compared.

python docs/outputs.py             every one, the training of `make demo` among them (`make readme`)
python docs/outputs.py plan prove  those whose command holds one of the words

A block counts when its first line is `$ COMMAND`; `$ cat FILE` shows a file that the commands after it read.
A line `...` stands for any lines, `...` in a line for any text, and ` # ` begins a gloss. Times, speeds and memory may
differ, all else may not: losses and replies are those of one kind of processor, named on the page. Of the pages in
`WORDS_ALONE` all numbers may differ, and with them where lines break.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
MACHINE = re.compile(
    r"[\d.,]+ ?(?:GiB|MiB|GB|MB|KB|min|s|h|tok/s|seq/s)\b"  # times, memory, speeds
    r"|[\d.e-]+(?= <= )"  # an error beside its bound
    r"|\bwait\s+[\d.]+%"
    r"|\b\de-1\d +(?:0|\de-1\d)\b"  # a gradient and a loss that differ by rounding
)


# What the doctor tries depends on the time that trials take, and what examples learn on the kind of processor.
WORDS_ALONE = ("doctor.md", "examples.md")
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?%?|\|.*|\+[-=]{2,}")  # or a line of a drawing
OF_A_RUN = ("$ unpad replay ", "$ unpad trace ")  # that the block before has made


@dataclass(frozen=True)
class Shown:
    """A command and the lines that its page shows below it."""

    page: str
    line: int  # of the page, from 1
    command: str
    expected: tuple[str, ...]


def blocks(page: Path) -> Iterator[list[Shown]]:
    """Commands of each block of a page that begins with one; with those of the block after it that need its run."""
    inside: list[str] | None = None
    block: list[Shown] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if inside and inside[0].startswith("$ "):
                if block and not inside[0].startswith(OF_A_RUN):
                    yield block
                    block = []
                block += _commands(page.name, number - len(inside), inside)
            inside = [] if inside is None else None
        elif inside is not None:
            inside.append(line)
    if block:
        yield block


def _commands(page: str, first: int, lines: list[str]) -> Iterator[Shown]:
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield Shown(page, first + start, lines[start][2:], tuple(lines[start + 1 : stop]))


def start(words: list[str], folder: str) -> str:
    """What a command prints in a folder, as a process of its own."""
    if words[0] == "unpad":
        words = [sys.executable, "-m", *words]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode("utf-8")


def run(block: list[Shown], command: Callable[[list[str], str], str] = start) -> Iterator[tuple[Shown, str]]:
    """Each command of a block but `cat`, with what it printed, in a folder of their own.

    Args:
        command: runs a command, as `start` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        for shown in block:
            words = shlex.split(shown.command)
            if words[0] == "cat":
                (Path(folder) / words[1]).write_text("".join(f"{line}\n" for line in shown.expected), encoding="utf-8")
                continue
            if words == ["make", "demo"]:
                words = ["make", "--silent", "--no-print-directory", "-C", str(ROOT), "demo", f"RUN={folder}/demo"]
            elif words[0] == "python" and words[1].startswith("examples/"):
                words = [sys.executable, str(ROOT / words[1]), *words[2:]]
            elif words[0] != "unpad":
                raise ValueError(f"{shown.page}:{shown.line}: only unpad, cat, make demo and examples can be run")
            yield shown, command(words, folder)


def drift(shown: Shown, printed: str) -> str | None:
    """First line of the page that the output does not have at its place; None if it has all of them."""
    words_alone = shown.page in WORDS_ALONE
    patterns = [_pattern(line, words_alone) for line in shown.expected]
    text = "".join(f"{_plain(line, words_alone)}\n" for line in printed.splitlines())
    if words_alone:
        text = re.sub(r"\s+", " ", text)
    if re.fullmatch("".join(patterns), text):
        return None
    for count in range(1, len(patterns) + 1):
        if not re.match("".join(patterns[:count]), text):
            return shown.expected[count - 1]
    return "(the output goes on)"


def _pattern(line: str, words_alone: bool) -> str:
    line = re.sub(r"\s+# .*", "", line)
    if line.strip() == "...":
        return ".*?" if words_alone else r"(?:.*\n)*?"
    line = line.strip() if words_alone else line
    plain = ".*".join(re.escape(_plain(part, words_alone)) for part in re.split(r" ?\.\.\.", line))
    return plain + (r"\s*" if words_alone else r" *\n")


def _plain(line: str, words_alone: bool) -> str:
    """A line without the figures of a machine and with single blanks."""
    line = MACHINE.sub("~", line)
    return re.sub(r"\s+", " ", NUMBER.sub("~", line) if words_alone else line)


def main(words: list[str]) -> int:
    """Print each command and the first line that drifted; 1 if any did."""
    num_drifted = 0
    for page in PAGES:
        for block in blocks(page):
            if words and not any(word in shown.command for shown in block for word in words):
                continue
            for shown, printed in run(block):
                line = drift(shown, printed)
                num_drifted += line is not None
                print(f"{'same ' if line is None else 'DRIFT'}  {shown.page}:{shown.line}  {shown.command}", flush=True)
                if line is not None:
                    print(f"the page has:\n  {line}\nthe command printed:\n" + re.sub("^", "  ", printed, flags=re.M))
    return int(num_drifted > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
