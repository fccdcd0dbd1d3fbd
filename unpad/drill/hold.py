"""A process that takes the lock of a folder and keeps it until killed: `python -m unpad.drill.hold FOLDER`.

It prints `held`, `refused` if another process has the lock, or another error. It ends when its input is closed, and so
with its parent.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unpad.errors import RunInUseError, UnpadError
from unpad.storage import RunLock
from unpad.terminal.printing import print_text


def main(folder: Path) -> None:
    try:
        with RunLock(folder):
            print_text("held\n")
            sys.stdin.read()
    except RunInUseError:
        print_text("refused\n")
    except UnpadError as error:
        print_text(f"{error.what}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
