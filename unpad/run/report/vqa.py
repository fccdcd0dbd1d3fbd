"""Report section of models with fewer visual tokens: kept numbers, accuracy by mode, and kept patches of some
images."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Protocol

import numpy as np
from PIL import Image

from unpad.run.report.kept_patches import Kept, to_svg
from unpad.run.report.section import FamilySection
from unpad.run.report.svg import WIDE, Axes, Curve, plot

STYLE = """
.kept{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr))}
.kept svg{max-height:420px}
.kept p{margin:0;padding:0 4px 6px;color:var(--soft);font-size:13px}
path.bar{stroke:var(--main);stroke-width:14}
path.interval{stroke:var(--ink);stroke-width:1.4}
"""
PREFIX, PATCHES, BLOCK = "accuracy_", "visual_tokens", "kept_block_"
MODES = {"origin": "all patches", "merge_only": "merged", "soft": "hidden by degrees", "hard": "removed"}
LEFT, WIDTH, ROW = 180, 520, 34  # of the bars, in pixels


class MeasuredValue(Protocol):
    """A value, and its interval or its extremes."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def to_json(metrics: Mapping[str, MeasuredValue], pictures: Sequence[tuple[Kept, str]]) -> dict[str, Any]:
    """Contents of `evaluation.json`, which the page draws.

    Args:
        metrics: `accuracy_MODE`, `visual_tokens` and `kept_block_N` among them.
        pictures: questions about one image, each with the right answer.
    """

    def three(name: str) -> list[float | None]:
        metric = metrics[name]
        return [None if math.isnan(value) else value for value in (metric.value, metric.low, metric.high)]

    blocks = sum(name.startswith(BLOCK) for name in metrics)
    return {
        "family": "vqa",
        "accuracy": {mode: three(PREFIX + mode) for mode in MODES if PREFIX + mode in metrics},
        "patches": metrics[PATCHES].value if blocks else 0.0,
        "kept": [three(f"{BLOCK}{block}") for block in range(blocks)],
        "pictures": [_picture_to_json(picture, right) for picture, right in pictures],
    }


def _picture_to_json(picture: Kept, right: str) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(picture.pixels).save(out, "PNG")
    return {
        "question": picture.question,
        "answer": picture.answer,
        "right": right,
        "patch": picture.patch,
        "image": base64.b64encode(out.getvalue()).decode(),
        "stays": {str(block): np.flatnonzero(stays).tolist() for block, stays in picture.stays.items()},
    }


def picture_from_json(values: dict[str, Any]) -> Kept:
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(values["image"]))).convert("RGB"))
    total = pixels.shape[0] * pixels.shape[1] // values["patch"] ** 2
    stays = {int(block): np.isin(np.arange(total), places) for block, places in values["stays"].items()}
    return Kept(pixels, values["patch"], stays, values["question"], values["answer"])


def section(evaluation: dict[str, Any]) -> str:
    """Draw how many visual tokens are left, and the accuracy by mode.

    Args:
        evaluation: `evaluation.json`, as `to_json` returns it.
    """
    figures = [
        *([_kept(np.array(evaluation["kept"], float), evaluation.get("patches"))] if evaluation["kept"] else []),
        *([_accuracies(evaluation["accuracy"])] if evaluation["accuracy"] else []),
    ]
    drawn = f"<h2>Held-out questions</h2><div class=plots>{''.join(figures)}</div>" if figures else ""
    pictures = "".join(_picture(picture) for picture in evaluation["pictures"])
    return drawn + (f"<h2>Patches that stayed</h2><div class=kept>{pictures}</div>" if pictures else "")


def _kept(counts: np.ndarray, patches: float | None) -> str:
    """Visual tokens that enter each block, (blocks, 3): mean, minimum and maximum per question.

    Args:
        patches: mean number per question; None in evaluations of versions that did not record it.
    """
    block = np.arange(len(counts), dtype=float)
    mean, least, most = counts.T
    lines = [] if patches is None else [Curve("held", [(block, np.full_like(block, patches))], "patches of the images")]
    lines += [
        Curve("main", [(block, mean)], "mean", dots=True),
        Curve("raw", [(block, least), (block, most)], "least and most"),
    ]
    axes = Axes("of a question, by block they enter", (WIDE[0], 260), zero=True, over="block")
    return plot("Visual tokens", lines, axes)


def _accuracies(accuracy: dict[str, list[float | None]]) -> str:
    """A bar per mode with its 95 % interval, if it has one."""
    body = "".join(
        f'<path class=grid d="M{LEFT + share * (WIDTH - LEFT - 60):.0f} 4V{ROW * len(accuracy) + 4}"/>'
        f"<text class=mid x={LEFT + share * (WIDTH - LEFT - 60):.0f} y={ROW * len(accuracy) + 22}>{share:.0%}</text>"
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    for row, (mode, (value, *bounds)) in enumerate(accuracy.items()):
        assert value is not None, "a share of one row at least"
        low, high = (value if bound is None else bound for bound in bounds)
        y, (at, left, right) = ROW * (row + 0.5) + 4, (LEFT + x * (WIDTH - LEFT - 60) for x in (value, low, high))
        title = f"{low:.1%} to {high:.1%}" if None not in bounds else "no interval"
        body += f"<text class=end x={LEFT - 10} y={y + 4:.1f}>{escape(MODES[mode])} ({escape(mode)})</text>"
        body += f'<path class=bar d="M{LEFT} {y:.1f}H{at:.1f}"><title>{title}</title></path>'
        body += f'<path class=interval d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
        body += f"<text x={max(at, right) + 8:.1f} y={y + 4:.1f}>{value:.1%}</text>"
    head = (
        "<figcaption><b>Accuracy</b><small>by what happens to visual tokens, with 95 % intervals</small></figcaption>"
    )
    frame = f'viewBox="0 0 {WIDTH} {ROW * len(accuracy) + 30}" role=img aria-label="Accuracy"'
    return f"<figure>{head}<svg {frame}>{body}</svg></figure>"


def _picture(values: dict[str, Any]) -> str:
    right = values["answer"] == values["right"]
    note = "right" if right else f"the answer is {values['right']}"
    return f"<figure>{to_svg(picture_from_json(values))}<p>{escape(note)}</p></figure>"


SECTION = FamilySection(section, STYLE, length_unit="positions")
