"""Paths and names given by users: decoding, limits and error messages, only here."""

import os
import stat
from pathlib import Path

from unpad.errors import RecipeError
from unpad.terminal.printing import escaped

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes; the limit of systems
FORMATS = (  # other names are the user's choice
    *(".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".npy", ".npz", ".xlsx", ".yaml", ".yml", ".html"),
    *(".svg", ".png", ".pdf", ".onnx", ".gguf", ".safetensors", ".pt", ".pth", ".bin", ".zip", ".gz"),
)
RENAME = "rename it, for example with `convmv -f GBK -t UTF-8 --notest NAME`"


def path_fault(path: str) -> str:
    """Return the fault that makes a path invalid on any machine, such as a NUL character; "" for a valid path."""
    if not path:
        return "the path is empty; write . for the working directory"
    if "\0" in path:
        return "the path holds a NUL character"
    if not is_utf8(path):
        return "the path is not UTF-8"
    if len(path.encode()) > LONGEST_PATH:
        return f"the path has {len(path.encode()):,} bytes, more than {LONGEST_PATH:,}"
    longest = max(len(part.encode()) for part in path.split("/"))
    return f"a name in the path has {longest:,} bytes, more than {LONGEST_NAME}" if longest > LONGEST_NAME else ""


def is_utf8(name: str) -> bool:
    """True if a name was UTF-8 in the file system or on the command line; other bytes become surrogates in Python."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def user_path(path: str | Path) -> Path:
    """A user's path, with ~ expanded.

    Raises:
        RecipeError: it is empty, invalid on this system, or begins with ~ and the name of no user.
    """
    text = os.fspath(path)
    if fault := path_fault(text):
        raise RecipeError(f"E_NAME {fault}", where=_short(text), fix=RENAME if "UTF-8" in fault else "correct the path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        fix = "write the whole path, which begins with /"
        raise RecipeError(f"E_NAME there is no user {_short(user)}", where=_short(text), fix=fix) from None


def new_path(path: str | Path) -> Path:
    """As `user_path`, for a file or folder to write, which appears in lists and logs.

    Raises:
        RecipeError: also if it holds a control character, such as a line break.
    """
    found = user_path(path)
    if escaped(str(found)) != str(found):
        what = "E_NAME the name would hold a control character, such as a line break"
        raise RecipeError(what, where=_short(str(found)), fix="choose another name")
    return found


def refuse_format(out: Path, *written: str) -> None:
    """Refuse a name that promises another format than that of the file that is written, or of a file for a folder.

    Args:
        written: suffixes that the file may have, its own first; none for a folder.

    Raises:
        RecipeError: the name ends in one of `FORMATS` and not so.
    """
    suffix = out.suffix.lower()
    if suffix not in FORMATS or suffix in written:
        return
    if written:
        fix = f"name it {out.with_suffix(written[0]).name}"
        raise RecipeError(f"the file will be {written[0][1:]}", where=str(out), fix=fix)
    raise RecipeError(f"a folder will be written, and no {suffix[1:]}", where=str(out), fix=f"name it {out.stem}")


def is_special(path: Path) -> bool:
    """True for a pipe, a device or a socket, where reading may never end; False for a missing path."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _short(path: str) -> str:
    return path if len(path) <= 100 else f"{path[:60]}…{path[-30:]}"
