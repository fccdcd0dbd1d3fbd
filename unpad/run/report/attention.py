"""Report section of attention maps, drawn from `attention.json`, which training writes for texts and images."""

import json
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from unpad.errors import CheckpointError
from unpad.run import upgrade
from unpad.run.report.section import PageSection
from unpad.run.report.svg import drawn, framed
from unpad.storage import write_atomic
from unpad.storage.reading import Count, read_shaped

ATTENTION = "attention.json"
# From which a cell is drawn darker: weights of a text, and multiples of an equal share of an image.
LEVELS = {"text": (0.02, 0.05, 0.1, 0.25, 0.5), "image": (0.5, 0.8, 1.25, 2.0, 4.0)}
OPACITY = (0.1, 0.25, 0.45, 0.7, 1.0)
CELL, LABEL = 11, 78  # pixels

STYLE = """
.maps{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(320px,100%),1fr))}
.maps.image{grid-template-columns:repeat(auto-fill,minmax(140px,1fr))}
.maps svg{max-height:320px}
.maps svg text{font-size:9px}
.maps img{image-rendering:pixelated;display:block;width:100%;height:auto;max-height:320px;object-fit:contain}
"""


def keep_attention(folder: Path, step: int, maps: dict[str, Any]) -> None:
    """Write the attention maps of a run's final weights.

    Raises:
        DiskError: they cannot be written.
    """
    write_atomic(folder / ATTENTION, json.dumps({"step": step, **maps}, ensure_ascii=False))


def has_attention(folder: Path, step: int) -> bool:
    """True if a run keeps maps of this step."""
    try:
        return bool(upgrade.attention(read_shaped(folder / ATTENTION, _Maps))["step"] == step)
    except CheckpointError:
        return False


def draw(folder: Path) -> list[PageSection]:
    """The maps of a run; nothing without the file, or with one that cannot be read."""
    try:
        return [_draw(read_shaped(folder / ATTENTION, _Maps))]
    except (CheckpointError, ValueError, LookupError):
        return []


class _Block(TypedDict):
    block: Count
    heads: list[str]


class _Maps(TypedDict):
    step: NotRequired[Count]
    where: str
    blocks: list[_Block]
    tokens: NotRequired[list[str] | None]
    grid: NotRequired[list[Count]]
    picture: NotRequired[str]


def _draw(maps: _Maps) -> PageSection:
    tokens = maps.get("tokens")
    if tokens is None:
        (rows, columns), levels = maps["grid"], LEVELS["image"]
        unit = "what patches receive from all patches, as a multiple of an equal share"
        image = f'<img alt="the image" src="data:image/png;base64,{escape(maps["picture"])}">'
        figures = [framed("the image", "", image)]
    else:
        rows = columns = len(tokens)
        levels, figures = LEVELS["text"], []
        unit = "weights that tokens (rows) give to tokens before them"
    figures += [
        framed(f"block {int(block['block']) + 1}, head {number}", "", _map(digits, int(rows), int(columns), tokens))
        for block in maps["blocks"]
        for number, digits in enumerate(block["heads"], start=1)
    ]
    note = f"{maps['where']}: {unit}; darker from {', '.join(f'{level:g}' for level in levels)} on"
    return PageSection("Attention", note, figures, "maps" if tokens is not None else "maps image", folded=True)


def _map(digits: str, rows: int, columns: int, tokens: list[str] | None) -> str:
    """One map: cells of a level are one path, and neighbours of a row one rectangle of it."""
    if len(digits) != rows * columns:
        raise ValueError("a map has other sizes than its example")
    left = LABEL if tokens is not None else 0
    paths = dict.fromkeys("12345", "")
    for row in range(rows):
        column = 0
        for level, run in groupby(digits[row * columns : (row + 1) * columns]):
            length = len(list(run))
            if level in paths:
                paths[level] += f"M{column} {row}h{length}v1h-{length}z"
            column += length
    body = "".join(
        f'<path style="fill:var(--main);fill-opacity:{opacity}" d="{path}"/>'
        for opacity, path in zip(OPACITY, paths.values(), strict=True)
        if path
    )
    body = f'<g transform="translate({left} 0) scale({CELL})">{body}</g>'
    for row, token in enumerate(tokens or []):
        body += f"<text class=end x={left - 4} y={CELL * row + 9}>{escape(_visible(token))}</text>"
    width, height = left + CELL * columns, CELL * rows
    frame = f'<rect x={left} y=0 width={CELL * columns} height={height} fill="none"/>'
    return drawn("attention of a head", frame + body, (width, height))


def _visible(token: str) -> str:
    shown = "".join(c if c.isprintable() else "·" for c in token).replace(" ", "␣")
    return shown[:12] or "·"
