"""Line plots as SVG text: axes with round marks, one style for all, light and dark by the page's style sheet."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from unpad.run.report.history import Array

COLUMNS = 40  # of a drawing, in which it names its values
MAX_POINTS = 500  # per drawn line; more would overlap
WIDE = (1060, 340)  # pixels of a figure over the whole page
COLOURS = {  # of the page by day
    "card": "#fff", "ink": "#1b1c1e", "soft": "#696d74", "line": "#e6e5e0", "main": "#2563eb", "held": "#c2570c",
    "bad": "#b42318",
}  # fmt: skip

STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Curve:
    """One drawn series: `css` names its look; segments are drawn separately, so that stages do not join."""

    css: str
    segments: list[tuple[Array, Array]]
    label: str = ""
    dots: bool = False


def ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Return about `target` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    if not high > low:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    rough = (high - low) / target
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def thin(x: Array, y: Array) -> tuple[Array, Array]:
    """Keep the lowest and highest point of each of `MAX_POINTS` / 2 equal parts, so that no spike is lost."""
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MAX_POINTS // 2 + 1).astype(int)
    keep = {int(i) for a, b in pairwise(edges) for i in (a + y[a:b].argmin(), a + y[a:b].argmax())}
    index = np.array(sorted(keep))
    return x[index], y[index]


def running_mean(values: Array, weights: Array, width: int) -> Array:
    """Mean of `width` neighbours on both sides together, weighted; narrower at the ends, non-finite values left out."""
    weights = np.where(np.isfinite(values), weights, 0.0)
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values, posinf=0.0, neginf=0.0) * weights)])
    counts = np.concatenate([[0.0], np.cumsum(weights)])
    index = np.arange(len(values))
    low, high = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    total = counts[high] - counts[low]
    return np.where(total > 0, (sums[high] - sums[low]) / np.where(total > 0, total, 1.0), np.nan)


def tick_labels(marks: list[float]) -> list[str]:
    """Write the marks of one axis with the same suffix and the same decimals."""
    highest, step = max(abs(mark) for mark in marks), marks[1] - marks[0]
    if step < 5e-4:
        digits = math.floor(math.log10(highest)) - math.floor(math.log10(step) + 1e-9)
        parts = [f"{mark:.{max(0, digits)}e}".split("e") for mark in marks]
        return [f"{float(mantissa):g}e{int(power)}" if float(mantissa) else "0" for mantissa, power in parts]
    size, letter = next(((s, c) for s, c in ((1e9, "B"), (1e6, "M"), (1e4, "k")) if highest >= s), (1.0, ""))
    size = 1e3 if letter == "k" else size
    decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
    return [f"{mark / size:,.{decimals}f}{letter}" if mark else "0" for mark in marks]


@dataclass(frozen=True)
class Axes:
    """Size and axes of a figure.

    Args:
        unit: unit of the vertical axis, shown next to the title.
        size: width and height in pixels.
        zero: whether the vertical axis begins at 0.
        log: always use a logarithmic vertical axis; all values are above 0.
        over: name of the horizontal axis.
        begin: start of the horizontal axis.
        powers: whether the horizontal axis holds exponents of ten.
    """

    unit: str = ""
    size: tuple[int, int] = (520, 220)
    zero: bool = False
    log: bool = False
    over: str = "step"
    begin: float = 0.0
    powers: bool = False


@dataclass(frozen=True)
class _Frame:
    """Position of values in a drawing: edges in pixels, ends of both axes, and the marks of the vertical one."""

    left: float
    right: float
    top: float
    bottom: float
    begin: float
    end: float
    marks: list[float]
    log: bool
    powers: bool

    @property
    def wide(self) -> bool:
        return self.right > 600

    def x(self, values: Array) -> Array:
        return self.left + (values - self.begin) / (self.end - self.begin) * (self.right - self.left)

    def y(self, values: Array) -> Array:
        ends = self.marks[0], self.marks[-1]
        low, high = map(math.log10, ends) if self.log else ends
        values = np.log10(values) if self.log else values
        return self.bottom - (values - low) / (high - low) * (self.bottom - self.top)


def plot(
    title: str,
    lines: list[Curve],
    axes: Axes = Axes(),  # frozen
    *,
    stages: list[tuple[str, float]] | None = None,
    limit: float | None = None,
) -> str:
    """Draw lines as a figure.

    Args:
        stages: names and first steps.
        limit: a level to mark.
    """
    thinned = [(line, [thin(x, y) for x, y in line.segments]) for line in lines]
    points = [(x, y) for _, segments in thinned for x, y in segments if len(x)]
    legend = [(line.css, line.label) for line in lines if line.label]
    unit = axes.unit if " by " in axes.unit else ", ".join(filter(None, [axes.unit, f"by {axes.over}"]))
    if not points:
        return framed(title, axes.unit, "<p class=none>nothing was measured</p>", legend)
    end = max(axes.begin + 1.0, *(x[-1] for line in lines for x, _ in line.segments if len(x)))

    frame = _frame(axes, end, np.concatenate([y for _, y in points]))
    body = _grid(frame)
    if limit is not None and frame.marks[0] < limit < frame.marks[-1]:
        body += _level(frame, limit)
    body += "".join(_stage(frame, name, first) for name, first in stages or [])
    body += "".join(_curve(frame, line, x, y, axes.over) for line, segments in thinned for x, y in segments)
    body += _values(frame, thinned, title, axes.over)
    unit += ", logarithmic" if frame.log else ""
    return framed(title, unit, drawn(title, body, axes.size, "plot"), legend, "wide" if frame.wide else "")


def picture(title: str, line: Curve, axes: Axes, marks: list[tuple[str, float]]) -> str:
    """Draw one line as an SVG file of its own, in the light colours of the page.

    Args:
        line: of one segment.
        marks: names and places on the horizontal axis, each a dashed line from top to bottom.
    """
    (x, y) = thin(*line.segments[0])
    frame = _frame(axes, max(axes.begin + 1.0, float(x[-1])), y)
    body = _grid(frame) + _curve(frame, line, x, y, axes.over)
    for row, (name, place) in enumerate(marks):
        at = frame.x(np.array([place]))[0]
        body += f'<path class=limit d="M{at:.1f} {frame.top}V{frame.bottom}"/>'
        body += f"<text x={at + 5:.1f} y={frame.top + 14 + 16 * row}>{escape(name)}</text>"
    return _file(f"<text class=name x=52 y=-8>{escape(title)}</text>{body}", axes.size)


@dataclass(frozen=True)
class Bar:
    """A bar over part of the horizontal axis: `css` is hit or miss, `note` the text above it."""

    left: float
    width: float
    height: float
    css: str = "hit"
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars side by side in one figure.

    Args:
        unit: unit of the vertical axis; over: unit of the horizontal axis.
        names: below the middle of a place of the horizontal axis; without them it is an axis of numbers.
        legend: class and meaning of each kind of bar.
    """

    title: str
    unit: str
    bars: list[Bar]
    over: str = ""
    names: list[tuple[float, str]] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)


def bars_picture(figures: list[Bars], size: tuple[int, int] = (420, 330)) -> str:
    """Draw figures of bars side by side as an SVG file of its own, in the light colours of the page.

    Args:
        size: width and height of each in pixels.
    """
    width, height = size
    body = "".join(
        f"<g transform='translate({place * width} 0)'>{_bars(figure, size)}</g>" for place, figure in enumerate(figures)
    )
    return _file(body, (width * len(figures), height))


def _bars(figure: Bars, size: tuple[int, int]) -> str:
    width, height = size
    bars = figure.bars
    begin = min((bar.left for bar in bars), default=0.0)
    end = max((bar.left + bar.width for bar in bars), default=1.0)
    highest = max((bar.height for bar in bars), default=0.0)
    marks = ticks(0.0, max(1.1 * highest, 5.0))  # room for the notes, and no half of a sequence
    frame = _Frame(52, width - 18, 34, height - 44, begin, end, marks, log=False, powers=False)
    body = f"<text class=name x={frame.left} y=-8>{escape(figure.title)}</text>"
    body += f"<text x={frame.left} y=12>{escape(figure.unit)}</text>"
    for row, (css, label) in enumerate(figure.legend):
        x = frame.right - 84 * (len(figure.legend) - row)
        body += f'<rect class="{css}" x={x:.1f} y=3 width=10 height=10 />'
        body += f"<text x={x + 15:.1f} y=12>{escape(label)}</text>"
    body += _levels(frame) + ("" if figure.names else _places(frame))
    for x, name in zip(frame.x(np.array([at for at, _ in figure.names])), figure.names, strict=True):
        body += f"<text class=mid x={x:.1f} y={frame.bottom + 18}>{escape(name[1])}</text>"
    if figure.over:
        body += f"<text class=end x={frame.right} y={frame.bottom + 36}>{escape(figure.over)}</text>"
    for bar in bars:
        left, right = frame.x(np.array([bar.left, bar.left + bar.width]))
        top = frame.y(np.array([bar.height]))[0]
        sides = f"x={left:.1f} y={top:.1f} width={right - left:.1f} height={frame.bottom - top:.1f}"
        body += f'<rect class="{bar.css}" {sides}><title>{bar.height:,.6g}</title></rect>'
        if bar.note:
            body += f"<text class=mid x={(left + right) / 2:.1f} y={top - 4:.1f}>{escape(bar.note)}</text>"
    return body


def _file(body: str, size: tuple[int, int]) -> str:
    """An SVG file of a drawing of this size, with room for a title above it."""
    width, height = size
    style = f"text{{font-family:sans-serif}}svg{{background:{COLOURS['card']}}}{STYLE}"
    for name, colour in COLOURS.items():
        style = style.replace(f"var(--{name})", colour)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 30}"'
    quoted = re.sub(r"(?<=[a-z0-9]=)([^\s\"'>]+)(?=[\s/>])", r'"\1"', body)  # a file of XML wants quotes
    return f'{head} viewBox="0 -30 {width} {height + 30}"><style>{style}</style>{quoted}</svg>\n'


def framed(title: str, unit: str, body: str, legend: Sequence[tuple[str, str]] = (), css: str = "") -> str:
    """A figure: its caption above a drawing.

    Args:
        legend: class and meaning of each kind of line or dot.
        css: class of the figure.
    """
    kinds = "".join(f'<span><i class="{kind}"></i>{escape(label)}</span>' for kind, label in legend)
    head = f"<b>{escape(title)}</b>" + (f"<small>{escape(unit)}</small>" if unit else "")
    head += f"<em>{kinds}</em>" if kinds else ""
    return f"<figure{f' class={css}' if css else ''}><figcaption>{head}</figcaption>{body}</figure>"


def drawn(title: str, body: str, size: tuple[float, float], css: str = "", attributes: str = "") -> str:
    """An SVG element of a size in pixels."""
    about = " ".join(filter(None, [f'class="{css}"' if css else "", attributes]))
    view = f'viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" role=img aria-label="{escape(title)}"'
    return f"<svg {about + ' ' if about else ''}{view}>{body}</svg>"


def _frame(axes: Axes, end: float, ys: Array) -> _Frame:
    """Lay out the axes around values (num_points,) up to `end` of the horizontal axis."""
    width, height = axes.size
    low, high = float(ys.min()), float(ys.max())
    # A few spikes would press everything else flat: then the axis is logarithmic.
    log = axes.log or (not axes.zero and low > 0 and high > 30 * float(np.median(ys)))
    marks = _powers(low, high) if log else ticks(0.0 if axes.zero else low, high, 5 if height > 250 else 4)
    return _Frame(52, width - 18, 10, height - 26, axes.begin, end, marks, log, axes.powers)


def _level(frame: _Frame, limit: float) -> str:
    """Draw the warning level."""
    y = frame.y(np.array([limit]))[0]
    line = f'<path class=limit d="M{frame.left} {y:.1f}H{frame.right}"/>'
    return line + f"<text class=end x={frame.right} y={y - 4:.1f}>warning level</text>"


def _stage(frame: _Frame, name: str, first: float) -> str:
    """Draw the beginning of a stage; only wide figures have room for its name."""
    x = frame.x(np.array([first]))[0]
    line = f'<path class=stage d="M{x:.1f} {frame.top}V{frame.bottom}"/>' if first > 1 else ""
    return line + (f"<text class=name x={x + 6:.1f} y={frame.top + 11}>{escape(name)}</text>" if frame.wide else "")


def _curve(frame: _Frame, line: Curve, x: Array, y: Array, over: str) -> str:
    """Draw one segment of a line, with its dots."""
    px, py = frame.x(x), frame.y(y)
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(px, py, strict=True))
    body = f'<path class="{line.css}" d="M{path}"/>' if len(x) > 1 else ""
    if line.dots or len(x) == 1:
        for a, b, step, value in zip(px, py, x, y, strict=True):
            body += f'<circle class="{line.css}" cx={a:.1f} cy={b:.1f} r=3.2>'
            body += f"<title>{escape(over)} {step:,.0f}: {value:.4g}</title></circle>"
    return body


def _values(frame: _Frame, lines: Sequence[tuple[Curve, list[tuple[Array, Array]]]], title: str, over: str) -> str:
    """Columns over a drawing that name their values where the pointer rests: the mean of every line but a faint one."""
    if all(line.dots for line, _ in lines if line.css != "raw"):  # they name theirs themselves
        return ""
    edges, body = np.linspace(frame.begin, frame.end, COLUMNS + 1), ""
    named = [
        (line.label or title, np.concatenate([x for x, _ in segments]), np.concatenate([y for _, y in segments]))
        for line, segments in lines
        if segments and line.css != "raw"
    ]
    for low, high in pairwise(edges.tolist()):
        means = [(name, y[(x >= low) & (x <= high)]) for name, x, y in named]
        said = "; ".join(f"{name} {values.mean():.4g}" for name, values in means if values.size)
        left, right = frame.x(np.array([low, high])).tolist()
        sides = f"x={left:.1f} y={frame.top} width={right - left:.1f} height={frame.bottom - frame.top:.0f}"
        head = f"{over} {low:,.0f} to {high:,.0f}"
        body += f"<rect class=values {sides}><title>{escape(f'{head}: {said}')}</title></rect>" if said else ""
    return body


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten that enclose [low, high], two or more."""
    first = math.floor(math.log10(low))
    return [10.0**e for e in range(first, max(math.ceil(math.log10(high)), first + 1) + 1)]


def matrix(title: str, names: list[str], counts: Array, unit: str = "") -> str:
    """Draw a confusion matrix: a row per true class, shaded by the share of the row, with its counts."""
    size = len(names)
    cell = max(26, min(64, 720 // max(size, 1)))
    left, top = 8 + 7.5 * max(map(len, names)), 24
    width, height = left + cell * size + 12, top + cell * size + 10
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    body = ""
    for row, name in enumerate(names):
        y = top + row * cell
        body += f"<text class=end x={left - 6:.0f} y={y + cell / 2 + 4:.1f}>{escape(name)}</text>"
        short_name = name if len(name) * 7 < cell else name[: max(cell // 8, 1)] + "…"
        body += f"<text class=mid x={left + (row + 0.5) * cell:.1f} y={top - 8}>{escape(short_name)}</text>"
        for column, other in enumerate(names):
            x, share, count = left + column * cell, float(shares[row, column]), int(counts[row, column])
            css = "hit" if row == column else "miss"
            sides = f"x={x:.1f} y={y} width={cell - 2} height={cell - 2}"
            body += f'<rect class="{css}" {sides} fill-opacity="{share:.3f}">'
            body += f"<title>{escape(name)} taken for {escape(other)}: {count:,}</title></rect>"
            if count:
                body += f'<text class="mid{" on" if share > 0.5 else ""}" x={x + cell / 2 - 1:.1f} '
                body += f"y={y + cell / 2 + 3:.1f}>{count:,}</text>"
    frame = f'style="max-width:{width:.0f}px"'
    return framed(title, unit, drawn(title, body, (width, height), attributes=frame))


def _grid(frame: _Frame) -> str:
    """Draw the marks of both axes."""
    return _levels(frame) + _places(frame)


def _levels(frame: _Frame) -> str:
    """Draw the marks of the vertical axis."""
    body = ""
    labels = [f"{mark:g}" for mark in frame.marks] if frame.log else tick_labels(frame.marks)
    for label, y in zip(labels, frame.y(np.array(frame.marks)), strict=True):
        body += f'<path class=grid d="M{frame.left} {y:.1f}H{frame.right}"/>'
        body += f"<text class=end x={frame.left - 8} y={y + 4:.1f}>{label}</text>"
    return body


def _places(frame: _Frame) -> str:
    """Draw the marks of the horizontal axis."""
    body = ""
    for mark in ticks(frame.begin, frame.end, 8 if frame.wide else 4):
        if frame.begin <= mark <= frame.end and mark == int(mark):
            x = frame.x(np.array([mark]))[0]
            label = f"1e{mark:.0f}" if frame.powers else f"{mark:,.0f}"
            body += f"<text class=mid x={x:.1f} y={frame.bottom + 18}>{label}</text>"
    return body
