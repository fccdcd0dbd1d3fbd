"""Small set of simulated patients; their outcome depends on kind, number and order of their events.

The packaged recipe `events` trains on its events and outcomes by default, `events_labels` on the same patients with
ready labels. Drawing is a pure function of the number below, so the set is the same everywhere. The names are of real
measurements, the numbers are not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad import storage
from unpad.storage.parquet import write_parquet

NUM_PATIENTS = 800
VERSION = 1  # of the drawing; a change makes a new folder
HORIZON = 365  # days after the landmark, day 0
DAY_0 = np.datetime64("2020-01-01")
HISTORY = ["id", "time", "code", "value"]
# name -> mean and standard deviation of the patients' own levels
MEASURED = {"creatinine": (90.0, 25.0), "hemoglobin": (135.0, 15.0), "pressure": (130.0, 18.0), "weight": (78.0, 14.0)}
NOISE = 0.5  # of one measurement, in standard deviations


def simulated_folder() -> Path:
    """Return the folder of the set; draw it if it is missing.

    Its folder `patients` has the tables of `draw_patients`, and history and labels of `ready_labels`. The
    labels are written last, so a partial folder, or one of an earlier version without them, is drawn again.
    """
    folder = storage.cache_folder() / f"simulated-{VERSION}"
    if not (folder / "patients" / "labels.parquet").is_file():
        storage.make_folder(folder, private=True)
        storage.make_folder(folder / "patients")
        events, patients = draw_patients(NUM_PATIENTS, np.random.default_rng(VERSION))
        history, labels = ready_labels(events, patients)
        tables = {"events": events, "patients": patients, "history": history, "labels": labels}
        for name, table in tables.items():
            write_parquet(folder / "patients" / f"{name}.parquet", table)
    return folder


def ready_labels(events: pa.Table, patients: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Make a table of labels without times, and the events that may be known with it.

    Returns:
        history: `id, time, code, value`, the events before day 0, as later ones would tell who lived on; labels:
        `id, label`, whether a patient died up to day HORIZON, of those with an event and a known outcome.
    """
    early = events.filter(pc.less(events["days"], 0))
    last, died = patients["days"], pc.equal(patients["died"], 1)
    known = pc.or_(pc.greater_equal(last, HORIZON), died)
    taken = pc.and_(known, pc.is_in(patients["id"], early["id"].combine_chunks()))
    label = pc.and_(died, pc.less_equal(last, HORIZON)).cast(pa.int64())
    labels = pa.table({"id": patients["id"], "label": label}).filter(taken)
    history = early.filter(pc.is_in(early["id"], labels["id"].combine_chunks())).rename_columns(HISTORY)
    dates = (DAY_0 + history["time"].to_numpy()).astype("datetime64[s]")
    return history.set_column(1, "time", pa.array(dates)), labels


def draw_patients(num: int, rng: np.random.Generator) -> tuple[pa.Table, pa.Table]:
    """Draw patients with visits before and after day 0.

    Returns:
        events: `id, days, code, value`, null without a value; patients: `id, age, sex, died, days`, the last day
        of observation and whether that was of death.
    """
    events: list[tuple[int, int, str, float | None]] = []
    patients = []
    for number in range(1, num + 1):
        age, sex = int(rng.normal(62, 12)), "female" if rng.random() < 0.5 else "male"
        level = {name: rng.normal() for name in MEASURED}
        diabetes = rng.random() < 0.25
        mine, untreated = _visits(level, diabetes, rng)
        risk = (
            0.9 * level["creatinine"] - 0.5 * level["hemoglobin"] + 1.6 * untreated + 0.8 * diabetes + (age - 62) / 20
        )
        death = rng.exponential(np.exp(8.0 - risk))
        watched = rng.uniform(250, 1500)
        last = int(min(death, watched))
        events += [(number, day, code, value) for day, code, value in mine if day <= last]
        patients.append((number, age, sex, int(death <= watched), last))
    columns = list(zip(*sorted(events, key=lambda event: event[:3]), strict=True))
    kinds = (pa.int64(), pa.int32(), pa.string(), pa.float64())
    told = list(zip(*patients, strict=True))
    return (
        pa.table(
            {
                name: pa.array(values, kind)
                for name, values, kind in zip(("id", "days", "code", "value"), columns, kinds, strict=True)
            }
        ),
        pa.table(dict(zip(("id", "age", "sex", "died", "days"), map(pa.array, told), strict=True))),
    )


def _visits(
    level: dict[str, float], diabetes: bool, rng: np.random.Generator
) -> tuple[list[tuple[int, str, float | None]], bool]:
    """Draw the events of a patient's visits, and whether the last infection before day 0 remained without antibiotic.

    About one patient in twelve has no visit before day 0. Antibiotics are as common without an infection before them,
    so only the order is informative.
    """
    num = 0 if rng.random() < 1 / 12 else int(rng.geometric(0.12))
    days = np.sort(rng.integers(-1500, 0, num)).tolist()
    events: list[tuple[int, str, float | None]] = []
    untreated = False
    for day in [*days, *np.sort(rng.integers(1, 400, 2)).tolist()]:
        for name, (mean, spread) in MEASURED.items():
            if rng.random() < 0.6:
                value = mean + spread * (level[name] + NOISE * rng.normal())
                events.append((day, name, round(value, 1)))
        if diabetes and rng.random() < 0.3:
            events.append((day, "diabetes", None))
        drawn = rng.random()
        if drawn < 0.15:
            events.append((day, "infection", None))
            untreated = untreated or day < 0
        elif drawn < 0.3:
            events.append((day, "antibiotic", None))
            untreated = untreated and day > 0
    return events, untreated
