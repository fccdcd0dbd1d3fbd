"""`unpad merge`: convert a run with adapters to a plain run, with the adapters added to its weights."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from unpad import storage
from unpad.errors import RecipeError
from unpad.run import checkpoint
from unpad.run.base import KEY, run_weights
from unpad.run.checkpoint import State, model_tensors
from unpad.run.folder import (
    CHECKPOINTS,
    COMMAND,
    KEPT,
    MADE_BY,
    RECIPE,
    RUN_ID,
    find_run,
    read_command,
    refuse_run,
    run_recipe,
)
from unpad.run.identity import OF_RUN

LEFT = (storage.LOCK, RECIPE, COMMAND, "report.html")  # files that are not copied


def merge_run(name: str | Path, out: Path) -> Path:
    """Write a run without adapters that is equivalent to a run with adapters, and needs neither peft nor the base.

    Its logits differ from the adapted model's by the rounding of fp32. It has the best weights, and cannot be resumed.

    Args:
        name: run directory, or its name under runs/.
        out: directory of the new run.

    Returns:
        `out`.

    Raises:
        RecipeError: the run has no adapters, or `out` holds a run already.
        CheckpointError: the base of the adapters is missing or has changed.
        RunInUseError: another process writes to `out`.
    """
    folder = find_run(name)
    refuse_run(out)
    recipe, command = run_recipe(folder), read_command(folder)
    weights, state = run_weights(folder)
    if KEY not in state.values:
        raise RecipeError("this run has no adapters to merge", where=str(folder), fix="use it as it is")
    storage.make_folder(out, private=_is_private(folder))
    values = {key: value for key, value in state.values.items() if key not in (KEY, OF_RUN)}
    command.pop(RUN_ID, None)
    command |= {MADE_BY: f"unpad merge {folder}"}
    with storage.RunLock(out):
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name not in LEFT:
                storage.write_atomic(out / path.name, path.read_bytes(), private=_is_private(path))
        if (folder / KEPT).is_dir():
            storage.write_folder(out / KEPT, storage.read_folder(folder / KEPT))
        checkpoint.save_named(out / CHECKPOINTS, "best", State(state.step, model_tensors(weights), values))
        storage.write_atomic(out / COMMAND, json.dumps(command, ensure_ascii=False, indent=1) + "\n")
        storage.write_atomic(out / RECIPE, recipe.model_copy(update={"lora": None}).to_yaml())  # last: now it is a run
    return out


def _is_private(path: Path) -> bool:
    """True if only its owner may read a file or enter a folder."""
    return stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
