"""Targets: tables of patients' events and outcomes, and the tables beside them."""

import random
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from tests.helpers.event_tables import draw_rows, put_meds, recipe_of, table
from tests.helpers.fuzz.mutate import damage_bytes, damaged, either
from tests.helpers.fuzz.target import Target, WrongError, has_control, read_at
from tests.helpers.fuzz.targets.rows import other_schema, parquet
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

    return Target(damaged(seeds, [*seeds, *PIECES]), run, ERRORS)


def _labels(suffix: str, folder: Path) -> Target:
    (folder / "events.parquet").write_bytes(parquet(EVENTS))
    path = folder / f"labels{suffix}"
    sources = [{"path": str(folder / "events.parquet"), "unit": "minutes"}]
    missing = {"path": str(path), "missing": "keep"}
    timed = {**missing, "event": "event", "duration": "duration"}
    recipes = [
        recipe_of(sources, events={"labels": {**missing, "label": "label", "time": "known"}}),
        recipe_of(sources, events={"labels": timed, "landmark": 60.0}),
    ]
    seeds = [_csv(LABELS), _csv(LABELS).replace(b'"', b"")] if suffix == ".csv" else [parquet(LABELS)]

    def make(rng: random.Random) -> bytes:
        chosen = rng.choice((b"0", b"1"))
        if suffix == ".parquet" and rng.random() < 0.5:
            return chosen + parquet(other_schema(LABELS, rng))
        return chosen + damage_bytes(rng.choice(seeds), [*seeds, *PIECES], rng)

    def run(data: bytes) -> None:
        path.write_bytes(data[1:])
        _check(read_cohort(recipes[data[:1] == b"1"]))

    return Target(make, run, ERRORS)


def events_parquet(folder: Path) -> Target:
    """Events in parquet, with damaged bytes or another schema."""
    seeds = [parquet(EVENTS), parquet(EVENTS, compression="none", use_dictionary=False, write_page_checksum=True)]
    path = folder / "events.parquet"
    recipe = recipe_of([{"path": str(path), "unit": "minutes"}])
    others = either(0.5, lambda rng: parquet(other_schema(EVENTS, rng), compression="none"), damaged(seeds))
    return Target(others, read_at(path, lambda _: _check(read_cohort(recipe))), ERRORS)


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
            parquet(other_schema(tables[name], rng)) if changed else damage_bytes(files[name], [*files.values()], rng)
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
    seeds = [_csv(content), parquet(content)]
    others = either(0.3, lambda rng: parquet(other_schema(content, rng)), damaged(seeds, [*seeds, *PIECES]))
    return Target(others, read_at(path, read), ERRORS)


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "events_csv": events_csv,
    "events_parquet": events_parquet,
    "events_meds": events_meds,
    "labels_csv": partial(_labels, ".csv"),
    "labels_parquet": partial(_labels, ".parquet"),
    "splits_table": splits_table,
    "code_vectors": code_vectors,
}
