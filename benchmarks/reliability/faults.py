"""Faults of durable writing, each an edit of one place: a flush left out, a wrong order, writing in place.

Every one must be found among the states that a power cut can leave.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from unpad import storage
from unpad.run import checkpoint
from unpad.storage import LineLog


@dataclass(frozen=True)
class Fault:
    """An edit of one place of the package.

    Args:
        module: under unpad; place: text that is in it once, with what the edit takes out between << and >>.
        put: what it puts there.
        recording: in which it is found: `small`, `killed`, or a kind of runs.
    """

    name: str
    module: str
    place: str
    put: str = ""
    recording: str = "small"

    def plant(self) -> None:
        """Give the functions of this process the code of the edited module."""
        module = import_module(f"unpad.{self.module}")
        source = inspect.getsource(module)
        before, _, rest = self.place.partition("<<")
        taken, _, after = rest.partition(">>")
        assert source.count(before + taken + after) == 1, f"unpad.{self.module} has another text: {self.name}"
        edited: dict[str, Any] = dict(vars(module))
        text = source.replace(before + taken + after, before + self.put + after)
        exec(compile(text, str(module.__file__), "exec", dont_inherit=True), edited)
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                _copy_code(value, edited[name])
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for method, function in vars(value).items():
                    if isinstance(function, FunctionType):
                        _copy_code(function, vars(edited[name])[method])


def _copy_code(target: FunctionType, source: FunctionType) -> None:
    if hasattr(target, "__wrapped__"):  # a context
        target, source = target.__wrapped__, source.__wrapped__  # type: ignore[attr-defined]
    if target.__code__.co_freevars == source.__code__.co_freevars:
        target.__code__ = source.__code__


REPLACE = """\
<<        disk.write_file(temporary, payload, private)
        disk.rename(temporary, path)
>>    except"""
RENAME_FIRST = """\
        disk.write_file(temporary, b"", private)
        disk.rename(temporary, path)
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, payload)
        os.fsync(descriptor)
"""
IN_PLACE = """\
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, payload)
        os.fsync(descriptor)
"""
REPLACED = """\
<<            os.close(self._descriptor)  # Windows replaces no open file
            try:
                write_atomic(self.path, b"".join(kept))
            finally:
                self._open()
>>"""
CUT_IN_PLACE = """\
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, b"".join(kept))
"""
SAVE = """\
<<    _write(target, state)
>>    remove_old(folder, state.step, keep)
"""
DELETE_FIRST = """\
    for old in _step_folders(folder).values():
        storage.remove_folder(old)
    _write(target, state)
"""
BEST_FIRST = """\
    if improved and stage.setup.keeps_best:
        from unpad.training.progress import save_best
        save_best(run.setup, progress)
"""

FAULTS = [
    Fault("no flush of a file", "storage.disk", "        <<flush(descriptor, path)>>\n    finally", "pass"),
    Fault("no flush of any name", "storage.disk", "        <<os.fsync(descriptor)>>\n    except", "pass"),
    Fault(
        "no flush of a new folder's name",
        "storage.files",
        "<<            disk.sync_folder(folder.parent)\n>>        if",
    ),
    Fault(
        "no flush of the name of a folder that is there",
        "storage.files",
        "<<        _flush_name(missing[-1].parent if missing else path)\n>>",
        recording="killed",
    ),
    Fault(
        "no flush of a replaced file's name",
        "storage.files",
        "        _replace(path, payload, private)\n<<        disk.sync_folder(path.parent)\n>>",
    ),
    Fault("rename before write", "storage.files", REPLACE, RENAME_FIRST),
    Fault("a file written in place", "storage.files", REPLACE, IN_PLACE),
    Fault("no flush of the names in a folder", "storage.folders", "<<    sync_folder(temporary)\n>>"),
    Fault(
        "no flush of a written folder's name",
        "storage.folders",
        "            return\n<<        sync_folder(path.parent)\n>>",
    ),
    Fault(
        "no flush of a replaced folder's name",
        "storage.folders",
        "<<    sync_folder(path.parent)\n>>    if os.path.lexists(old):\n",
    ),
    Fault(
        "no flush before a folder is deleted",
        "storage.folders",
        "<<        sync_folder(path.parent)\n>>        delete(temporary)",
    ),
    Fault(
        "the old folder deleted first",
        "storage.folders",
        "            <<rename(path, old)>>\n        rename(temporary, path)\n",
        "_remove(path)",
    ),
    Fault("no flush of lines", "storage.line_log", "            <<flush(self._descriptor, self.path)>>", "pass"),
    Fault(
        "no flush of a new log's name",
        "storage.line_log",
        "            if status.st_size == 0:\n                <<sync_folder(self.path.parent)>>",
        "pass",
    ),
    Fault(
        "lines cut in place",
        "storage.line_log",
        REPLACED,
        CUT_IN_PLACE,
    ),
    Fault("old checkpoints deleted first", "run.checkpoint", SAVE, DELETE_FIRST),
    Fault("a checkpoint before its lines", "run.monitor", "<<        self._metrics.sync()\n>>", recording="images"),
    Fault(
        "the best weights before their checkpoint",
        "training.stage_loop",
        "<<>>    if is_saved or improved or stopping or _is_over(stage):\n",
        BEST_FIRST,
        recording="patients",
    ),
]


def write_small(root: Path) -> None:
    """Use every function of storage that writes, and save checkpoints."""
    run = root / "runs" / "run"
    storage.make_folder(run)
    log = LineLog(run / "metrics.jsonl")
    log.append({"step": 0})
    log.sync()
    storage.write_folder(run / "kept", {"a": b"a" * 300, "b": b"b"})
    for step in range(1, 5):
        log.append({"step": step})
        log.sync()
        state = checkpoint.State(step, {"model.x": torch.full((40,), float(step))}, {})
        checkpoint.save(run / "checkpoints", state, 2)
        checkpoint.save_named(run / "checkpoints", "best", state)
    log.truncate(lambda row: row["step"] < 3)
    log.append({"step": 3})
    log.sync()
    storage.remove_folder(run / "kept")
    for text in ("first", "second, which is longer"):
        storage.write_atomic(run / "page", text * 20)
    log.close()
