"""Model of a disk: what has been written, what of it has reached the device, and what a power cut may leave.

Flushing a file makes its contents durable and not its name; flushing a folder makes the names in it durable. What was
not flushed may be there, in part or not at all, and in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Operation = tuple[Any, ...]  # name, then arguments; see `Disk.apply`
Acknowledged = dict[tuple[str, str], Any]
Tree = dict[str, bytes | None]  # contents of files by path; None for a folder
# What becomes of contents that were not flushed.
CONTENTS = ("lost", "kept", "torn", "zeros", "hole", "any")
# What becomes of names that were not flushed.
NAMES = ("lost", "kept", "first", "some")
MODES = tuple(product(CONTENTS, NAMES))


@dataclass(eq=False)
class File:
    """Contents of a file; `pending` are writes and cuts since its last flush."""

    number: int
    data: bytes = b""
    durable: bytes = b""
    pending: list[Operation] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        self.data = _changed(self.data, operation)
        self.pending.append(operation)

    def flush(self) -> None:
        self.durable, self.pending = self.data, []


@dataclass(eq=False)
class Folder:
    """Names in a folder; `pending` are changes since its last flush."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Operation] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        _rename(self.names, operation)
        self.pending.append(operation)

    def flush(self) -> None:
        self.durable, self.pending = dict(self.names), []


class Disk:
    """A disk that operations are done on, one after the other.

    Args:
        acknowledged: by kind and path the newest value that was reported as saved, unless it is to be deleted.
    """

    def __init__(self) -> None:
        self.root = Folder()
        self.files: dict[int, File] = {}
        self.acknowledged: Acknowledged = {}

    def apply(self, operation: Operation) -> None:
        """Do one operation; the paths are relative to the root."""
        match operation:
            case ("write" | "truncate" as name, number, *change):
                self.files[number].apply((name, *change))
            case ("flush", number):
                self.files[number].flush()
            case ("flush names", path):
                node = self.find(path)
                assert isinstance(node, Folder), path
                node.flush()
            case ("acknowledge", kind, path, value):
                self.acknowledged[kind, path] = value
            case ("withdraw", path):
                self.acknowledged = {key: value for key, value in self.acknowledged.items() if key[1] != path}
            case _:
                self._apply_to_names(operation)

    def _apply_to_names(self, operation: Operation) -> None:
        match operation:
            case ("create", path, number):
                file = self.files[number] = File(number)
                self._put(path, file)
            case ("mkdir", path):
                self._put(path, Folder())
            case ("rename", source, target):
                self._move(source, target)
            case ("link", source, target):
                self._put(target, self.find(source))
            case ("delete", path):
                folder, name = self._parent(path)
                folder.apply(("delete", name, folder.names[name]))
            case _:
                raise ValueError(operation)

    def find(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in path.split("/") if path not in ("", ".") else ():
            assert isinstance(node, Folder), path
            node = node.names[part]
        return node

    def tree(self) -> Tree:
        """What is there while the power is on."""
        return {path: node.data if isinstance(node, File) else None for path, node in _walk(self.root, "names")}

    def after_power_cut(self, contents: str, names: str, draw: random.Random) -> tuple[Tree, dict[str, File]]:
        """What may be there after a power cut, and the files behind the names."""
        tree: Tree = {}
        files: dict[str, File] = {}
        folders = [("", self.root)]
        left: dict[int, bytes] = {}  # a file of two names has one content
        while folders:
            place, folder = folders.pop()
            for name, node in sorted(_names_left(folder, names, draw).items()):
                path = f"{place}{name}"
                if isinstance(node, Folder):
                    tree[path] = None
                    folders.append((f"{path}/", node))
                else:
                    if node.number not in left:
                        left[node.number] = _contents_left(node, contents, draw)
                    tree[path], files[path] = left[node.number], node
        return tree, files

    def _put(self, path: str, node: File | Folder) -> None:
        folder, name = self._parent(path)
        folder.apply(("set", name, node))

    def _move(self, source: str, target: str) -> None:
        (old, old_name), (new, new_name) = self._parent(source), self._parent(target)
        node = old.names[old_name]
        if old is new:  # at once: all journals of file systems keep the two names of a rename together
            old.apply(("move", old_name, new_name, node))
        else:
            new.apply(("set", new_name, node))
            old.apply(("delete", old_name, node))

    def _parent(self, path: str) -> tuple[Folder, str]:
        place, _, name = path.rpartition("/")
        folder = self.find(place)
        assert isinstance(folder, Folder), path
        return folder, name


def _walk(root: Folder, which: str) -> list[tuple[str, File | Folder]]:
    found, folders = [], [("", root)]
    while folders:
        place, folder = folders.pop()
        for name, node in getattr(folder, which).items():
            found.append((f"{place}{name}", node))
            if isinstance(node, Folder):
                folders.append((f"{place}{name}/", node))
    return found


def _rename(names: dict[str, File | Folder], operation: Operation) -> None:
    match operation:
        case ("set", name, node):
            names[name] = node
        case ("delete", name, node):
            if names.get(name) is node:  # or what replaced it has come earlier
                del names[name]
        case ("move", source, target, node):
            if names.get(source) is node:
                del names[source]
            names[target] = node


def _names_left(folder: Folder, mode: str, draw: random.Random) -> dict[str, File | Folder]:
    if mode == "kept" or not folder.pending:
        return folder.names
    names = dict(folder.durable)
    if mode == "first":
        chosen = folder.pending[: draw.randrange(len(folder.pending) + 1)]
    else:
        chosen = [operation for operation in folder.pending if mode == "some" and draw.random() < 0.5]
    for operation in chosen:
        _rename(names, operation)
    return names


def _changed(data: bytes, operation: Operation) -> bytes:
    if operation[0] == "truncate":
        size = operation[1]
        return data[:size] + bytes(max(0, size - len(data)))
    offset: int = operation[1]
    new: bytes = operation[2]
    return data[:offset] + bytes(max(0, offset - len(data))) + new + data[offset + len(new) :]


def _contents_left(file: File, mode: str, draw: random.Random) -> bytes:
    if not file.pending:
        return file.data
    if mode == "any":
        mode = draw.choice(CONTENTS[:-1])
    if mode == "lost":
        return file.durable
    if mode == "kept":
        return file.data
    if mode == "torn":  # up to a byte of one of the writes
        count = draw.randrange(len(file.pending))
        data = file.durable
        for operation in file.pending[:count]:
            data = _changed(data, operation)
        last = file.pending[count]
        if last[0] == "write":
            data = _changed(data, ("write", last[1], last[2][: draw.randrange(len(last[2]) + 1)]))
        return data
    writes = [operation for operation in file.pending if operation[0] == "write"]
    if not writes:
        return file.durable
    first = min(offset for _, offset, _ in writes)
    start = first + draw.randrange(max(len(file.data) - first, 1))
    stop = len(file.data) if mode == "zeros" else start + 1 + draw.randrange(max(len(file.data) - start, 1))
    return file.data[:start] + bytes(max(0, min(stop, len(file.data)) - start)) + file.data[stop:]
