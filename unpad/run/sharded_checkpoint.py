"""Checkpoints written by several processes, each with its own rows of the tensors; `shards.py` has the file format."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from unpad import storage
from unpad.errors import LostProcessError
from unpad.processes.divided import is_divided, own_rows
from unpad.processes.group import Group
from unpad.run.checkpoint import PREFIX, State, remove_old, state_file, step_folder, tensor_files
from unpad.run.folder import STATE
from unpad.run.shards import places, shard_name


def save_shards(folder: Path, state: State, keep: int, group: Group) -> Path:
    """Write a checkpoint like `checkpoint.save`; collective.

    All processes must see the same folder, so several hosts need a shared file system. Every process writes, flushes
    and hashes one file for the model and one for all else; then the first process writes the state and the manifest,
    and renames the folder.

    Args:
        state: this process's tensors, sharded or whole.

    Raises:
        NonFiniteError, DiskError: as `checkpoint.save`, in all processes.
        LostProcessError: a process is gone; written files keep a temporary name, and the next run deletes them.
    """
    target = step_folder(folder, state.step)
    temporary = Path(group.of_leader(lambda: str(_begin(target))))
    try:
        with group.together() as talk:
            talk.own = _write_own(temporary, state, group)
        with group.together():
            if group.leads:
                entries = {name: entry for listed in talk.told for name, entry in listed.items()}
                entries[STATE] = storage.write_part(temporary, STATE, state_file(state, group.size))
                storage.end_folder(temporary, target, entries)
                remove_old(folder, state.step, keep)
    except LostProcessError:
        raise  # another process may still be writing
    except BaseException:
        if group.leads:
            storage.abandon_folder(temporary)
        raise
    return target


def _begin(target: Path) -> Path:
    storage.make_folder(target.parent)
    storage.clean_leftovers(target.parent, alone=True)
    return storage.begin_folder(target)


def _write_own(temporary: Path, state: State, group: Group) -> dict[str, storage.Entry]:
    """Write the files of this process, and return their entries of the manifest."""
    tensors, rows = {}, {}
    for name, tensor in state.tensors.items():
        if not is_divided(tensor) and not group.leads:
            continue
        values, first = own_rows(tensor)
        if values.numel() or not is_divided(tensor):
            tensors[name], rows[name.removeprefix(PREFIX)] = values, first
    files = tensor_files(State(state.step, tensors, {}), partial(places, rows=rows))
    storage.check_space(temporary, sum(map(len, files.values())))
    return {
        shard: storage.write_part(temporary, shard, data)
        for name, data in files.items()
        for shard in [shard_name(name, group.rank, group.size)]
    }
