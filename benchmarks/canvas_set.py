"""Canvases full of icons, drawn by code with a seed, and questions that can be answered only where they ask.

A canvas is 128 x 128 pixels: 8 x 8 cells, each with an icon of 16 pixels (resized where an icon has no such file), so
that patches of 8 pixels give 4 visual tokens an icon and 256 a canvas. Cells are named as on a chessboard: a letter for
the column, a digit for the row from the top, as one word. Questions are of two kinds:

    F3                  one hop: what is in column F, row 3?
    right folder        two hops: what is right of the folder? (or `below`); the canvas shows one folder alone

The answer is what the icon looks like, and not its name: icons are split by name, and nobody can know the name of an
icon never seen. A look is a cluster of the colours of the icons of training, with the name of the one in its middle; an
icon of any part belongs to the nearest look, and one that lies between two takes no part. Of all clusters those are
looks whose icons of training resemble one another most. So an icon never seen has a right answer, and a canvas of such
icons asks what can be learnt from others. Names have three parts: of training, whose icons are drawn a little
differently in every cell; one to choose settings by; and one for the study alone.

A third of the looks occur once on a canvas of the study, the others equally often, so that no guess is much better than
another; which third is drawn for every canvas. Smaller canvases, which only teach, have more looks that occur once, and
so more to say of two hops. A caption is a list of facts of one kind, `F3 folder B2 star`; its first place is
the question, so that captions and questions read alike, and a question is a caption that ends with its first fact.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.storage import write_atomic

Kind = Literal["one", "two"]
KINDS: tuple[Kind, ...] = ("one", "two")
ICON = 16  # pixels a side
COARSE = 8  # blocks a side whose mean colours a look is made of
SEED = 34  # of the split and of the looks, which are the same for every run
SHARES = {Split.HOLDOUT: 0.15, Split.TEST: 0.25}  # of names
NUM_CLUSTERS = 32
NUM_LOOKS = 12
FEWEST = 8  # names of training of a look; 2 of each other part
MARGIN = 1.2  # distance to the second nearest look over that to the nearest
STEPS = {"right": (0, 1), "below": (1, 0)}
SHIFT = 1  # pixels an icon of training may lie beside its place
NOISE = 6.0  # standard deviation, of 255


@dataclass(frozen=True)
class Icons:
    """The icons that canvases are drawn with.

    Args:
        pixels: (num_icons, 16, 16, 3) uint8, on white.
        names: (num_icons,) their names; an icon of several sizes is there several times.
        looks: (num_icons,) int64, number of the look of each.
        parts: (num_icons,) int8, `Split` of the name of each.
        words: name of every look, one word each.
    """

    pixels: np.ndarray
    names: np.ndarray
    looks: np.ndarray
    parts: np.ndarray
    words: list[str]

    def of_look(self, part: Split) -> list[np.ndarray]:
        """Icons of every look in one part, ids."""
        return [np.flatnonzero((self.looks == look) & (self.parts == part)) for look in range(len(self.words))]


@dataclass(frozen=True)
class Canvas:
    """Icons of the cells, (side, side) int64 ids, and their looks, (side, side) int64."""

    icons: np.ndarray
    looks: np.ndarray

    def pixels(self, icons: Icons, rng: np.random.Generator | None = None) -> np.ndarray:
        """(16 * side, 16 * side, 3) uint8; with `rng` every icon is drawn a little differently."""
        side = len(self.icons)
        cells = icons.pixels[self.icons]  # (side, side, 16, 16, 3)
        if rng is not None:
            cells = vary(cells.reshape(-1, ICON, ICON, 3), rng).reshape(cells.shape)
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
    """Read the icons of a manifest of image, every size of each, and give each its look.

    Raises:
        SourceError: the manifest is missing, or its icons have too few looks.
    """
    if not manifest.is_file():
        raise SourceError("there is no such manifest", where=str(manifest), fix="name a JSONL of icons NAME_SIZE.png")
    images = sorted(json.loads(line)["image"] for line in manifest.read_text(encoding="utf-8").splitlines())
    names = np.array([Path(image).stem.rpartition("_")[0] for image in images])
    return choose_looks(np.stack([_read_icon(manifest.parent / image) for image in images]), names)


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
        pixels: (num, 16, 16, 3) uint8; names: (num,).

    Raises:
        SourceError: there are fewer looks of enough icons.
    """
    rng = np.random.default_rng(SEED)
    parts = _split(names, rng)
    training = parts == Split.TRAIN
    block = ICON // COARSE
    blocks = pixels.reshape(-1, COARSE, block, COARSE, block, 3) / 255
    colours = blocks.mean((2, 4)).reshape(len(names), -1)  # (num, COARSE * COARSE * 3)
    centres = _clusters(colours[training], num_clusters, rng)
    distances = np.linalg.norm(colours[:, None] - centres, axis=2)  # (num, num_clusters)
    nearest, ordered = distances.argmin(1), np.sort(distances, 1)
    clear = ordered[:, 1] >= MARGIN * ordered[:, 0]
    enough = np.ones(num_clusters, np.bool_)
    for part in (Split.TRAIN, *SHARES):
        there = clear & (parts == part)
        of_part = [len(np.unique(names[there & (nearest == look)])) for look in range(num_clusters)]
        enough &= np.array(of_part) >= (FEWEST if part == Split.TRAIN else 2)
    order = np.argsort(-_told_apart(pixels, names, nearest, clear & training, num_clusters), kind="stable")
    chosen = [look for look in order.tolist() if enough[look]][:num_looks]
    if len(chosen) < num_looks:
        raise SourceError(f"the icons have {len(chosen)} looks, expected {num_looks}", fix="name a larger set of icons")
    words = _words([_by_distance(names, distances[:, look], clear & training & (nearest == look)) for look in chosen])
    number = np.full(num_clusters, -1)
    number[chosen] = np.arange(num_looks)
    used = clear & (number[nearest] >= 0)
    return Icons(pixels[used], names[used], number[nearest][used], parts[used], words)


def _split(names: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Part of every icon, (num,) int8; all of one name are in the same."""
    distinct, of = np.unique(names, return_inverse=True)
    parts = np.full(len(distinct), Split.TRAIN, np.int8)
    order = rng.permutation(len(distinct))
    for part, share in SHARES.items():
        taken, order = np.split(order, [round(share * len(distinct))])
        parts[taken] = part
    return parts[of]


def vary(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw icons a little differently: beside their place, with noise; (num, 16, 16, 3) uint8."""
    num = len(pixels)
    wide = np.pad(pixels, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)), constant_values=255)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (ICON, ICON), (1, 2))  # (num, places, places, 3, 16, 16)
    down, aside = rng.integers(2 * SHIFT + 1, size=(2, num))
    moved = windows[np.arange(num), down, aside].transpose(0, 2, 3, 1)
    return (moved + rng.normal(0, NOISE, moved.shape)).clip(0, 255).astype(np.uint8)


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


def _told_apart(pixels: np.ndarray, names: np.ndarray, nearest: np.ndarray, among: np.ndarray, num: int) -> np.ndarray:
    """Share of the icons of every cluster, of those `among`, whose nearest of another name is in the same, (num,)."""
    ids = np.flatnonzero(among)
    values = pixels[ids].reshape(len(ids), -1) / 255
    squares = (values**2).sum(1)
    distances = squares[:, None] + squares - 2 * values @ values.T
    distances[names[ids][:, None] == names[ids]] = np.inf
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


def draw_canvas(icons: Sequence[np.ndarray], side: int, most_once: int, rng: np.random.Generator) -> Canvas:
    """Draw one canvas; some looks occur once, on up to half of the cells, and the others equally often on the rest.

    Args:
        icons: ids of the icons of every look.
        most_once: how many looks occur once at most.
    """
    order = rng.permutation(len(icons))
    num_once = min(most_once, side * side // 2)
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
        train, held_out: canvases of training, and of each other part.
        asked: questions of each kind about a canvas.
        teaches: the study asks nothing of it.
        times: how much larger than its file an icon is drawn, a side.
    """

    side: int
    train: int
    held_out: int
    asked: int
    teaches: bool = False
    times: int = 1


def write_set(icons: Icons, size: Size, kinds: Sequence[Kind], folder: Path) -> None:
    """Write `captions.jsonl` and `questions.jsonl` with their canvases, unless they are there.

    Rows of both have image, question, answer and split. Those of questions have besides `kind`, `cells`, and `guess`,
    the look that the canvas shows most often.

    Raises:
        SourceError: the set that is there has another size.
    """
    questions, captions, note = folder / "questions.jsonl", folder / "captions.jsonl", folder / "size.json"
    asked_for = json.dumps([asdict(size), list(kinds)])
    if questions.is_file():
        if not note.is_file() or note.read_text(encoding="utf-8") != asked_for:
            raise SourceError("this set has another size", where=str(folder), fix="name another folder for the study")
        return
    (folder / "canvases").mkdir(parents=True, exist_ok=True)
    rng, num_looks = np.random.default_rng(SEED), len(icons.words)
    most_once = num_looks - 1 if size.teaches else num_looks // 3
    asked: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    parts = [Split.TRAIN] * size.train + [part for part in SHARES for _ in range(size.held_out)]
    for number, part in enumerate(parts):
        canvas = draw_canvas(icons.of_look(part), size.side, most_once, rng)
        image = f"canvases/c{number:05d}.png"
        shown = canvas.pixels(icons, rng if part == Split.TRAIN else None)
        Image.fromarray(shown.repeat(size.times, 0).repeat(size.times, 1)).save(folder / image, compress_level=1)
        shared = {"image": image, "split": part.name.lower()}
        guess = icons.words[int(np.bincount(canvas.looks.ravel()).argmax())]
        for kind in kinds:
            found = facts(canvas, icons.words, kind)
            order = [found[i] for i in rng.permutation(len(found))]
            if not order:
                continue
            told.append(shared | caption(order))
            asked += [shared | question(fact) | {"guess": guess} for fact in order[: size.asked]]
    write_atomic(captions, "".join(json.dumps(row) + "\n" for row in told))
    write_atomic(note, asked_for)
    write_atomic(questions, "".join(json.dumps(row) + "\n" for row in asked))


def caption(told: Sequence[Fact]) -> dict[str, str]:
    """A row with facts, which asks for the first and answers with all."""
    first, *others = told
    rest = [f"{fact.place} {fact.answer}" for fact in others]
    return {"question": first.place, "answer": " ".join([first.answer, *rest])}


def question(fact: Fact) -> dict[str, Any]:
    return {"question": fact.place, "answer": fact.answer, "kind": fact.kind, "cells": fact.cells}
