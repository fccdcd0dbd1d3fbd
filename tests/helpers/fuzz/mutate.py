"""Damage to files: bytes changed at random, values of JSON replaced by values of other kinds."""

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

Draw = Callable[[random.Random], bytes]  # the bytes of a case
CHANGES = (1, 1, 1, 2, 2, 3, 5, 9)  # how many changes one case gets
_LENGTHS = (1, 2, 4, 16, 64, 256)
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 1 << 20, 1 << 28, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
# Pieces of text that readers have stumbled over: white space of other scripts, ends of strings, numbers without a
# place in 64 bits, halves of characters, commands of terminals, tags and anchors of YAML.
TOKENS = (
    *(text.encode() for text in ("\u00a0", "\u3000", "\u2028", "\u0085", "\ufeff", "９", "，", "\U0001f600")),
    *(b"\x00", b"\x0b", b"\x0c", b"\x1c", b"\x1b[31m", b"\x7f", b"\x85", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
    *(b"\\ud800", b"\\u0000", b"\\n", b"\\", b'"', b"'", b",", b";", b":", b"\t", b"\r", b"\n", b"\r\n", b"\n\n"),
    *(b"{", b"}", b"[", b"]", b"{}", b"[]", b"[" * 60, b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"0.0"),
    *(b"9" * 23, b"9" * 400, b"1e-400", b"//", b"#", b"<script>", b"=1+1", b"../", b"~", b"%", b"$", b"`"),
    *(b"---\n", b"- ", b"? ", b"&a ", b"*a", b"<<: "),
    *(b"| ", b"> ", b"!!int ''", b"!!bool x", b"!!float ''", b"{{", b"{%"),
)  # fmt: skip
_DEEP, _DIGITS = "@deep@", "@digits@"  # stand for what json.dumps cannot write
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 1.5, -0.0, 1e308, -1e308, 1e-320, 10**25, 2**31, 2**63, -(2**63), 2**64),
    *(float("nan"), float("inf"), float("-inf"), _DIGITS, "nan", "-inf", "1e5", "0x10", "1_000", "true", "null"),
    *("", " ", "a", "\u3000", "\u2028", "\0", "\ud800", "\x1b[31m", "<b>x</b>", "=1", "../x", "/dev/zero", "a" * 5000),
    *("9" * 5000, "2024-01-01", "2024-13-45T99:99:99", "train", "user", "step", _DEEP),
    *([], {}, [None], [[]], [0], ["a", 1], {"a": 1}, {"": {}}, {"kind": "train"}, [{"a": [1, 2]}], [[1, 2], [3]]),
)
_KEYS = ("x", "", " ", "\0", "__class__", "kind", "step", "text", "path", "type", "\u3000", "a" * 300, "0")
_KEY = re.compile(rb'"(?:[^"\\]|\\.){0,40}": ?')


def damaged(seeds: Sequence[bytes], pieces: Sequence[bytes] | None = None) -> Draw:
    """Cases that are one of the seeds with parts of `pieces`, or of the seeds, spliced in, and other damage."""
    return lambda rng: damage_bytes(_one_of(seeds, rng), pieces or seeds, rng)


def damaged_json(values: Sequence[Any], share: float) -> Draw:
    """Cases that are the JSON of one of the values, of whose parts a share is damaged."""
    return lambda rng: damage_json(_one_of(values, rng), rng, share)


def _one_of(items: Sequence[Any], rng: random.Random) -> Any:
    return rng.choice(items) if len(items) > 1 else items[0]


def either(share: float, one: Draw, other: Draw) -> Draw:
    """A share of cases from `one`, the rest from `other`."""
    return lambda rng: one(rng) if rng.random() < share else other(rng)


def damage_bytes(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Change bytes at random: flip, set, insert, delete, duplicate, move, cut off, or splice in parts of `others`."""
    changed = bytearray(data)
    for _ in range(rng.choice(CHANGES)):
        _change(changed, others, rng)
    return bytes(changed)


def _change(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    rng.choice(_WAYS)(data, at, min(len(data), at + rng.choice(_LENGTHS)), others, rng)


_Others = Sequence[bytes]


def _flip(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    if at < end:
        data[at] ^= 1 << rng.randrange(8)


def _put_noise(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    data[at:end] = bytes(rng.randrange(256) for _ in range(end - at))


def _insert(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    data[at:at] = rng.choice(TOKENS)


def _put_token(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    data[at:end] = rng.choice(TOKENS)


def _delete(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    del data[at:end]


def _duplicate(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    data[at:at] = data[at:end]


def _splice(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    other = rng.choice(others)
    start = rng.randrange(len(other) + 1)
    data[at:at] = other[start : start + rng.choice((*_LENGTHS, 1000))]


def _cut(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    if rng.random() < 0.4:
        del data[at:]


def _put_number(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    number, kind = rng.choice(_NUMBERS), rng.choice("<>") + rng.choice("BHIQ")
    size = struct.calcsize(kind)
    if at + size <= len(data):
        data[at : at + size] = struct.pack(kind, number % (1 << 8 * size))


def _move(data: bytearray, at: int, end: int, others: _Others, rng: random.Random) -> None:
    moved = data[at:end]
    del data[at:end]
    to = rng.randrange(len(data) + 1)
    data[to:to] = moved


_WAYS = (_flip, _put_noise, _insert, _put_token, _delete, _duplicate, _splice, _cut, _put_number, _move)


def damage_value(value: Any, rng: random.Random, share: float = 0.05) -> Any:
    """A JSON value with a share of its parts replaced by values of any kind, dropped, renamed or repeated."""
    if rng.random() < share:
        return rng.choice(_ODD)
    if isinstance(value, dict):
        changed = {}
        for key, item in value.items():
            drawn = rng.random()
            if drawn < share / 2:
                continue
            if drawn < share:
                key = rng.choice((*_KEYS, key + " ", key.upper()))
            changed[key] = damage_value(item, rng, share)
        if rng.random() < share / 2:
            changed[rng.choice(_KEYS)] = rng.choice(_ODD)
        return changed
    if isinstance(value, list):
        items = [damage_value(item, rng, share) for item in value if rng.random() > share / 3]
        if items and rng.random() < share / 2:
            items.insert(rng.randrange(len(items) + 1), rng.choice((*items, rng.choice(_ODD))))
        return items
    return value


def damage_json(value: Any, rng: random.Random, share: float = 0.05) -> bytes:
    """The JSON of a damaged value; some have a key twice, are nested thousands of levels deep, or are no UTF-8."""
    changed = damage_value(value, rng, share)
    for _ in range(4):  # a case that is still whole tells nothing
        if changed is not value and changed != value:
            break
        changed = damage_value(value, rng, share * 2)
    return write_json(changed, rng)


def write_json(value: Any, rng: random.Random) -> bytes:
    """JSON of a value with the stand-ins of `_ODD` filled in, and at times a key twice."""
    data = json.dumps(value, ensure_ascii=rng.random() < 0.3).encode("utf-8", "surrogatepass")
    if b"@d" in data:
        depth = rng.choice((20, 200, 600, 3000, 100_000))
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        data = data.replace(b'"@deep@"', opening * depth + b"1" + closing * depth, 1)
        data = data.replace(b'"@digits@"', b"9" * rng.choice((19, 20, 400, 5000)))
    if rng.random() < 0.05 and (key := _KEY.search(data, rng.randrange(len(data) + 1))):
        data = data[: key.start()] + key[0] + b"0," + data[key.start() :]
    return data


def damage_rows(rows: Sequence[Any], rng: random.Random, share: float = 0.15) -> bytes:
    """JSON lines of which one or several are damaged."""
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(rows))
        lines[at] = damage_json(rows[at], rng, share)
    return b"\n".join(lines) + b"\n"
