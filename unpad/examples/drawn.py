"""Small sets drawn by code, on which packaged recipes train by default: pictures of shapes in colours, of every size
and aspect, with questions; simulated patients, whose outcome depends on kind, number and order of their events.

Drawing is a pure function of a number, so the sets are the same everywhere. `events` trains on the patients' events and
outcomes, `events_labels` on the same patients with ready labels.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageDraw

from unpad import storage
from unpad.storage.parquet import write_parquet

NUM_IMAGES = 1500
MANIFESTS, CHECKSUM = ("shapes.jsonl", "shapes_vqa.jsonl"), "shapes.sha256"
VERSION = 1  # of the drawing; a change makes a new folder
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLORS = {
    "red": (205, 45, 40), "green": (40, 150, 70), "blue": (45, 85, 200), "yellow": (235, 200, 50),
    "purple": (130, 60, 170), "black": (25, 25, 30),
}  # fmt: skip
CHINESE = {
    "circle": "圆形", "square": "正方形", "triangle": "三角形", "cross": "十字", "ring": "圆环",
    "red": "红色", "green": "绿色", "blue": "蓝色", "yellow": "黄色", "purple": "紫色", "black": "黑色",
}  # fmt: skip


def drawn_folder() -> Path:
    """Return the folder of the set (shapes.jsonl, shapes_vqa.jsonl and the pictures).

    It is drawn if it is missing, or if a picture is not as it was drawn. The checksum is written last, so a partial
    folder is drawn again.
    """
    folder = storage.cache_folder() / f"drawn-{VERSION}"
    if not _is_whole(folder):
        _draw_all(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        if not all((folder / name).is_file() for name in MANIFESTS):
            return False
        pictures = ((folder / "shapes" / _name(number)).read_bytes() for number in range(NUM_IMAGES))
        return (folder / CHECKSUM).read_text(encoding="utf-8") == _checksum(pictures)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(pictures: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for picture in pictures:
        digest.update(hashlib.sha256(picture).digest())
    return digest.hexdigest()


def _name(number: int) -> str:
    return f"{number:04d}.png"


def _draw_all(folder: Path) -> None:
    rng = np.random.default_rng(VERSION)
    storage.make_folder(folder, private=True)
    storage.make_folder(folder / "shapes")
    images: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    pictures: dict[str, bytes] = {}
    for number in range(NUM_IMAGES):
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        color = list(COLORS)[int(rng.integers(len(COLORS)))]
        width, height = (int(8 * rng.integers(3, 13)) for _ in range(2))
        name = f"shapes/{_name(number)}"
        pictures[_name(number)] = _png(draw(shape, color, width, height, rng))
        split = "val" if number % 5 == 0 else "train"
        images.append({"image": name, "label": shape, "width": width, "height": height, "split": split})
        for question, answer in _questions(shape, color, width, height, rng):
            questions.append({"image": name, "question": question, "answer": answer, "split": split})
    storage.write_files(folder / "shapes", pictures)
    for file, rows in zip(MANIFESTS, (images, questions), strict=True):
        storage.write_atomic(folder / file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    storage.write_atomic(folder / CHECKSUM, _checksum(pictures.values()))


def _png(picture: Image.Image) -> bytes:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def draw(shape: str, color: str, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw a shape at a random place and size on a pale ground with a little noise."""
    ground = rng.integers(200, 256, 3)
    noise = rng.integers(-6, 7, (height, width, 3))
    picture = Image.fromarray(np.clip(ground + noise, 0, 255).astype(np.uint8))
    radius = min(width, height) * rng.uniform(0.25, 0.45)
    x, y = (rng.uniform(radius, side - radius) for side in (width, height))
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = tuple(int(value) for value in np.clip(np.array(COLORS[color]) + rng.integers(-15, 16, 3), 0, 255))
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "ring":
        pen.ellipse(box, outline=fill, width=max(2, round(radius / 3)))
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    elif shape == "triangle":
        turns = (-math.pi / 2 + k * 2 * math.pi / 3 for k in range(3))
        pen.polygon([(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns], fill=fill)
    else:
        thin = radius / 3
        pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill=fill)
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill=fill)
    return picture


def _questions(shape: str, color: str, width: int, height: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Choose two questions about a picture, of very unequal lengths."""
    known = [
        ("Which shape?", shape),
        ("图里是什么形状？", CHINESE[shape]),
        ("Look at the picture and name the color of the only shape in it. Answer with one word.", color),
        ("图形是什么颜色？", CHINESE[color]),
        ("Is the picture wider than it is high? Answer yes or no.", "yes" if width > height else "no"),
    ]
    return [known[int(i)] for i in rng.permutation(len(known))[:2]]


NUM_PATIENTS = 800
PATIENTS_VERSION = 1  # of the drawing; a change makes a new folder
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
    folder = storage.cache_folder() / f"simulated-{PATIENTS_VERSION}"
    if not (folder / "patients" / "labels.parquet").is_file():
        storage.make_folder(folder, private=True)
        storage.make_folder(folder / "patients")
        events, patients = draw_patients(NUM_PATIENTS, np.random.default_rng(PATIENTS_VERSION))
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
