"""Line plots as SVG text: axes with round marks, one look for all, light and dark by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from unpad.run.report.history import Array

MAX_POINTS = 500  # per drawn line; more would only be drawn over each other

STYLE = """
figure{padding:14px 14px 8px}
figcaption{display:flex;flex-wrap:wrap;gap:0 10px;align-items:baseline;padding:0 4px 6px}
small,figcaption em{color:var(--soft);font-size:13px}
figcaption em{margin-left:auto;font-style:normal}
figcaption span{margin-left:16px;white-space:nowrap}
figcaption i{display:inline-block;width:16px;border-top:3px solid;margin-right:6px;vertical-align:middle}
i.raw,i.main{color:var(--main)}
i.held{color:var(--held)}
i.limit{color:var(--bad)}
i.raw,path.raw{opacity:.3}
.none{color:var(--soft);padding:24px 4px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg path{fill:none;stroke-linejoin:round}
svg text{font-size:12px;fill:var(--soft)}
path.grid{stroke:var(--line)}
path.raw{stroke:var(--main);stroke-width:1.2}
path.main{stroke:var(--main);stroke-width:1.8}
path.held{stroke:var(--held);stroke-width:1.5}
circle.held{fill:var(--card);stroke:var(--held);stroke-width:1.8}
circle.main,circle.raw{fill:var(--main)}
path.stage,path.limit{stroke:var(--soft);stroke-dasharray:3 4}
path.limit{stroke:var(--bad)}
.end{text-anchor:end}
.mid{text-anchor:middle}
svg text.name{fill:var(--ink);font-weight:600}
rect{stroke:var(--line)}
rect.hit{fill:var(--main)}
rect.miss{fill:var(--held)}
svg text.on{fill:#fff}
"""


@dataclass(frozen=True)
class Curve:
    """One drawn series: `css` names its look; each segment is drawn apart, so that stages do not join."""

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


def short(value: float) -> str:
    """Write a number in at most five characters or so: 1234 as 1,234, 12345678 as 12.3M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def span(seconds: float) -> str:
    """Write a duration: 8.1s, 1m12s, 3h05m."""
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def tick_labels(marks: list[float]) -> list[str]:
    """Write the marks of one axis alike: the same letter and the same decimals for all of them."""
    highest, step = max(abs(mark) for mark in marks), marks[1] - marks[0]
    if step < 5e-4:
        digits = math.floor(math.log10(highest)) - math.floor(math.log10(step) + 1e-9)
        parts = [f"{mark:.{max(0, digits)}e}".split("e") for mark in marks]
        return [f"{float(mantissa):g}e{int(power)}" if float(mantissa) else "0" for mantissa, power in parts]
    size, letter = next(((s, c) for s, c in ((1e9, "B"), (1e6, "M"), (1e4, "k")) if highest >= s), (1.0, ""))
    size = 1e3 if letter == "k" else size
    decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
    return [f"{mark / size:,.{decimals}f}{letter}" if mark else "0" for mark in marks]


def plot(
    title: str,
    lines: list[Curve],
    *,
    size: tuple[int, int] = (520, 220),
    zero: bool = False,
    unit: str = "",
    bounds: list[tuple[str, float]] | None = None,
    limit: float | None = None,
    over: str = "step",
    begin: float = 0.0,
    log: bool = False,
) -> str:
    """Draw lines as a figure of `size`, over steps or what `over` names.

    Args:
        begin: where the horizontal axis starts.
        bounds: stages (name, first step).
        limit: a level to mark.
        log: a logarithmic axis in any case; all values are above 0.
    """
    thinned = [(line, [thin(x, y) for x, y in line.segments]) for line in lines]
    points = [(x, y) for _, segments in thinned for x, y in segments if len(x)]
    legend = "".join(f'<span><i class="{line.css}"></i>{escape(line.label)}</span>' for line in lines if line.label)
    head = f"<figcaption><b>{escape(title)}</b><small>{escape(unit)}</small><em>{legend}</em></figcaption>"
    if not points:
        return f"<figure>{head}<p class=none>nothing was measured</p></figure>"
    ys = np.concatenate([y for _, y in points])
    # A few spikes would press everything else flat: then the axis is logarithmic.
    log = log or (not zero and ys.min() > 0 and ys.max() > 30 * np.median(ys))
    marks = (
        _powers(float(ys.min()), float(ys.max()))
        if log
        else ticks(0.0 if zero else ys.min(), ys.max(), 5 if size[1] > 250 else 4)
    )
    left, right, top, bottom = 52, size[0] - 18, 10, size[1] - 26
    high_x = max(begin + 1.0, *(x[-1] for line in lines for x, _ in line.segments if len(x)))

    def place(x: Array, y: Array) -> tuple[Array, Array]:
        low, high = (math.log10(marks[0]), math.log10(marks[-1])) if log else (marks[0], marks[-1])
        y = np.log10(y) if log else y
        return left + (x - begin) / (high_x - begin) * (right - left), bottom - (y - low) / (high - low) * (
            bottom - top
        )

    body = _axes(marks, (begin, high_x), (left, right, bottom), place, log)
    if limit is not None and marks[0] < limit < marks[-1]:
        y = place(np.zeros(1), np.array([limit]))[1][0]
        body += f'<path class=limit d="M{left} {y:.1f}H{right}"/>'
        body += f"<text class=end x={right} y={y - 4:.1f}>warning level</text>"
    for name, first in bounds or []:
        x = left + (first - begin) / (high_x - begin) * (right - left)
        body += f'<path class=stage d="M{x:.1f} {top}V{bottom}"/>' if first > 1 else ""
        body += f"<text class=name x={x + 6:.1f} y={top + 11}>{escape(name)}</text>" if size[0] > 600 else ""
    for line, segments in thinned:
        for x, y in segments:
            px, py = place(x, y)
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(px, py, strict=True))
            body += f'<path class="{line.css}" d="M{path}"/>' if len(x) > 1 else ""
            if line.dots or len(x) == 1:
                for a, b, step, value in zip(px, py, x, y, strict=True):
                    body += f'<circle class="{line.css}" cx={a:.1f} cy={b:.1f} r=3.2>'
                    body += f"<title>{escape(over)} {step:,.0f}: {value:.4g}</title></circle>"
    frame = f'viewBox="0 0 {size[0]} {size[1]}" role=img aria-label="{escape(title)}"'
    return f"<figure>{head}<svg {frame}>{body}</svg></figure>"


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
            body += f'<rect class="{css}" x={x:.1f} y={y} width={cell - 2} height={cell - 2} '
            body += (
                f'fill-opacity="{share:.3f}"><title>{escape(name)} taken for {escape(other)}: {count:,}</title></rect>'
            )
            if count:
                body += f'<text class="mid{" on" if share > 0.5 else ""}" x={x + cell / 2 - 1:.1f} '
                body += f"y={y + cell / 2 + 3:.1f}>{count:,}</text>"
    head = f"<figcaption><b>{escape(title)}</b><small>{escape(unit)}</small></figcaption>"
    frame = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role=img'
    return f'<figure>{head}<svg {frame} aria-label="{escape(title)}">{body}</svg></figure>'


def _axes(
    marks: list[float],
    over: tuple[float, float],
    frame: tuple[int, int, int],
    place: Callable[[Array, Array], tuple[Array, Array]],
    log: bool,
) -> str:
    left, right, bottom = frame
    body = ""
    heights = place(np.zeros(len(marks)), np.array(marks))[1]
    labels = [f"{mark:g}" for mark in marks] if log else tick_labels(marks)
    for label, y in zip(labels, heights, strict=True):
        body += f'<path class=grid d="M{left} {y:.1f}H{right}"/>'
        body += f"<text class=end x={left - 8} y={y + 4:.1f}>{label}</text>"
    begin, end = over
    for mark in ticks(begin, end, 8 if right > 600 else 4):
        if begin <= mark <= end and mark == int(mark):
            x = left + (mark - begin) / (end - begin) * (right - left)
            body += f"<text class=mid x={x:.1f} y={bottom + 18}>{mark:,.0f}</text>"
    return body
