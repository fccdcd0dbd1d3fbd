"""Targets: files of texts, conversations, pairs of replies, images and questions, in every format."""

import gzip
import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.helpers.fuzz.mutate import damage_bytes, damage_rows, damaged, either
from tests.helpers.fuzz.target import Target, WrongError, has_control
from unpad.data.sources import images, vqa
from unpad.data.sources.example import BadRow, Example, count_bad
from unpad.data.sources.files import FORMATS, SourceFile
from unpad.data.sources.reader import read_file
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings

TEXTS = [
    {"text": "春天来了。小猫喜欢红色的花。", "split": "train", "group": 3, "keywords": ["花", "春天"]},
    {"text": "hello\nworld \u2028 😀", "fact": "a", "split": "valid"},
    {"text": "x", "group": "g"},
]
CHATS = [
    {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好！"}], "split": "test"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"instruction": "add", "input": "1 2", "output": "3", "history": [["x", "y"]]},
    {"text": "用户：你好助手：你好！"},
    {"prompt": "p", "response": "r", "keywords": ["r"]},
]
PAIRS = [
    {"prompt": "ask", "chosen": "good", "rejected": "bad", "group": "g"},
    {
        "messages": [{"role": "user", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": "c",
    },
    {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
    },
]
QUESTIONS = [
    {"image": ["img/a.png", "img/b.png"], "question": "什么？", "answers": ["a", {"answer": "b"}], "split": "train"},
    {"image": "img/a.png", "question": "q", "answer": "a", "group": 1},
    {"image": None, "caption": "c"},
]
PICTURES = [
    {"image": "img/a.png", "label": "a", "split": "train", "width": 9, "height": 7},
    {"image": "img/b.png", "label": 3, "group": "g"},
]


def _file(folder: Path, suffix: str, data: bytes) -> SourceFile:
    path = folder / f"rows{suffix}"
    path.write_bytes(data)
    return SourceFile(path, FORMATS[suffix], None, 1.0, 0)


def _read(kind: str, file: SourceFile) -> tuple[Sequence[object], list[BadRow]]:
    data = DataSettings()
    if kind == "images":
        return images.read_all(file, data)
    if kind == "vqa":
        used, _, bad = vqa.read_all(file, data)
        return used, bad
    return read_file(kind, file, data)


def _check_counts(used: Sequence[object], bad: list[BadRow], rows: int | None) -> None:
    """Rows read = used + bad, unless a fault takes along an unknown number of them, and excerpts can be printed."""
    if rows is not None and all(row.num_rows is not None for row in bad) and len(used) + count_bad(bad) != rows:
        raise WrongError("rows are neither used nor bad", rows, len(used), count_bad(bad))
    for row in bad:
        if has_control(row.excerpt):
            raise WrongError(f"control character in the excerpt of a row of {row.code}", row.excerpt)


def _num_lines(data: bytes) -> int | None:
    """Lines that hold something, found in another way than the reader's; None with separators that Python alone takes
    for white space."""
    if any(one in data for one in (b"\x1c", b"\x1d", b"\x1e", b"\x1f")):
        return None
    body = data.removeprefix(b"\xef\xbb\xbf")
    head = data[: 1 << 16]
    only_returns = b"\n" not in head and b"\r" in head.rstrip(b"\r")
    lines = body.splitlines() if only_returns else body.split(b"\n")
    return sum(bool(line.decode("utf-8", "replace").strip()) for line in lines)


def _lines(kind: str, rows: list[dict[str, Any]], folder: Path) -> Target:
    """JSON lines; what is used equals what JSON says of its line."""
    _draw_pictures(folder)
    seeds = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    seeds += [b"".join(seeds), json.dumps(rows[0]).encode() + b"\r\n\r\n" + seeds[-1], b"\xef\xbb\xbf" + seeds[0]]

    def run(data: bytes) -> None:
        used, bad = _read(kind, _file(folder, ".jsonl", data))
        _check_counts(used, bad, _num_lines(data))
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        for one in used:
            if kind == "text" and isinstance(one, Example) and len(lines) > 1:
                line = lines[int(one.where.rpartition(":")[2]) - 1].decode().strip().strip("\ufeff")
                said = ["".join(str(text).split()) for text in json.JSONDecoder().raw_decode(line)[0].values()]
                if "".join(one.turns[0].content.split()) not in said:
                    raise WrongError("a text is not that of its line", one.where)

    return Target(either(0.4, lambda rng: damage_rows(rows, rng), damaged(seeds)), run, (SourceError,))


def _array(kind: str, rows: list[dict[str, Any]], folder: Path) -> Target:
    whole: list[Any] = [*rows, "User: hi Assistant: hello" if kind == "chat" else "一段文字。"]
    seeds = [json.dumps(whole, ensure_ascii=False).encode(), json.dumps(whole, indent=1).encode(), b'["a", "b"]']

    def in_elements(rng: random.Random) -> bytes:
        return b"[" + b",\n".join([damage_rows([row], rng).strip() for row in whole]) + b"]"

    def run(data: bytes) -> None:
        used, bad = _read(kind, _file(folder, ".json", data))
        _check_counts(used, bad, _num_elements(data))

    return Target(either(0.4, in_elements, damaged(seeds)), run, (SourceError,))


def _num_elements(data: bytes) -> int | None:
    """Elements of an array that Python can read as well; None for others."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return len(found) if isinstance(found, list) else None


def _table(kind: str, rows: list[dict[str, Any]], suffix: str, delimiter: str, folder: Path) -> Target:
    _draw_pictures(folder)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [delimiter.join(names)]
    lines += [delimiter.join(_cell(row.get(name, ""), delimiter) for name in names) for row in rows]
    plain = "\n".join(lines).encode() + b"\n"
    seeds = [plain, plain.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + plain, plain.replace(b'"', b"")]

    def run(data: bytes) -> None:
        used, bad = _read(kind, _file(folder, suffix, data))
        body = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        head, _, rest = body.partition(b"\n")
        rows = sum(bool(line) for line in rest.split(b"\n"))
        # Quotes join lines, and a file without rows or without a header is one fault.
        is_known = b'"' not in data and rows and head.decode("utf-8", "replace").strip()
        _check_counts(used, bad, rows if is_known else None)

    pieces = [*seeds, b'"a\nb"', b'""', b'"', delimiter.encode() * 3]
    return Target(damaged(seeds, pieces), run, (SourceError,))


def _cell(value: object, delimiter: str) -> str:
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if any(one in text for one in (delimiter, '"', "\n")) else text


def plain_text(folder: Path) -> Target:
    """Documents of plain text: every line with a word is in one of them."""
    seeds = [
        "第一段\n\n第二段\r\n\r\nthird <|endoftext|> x\n".encode(),
        b"a\n\nb\n \nc",
        b"\xef\xbb\xbfa\r\rb\r",
        b"word\n" * 9,
    ]

    def run(data: bytes) -> None:
        used, bad = read_file("text", _file(folder, ".txt", data), DataSettings())
        _check_counts(used, bad, None)
        if bad or b"<|endoftext|>" in data:
            return
        kept = "".join(turn.content for one in used if isinstance(one, Example) for turn in one.turns)
        whole = data.removeprefix(b"\xef\xbb\xbf").decode()
        if sorted(whole.split()) and "".join(kept.split()) != "".join(whole.split()):
            raise WrongError("words of a text are lost")

    return Target(damaged(seeds), run, (SourceError,))


def gzip_rows(folder: Path) -> Target:
    """Compressed files under the names of plain ones: never a row, never a traceback."""
    text = b"".join(json.dumps(row).encode() + b"\n" for row in TEXTS)
    seeds = [gzip.compress(text, mtime=0), gzip.compress(parquet(pa.table({"text": ["a"]})), mtime=0)]

    def make(rng: random.Random) -> bytes:
        suffix = rng.choice((".jsonl", ".json", ".csv", ".txt", ".parquet"))
        return suffix.encode() + b"\0" + damage_bytes(rng.choice(seeds), seeds, rng)

    def run(data: bytes) -> None:
        suffix, _, body = data.partition(b"\0")
        if suffix.decode("latin-1") not in FORMATS:
            return
        used, bad = read_file("text", _file(folder, suffix.decode(), body), DataSettings())
        _check_counts(used, bad, None)
        if used and body.startswith(b"\x1f\x8b"):
            raise WrongError("rows of a compressed file")

    return Target(make, run, (SourceError,))


# --------------------------------------------------------------------------- parquet


def parquet(table: pa.Table, **options: Any) -> bytes:
    """The table as a file of parquet."""
    out = BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


_KINDS = (
    *(pa.string(), pa.large_string(), pa.binary(), pa.int8(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()),
    *(pa.bool_(), pa.timestamp("ns"), pa.timestamp("us", "Asia/Shanghai"), pa.duration("us"), pa.time64("ns")),
    *(pa.date32(), pa.date64(), pa.decimal128(38, 9), pa.list_(pa.string()), pa.list_(pa.int64()), pa.null()),
    *(pa.struct([("role", pa.string()), ("content", pa.string())]), pa.map_(pa.string(), pa.int64())),
    *(pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), pa.dictionary(pa.int32(), pa.string())),
)


def _column(kind: pa.DataType, rows: int, rng: random.Random) -> pa.Array | None:
    """Values of a type, some of them at its ends; None where pyarrow makes none."""
    words = ["a", "文", "", "train", "\u3000", "x" * 300, "user", "123", None]
    numbers = [0, 1, -1, 127, 2**31, 2**62, -(2**62), None]
    try:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
            return pa.array([rng.choice(words) for _ in range(rows)], pa.string()).cast(kind)
        if pa.types.is_binary(kind):
            return pa.array([rng.choice([b"\xff", b"", b"a", None]) for _ in range(rows)], kind)
        if pa.types.is_floating(kind):
            return pa.array([rng.choice([0.5, float("nan"), float("inf"), -1e300, None]) for _ in range(rows)], kind)
        if pa.types.is_boolean(kind):
            return pa.array([rng.choice([True, False, None]) for _ in range(rows)], kind)
        if pa.types.is_temporal(kind):
            stored = pa.int32() if kind.bit_width == 32 else pa.int64()
            return pa.array([rng.choice(numbers[:4]) for _ in range(rows)], stored).view(kind)
        if pa.types.is_list(kind):
            return pa.array([rng.choice([[], [None], None]) for _ in range(rows)], kind)
        return pa.array([rng.choice(numbers[:4]) for _ in range(rows)]).cast(kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.nulls(rows, kind)


def other_schema(table: pa.Table, rng: random.Random) -> pa.Table:
    """A table with columns of other types, names or order, columns missing or twice."""
    names, columns = list(table.column_names), list(table.columns)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(len(names)), rng.randrange(5)
        if kind < 3:
            columns[at] = _column(rng.choice(_KINDS), table.num_rows, rng)
        elif kind == 3:
            names[at] = rng.choice((*table.column_names, names[at].upper(), "", "\x1b[31m", "a b"))
        else:
            names.append(rng.choice(names))
            columns.append(columns[at])
    return pa.table(columns, names=names)


def _parquet_target(kind: str, table: pa.Table, folder: Path) -> Target:
    seeds = [
        parquet(table, row_group_size=3),
        parquet(table, compression="none", use_dictionary=False, write_page_checksum=True),
        parquet(table, compression="zstd", data_page_version="2.0"),
    ]

    def of_other_schema(rng: random.Random) -> bytes:
        return parquet(other_schema(table, rng), compression="none", row_group_size=rng.choice((2, 100)))

    def run(data: bytes) -> None:
        used, bad = _read(kind, _file(folder, ".parquet", data))
        _check_counts(used, bad, _num_parquet_rows(data))

    return Target(either(0.35, of_other_schema, damaged(seeds)), run, (SourceError,))


def _num_parquet_rows(data: bytes) -> int | None:
    """Rows by the footer; None where it is damaged, or says something impossible."""
    try:
        footer = pq.read_metadata(BytesIO(data))
        sizes = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError):
        return None
    return sum(sizes) if sizes and min(sizes) > 0 else None


# --------------------------------------------------------------------------- pictures


def picture(seed: int = 0, height: int = 7, width: int = 9) -> Image.Image:
    """A small picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png_bytes(seed: int = 0) -> bytes:
    out = BytesIO()
    picture(seed).save(out, "PNG")
    return out.getvalue()


def _draw_pictures(folder: Path) -> None:
    (folder / "img").mkdir(exist_ok=True)
    for seed, name in enumerate(("a", "b")):
        (folder / "img" / f"{name}.png").write_bytes(png_bytes(seed))


def image_folder(folder: Path) -> Target:
    """A folder of classes: names of any bytes, files of any content."""
    root = folder / "classes"
    names = ("cat", "狗", "train", "val", ".hidden", "a b", "x" * 200, "=1", "\x1b[31m", "Thumbs.db", "1", "a.png")

    def make(rng: random.Random) -> bytes:
        parts = []
        for _ in range(rng.choice((1, 2, 3, 4))):
            name = "/".join(rng.choice(names) for _ in range(rng.choice((1, 2, 2, 3))))
            content = damage_bytes(png_bytes(), [b"x"], rng) if rng.random() < 0.5 else png_bytes()
            parts.append([name + rng.choice((".png", ".jpg", "", ".txt")), content.decode("latin-1")])
        return json.dumps(parts).encode()

    def run(data: bytes) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for name, content in json.loads(data):
            path = root / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode("latin-1"))
            except OSError:
                continue  # a name that this file system or another case has no place for
        used, bad = images.read_all(SourceFile(root, "text", None, 1.0, 0), DataSettings())
        _check_counts(used, bad, None)

    return Target(make, run, (SourceError,))


_KEYWORDS = [["a", "b"]] * 8
_TEXT_TABLE = pa.table(
    {
        "text": [f"row {index} 中文" for index in range(8)], "split": ["train", "valid"] * 4, "group": list(range(8)),
        "keywords": _KEYWORDS,
    }
)  # fmt: skip
_CHAT_TABLE = pa.table({"messages": [CHATS[0]["messages"]] * 8, "system": ["s"] * 8})
_PAIR_TABLE = pa.table({"prompt": ["p"] * 8, "chosen": ["c"] * 8, "rejected": ["r"] * 8})
_IMAGE_TABLE = pa.table(
    {
        "image": [{"bytes": png_bytes(index), "path": "x.png"} for index in range(4)],
        "label": ["a", "b"] * 2,
        "width": [9] * 4,
    }
)

BUILDERS: dict[str, Callable[[Path], Target]] = {
    "text_jsonl": partial(_lines, "text", TEXTS),
    "chat_jsonl": partial(_lines, "chat", CHATS),
    "pairs_jsonl": partial(_lines, "pairs", PAIRS),
    "vqa_jsonl": partial(_lines, "vqa", QUESTIONS),
    "images_jsonl": partial(_lines, "images", PICTURES),
    "text_array": partial(_array, "text", TEXTS),
    "chat_array": partial(_array, "chat", CHATS),
    "text_csv": partial(
        _table, "text", [{"text": "春天", "split": "train"}, {"text": 'a "b", c', "group": 3}], ".csv", ","
    ),
    "text_tsv": partial(_table, "text", [{"text": "春天", "split": "train"}, {"text": "a", "group": 3}], ".tsv", "\t"),
    "images_csv": partial(_table, "images", PICTURES, ".csv", ";"),
    "plain_text": plain_text,
    "gzip_rows": gzip_rows,
    "text_parquet": partial(_parquet_target, "text", _TEXT_TABLE),
    "chat_parquet": partial(_parquet_target, "chat", _CHAT_TABLE),
    "pairs_parquet": partial(_parquet_target, "pairs", _PAIR_TABLE),
    "images_parquet": partial(_parquet_target, "images", _IMAGE_TABLE),
    "image_folder": image_folder,
}  # fmt: skip
