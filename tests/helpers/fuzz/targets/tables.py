"""Targets: tables of patients' events and outcomes, and the tables beside them."""

import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from tests.helpers.event_tables import draw_rows, put_meds, recipe_of, table
from tests.helpers.fuzz.mutate import damage_bytes
from tests.helpers.fuzz.target import Target, WrongError, has_control
from tests.helpers.fuzz.targets.rows import other_schema
from unpad.data.histories.assemble import read_vectors
from unpad.data.histories.cohort import PatientTables, read_cohort
from unpad.data.histories.event_files import Sides
from unpad.errors import RecipeError, SourceError

ROWS = draw_rows(8)
EVENTS = table(ROWS)
LABELS = pa.table({
    "id": sorted({row[0] for row in ROWS}), "label": [0, 1] * 4, "event": [1, 0] * 4,
    "duration": [500.0 + i for i in range(8)], "known": [900.0] * 8, "split": ["train", "valid"] * 4,
})  # fmt: skip
ERRORS = (SourceError, RecipeError)
PIECES = [b'"a\nb"', b'""', b"1e999", b"2024-01-01T00:00:00Z", b"0001-01-01", b"\xef\xbc\x99", b"inf", b",,,", b"-0"]


def _csv(content: pa.Table) -> bytes:
    out = BytesIO()
    pa_csv.write_csv(content, out)
    return out.getvalue()


def _parquet(content: pa.Table, **options: Any) -> bytes:
    out = BytesIO()
    pq.write_table(content, out, **options)
    return out.getvalue()


def _check(found: PatientTables) -> None:
    """The excerpts of faults can be printed."""
    for row in found.bad:
        if has_control(row.excerpt):
            raise WrongError(f"control character in the excerpt of a row of {row.code}", row.excerpt)


def events_csv(folder: Path) -> Target:
    """Events in CSV: as many rows as lines, where no quote joins any."""
    seeds = [_csv(EVENTS), _csv(EVENTS).replace(b'"', b""), _csv(EVENTS).replace(b",", b";").replace(b"\n", b"\r\n")]
    recipe = recipe_of([{"path": str(folder / "events.csv"), "unit": "minutes"}])

    def run(data: bytes) -> None:
        (folder / "events.csv").write_bytes(data)
        found = read_cohort(recipe)
        _check(found)
        body = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").partition(b"\n")[2]
        lines = sum(bool(line) for line in body.split(b"\n"))
        if b'"' not in data and found.num_rows != lines:
            raise WrongError("rows of a table are lost", found.num_rows, lines)

    return Target(lambda rng: damage_bytes(rng.choice(seeds), [*seeds, *PIECES], rng), run, ERRORS)


def _labels(suffix: str) -> Callable[[Path], Target]:
    def build(folder: Path) -> Target:
        (folder / "events.parquet").write_bytes(_parquet(EVENTS))
        path = folder / f"labels{suffix}"
        sources = [{"path": str(folder / "events.parquet"), "unit": "minutes"}]
        missing = {"path": str(path), "missing": "keep"}
        recipes = [
            recipe_of(sources, events={"labels": {**missing, "label": "label", "time": "known"}}),
            recipe_of(
                sources, events={"labels": {**missing, "event": "event", "duration": "duration"}, "landmark": 60.0}
            ),
        ]
        seeds = [_csv(LABELS), _csv(LABELS).replace(b'"', b"")] if suffix == ".csv" else [_parquet(LABELS)]

        def make(rng: random.Random) -> bytes:
            chosen = rng.choice((b"0", b"1"))
            if suffix == ".parquet" and rng.random() < 0.5:
                return chosen + _parquet(other_schema(LABELS, rng))
            return chosen + damage_bytes(rng.choice(seeds), [*seeds, *PIECES], rng)

        def run(data: bytes) -> None:
            path.write_bytes(data[1:])
            _check(read_cohort(recipes[data[:1] == b"1"]))

        return Target(make, run, ERRORS)

    return build


def events_parquet(folder: Path) -> Target:
    """Events in parquet, with damaged bytes or another schema."""
    seeds = [_parquet(EVENTS), _parquet(EVENTS, compression="none", use_dictionary=False, write_page_checksum=True)]
    recipe = recipe_of([{"path": str(folder / "events.parquet"), "unit": "minutes"}])

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return _parquet(other_schema(EVENTS, rng), compression="none")
        return damage_bytes(rng.choice(seeds), seeds, rng)

    def run(data: bytes) -> None:
        (folder / "events.parquet").write_bytes(data)
        _check(read_cohort(recipe))

    return Target(make, run, ERRORS)


def events_meds(folder: Path) -> Target:
    """A dataset of MEDS of which one file is damaged."""
    root = put_meds(folder / "meds", ROWS, splits={row[0]: "train" for row in ROWS})
    files = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.parquet"))}
    tables = {name: pq.read_table(BytesIO(content)) for name, content in files.items()}
    recipe = recipe_of([{"path": str(root)}], events={"split": str(root / "metadata/subject_splits.parquet")})

    def make(rng: random.Random) -> bytes:
        name = rng.choice(sorted(files))
        changed = rng.random() < 0.5
        body = (
            _parquet(other_schema(tables[name], rng)) if changed else damage_bytes(files[name], [*files.values()], rng)
        )
        return name.encode() + b"\0" + body

    def run(data: bytes) -> None:
        name, _, body = data.partition(b"\0")
        shown = name.decode("latin-1")
        if shown not in files:
            return
        (root / shown).write_bytes(body)
        try:
            _check(read_cohort(recipe))
        finally:
            (root / shown).write_bytes(files[shown])

    return Target(make, run, ERRORS)


def splits_table(folder: Path) -> Target:
    """The table of patients and their parts."""
    return _small_table(folder / "splits", LABELS.select(["id", "split"]), Sides.of_table)


def code_vectors(folder: Path) -> Target:
    """The table of vectors per code."""
    content = pa.table({"Key": ["fever", "sodium"], "a": [1.0, 2.0], "b": [0.5, -1.0]})
    return _small_table(folder / "vectors", content, lambda path: read_vectors(path, ("unknown", "fever", "sodium")))


def _small_table(path: Path, content: pa.Table, read: Callable[[Path], object]) -> Target:
    """A file of CSV or parquet that `read` reads."""
    seeds = [_csv(content), _parquet(content)]

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return _parquet(other_schema(content, rng))
        return damage_bytes(rng.choice(seeds), [*seeds, *PIECES], rng)

    def run(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return Target(make, run, ERRORS)


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "events_csv": events_csv,
    "events_parquet": events_parquet,
    "events_meds": events_meds,
    "labels_csv": _labels(".csv"),
    "labels_parquet": _labels(".parquet"),
    "splits_table": splits_table,
    "code_vectors": code_vectors,
}
