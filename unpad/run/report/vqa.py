"""Answers about images: their measures on the page, and pictures of kept patches for `unpad infer`."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from rich.cells import cell_len

from unpad import storage
from unpad.data.show import data_url
from unpad.errors import RecipeError
from unpad.run.report.section import FamilySection, Performance
from unpad.terminal.table import wrapped

PANEL = 240  # pixels of the longer side of an image, about
LINE, GAP, SIZE = 22, 16, 15  # pixels: height of a line of text, space around, size of letters
CELL = 8.2  # width of a narrow letter; one of Chinese is twice as wide
PAPER, INK, SOFT = "#ffffff", "#1c1d1f", "#696d74"
VEIL, DIMMED = np.array((226, 227, 230), np.float64), 0.82  # colour that a removed patch fades to, and how far


@dataclass(frozen=True, eq=False)
class Kept:
    """An image and the patches that a model kept.

    Args:
        pixels: (rows * patch, columns * patch, 3) uint8, as the model read it.
        patch: side of a patch, in pixels.
        stays: after every block that removes tokens, counted from 0 (-1: before the first), the patches that stay:
            (rows * columns,) bool.
    """

    pixels: np.ndarray
    patch: int
    stays: dict[int, np.ndarray]
    question: str
    answer: str

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.pixels.shape[:2]
        return height // self.patch, width // self.patch

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Question and answer in lines that fit under the panels, each with its colour."""
        cells = max(int(self.size[0] / CELL), 24)
        return [
            *((line, SOFT) for line in wrapped(self.question, cells)),
            *((line, INK) for line in wrapped(self.answer or "(no answer)", cells)),
        ]

    @property
    def scale(self) -> int:
        """Picture pixels per pixel of the image; a large image is shown as it is."""
        return max(1, PANEL // int(max(self.pixels.shape[:2])))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of all panels side by side, without the margin around them."""
        height, width = (self.scale * side for side in self.pixels.shape[:2])
        column = max(width, int(CELL * max(cell_len(title) for title, _ in self.panels)))
        return column * len(self.panels) + GAP * (len(self.panels) - 1), height + LINE

    @property
    def panels(self) -> list[tuple[str, np.ndarray]]:
        """Title and (height, width, 3) uint8 of the image as read, then after every block that removes tokens."""
        total = self.grid[0] * self.grid[1]
        titles = [(f"{total} patches", np.ones(total, np.bool_))]
        titles += [(f"{_moment(block)}: {stays.sum()}", stays) for block, stays in self.stays.items()]
        return [(title, dimmed(self.pixels, stays.reshape(self.grid), self.patch)) for title, stays in titles]


def refuse_unshowable(modes: Sequence[str], merges: bool, where: str) -> None:
    """Refuse a model without patches to show.

    Raises:
        RecipeError: names the reason.
    """
    if merges:
        what = "this model merges patches, so nothing can be shown: no token stands for one patch"
        raise RecipeError(what, where=where, fix="leave --show out")
    if "hard" not in modes:
        fix = "leave --show out, or use a run of `unpad train vqa_prune`"
        raise RecipeError("this model removes no patches, so there is nothing to show", where=where, fix=fix)


def _moment(block: int) -> str:
    return "before the first block" if block < 0 else f"after block {block}"


def dimmed(pixels: np.ndarray, stays: np.ndarray, patch: int) -> np.ndarray:
    """Fade the patches that do not stay, (rows, columns) bool, of (height, width, 3) uint8; leave the others alone."""
    stays = stays.repeat(patch, 0).repeat(patch, 1)[:, :, None]
    faded = np.rint(pixels * (1 - DIMMED) + VEIL * DIMMED).astype(np.uint8)
    return np.where(stays, pixels, faded)


def check_request(path: Path, question: str | None) -> None:
    """Refuse a request that cannot be drawn, before anything is computed.

    Raises:
        RecipeError: the file is no SVG, or there is no question.
    """
    if path.suffix != ".svg":
        what = "--show writes SVG, which browsers and office programs open"
        raise RecipeError(what, where=str(path), fix="let the name end in .svg")
    if question is None:
        what = "--show draws which patches were kept for an answer, and nothing is asked"
        raise RecipeError(what, where="--question", fix='add --question "TEXT"')


def write_pictures(shown: Sequence[Kept], path: Path) -> list[str]:
    """Write one picture to an SVG file, several beside each other: OUT-1.svg, OUT-2.svg ...

    Returns:
        A line per file.

    Raises:
        DiskError: a file cannot be written.
    """
    lines = []
    for place, picture in enumerate(shown, 1):
        file = path if len(shown) == 1 else path.with_name(f"{path.stem}-{place}{path.suffix}")
        storage.write_atomic(file, to_svg(picture))
        lines.append(f"{file} written")
    return lines


# --------------------------------------------------------------------------- drawing


def to_svg(shown: Kept) -> str:
    """Panels side by side, with question and answer below."""
    width, height = shown.size
    panels, body = shown.panels, ""
    for place, (title, picture) in enumerate(panels):
        x = GAP + (width + GAP) // len(panels) * place
        sides = f'width="{shown.scale * picture.shape[1]}" height="{shown.scale * picture.shape[0]}"'
        body += f'<text x="{x}" y="{GAP + SIZE}" {_style(SOFT, SIZE - 2)}>{escape(title)}</text>'
        body += f'<image x="{x}" y="{GAP + LINE}" {sides} style="image-rendering:pixelated" '
        body += f'href="{data_url(picture)}"/>'
    for place, (text, colour) in enumerate(shown.lines):
        y = GAP + height + GAP // 2 + LINE * place + SIZE
        body += f'<text x="{GAP}" y="{y}" {_style(colour, SIZE)}>{escape(text)}</text>'
    page = width + 2 * GAP, height + 2 * GAP + LINE * len(shown.lines) + GAP // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {page[0]} {page[1]}" width="{page[0]}" '
        f'height="{page[1]}" font-family="sans-serif"><rect width="100%" height="100%" '
        f'style="fill:{PAPER};stroke:none"/>{body}</svg>\n'
    )


def _style(colour: str, size: int) -> str:
    """CSS style, which the style sheet of an enclosing page does not override."""
    return f'style="fill:{colour};font-size:{size}px"'


ACCURACY = Performance("accuracy", "Accuracy", is_share=True)
CHOICE = Performance(
    "caption_choice_of_20", "Right caption of 20", "caption_choice_chance", "a guess among 20", is_share=True
)
SECTION = FamilySection(performance=(ACCURACY, CHOICE), length_unit="positions")
