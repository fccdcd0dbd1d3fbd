"""Token shards: a source file is encoded once, checked when it is opened, and shared by processes.

The name of a cache file is the hash of all its inputs, so it never goes stale, and the file starts with the sha256 of
its content:

    8 bytes    magic
    32 bytes   sha256 of the rest
    the rest   a shard: 8 bytes header length, JSON header, arrays at multiples of 64; or any other bytes

A file is read and checked before it is mapped: a file cut short under a mapping would kill the process. Files of the
cache are never changed in place.
"""

import hashlib
import json
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from importlib.metadata import version
from io import BufferedReader
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import TypeAdapter

from unpad.data.sources.example import LOUD, BadRow, Unread
from unpad.data.tokens.lost import commonest
from unpad.errors import DiskError, SourceError
from unpad.storage import cache_folder, clean_leftovers, make_folder, sha256, sha256_file, write_atomic

DATA = Path(__file__).parents[1]
CODE = ("sources/*.py", "tokens/*.py")  # code that determines the tokens of a file
LIBRARIES = ("numpy", "pyarrow", "rjieba", "tokenizers")
MAGIC = b"unpadtk1"
SEALED = len(MAGIC) + 32  # bytes before the hashed content
ALIGN = 64
WRITE_TRIES = 3
NOTED_FROM = 32 << 20  # bytes of a file; fewer are hashed in a twentieth of a second
SETTLED = 2.0  # seconds since a file changed, within which another change may leave its times as they are
MOST_LOST = 50  # lost characters that a shard names
# Smaller shards are read into memory: a mapping needs a file descriptor, and a folder may have more files than those.
MAP_FROM = 256 << 10
DTYPES = {
    "offsets": "<i8", "loss_mask": "|b1", "content_key": "<u8", "declared": "|i1", "copy": "|u1", "num_targets": "<i4",
    "target_chars": "<i4", "target_bytes": "<i4", "num_chars": "<i4", "lost_chars": "<i4", "lost_target_chars": "<i4",
    "lost_target_bytes": "<i4", "num_system": "<i4", "num_chosen": "<i4", "details": "|u1", "faults": "|u1",
}  # fmt: skip
TOKEN_DTYPES = ("<u2", "<u4")
Stored = TypeVar("Stored")
NOT_OF_ROWS = ("offsets", "loss_mask", "details", "faults")  # columns of other lengths than one value per row


def make_key(*parts: object) -> str:
    """Hexadecimal sha256 of JSON values; equal values give equal keys in any process."""
    return sha256(json.dumps(parts, ensure_ascii=False, sort_keys=True))


@cache
def code_key() -> str:
    """Hash of the code and the libraries that turn files into tokens: another version does not read old shards."""
    return make_key([version(name) for name in LIBRARIES], [[path.name, sha256_file(path)] for path in code_files()])


def code_files() -> list[Path]:
    """Files of the package that turn files into tokens."""
    return sorted(path for pattern in CODE for path in DATA.glob(pattern))


def noted_sha256(file: BufferedReader) -> str:
    """Hexadecimal sha256 of the rest of an open file. That of a large one is noted, and not computed again while the
    system says by place, size and times that the file was not written to; it sets the last of these itself."""
    found = os.fstat(file.fileno())
    if found.st_size < NOTED_FROM or os.name != "posix":
        return hashlib.file_digest(file, "sha256").hexdigest()
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, file.tell())
    note = cache_folder() / "hashes" / make_key(stamp)
    if len(known := read_sealed(note)[0] or b"") == 32:
        return known.hex()
    is_settled = time.time() - found.st_ctime > SETTLED  # before it is read, which may take longer than that
    digest = hashlib.file_digest(file, "sha256")
    if is_settled:
        with suppress(DiskError):
            write_sealed(note, digest.digest())
    return digest.hexdigest()


# --------------------------------------------------------------------------- sealed files


def write_sealed(path: Path, payload: bytes) -> None:
    """Write bytes with their sha256 in front; another writer of the same name writes the same bytes.

    Raises:
        DiskError: the cache cannot be written.
    """
    data = MAGIC + hashlib.sha256(payload).digest() + payload
    for tries_left in reversed(range(WRITE_TRIES)):
        try:
            make_folder(path.parent, private=True)
            clean_leftovers(path.parent)
            write_atomic(path, data)
            return
        except DiskError as error:
            # In a cache that machines share, one may delete another's unfinished file as a leftover.
            if tries_left and isinstance(error.__cause__, FileNotFoundError):
                continue
            fix = "free some space, or set UNPAD_CACHE to a folder that can be written"
            raise DiskError(error.what, where=error.where, fix=fix) from error


def read_sealed(path: Path) -> tuple[bytes | None, str]:
    """Read bytes of `write_sealed`: (bytes, ""), (None, "") without a file, or (None, fault of the file)."""
    data, fault = _checked(path)
    return (None if data is None else data[SEALED:]), fault


def _checked(path: Path, map_from: float = inf) -> tuple[bytes | mmap.mmap | None, str]:
    """A file of `write_sealed` with its magic and sha256, as of `read_sealed`; one of more bytes is mapped."""
    try:
        with path.open("rb") as file:
            # One descriptor for the check and the mapping: what is mapped is what was checked.
            start, is_small = file.read(SEALED), os.fstat(file.fileno()).st_size < map_from
            if len(start) < SEALED or not start.startswith(MAGIC):
                return None, "is cut short or no file of this cache"
            rest = file.read() if is_small else b""
            if (hashlib.sha256(rest).hexdigest() if is_small else noted_sha256(file)) != start[len(MAGIC) :].hex():
                return None, "sha256 mismatch"
            return start + rest if is_small else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"


# --------------------------------------------------------------------------- shards


@dataclass(frozen=True, eq=False)
class Shard:
    """Encoded documents of one source file. Rows are documents; the arrays are read-only.

    Args:
        tokens: (num_tokens,) uint16 or uint32, BOS and EOS included.
        loss_mask: (num_tokens,) bool, True where predicting this token counts.
        offsets: (rows + 1,) int64, start of each row in `tokens`.
        content_key: (rows,) uint64, equal for equal content; that of the original for an augmented copy.
        declared: (rows,) int8, the `Split` that the row declares.
        copy: (rows,) uint8, 0 for an original, otherwise the number of the augmented copy.
        num_targets: (rows,) int32, tokens that carry loss.
        target_chars, target_bytes: (rows,) int32, characters and UTF-8 bytes of the text that carries loss.
        num_chars: (rows,) int32, characters of all the row's text.
        lost_chars: (rows,) int32, characters that the tokenizer lost; lost_target_chars, lost_target_bytes: the same
            for the text that carries loss.
        num_system: (rows,) int32, system turns.
        num_chosen: (rows,) int32, tokens of a pair's prompt and chosen reply, before those of the prompt and the
            rejected reply; 0 for other rows.
        details, faults: (bytes,) uint8, JSON that is parsed at its first use.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    content_key: np.ndarray
    declared: np.ndarray
    copy: np.ndarray
    num_targets: np.ndarray
    target_chars: np.ndarray
    target_bytes: np.ndarray
    num_chars: np.ndarray
    lost_chars: np.ndarray
    lost_target_chars: np.ndarray
    lost_target_bytes: np.ndarray
    num_system: np.ndarray
    num_chosen: np.ndarray
    details: np.ndarray
    faults: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.offsets.size - 1

    def row(self, row: int) -> np.ndarray:
        """Tokens of a row, (length,)."""
        start, stop = self.offsets[row : row + 2].tolist()
        return self.tokens[start:stop]

    @cached_property
    def _details(self) -> "RowDetails":
        details = _stored(_DETAILS, self.details)
        return details if len(details.where) == self.num_rows else _refuse_details()

    def where(self, row: int) -> str:
        """Place of the row within its file, such as ":12", without the file's name, which is not part of a shard."""
        return self._details.where[row]

    @property
    def groups(self) -> list[str]:
        """Group of every row, "" without one."""
        named = self._details.group
        return [named.get(str(row), "") for row in range(self.num_rows)] if named else [""] * self.num_rows

    def keywords(self, row: int) -> tuple[str, ...]:
        return self._details.keywords.get(str(row), ())

    @property
    def lost_counts(self) -> dict[str, int]:
        """The commonest characters that the tokenizer lost -> how often; parsed only if there are some."""
        return self._details.lost if self.lost_chars.any() else {}

    def bad_rows(self, path: str) -> list[BadRow]:
        """Bad rows of the file; `path` is the file's current name."""
        return [replace(row, where=path + row.where) for row in _stored(_FAULTS, self.faults).bad]

    @property
    def unread_fields(self) -> Unread:
        """Fields of the rows that nobody read."""
        faults = _stored(_FAULTS, self.faults)
        unread = Unread(self.num_rows, read=Counter(faults.read))
        for name, num_rows in faults.unread.items():
            unread.add(name, num_rows, {LOUD, 0.5 if name in faults.marks else None})
        return unread


@dataclass(frozen=True)
class RowDetails:
    """Fields of rows that only reports and evaluation read; groups and keywords are by the number of their row."""

    where: list[str]
    group: dict[str, str]
    keywords: dict[str, tuple[str, ...]]
    lost: dict[str, int]


@dataclass(frozen=True)
class RowFaults:
    """Bad rows of a file, their places without its name; fields that nobody read, and marks, as of `Unread`."""

    bad: list[BadRow]
    unread: dict[str, int]
    marks: list[str]
    read: dict[str, int] = field(default_factory=dict)


_DETAILS, _FAULTS = TypeAdapter(RowDetails), TypeAdapter(RowFaults)


def pack_details(
    where: Iterable[str], groups: Iterable[str], keywords: Iterable[tuple[str, ...]], lost: Counter[str]
) -> np.ndarray:
    """Pack fields that only reports and evaluation read as JSON, (bytes,) uint8; `where` is within the file."""
    details = RowDetails(
        list(where),
        {str(row): group for row, group in enumerate(groups) if group},
        {str(row): words for row, words in enumerate(keywords) if words},
        {character: lost[character] for character in commonest(lost)[:MOST_LOST]},
    )
    return _json_bytes(asdict(details))


def pack_faults(bad: Iterable[BadRow], unread: Unread, path: str) -> np.ndarray:
    """Pack a file's bad rows and the fields that nobody read as JSON, (bytes,) uint8."""
    rows = [replace(row, where=row.where.removeprefix(path)) for row in bad]
    named = unread.named
    read = {name: unread.read[name] for name in named if name in unread.read}
    return _json_bytes(asdict(RowFaults(rows, dict(named), sorted(unread.marks), read)))


def _json_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), np.uint8)


def _stored(adapter: TypeAdapter[Stored], array: np.ndarray) -> Stored:
    """Parse what `_json_bytes` packed.

    Raises:
        SourceError: it was packed by something else.
    """
    try:
        return adapter.validate_json(array.tobytes(), strict=True)
    except ValueError:
        _refuse_details()


def _refuse_details() -> NoReturn:
    fix = f"delete the folder of stored tokens, {cache_folder()}, which is made again"
    raise SourceError("stored tokens hold no usable details", fix=fix)


def shard_path(folder: Path, key: str) -> Path:
    return folder / "shards" / key[:2] / f"{key}.tokens"


def write_shard(folder: Path, key: str, shard: Shard) -> None:
    """Write a shard under its key. A killed writer leaves nothing visible; two writers leave the same bytes.

    Raises:
        DiskError: the cache cannot be written.
    """
    arrays = {field.name: np.ascontiguousarray(getattr(shard, field.name)) for field in fields(Shard)}
    assert arrays["tokens"].dtype.str in TOKEN_DTYPES, arrays["tokens"].dtype
    wrong = {name: arrays[name].dtype for name, dtype in DTYPES.items() if arrays[name].dtype.str != dtype}
    assert not wrong, wrong
    columns, pieces, end = dict[str, list[Any]](), list[bytes](), 0
    for name, array in arrays.items():
        columns[name] = [array.dtype.str, end, array.size]
        pieces.append(array.tobytes() + bytes(-array.nbytes % ALIGN))
        end += len(pieces[-1])
    header = json.dumps({"key": key, "columns": columns}, separators=(",", ":")).encode()
    header += b" " * (-(SEALED + 8 + len(header)) % ALIGN)
    write_sealed(shard_path(folder, key), b"".join([len(header).to_bytes(8, "little"), header, *pieces]))


def open_shard(folder: Path, key: str) -> tuple[Shard | None, str]:
    """Open a shard after checking its size, sha256 and key.

    Returns:
        (shard, ""); (None, "") if the cache has none; (None, fault) for a shard that must be rebuilt.
    """
    data, fault = _checked(shard_path(folder, key), MAP_FROM)
    return (None, fault) if data is None else _parse(data, key)


def _parse(data: bytes | mmap.mmap, key: str) -> tuple[Shard | None, str]:
    """View bytes with a valid sha256 as arrays; they may still be a shard with another key."""
    try:
        base = SEALED + 8 + int.from_bytes(data[SEALED : SEALED + 8], "little")
        header = json.loads(data[SEALED + 8 : base])
        if header["key"] != key:
            return None, "belongs to another key"
        arrays = {}
        for name, (dtype, start, count) in header["columns"].items():
            if dtype not in (TOKEN_DTYPES if name == "tokens" else (DTYPES[name],)):
                return None, f"has {name} of type {dtype}"
            arrays[name] = np.frombuffer(data, dtype, count, base + start)
        shard = Shard(**arrays)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None, "has no usable header"
    return (shard, "") if _fits(shard) else (None, "has columns that do not fit each other")


def _fits(shard: Shard) -> bool:
    """True if every row has its values, and tokens within `tokens`."""
    sizes = {name: getattr(shard, name).size for name in DTYPES if name not in NOT_OF_ROWS}
    offsets = shard.offsets
    if not offsets.size or offsets[0] != 0 or offsets[-1] != shard.tokens.size or np.any(np.diff(offsets) < 0):
        return False
    return shard.loss_mask.size == shard.tokens.size and set(sizes.values()) <= {shard.num_rows}
