"""Thirty troubles and twelve healthy recipes for `unpad doctor`, written without sight of the doctor's code.

`benchmarks/doctor.py --unseen` runs them. Each trouble takes a recipe that learns and plants one mistake that
people make with their own data or settings. Everything is drawn from fixed seeds, from the packaged Chinese
examples, or from the documentation and code of Python's standard library; nothing is read from the network.
"""

import ast
import json
import math
import random
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import unpad

EXAMPLES = Path(unpad.__file__).parent / "examples" / "zh"
MODULES = (
    "argparse",
    "ast",
    "bdb",
    "calendar",
    "cmd",
    "codecs",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "enum",
    "fileinput",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "glob",
    "gzip",
    "heapq",
    "imaplib",
    "inspect",
    "ipaddress",
    "locale",
    "mailbox",
    "mimetypes",
    "netrc",
    "ntpath",
    "optparse",
    "pathlib",
    "pdb",
    "pickle",
    "pickletools",
    "plistlib",
    "poplib",
    "posixpath",
    "pprint",
    "profile",
    "pstats",
    "pyclbr",
    "pydoc",
    "random",
    "sched",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "smtplib",
    "socket",
    "socketserver",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "trace",
    "traceback",
    "turtle",
    "types",
    "typing",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "zipfile",
)
SORRY = "对不起，我暂时无法回答这个问题，请稍后再试。"
BANNER = (
    "Home | Products | Support | About us | Log in. We use cookies to give you the best experience on our site, to "
    "remember your settings and to measure how pages are read. By going on you agree to our policy; you may change "
    "your mind at any time under Settings. Accept all - Reject all - Learn more. "
)
COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 70, 210),
    "yellow": (225, 205, 40),
    "purple": (150, 50, 170),
    "white": (245, 245, 245),
}

Trouble = tuple[list[str], str, list[str], list[str]]
Rows = list[dict]


# Files


def write_rows(path: Path, rows: Rows) -> str:
    """Write JSON lines, and return the path as a text."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_rows(path: Path) -> Rows:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_csv(path: Path, header: list[str], rows: list[tuple]) -> str:
    """Write a table without quotes, and return the path as a text."""
    lines = [",".join(header), *(",".join("" if cell is None else str(cell) for cell in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def write_recipe(folder: Path, recipe: dict) -> str:
    """Write a recipe, on one thread in fp32; JSON is YAML."""
    recipe = {"precision": "fp32", **recipe}
    recipe["train"] = {"threads": 1, **recipe.get("train", {})}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe, ensure_ascii=False, indent=1), encoding="utf-8")
    return str(path)


# Texts


@lru_cache(maxsize=1)
def library() -> tuple[list[tuple[str, str]], list[str]]:
    """Names and documentation of functions, and code of functions, of the standard library; no near copies."""
    documents: list[tuple[str, str]] = []
    codes: list[str] = []
    seen: tuple[set[str], set[str]] = (set(), set())

    def is_new(text: str, windows: set[str]) -> bool:
        own = {text[i : i + 8] for i in range(len(text) - 7)}
        new = len(own & windows) < 0.3 * len(own)
        windows |= own if new else set()
        return new

    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        path = folder / f"{name}.py"
        if not path.is_file():
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = " ".join((ast.get_docstring(node) or "").split())
            if 90 <= len(text) <= 700 and text.isascii() and is_new(text, seen[0]):
                documents.append((f"{name}.{node.name}", text))
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if 120 <= len(code) <= 600 and code.isascii() and not ast.get_docstring(node) and is_new(code, seen[1]):
                codes.append(code)
    random.Random(1).shuffle(documents)
    random.Random(2).shuffle(codes)
    return documents, codes


def english(count: int = 320) -> Rows:
    """Paragraphs of English documentation."""
    return [{"text": text} for _, text in library()[0][:count]]


def chinese() -> Rows:
    """The packaged Chinese facts."""
    return [{"text": row["text"], "group": row["group"]} for row in read_rows(EXAMPLES / "facts.jsonl")]


def chinese_recipe(folder: Path, rows: Rows, **changes: dict) -> str:
    """The same with Chinese words, and more epochs, because the texts are short."""
    own = {
        "tokenizer": {"kind": "words", "vocab_size": 1500},
        "plan": {"tokens_per_step": 512},
        "train": {"max_epochs": 10},
    }
    return text_recipe(folder, rows, **{**own, **changes})


def text_recipe(folder: Path, rows: Rows, **changes: dict) -> str:
    """A small language model with byte pairs; `changes` update sections."""
    recipe = {
        "data": {"text": write_rows(folder / "texts.jsonl", rows), "holdout": 0.1},
        "tokenizer": {"kind": "bpe", "vocab_size": 500},
        "model": {"kind": "decoder", "width": 48, "blocks": 2, "heads": 4, "hidden": 96, "context": 384},
        "plan": {"tokens_per_step": 1024, "tokens_per_micro": 2048},
        "optim": {"lr": 4e-3},
        "train": {"max_epochs": 6},
    }
    for section, fields in changes.items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    return write_recipe(folder, recipe)


# Conversations


def questions(facts: int = 60) -> Rows:
    """Packaged questions about the first facts, in several wordings, with the part of each."""
    rows = read_rows(EXAMPLES / "chat.jsonl")
    kept = [row for row in rows if len(row["messages"]) == 2]
    names = sorted({row["fact"] for row in kept})[:facts]
    return [
        {
            "prompt": row["messages"][0]["content"],
            "completion": row["messages"][1]["content"],
            "split": row["split"],
        }
        for row in kept
        if row["fact"] in names
    ]


def chat_recipe(folder: Path, rows: Rows, **changes: dict) -> str:
    """A small model that answers questions."""
    recipe = {
        "data": {"chat": write_rows(folder / "chat.jsonl", rows), "holdout": 0.1},
        "tokenizer": {"kind": "words", "vocab_size": 1500},
        "model": {"kind": "decoder", "width": 64, "blocks": 2, "heads": 4, "hidden": 128, "context": 256},
        "plan": {"tokens_per_step": 512, "tokens_per_micro": 2048},
        "optim": {"lr": 4e-3},
        "train": {"max_epochs": 12},
    }
    for section, fields in changes.items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    return write_recipe(folder, recipe)


# Pictures


def ground(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """A background that goes from one grey to others, with noise, so that no two pictures are alike."""
    corners = rng.uniform(60, 150, size=(3, 3, 1)).repeat(3, axis=2).astype(np.uint8)
    smooth = np.asarray(Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC), dtype=float)
    return smooth + rng.normal(0, 6, size=(height, width, 3))


def save(pixels: np.ndarray | Image.Image, path: Path, grey: bool = False) -> None:
    """Write a picture as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = (
        pixels
        if isinstance(pixels, Image.Image)
        else Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
    )
    (image.convert("L") if grey else image).save(path)


def pattern(label: str, width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """A cloth with a pattern: rows, columns, checks or rings."""
    pixels = ground(width, height, rng)
    y, x = np.mgrid[:height, :width] + rng.uniform(0, 8)
    period = rng.uniform(5, 9)
    wave = {
        "rows": np.sin(2 * math.pi * y / period),
        "columns": np.sin(2 * math.pi * x / period),
        "checks": np.sin(2 * math.pi * x / period) * np.sin(2 * math.pi * y / period) * 1.4,
        "plain": np.zeros_like(x),
    }[label]
    return pixels + wave[..., None] * rng.uniform(25, 60, size=3)


def cloths(folder: Path, counts: dict[str, int], sides: tuple[int, int] = (24, 44), grey: bool = False) -> Rows:
    """Pictures of cloths and the rows of their manifest."""
    rng = np.random.default_rng(5)
    rows = []
    for label, count in counts.items():
        for number in range(count):
            width, height = rng.integers(*sides, size=2)
            name = f"pictures/{label}{number:03d}x.png"
            save(pattern(label, int(width), int(height), rng), folder / name, grey)
            rows.append({"image": name, "label": label})
    random.Random(3).shuffle(rows)
    return rows


def arrows(folder: Path, count: int = 320) -> Rows:
    """Signs that point to the left or to the right."""
    rng = np.random.default_rng(6)
    rows = []
    for number in range(count):
        side = int(rng.integers(28, 41))
        image = Image.fromarray(np.clip(ground(side, side, rng), 0, 255).astype(np.uint8))
        label = ("left", "right")[number % 2]
        centre = rng.uniform(0.42, 0.58, size=2) * side
        reach = side * rng.uniform(0.26, 0.38) * (-1 if label == "left" else 1)
        points = [(centre[0] + reach, centre[1]), *((centre[0] - reach, centre[1] + s * abs(reach)) for s in (-1, 1))]
        ImageDraw.Draw(image).polygon(points, fill=tuple(int(c) for c in rng.uniform(170, 255, size=3)))
        name = f"signs/{number:03d}x.png"
        save(image, folder / name)
        rows.append({"image": name, "label": label})
    return rows


def image_recipe(folder: Path, rows: Rows, **changes: dict) -> str:
    """A small classifier of pictures at their own sizes."""
    recipe = {
        "data": {"images": write_rows(folder / "pictures.jsonl", rows), "holdout": 0.2},
        "images": {"size": "native", "max_tokens": 36},
        "model": {
            "kind": "vit",
            "patch": 8,
            "stem": [16, 24, 32],
            "width": 32,
            "blocks": 2,
            "heads": 4,
            "hidden": 64,
            "context": 64,
        },
        "plan": {"tokens_per_step": 320, "tokens_per_micro": 1024, "overflow": "error"},
        "optim": {"lr": 3e-3},
        "train": {"max_epochs": 12},
    }
    for section, fields in changes.items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    return write_recipe(folder, recipe)


FOUR = {"rows": 80, "columns": 80, "checks": 80, "plain": 80}


# Questions about pictures


def shapes(folder: Path, count: int = 300) -> Rows:
    """Pictures of one shape, with questions about its colour and its place."""
    rng = np.random.default_rng(7)
    rows = []
    for number in range(count):
        side = int(rng.integers(28, 41))
        image = Image.fromarray(np.clip(ground(side, side, rng), 0, 255).astype(np.uint8))
        colour = str(rng.choice(list(COLOURS)))
        up = bool(rng.integers(2))
        radius = side * rng.uniform(0.17, 0.24)
        x, y = side * rng.uniform(0.3, 0.7), side * (rng.uniform(0.22, 0.34) if up else rng.uniform(0.66, 0.78))
        draw = ImageDraw.Draw(image)
        draw_shape = draw.ellipse if rng.integers(2) else draw.rectangle
        draw_shape([x - radius, y - radius, x + radius, y + radius], fill=COLOURS[colour])
        name = f"shapes/{number:03d}x.png"
        save(image, folder / name)
        asked = str(
            rng.choice(["Which colour is the shape?", "What is the colour of the thing?", "Name the colour you see."])
        )
        rows.append({"image": name, "question": asked, "answer": colour})
        asked = str(rng.choice(["Is it at the top or at the bottom?", "Where is the shape?"]))
        rows.append({"image": name, "question": asked, "answer": "top" if up else "bottom"})
    return rows


def vqa_recipe(folder: Path, rows: Rows, **changes: dict) -> str:
    """A small model that answers questions about pictures."""
    recipe = {
        "data": {"vqa": write_rows(folder / "vqa.jsonl", rows), "holdout": 0.15},
        "images": {"max_tokens": 36},
        "model": {
            "kind": "vision_language",
            "vision": {"patch": 8, "width": 32, "blocks": 2, "heads": 4, "hidden": 64, "feature_layer": -1},
            "language": {"width": 48, "blocks": 2, "heads": 4, "hidden": 96, "context": 128},
        },
        "plan": {"tokens_per_step": 768, "tokens_per_micro": 2048, "overflow": "error"},
        "optim": {"lr": 2e-3},
        "train": {"max_epochs": 20},
    }
    for section, fields in changes.items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    return write_recipe(folder, recipe)


# Patients

LABS = {
    "creatinine": (90, 25),
    "crp": (30, 18),
    "sodium": (139, 4),
    "pulse": (82, 13),
    "glucose": (6.4, 1.5),
    "albumin": (38, 5),
}


def stays(count: int = 400) -> tuple[list[tuple], list[tuple]]:
    """Measurements and diagnoses of the first day of simulated stays, and who of them died."""
    rng = np.random.default_rng(8)
    events, people = [], []
    for number in range(count):
        name = f"S{1000 + 7 * number}"
        illness = rng.normal()
        age = float(np.clip(rng.normal(64 + 4 * illness, 13), 19, 97))
        for hour in sorted(rng.choice(np.arange(0, 24, 0.5), size=int(rng.integers(2, 6)), replace=False)):
            for lab in rng.choice(list(LABS), size=int(rng.integers(2, 6)), replace=False):
                mean, spread = LABS[str(lab)]
                drift = {"creatinine": 1.1, "crp": 1.1, "pulse": 0.8, "albumin": -0.8}.get(str(lab), 0) * illness
                value = mean + spread * (drift + 0.6 * rng.normal())
                events.append((name, float(hour), str(lab), round(max(value, 0.2), 2)))
        for _ in range(int(rng.integers(0, 4))):
            code = f"I{10 + min(int(rng.geometric(0.18)), 30)}"
            events.append((name, float(rng.integers(0, 24)), code, None))
        died = int(rng.uniform() < 1 / (1 + math.exp(1.0 - 2.6 * illness - 0.02 * (age - 64))))
        people.append((name, round(age), died))
    return events, people


def patient_recipe(folder: Path, events: list[tuple], people: list[tuple], **changes: dict) -> str:
    """Death in hospital from the first day of a stay."""
    table = write_csv(folder / "events.csv", ["stay", "hour", "code", "value"], events)
    facts = write_csv(folder / "people.csv", ["stay", "age", "died"], people)
    recipe = {
        "data": {
            "events": [
                {"path": table, "id": "stay", "time": "hour", "unit": "hours", "code": "code", "value": "value"},
                {"path": facts, "id": "stay", "static": ["age"]},
            ],
            "holdout": 0.2,
        },
        "events": {"landmark": 24, "labels": {"path": facts, "id": "stay", "label": "died"}},
        "model": {
            "kind": "set_sequence",
            "width": 24,
            "heads": 3,
            "hidden": 48,
            "blocks": 1,
            "levels": 1,
            "inducing": 2,
            "latent": 12,
        },
        "plan": {"tokens_per_step": 512, "tokens_per_micro": 4096},
        "optim": {"lr": 3e-3},
        "train": {"max_epochs": 10},
    }
    for section, fields in changes.items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    return write_recipe(folder, recipe)


# Preferences


def pairs_recipe(folder: Path, pairs: Rows) -> str:
    """Learn to answer, then which replies are better."""
    recipe = {
        "data": {
            "chat": write_rows(folder / "chat.jsonl", questions()),
            "pairs": write_rows(folder / "pairs.jsonl", pairs),
            "holdout": 0.2,
        },
        "tokenizer": {"kind": "words", "vocab_size": 1500},
        "model": {"kind": "decoder", "width": 64, "blocks": 2, "heads": 4, "hidden": 128, "context": 256},
        "plan": {"tokens_per_step": 768, "tokens_per_micro": 2048},
        "optim": {"lr": 3e-3},
        "stages": [
            {"name": "answer", "use": ["chat"], "train": {"max_epochs": 12}},
            {"name": "prefer", "use": ["pairs"], "optim": {"lr_scale": 0.1}, "train": {"max_epochs": 6}},
        ],
    }
    return write_recipe(folder, recipe)


def preferences() -> Rows:
    """The packaged pairs, which prefer the short reply."""
    return read_rows(EXAMPLES / "pairs.jsonl")


# Troubles of texts


def half_of_the_texts_decoded_as_latin_1(folder: Path) -> Trouble:
    """One of two machines decoded the export with the wrong encoding, and wrote it again as UTF-8."""
    rows = chinese()
    for row in random.Random(11).sample(rows, len(rows) // 2):
        row["text"] = "".join(
            character for character in row["text"].encode().decode("latin-1") if character.isprintable()
        )
    cause = "Half of the texts are UTF-8 that was read as Latin-1, so that their Chinese is garbled."
    words = ["encod", "decod", "latin", "utf-8", "mojibake", "garbl", "windows-1252", "cp1252"]
    return [chinese_recipe(folder, rows)], cause, ["data.text"], words


def banner_of_the_site_in_every_text(folder: Path) -> Trouble:
    """The scraper kept the navigation and the cookie banner of the site."""
    rows = [{"text": BANNER + row["text"]} for row in english()]
    cause = (
        "Every text begins with the same menu and cookie banner, which makes up most of the loss and makes it look low."
    )
    words = ["same", "repeat", "boilerplate", "identical", "begin", "start", "prefix", "common", "shared", "every "]
    return [text_recipe(folder, rows)], cause, ["data.text"], words


def column_of_64_characters(folder: Path) -> Trouble:
    """The database had VARCHAR(64)."""
    rows = [{"text": row["text"][:64]} for row in english()]
    cause = "All texts are cut off after exactly 64 characters, in the middle of a word."
    words = ["cut", "truncat", "same length", "exactly", "64", "limit", "mid-", "middle", "unfinished", "incomplete"]
    return [text_recipe(folder, rows)], cause, ["data.text"], words


def join_that_multiplies_rows(folder: Path) -> Trouble:
    """A join over a key that was not unique."""
    rows = english(160)
    for row in rows[:8]:
        row["split"] = "train"
    rows = [*rows, *(dict(row) for row in rows[:8] for _ in range(70))]
    random.Random(12).shuffle(rows)
    cause = "A join repeats eight texts seventy times each: they are four of five rows that the model learns from."
    words = ["cop", "duplic", "repeat", "equal", "identical", "same", "times", "twice", "again"]
    recipe = text_recipe(folder, rows, train={"max_epochs": 60, "max_steps": 260})
    return [recipe], cause, ["data.text"], words


def held_out_part_in_another_language(folder: Path) -> Trouble:
    """The folder `valid` came from the Chinese branch of the project."""
    rows = [{**row, "split": "train"} for row in english()]
    rows += [{"text": row["text"], "split": "valid"} for row in chinese()[:40]]
    cause = "The model is trained on English, and its held-out part is Chinese."
    words = [
        "language",
        "differ",
        "script",
        "distribution",
        "unlike",
        "unseen",
        "never",
        "not in training",
        "other",
        "rare",
    ]
    return [text_recipe(folder, rows)], cause, ["data.text", "data.holdout", "data"], words


def attention_that_sees_the_future(folder: Path) -> Trouble:
    """The model section was copied from an encoder."""
    cause = "The decoder attends to later tokens, so it reads the token that it has to predict, and its loss is false."
    return [text_recipe(folder, english(), model={"causal": False})], cause, ["model.causal"], []


def betas_in_the_wrong_order(folder: Path) -> Trouble:
    """Momentum 0.999 and second moment 0.9."""
    recipe = text_recipe(folder, english(), optim={"betas": [0.999, 0.9]})
    return (
        [recipe],
        "The two betas of AdamW are exchanged: its momentum averages a thousand steps.",
        ["optim.betas"],
        [],
    )


def eps_of_another_optimiser(folder: Path) -> Trouble:
    """The epsilon that some image models use with RMSProp."""
    cause = "Epsilon of AdamW is 1, far above the size of gradients, so that steps become tiny."
    return [text_recipe(folder, english(), optim={"eps": 1.0})], cause, ["optim.eps"], []


def one_step_per_epoch(folder: Path) -> Trouble:
    """A batch size that was copied from a cluster."""
    recipe = text_recipe(folder, english(), plan={"tokens_per_step": 524288, "tokens_per_micro": 4096})
    cause = "A step is as large as the whole corpus, so that six epochs are six updates."
    return [recipe], cause, ["plan.tokens_per_step", "train.max_epochs"], ["step", "update"]


def evaluation_after_every_step(folder: Path) -> Trouble:
    """Left from a search for a bug."""
    recipe = text_recipe(folder, english(), data={"holdout": 0.4}, train={"max_epochs": 6, "eval_every": 1})
    cause = "The held-out part is measured after every single step, which takes most of the time."
    return [recipe], cause, ["train.eval_every"], []


def one_long_text_in_every_padded_batch(folder: Path) -> Trouble:
    """Padded batches of texts of very unequal length."""
    rng = random.Random(13)
    texts = [row["text"] for row in english(340)]
    rows = [{"text": text[: rng.randrange(30, 60)]} for text in texts[:260]]
    rows += [{"text": " ".join(texts[260 + 2 * i : 262 + 2 * i])} for i in range(20)]
    recipe = text_recipe(
        folder,
        rows,
        model={"context": 1024},
        train={"max_epochs": 4},
        plan={"strategy": "fixed", "batch_size": 16, "batches_per_step": 1},
    )
    cause = (
        "Batches of 16 texts, most of them short, are padded to a fixed length: 96 % of what is computed is padding."
    )
    return [recipe], cause, ["plan.strategy", "plan.batch_size", "plan.bucket_width"], ["pad"]


# Troubles of conversations


def replies_of_the_next_question(folder: Path) -> Trouble:
    """The column of replies was filled from the second row on."""
    rows = questions()
    random.Random(14).shuffle(rows)
    replies = [row["completion"] for row in rows]
    rows = [{**row, "completion": reply} for row, reply in zip(rows, [*replies[1:], replies[0]], strict=True)]
    cause = "The column of replies slipped by one row, so that every question has the reply of another."
    words = ["shift", "match", "belong", "slip", "row", "another", "other", "unrelated", "order", "different", "align"]
    return [chat_recipe(folder, rows)], cause, ["data.chat"], [*words, "contradict", "shuffl", "mixed"]


def prompt_and_completion_exchanged(folder: Path) -> Trouble:
    """Two columns of an export were named the wrong way round."""
    rows = [{**row, "prompt": row["completion"], "completion": row["prompt"]} for row in questions()]
    cause = "Prompt and completion are exchanged: the model learns to ask, in one of many wordings, what was answered."
    words = ["exchang", "swap", "revers", "wrong way", "role", "are questions", "end in a question", "question mark"]
    return (
        [chat_recipe(folder, rows)],
        cause,
        ["data.chat"],
        [*words, "different repl", "different answers", "the other"],
    )


def excuse_in_most_replies(folder: Path) -> Trouble:
    """The old bot, whose log this is, timed out most of the time."""
    rows = questions()
    rng = random.Random(15)
    for row in rows:
        if rng.random() < 0.8:
            row["completion"] = SORRY
    cause = "Four of five replies are the excuse of a service that timed out."
    words = ["same", "identical", "repeat", "equal", "common", "one reply", "share", "%", "excuse"]
    return [chat_recipe(folder, rows)], cause, ["data.chat"], words


def reference_answer_in_the_question(folder: Path) -> Trouble:
    """The column with the reference of the annotators was joined to the prompt."""
    rows = [{**row, "prompt": f"{row['prompt']}\n参考答案：{row['completion']}"} for row in questions()]
    cause = "Every question carries its reply as a reference, so that the model learns to copy and its loss is false."
    words = ["contain", "copy", "copied", "leak", "gives", "in the question", "in the prompt", "stands in", "occur"]
    return (
        [chat_recipe(folder, rows)],
        cause,
        ["data.chat"],
        [*words, "reads", "carr", "hold", "given away", "verbatim"],
    )


def smoothing_taken_for_confidence(folder: Path) -> Trouble:
    """Somebody wrote the probability that the right token should keep."""
    recipe = chat_recipe(folder, questions(), train={"max_epochs": 12, "label_smoothing": 0.9})
    return [recipe], "Label smoothing of 0.9 leaves a tenth of every target.", ["train.label_smoothing"], []


def group_left_from_fine_tuning(folder: Path) -> Trouble:
    """A group that protected imported weights, in a run from scratch."""
    group = {"parameters": ["*"], "lr_scale": 0.0005}
    recipe = chat_recipe(folder, questions(), optim={"groups": [group]})
    cause = "A group of parameters that matches all of them divides the learning rate by 2,000."
    return [recipe], cause, ["optim.groups", "optim.groups.0.lr_scale", "optim.groups.lr_scale"], []


# Troubles of pictures


def labels_sorted_apart_from_the_pictures(folder: Path) -> Trouble:
    """The list of pictures was shuffled, the list of labels not."""
    rows = cloths(folder, FOUR)
    labels = [row["label"] for row in rows]
    random.Random(16).shuffle(labels)
    rows = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    words = ["label", "class", "chance", "shuffl", "random"]
    return [image_recipe(folder, rows)], "The labels were shuffled apart from the pictures.", ["data.images"], words


def mirrored_arrows(folder: Path) -> Trouble:
    """The usual augmentation of photographs, for signs that point somewhere."""
    recipe = image_recipe(folder, arrows(folder), images={"flip": 0.5})
    cause = "Half of the training pictures are mirrored, and the classes are left and right."
    return [recipe], cause, ["images.flip"], []


def pictures_shrunk_to_one_patch(folder: Path) -> Trouble:
    """A limit that somebody took for pictures per batch."""
    recipe = image_recipe(folder, cloths(folder, FOUR), images={"max_tokens": 1})
    cause = "Every picture is shrunk to a single patch of 8 pixels, in which no pattern can be seen."
    return [recipe], cause, ["images.max_tokens"], []


def placeholder_of_the_server_in_most_rows(folder: Path) -> Trouble:
    """Downloads that failed were answered with one picture, of every name."""
    rows = cloths(folder, FOUR)
    rng = random.Random(17)
    grey = Image.new("RGB", (40, 40), (204, 204, 204))
    ImageDraw.Draw(grey).rectangle([12, 12, 27, 27], outline=(120, 120, 120), width=2)
    for row in rows:
        if rng.random() < 0.6:
            save(grey, folder / row["image"])
    cause = "Three of five pictures are the same placeholder of a server, under every label."
    words = ["same", "identical", "equal", "cop", "duplic", "placeholder", "contradict", "different label", "alike"]
    return [image_recipe(folder, rows)], cause, ["data.images"], [*words, "several label", "several class", "classes"]


# Troubles of questions about pictures


def pictures_of_the_row_before(folder: Path) -> Trouble:
    """The column of pictures slipped by one picture."""
    rows = shapes(folder)
    names = [row["image"] for row in rows]
    rows = [{**row, "image": name} for row, name in zip(rows, [*names[2:], *names[:2]], strict=True)]
    cause = "The column of pictures slipped, so that every question shows another picture than its answer is about."
    words = ["picture", "image", "match", "shift", "shuffl", "belong", "chance", "slip"]
    return [vqa_recipe(folder, rows)], cause, ["data.vqa"], words


def answer_in_the_question(folder: Path) -> Trouble:
    """Questions that a language model wrote from the caption."""
    rows = [{**row, "question": f"The caption says {row['answer']}. {row['question']}"} for row in shapes(folder)]
    cause = "Every question names its answer, so that nobody needs the picture and the loss says nothing about seeing."
    words = [
        "contain",
        "leak",
        "answer in",
        "in the question",
        "names",
        "without the picture",
        "without the image",
        "copy",
    ]
    words += ["occur", "stands in", "gives", "given away", "carr", "verbatim", "ignore", "from the question", "alone"]
    return [vqa_recipe(folder, rows)], cause, ["data.vqa"], words


def dropout_taken_for_what_is_kept(folder: Path) -> Trouble:
    """Old frameworks asked for the probability to keep."""
    rows = shapes(folder)
    arguments = [vqa_recipe(folder, rows), "model.vision.dropout=0.9", "model.language.dropout=0.9"]
    cause = "Dropout of 0.9 in both towers throws nine of ten numbers away."
    return arguments, cause, ["model.vision.dropout", "model.language.dropout", "model.dropout"], []


# Troubles of patients


def missing_values_as_minus_999(folder: Path) -> Trouble:
    """The laboratory's system writes -999 for a sample that was lost."""
    events, people = stays()
    rng = random.Random(18)
    events = [
        (*event[:3], -999 if event[3] is not None and rng.random() < 0.15 else event[3])  # lost samples
        for event in events
    ]
    cause = "A seventh of all values is -999, which stands for a lost sample and drowns the true ones."
    words = ["-999", "−999", "sentinel", "missing", "placeholder", "stands for"]
    return [patient_recipe(folder, events, people)], cause, ["data.events", "events"], words


def minutes_read_as_hours(folder: Path) -> Trouble:
    """The export counts minutes; the recipe was written for hours."""
    events, people = stays()
    events = [(name, hour * 60, code, value) for name, hour, code, value in events]
    cause = (
        "Times are minutes but declared as hours, so that nearly all events lie after the landmark and are not read."
    )
    words = ["unit", "minute", "after", "not read", "left out", "landmark"]
    fields = ["data.events", "events.landmark", "events.unit"]
    return [patient_recipe(folder, events, people)], cause, fields, words


def outcomes_joined_by_row_number(folder: Path) -> Trouble:
    """Two tables in another order, pasted beside each other."""
    events, people = stays()
    outcomes = [died for *_, died in people]
    random.Random(19).shuffle(outcomes)
    people = [(name, age, died) for (name, age, _), died in zip(people, outcomes, strict=True)]
    cause = "The outcomes were pasted in another order than the patients, and belong to others."
    words = ["label", "outcome", "chance", "shuffl", "auroc"]
    return [patient_recipe(folder, events, people)], cause, ["data.events", "events.labels", "events"], words


def number_of_the_order_in_the_code(folder: Path) -> Trouble:
    """The code was joined with the number of the order."""
    events, people = stays()
    events = [(name, hour, f"{code}#{70000 + i}", value) for i, (name, hour, code, value) in enumerate(events)]
    cause = "The number of the order is a part of every code, so that all codes of held-out patients are unknown."
    words = ["unknown", "once", "rare", "unique", "unseen", "never", "codes", "distinct", "different code"]
    fields = ["data.events", "events.unknown_codes", "events.min_count", "events"]
    return [patient_recipe(folder, events, people)], cause, fields, words


def weight_of_the_rare_class_a_thousand(folder: Path) -> Trouble:
    """A weight in per mille, for classes that are nearly balanced."""
    events, people = stays()
    recipe = patient_recipe(folder, events, people)
    cause = "Patients who died count a thousand times as much as others, so that every probability is near one."
    return [recipe, "model.positive_weight=1000"], cause, ["model.positive_weight"], []


# Troubles of preferences


def sides_of_the_screen_for_chosen_and_rejected(folder: Path) -> Trouble:
    """The screen showed the replies in random order, and the export named the left one chosen."""
    rng = random.Random(20)
    rows = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if rng.random() < 0.5 else row
        for row in preferences()
    ]
    cause = "In half of the pairs the chosen and the rejected reply are exchanged, so that there is nothing to prefer."
    words = ["swap", "exchang", "chance", "random", "contradict", "wrong way", "label", "noise", "half", "rejected"]
    return [pairs_recipe(folder, rows)], cause, ["data.pairs"], words


# Healthy recipes


def english_documentation(folder: Path) -> list[str]:
    """Paragraphs of English."""
    return [text_recipe(folder, english())]


def chinese_facts_with_weight_decay(folder: Path) -> list[str]:
    """Small data, in Chinese, with a weight decay of 0.1."""
    return [chinese_recipe(folder, chinese(), optim={"weight_decay": 0.1})]


def python_code_without_warmup(folder: Path) -> list[str]:
    """Functions of Python's library, no warmup."""
    rows = [{"text": text} for text in library()[1][:260]]
    return [text_recipe(folder, rows, optim={"lr": 3e-3, "warmup": 0})]


def texts_with_a_long_tail(folder: Path) -> list[str]:
    """Mostly short texts, some very long ones."""
    rng = random.Random(13)
    texts = [row["text"] for row in english(340)]
    rows = [{"text": text[: text.index(" ", rng.randrange(40, 80))]} for text in texts[:260]]
    rows += [{"text": " ".join(texts[260 + 4 * i : 264 + 4 * i])} for i in range(20)]
    return [text_recipe(folder, rows, model={"context": 1024})]


def high_but_fine_rate(folder: Path) -> list[str]:
    """Three times the rate of the others, which still learns as well."""
    return [text_recipe(folder, english(), optim={"lr": 1.2e-2})]


def conversations_of_sharegpt_with_one_system_prompt(folder: Path) -> list[str]:
    """The same system text in every conversation."""
    rows = [
        {
            "conversations": [
                {"from": "system", "value": "你是一个有帮助的助手。"},
                {"from": "human", "value": row["prompt"]},
                {"from": "gpt", "value": row["completion"]},
            ],
            "split": row["split"],
        }
        for row in questions()
    ]
    return [chat_recipe(folder, rows)]


def english_questions_about_functions(folder: Path) -> list[str]:
    """One question and one paragraph each."""
    rows = [
        {"instruction": f"What does {name} do?", "output": text.split(". ")[0][:300].rstrip(".") + "."}
        for name, text in library()[0][:360]
    ]
    recipe = chat_recipe(
        folder,
        rows,
        tokenizer={"kind": "bpe", "vocab_size": 500},
        data={"template": {"system": "System: ", "user": "User: ", "assistant": " Assistant: "}},
        train={"max_epochs": 6},
    )
    return [recipe]


def cloths_of_unequal_sizes_and_classes(folder: Path) -> list[str]:
    """Pictures of 20 to 60 pixels; one class is six times as frequent as another."""
    counts = {"rows": 180, "columns": 90, "checks": 60, "plain": 30}
    rows = cloths(folder, counts, sides=(20, 60))
    return [image_recipe(folder, rows, images={"max_tokens": 49})]


def grey_cloths(folder: Path) -> list[str]:
    """Grey pictures, with light augmentation."""
    return [image_recipe(folder, cloths(folder, FOUR, grey=True), images={"flip": 0.5, "shift": 0.05})]


def questions_about_shapes(folder: Path) -> list[str]:
    """Colours and places of shapes."""
    return [vqa_recipe(folder, shapes(folder))]


def patients_with_rare_codes(folder: Path) -> list[str]:
    """Codes that few patients have, beside common ones."""
    events, people = stays()
    rng = random.Random(21)
    events += [
        (name, float(rng.randrange(24)), f"Z{rng.randrange(90)}", None) for name, *_ in people if rng.random() < 0.3
    ]
    return [patient_recipe(folder, events, people)]


def short_replies_preferred(folder: Path) -> list[str]:
    """A stage of questions, then one of pairs."""
    return [pairs_recipe(folder, preferences())]


TROUBLES: list[Callable[[Path], Trouble]] = [
    half_of_the_texts_decoded_as_latin_1,
    banner_of_the_site_in_every_text,
    column_of_64_characters,
    join_that_multiplies_rows,
    held_out_part_in_another_language,
    attention_that_sees_the_future,
    betas_in_the_wrong_order,
    eps_of_another_optimiser,
    one_step_per_epoch,
    evaluation_after_every_step,
    one_long_text_in_every_padded_batch,
    replies_of_the_next_question,
    prompt_and_completion_exchanged,
    excuse_in_most_replies,
    reference_answer_in_the_question,
    smoothing_taken_for_confidence,
    group_left_from_fine_tuning,
    labels_sorted_apart_from_the_pictures,
    mirrored_arrows,
    pictures_shrunk_to_one_patch,
    placeholder_of_the_server_in_most_rows,
    pictures_of_the_row_before,
    answer_in_the_question,
    dropout_taken_for_what_is_kept,
    missing_values_as_minus_999,
    minutes_read_as_hours,
    outcomes_joined_by_row_number,
    number_of_the_order_in_the_code,
    weight_of_the_rare_class_a_thousand,
    sides_of_the_screen_for_chosen_and_rejected,
]
HEALTHY: list[Callable[[Path], list[str]]] = [
    english_documentation,
    chinese_facts_with_weight_decay,
    python_code_without_warmup,
    texts_with_a_long_tail,
    high_but_fine_rate,
    conversations_of_sharegpt_with_one_system_prompt,
    english_questions_about_functions,
    cloths_of_unequal_sizes_and_classes,
    grey_cloths,
    questions_about_shapes,
    patients_with_rare_codes,
    short_replies_preferred,
]
