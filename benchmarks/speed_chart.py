"""The picture of README.md: tokens per second beside the Trainer, from the first table of docs/speed.md.

Above each group is how much faster we are than the Trainer's best; in the third the peer is torch's own encoder.

    python benchmarks/speed_chart.py           writes docs/speed.png
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "speed.md", ROOT / "docs" / "speed.png"
ROWS = ("W1: small GPT, 20 tokens", "W2: Llama style, 180 tokens", "W3: encoder, 340 inputs", "Chinese conversations")
NAMES = ("small GPT", "Llama style", "encoder", "conversations")
# Contender, its column of the page's first table, and its colour; readable on paper, and by the colour-blind.
SIDES = (("Trainer, defaults", 3, "#b8bcc2"), ("Trainer, its best", 4, "#7a8699"), ("unpad", 1, "#0b6e4f"))


def rates(page: str, rows: tuple[str, ...] = ROWS) -> list[list[int]]:
    """Tokens per second of some rows by column, from the first table of docs/speed.md, or of a part of it."""
    found = []
    for row in rows:
        (line,) = re.findall(rf"^\| {re.escape(row)}[^|]*(\|.*)$", page.partition("ours / defaults")[0], re.MULTILINE)
        found.append([0, *(int(cell.replace(",", "")) for cell in re.findall(r"[\d,]+", line))])
    return found


def main() -> None:
    measured = rates(PAGE.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(1, len(ROWS), figsize=(6.8, 3.0), dpi=160, facecolor="white")
    for axis, row, name in zip(axes, measured, NAMES, strict=True):
        values = [row[column] for _, column, _ in SIDES]
        bars = axis.bar(range(len(SIDES)), values, width=0.8, color=[colour for *_, colour in SIDES])
        axis.bar_label(bars, [f"{value:,}" for value in values], fontsize=9.5, padding=2)
        axis.set_title(f"{name}\n{values[2] / values[1]:.1f} times as fast", fontsize=10.5)
        axis.set_ylim(0, max(values) * 1.16)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[["top", "left", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for *_, colour in SIDES]
    names = [name for name, *_ in SIDES]
    figure.legend(handles, names, loc="lower center", ncols=3, fontsize=10.5, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(PICTURE, metadata={"Software": None})


if __name__ == "__main__":
    main()
