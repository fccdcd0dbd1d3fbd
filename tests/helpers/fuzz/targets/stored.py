"""Targets: checkpoints, adapters, cached tokens and other sealed files, damaged and as somebody else may write them."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.conftest import tiny_model
from tests.helpers.fuzz.mutate import damage_bytes, damage_json, damaged, damaged_json, either
from tests.helpers.fuzz.target import Target, WrongError, read_at
from unpad import storage
from unpad.data.sources.example import BadRow, Unread
from unpad.data.tokens import cache
from unpad.errors import CheckpointError, RecipeError, RunInUseError, SourceError
from unpad.models.adapters import adapt, kept_weights
from unpad.nn import product_speed
from unpad.recipes.training import LoraSettings
from unpad.run import checkpoint
from unpad.run.base import Base, fingerprint, run_weights
from unpad.run.checkpoint import model_tensors, model_weights, put_weights
from unpad.run.folder import RECIPE
from unpad.run.kept import Named, read_reference, write_reference
from unpad.storage.folders import MANIFEST
from unpad.training.progress import Progress

KEY = "0" * 64


def _model() -> torch.nn.Module:
    return tiny_model(torch.float32, width=8, blocks=1, heads=2, hidden=8)


def saved_checkpoint(folder: Path, model: torch.nn.Module, base: Base | None = None) -> dict[str, bytes]:
    """The files of a small checkpoint, of adapters where it has a base, by name."""
    tensors = model_tensors(kept_weights(model)) | {"optim.step": torch.tensor(3.0), "optim.x": torch.zeros(2, 3)}
    values = {
        "progress": Progress(step=3, best=1.5).to_values(), "data": "d" * 64, "files": {"a.jsonl": "0" * 64},
        "environment": {"torch": "2.13.0", "threads": 1}, "update_rule": 2,
        **({"base": asdict(base)} if base else {}),
    }  # fmt: skip
    path = checkpoint.save_named(folder / "made", "best", checkpoint.State(3, tensors, values))
    return {one.name: one.read_bytes() for one in path.iterdir()}


def manifest_of(files: dict[str, bytes]) -> bytes:
    """A manifest that agrees with the files, as somebody who wrote both would leave it."""
    entries = {name: {"size": len(data), "sha256": storage.sha256(data)} for name, data in sorted(files.items())}
    return json.dumps({"files": entries, "format": 1}, indent=1).encode()


def _put(path: Path, files: dict[str, bytes]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)


def _split(data: bytes, files: dict[str, bytes]) -> tuple[str, bytes]:
    """Name and content of a case that begins with the name of a file; the first file for others."""
    name, _, body = data.partition(b"\0")
    shown = name.decode("latin-1")
    return (shown, body) if shown in files else (sorted(files)[0], data)


def checkpoint_damage(folder: Path) -> Target:
    """One file of a checkpoint has other bytes than the manifest says: never loaded."""
    files, path = saved_checkpoint(folder, _model()), folder / "best"

    def make(rng: random.Random) -> bytes:
        name = rng.choice(sorted(files))
        return name.encode() + b"\0" + damage_bytes(files[name], list(files.values()), rng)

    def run(data: bytes) -> None:
        name, body = _split(data, files)
        _put(path, {**files, name: body})
        state = checkpoint.load(path)
        storage.read_folder(path)
        if name != MANIFEST and body != files[name]:
            raise WrongError("a damaged checkpoint is loaded", name)
        if state.step != 3:
            raise WrongError("a checkpoint of another step", state.step)

    return Target(make, run, (CheckpointError,))


def _header(data: bytes, rng: random.Random) -> bytes:
    """Safetensors whose header is another, at times with its length wrong."""
    size = int.from_bytes(data[:8], "little")
    head = damage_json(json.loads(data[8 : 8 + size]), rng, 0.06)
    told = len(head) if rng.random() < 0.9 else rng.choice((0, 1, len(head) + 9, 1 << 40, (1 << 64) - 1))
    return told.to_bytes(8, "little") + head + data[8 + size :]


def _sealed_checkpoint(lora: bool, folder: Path) -> Target:
    """A checkpoint whose manifest agrees with its files, whatever they hold."""
    model = _model()
    if lora:
        adapt(model, LoraSettings(r=2, alpha=4))
    files = saved_checkpoint(folder, model)
    del files[MANIFEST]
    state, path = json.loads(files["state.json"]), folder / "best"

    def make(rng: random.Random) -> bytes:
        name = rng.choice(sorted(files))
        if rng.random() < 0.3:
            body = damage_bytes(files[name], list(files.values()), rng)
        else:
            body = damage_json(state, rng, 0.08) if name == "state.json" else _header(files[name], rng)
        return name.encode() + b"\0" + body

    def run(data: bytes) -> None:
        name, body = _split(data, files)
        changed = {**files, name: body}
        _put(path, {**changed, MANIFEST: manifest_of(changed)})
        put_weights(model, model_weights(checkpoint.load(path).tensors), str(path))

    return Target(make, run, (CheckpointError,))


def adapter_run(folder: Path) -> Target:
    """The state of a run of adapters, which names its base."""
    model, place = _model(), folder / "base"
    _put(place / "checkpoints" / "best", saved_checkpoint(place, model))
    _put(place, {RECIPE: b""})
    base = Base(str(place), fingerprint(run_weights(place)[0]), 2.0, "fp32", [])
    adapt(model, LoraSettings(r=2, alpha=4))
    files = saved_checkpoint(folder, model, base)
    del files[MANIFEST]
    state, path = json.loads(files["state.json"]), folder / "run" / "checkpoints" / "best"

    def run(data: bytes) -> None:
        changed = {**files, "state.json": data}
        _put(path, {**changed, MANIFEST: manifest_of(changed)})
        run_weights(folder / "run")

    return Target(damaged_json([state], 0.08), run, (CheckpointError, RecipeError))


def manifest(folder: Path) -> Target:
    """The manifest of a folder."""
    files, path = saved_checkpoint(folder, _model()), folder / "best"
    value = json.loads(files[MANIFEST])
    pieces = [b"../x", b"/dev/zero", b"MANIFEST.json"]

    def run(data: bytes) -> None:
        _put(path, {**files, MANIFEST: data})
        storage.read_folder(path)
        checkpoint.load(path)

    make = either(0.7, damaged_json([value], 0.1), damaged([files[MANIFEST]], pieces))
    return Target(make, run, (CheckpointError,))


# --------------------------------------------------------------------------- sealed files


def _shard() -> cache.Shard:
    rows, lengths = np.arange(3), np.array([2, 3, 4])
    total = int(lengths.sum())
    counts = {
        name: lengths.astype(np.int32)
        for name in ("num_targets", "target_chars", "target_bytes", "num_chars", "lost_chars", "lost_target_chars",
                     "lost_target_bytes", "num_system", "num_chosen")
    }  # fmt: skip
    return cache.Shard(
        tokens=np.arange(total).astype("<u2"), loss_mask=np.arange(total) % 3 > 0,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), content_key=rows.astype(np.uint64),
        declared=np.full(3, -1, np.int8), copy=np.zeros(3, np.uint8), **counts,
        details=cache.pack_details([":1", ":2", ":3"], ["", "水", ""], [(), ("水", "火"), ()], Counter(rare=1)),
        faults=cache.pack_faults([BadRow("a.jsonl:7", "E_UTF8", "bad bytes", "mend it", "…")], Unread(), "a.jsonl"),
    )  # fmt: skip


def _use(shard: cache.Shard) -> None:
    """Read what training reads of stored tokens."""
    shard.bad_rows("a.jsonl")
    for row in range(len(shard.offsets) - 1):
        shard.tokens[shard.offsets[row] : shard.offsets[row + 1]].sum()
        shard.where(row), shard.keywords(row)
    _ = shard.groups, shard.lost_counts


def token_cache(folder: Path) -> Target:
    """Stored tokens with damaged bytes: made again, never read."""
    cache.write_shard(folder, KEY, _shard())
    path = cache.shard_path(folder, KEY)
    whole = path.read_bytes()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        shard, why = cache.open_shard(folder, KEY)
        if shard is not None and data != whole:
            raise WrongError("damaged tokens are read")
        if shard is None and not why:
            raise WrongError("stored tokens are gone without a word")
        if shard is not None:
            _use(shard)

    return Target(damaged([whole]), run, ())


def token_cache_header(folder: Path) -> Target:
    """Stored tokens whose checksum agrees with another header."""
    cache.write_shard(folder, KEY, _shard())
    path = cache.shard_path(folder, KEY)
    payload = path.read_bytes()[len(cache.MAGIC) + 32 :]
    size = int.from_bytes(payload[:8], "little")
    head = json.loads(payload[8 : 8 + size])

    def with_other_head(rng: random.Random) -> bytes:
        changed = damage_json(head, rng, 0.08)
        return len(changed).to_bytes(8, "little") + changed + payload[8 + size :]

    def run(data: bytes) -> None:
        path.write_bytes(cache.MAGIC + hashlib.sha256(data).digest() + data)
        shard, _ = cache.open_shard(folder, KEY)
        if shard is not None:
            _use(shard)

    return Target(either(0.3, damaged([payload]), with_other_head), run, (SourceError,))


def reference_file(folder: Path) -> Target:
    """Log-probabilities that a run of preferences keeps."""
    path, named = folder / "reference.bin", Named("w" * 64, "d" * 64, "stage")
    write_reference(path, named, np.arange(4.0))
    whole = path.read_bytes()
    body = whole[len(cache.MAGIC) + 32 :]

    def make(rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.4:
            return b"R" + damage_bytes(whole, [whole], rng)
        head = damage_json(asdict(named), rng, 0.2) if kind < 0.8 else damage_bytes(body[:60], [body], rng)
        return b"S" + head + b"\n" + body.partition(b"\n")[2]

    def run(data: bytes) -> None:
        if data[:1] == b"R":
            path.write_bytes(data[1:])
            if cache.read_sealed(path)[0] is not None and data[1:] != whole:
                raise WrongError("a damaged file is read")
        else:
            path.write_bytes(cache.MAGIC + hashlib.sha256(data[1:]).digest() + data[1:])
        read_reference(folder)

    return Target(make, run, (CheckpointError,))


def speeds_file(folder: Path) -> Target:
    """Speeds that were measured earlier, which another program may have changed."""
    speed = {"fp32_seconds": 1.0, "bf16_seconds": 0.5}
    machine = product_speed.this_machine().model_dump(mode="json")
    value = {"entries": [{"machine": machine, "speeds": {"training": speed, "decoding": speed}}]}
    path = product_speed.cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    make = either(0.6, damaged_json([value], 0.1), damaged([json.dumps(value).encode()]))
    return Target(make, read_at(path, lambda _: product_speed._read()), ())


def lock_file(folder: Path) -> Target:
    """What the holder of a run's lock has written into it."""
    value = {"pid": 1, "host": "a", "boot_id": "b", "started": "2026-01-01T00:00:00+00:00", "command": "unpad train"}

    def run(data: bytes) -> None:
        with storage.RunLock(folder):
            (folder / storage.LOCK).write_bytes(data or b"{}")
            error = storage.RunLock(folder)._in_use() if storage_holder(data) else None
        if error is not None:
            raise error

    make = either(0.6, damaged_json([value], 0.2), damaged([json.dumps(value).encode()]))
    return Target(make, run, (RunInUseError,))


def storage_holder(data: bytes) -> bool:
    """True for content that names a holder; for others the reader waits for a second for one who is just writing."""
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool(found)


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "checkpoint_damage": checkpoint_damage,
    "checkpoint_sealed": partial(_sealed_checkpoint, False),
    "adapter_sealed": partial(_sealed_checkpoint, True),
    "adapter_run": adapter_run,
    "manifest": manifest,
    "token_cache": token_cache,
    "token_cache_header": token_cache_header,
    "reference_file": reference_file,
    "speeds_file": speeds_file,
    "lock_file": lock_file,
}
