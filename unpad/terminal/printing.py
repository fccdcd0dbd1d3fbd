"""The one place that prints: lines, errors, streams of text and JSON, on the standard streams or a console;
and the command that messages suggest.

File names, keys of rows, names of columns and classes, messages of libraries and answers of models are data. Control
characters in them, escape sequences, line breaks and changes of direction among them, are shown as escapes and never
reach the terminal.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unpad.errors import UnpadError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Control characters of both sets, line and paragraph separators, overrides and isolates of the direction of writing,
# and surrogates, which stand for bytes of names that are not UTF-8.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    r"""Return a text of one line with its control characters as \n, \x1b or \u202e, and bytes of no UTF-8 as \xd6.

    Args:
        keep: control characters to leave as they are.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()


MASK = "***"
# User and password before a host, where an @ without a colon may belong to a name; and values of a query.
_USER = re.compile(r"((?:https?|s?ftp)://|\w+://(?=[^/?\s@]*:))[^/?\s]*@")
_SECRET = re.compile(
    r"(?i)(?<=[?&])((?:x-(?:amz|goog)-[\w-]+|[\w-]*(?:token|sig|signature|secret|password|api_?key|key-?pair-?id)"
    r"|auth|awsaccesskeyid|policy|expires|s[eprvt]|spr)=)[^&\s'\"},\]]+"
)


def masked(text: str) -> str:
    """A text with *** for the passwords, tokens and signatures of addresses in it."""
    return _SECRET.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def print_lines(lines: Iterable[str], *, to_errors: bool = False) -> None:
    """Print lines on standard output, or on standard error."""
    for line in lines:
        print(escaped(line), file=sys.stderr if to_errors else sys.stdout)


def print_text(text: str, *, to_errors: bool = False) -> None:
    """Print a text unchanged, line breaks and tabs included, unbuffered and without a final line break."""
    print(escaped(text, keep="\n\t"), end="", file=sys.stderr if to_errors else sys.stdout, flush=True)


def print_json(value: Any) -> None:
    """Print a value of JSON, in which control characters can be written as escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)
    print(_CONTROL.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text))


def print_error(error: UnpadError) -> None:
    """Print an error that a user can cause on standard error: what, where, what to do."""
    print_lines(map(masked, error.lines), to_errors=True)


def show_cursor() -> None:
    """Show the terminal's cursor again, after a process that hid it has been killed."""
    print("\x1b[?25h", flush=True)


def print_styled(console: "Console", line: str, *, wraps: bool = True, style: str | None = None) -> None:
    """Print a line on a console, above its live display.

    Args:
        wraps: whether the terminal breaks long lines, and not the console.
    """
    console.print(escaped(line), style=style, markup=False, highlight=False, emoji=False, soft_wrap=wraps)


def print_wrapped(console: "Console", text: "Text", width: int, indent: int) -> None:
    """Print a text whose control characters are escaped, broken at its spaces and its own line breaks."""
    for line in text.wrap(console, width - indent):
        line.rstrip()
        line.pad_left(indent)
        console.print(line, soft_wrap=True)


def resume_run(folder: Path, *options: str) -> str:
    """The command that continues a run with its saved recipe and overrides."""
    name = str(folder)
    if "/" not in name:  # it could be read as a recipe's name, or an option
        name = f"./{name}"
    return shlex.join(["unpad", "train", "--resume", name, *options])
