"""Accuracy of an image classifier at its images' own sizes, beside unified squares and a forest on small pictures.

    python benchmarks/images.py MANIFEST [--epochs 16] [--seeds 0 1 2] [--out benchmarks/images.md] [key=value ...]

All sides see the same split. The transformer at squares is the same one, its training images go through the same
changes, and it is trained for the same number of real tokens as at native sizes; only native sizes can be drawn anew in
every epoch (images.scale). The forests (scikit-learn, extra `bench`) read 32 x 32 pixels, colours on white or opacity
alone. Other words change the recipe of all transformers, such as images.flip=0.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from measure import describe_machine
from rich.console import Console

from unpad.data.images import ImageData
from unpad.data.pixels.decode import decode
from unpad.data.pixels.patches import resize
from unpad.data.sources.images import read_bytes
from unpad.data.sources.split import Split
from unpad.evaluation.run import evaluate_run
from unpad.recipes.file import load_recipe
from unpad.storage import write_atomic
from unpad.training.loop import train
from unpad.training.setup import Setup, prepare_setup, resolved

SQUARES = (32, 64, 128)
FOREST_SIDE = 32  # pixels
FOREST_TREES = 500
FORESTS = {"random forest on 32 x 32 colours": slice(3), "random forest on 32 x 32, opacity alone": slice(3, 4)}


def open_setup(overrides: list[str]) -> Setup:
    return prepare_setup(resolved(load_recipe("images", overrides)), Path(), None)


def tokens_of(setup: Setup) -> int:
    """Patches of one epoch."""
    return int(setup.data.table.positions[setup.data.table.split == Split.TRAIN].sum())


def transformer(overrides: list[str]) -> float:
    """Held-out accuracy of one training run."""
    with tempfile.TemporaryDirectory() as folder:
        train("images", Path(folder) / "run", overrides, console=Console(quiet=True))
        return evaluate_run(str(Path(folder) / "run"))[0]["accuracy"].value


def forest(data: ImageData, seed: int, channels: slice) -> float:
    """Held-out accuracy of a random forest on small squares, of which it reads some channels."""
    from sklearn.ensemble import RandomForestClassifier

    def pixels(index: int) -> np.ndarray:
        picture = decode(read_bytes(data.examples[index]), opacity=True).pixels
        return resize(picture, FOREST_SIDE, FOREST_SIDE)[:, :, channels].reshape(-1)

    features = np.stack([pixels(index) for index in range(len(data.examples))])
    trained, held = data.table.split == Split.TRAIN, data.table.split == Split.HOLDOUT
    model = RandomForestClassifier(FOREST_TREES, n_jobs=-1, random_state=seed).fit(
        features[trained], data.labels[trained]
    )
    return float((model.predict(features[held]) == data.labels[held]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument(
        "--epochs", type=int, help="of the native side, default the recipe's; the others get as many tokens"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--squares", type=int, nargs="*", default=list(SQUARES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images.md")
    options = parser.parse_intermixed_args()
    shared = [f"data.images={options.manifest}", *options.overrides]
    native = open_setup(shared)
    assert isinstance(native.data, ImageData)
    options.epochs = options.epochs or native.recipe.train.max_epochs
    steps = -(-tokens_of(native) * options.epochs // native.recipe.plan.tokens_per_step)
    sides = {"native sizes": shared}
    sides |= {
        f"squares of {side}": [*shared, "images.size=square", f"images.square={side}"] for side in options.squares
    }
    rows: dict[str, list[float]] = {
        name: [forest(native.data, seed, channels) for seed in options.seeds] for name, channels in FORESTS.items()
    }
    for name, overrides in sides.items():
        fixed = [f"train.max_steps={steps}", "train.max_epochs=null"]
        rows[name] = [transformer([*overrides, *fixed, f"train.seed={seed}"]) for seed in options.seeds]
        print(name, " ".join(f"{value:.3f}" for value in rows[name]), flush=True)
    write_atomic(options.out, markdown(options, native, steps, rows))


def markdown(options: argparse.Namespace, native: Setup, steps: int, rows: dict[str, list[float]]) -> str:
    machine = describe_machine()
    words = " ".join(["--epochs", str(options.epochs), *options.overrides])
    lines = [
        "# Images at their own sizes",
        "",
        f"    python benchmarks/images.py {options.manifest.name} {words}",
        "",
        f"{machine['cores']} cores of {machine['processor']}; every transformer takes {steps:,} updates of "
        f"{native.recipe.plan.tokens_per_step:,} real tokens.",
        *native.data.lines(),
        "",
        "| side | accuracy, mean | every seed |",
        "|---|---|---|",
        *(f"| {name} | {np.mean(found):.1%} | {' '.join(f'{v:.1%}' for v in found)} |" for name, found in rows.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
