"""Comparison of the processes of a run: their settings at its start, and their weights at every checkpoint.

Processes that differ in anything that determines the bits would drift apart without an error.
"""

import hashlib
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from unpad import storage
from unpad.errors import UnlikeProcessesError
from unpad.processes.group import Group
from unpad.recipes.recipe import Recipe
from unpad.run.base import fingerprint
from unpad.terminal.printing import resume_run
from unpad.training.progress import DECIDE_BITS
from unpad.training.setup import Setup

SEEN_S = 60.0
LIBRARIES = ("numpy", "pillow")  # their versions determine plans and decoded pictures
FIXES = {
    "run directory": "give every host the same run directory",
    "recipe": "start all processes with the same recipe and overrides",
    "data": "give every host the same files",
    "code": "install the same version of unpad on every host",
    **{name: f"install the same {name} on every host" for name in ("torch", *LIBRARIES)},
    "threads": "set train.threads, or the same OMP_NUM_THREADS for all processes",
}


def check_recipe(group: Group, folder: Path, recipe: Recipe, *, exists: bool) -> None:
    """Compare the recipe and the run directory of this process with those of the others, before anything is read.

    Args:
        exists: whether this process sees a run in the folder.

    Raises:
        UnlikeProcessesError: a process has another recipe, or another run directory.
    """
    _compare(group, folder, {"run directory": str(exists), "recipe": storage.sha256(recipe.to_yaml())})


def check_alike(setup: Setup) -> None:
    """Compare this process with the others of its run, before the run directory is taken.

    Raises:
        UnlikeProcessesError: data, code or environment of a process differ from those of the first.
    """
    if setup.group.size == 1:
        return
    environment = {name: str(setup.environment[name]) for name in DECIDE_BITS}
    libraries = {name: version(name) for name in LIBRARIES}
    facts = {"code": code_hash(), **libraries, **environment, "data": setup.data.fingerprint()}
    _compare(setup.group, setup.folder, facts)


def check_folder(group: Group, folder: Path, timeout_s: float) -> None:
    """Compare the run directories of all processes by the lock file that the first process has written.

    A file from another host may take SEEN_S to appear in a shared folder.

    Args:
        timeout_s: seconds that a process waits for another.

    Raises:
        UnlikeProcessesError: a process sees another run directory.
    """

    def held() -> str:
        with suppress(OSError):
            return (folder / storage.LOCK).read_text(encoding="utf-8")
        return ""

    first, latest = group.of_leader(held), time.monotonic() + min(SEEN_S, timeout_s / 2)
    while held() != first and time.monotonic() < latest:
        time.sleep(1)
    _compare(group, folder, {"run directory": held()})


def check_weights(setup: Setup, step: int) -> None:
    """Compare the weights of all processes, unless each holds only a part.

    Raises:
        UnlikeProcessesError: the weights of a process differ from those of the first.
    """
    if setup.group.size == 1 or not setup.parallelism.replicates:
        return
    first, *others = setup.group.exchange(fingerprint(setup.model.state_dict()))
    for rank, other in enumerate(others, start=1):
        if other != first:
            what = f"process {rank} has other weights than process 0"
            fix = f"continue with {resume_run(setup.folder)}; if it comes again, train without that machine"
            raise UnlikeProcessesError(what, where=f"step {step}", fix=fix)


def _compare(group: Group, folder: Path, facts: dict[str, str]) -> None:
    """Compare named values across several processes; the error names the first that differs."""
    first, *others = group.exchange(facts)
    for name, value in first.items():
        for rank, other in enumerate(others, start=1):
            if other[name] == value:
                continue
            what = f"process {rank} has another {name} than process 0"
            if name in (*LIBRARIES, *DECIDE_BITS):
                what = f"{what}: {other[name]}, not {value}"
            raise UnlikeProcessesError(what, where=str(folder), fix=FIXES.get(name, "train on hosts of one kind"))


def code_hash() -> str:
    """sha256 of the package's sources, kernels included, and their names."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{path.relative_to(root)} {storage.sha256_file(path)}\n".encode())
    return digest.hexdigest()
