"""Output of the processes of a run: the first has the terminal, each other one a log of its own.

Output from before the run directory is known goes to a temporary file. `keep` moves this to RUN/processes/RANK.log,
where all later output is appended. If the process fails before that, the file is printed on its original standard
error: by the process itself, or by `launch`, which knows the file.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from unpad import storage
from unpad.storage.disk import disk_errors, file_mode, write_all

LOGS = "UNPAD_LOGS"  # set by `launch`: the folder of the temporary files
FOLDER = "processes"  # in a run directory

_begun: list[OwnLog] = []  # log of this process, if it has one


class OwnLog:
    """Standard output and standard error of this process, in a file of its own.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.kept = rank, False
        self._owns_folder = LOGS not in os.environ
        self._folder = Path(os.environ.get(LOGS) or tempfile.mkdtemp(prefix="unpad-"))
        self._path = self._folder / f"{rank}.log"
        self._terminal = os.dup(2)
        _redirect(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # a killed process loses unwritten output

    def keep(self, folder: Path, private: bool) -> None:
        """Move the output so far into the run directory, and append all later output to it.

        Raises:
            DiskError: it cannot be written there.
        """
        if self.kept:
            return
        path = log_of(folder, self.rank)
        storage.make_folder(path.parent, private=private)
        with disk_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, file_mode(path, private))
            sys.stdout.flush()
            write_all(descriptor, path, self._path.read_bytes())
        _redirect(descriptor)
        self.kept = True
        self._remove()

    def show(self) -> None:
        """Print the log on the terminal, if it was not kept and `launch` will not print it."""
        if self.kept or not self._owns_folder:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with suppress(OSError):
            os.write(self._terminal, shown(self.rank, self._path).encode())
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        if self._owns_folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def begin(rank: int) -> OwnLog | None:
    """Redirect the output of this process, if it is not the first of its run."""
    if rank == 0:
        return None
    _begun[:] = [OwnLog(rank)]
    return _begun[0]


def keep(folder: Path, *, private: bool) -> None:
    """Keep the log of this process in the run directory, if it has one.

    Args:
        private: whether only the owner may read it.

    Raises:
        DiskError: it cannot be written there.
    """
    for log in _begun:
        log.keep(folder, private)


def log_of(folder: Path, rank: int) -> Path:
    """Log of a process in the directory of its run."""
    return folder / FOLDER / f"{rank}.log"


def shown(rank: int, path: Path) -> str:
    """Text of a log under a line that names its process; "" without a log."""
    try:
        text = path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""
    return f"process {rank}:\n{text}" if text.strip() else ""


def _redirect(descriptor: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
