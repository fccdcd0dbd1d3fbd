"""Thirty troubles and twelve healthy recipes, written without a look at the doctor's code.

The format is that of `tests/doctor/planted.py`. Every sentence, picture and patient is drawn here, from fixed seeds.
The runs that pairs of replies start from are trained here as well, in some seconds each, by `python -m unpad`.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

Row = dict[str, Any]
Trouble = tuple[list[str], str, list[str], list[str]]
Rng = np.random.Generator

# Files, recipes and runs


def write_jsonl(path: Path, rows: Iterable[Row]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path.resolve())


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return str(path.resolve())


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section; a section that is None is left out."""
    result = deepcopy(dict(base))
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def write_recipe(folder: Path, base: Mapping[str, Any], name: str = "recipe", **changes: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged(base, changes), allow_unicode=True, sort_keys=False), encoding="utf-8")
    return str(path.resolve())


def trained(folder: Path, recipe: str, *overrides: str, name: str = "run") -> str:
    """Train a recipe on one thread; the directory of the run.

    Raises:
        RuntimeError: training ended with another code than 0.
    """
    run = str((folder / name).resolve())
    command = [sys.executable, "-m", "unpad", "train", recipe, "--out", run, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return run


def section(text: str) -> Row:
    return dict(yaml.safe_load(text))


def pick(rng: Rng, given: Sequence[Any]) -> Any:
    return given[int(rng.integers(len(given)))]


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    return text.split(", ")


# Texts


class Language:
    """Sentences of a language: forms whose names in braces are filled from lists of words."""

    def __init__(self, forms: Sequence[str], **lists: Sequence[str]) -> None:
        self.forms = list(forms)
        self.lists = {name: list(given) for name, given in lists.items()}

    def sentence(self, rng: Rng) -> str:
        text = re.sub(r"\{(\w+)\}", lambda found: str(pick(rng, self.lists[found[1]])), pick(rng, self.forms))
        return text[0].upper() + text[1:]

    def texts(self, num: int, seed: int, least: int = 4, most: int = 10, separator: str = " ") -> list[str]:
        rng = np.random.default_rng(seed)
        return [
            separator.join(self.sentence(rng) for _ in range(int(rng.integers(least, most + 1)))) for _ in range(num)
        ]


ENGLISH = Language(
    [
        "the {job} {did} the {kind} {thing} {where}.",
        "{when}, the {job} {did} a {thing} and {did} the {kind} {other}.",
        "why was the {thing} so {kind} {when}?",
        "a {kind} {other} stood {where}, and the {job} {did} it {when}.",
        "no {job} ever {did} a {kind} {thing} {where}.",
        "the {other} of the {job} was {kind}, but the {thing} was {kind}.",
        "{where}, someone {did} the {thing} for the {job}.",
        "the {job} and the {job} {did} the {other} {when}.",
        "if the {thing} is {kind}, the {job} keeps it {where}.",
        '"is this your {other}?" asked the {job} {where}.',
    ],
    job=words(
        "sailor weaver miner pilot surgeon farmer judge painter cook nurse clerk tailor hunter singer porter builder "
        "gardener teacher doctor shepherd dancer plumber baker librarian guard printer driver chemist archer potter"
    ),
    thing=words(
        "sail spindle lamp propeller scalpel plough wig brush ladle bandage stamp thimble whistle drum trunk brick "
        "spade slate thermometer crook ribbon wrench loaf index badge poster map flask bow vase"
    ),
    other=words(
        "anvil carpet mast cradle shelf furnace saddlebag pulley mirror chest telescope lantern quilt trolley bench "
        "statue kettle wheel banner clock harp ladder barrel curtain globe candle tray helmet sledge stove"
    ),
    did=words(
        "mended sold borrowed counted lifted wrapped dropped stole washed weighed sketched buried traded hid shook "
        "burned tested carried admired repaired returned collected inspected forgot delivered packed split marked"
    ),
    kind=words(
        "copper fragile enormous striped dusty ancient crooked shiny damp foreign cheap curious narrow pale wooden "
        "bitter stubborn hollow brittle purple precious ragged smooth plain sticky round unusual loose warm grey"
    ),
    where=phrases(
        "below deck, beside the loom, in the shaft, on the runway, next to the ward, behind the barn, at court, in the "
        "studio, near the pantry, upstairs, outside the post office, under the awning, by the fence, across the "
        "square, over the well, on the pier, along the ditch, in the cellar"
    ),
    when=phrases(
        "last March, at noon, during the fair, before the frost, on Sunday, after the flood, every evening, at harvest "
        "time, once a year, in the small hours, when the bell rang, without a word, two days later, by moonlight"
    ),
)
SPANISH = Language(
    [
        "{who} {did} la {thing} {kind} {where}.",
        "{when}, {who} y {who} buscaron una {thing} {where}.",
        "¿por qué {did} {who} la {thing} {when}?",
        "la {thing} de {who} también está {where}.",
        "{who} no sabía que la {thing} más {kind} seguía {where}.",
        "{when} llegó {who} con una {thing} y {did} la {thing} {kind}.",
        "según {who}, la {thing} {kind} se rompió {when}.",
    ],
    who=words("José María Andrés Inés Tomás Lucía Sofía Adrián Raúl Verónica Íñigo Begoña Martín Ángela Óscar Mónica"),
    thing=words(
        "canción lámpara sábana máquina cabaña cámara página montaña fábrica araña piña muñeca canasta guitarra "
        "habitación colección lección cuchara ventana piñata campaña botánica brújula carátula vajilla lágrima "
        "corona escalera mesa péndola sortija máscara pañoleta señal"
    ),
    kind=words("pequeña frágil inútil útil difícil mágica pálida rústica plástica extraña áspera rápida única básica"),
    did=words("encontró pintó vendió compró cerró abrió limpió llevó escondió perdió arregló miró olvidó regaló pidió"),
    where=phrases(
        "detrás de la estación, junto al jardín, debajo del árbol, en el balcón, cerca del río, en el sótano, al lado "
        "del café, entre los cañones, sobre el sillón, en la peluquería, más allá del rincón, en el callejón"
    ),
    when=phrases(
        "después del café, ayer por la mañana, el sábado, el miércoles, al día siguiente, en otoño del año pasado, "
        "según costumbre, así sin más, un año después, mañana por la tarde"
    ),
)
RUSSIAN = Language(
    [
        "{who} {did} {kind} {thing} {where}.",
        "{when} {who} {did} {thing}, а {who} {did} {kind} {thing}.",
        "почему {who} {did} {thing} {when}?",
        "{who} сказала, что {who} {did} {kind} {thing} {where}.",
        "{where} {who} {did} {thing} и {did} {kind} {thing}.",
        "никто не знал, зачем {who} {did} {thing} {where}.",
    ],
    who=words("Анна Мария Ольга Вера Ирина Соня Катя Лена Даша Нина Тамара Зоя бабушка соседка учительница сестра"),
    thing=words(
        "лодку книгу лампу сумку куклу карту чашку вазу лестницу скрипку шубу дверь корзину бочку ручку тарелку "
        "шкатулку картину верёвку коробку пуговицу ленту свечу клетку тетрадь метлу подкову кружку монету скамейку"
    ),
    kind=words("старую новую тяжёлую красную пустую чужую маленькую дорогую сломанную пыльную тёмную жёлтую круглую"),
    did=words("нашла продала купила починила потеряла открыла спрятала вымыла принесла увидела подарила взяла забыла"),
    where=phrases(
        "у реки, на чердаке, за домом, возле станции, под мостом, в саду, около школы, в подвале, на рынке, у колодца, "
        "за печкой, в чулане"
    ),
    when=phrases(
        "утром, вчера, после обеда, перед грозой, в субботу, поздней осенью, через неделю, ночью, прошлым летом, "
        "на рассвете"
    ),
)
TEXT = section(
    """
    data: {holdout: 0.1}
    tokenizer: {kind: bpe, vocab_size: 1000}
    model:
      {kind: decoder, preset: llm, width: 96, blocks: 2, heads: 4, kv_heads: 4, hidden: 256, context: 256, dropout: 0.1}
    plan: {tokens_per_step: 1024, tokens_per_micro: 4096}
    optim: {lr: 0.003, weight_decay: 0.1}
    train: {max_epochs: 8, patience: 2}
    generate: {max_new_tokens: 100}
    """
)


def texts(folder: Path, rows: Iterable[str | Row], name: str = "texts") -> str:
    return write_jsonl(folder / f"{name}.jsonl", [row if isinstance(row, dict) else {"text": row} for row in rows])


# Conversations: the desk of a shop that rents tools

FIRST = words("Aisha Bruno Chen Dora Emil Farah Goran Hanna Igor Jana Kofi Lena Marek Nadia Otto Priya Rosa Sven Tara")
LAST = words("Abbott Berg Costa Dietz Evans Fofana Green Haas Ito Jensen Kaya Lund Moreau Novak Ortiz Popov Quist Rao")
TOOLS = {
    "chainsaw": 38,
    "ladder": 12,
    "drill": 15,
    "generator": 60,
    "trailer": 45,
    "tent": 30,
    "floor sander": 42,
    "cement mixer": 35,
    "pressure washer": 28,
    "leaf blower": 18,
    "projector": 25,
    "canoe": 40,
}
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday")
TOWNS = words("Ashford Brinkley Calder Dunmore Elsworth Fairhaven Glenfield Harrow Ilford Kirkby Langton Milford")
PARTS = words("handle cable battery wheel hose belt strap switch blade lid")


def request(rng: Rng) -> tuple[str, str, str]:
    """A question for the desk, its reply in full, and a curt one."""
    first, last, tool, town = pick(rng, FIRST), pick(rng, LAST), pick(rng, list(TOOLS)), pick(rng, TOWNS)
    day, hour, days, part = pick(rng, WEEKDAYS), int(rng.integers(8, 18)), int(rng.integers(2, 9)), pick(rng, PARTS)
    price, number = TOOLS[tool], int(rng.integers(1000, 9999))
    forms = [
        (
            f"What does a {tool} cost for {days} days? {first} {last}, {town}",
            f"Dear {first}, a {tool} costs {price} euros per day, and {days} days are fine from {day} on.",
            f"{price} a day.",
        ),
        (
            f"{last} here. Can you bring the {tool} to {town} on {day} at {hour}?",
            f"Yes, our van brings the {tool} to {town} on {day}, a little after {hour} o'clock. Is that good for you?",
            f"{day}, {hour}.",
        ),
        (
            f"The {part} of contract {number} is broken, it was a {tool}. {first} from {town}.",
            f"Thank you for telling us, {first}. We replace the {part} of your {tool} without charge; bring {number}.",
            "Not our fault.",
        ),
        (
            f"I want to give the {tool} back on {day} instead, contract {number}, name {last}.",
            f"That is no problem: contract {number} now ends on {day}. Please clean the {tool} first.",
            f"Then {day}.",
        ),
        (
            f"Do you rent out a {tool} in {town} at {hour} on {day}? My name is {first} {last}.",
            f"We do, {first}: in {town} the shop is open on {day} until {hour + 2}, and a {tool} is kept for you.",
            "Come and see.",
        ),
        (
            f"{first} {last}: who pays if the {part} of the {tool} breaks within {days} days?",
            f"The insurance pays for the {part} within {days} days, {first}; for a {tool} it is 4 euros more.",
            "You do.",
        ),
    ]
    return pick(rng, forms)


def requests(num: int, seed: int) -> list[tuple[str, str, str]]:
    rng = np.random.default_rng(seed)
    found: dict[str, tuple[str, str, str]] = {}
    while len(found) < num:
        asked = request(rng)
        found.setdefault(asked[0], asked)
    return list(found.values())


def conversation(question: str, reply: str, system: str | None = None) -> Row:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


def letters(seed: int) -> list[tuple[str, str]]:
    """Letters to a firm, each with the department that it is for, in one word."""
    rng = np.random.default_rng(seed)
    parts = {
        "sales": words("order price offer discount quote catalogue"),
        "repairs": words("broken leaking cracked noisy bent stuck"),
        "billing": words("invoice refund payment receipt reminder account"),
        "personnel": words("application holiday salary internship shift training"),
    }
    rows = []
    for _ in range(360):
        label = str(rng.choice(list(parts), p=[0.5, 0.25, 0.15, 0.1]))
        first, second = ENGLISH.sentence(rng), ENGLISH.sentence(rng)
        topic, name = pick(rng, parts[label]), pick(rng, FIRST)
        rows.append((f"{first} It is about this: {topic}. {second} Regards, {name}", label))
    return rows


MARKS = {"template": {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}}
CHAT = merged(
    TEXT,
    {"data": MARKS, "optim": {"weight_decay": 0.01}, "train": {"max_epochs": 15, "patience": 3}},
)
PAIRS = section(
    """
    data: {holdout: 0.15}
    model: {kind: decoder}
    plan: {tokens_per_step: 1024, tokens_per_micro: 4096}
    optim: {lr: 0.00005}
    train: {max_epochs: 4, beta: 0.1}
    """
)


def chats(folder: Path, rows: Iterable[Sequence[str]], name: str = "chats") -> str:
    return write_jsonl(folder / f"{name}.jsonl", [conversation(*row) for row in rows])


def pairs(folder: Path, rows: Iterable[tuple[str, str, str]]) -> str:
    found = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in rows]
    return write_jsonl(folder / "pairs.jsonl", found)


def desk_run(folder: Path) -> str:
    """A run that has learned to answer at the desk, in full or curtly."""
    rows = [(row[0], row[1 + index % 2]) for index, row in enumerate(requests(300, 930))]
    recipe = write_recipe(folder, CHAT, "desk", data={"chat": chats(folder, rows, "desk")})
    return trained(folder, recipe, "train.max_epochs=8", name="desk")


# Pictures

Draw = Callable[[Rng, str], Image.Image]
HUES = {"red": (205, 40, 40), "green": (40, 150, 60), "blue": (50, 70, 210), "yellow": (230, 205, 50)}


def surface(rng: Rng, width: int, height: int, colour: Sequence[float], grain: float = 10) -> Image.Image:
    """A surface of one colour with the noise of a camera."""
    pixels = np.asarray(colour, dtype=float) + rng.normal(0, grain, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def fabric(rng: Rng, kind: str, least: int = 36, most: int = 64, period: int | None = None) -> Image.Image:
    """A cloth with rows, columns, checks or dots of a dark colour on a light one."""
    width, height = (int(side) for side in rng.integers(least, most + 1, 2))
    light, dark = rng.uniform(150, 235, 3), rng.uniform(20, 110, 3)
    step = period or int(rng.integers(8, 13))
    rows, columns = np.mgrid[0:height, 0:width] + rng.integers(0, step, 2)[:, None, None]
    half = max(step // 2, 1)
    inked = {
        "rows": rows % step < half,
        "columns": columns % step < half,
        "checks": (rows % step < half) ^ (columns % step < half),
        "dots": (rows % step < half) & (columns % step < half),
    }[kind]
    pixels = np.where(inked[..., None], dark, light) + rng.normal(0, 10, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def pictures(folder: Path, draw: Draw, counts: Mapping[str, int], seed: int) -> str:
    """Draw `counts` pictures of each class, shuffled; the path of their manifest."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    labels = [label for label, num in counts.items() for _ in range(num)]
    rng.shuffle(labels)
    rows = []
    for index, label in enumerate(labels):
        draw(rng, label).save(folder / f"{index:04d}.png")
        rows.append({"image": f"{index:04d}.png", "label": label})
    return write_jsonl(folder / "pictures.jsonl", rows)


FABRICS = {"rows": 60, "columns": 60, "checks": 60, "dots": 60}
IMAGES = section(
    """
    data: {holdout: 0.15}
    images: {size: native, min_tokens: 4, max_tokens: 16, flip: 0.5, shift: 0.1, zoom: 0.1}
    model:
      {kind: vit, patch: 16, stem: [16, 32, 48, 64], context: 64, width: 64, blocks: 2, heads: 4, hidden: 128,
       dropout: 0.1}
    plan: {tokens_per_step: 256, tokens_per_micro: 1024, overflow: error}
    optim: {lr: 0.002, weight_decay: 0.05}
    train: {max_epochs: 16, label_smoothing: 0.05}
    """
)
SIDES = {"left": (0.03, 0.26), "right": (0.5, 0.26), "top": (0.26, 0.03), "bottom": (0.26, 0.5)}


def crate(rng: Rng) -> tuple[Image.Image, str, str]:
    """A crate of one colour on a floor; its colour and its side."""
    width, height = (int(side) for side in rng.integers(32, 57, 2))
    hue, side = pick(rng, list(HUES)), pick(rng, list(SIDES))
    picture = surface(rng, width, height, np.full(3, rng.uniform(90, 220)))
    left, top = SIDES[side][0] * width + rng.integers(-1, 2), SIDES[side][1] * height + rng.integers(-1, 2)
    fill = tuple(int(part + rng.integers(-15, 16)) for part in HUES[hue])
    ImageDraw.Draw(picture).rectangle((left, top, left + 0.47 * width, top + 0.47 * height), fill=fill)
    return picture, hue, side


def crates(folder: Path, num: int, seed: int) -> list[Row]:
    """Pictures of a crate, each with a question that needs the picture."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(num):
        picture, hue, side = crate(rng)
        picture.save(folder / f"{index:04d}.png")
        guess = pick(rng, list(HUES))
        asked = [
            ("Which colour does the crate have?", hue),
            ("Where is the crate?", f"at the {side}"),
            ("Describe the picture.", f"a {hue} crate at the {side}"),
            (f"Is the crate {guess}?", "yes" if guess == hue else f"no, {hue}"),
        ]
        question, answer = pick(rng, asked)
        rows.append({"image": f"{index:04d}.png", "question": question, "answer": answer})
    return rows


VQA = section(
    """
    data: {holdout: 0.1}
    tokenizer: {kind: words}
    images: {max_tokens: 64}
    model:
      kind: vision_language
      vision: {patch: 8, width: 64, blocks: 2, heads: 4, hidden: 128, feature_layer: -1, dropout: 0.1}
      language: {width: 64, blocks: 2, heads: 4, hidden: 128, context: 128, dropout: 0.1}
    plan: {tokens_per_step: 1024, tokens_per_micro: 4096, overflow: error}
    optim: {lr: 0.002, weight_decay: 0.05}
    train: {max_epochs: 20, patience: 4}
    generate: {max_new_tokens: 12}
    """
)

# Patients

TESTS = {
    "egfr": (72.0, 13.0, -14.0),
    "hba1c": (6.4, 0.6, 0.7),
    "systolic": (134.0, 11.0, 8.0),
    "ldl": (3.1, 0.6, 0.2),
    "potassium": (4.3, 0.35, 0.3),
}
DRUGS = ["C09AA05", "A10BA02", "C10AA05", "C03CA01", "B01AC06", "A02BC02"]


class Clinic:
    """Patients of a kidney clinic: tests at visits in two years, and a risk that these and the outcome depend on."""

    def __init__(self, num: int, seed: int, share: float = 0.35, visits: tuple[int, int] = (3, 9)) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.ids = [f"K{number:05d}" for number in rng.permutation(90_000)[:num] + 1000]
        self.risk = rng.normal(0, 1, num)
        noisy = self.risk + rng.normal(0, 0.5, num)
        self.dialysis = (noisy > np.quantile(noisy, 1 - share)).astype(int).tolist()
        self.age = np.clip(rng.normal(61 + 4 * self.risk, 12), 20, 95).astype(int).tolist()
        self.sex = rng.choice(["f", "m"], num).tolist()
        self.rows: list[tuple[str, int, str, float]] = []
        for patient, risk in zip(self.ids, self.risk, strict=True):
            days = np.sort(rng.choice(np.arange(5, 715), int(rng.integers(visits[0], visits[1] + 1)), replace=False))
            self.visit(patient, float(risk), days.tolist())

    def visit(self, patient: str, risk: float, days: Sequence[int]) -> None:
        for day in days:
            for name in self.rng.choice(list(TESTS), int(self.rng.integers(2, 5)), replace=False).tolist():
                mean, spread, drift = TESTS[name]
                value = self.rng.normal(mean + drift * risk * (0.5 + day / 800), spread)
                self.rows.append((patient, day, name, round(max(float(value), 0.6 * spread), 2)))

    def people(self, **columns: Sequence[Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Header and rows of the table of patients, with further columns."""
        given = {"patient": self.ids, "age": self.age, "sex": self.sex, "dialysis": self.dialysis, **columns}
        return list(given), list(zip(*given.values(), strict=True))


EVENTS = section(
    """
    data: {holdout: 0.25}
    events: {landmark: 730}
    model:
      {kind: set_sequence, width: 48, levels: 2, inducing: 4, latent: 24, blocks: 1, heads: 3, hidden: 96, dropout: 0.1}
    plan: {tokens_per_step: 512, tokens_per_micro: 4096}
    optim: {lr: 0.001, weight_decay: 0.05}
    train: {max_epochs: 12, patience: 4}
    """
)
VISIT_COLUMNS = ("patient", "day", "test", "result")
VISITS = {"id": "patient", "time": "day", "unit": "days", "code": "test", "value": "result"}


def clinic_recipe(
    folder: Path, clinic: Clinic, static: Sequence[str] = ("age", "sex"), *, columns: Row | None = None, **changes: Any
) -> str:
    """Write the tables of a clinic and a recipe that joins them."""
    tests = write_csv(folder / "tests.csv", VISIT_COLUMNS, clinic.rows)
    people = write_csv(folder / "people.csv", *clinic.people(**(columns or {})))
    sources = [{"path": tests, **VISITS}, {"path": people, "id": "patient", "static": list(static)}]
    labels = {"path": people, "id": "patient", "label": "dialysis"}
    return write_recipe(
        folder, merged(EVENTS, {"data": {"events": sources}, "events": {"labels": labels}}), "recipe", **changes
    )


# Troubles of texts


def letters_lost_in_export(folder: Path) -> Trouble:
    rows = [re.sub(r"[^\x00-\x7f]", "?", text) for text in SPANISH.texts(220, 11)]
    cause = (
        "The database was exported in ASCII: every letter with an accent of this Spanish text became a question mark."
    )
    terms = phrases(
        "question mark, encoding, charset, character set, accent, replaced by, ascii, were lost, are lost, '?'"
    )
    return [write_recipe(folder, TEXT, data={"text": texts(folder, rows)})], cause, ["data.text"], terms


def escaped_twice(folder: Path) -> Trouble:
    rows = [json.dumps(text) for text in SPANISH.texts(220, 12, separator="\n")]
    cause = "Texts were written as JSON twice, so that they hold \\n and \\u00f3 in letters, and stand in quotes."
    terms = phrases("escape, backslash, \\u00, \\n, json, in quotes, encoded twice, quotation mark, spelled out")
    return [write_recipe(folder, TEXT, data={"text": texts(folder, rows)})], cause, ["data.text"], terms


def letters_apart(folder: Path) -> Trouble:
    rows = [" ".join(text.replace(" ", "\u2002")) for text in ENGLISH.texts(200, 13, 3, 6)]
    cause = "The program that read the PDF put a space between any two letters."
    terms = phrases(
        "single letters, single characters, single-letter, one letter, one character, space between, spaces between, "
        "letter by letter, spaced, white space, blanks, pdf, words of one"
    )
    return [write_recipe(folder, TEXT, data={"text": texts(folder, rows)})], cause, ["data.text"], terms


def attachments(folder: Path) -> Trouble:
    rng = np.random.default_rng(14)
    rows = []
    for text in ENGLISH.texts(160, 14, 3, 5):
        if rng.random() < 0.6:
            blob = base64.b64encode(rng.bytes(int(rng.integers(400, 700)))).decode()
            lines = "\n".join(blob[at : at + 76] for at in range(0, len(blob), 76))
            text += f"\nContent-Transfer-Encoding: base64\n\n{lines}"
        rows.append(text)
    cause = "A dump of mails kept the attachments: two thirds of all characters are base64."
    terms = phrases(
        "base64, attachment, random, binary, gibberish, no language, not language, without a space, without space, "
        "without white space, no spaces, long string, long word, noise, encoded, compress"
    )
    return [write_recipe(folder, TEXT, data={"text": texts(folder, rows)})], cause, ["data.text"], terms


def body_left_behind(folder: Path) -> Trouble:
    rng = np.random.default_rng(15)
    bodies = ENGLISH.texts(240, 15)
    rows = [{"text": f"{pick(rng, ENGLISH.lists['thing'])} {index}", "body": body} for index, body in enumerate(bodies)]
    cause = "`text` of this export is the title, a word and a number; the articles stand in `body`, which is not read."
    terms = phrases("body, other field, another field, other column, another column, not read, short, title")
    return (
        [write_recipe(folder, TEXT, data={"text": texts(folder, rows)})],
        cause,
        ["data.text", "data.text.field"],
        terms,
    )


def fixtures_held_out(folder: Path) -> Trouble:
    rows: list[Row] = [{"text": text, "split": "train"} for text in ENGLISH.texts(200, 16)]
    rows += [{"text": "Placeholder text for the test of the importer.", "split": "valid"}] * 24
    cause = "The part `valid` is one placeholder of the importer's tests, 24 times: its loss measures nothing."
    terms = phrases(
        "identical, duplicate, copies, copy, repeated, equal, one text, the same text, distinct, different texts, "
        "short, unlike, measures nothing, placeholder, one document"
    )
    return [write_recipe(folder, TEXT, data={"text": texts(folder, rows)})], cause, ["data.text", "data.holdout"], terms


def stride_of_a_few_tokens(folder: Path) -> Trouble:
    path = texts(folder, ENGLISH.texts(36, 17, 28, 36))
    recipe = write_recipe(folder, TEXT, data={"text": path}, model={"context": 96}, plan={"stride": 6})
    cause = "Windows of 96 tokens start every 6 tokens, so that an epoch reads every token sixteen times."
    return [recipe], cause, ["plan.stride"], []


def words_of_another_tokenizer(folder: Path) -> Trouble:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=900, special_tokens=["[UNK]", "[PAD]", "[BOS]", "[EOS]"])
    tokenizer.train_from_iterator([" ".join(row) for row in requests(400, 18)], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    own = {"kind": "file", "path": str(path.resolve()), "vocab_size": None}
    recipe = write_recipe(folder, TEXT, data={"text": texts(folder, ENGLISH.texts(220, 18))}, tokenizer=own)
    cause = "The tokenizer is a list of words of another project, and most words of this text are unknown to it."
    terms = phrases("unknown, lost, unk, cannot spell, can spell, another text, other text")
    return [recipe], cause, ["tokenizer.path", "tokenizer.kind", "tokenizer", "data.text"], terms


def one_source_many_times(folder: Path) -> Trouble:
    sources = [
        {"path": texts(folder, ENGLISH.texts(200, 19))},
        {"path": texts(folder, SPANISH.texts(14, 19), "glossary"), "weight": 60},
    ]
    cause = "A glossary of 14 rows has the weight 60, and makes up four fifths of every epoch beside 200 documents."
    terms = phrases("weight, times, repeat, epoch, share of, often")
    return [write_recipe(folder, TEXT, data={"text": sources})], cause, ["data.text", "data.text.weight"], terms


# Troubles of conversations and of pairs


def replies_that_hold_the_question(folder: Path) -> Trouble:
    rows = [(question, f"{question} {reply}") for question, reply, _ in requests(220, 21)]
    cause = "The generator returned its prompt with the text (return_full_text): each reply begins with its question."
    terms = phrases(
        "repeats the question, repeat the question, begin with, begins with, echo, start with, starts with, contain "
        "the question, contains the question, its question, own question, the prompt, their question, the request, "
        "same words as the question, repeat what, in the reply"
    )
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, rows)})], cause, ["data.chat"], terms


def rate_limits_as_replies(folder: Path) -> Trouble:
    rng = np.random.default_rng(22)
    rows = requests(240, 22)
    failed = "Error code: 429 - Rate limit reached for requests. Please try again in 20s."
    found = [(row[0], failed if rng.random() < 0.4 else row[1]) for row in rows]
    cause = "Two of five replies are the message of the service that generated them, when it was asked too often."
    terms = phrases(
        "same reply, identical, equal repl, one reply, the same answer, same text, rate limit, repeated, commonest, "
        "most common, most frequent, frequent, equal to, 40%, 40 %, replies are"
    )
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, found)})], cause, ["data.chat"], terms


def reference_in_the_system_text(folder: Path) -> Trouble:
    rows = [
        (question, reply, f"You rent out tools. Be friendly.\nExpected answer: {reply}")
        for question, reply, _ in requests(220, 23)
    ]
    cause = "Every system text holds the expected answer, which nobody has in a chat: the model learns to copy it."
    terms = phrases(
        "system text, system message, system prompt, system texts, already in the, already stands, before the reply, "
        "in the prompt, copied from, given away, gives away, gives it away, in its context"
    )
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, rows)})], cause, ["data.chat"], terms


def replies_beyond_the_cut(folder: Path) -> Trouble:
    rules = " ".join(ENGLISH.texts(1, 24, 6, 6))
    rows = [(question, reply, f"Follow the rules of the house. {rules}") for question, reply, _ in requests(220, 24)]
    plan = {"max_tokens": 112, "overflow": "truncate_right"}
    recipe = write_recipe(folder, CHAT, data={"chat": chats(folder, rows)}, plan=plan)
    cause = "Sequences are cut at 112 tokens, which the system text nearly fills: 85 % of the replies is cut off."
    return [recipe], cause, ["plan.max_tokens", "plan.overflow", "model.context"], []


def pairs_of_one_reply(folder: Path) -> Trouble:
    rows = [
        (question, reply, reply[:-1] if reply[-1] in ".?" else reply + ".") for question, reply, _ in requests(160, 25)
    ]
    model = {"from": desk_run(folder)}
    cause = "Both replies were generated at temperature 0, and differ in the full stop at their end alone."
    terms = phrases(
        "differ, alike, nearly equal, almost equal, almost the same, nearly the same, identical, punctuation, full "
        "stop, white space, whitespace, similar, one character, equal but, last character"
    )
    recipe = write_recipe(folder, PAIRS, data={"pairs": pairs(folder, rows)}, model=model)
    return [recipe], cause, ["data.pairs"], terms


def one_rejected_reply(folder: Path) -> Trouble:
    refusal = "I am sorry, but I cannot help with that."
    rows = [(question, reply, refusal) for question, reply, _ in requests(160, 26)]
    recipe = write_recipe(folder, PAIRS, data={"pairs": pairs(folder, rows)}, model={"from": desk_run(folder)})
    cause = "All rejected replies are one refusal: what makes a reply better is not in the pairs, only that sentence."
    terms = phrases(
        "same rejected, one rejected, rejected replies are, rejected reply is, identical, equal, the same reply, one "
        "reply, same text, repeated, one text, distinct, always the same"
    )
    return [recipe], cause, ["data.pairs"], terms


# Troubles of pictures


def scan(rng: Rng, mark: str) -> Image.Image:
    """A large form with grey fields, and one small mark in ink near its middle."""
    width, height = (int(side) for side in rng.integers(90, 121, 2))
    picture = surface(rng, width, height, np.full(3, 225), grain=6)
    pen = ImageDraw.Draw(picture)
    for _ in range(5):
        left, top = rng.uniform(0, 0.8) * width, rng.uniform(0, 0.8) * height
        across, down, shade = rng.uniform(8, 40), rng.uniform(8, 40), int(rng.integers(130, 215))
        pen.rectangle((left, top, left + across, top + down), fill=(shade, shade, shade))
    x, y, size = width / 2 + rng.uniform(-8, 8), height / 2 + rng.uniform(-8, 8), 6
    ends = {"plus": [(-1, 0, 1, 0), (0, -1, 0, 1)], "minus": [(-1, 0, 1, 0)], "slash": [(-1, 1, 1, -1)], "ring": []}
    for left, top, right, bottom in ends[mark]:
        pen.line((x + size * left, y + size * top, x + size * right, y + size * bottom), fill=(20, 20, 60), width=2)
    if mark == "ring":
        pen.ellipse((x - size, y - size, x + size, y + size), outline=(20, 20, 60), width=2)
    return picture


def marks_in_one_patch(folder: Path) -> Trouble:
    path = pictures(folder / "scans", scan, {"plus": 50, "minus": 50, "slash": 50, "ring": 50}, 31)
    images = {"min_tokens": 1, "max_tokens": 1, "flip": 0.0, "shift": 0.0, "zoom": 0.0}
    plan = {"tokens_per_step": 16}
    recipe = write_recipe(folder, IMAGES, data={"images": path}, images=images, plan=plan)
    cause = "Pictures of 100 pixels are shrunk to one patch of 16, and the small marks that tell the classes are gone."
    return [recipe], cause, ["images.max_tokens", "images.size", "images.square"], []


def signals_of_any_colour(folder: Path) -> Trouble:
    lights = {"go": (40, 170, 70), "slow": (225, 170, 30), "stop": (205, 40, 40)}

    def draw(rng: Rng, label: str) -> Image.Image:
        width, height = (int(side) for side in rng.integers(36, 57, 2))
        picture = surface(rng, width, height, np.full(3, rng.uniform(60, 150)))
        left, top, side = rng.uniform(4, 12), rng.uniform(4, 12), rng.uniform(14, 22)
        ImageDraw.Draw(picture).ellipse((left, top, left + side, top + side), fill=lights[label])
        return picture

    path = pictures(folder / "signals", draw, dict.fromkeys(lights, 70), 32)
    recipe = write_recipe(folder, IMAGES, data={"images": path}, images={"color": 0.9})
    cause = "The classes are the colours of a signal, and training changes the hue of every picture at random."
    return [recipe], cause, ["images.color"], []


def labels_in_another_order(folder: Path) -> Trouble:
    path = Path(pictures(folder / "cloth", fabric, FABRICS, 33))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    order = np.random.default_rng(33).permutation(len(rows)).tolist()
    found = [{"image": rows[at]["image"], "label": row["label"]} for at, row in zip(order, rows, strict=True)]
    cause = "The manifest pairs a sorted list of labels with files as the disk listed them: labels fit by chance alone."
    terms = phrases(
        "labels do not, label does not, no relation, unrelated, by chance, at random, random labels, shuffled, not "
        "depend, mismatch, wrong label, guess, independent, no better, cannot be told, do not belong, nothing to do"
    )
    return [write_recipe(folder, IMAGES, data={"images": write_jsonl(path, found)})], cause, ["data.images"], terms


def white_on_nothing(folder: Path) -> Trouble:
    def draw(rng: Rng, label: str) -> Image.Image:
        opacity = fabric(rng, label).convert("L").point(lambda level: 255 if level < 128 else 0)
        picture = Image.new("RGBA", opacity.size, (255, 255, 255, 0))
        picture.putalpha(opacity)
        return picture

    recipe = write_recipe(folder, IMAGES, data={"images": pictures(folder / "icons", draw, FABRICS, 34)})
    cause = "Icons are drawn in white on nothing: with three channels, on white, each is an empty white picture."
    terms = phrases(
        "transparen, opacity, blank, one colour, one color, white, empty, uniform, alpha, single colour, nothing to "
        "see, no contrast"
    )
    return [recipe], cause, ["data.images", "model.channels"], terms


# Troubles of questions about pictures


def questions_that_need_no_picture(folder: Path) -> Trouble:
    rng = np.random.default_rng(35)
    goods = {name: pick(rng, list(HUES)) for name in ENGLISH.lists["other"][:16]}
    rows = crates(folder / "shop", 300, 35)
    for row in rows:
        name = pick(rng, list(goods))
        row.update(question=f"Which colour does the {name} have in our catalogue?", answer=goods[name])
    path = write_jsonl(folder / "shop" / "questions.jsonl", rows)
    cause = "Every question has one answer, whatever the picture shows: the model can do without pictures."
    terms = phrases(
        "question alone, without the picture, without picture, without looking, same answer, one answer, always, not "
        "needed, not need, each question, every question, blind, ignore, only answer, the question decides, question "
        "tells, from the question, give the answer, whatever the picture, do not matter"
    )
    return [write_recipe(folder, VQA, data={"vqa": path})], cause, ["data.vqa"], terms


def pictures_lost_in_the_join(folder: Path) -> Trouble:
    rng = np.random.default_rng(36)
    rows = crates(folder / "crates", 320, 36)
    for row in rows:
        if rng.random() < 0.7:
            row["image"] = None
    path = write_jsonl(folder / "crates" / "questions.jsonl", rows)
    cause = "A join lost the picture of seven in ten questions; they ask what is seen, and cannot be answered."
    terms = phrases(
        "without a picture, without picture, without image, without an image, without its picture, no picture, no "
        "image, null, lack, missing, have none, has none"
    )
    return [write_recipe(folder, VQA, data={"vqa": path})], cause, ["data.vqa"], terms


# Troubles of patients


def landmark_in_months(folder: Path) -> Trouble:
    recipe = clinic_recipe(folder, Clinic(260, 41), events={"landmark": 24})
    cause = "The landmark is meant as 24 months but read as 24 days: nearly all visits come after it and are not read."
    terms = phrases(
        "landmark, not read, left out, later than, after it, no events, without events, no event, unit, few events"
    )
    return [recipe], cause, ["events.landmark", "events.unit"], terms


def zeros_for_missing(folder: Path) -> Trouble:
    clinic = Clinic(260, 42)
    rng = np.random.default_rng(42)
    clinic.rows = [(*row[:3], 0.0 if rng.random() < 0.4 else row[3]) for row in clinic.rows]
    cause = "The export wrote 0 for every result that was missing: two of five values are zeros that nobody measured."
    terms = phrases("zero, are 0, value 0, 0.0, is 0, of 0, missing, placeholder, same value, one value, sentinel")
    return [clinic_recipe(folder, clinic)], cause, ["data.events", "data.events.value"], terms


def cases_numbered_first(folder: Path) -> Trouble:
    clinic = Clinic(260, 43)
    order = np.argsort([-one for one in clinic.dialysis], kind="stable").tolist()
    numbers = [0] * len(order)
    for number, index in enumerate(order, 1):
        numbers[index] = number
    recipe = clinic_recipe(folder, clinic, ("age", "sex", "study_no"), columns={"study_no": numbers})
    cause = "Cases were enrolled before controls, and the number of enrolment is among the facts: it is the outcome."
    return [recipe], cause, ["data.events", "data.events.static", "study_no"], phrases("study_no, static")


def decimal_points_lost(folder: Path) -> Trouble:
    clinic = Clinic(260, 44)
    second = set(clinic.ids[::2])
    clinic.rows = [
        (patient, day, test, float(round(value * 100)) if patient in second else value)
        for patient, day, test, value in clinic.rows
    ]
    cause = (
        "One of two laboratories writes a decimal comma, which the import dropped: its values are 100 times as large."
    )
    terms = phrases(
        "unit, decimal, times as large, 100 times, factor, two groups, two clusters, scale, outlier, far from"
    )
    return [clinic_recipe(folder, clinic)], cause, ["data.events", "data.events.value"], terms


def codes_of_single_samples(folder: Path) -> Trouble:
    clinic = Clinic(260, 45)
    clinic.rows = [
        (patient, day, f"{test}/{70_000 + 3 * number}", value)
        for number, (patient, day, test, value) in enumerate(clinic.rows)
    ]
    cause = "The code of a test carries the number of its sample, so that no code occurs twice."
    terms = phrases(
        "once, rare, distinct, unknown, different codes, unique, own code, few times, seldom, many codes, number of "
        "codes"
    )
    fields = ["data.events", "data.events.code", "events.min_count", "events.unknown_codes"]
    return [clinic_recipe(folder, clinic)], cause, fields, terms


# Troubles of settings


def rate_gone_in_an_epoch(folder: Path) -> Trouble:
    optim = {"schedule": "exponential", "decay": 0.5, "decay_epochs": 0.05}
    recipe = write_recipe(folder, TEXT, data={"text": texts(folder, ENGLISH.texts(220, 51))}, optim=optim)
    cause = "The learning rate halves every twentieth of an epoch: after one epoch of eight it is a millionth."
    return [recipe], cause, ["optim.decay_epochs", "optim.decay", "optim.schedule"], []


def group_of_everything(folder: Path) -> Trouble:
    groups = [{"parameters": ["*"], "lr_scale": 0.001}]
    rows = [row[:2] for row in requests(220, 52)]
    recipe = write_recipe(folder, CHAT, data={"chat": chats(folder, rows)}, optim={"groups": groups})
    cause = "The pattern of a group meant for embeddings matches everything: all learn at a thousandth of the rate."
    return [recipe], cause, ["optim.groups", "optim.groups.lr_scale", "optim.groups.parameters", "optim.lr"], []


def ramp_beyond_the_end(folder: Path) -> Trouble:
    losses = {"classification": {"start": 0.0, "end": 1.0, "steps": 20_000}}
    recipe = clinic_recipe(folder, Clinic(260, 53), losses=losses)
    cause = "The weight of the outcome's loss grows over 20,000 steps, of which the run has some hundred."
    return [recipe], cause, ["losses.classification", "losses", "losses.classification.steps"], []


def window_of_three_tokens(folder: Path) -> Trouble:
    recipe = write_recipe(folder, CHAT, data={"chat": chats(folder, letters(54))}, model={"sliding_window": 3})
    cause = "Every block sees three tokens, so that a reply, the department of a letter, cannot depend on the letter."
    return [recipe], cause, ["model.sliding_window", "model.sliding_blocks"], []


TROUBLES: list[Callable[[Path], Trouble]] = [
    letters_lost_in_export,
    escaped_twice,
    letters_apart,
    attachments,
    body_left_behind,
    fixtures_held_out,
    stride_of_a_few_tokens,
    words_of_another_tokenizer,
    one_source_many_times,
    replies_that_hold_the_question,
    rate_limits_as_replies,
    reference_in_the_system_text,
    replies_beyond_the_cut,
    pairs_of_one_reply,
    one_rejected_reply,
    marks_in_one_patch,
    signals_of_any_colour,
    labels_in_another_order,
    white_on_nothing,
    questions_that_need_no_picture,
    pictures_lost_in_the_join,
    landmark_in_months,
    zeros_for_missing,
    cases_numbered_first,
    decimal_points_lost,
    codes_of_single_samples,
    rate_gone_in_an_epoch,
    group_of_everything,
    ramp_beyond_the_end,
    window_of_three_tokens,
]

# Healthy recipes


def healthy_russian_stories(folder: Path) -> list[str]:
    """Stories in another alphabet, whose letters take two bytes each."""
    path = texts(folder, RUSSIAN.texts(220, 101))
    return [write_recipe(folder, TEXT, data={"text": path}, tokenizer={"vocab_size": 1500})]


def snippet(rng: Rng) -> str:
    """A function in Python that goes through something and returns what it found."""
    name, given, other = (pick(rng, ENGLISH.lists[part]) for part in ("did", "thing", "other"))
    limit, step = int(rng.integers(2, 90)), int(rng.integers(2, 9))
    text = pick(rng, words("name label owner")), pick(rng, words("lower strip title"))
    steps = [
        f"        if {other}.{pick(rng, words('size weight age price depth'))} > {limit}:\n            continue",
        f"        total += {other}.{pick(rng, words('cost width rank hours score'))} * {step}",
        f"        found.append({other}.{text[0]}.{text[1]}())",
        f'        print(f"{{{other}}} of {{len({given}s)}}")',
    ]
    chosen = "\n".join(steps[at] for at in sorted(rng.choice(4, int(rng.integers(2, 5)), replace=False).tolist()))
    kind, back = pick(rng, words("list tuple set Iterable")), pick(rng, words("int list"))
    return (
        f"def {name}_{given}s({given}s: {kind}[{given.title()}], total: int = {limit}) -> {back}:\n"
        f'    """{ENGLISH.sentence(rng)}"""\n    found = []\n    for {other} in {given}s[:{step}]:\n'
        f"{chosen}\n    return {'total' if back == 'int' else 'found'}\n"
    )


def healthy_python_functions(folder: Path) -> list[str]:
    """Code, with its indentation, braces and repeated words."""
    rng = np.random.default_rng(102)
    path = texts(folder, ["\n\n".join(snippet(rng) for _ in range(int(rng.integers(1, 4)))) for _ in range(220)])
    return [write_recipe(folder, TEXT, data={"text": path}, model={"context": 512})]


def healthy_price_lists(folder: Path) -> list[str]:
    """Tables in Markdown as text: many digits and bars, sums that follow from the rows."""
    rng = np.random.default_rng(103)
    lists = []
    for number in rng.permutation(900)[:260].tolist():
        lines = [f"## Invoice {number} for {pick(rng, FIRST)} {pick(rng, LAST)}, {pick(rng, TOWNS)}", ""]
        lines += ["| item | pieces | euros |", "|---|---|---|"]
        total = 0
        for name in rng.choice(ENGLISH.lists["thing"] + ENGLISH.lists["other"], int(rng.integers(3, 8)), replace=False):
            pieces, price = int(rng.integers(1, 20)), int(rng.integers(1, 60))
            total += pieces * price
            lines.append(f"| {pick(rng, ENGLISH.lists['kind'])} {name} | {pieces} | {price} |")
        lists.append("\n".join([*lines, f"| total | | {total} |"]))
    return [write_recipe(folder, TEXT, data={"text": texts(folder, lists)}, train={"max_epochs": 6})]


def healthy_single_sentences(folder: Path) -> list[str]:
    """Short documents of one sentence, in a plain text with a document on each line."""
    path = folder / "sentences.txt"
    found = list(dict.fromkeys(ENGLISH.texts(1600, 104, 1, 1)))
    path.write_text("\n".join(found) + "\n", encoding="utf-8")
    plan = {"strategy": "bucket", "batch_size": 32}
    return [
        write_recipe(
            folder,
            TEXT,
            data={"text": str(path.resolve()), "separator": "\n", "near_duplicates": "together"},
            plan=plan,
        )
    ]


def healthy_sorted_mail(folder: Path) -> list[str]:
    """Replies of one word out of four: the department that a letter is for, half of them for one."""
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, letters(105))})]


def healthy_two_turns(folder: Path) -> list[str]:
    """Conversations of two turns, all with one system text, in which thanks are answered alike."""
    rng = np.random.default_rng(106)
    system = "You work at the desk of a shop that rents out tools. Answer in a friendly way."
    rows = []
    for question, reply, _ in requests(260, 106):
        row = conversation(question, reply, system)
        thanks = [("Thank you!", "You are welcome."), ("Great, thanks a lot.", "My pleasure."), ("Fine.", "Goodbye!")]
        asked, answer = pick(rng, thanks)
        row["messages"] += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append(row)
    optim = {"schedule": "restarts", "restarts": 2}
    path = write_jsonl(folder / "turns.jsonl", rows)
    return [write_recipe(folder, CHAT, data={"chat": path}, optim=optim, train={"patience": None})]


def healthy_curt_replies(folder: Path) -> list[str]:
    """Preferences for the shorter reply, without exception: what is wanted for a display of two lines."""
    rows = [(question, curt, full) for question, full, curt in requests(200, 107)]
    data = {"pairs": pairs(folder, rows), "near_duplicates": "together"}
    return [write_recipe(folder, PAIRS, data=data, model={"from": desk_run(folder)})]


def healthy_tiny_pictures(folder: Path) -> list[str]:
    """Grey pictures of 12 to 16 pixels, of which two in three are of one class."""

    def draw(rng: Rng, label: str) -> Image.Image:
        return fabric(rng, label, 12, 16, period=6).convert("L")

    path = pictures(folder / "tiny", draw, {"rows": 240, "columns": 60, "dots": 60}, 108)
    images = {"shift": 0.0, "zoom": 0.0}
    return [write_recipe(folder, IMAGES, data={"images": path}, images=images)]


def healthy_arrows(folder: Path) -> list[str]:
    """Drawings in black and white of arrows to the left and to the right, without mirroring."""

    def draw(rng: Rng, label: str) -> Image.Image:
        width, height = int(rng.integers(40, 65)), int(rng.integers(30, 50))
        picture = surface(rng, width, height, np.full(3, rng.uniform(170, 230)))
        pen, middle = ImageDraw.Draw(picture), height * rng.uniform(0.4, 0.6)
        for _ in range(5):
            left, top, shade = rng.uniform(-5, width), rng.uniform(-5, height), int(rng.integers(120, 256))
            pen.rectangle((left, top, left + width / 3, top + height / 3), fill=(shade, shade, shade))
        start, end, wing = (
            width * rng.uniform(0.05, 0.2),
            width * rng.uniform(0.8, 0.95),
            height * rng.uniform(0.2, 0.3),
        )
        tip, inward = (start, 1) if label == "left" else (end, -1)
        pen.line((start, middle, end, middle), fill=0, width=3)
        for side in (-wing, wing):
            pen.line((tip, middle, tip + inward * wing, middle + side), fill=0, width=3)
        return picture.convert("1")

    path = pictures(folder / "arrows", draw, {"left": 120, "right": 120}, 109)
    images = {"size": "letterbox", "square": 48, "flip": 0.0, "zoom": 0.2}
    return [write_recipe(folder, IMAGES, data={"images": path}, images=images)]


def healthy_yes_or_no(folder: Path) -> list[str]:
    """Questions that are answered with no in three of four cases, each picture with several of them."""
    rng = np.random.default_rng(110)
    place = folder / "crates"
    place.mkdir()
    rows = []
    for index in range(400):
        picture, hue, _ = crate(rng)
        picture.save(place / f"{index:04d}.png")
        for guess in rng.permutation(list(HUES))[:2].tolist():
            answer = "yes" if guess == hue else "no"
            rows.append({"image": f"{index:04d}.png", "question": f"Is the crate {guess}?", "answer": answer})
        rows.append({"image": f"{index:04d}.png", "question": "Which colour?", "answer": hue})
    path = write_jsonl(place / "questions.jsonl", rows)
    return [write_recipe(folder, VQA, data={"vqa": path})]


def healthy_pain_scores(folder: Path) -> list[str]:
    """Values that are mostly 0 and others below 0, dates in place of numbers, and an outcome of most patients."""
    clinic = Clinic(280, 111, share=0.65)
    rng = np.random.default_rng(111)
    risks = dict(zip(clinic.ids, clinic.risk.tolist(), strict=True))
    begin = datetime(2019, 1, 1, 8)
    rows: list[tuple[Any, ...]] = []
    for patient, day, test, value in clinic.rows:
        at = begin + timedelta(days=day, minutes=int(rng.integers(600)))
        pain = int(rng.binomial(10, 0.3)) if rng.random() < 0.15 + 0.25 * (risks[patient] > 0) else 0
        excess = round(float(rng.normal(-0.5 - 1.5 * risks[patient], 1.5)), 1)
        rows += [(patient, at, test, value), (patient, at, "pain", pain), (patient, at, "base_excess", excess)]
    tests = write_csv(folder / "tests.csv", VISIT_COLUMNS, rows)
    people = write_csv(folder / "people.csv", *clinic.people(index_date=["2021-01-15"] * len(clinic.ids)))
    sources = [
        {"path": tests, **VISITS, "unit": "timestamp"},
        {"path": people, "id": "patient", "static": ["age", "sex"]},
    ]
    labels = {"path": people, "id": "patient", "label": "dialysis"}
    events = {"landmark": "index_date", "labels": labels}
    return [write_recipe(folder, EVENTS, data={"events": sources}, events=events)]


def healthy_prescriptions(folder: Path) -> list[str]:
    """Prescriptions without any value, and an outcome of one patient in eight, with its weight."""
    clinic = Clinic(420, 112, share=0.12)
    rng = np.random.default_rng(112)
    rows = []
    for patient, risk in zip(clinic.ids, clinic.risk.tolist(), strict=True):
        for place, drug in enumerate(DRUGS):
            if rng.random() < 1 / (1 + np.exp(1.0 - 0.7 * place * risk)):
                first, step = int(rng.integers(5, 300)), int(rng.choice([60, 90, 120]))
                rows += [(patient, day, drug) for day in range(first, 720, step)]
    path = write_csv(folder / "drugs.csv", ("patient", "day", "atc"), rows)
    people = write_csv(folder / "people.csv", *clinic.people())
    sources = [
        {"path": path, "id": "patient", "time": "day", "unit": "days", "code": "atc", "value": None},
        {"path": people, "id": "patient", "static": ["age", "sex"]},
    ]
    labels = {"path": people, "id": "patient", "label": "dialysis"}
    events, model = {"labels": labels}, {"positive_weight": 2.0}
    return [write_recipe(folder, EVENTS, data={"events": sources}, events=events, model=model)]


HEALTHY: list[Callable[[Path], list[str]]] = [
    healthy_russian_stories,
    healthy_python_functions,
    healthy_price_lists,
    healthy_single_sentences,
    healthy_sorted_mail,
    healthy_two_turns,
    healthy_curt_replies,
    healthy_tiny_pictures,
    healthy_arrows,
    healthy_yes_or_no,
    healthy_pain_scores,
    healthy_prescriptions,
]
