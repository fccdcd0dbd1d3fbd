"""Commands in forked processes, whose parent has imported torch once: a victim costs what its run costs.

The parent runs no model: a forked child would wait for threads that did not come along.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from unpad.__main__ import main
from unpad.run.folder import COMMAND, OF_RUN, RUN_ID, STATE
from unpad.storage.folders import MANIFEST

torch.set_num_threads(1)
for _name in ("decoder", "vit", "vision_language.model", "set_sequence.model"):
    import_module(f"unpad.models.{_name}")
for _name in ("data.text", "data.images", "data.vqa", "data.patients", "training.loop", "run.report.page"):
    import_module(f"unpad.{_name}")

LIMIT_S, HANGS = 300.0, 97
SAME = (
    *("metrics.jsonl", "metrics.csv", "recipe.yaml", "run.json", "tokenizer.json", "classes.json", "events.json"),
    "samples.jsonl",  # of the end, which a run killed after its last checkpoint makes up for
)


@dataclass(frozen=True)
class Ended:
    """End of a command: its exit code, or minus the signal that ended it, and what it printed on standard error."""

    code: int
    error: str

    @property
    def is_unforeseen(self) -> bool:
        """True if the program itself failed."""
        return self.code in (99, HANGS) or "Traceback (most recent call last)" in self.error


def start(arguments: list[str], cache: Path, errors: Path, prepare: Callable[[], object] | None = None) -> int:
    """Begin `unpad ARGUMENTS` in a child, and return its pid.

    Args:
        prepare: called in the child before the command.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    errors.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        try:
            _redirect(errors)
            os.environ |= {"UNPAD_CACHE": str(cache), "TMPDIR": str(errors.parent)}
            if prepare:
                prepare()
            sys.argv = ["unpad", *arguments]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # after the command
        code = -signal.SIGINT % 256
    finally:
        os._exit(code)


def _redirect(errors: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def ended(pid: int, errors: Path, signals: tuple[int, ...] = (), after_s: float = 0.0) -> Ended:
    """Wait for a child, and send it `signals`, one right after the other, if it is not over by then.

    Args:
        after_s: processor time of the child's main thread, so that a busy machine changes little.
    """
    latest, code = time.monotonic() + LIMIT_S, None
    left = list(signals)
    while code is None:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > latest:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(HANGS, f"it hangs: not over after {LIMIT_S:.0f} s")
        elif left and _processor_s(pid) >= after_s:
            while left:
                os.kill(pid, left.pop(0))
        else:
            time.sleep(0.002)
    return Ended(code, errors.read_text(encoding="utf-8", errors="backslashreplace") if errors.exists() else "")


def _processor_s(pid: int) -> float:
    """Seconds that a child's main thread has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0]) / 1e9


def call(arguments: list[str], cache: Path, errors: Path, prepare: Callable[[], object] | None = None) -> Ended:
    """Run `unpad ARGUMENTS` in a child to its end."""
    return ended(start(arguments, cache, errors, prepare), errors)


def digests(folder: Path) -> dict[str, str]:
    """sha256 of the files of a run that must not depend on what happened to it, by their names in it, without the
    random id of the run.

    A temporary file that a process has left is named too, without a hash.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith((".tmp-", ".old-")) for part in name.split("/")):
            found[name] = ""
        elif path.is_file() and (path.name in SAME or "checkpoints" in path.parts):
            found[name] = hashlib.sha256(_without_id(path)).hexdigest()
    return found


def _without_id(path: Path) -> bytes:
    """Content of a run's file without everything that depends on its id; the rest is equal to the byte in equal
    runs."""
    data = path.read_bytes()
    if path.name not in (COMMAND, STATE, MANIFEST):
        return data
    record = json.loads(data)
    if path.name == COMMAND:
        record.pop(RUN_ID, None)
    elif path.name == STATE:
        record["values"].pop(OF_RUN, None)
    else:
        record["files"].pop(STATE, None)  # its hash; the file itself is compared too
    return json.dumps(record, ensure_ascii=False).encode()


def unlike(found: dict[str, str], expected: dict[str, str], *, saved_elsewhere: bool = False) -> list[str]:
    """Names that differ between two results of `digests`.

    Args:
        saved_elsewhere: whether a signal had one of the runs save at another step, so that other checkpoints than the
            newest may be of other steps.
    """
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if not saved_elsewhere:
        return names
    newest = max(name.split("/")[1] for name in expected if name.startswith("checkpoints/step-"))
    of_one = found.keys() ^ expected.keys()
    return [name for name in names if not ("checkpoints/step-" in name and name in of_one and newest not in name)]
