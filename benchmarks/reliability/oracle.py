"""Judgement of what a power cut has left: what was reported as saved is there, and nothing is read that is not whole.

The first look is at contents alone; the second reads the directory with the functions that a resumed run reads it with.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.reliability.disk_model import Acknowledged, Disk, File, Tree
from unpad import storage
from unpad.data.tokens.cache import read_sealed
from unpad.errors import UnpadError
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.run import checkpoint
from unpad.run.folder import CHECKPOINTS, RECIPE, read_command
from unpad.run.kept import open_files
from unpad.run.report.history import METRICS, TIMING, metric_fault, timing_fault
from unpad.storage.folders import MANIFEST

GROWING = (".jsonl", "run.lock")  # files that grow line by line, or are overwritten: they may be cut short


STEPS = ("checkpoint", "named")  # kinds of what is acknowledged whose value is a step


class LostError(Exception):
    """Something that was saved is gone, or something that is not whole is taken for whole."""

    @property
    def kind(self) -> str:
        """The sentence without its numbers."""
        return re.sub(r"\d+", "#", str(self))[:100]


class Oracle:
    """Judge of the states that a recording can leave.

    Args:
        end: the disk after all operations.
        scratch: a folder for copies.
    """

    def __init__(self, end: Disk, scratch: Path) -> None:
        self._whole = {number: file.data for number, file in end.files.items()}
        self._manifests = {file.data for path, file in _all_files(end) if path.rpartition("/")[2] == MANIFEST} | {
            data for data in self._whole.values() if data.startswith(b'{\n "files"')
        }
        self._lines = {
            path: file.data.splitlines(keepends=True) for path, file in _all_files(end) if path.endswith(".jsonl")
        }
        self._scratch = scratch
        self._sound: set[int] = set()  # keys of runs that were judged
        self._recipes: dict[bytes, Recipe] = {}
        self.notes: Counter[str] = Counter()  # of what was found, without faults

    def judge(self, root: Path, tree: Tree, files: dict[str, File], acknowledged: Acknowledged) -> None:
        """Judge the state `tree`, which lies in `root`.

        Raises:
            LostError: names what is wrong.
        """
        _look_at_names(tree, files, self._whole)
        for (kind, path), value in acknowledged.items():
            self._look_at_promise(kind, path, value, tree, files)
        for path in [path for path in tree if path.endswith((".bin", ".tokens"))]:
            if (key := hash((path, tree[path]))) not in self._sound:
                self._judge_sealed(root, path, files)
                self._sound.add(key)
        runs = {path.rpartition("/")[0] for path in tree if path.endswith(f"/{RECIPE}")}
        runs |= {path.partition(f"/{CHECKPOINTS}")[0] for kind, path in acknowledged if kind in STEPS}
        for run in sorted(runs):
            own = [(path, content) for path, content in tree.items() if _is_judged(path, f"{run}/")]
            said = [item for item in acknowledged.items() if item[0][0] in STEPS and item[0][1].startswith(f"{run}/")]
            if (key := hash((tuple(sorted(own)), tuple(sorted(said))))) not in self._sound:
                self._judge_run(root, run, acknowledged)
                self._sound.add(key)

    def _look_at_promise(self, kind: str, path: str, value: Any, tree: Tree, files: dict[str, File]) -> None:
        """What a function of storage has returned from is there, or something newer."""
        place, _, name = path.rpartition("/")
        if kind == "made" and tree.get(path, b"") is not None:
            raise LostError(f"the folder {path} was made, and is gone")
        if kind == "file" and (path not in files or files[path].number < value):
            raise LostError(f"{path} was written, and is gone or older")
        if kind == "folder":
            manifests = [f"{path}/{MANIFEST}", f"{place}/.old-{name}/{MANIFEST}"]
            if all(one not in files or files[one].number < value for one in manifests):
                raise LostError(f"the folder {path} was written, and is gone or older")
        if kind == "lines":
            number, size = value
            is_older = path not in files or files[path].number < number
            if is_older or (files[path].number == number and (tree[path] or b"")[:size] != self._whole[number][:size]):
                raise LostError(f"lines of {path} were flushed, and are lost")

    def _judge_sealed(self, root: Path, path: str, files: dict[str, File]) -> None:
        payload, _ = read_sealed(root / path)
        if payload is not None and (root / path).read_bytes() != self._whole[files[path].number]:
            raise LostError(f"{path} is not whole and is read as if it were")

    def _judge_run(self, root: Path, run: str, acknowledged: Acknowledged) -> None:
        folder, place = root / run, f"{run}/{CHECKPOINTS}"
        saved = acknowledged.get(("checkpoint", place), 0)
        try:
            found = checkpoint.load_newest(folder / CHECKPOINTS)
        except UnpadError as error:
            raise LostError(f"no checkpoint of {run} is usable: {error.what}") from None
        step = found[0].step if found else 0
        if step < saved:
            raise LostError(f"{run}: step {saved} was saved, step {step} is the newest")
        self._judge_folders(folder / CHECKPOINTS)
        for (kind, path), best in acknowledged.items():
            if kind == "named" and path.startswith(f"{place}/") and (at := self._step_of(root / path)) < best:
                raise LostError(f"{path} of step {best} was saved, there is {at}")
        self.notes["with a checkpoint" if found else "without a checkpoint"] += 1
        if (folder / RECIPE).exists():  # else nothing is resumed here
            self._judge_resume(folder, run, found and found[0])

    def _judge_resume(self, folder: Path, run: str, newest: checkpoint.State | None) -> None:
        """Read the rest of a run that a resume reads."""
        try:
            recipe = self._recipe(folder / RECIPE)
            read_command(folder)
            open_files(recipe, folder)
        except UnpadError as error:
            raise LostError(f"{run} cannot be opened: {error.what}") from None
        step = newest.step if newest else 0
        self._judge_lines(folder / METRICS, f"{run}/{METRICS}", step, metric_fault)
        self._judge_lines(folder / TIMING, f"{run}/{TIMING}", step, timing_fault)
        progress: dict[str, Any] = newest.values["progress"] if newest else {"best": None}
        if progress["best"] is not None and progress["best_step"] != step:  # else the resume writes it anew
            stages = [f"best-{stage.name}" for stage in recipe.stages or ()]
            name = "best" if progress["stage"] >= len(stages) - 1 else stages[progress["stage"]]
            if self._step_of(folder / CHECKPOINTS / name) != progress["best_step"]:
                raise LostError(f"{name} is not of step {progress['best_step']}, on which step {step} counts")

    def _recipe(self, path: Path) -> Recipe:
        """A recipe, parsed once for the same contents."""
        content = path.read_bytes() if path.exists() else b""
        if content not in self._recipes:
            self._recipes[content] = load_recipe(str(path))
        return self._recipes[content]

    def _judge_folders(self, checkpoints: Path) -> None:
        for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
            if path.name.startswith(".tmp-"):
                continue
            try:
                storage.read_folder(path)
            except UnpadError as error:
                raise LostError(f"{path.name} is not whole: {error.what}") from None
            if (path / MANIFEST).read_bytes() not in self._manifests:
                raise LostError(f"{path.name} is taken for a checkpoint, and none was written like that")

    def _judge_lines(self, path: Path, name: str, step: int, fault: Any) -> None:
        """Cut a file of lines as a resumed run does, and compare what is left with the lines of the whole run."""
        copy = self._scratch / path.name
        copy.write_bytes(path.read_bytes() if path.exists() else b"")
        try:
            with closing(storage.LineLog(copy)) as log:
                log.truncate(lambda row: row["step"] <= step if not fault(row) else None)
        except UnpadError as error:
            raise LostError(f"{name} cannot be read: {error.what}") from None
        found = copy.read_bytes().splitlines(keepends=True)
        expected = [line for line in self._lines.get(name, ()) if json.loads(line)["step"] <= step]
        if fault is timing_fault:  # times differ from one process to the next
            found, expected = ([json.loads(line)["step"] for line in lines] for lines in (found, expected))
        if found != expected:
            raise LostError(f"{name} has {len(found)} of {len(expected)} lines up to step {step}, or others")

    def _step_of(self, path: Path) -> int:
        try:
            return checkpoint.load(path, checkpoint.WEIGHTS).step
        except UnpadError as error:
            raise LostError(f"{path.name}: {error.what}") from None


def _is_judged(path: str, run: str) -> bool:
    """True for a file that the judgement of a run depends on."""
    return path.startswith(run) and "/.tmp-" not in path and not path.endswith(("log.jsonl", "run.lock", ".html"))


def _look_at_names(tree: Tree, files: dict[str, File], whole: dict[int, bytes]) -> None:
    """A name that is not temporary is that of a whole file, or of one that grows."""
    for path, file in files.items():
        parts = path.split("/")
        if path.endswith(GROWING) or any(part.startswith(".tmp-") for part in parts):
            continue
        if tree[path] != whole[file.number]:
            raise LostError(
                f"{path} is not whole: {len(tree[path] or b'')} of {len(whole[file.number])} bytes, or others"
            )


def _all_files(disk: Disk) -> Iterator[tuple[str, File]]:
    folders: list[tuple[str, Any]] = [("", disk.root)]
    while folders:
        place, folder = folders.pop()
        for name, node in folder.names.items():
            if isinstance(node, File):
                yield f"{place}{name}", node
            else:
                folders.append((f"{place}{name}/", node))
