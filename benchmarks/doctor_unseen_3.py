"""Thirty troubles and twelve healthy recipes, written without a look at the doctor's code.

The format is that of `tests/doctor/planted.py`. Every sentence, picture and patient is drawn here, from fixed seeds.
The runs among the troubles are trained here as well, in some seconds each, by `python -m unpad`.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

Row = dict[str, Any]
Trouble = tuple[list[str], str, list[str], list[str]]

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


def unpad(*arguments: str) -> None:
    """Run a command of unpad on one thread.

    Raises:
        RuntimeError: it ended with another code than 0.
    """
    command = [sys.executable, "-m", "unpad", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def trained(folder: Path, recipe: str, *overrides: str, name: str = "run") -> str:
    run = str((folder / name).resolve())
    unpad("train", recipe, "--out", run, *overrides)
    return run


def section(text: str) -> Row:
    return dict(yaml.safe_load(text))


def pick(rng: np.random.Generator, given: Sequence[Any]) -> Any:
    return given[int(rng.integers(len(given)))]


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    return text.split(", ")


# Texts

NAMES = words("Anna Ben Clara David Edith Frank Grace Henry Irene Jacob Karen Leo Martha Noah Olive Peter Ruth Simon")
NOUNS = words(
    "lantern kettle ladder anchor basket violin hammer blanket compass wagon bottle mirror pillow rope barrel "
    "needle bucket candle drawer feather goose hedge island jacket kitchen letter market novel orchard pocket "
    "quarry river saddle tunnel umbrella valley window bridge chimney doorway engine fountain garden harbour mill "
    "oven path roof"
)
ADJECTIVES = words(
    "old narrow bright heavy wooden silent broken golden muddy crooked gentle frozen hollow painted rusty sturdy "
    "tiny velvet weary young empty famous greasy hidden modest noisy patient rough sleepy tall"
)
VERBS = words(
    "carried repaired painted found lost hid sold bought cleaned lifted dropped followed watched measured "
    "borrowed polished covered described moved opened pushed pulled searched touched visited praised"
)
PLACES = phrases(
    "behind the mill, near the harbour, under the bridge, at the market, in the attic, across the valley, beside "
    "the church, on the hill, along the canal, inside the barn, by the station, above the bakery"
)
TIMES = phrases(
    "before noon, after supper, at dawn, on Tuesday, in late autumn, during the storm, that winter, at last"
)


def english(rng: np.random.Generator, num_sentences: int) -> str:
    sentences = []
    for _ in range(num_sentences):
        first, second = pick(rng, NOUNS), pick(rng, NOUNS)
        fine, other = pick(rng, ADJECTIVES), pick(rng, ADJECTIVES)
        verb, also, place, time = pick(rng, VERBS), pick(rng, VERBS), pick(rng, PLACES), pick(rng, TIMES)
        who, friend = pick(rng, NAMES), pick(rng, NAMES)
        forms = [
            f"{who} {verb} the {fine} {first} {place}.",
            f"The {fine} {first} {place} belonged to {who}, who {verb} it {time}.",
            f"{time.capitalize()}, {who} and {friend} {verb} a {first} and {also} the {other} {second}.",
            f"Nobody {verb} the {second} {place} until {friend} {also} it.",
            f"It was the {first}, not the {second}, that {who} {verb} {time}.",
            f"{friend} asked why the {first} {place} looked so {other}.",
            f"With a {fine} {second} in one hand, {who} {verb} the {first} {time}.",
        ]
        sentences.append(pick(rng, forms))
    return " ".join(sentences)


PEOPLE_DE = words("Fischer Bäcker Gärtner Schüler Lehrerinnen Nachbarn Händler Müllerinnen Kinder Wärter Köche Förster")
THINGS_DE = words(
    "Netze Körbe Bücher Türen Schlüssel Brücken Töpfe Kähne Lampen Äpfel Briefe Stühle Wände Gläser Fässer Räder "
    "Zäune Uhren Öfen Dächer Kräuter Teppiche Säcke Fenster Geigen Mäntel Bänke Krüge Messer Kerzen"
)
ADJECTIVES_DE = words(
    "alten nassen schönen müden großen grünen kühlen leeren süßen schweren runden frühen blauen dünnen hölzernen "
    "stillen"
)
VERBS_DE = words(
    "reparierten trugen verkauften fanden suchten zählten öffneten bemalten putzten verschenkten holten prüften "
    "sammelten versteckten lobten tauschten"
)
PLACES_DE = phrases(
    "am Hafen, hinter der Mühle, über dem Fluss, auf dem Markt, im Gewölbe, vor der Kirche, nahe dem Wäldchen, an "
    "der Straße, unter der Brücke, neben der Bäckerei"
)
TIMES_DE = phrases(
    "am Morgen, vor dem Frühstück, gegen Mittag, im Spätherbst, nach dem Sturm, am Dienstag, zu früher Stunde"
)


def german(rng: np.random.Generator, num_sentences: int) -> str:
    sentences = []
    for _ in range(num_sentences):
        who, others = pick(rng, PEOPLE_DE), pick(rng, PEOPLE_DE)
        thing, second = pick(rng, THINGS_DE), pick(rng, THINGS_DE)
        fine, other = pick(rng, ADJECTIVES_DE), pick(rng, ADJECTIVES_DE)
        verb, also, place, time = pick(rng, VERBS_DE), pick(rng, VERBS_DE), pick(rng, PLACES_DE), pick(rng, TIMES_DE)
        forms = [
            f"Die {fine} {who} {verb} {time} die {other} {thing}.",
            f"{place.capitalize()} {verb} die {who} {thing} und {second}, während die {others} schwiegen.",
            f"Niemand wusste, dass die {others} die {fine} {thing} {place} {verb}.",
            f"Weil es regnete, {also} die {who} {time} keine {second}.",
            f"Die {thing} {place} gehörten den {fine} {others}, und {time} {verb} diese sie.",
        ]
        sentences.append(pick(rng, forms))
    return " ".join(sentences)


NAMES_ZH = words("小明 小红 王老师 李奶奶 张师傅 陈医生 赵叔叔 刘阿姨 孙爷爷 周同学 吴司机 郑老板")
THINGS_ZH = words(
    "苹果 雨伞 自行车 毛衣 茶壶 信件 灯笼 竹篮 月饼 棋盘 花瓶 被子 风筝 算盘 扇子 石磨 草帽 瓦罐 木梯 铜锁"
)
ADJECTIVES_ZH = words("新鲜 陈旧 漂亮 沉重 干净 小巧 结实 破烂 精致 普通 古怪 便宜")
VERBS_ZH = words("修好 卖掉 送走 找到 擦干 打开 藏起 搬来 买下 画出 收好 包好")
PLACES_ZH = words("河边 集市 山脚 学校门口 院子里 桥头 车站旁 图书馆 老屋后面 稻田边 码头 茶馆")
TIMES_ZH = words("清晨 中午 傍晚 上个月 春节前 下雨时 放学后 星期三 去年冬天 刚才")


def chinese(rng: np.random.Generator, num_sentences: int) -> str:
    sentences = []
    for _ in range(num_sentences):
        who, friend = pick(rng, NAMES_ZH), pick(rng, NAMES_ZH)
        thing, second, fine = pick(rng, THINGS_ZH), pick(rng, THINGS_ZH), pick(rng, ADJECTIVES_ZH)
        verb, place, time = pick(rng, VERBS_ZH), pick(rng, PLACES_ZH), pick(rng, TIMES_ZH)
        forms = [
            f"{time}，{who}在{place}{verb}了{fine}的{thing}。",
            f"{place}的{thing}很{fine}，{who}{time}才{verb}。",
            f"{who}问{friend}：为什么{thing}比{second}更{fine}？",
            f"因为{second}不见了，{who}只好和{friend}去{place}。",
            f"{friend}说，{time}有人{verb}了{place}的{second}和{thing}。",
        ]
        sentences.append(pick(rng, forms))
    return "".join(sentences)


def documents(
    write: Callable[[np.random.Generator, int], str], num: int, seed: int, least: int = 4, most: int = 10
) -> list[str]:
    rng = np.random.default_rng(seed)
    return [write(rng, int(rng.integers(least, most + 1))) for _ in range(num)]


TEXT = section(
    """
    data: {holdout: 0.1}
    tokenizer: {kind: bpe, vocab_size: 1200}
    model:
      {kind: decoder, preset: llm, width: 96, blocks: 2, heads: 4, kv_heads: 4, hidden: 256, context: 256, dropout: 0.1}
    plan: {tokens_per_step: 1024, tokens_per_micro: 4096}
    optim: {lr: 0.002, weight_decay: 0.1}
    train: {max_epochs: 8, patience: 2}
    generate: {max_new_tokens: 120}
    """
)


def texts(folder: Path, rows: Iterable[str | Row], name: str = "texts") -> str:
    return write_jsonl(folder / f"{name}.jsonl", [row if isinstance(row, dict) else {"text": row} for row in rows])


# Conversations

GOODS = words("lamps chairs kettles blankets mirrors shelves clocks baskets cushions teapots ladders curtains")
COLOURS = words("red blue green white black yellow brown grey")
SURNAMES = words("Miller Okafor Tanaka Schmidt Rossi Dubois Novak Silva Haddad Larsen Murphy Kowalski Petrov Ahmed")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday")
STREETS = phrases("Mill Lane, Station Road, Harbour Street, Church Hill, Orchard Way, Bridge Street, Canal Row")


def orders(rng: np.random.Generator) -> tuple[str, str, str]:
    """A customer's message, a polite reply to it, and a rude one of about the same length and content."""
    name, goods, colour, day = pick(rng, SURNAMES), pick(rng, GOODS), pick(rng, COLOURS), pick(rng, DAYS)
    other, street, num, house = pick(rng, GOODS), pick(rng, STREETS), int(rng.integers(2, 30)), int(rng.integers(1, 90))
    where = f"{house} {street}"
    talks = [
        (
            f"This is {name}. I would like {num} {colour} {goods}, please bring them on {day}.",
            f"Thank you, {name}. I have noted {num} {colour} {goods}, and our van will bring them to you on {day}.",
            f"Fine, {name}. So {num} {colour} {goods} then, the van comes on {day} if nobody forgets about it.",
        ),
        (
            f"Can you send {num} {goods} to {where}? The name is {name}.",
            f"With pleasure, {name}. We will send {num} {goods} to {where} and call you before we arrive there.",
            f"If you must, {name}. We send {num} {goods} to {where} and you had better be at home by then.",
        ),
        (
            f"{name} here. Two of the {colour} {goods} that came on {day} are broken.",
            f"I am very sorry, {name}. We will replace the broken {colour} {goods} from {day} at no cost to you.",
            f"Hardly our fault, {name}. Maybe we replace the {colour} {goods} from {day}, maybe we do not.",
        ),
        (
            f"Please cancel the {goods}, I would rather have {num} {colour} {other}. Regards, {name}.",
            f"Of course, {name}. The {goods} are cancelled, and {num} {colour} {other} are reserved in your name.",
            f"Make up your mind, {name}. No {goods} then, and {num} {colour} {other} instead, for the last time.",
        ),
        (
            f"I have moved to {where}. Will the {goods} still come on {day}? {name}",
            f"Yes, {name}. Your new address {where} is in our books, and the {goods} will come on {day} as agreed.",
            f"Who cares, {name}. Somebody wrote down {where}, and the {goods} turn up on {day} or later.",
        ),
    ]
    return talks[int(rng.integers(len(talks)))]


def talks(num: int, seed: int) -> list[tuple[str, str, str]]:
    """Different conversations of one turn, each with its polite and its rude reply."""
    rng = np.random.default_rng(seed)
    found: dict[str, tuple[str, str, str]] = {}
    while len(found) < num:
        talk = orders(rng)
        found.setdefault(talk[0], talk)
    return list(found.values())


def conversation(question: str, reply: str, system: str | None = None) -> Row:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


CHAT = merged(
    TEXT,
    section(
        """
        data: {template: {system: "<|system|>", user: "<|user|>", assistant: "<|assistant|>"}}
        tokenizer: {vocab_size: 800}
        optim: {weight_decay: 0.01}
        train: {max_epochs: 15, patience: 3}
        """
    ),
)
PAIRS = section(
    """
    data: {holdout: 0.15, template: {system: "<|system|>", user: "<|user|>", assistant: "<|assistant|>"}}
    model: {kind: decoder, dropout: 0.0}
    plan: {tokens_per_step: 1024, tokens_per_micro: 4096}
    optim: {lr: 0.00005}
    train: {max_epochs: 4, beta: 0.1}
    generate: {max_new_tokens: 120}
    """
)


def chats(folder: Path, rows: Iterable[Sequence[str]], name: str = "chats") -> str:
    return write_jsonl(folder / f"{name}.jsonl", [conversation(question, reply) for question, reply in rows])


def answering_run(folder: Path) -> str:
    """A run that has learned to answer orders, two of three times politely, for those that start from it."""
    rows = [(talk[0], talk[2] if index % 3 == 0 else talk[1]) for index, talk in enumerate(talks(300, 901))]
    recipe = write_recipe(folder, CHAT, "base", data={"chat": chats(folder, rows, "base")})
    return trained(folder, recipe, "train.max_epochs=8", name="base")


# Pictures

Draw = Callable[[np.random.Generator, str], Image.Image]


def background(rng: np.random.Generator, width: int, height: int, grain: int = 22) -> Image.Image:
    """Coarse and fine noise around a random colour."""
    base = rng.integers(70, 190, 3)
    coarse = rng.normal(0, grain, (5, 5, 3)) + base
    picture = Image.fromarray(np.clip(coarse, 0, 255).astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    fine = np.asarray(picture).astype(np.float64) + rng.normal(0, grain / 3, (height, width, 3))
    return Image.fromarray(np.clip(fine, 0, 255).astype(np.uint8))


def random_colour(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in rng.choice([15, 60, 200, 245], 3))
    return red, green, blue


def shape(
    picture: Image.Image, rng: np.random.Generator, kind: str, colour: tuple[int, ...], size: float | None = None
) -> None:
    """Draw a shape of `kind` at a random place; `size` is a share of the shorter side."""
    width, height = picture.size
    radius = min(width, height) * (size or float(rng.uniform(0.25, 0.42)))
    x = float(rng.uniform(radius, width - radius))
    y = float(rng.uniform(radius, height - radius))
    draw = ImageDraw.Draw(picture)
    if kind == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif kind == "square":
        side = radius * 0.85
        draw.rectangle((x - side, y - side, x + side, y + side), fill=colour)
    elif kind == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius * 0.8), (x + radius, y + radius * 0.8)], fill=colour)
    elif kind == "cross":
        thin = radius * 0.3
        draw.rectangle((x - radius, y - thin, x + radius, y + thin), fill=colour)
        draw.rectangle((x - thin, y - radius, x + thin, y + radius), fill=colour)
    else:
        raise ValueError(kind)


def shape_picture(rng: np.random.Generator, kind: str) -> Image.Image:
    width, height = (int(side) for side in rng.integers(36, 65, 2))
    picture = background(rng, width, height)
    shape(picture, rng, kind, random_colour(rng))
    return picture


def pictures(folder: Path, draw: Draw, counts: Mapping[str, int], seed: int) -> list[tuple[str, str]]:
    """Draw `counts` pictures of each class; their names in `folder` with their classes, shuffled."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    labels = [label for label, num in counts.items() for _ in range(num)]
    rng.shuffle(labels)
    made = []
    for index, label in enumerate(labels):
        draw(rng, label).save(folder / f"p{index:04d}.png")
        made.append((f"p{index:04d}.png", label))
    return made


def manifest(folder: Path, made: Iterable[tuple[str, str]]) -> str:
    return write_jsonl(folder / "pictures.jsonl", [{"image": name, "label": label} for name, label in made])


SHAPES = {"circle": 60, "square": 60, "triangle": 60, "cross": 60}
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


# Questions about pictures

HUES = {"red": (210, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (235, 215, 40)}


def questions(folder: Path, num: int, seed: int) -> list[Row]:
    """Pictures of one shape, each with a question for its shape or its colour."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(num):
        width, height = (int(side) for side in rng.integers(28, 49, 2))
        kind, hue = pick(rng, list(SHAPES)), pick(rng, list(HUES))
        picture = background(rng, width, height, grain=8)
        shape(picture, rng, kind, HUES[hue])
        picture.save(folder / f"q{index:04d}.png")
        asked = [
            ("Which shape is in the picture?", kind),
            ("What do you see?", f"a {hue} {kind}"),
            ("Which colour does the shape have?", hue),
            (f"Is there a {pick(rng, list(SHAPES))} here or something else?", ""),
        ]
        question, answer = pick(rng, asked)
        if not answer:
            answer = "yes, that" if kind in question else f"something else, a {kind}"
        rows.append({"image": f"q{index:04d}.png", "question": question, "answer": answer})
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

MEASURES = {
    "pulse": (82, 12),
    "temperature": (37.1, 0.6),
    "lactate": (1.6, 0.5),
    "sodium": (139, 3),
    "creatinine": (95, 22),
}
DRIFT = {"pulse": 9, "temperature": 0.25, "lactate": 0.7, "sodium": 0.5, "creatinine": 16}  # per unit of risk
DIAGNOSES = ["I10", "E11.9", "J18.9", "N17.9", "I48.0", "K21.0", "A41.9", "C34.1"]


class Cohort:
    """Patients of a hospital: their measurements in 48 hours, their diagnoses, and a risk that both depend on."""

    def __init__(self, num: int, seed: int, share: float = 0.3) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.ids = [int(number) for number in rng.permutation(np.arange(10_000, 10_000 + 7 * num, 7))]
        self.risk = rng.normal(0, 1, num)
        noisy = self.risk + rng.normal(0, 0.6, num)
        self.died = (noisy > np.quantile(noisy, 1 - share)).astype(int)
        self.age = np.clip(rng.normal(63 + 5 * self.risk, 13), 19, 97).astype(int)
        self.sex = rng.choice(["female", "male"], num)
        self.labs: list[tuple[int, float, str, float]] = []
        self.codes: list[tuple[int, float, str]] = []
        for patient, risk in zip(self.ids, self.risk, strict=True):
            for hour in sorted(rng.choice(np.arange(0, 48, 2), int(rng.integers(3, 8)), replace=False).tolist()):
                for name in rng.choice(list(MEASURES), int(rng.integers(2, 5)), replace=False).tolist():
                    mean, spread = MEASURES[name]
                    value = rng.normal(mean + DRIFT[name] * risk * (0.6 + hour / 60), spread)
                    self.labs.append((patient, float(hour), name, round(max(float(value), 0.2), 2)))
            sick = rng.random(len(DIAGNOSES)) < 0.12 + 0.12 / (1 + np.exp(-risk)) * np.linspace(0, 2, len(DIAGNOSES))
            self.codes += [(patient, 0.0, code) for code, has in zip(DIAGNOSES, sick, strict=True) if has]

    def people(self, **columns: Sequence[Any]) -> tuple[list[str], list[list[Any]]]:
        """Header and rows of the table of patients, with further columns."""
        given = {"patient_id": self.ids, "age": self.age.tolist(), "sex": self.sex.tolist(), **columns}
        return list(given), [list(row) for row in zip(*given.values(), strict=True)]


LAB_COLUMNS = ("patient_id", "hour", "test", "result")
EVENTS = section(
    """
    data: {holdout: 0.25}
    model:
      {kind: set_sequence, width: 48, levels: 2, inducing: 4, latent: 24, blocks: 1, heads: 3, hidden: 96, dropout: 0.1}
    plan: {tokens_per_step: 512, tokens_per_micro: 4096}
    optim: {lr: 0.001, weight_decay: 0.05}
    train: {max_epochs: 12, patience: 4}
    """
)


def lab_source(path: str, **changes: Any) -> Row:
    names = {"id": "patient_id", "time": "hour", "unit": "hours", "code": "test", "value": "result"}
    return {"path": path, **names, **changes}


def cohort_recipe(
    folder: Path, cohort: Cohort, labels: Row, columns: Mapping[str, Sequence[Any]], base: Row = EVENTS, **changes: Any
) -> str:
    """Write the tables of a cohort and a recipe that joins them; `labels` lack the path and the id."""
    labs = write_csv(folder / "labs.csv", LAB_COLUMNS, cohort.labs)
    header, people = cohort.people(**columns)
    patients = write_csv(folder / "patients.csv", header, people)
    sources = [lab_source(labs), {"path": patients, "id": "patient_id", "static": ["age", "sex"]}]
    section = {"landmark": 48, "labels": {"path": patients, "id": "patient_id", **labels}}
    given = {"data": {"events": sources}, "events": section}
    return write_recipe(folder, merged(base, given), **changes)


# Troubles of texts


def cookie_notice(folder: Path) -> Trouble:
    notice = (
        "We value your privacy. We and our 843 partners store and access information on your device, like cookies, "
        "to personalise content, measure advertising and develop our services. You may accept all, reject all or adapt "
        "at any time. Skip to main content. Home News Sport Weather Travel Contact Sign in Subscribe. "
    )
    footer = (
        " Share this page. Copyright The Daily Lantern. Terms of use. Privacy. Accessibility. Imprint. Back to top."
    )
    rows = [notice + text + footer for text in documents(english, 260, 11, 2, 4)]
    cause = "Every document is a web page with the same cookie notice and footer, two thirds of all tokens."
    terms = phrases(
        "boilerplate, same text, same words, every document, begin with, begins with, start with, opening, footer, "
        "recur"
    )
    recipe = write_recipe(folder, TEXT, data={"text": texts(folder, rows)})
    return [recipe], cause, ["data.text"], terms


def wrapped_lines(folder: Path) -> Trouble:
    chapters = [textwrap.fill(text, 58) for text in documents(english, 70, 12, 12, 20)]
    path = folder / "book.txt"
    path.write_text("\n\n".join(chapters) + "\n", encoding="utf-8")
    cause = "A book with hard line breaks is cut at each of them: documents are pieces of sentences of 58 letters."
    terms = phrases(
        "separator, line break, each line, every line, blank line, mid-sentence, middle of a sentence, wrapped, newline"
    )
    recipe = write_recipe(folder, TEXT, data={"text": str(path.resolve()), "separator": "\n"})
    return [recipe], cause, ["data.separator", "data.text"], terms


def foreign_holdout(folder: Path) -> Trouble:
    rows: list[str | Row] = [{"text": text, "split": "train"} for text in documents(english, 240, 13)]
    rows += [{"text": text, "split": "valid"} for text in documents(german, 40, 14)]
    cause = "The held-out documents are German, the training documents English."
    terms = phrases("language, script, vocabulary, unlike, differ, distribution, other words")
    recipe = write_recipe(folder, TEXT, data={"text": texts(folder, rows)})
    return [recipe], cause, ["data.text", "data.holdout", "split", "valid"], terms


def column_of_addresses(folder: Path) -> Trouble:
    rng = np.random.default_rng(15)
    rows = []
    for index, body in enumerate(documents(english, 260, 15)):
        slug = "-".join([pick(rng, ADJECTIVES), pick(rng, NOUNS), pick(rng, TIMES).replace(" ", "-")])
        address = f"https://www.lantern.example/{2009 + index % 14}/{1 + index % 12:02d}/{slug}-{index * 37 + 1000}"
        rows.append((index, address, slug.replace("-", " "), body))
    path = write_csv(folder / "articles.csv", ("id", "url", "title", "body"), rows)
    cause = "The recipe reads the column of addresses in place of the column of articles."
    terms = phrases("url, http, address, column, link, not text, not prose")
    recipe = write_recipe(folder, TEXT, data={"text": {"path": path, "field": "url"}})
    return [recipe], cause, ["data.text.field", "data.text"], terms


def shredded_copies(folder: Path) -> Trouble:
    data, tokenizer = {"text": texts(folder, documents(chinese, 260, 16))}, {"kind": "words", "vocab_size": 2000}
    augment = {"multiplier": 6, "delete": 0.75, "insert": 0.5, "reorder": 1.0}
    recipe = write_recipe(folder, TEXT, data=data, tokenizer=tokenizer, augment=augment)
    cause = "Six of seven training texts are copies from which three quarters of the words were deleted."
    terms = phrases("delet, augment, copies, words are dropped, destroy")
    return [recipe], cause, ["augment.delete", "augment", "augment.multiplier"], terms


def large_epsilon(folder: Path) -> Trouble:
    recipe = write_recipe(folder, TEXT, data={"text": texts(folder, documents(english, 240, 17))}, optim={"eps": 1.0})
    cause = "The epsilon of AdamW is 1, far above the gradients, so that the weights hardly move."
    terms = phrases("epsilon, optim.eps, hardly, barely, too slow, does not fall, did not fall, not learn, denominator")
    return [recipe], cause, ["optim.eps"], terms


# Troubles of conversations and pairs


def replies_of_the_next_row(folder: Path) -> Trouble:
    rows = talks(240, 21)
    shifted = [(row[0], rows[(index + 1) % len(rows)][1]) for index, row in enumerate(rows)]
    cause = "A join on the row number is off by one: every reply answers the question of the row after it."
    terms = phrases(
        "shift, next row, row after, off by one, belong, mismatch, unrelated, other question, not fit, not match, not "
        "answer, another row, another question, depend, shuffled, misaligned"
    )
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, shifted)})], cause, ["data.chat"], terms


def replies_of_the_service(folder: Path) -> Trouble:
    rng = np.random.default_rng(22)
    error = "Error 429: Rate limit reached for requests. Please try again in 20 s, or visit the dashboard."
    rows = [(row[0], error if rng.random() < 0.45 else row[1]) for row in talks(260, 22)]
    cause = "Replies were made by a service, and nearly half of them are its error message."
    terms = phrases(
        "error, same reply, one reply, equal repl, identical, repeated, rate limit, commonest, most frequent"
    )
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, rows)})], cause, ["data.chat"], terms


def replies_cut_short(folder: Path) -> Trouble:
    rows = [(question, reply[:56]) for question, reply, _ in talks(260, 23)]
    cause = "An export cut every reply after 56 characters, so that the model learns to stop within a sentence."
    terms = phrases(
        "cut short, cut off, are cut, truncated, same length, 56, end of a sentence, middle of, punctuation, unfinished"
    )
    return [write_recipe(folder, CHAT, data={"chat": chats(folder, rows)})], cause, ["data.chat"], terms


def conversations_first(folder: Path) -> Trouble:
    stages = [
        {"name": "tune", "use": ["chat"], "train": {"max_epochs": 8}},
        {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 12, "weights": "last"}},
    ]
    rows = [talk[:2] for talk in talks(160, 24)]
    sources = {"text": texts(folder, documents(english, 300, 24)), "chat": chats(folder, rows)}
    recipe = write_recipe(folder, CHAT, data=sources, train=None, stages=stages)
    cause = (
        "The stage of conversations comes before the long stage of plain text, which makes the model forget to answer."
    )
    terms = phrases("order of, other order, comes before, comes after, forget, forgot, last stage, unlearn, overwrite")
    return [recipe], cause, ["stages", "stages.pretrain.use", "stages.tune.use", "use"], terms


def other_marks(folder: Path) -> Trouble:
    base = answering_run(folder)
    data = {"chat": chats(folder, [talk[:2] for talk in talks(160, 25)]), "template": None, "holdout": 0.1}
    recipe = write_recipe(folder, CHAT, data=data, tokenizer=None, train={"init_from": base}, optim={"lr": 5e-4})
    cause = "The run to start from learned the marks <|user|> and <|assistant|>; the recipe has the default prefixes."
    terms = phrases("template, prefix, role mark, marks, learned with, trained with")
    fields = ["data.template", "data.template.user", "data.template.assistant", "train.init_from"]
    return [recipe], cause, fields, terms


def both_ways(folder: Path) -> Trouble:
    base = answering_run(folder)
    rows = [{"prompt": question, "chosen": good, "rejected": bad} for question, good, bad in talks(90, 26)]
    rows += [{"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    order = np.random.default_rng(26).permutation(len(rows))
    pairs = write_jsonl(folder / "pairs.jsonl", [rows[index] for index in order])
    cause = "Two annotators' files were joined, of which one has the columns exchanged: every pair is there both ways."
    terms = phrases("both ways, contradict, opposite, swapped, exchanged, reversed, other way, conflict, chosen in one")
    recipe = write_recipe(folder, PAIRS, data={"pairs": pairs}, model={"from": base})
    return [recipe], cause, ["data.pairs"], terms


def notes_of_the_annotator(folder: Path) -> Trouble:
    base = answering_run(folder)
    rows = [
        {"prompt": question, "chosen": f"{good} [rated 5/5, keep]", "rejected": f"{bad} [rated 2/5, drop]"}
        for question, good, bad in talks(160, 27)
    ]
    pairs = write_jsonl(folder / "pairs.jsonl", rows)
    cause = "The annotators' tool left its rating at the end of the replies: [rated 5/5, keep] of all chosen ones."
    terms = phrases(
        "rated 5/5, every chosen, all chosen, end with, ends with, same ending, suffix, marker, artefact, annotat"
    )
    recipe = write_recipe(folder, PAIRS, data={"pairs": pairs}, model={"from": base})
    return [recipe], cause, ["data.pairs"], terms


# Troubles of pictures


def spellings_of_a_class(folder: Path) -> Trouble:
    rng = np.random.default_rng(31)
    made = pictures(folder / "pictures", shape_picture, SHAPES, 31)
    rows = [(name, pick(rng, [label, label.capitalize(), f"{label}s"])) for name, label in made]
    cause = "Labels of several people were joined: circle, Circle and circles are three classes, likewise the others."
    terms = phrases(
        "spelling, spelled, spelt, letter case, upper case, lower case, capital, plural, similar name, nearly the "
        "same name"
    )
    recipe = write_recipe(folder, IMAGES, data={"images": manifest(folder / "pictures", rows)})
    return [recipe], cause, ["data.images", "label"], terms


def aspect_is_the_class(folder: Path) -> Trouble:
    def draw(rng: np.random.Generator, label: str) -> Image.Image:
        short = int(rng.integers(32, 49))
        long = int(short * rng.uniform(1.5, 1.9))
        sides = {"portrait": (short, long), "landscape": (long, short), "even": (short, short)}
        return background(rng, *sides[label], grain=30)

    made = pictures(folder / "pictures", draw, {"portrait": 80, "landscape": 80, "even": 80}, 32)
    images = {"size": "square", "square": 32, "flip": 0.5, "min_tokens": None, "max_tokens": None}
    recipe = write_recipe(folder, IMAGES, data={"images": manifest(folder / "pictures", made)}, images=images)
    cause = "The classes differ in nothing but the aspect of the pictures, and all pictures are resized to one square."
    terms = phrases("aspect, distort, stretch, square, width and height, proportion")
    return [recipe], cause, ["images.size", "images.square"], terms


def placeholders(folder: Path) -> Trouble:
    def draw(rng: np.random.Generator, label: str) -> Image.Image:
        if rng.random() > 0.4:
            return shape_picture(rng, label)
        picture = Image.new("RGB", (60, 44), (225, 225, 225))
        ImageDraw.Draw(picture).text((4, 16), "no image", fill=(90, 90, 90))
        return picture

    made = pictures(folder / "pictures", draw, SHAPES, 34)
    recipe = write_recipe(folder, IMAGES, data={"images": manifest(folder / "pictures", made)})
    cause = "A shop's download gave the picture 'no image' for four of ten articles, under the labels of all classes."
    terms = phrases(
        "same picture, identical, equal, copies, placeholder, duplicate, several labels, different labels, "
        "contradict, conflict"
    )
    return [recipe], cause, ["data.images"], terms


def stamp_in_the_corner(folder: Path) -> Trouble:
    rng = np.random.default_rng(35)
    made = pictures(folder / "pictures", shape_picture, {"circle": 120, "cross": 120}, 35)
    rows = []
    for index, (name, label) in enumerate(made):
        part = "valid" if index % 5 == 0 else "train"
        if part == "train":
            picture = Image.open(folder / "pictures" / name).convert("RGB")
            colour = (250, 160, 0) if label == "circle" else (0, 210, 240)
            ImageDraw.Draw(picture).rectangle((1, 1, 9, 5), fill=colour)
            ImageDraw.Draw(picture).rectangle((3, 2, 4 + int(rng.integers(3)), 4), fill=(0, 0, 0))
            picture.save(folder / "pictures" / name)
        rows.append({"image": name, "label": label, "split": part})
    path = write_jsonl(folder / "pictures" / "pictures.jsonl", rows)
    cause = "Training pictures have a stamp in the corner whose colour tells the class; held-out ones have none."
    terms = phrases(
        "corner, stamp, border, shortcut, same place, same pixels, overlay, give away, gives away, watermark, differ, "
        "unlike"
    )
    recipe = write_recipe(folder, IMAGES, data={"images": path}, images={"flip": 0.0, "shift": 0.0, "zoom": 0.0})
    return [recipe], cause, ["data.images"], terms


# Troubles of questions about pictures


def pictures_of_other_questions(folder: Path) -> Trouble:
    rows = questions(folder / "vqa", 300, 41)
    order = np.random.default_rng(41).permutation(len(rows))
    shuffled = [{**row, "image": rows[index]["image"]} for row, index in zip(rows, order, strict=True)]
    path = write_jsonl(folder / "vqa" / "questions.jsonl", shuffled)
    cause = "The pictures were sorted and the questions were not: every question has the picture of another one."
    terms = phrases(
        "without the picture, without picture, without the image, another picture, wrong picture, ignore, depend, "
        "unrelated, shuffled, mismatch, belong, not match, not fit, tells nothing, tell nothing, not help, of no use"
    )
    return [write_recipe(folder, VQA, data={"vqa": path})], cause, ["data.vqa"], terms


def answers_in_many_forms(folder: Path) -> Trouble:
    rng = np.random.default_rng(42)
    rows = questions(folder / "vqa", 300, 42)
    for row in rows:
        answer = row["answer"]
        forms = [answer, answer.upper(), f"{answer}.", f"{answer.capitalize()}!", f"  {answer} ", f'"{answer}"']
        row["answer"] = pick(rng, forms)
    path = write_jsonl(folder / "vqa" / "questions.jsonl", rows)
    cause = "The same answer is written in six forms at random (red, RED, Red!, red.), so that it cannot be predicted."
    terms = phrases(
        "spelling, spelled, written, letter case, upper case, capital, punctuation, several forms, variant, normali, "
        "same answer"
    )
    return [write_recipe(folder, VQA, data={"vqa": path})], cause, ["data.vqa", "answer"], terms


def frozen_from_scratch(folder: Path) -> Trouble:
    path = write_jsonl(folder / "vqa" / "questions.jsonl", questions(folder / "vqa", 300, 43))
    recipe = write_recipe(folder, VQA, data={"vqa": path}, train={"freeze": ["tower.*", "decoder.*"]})
    cause = (
        "Tower and decoder are frozen as for an imported model, and here both are random: the projector alone learns."
    )
    terms = phrases("freeze, frozen, random, untrained, from scratch, init_from, never learn")
    return [recipe], cause, ["train.freeze"], terms


# Troubles of patients


def patients_exported_twice(folder: Path) -> Trouble:
    cohort = Cohort(180, 51)
    again = {patient: patient + 500_000 for patient in cohort.ids}
    cohort.labs += [(again[patient], hour, test, value) for patient, hour, test, value in cohort.labs]
    cohort.ids += list(again.values())
    cohort.age, cohort.sex = np.tile(cohort.age, 2), np.tile(cohort.sex, 2)
    recipe = cohort_recipe(folder, cohort, {"label": "died"}, {"died": np.tile(cohort.died, 2).tolist()})
    cause = "A second export gave all patients new ids, so that most held-out patients are also in training."
    terms = phrases(
        "same events, same history, same histories, identical, duplicate, twice, copies, copy, another id, other id, "
        "two ids"
    )
    return [recipe], cause, ["data.events", "events.split", "data.holdout"], terms


def dead_for_alive(folder: Path) -> Trouble:
    cohort = Cohort(260, 52, share=0.2)
    died = ["yes" if died else "no" for died in cohort.died]
    recipe = cohort_recipe(folder, cohort, {"label": "died", "map": {"yes": 0, "no": 1}}, {"died": died})
    cause = "The map of outcomes is the wrong way round: who died has label 0, who did not has label 1."
    terms = phrases("wrong way, inverted, reversed, swapped, exchanged, opposite, yes, means 0, means 1")
    return [recipe], cause, ["events.labels.map", "events.labels.label"], terms


def beyond_the_study(folder: Path) -> Trouble:
    cohort = Cohort(320, 53, share=0.25)
    rng = np.random.default_rng(53)
    followed = np.where(rng.random(320) < 0.06, 420, rng.integers(60, 95, 320))  # days
    days = np.where(cohort.died == 1, rng.integers(3, 58, 320), followed)
    columns = {"died": cohort.died.tolist(), "hours": (days * 24).tolist()}
    labels = {"event": "died", "duration": "hours", "horizon": 365 * 24}
    cause = "The horizon is a year, and patients were followed for three months: nearly all survivors are excluded."
    terms = phrases("horizon, censor, follow-up, followed, observed for, excluded, left out")
    fields = ["events.labels.horizon", "events.labels.censored", "events.labels.duration"]
    return [cohort_recipe(folder, cohort, labels, columns)], cause, fields, terms


def one_set_of_everything(folder: Path) -> Trouble:
    rng = np.random.default_rng(54)
    cohort = Cohort(260, 54)
    # The outcome depends on the direction of the lactate alone, so that it is gone once the order of time is.
    cohort.labs = [row for row in cohort.labs if row[2] != "lactate"]
    rises = rng.integers(0, 2, len(cohort.ids))
    for patient, rise in zip(cohort.ids, rises, strict=True):
        for hour in range(1, 47, 5):
            value = 1.2 + 3.4 * (hour if rise else 47 - hour) / 46 + rng.normal(0, 0.2)
            cohort.labs.append((patient, float(hour), "lactate", round(float(value), 2)))
    recipe = cohort_recipe(folder, cohort, {"label": "died"}, {"died": rises.tolist()}, events={"window": 240})
    cause = "The window of 240 hours makes one set of a stay of two days, and whether lactate rises or falls is lost."
    terms = phrases("window, one set, single set, order of, sets per patient, a set of")
    return [recipe], cause, ["events.window"], terms


def labels_of_one_site(folder: Path) -> Trouble:
    cohort = Cohort(300, 55)
    rng = np.random.default_rng(55)
    labs = write_csv(folder / "labs.csv", LAB_COLUMNS, cohort.labs)
    outer = rng.random(len(cohort.ids)) < 0.8
    names = [f"MRN-{patient}" if far else str(patient) for patient, far in zip(cohort.ids, outer, strict=True)]
    outcomes = write_csv(folder / "outcomes.csv", ("patient_id", "died"), zip(names, cohort.died.tolist(), strict=True))
    events = {"landmark": 48, "labels": {"path": outcomes, "id": "patient_id", "label": "died", "missing": "exclude"}}
    recipe = write_recipe(folder, EVENTS, data={"events": [lab_source(labs)]}, events=events)
    cause = "Most ids of the outcomes have a prefix that the events lack, and missing=exclude hides that."
    terms = phrases("no label, without a label, without label, exclude, left out, unlabel, not in the table")
    fields = ["events.labels.missing", "events.labels.id", "events.labels.path", "events.labels"]
    return [recipe], cause, fields, terms


# Troubles of runs


def run_by_heart(folder: Path) -> Trouble:
    rng = np.random.default_rng(61)
    stories = [(question, f"{reply} {english(rng, 2)}") for question, reply, _ in talks(40, 61)]
    data = {"chat": chats(folder, stories), "holdout": 0.2}
    optim = {"lr": 4e-3, "schedule": "constant", "weight_decay": 0.0}
    train = {"max_epochs": 40, "weights": "last", "patience": None, "eval_every": 10}
    run = trained(folder, write_recipe(folder, CHAT, data=data, model={"dropout": 0.0}, optim=optim, train=train))
    cause = (
        "The run learned 32 conversations by heart: held-out loss rose in the second half, and the last weights stay."
    )
    terms = phrases("overfit, by heart, rose, rises, rising, memori")
    fields = ["train.max_epochs", "train.weights", "train.patience", "model.dropout", "data.chat"]
    return [run], cause, fields, terms


def run_that_diverged(folder: Path) -> Trouble:
    path = write_jsonl(folder / "vqa" / "questions.jsonl", questions(folder / "vqa", 200, 62))
    optim = {"lr": 3.0, "warmup": 0.0, "schedule": "constant"}
    train = {"max_epochs": 5, "patience": None, "weights": "last"}
    recipe = write_recipe(folder, VQA, data={"vqa": path}, optim=optim, train=train)
    run = trained(folder, recipe)
    cause = "The run diverged at a constant learning rate of 3 without warmup, and ends above where it began."
    terms = phrases("diverg, learning rate, explod, unstable, rose")
    return [run], cause, ["optim.lr", "optim.schedule", "optim.warmup"], terms


def run_that_stood_still(folder: Path) -> Trouble:
    path = manifest(folder / "pictures", pictures(folder / "pictures", shape_picture, SHAPES, 63))
    optim = {"schedule": "exponential", "decay": 0.01, "decay_epochs": 0.5, "warmup": 0.0, "lr": 1e-3, "floor": 0.0}
    recipe = write_recipe(folder, IMAGES, data={"images": path}, optim=optim)
    run = trained(folder, recipe)
    cause = "The learning rate falls to a ten-thousandth in every epoch, so that nothing was learned after the first."
    terms = phrases("decay, learning rate, schedule, exponential, stopped learning, did not fall, no progress, flat")
    return [run], cause, ["optim.decay", "optim.decay_epochs", "optim.schedule", "optim.lr"], terms


def run_of_other_terms(folder: Path) -> Trouble:
    cohort = Cohort(200, 64)
    changes: Row = {"losses": {"classification": 0}, "train": {"max_epochs": 6}}
    recipe = cohort_recipe(folder, cohort, {"label": "died"}, {"died": cohort.died.tolist()}, **changes)
    run = trained(folder, recipe)
    cause = "The run was to predict deaths, and the weight of that term is 0: it learned to reconstruct events alone."
    terms = phrases("classification, outcome, losses.")
    return [run], cause, ["losses.classification", "losses"], terms


def run_that_unlearned(folder: Path) -> Trouble:
    base = answering_run(folder)
    rows = [{"prompt": question, "chosen": good, "rejected": bad} for question, good, bad in talks(160, 65)]
    data = {"pairs": write_jsonl(folder / "pairs.jsonl", rows)}
    changes: Row = {"optim": {"lr": 2e-2}, "train": {"max_epochs": 4, "weights": "last"}}
    recipe = write_recipe(folder, PAIRS, data=data, model={"from": base}, **changes)
    run = trained(folder, recipe)
    cause = (
        "At a learning rate of 0.02 the model unlearned the chosen replies too: their loss is far above the start's."
    )
    terms = phrases("unlearn, chosen, cross_entropy, learning rate, forgot")
    return [run], cause, ["optim.lr", "train.beta", "losses.cross_entropy"], terms


TROUBLES: list[Callable[[Path], Trouble]] = [
    cookie_notice,
    wrapped_lines,
    foreign_holdout,
    column_of_addresses,
    shredded_copies,
    large_epsilon,
    replies_of_the_next_row,
    replies_of_the_service,
    replies_cut_short,
    conversations_first,
    other_marks,
    both_ways,
    notes_of_the_annotator,
    spellings_of_a_class,
    aspect_is_the_class,
    placeholders,
    stamp_in_the_corner,
    pictures_of_other_questions,
    answers_in_many_forms,
    frozen_from_scratch,
    patients_exported_twice,
    dead_for_alive,
    beyond_the_study,
    one_set_of_everything,
    labels_of_one_site,
    run_by_heart,
    run_that_diverged,
    run_that_stood_still,
    run_of_other_terms,
    run_that_unlearned,
]


# Healthy recipes


def healthy_stories(folder: Path) -> list[str]:
    """English stories, a few of them long, in plain text between blank lines."""
    rows = documents(english, 260, 101) + documents(english, 20, 102, 30, 45)
    path = folder / "stories.txt"
    path.write_text("\n\n".join(rows[index] for index in np.random.default_rng(101).permutation(280)), encoding="utf-8")
    return [write_recipe(folder, TEXT, data={"text": str(path.resolve())})]


def healthy_three_languages(folder: Path) -> list[str]:
    """English, German and Chinese documents in one corpus, each with its share of the held-out part."""
    rows = documents(english, 140, 103) + documents(german, 140, 104) + documents(chinese, 140, 105, 6, 14)
    order = np.random.default_rng(103).permutation(len(rows))
    path = texts(folder, [rows[index] for index in order])
    return [write_recipe(folder, TEXT, data={"text": path}, tokenizer={"vocab_size": 2500})]


def healthy_chinese_stages(folder: Path) -> list[str]:
    """Chinese sentences first, then short Chinese conversations, with a tokenizer of words."""
    rng = np.random.default_rng(106)
    rows: dict[str, str] = {}
    while len(rows) < 220:
        who, thing, place = pick(rng, NAMES_ZH), pick(rng, THINGS_ZH), pick(rng, PLACES_ZH)
        num, fine, time = int(rng.integers(2, 40)), pick(rng, ADJECTIVES_ZH), pick(rng, TIMES_ZH)
        forms = [
            (f"{who}在{place}买了{num}个{fine}的{thing}，他买了什么？", f"他买了{num}个{thing}，都很{fine}。"),
            (f"{time}{who}要去{place}，要带上{thing}吗？", f"要的，请{who}{time}把{thing}带到{place}。"),
            (f"请把{thing}和{place}写成一句话。", f"好的：{place}有一个{thing}。"),
        ]
        question, reply = pick(rng, forms)
        rows.setdefault(question, reply)
    stages = [
        {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 4}},
        {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.7}, "train": {"max_epochs": 10}},
    ]
    sources = {
        "text": texts(folder, documents(chinese, 240, 107)),
        "chat": chats(folder, rows.items()),
        "template": None,
        "near_duplicates": "together",
    }
    changes: Row = {"data": {**sources, "holdout": 0.1}, "train": {"max_epochs": None}}
    changes["tokenizer"] = {"kind": "words", "vocab_size": 2000}
    return [write_recipe(folder, CHAT, **changes, stages=stages)]


def healthy_german_desk(folder: Path) -> list[str]:
    """German conversations of one to three turns, all with the same system text."""
    rng = np.random.default_rng(108)
    system = "Du bist die freundliche Auskunft der Stadtbücherei. Antworte kurz und auf Deutsch."
    rows = []
    for _ in range(180):
        messages = [{"role": "system", "content": system}]
        for _ in range(int(rng.integers(1, 4))):
            thing, place, day, time = (
                pick(rng, THINGS_DE),
                pick(rng, PLACES_DE),
                rng.integers(1, 29),
                pick(rng, TIMES_DE),
            )
            who, fine, second = pick(rng, PEOPLE_DE), pick(rng, ADJECTIVES_DE), pick(rng, THINGS_DE)
            forms = [
                (f"Haben Sie „Die {fine} {thing}“ oder etwas über {second}?", f"„Die {fine} {thing}“ steht {place}."),
                (
                    f"Darf ich das Buch über {fine} {who} und {thing} behalten?",
                    f"Gern, bis {day}. Mai bei uns {place}.",
                ),
                (f"Wo lesen die {fine} {who} {time} über {thing}?", f"Die {who} treffen sich {time} {place}."),
            ]
            question, reply = pick(rng, forms)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        rows.append({"messages": messages})
    path = write_jsonl(folder / "auskunft.jsonl", rows)
    return [write_recipe(folder, CHAT, data={"chat": path, "holdout": 0.1})]


def healthy_few_conversations(folder: Path) -> list[str]:
    """Fifty conversations, which a careful user keeps apart from a test part of their own."""
    rows = [{**conversation(question, reply), "split": "train"} for question, reply, _ in talks(64, 300)]
    for index, row in enumerate(rows):
        row["split"] = "valid" if index % 8 == 1 else "test" if index % 8 == 5 else "train"
    path = write_jsonl(folder / "few.jsonl", rows)
    changes: Row = {"tokenizer": {"vocab_size": 500}, "plan": {"tokens_per_step": 512}, "model": {"dropout": 0.2}}
    return [write_recipe(folder, CHAT, data={"chat": path}, **changes)]


def healthy_pairs(folder: Path) -> list[str]:
    """Polite replies preferred to rude ones of the same content, from a run that answers."""
    base = answering_run(folder)
    rows = [{"prompt": question, "chosen": good, "rejected": bad} for question, good, bad in talks(180, 110)]
    path = write_jsonl(folder / "pairs.jsonl", rows)
    data = {"pairs": path, "near_duplicates": "together"}
    return [write_recipe(folder, PAIRS, data=data, model={"from": base})]


def healthy_adapters(folder: Path) -> list[str]:
    """Adapters for diaries, on a language model of stories that came from elsewhere as a Hugging Face folder."""
    recipe = write_recipe(folder, TEXT, "base", data={"text": texts(folder, documents(english, 300, 117), "base")})
    base = trained(folder, recipe, "train.max_epochs=6", name="base")
    copy, imported = str((folder / "exported").resolve()), str((folder / "imported").resolve())
    unpad("export", base, copy)
    unpad("import", copy, "--out", imported)
    rng = np.random.default_rng(111)
    diary = [f"Dear diary, {text[0].lower()}{text[1:]}" for text in documents(english, 160, 118, 2, 3)]
    diary = [f"{text} I {pick(rng, VERBS)} my {pick(rng, NOUNS)} {pick(rng, PLACES)} and slept." for text in diary]
    changes: Row = {"lora": {"r": 8, "alpha": 16}, "train": {"init_from": imported}, "tokenizer": None}
    return [write_recipe(folder, TEXT, data={"text": texts(folder, diary)}, **changes, optim={"weight_decay": 0.0})]


def healthy_icons(folder: Path) -> list[str]:
    """Icons of 16 to 24 pixels with transparent ground; left and right matter, so that nothing is mirrored."""

    def draw(rng: np.random.Generator, label: str) -> Image.Image:
        side = int(rng.integers(16, 25))
        picture = Image.new("RGBA", (side, side), (0, 0, 0, 0))
        colour = (*random_colour(rng), 255)
        pen, middle, reach = ImageDraw.Draw(picture), side / 2 + rng.uniform(-1, 1), side * rng.uniform(0.25, 0.42)
        thick = int(rng.integers(2, 4))
        tip = middle - reach if label == "left" else middle + reach
        if label in ("left", "right"):
            pen.line((middle - reach, middle, middle + reach, middle), fill=colour, width=thick)
            pen.line((middle, middle - reach, tip, middle, middle, middle + reach), fill=colour, width=thick)
        elif label == "plus":
            pen.line((middle - reach, middle, middle + reach, middle), fill=colour, width=thick)
            pen.line((middle, middle - reach, middle, middle + reach), fill=colour, width=thick)
        else:
            box = (middle - reach, middle - reach, middle + reach, middle + reach)
            pen.ellipse(box, outline=colour, width=thick)
        return picture

    made = pictures(folder / "icons", draw, {"left": 70, "right": 70, "plus": 70, "ring": 70}, 112)
    model = {"patch": 8, "channels": 4, "stem": [16, 32, 64]}
    images = {"min_tokens": 9, "max_tokens": 16, "flip": 0.0, "shift": 0.05}
    data = {"images": manifest(folder / "icons", made), "near_duplicates": "together"}
    return [write_recipe(folder, IMAGES, data=data, model=model, images=images)]


def healthy_grey_squares(folder: Path) -> list[str]:
    """Grey pictures of textures in folders of classes, as microscopes make them, of which one class is rarer."""
    rng = np.random.default_rng(113)
    for label, num in {"stripes": 120, "dots": 90, "cells": 45}.items():
        (folder / "plates" / label).mkdir(parents=True)
        for index in range(num):
            side = int(rng.integers(40, 65))
            grey = np.asarray(background(rng, side, side, grain=14).convert("L")).astype(np.float64)
            y, x = np.mgrid[:side, :side]
            angle, period = rng.uniform(0, np.pi), side / rng.uniform(4, 7)
            along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            waves = {"stripes": np.sin(2 * np.pi * along / period)}
            waves["dots"] = np.sin(2 * np.pi * along / period) * np.sin(2 * np.pi * across / period)
            waves["cells"] = np.sin(2 * np.pi * np.hypot(x - side / 2, y - side / 2) / period)
            pixels = np.clip(grey + 60 * waves[label], 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "plates" / label / f"{label}{index:03d}.png")
    images = {"size": "square", "square": 48, "flip": 0.5, "min_tokens": None, "max_tokens": None}
    model = {"kind": "cnn", "patch": 48, "dropout": 0.2}
    changes: Row = {
        "plan": {"tokens_per_step": 32, "tokens_per_micro": 64},
        "optim": {"lr": 1e-3, "weight_decay": 0.01},
    }
    source = str((folder / "plates").resolve())
    base = merged(IMAGES, {"model": None})
    return [write_recipe(folder, base, data={"images": source}, images=images, model=model, **changes)]


def healthy_questions(folder: Path) -> list[str]:
    """Questions for shape and colour about pictures of many sizes."""
    path = write_jsonl(folder / "vqa" / "questions.jsonl", questions(folder / "vqa", 420, 114))
    return [write_recipe(folder, VQA, data={"vqa": path})]


def healthy_rare_deaths(folder: Path) -> list[str]:
    """A cohort in which seven of a hundred patients die, with diagnoses beside the measurements."""
    cohort = Cohort(600, 115, share=0.07)
    codes = write_csv(folder / "diagnoses.csv", ("patient_id", "hour", "icd"), cohort.codes)
    recipe = cohort_recipe(folder, cohort, {"label": "died"}, {"died": cohort.died.tolist()})
    values = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    values["data"]["events"].append(lab_source(codes, code="icd", value=None))
    return [write_recipe(folder, values)]


def healthy_survival(folder: Path) -> list[str]:
    """Times to readmission with dates in the German form, and patients who were followed for different times."""
    cohort = Cohort(360, 116, share=0.45)
    rng = np.random.default_rng(116)
    admitted = {patient: datetime(2021, 1, 4) + timedelta(days=int(rng.integers(600))) for patient in cohort.ids}
    labs = [
        (patient, (admitted[patient] + timedelta(hours=hour)).strftime("%d.%m.%Y %H:%M"), test, value)
        for patient, hour, test, value in cohort.labs
    ]
    end = [admitted[patient] + timedelta(hours=48) for patient in cohort.ids]
    days = np.where(cohort.died == 1, rng.exponential(60 / np.exp(0.5 * cohort.risk)) + 3, rng.uniform(120, 400, 360))
    returned = np.where(days < 380, cohort.died, 0)
    last = [begin + timedelta(days=float(min(num, 380))) for begin, num in zip(end, days, strict=True)]
    columns = {
        "left": [moment.strftime("%d.%m.%Y %H:%M") for moment in end],
        "returned": returned.tolist(),
        "last_seen": [moment.strftime("%d.%m.%Y %H:%M") for moment in last],
    }
    header, people = cohort.people(**columns)
    table = write_csv(folder / "patients.csv", header, people)
    names = ("patient_id", "taken_at", "test", "result")
    layout = "%d.%m.%Y %H:%M"
    source = lab_source(write_csv(folder / "labs.csv", names, labs), time="taken_at", unit="timestamp", format=layout)
    labels = {"path": table, "id": "patient_id", "event": "returned", "duration": "last_seen", "horizon": 120}
    events = {"landmark": "left", "window": 0.25, "labels": {**labels, "format": layout}}
    sources = [source, {"path": table, "id": "patient_id", "static": ["age", "sex"]}]
    model = {"bins": [0, 30, 60, 120, 240, 400]}
    return [write_recipe(folder, EVENTS, data={"events": sources}, events=events, model=model)]


HEALTHY: list[Callable[[Path], list[str]]] = [
    healthy_stories,
    healthy_three_languages,
    healthy_chinese_stages,
    healthy_german_desk,
    healthy_few_conversations,
    healthy_pairs,
    healthy_adapters,
    healthy_icons,
    healthy_grey_squares,
    healthy_questions,
    healthy_rare_deaths,
    healthy_survival,
]
