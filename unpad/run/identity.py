"""Random id of a run, in `run.json` and in the `state.json` of its checkpoints, to match the two."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError, ForeignCheckpointError
from unpad.run.folder import CHECKPOINTS, COMMAND, RUN_ID, read_command
from unpad.storage.folders import MANIFEST

OF_RUN = "run"  # among the values of a checkpoint's state
STATE = "state.json"


def run_id(folder: Path) -> str:
    """Id of a run; "" for one that was not trained by this version, and for a folder without `run.json`."""
    with suppress(CheckpointError):
        return str(read_command(folder)[RUN_ID])
    return ""


def new_id() -> str:
    """A unique id, independent of data and seeds."""
    return secrets.token_hex(8)


def refuse_foreign(path: Path, values: dict[str, Any]) -> None:
    """Refuse a checkpoint in the directory of a run that did not write it.

    Args:
        path: the checkpoint, such as RUN/checkpoints/best; values: of its state.

    Raises:
        ForeignCheckpointError: both runs have an id, and these differ.
    """
    folder, wrote = path.parent.parent, values.get(OF_RUN, "")
    mine = run_id(folder) if wrote and path.parent.name == CHECKPOINTS else ""
    if mine and wrote != mine:
        raise ForeignCheckpointError(
            f"{path.name} is a checkpoint of the run {str(wrote)[:40]}, and this is the run {mine[:40]}, by {COMMAND}",
            where=str(path),
            fix="move it back to its own run, or away; to begin with its weights, start a run with train.init_from=RUN",
        )


def without_id(path: Path) -> bytes:
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
