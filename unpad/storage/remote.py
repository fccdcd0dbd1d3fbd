"""Data by address, such as https:// or s3://: a file is fetched once into the cache folder, and read as any other.

The servers are asked for sizes and versions alone where a file is kept. fsspec, of the extra `remote`, knows them; its
own cache misses changes of files by HTTP, and has a file under its final name before it is whole.
"""

import gzip
import json
import os
import re
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

from unpad.errors import SourceError
from unpad.storage import disk
from unpad.storage.files import cache_folder, make_folder, sha256, write_atomic
from unpad.storage.paths import user_path
from unpad.terminal.printing import MASK, masked, print_lines
from unpad.terminal.progress import progress

PAUSES_S, SILENCE_S = (1.0, 4.0, 10.0), 60.0  # before a connection is tried again, and after which it is broken
# Names of stores for the size and version of a file; other facts may change with every look.
FACTS = ("size", "ETag", "etag", "generation", "blob_id", "Last-Modified", "LastModified", "mtime", "created")
REFUSALS = (FileNotFoundError, PermissionError, ValueError)
_ADDRESS = re.compile(r"(?:^|/)(?!file:)([a-z][a-z0-9+]+):/+(.+)", re.DOTALL)  # a Path loses one of the two slashes
_given: dict[str, str] = {}  # addresses with their secrets, by how they are written
_addresses: dict[str, str] = {}  # by path in the cache


class FetchedFile(type(Path())):  # type: ignore[misc]  # Python 3.11 derives nothing from Path itself
    """A path that opens a file of the cache, and is written as its address."""

    def __str__(self) -> str:
        return _addresses.get(os.fspath(self), os.fspath(self))

    def __fspath__(self) -> str:
        return str(super().__str__())


def address_of(path: str) -> str:
    """The address that a path is, with *** for its secrets, which this process alone remembers; "" for other paths."""
    found = _ADDRESS.search(path)
    given = f"{found[1]}://{found[2]}" if found else ""
    if (address := masked(given)) != given:
        _given[address] = given
    return address


def data_path(path: str) -> Path:
    """A user's path of data: as `user_path`, or of the file at an address, which is fetched; errors as both."""
    address = address_of(path)
    files = fetched(address) if address else [user_path(path)]
    return files[0] if len(files) == 1 else Path(address)


@cache
def fetched(address: str) -> list[FetchedFile]:
    """The files of an address or pattern; a process asks for them once. Those of before where a server gives none.

    Args:
        address: of `address_of`.

    Raises:
        SourceError: there is no such file, or it may not be read or reached, and was not fetched before.
        DiskError: the cache cannot be written.
    """
    folder = cache_folder().resolve() / "remote"
    make_folder(folder, private=True)
    listing = folder / f"{sha256(address)[:32]}.json"  # path in the folder of each file, by its address
    try:
        files = _fetch_again(address, folder)
        write_atomic(listing, json.dumps(files))
    except SourceError as error:
        if not listing.is_file():
            raise
        files = json.loads(listing.read_bytes())
        print_lines([f"warning: {address} is read as it was fetched before: {error.summary}"], to_errors=True)
    _addresses.update({str(folder / place): one for one, place in files.items()})
    return [FetchedFile(folder / place) for place in files.values()]


def _fetch_again(address: str, folder: Path) -> dict[str, str]:
    """As `_fetch`, again where the connection breaks.

    Raises:
        SourceError: the server refuses it, or breaks off every time.
    """
    for pause in (*PAUSES_S, 0.0):
        try:
            return _fetch(address, folder)
        except Exception as error:  # of any kind, by the library of each store
            # fsspec calls every fault of HTTP a missing file.
            said = (address.startswith("http") and error.__cause__) or error
        is_refused = isinstance(said, REFUSALS) or getattr(said, "status", 0) in (401, 403, 404)
        if is_refused or isinstance(said, ImportError):
            break
        time.sleep(pause)
    fix = "correct the address, or the store's credentials" if is_refused else "check network and disk, then try again"
    if isinstance(said, ImportError):
        fix = "pip install 'unpad[remote]', and for s3:// s3fs, for gs:// gcsfs"
    raise SourceError(masked(f"it cannot be fetched: {type(said).__name__}: {said}"), where=address, fix=fix)


def _fetch(address: str, folder: Path) -> dict[str, str]:
    """Fetch what the folder lacks; returns the path in it of every file by address."""
    from aiohttp import ClientTimeout
    from fsspec.core import url_to_fs

    # By default a file must have come after five minutes. Blocks of 0 bytes: as one stream, not by ranges.
    wait = ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    http = {"block_size": 0, "client_kwargs": {"trust_env": True, "timeout": wait}}
    store, path = url_to_fs(_given.get(address, address), **(http if address.startswith("http") else {}))
    infos = [store.info(name) for name in (store.glob(path) if "*" in address.replace(MASK, "") else [path])]
    files = {address_of(store.unstrip_protocol(info["name"])): info for info in infos if info["type"] == "file"}
    if not files:
        raise FileNotFoundError("there is nothing, or a folder, whose files are FOLDER/*.jsonl")
    return {one: _download(store, one, info, folder) for one, info in files.items()}


def _download(store: Any, address: str, info: dict[str, Any], folder: Path) -> str:
    """Bring a file, whole and without its compression, to its place in the folder; returns that, also of a kept one."""
    version = sha256(json.dumps([address, *map(info.get, FACTS)], default=str))[:32]
    name = re.sub(r"[^-.\w]", "_", address.partition("?")[0].rpartition("/")[2])[-100:]
    place, arriving = folder / version / name.removesuffix(".gz"), folder / version / "arriving"
    make_folder(place.parent)
    with (place.parent / "lock").open("ab") as lock:
        disk.take_lock(lock.fileno(), wait=True)
        if not place.exists():
            with progress(f"fetching {name}"), arriving.open("wb") as out:
                with store.open(info["name"]) as raw, gzip.open(raw) if name.endswith(".gz") else raw as file:
                    shutil.copyfileobj(file, out, 1 << 20)
                disk.flush(out.fileno(), arriving)
            disk.rename(arriving, place)
    return f"{version}/{place.name}"
