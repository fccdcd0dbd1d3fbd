"""Canvases full of icons, drawn by code with a seed, and questions that can be answered only where they ask.

A canvas is 128 x 128 pixels: 8 x 8 cells, each with an icon of 16 pixels (resized where an icon has no such file), so
that patches of 8 pixels give 4 visual tokens an icon and 256 a canvas. Cells are named as on a chessboard: a letter for
the column, a digit for the row from the top, as one word. Questions are of two kinds:

    F3                  one hop: what is in column F, row 3?
    right folder        two hops: what is right of the folder? (or `below`); the canvas shows one folder alone

The answer is what the icon looks like, and not its name: icons are split by name, and nobody can know the name of an
icon never seen. A look is a cluster of the colours of the icons of training, with the name of the one in its middle; an
icon of either part belongs to the nearest look, and one that lies between two takes no part. Of all clusters those are
looks whose icons of training resemble one another most. So a held-out icon has a right answer, and a canvas of held-out
icons asks what can be learnt from others.

A third of the looks occur once on a canvas, the others equally often, so that no guess is much better than another;
which third is drawn for every canvas. A caption is a list of facts of one kind, `F3 folder B2 star`; its first place is
the question, so that captions and questions read alike, and a question is a caption that ends with its first fact.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from unpad.errors import SourceError
from unpad.storage import write_atomic

Kind = Literal["one", "two"]
KINDS: tuple[Kind, ...] = ("one", "two")
ICON = 16  # pixels a side
COARSE = 8  # blocks a side whose mean colours a look is made of
SEED = 33  # of the split and of the looks, which are the same for every run
HELD_OUT = 0.25  # share of names
NUM_CLUSTERS = 48
NUM_LOOKS = 12
FEWEST = 8  # icons of training of a look; 2 held out
MARGIN = 1.1  # distance to the second nearest look over that to the nearest
STEPS = {"right": (0, 1), "below": (1, 0)}


@dataclass(frozen=True)
class Icons:
    """The icons that canvases are drawn with.

    Args:
        pixels: (num_icons, 16, 16, 3) uint8, on white.
        names: (num_icons,) their names.
        looks: (num_icons,) int64, number of the look of each.
        held_out: (num_icons,) bool, True for those that training never shows.
        words: name of every look, one word each.
    """

    pixels: np.ndarray
    names: np.ndarray
    looks: np.ndarray
    held_out: np.ndarray
    words: list[str]

    def of_look(self, held_out: bool) -> list[np.ndarray]:
        """Icons of every look in one part, ids."""
        return [np.flatnonzero((self.looks == look) & (self.held_out == held_out)) for look in range(len(self.words))]


@dataclass(frozen=True)
class Canvas:
    """Icons of the cells, (side, side) int64 ids, and their looks, (side, side) int64."""

    icons: np.ndarray
    looks: np.ndarray

    def pixels(self, icons: Icons) -> np.ndarray:
        """(16 * side, 16 * side, 3) uint8."""
        side = len(self.icons)
        cells = icons.pixels[self.icons]  # (side, side, 16, 16, 3)
        return cells.transpose(0, 2, 1, 3, 4).reshape(side * ICON, side * ICON, 3)


@dataclass(frozen=True)
class Fact:
    """One thing that a canvas shows.

    Args:
        place: words that ask for it.
        answer: a look's word.
        cells: (row, column) of every cell that the answer depends on, that of the answer last.
    """

    kind: Kind
    place: str
    answer: str
    cells: tuple[tuple[int, int], ...]


def cell_name(row: int, column: int) -> str:
    return f"{chr(ord('A') + column)}{row + 1}"


def cell_names(side: int) -> list[str]:
    return [cell_name(row, column) for row, column in np.ndindex(side, side)]


# --------------------------------------------------------------------------- icons


def read_icons(manifest: Path) -> Icons:
    """Read the icons of a manifest of image, one per name in its smallest size, and give each its look.

    Raises:
        SourceError: the manifest is missing, or its icons have too few looks.
    """
    if not manifest.is_file():
        raise SourceError("there is no such manifest", where=str(manifest), fix="name a JSONL of icons NAME_SIZE.png")
    smallest: dict[str, tuple[int, str]] = {}
    for line in manifest.read_text(encoding="utf-8").splitlines():
        image = json.loads(line)["image"]
        name, _, size = Path(image).stem.rpartition("_")
        smallest[name] = min(smallest.get(name, (int(size), image)), (int(size), image))
    names = np.array(sorted(smallest))
    pixels = np.stack([_read_icon(manifest.parent / smallest[name][1]) for name in names.tolist()])
    return choose_looks(pixels, names)


def _read_icon(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        shown = image.convert("RGBA")
    ground = Image.new("RGBA", shown.size, "white")
    ground.alpha_composite(shown)
    return np.asarray(ground.convert("RGB").resize((ICON, ICON), Image.Resampling.BOX))


def choose_looks(
    pixels: np.ndarray, names: np.ndarray, num_clusters: int = NUM_CLUSTERS, num_looks: int = NUM_LOOKS
) -> Icons:
    """Split icons by name, find the looks of those of training, and keep the icons that clearly have one.

    Args:
        pixels: (num, 16, 16, 3) uint8; names: (num,), each once.

    Raises:
        SourceError: there are fewer looks of enough icons.
    """
    rng = np.random.default_rng(SEED)
    held_out = np.zeros(len(names), np.bool_)
    held_out[rng.permutation(len(names))[: round(HELD_OUT * len(names))]] = True
    block = ICON // COARSE
    blocks = pixels.reshape(-1, COARSE, block, COARSE, block, 3) / 255
    colours = blocks.mean((2, 4)).reshape(len(names), -1)  # (num, COARSE * COARSE * 3)
    centres = _clusters(colours[~held_out], num_clusters, rng)
    distances = np.linalg.norm(colours[:, None] - centres, axis=2)  # (num, num_clusters)
    nearest, ordered = distances.argmin(1), np.sort(distances, 1)
    clear = ordered[:, 1] >= MARGIN * ordered[:, 0]
    trained = np.bincount(nearest[clear & ~held_out], minlength=num_clusters)
    unseen = np.bincount(nearest[clear & held_out], minlength=num_clusters)
    order = np.argsort(-_told_apart(pixels, nearest, clear & ~held_out, num_clusters), kind="stable")
    chosen = [look for look in order.tolist() if trained[look] >= FEWEST and unseen[look] >= 2][:num_looks]
    if len(chosen) < num_looks:
        raise SourceError(f"the icons have {len(chosen)} looks, expected {num_looks}", fix="name a larger set of icons")
    words = _words([_by_distance(names, distances[:, look], clear & ~held_out & (nearest == look)) for look in chosen])
    number = np.full(num_clusters, -1)
    number[chosen] = np.arange(num_looks)
    used = clear & (number[nearest] >= 0)
    return Icons(pixels[used], names[used], number[nearest][used], held_out[used], words)


def _clusters(colours: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Centres (num, channels) by k-means, begun far apart (Arthur and Vassilvitskii 2007, "k-means++")."""
    centres = colours[rng.integers(len(colours))][None]
    while len(centres) < num:
        away = ((colours[:, None] - centres) ** 2).sum(2).min(1)
        centres = np.concatenate([centres, colours[rng.choice(len(colours), p=away / away.sum())][None]])
    for _ in range(50):
        nearest = ((colours[:, None] - centres) ** 2).sum(2).argmin(1)
        centres = np.stack([colours[nearest == i].mean(0) if (nearest == i).any() else centres[i] for i in range(num)])
    return centres


def _told_apart(pixels: np.ndarray, nearest: np.ndarray, among: np.ndarray, num: int) -> np.ndarray:
    """Share of the icons of every cluster, of those `among`, whose nearest neighbour is of the same cluster, (num,)."""
    ids = np.flatnonzero(among)
    values = pixels[ids].reshape(len(ids), -1) / 255
    squares = (values**2).sum(1)
    distances = squares[:, None] + squares - 2 * values @ values.T
    np.fill_diagonal(distances, np.inf)
    same = nearest[ids] == nearest[ids[distances.argmin(1)]]
    return np.bincount(nearest[ids], same, num) / np.maximum(np.bincount(nearest[ids], minlength=num), 1)


def _by_distance(names: np.ndarray, distances: np.ndarray, among: np.ndarray) -> list[str]:
    """Names of these icons, the nearest first."""
    ids = np.flatnonzero(among)
    return names[ids[np.argsort(distances[ids], kind="stable")]].tolist()


def _words(names: Sequence[Sequence[str]]) -> list[str]:
    """One word per look: the longest of the name of its first icon, or of the next if another look has it."""
    words: list[str] = []
    for of_look in names:
        parts = [part for name in of_look for part in sorted(name.split("-"), key=len, reverse=True)]
        free = [part for part in parts if part.isascii() and part.isalpha() and part not in (*words, *STEPS)]
        words.append(free[0])
    return words


# --------------------------------------------------------------------------- canvases


def draw_canvas(icons: Sequence[np.ndarray], side: int, rng: np.random.Generator) -> Canvas:
    """Draw one canvas; a third of the looks occur once, and the others fill the rest equally often.

    Args:
        icons: ids of the icons of every look.
    """
    order = rng.permutation(len(icons))
    num_once = min(len(icons) // 3, side * side // 4)
    once, often = order[:num_once], order[num_once:]
    looks = np.concatenate([once, np.resize(often, side * side - num_once)])
    looks = rng.permutation(looks).reshape(side, side)
    shown = np.array([rng.choice(icons[look]) for look in looks.ravel()]).reshape(side, side)
    return Canvas(shown, looks)


def facts(canvas: Canvas, words: Sequence[str], kind: Kind) -> list[Fact]:
    """Every question of one kind about a canvas, in reading order."""
    side, found = len(canvas.looks), []
    counts = Counter(canvas.looks.ravel().tolist())
    for row, column in np.ndindex(side, side):
        look = int(canvas.looks[row, column])
        if kind == "one":
            found.append(Fact("one", cell_name(row, column), words[look], ((row, column),)))
            continue
        for step, (down, aside) in STEPS.items():
            there = row + down, column + aside
            if counts[look] == 1 and max(there) < side:
                answer = words[int(canvas.looks[there])]
                found.append(Fact("two", f"{step} {words[look]}", answer, ((row, column), there)))
    return found


# --------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Size:
    """Sizes of a set.

    Args:
        side: cells a side.
        train, held_out: canvases.
        asked: questions of each kind about a canvas.
    """

    side: int
    train: int
    held_out: int
    asked: int


def write_set(icons: Icons, size: Size, kinds: Sequence[Kind], folder: Path) -> None:
    """Write `captions.jsonl` and `questions.jsonl` with their canvases, unless they are there.

    Rows of both have image, question, answer and split. Those of questions have besides `kind`, `cells`, and `guess`,
    the look that the canvas shows most often.
    """
    questions, captions = folder / "questions.jsonl", folder / "captions.jsonl"
    if questions.is_file():
        return
    (folder / "canvases").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    asked: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    for number in range(size.train + size.held_out):
        held_out = number >= size.train
        canvas = draw_canvas(icons.of_look(held_out), size.side, rng)
        image = f"canvases/c{number:05d}.png"
        Image.fromarray(canvas.pixels(icons)).save(folder / image, compress_level=1)
        shared = {"image": image, "split": "val" if held_out else "train"}
        guess = icons.words[int(np.bincount(canvas.looks.ravel()).argmax())]
        for kind in kinds:
            found = facts(canvas, icons.words, kind)
            order = [found[i] for i in rng.permutation(len(found))]
            if not order:
                continue
            told.append(shared | caption(order))
            asked += [shared | question(fact) | {"guess": guess} for fact in order[: size.asked]]
    write_atomic(captions, "".join(json.dumps(row) + "\n" for row in told))
    write_atomic(questions, "".join(json.dumps(row) + "\n" for row in asked))


def caption(told: Sequence[Fact]) -> dict[str, str]:
    """A row with facts, which asks for the first and answers with all."""
    first, *others = told
    rest = [f"{fact.place} {fact.answer}" for fact in others]
    return {"question": first.place, "answer": " ".join([first.answer, *rest])}


def question(fact: Fact) -> dict[str, Any]:
    return {"question": fact.place, "answer": fact.answer, "kind": fact.kind, "cells": fact.cells}
