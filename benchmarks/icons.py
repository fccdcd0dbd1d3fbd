"""Categories of icons: trees, one model, the mean of both, averages over sizes, and all sizes as one sequence.

    python benchmarks/icons.py [MANIFEST] [--seeds 0] [--folds 0 1 2 3 4] [--work runs/icons] [--out FILE]

MANIFEST is a JSONL of image and label, of icons named NAME_SIZE.png. Names are divided into five folds by a fixed
seed; every picture is scored by what learnt from the four other folds. Trees are extremely randomised trees of
scikit-learn (extra `bench`) on 32 x 32 pixels of colours and opacity, and the size; one model is the packaged recipe
`images` with its last weights. All sizes as one sequence are one picture, a strip with an icon's sizes below each other
whose patches the same recipe reads together; it begins with the weights of the fold's one model, learns from single
pictures as well, and has the changes of CHOSEN. `--inner` scores names within the training part of the first fold, by
which these were chosen. Differences are taken picture by picture, and their intervals by resampling names. `--work`
keeps runs and answers, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from icons_report import ALL_SIZES, ONE, TREES, Study, markdown, with_means
from PIL import Image
from pruning import ensure_run

from unpad.data.pixels.decode import decode
from unpad.data.pixels.patches import resize
from unpad.errors import SourceError
from unpad.evaluation.run import evaluate_run
from unpad.storage import make_folder, write_atomic
from unpad.trials.bench.measure import describe_machine

ICONS = Path(__file__).parents[2] / "shared" / "data" / "icons" / "images.jsonl"
NUM_FOLDS = 5
FOLD_SEED, INNER_SEED = 0, 1
SIDE = 32  # pixels of what trees read, and of every size in a strip
NUM_TREES = 500
SIZES = (16, 22, 32, 48, 64, 128)  # of a strip, from the top; an icon without one shows its nearest
LAST = ["train.weights=last"]
# A zoom or a large shift of a whole strip would move one size into the place of another.
CHOSEN = ["images.max_tokens=54", "images.shift=0.03", "images.zoom=0", "train.max_epochs=4", "optim.lr=3e-4"]


@dataclass(frozen=True, eq=False)
class Icons:
    """Pictures of a manifest.

    Args:
        folder: of the manifest.
        images: paths of the pictures from there; labels: (num_pictures,) their categories.
        names: (num_pictures,) names of the icons; sizes: (num_pictures,) int64 of the names of the files.
    """

    folder: Path
    images: list[str]
    labels: np.ndarray
    names: np.ndarray
    sizes: np.ndarray

    @property
    def classes(self) -> list[str]:
        return [str(label) for label in np.unique(self.labels)]

    @cached_property
    def icon(self) -> np.ndarray:
        """Number of the icon of each picture, (num_pictures,) int64: one name in two categories is two icons."""
        keys = [f"{label}/{name}" for label, name in zip(self.labels, self.names, strict=True)]
        return np.unique(keys, return_inverse=True)[1]

    @cached_property
    def first(self) -> np.ndarray:
        """The first picture of every icon, (num_icons,) int64."""
        return np.unique(self.icon, return_index=True)[1]


def read_icons(manifest: Path) -> Icons:
    """Read a manifest.

    Raises:
        SourceError: there is none, or a file is not named NAME_SIZE.png.
    """
    if not manifest.is_file():
        raise SourceError("there is no such manifest", where=str(manifest), fix="name a JSONL of image and label")
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    stems = [Path(row["image"]).stem.rpartition("_") for row in rows]
    for row, (name, _, size) in zip(rows, stems, strict=True):
        if not name or not size.isdecimal():
            what, fix = f"the picture {row['image']} has no size in its name", "name pictures NAME_SIZE.png"
            raise SourceError(what, where=str(manifest), fix=fix)
    return Icons(
        manifest.parent,
        [row["image"] for row in rows],
        np.array([row["label"] for row in rows]),
        np.array([name for name, _, _ in stems]),
        np.array([int(size) for _, _, size in stems], np.int64),
    )


def fold_names(names: np.ndarray, num_folds: int, seed: int) -> np.ndarray:
    """Fold of each of these names, equal ones in the same, (num,) int64."""
    unique, of_name = np.unique(names, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(unique)) % num_folds)[of_name]


def strip(icons: Icons, pictures: Sequence[int]) -> Image.Image:
    """The sizes of an icon below each other, each SIDE x SIDE."""
    joined = Image.new("RGBA", (SIDE, SIDE * len(SIZES)))
    for row, size in enumerate(SIZES):
        nearest = min(pictures, key=lambda picture: abs(np.log(icons.sizes[picture] / size)))
        with Image.open(icons.folder / icons.images[nearest]) as picture:
            shown = picture.convert("RGBA").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        joined.paste(shown, (0, row * SIDE))
    return joined


def strip_name(icon: int) -> str:
    return f"strips/{icon}.png"


def prepare(icons: Icons, folder: Path) -> None:
    """Copy the pictures below a folder, beside a strip of every icon."""
    for image in icons.images:
        place = folder / image
        if not place.is_file():
            make_folder(place.parent)
            write_atomic(place, (icons.folder / image).read_bytes())
    make_folder(folder / "strips")
    for icon in range(len(icons.first)):
        if not (folder / strip_name(icon)).is_file():
            strip(icons, np.flatnonzero(icons.icon == icon).tolist()).save(folder / strip_name(icon))


def write_manifest(file: Path, images: Sequence[str], labels: np.ndarray, names: np.ndarray, held: np.ndarray) -> None:
    """Write pictures to learn from and, where `held`, (num,) bool, to score."""
    rows = [
        {"image": image, "label": str(label), "group": str(name), "split": "test" if scored else "train"}
        for image, label, name, scored in zip(images, labels, names, held.tolist(), strict=True)
    ]
    write_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))


def write_strips(file: Path, icons: Icons, held: np.ndarray) -> None:
    """Write the strips of all icons, those to score among them, and the single pictures to learn from beside them."""
    learnt = np.flatnonzero(~held)
    shown = np.concatenate([icons.first, learnt])
    images = [strip_name(icon) for icon in range(len(icons.first))] + [icons.images[picture] for picture in learnt]
    write_manifest(file, images, icons.labels[shown], icons.names[shown], held[shown])


# --------------------------------------------------------------------------- sides


def features(icons: Icons) -> np.ndarray:
    """What trees read of every picture, (num_pictures, SIDE * SIDE * 4 + 1) uint8."""

    def row(image: str) -> np.ndarray:
        pixels = decode((icons.folder / image).read_bytes(), opacity=True).pixels
        return np.append(resize(pixels, SIDE, SIDE).reshape(-1), min(pixels.shape[0], 255)).astype(np.uint8)

    return np.stack([row(image) for image in icons.images])


def trees(read: np.ndarray, icons: Icons, held: np.ndarray, seed: int) -> np.ndarray:
    """Probabilities of the pictures that are held out, (held.sum(), num_classes)."""
    from sklearn.ensemble import ExtraTreesClassifier

    model = ExtraTreesClassifier(NUM_TREES, random_state=seed).fit(read[~held], icons.labels[~held])
    assert model.classes_.tolist() == icons.classes, "every fold has pictures of every category"
    found: np.ndarray = model.predict_proba(read[held])
    return found


def model(manifest: Path, run: Path, overrides: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Train the recipe `images`, and give the probabilities of the rows that are held out, (num_held, num_classes)."""
    rows = run.with_name(run.name + ".parquet")
    if not rows.is_file():
        ensure_run("images", run, [f"data.images={manifest}", *LAST, *overrides])
        evaluate_run(str(run), part="test", rows=rows)
    table = pq.read_table(rows)
    number = np.array([int(where.rpartition(":")[2]) for where in table["where"].to_pylist()])
    found = np.column_stack([table[f"probability_{name}"].to_numpy() for name in classes])
    return found[np.argsort(number)]  # in the order of the manifest


def of_pictures(icons: Icons, folder: Path, held: np.ndarray, seed: int, read: np.ndarray) -> dict[str, np.ndarray]:
    """Probabilities of the pictures that are held out by every side, (held.sum(), num_classes) each.

    Args:
        folder: of the fold, below that of the pictures.
        read: of `features`.
    """
    make_folder(folder)
    known = folder / f"trees-{seed}.npy"
    if not known.is_file():
        content = io.BytesIO()
        np.save(content, trees(read, icons, held, seed))
        write_atomic(known, content.getvalue())
    found = {TREES: np.load(known)}
    singles, joined = folder.parent / f"{folder.name}.jsonl", folder.parent / f"{folder.name}-strips.jsonl"
    write_manifest(singles, icons.images, icons.labels, icons.names, held)
    one, fixed = folder / f"one-{seed}", [f"train.seed={seed}"]
    found[ONE] = model(singles, one, fixed, icons.classes)
    write_strips(joined, icons, held)
    whole = np.full((len(icons.first), len(icons.classes)), np.nan)
    begun = [f"train.init_from={one}", *CHOSEN, *fixed]
    whole[held[icons.first]] = model(joined, folder / f"all-{seed}", begun, icons.classes)
    found[ALL_SIZES] = whole[icons.icon[held]]
    return found


# --------------------------------------------------------------------------- the study


def run_study(icons: Icons, fold: np.ndarray, folds: Sequence[int], seeds: Sequence[int], work: Path) -> Study:
    """Train and score every side on some folds.

    Args:
        fold: (num_pictures,) the fold of each picture.
        work: folder that keeps pictures, runs and answers.
    """
    prepare(icons, work)
    read = features(icons)
    order = np.concatenate([np.flatnonzero(fold == number) for number in folds])
    found: dict[str, list[list[np.ndarray]]] = defaultdict(list)  # of every side, by seed and fold
    for seed in seeds:
        turns: dict[str, list[np.ndarray]] = defaultdict(list)
        for number in folds:
            held = fold == number
            probabilities = of_pictures(icons, work / f"fold-{number}", held, seed, read)
            for side, values in with_means(probabilities, icons.icon[held]).items():
                turns[side].append(np.array(icons.classes)[values.argmax(1)] == icons.labels[held])
            told = ", ".join(f"{side} {values[-1].mean():.1%}" for side, values in turns.items())
            print(f"seed {seed}, fold {number}: {told}", flush=True)
        for side, parts in turns.items():
            found[side].append(parts)
    right = {side: np.stack([np.concatenate(parts) for parts in by_seed]) for side, by_seed in found.items()}
    chosen_on = np.isin(icons.names, inner_names(icons))
    machine = describe_machine()
    return Study(right, icons.names[order], icons.icon[order], fold[order], chosen_on[order], list(seeds), machine)


def inner(icons: Icons) -> tuple[Icons, np.ndarray]:
    """Pictures to learn from of the first fold, and whether settings are chosen by each, (num_pictures,) bool."""
    learnt = np.flatnonzero(fold_names(icons.names, NUM_FOLDS, FOLD_SEED) != 0)
    images = [icons.images[picture] for picture in learnt.tolist()]
    within = Icons(icons.folder, images, icons.labels[learnt], icons.names[learnt], icons.sizes[learnt])
    names = np.unique(within.names)
    drawn = np.random.default_rng(INNER_SEED).permutation(len(names))[: len(names) // NUM_FOLDS]
    return within, np.isin(within.names, names[drawn])


def inner_names(icons: Icons) -> np.ndarray:
    """Names by which settings are chosen, (num_names,)."""
    within, chosen = inner(icons)
    return np.unique(within.names[chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, nargs="?", default=ICONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folds", type=int, nargs="+", choices=range(NUM_FOLDS), default=list(range(NUM_FOLDS)))
    parser.add_argument("--inner", action="store_true", help="score only names within the training part of fold 0")
    parser.add_argument("--work", type=Path, default=Path("runs/icons"), help="keeps pictures, runs and answers")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    icons, work = read_icons(options.manifest), options.work.resolve()
    if options.inner:
        within, chosen = inner(icons)
        run_study(within, np.where(chosen, 0, 1), [0], options.seeds, work / "inner")
        return
    study = run_study(icons, fold_names(icons.names, NUM_FOLDS, FOLD_SEED), options.folds, options.seeds, work)
    words = ["--seeds", *options.seeds, "--folds", *options.folds]
    command = " ".join(map(str, ["python benchmarks/icons.py", options.manifest.name, *words]))
    write_atomic(options.out, markdown(study, command))
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
